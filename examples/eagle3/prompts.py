"""Prompts to train a drafter on.

Three rounds. The first asks for texts, code, JSON and sums out of nothing, put together at random from parts. The
second gives the model one of its own answers of the first round as a document, to summarise, translate, rewrite or
search: drafters have to copy too. The third is `requests.jsonl`: requests and documents as demanding people write them,
none of them made from parts. No prompt is one that breakeven measures with.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["first_round", "second_round", "third_round"]

REQUESTS = Path(__file__).with_name("requests.jsonl")

TOPICS = (
    "photosynthesis;tides;black holes;coral reefs;volcanoes;earthquakes;glaciers;the water cycle;lightning;auroras;"
    "bees;octopuses;migrating birds;wolves;mushrooms;oak trees;seeds;composting;soil;honey;bread;cheese;olive oil;"
    "coffee;tea;chocolate;pasta;soup stock;fermentation;spices;the human heart;the immune system;vaccines;sleep;"
    "memory;vitamins;bones;the eye;hearing;antibiotics;DNA;evolution;dinosaurs;fossils;the Roman Empire;"
    "the printing press;the Silk Road;medieval guilds;the French Revolution;the steam engine;railways;"
    "the telegraph;lighthouses;canals;bridges;windmills;cathedrals;clocks;maps;compasses;sailing ships;bicycles;"
    "electric cars;aeroplanes;rockets;satellites;Mars;the Moon;telescopes;radio;batteries;solar panels;"
    "wind turbines;nuclear power;magnets;semiconductors;lasers;microscopes;3D printing;robots;drones;databases;"
    "compilers;operating systems;hash tables;binary search;recursion;sorting;caching;load balancers;message queues;"
    "unit tests;code review;version control;containers;encryption;passwords;web browsers;search engines;"
    "neural networks;language models;spreadsheets;e-mail;inflation;interest rates;mortgages;taxes;insurance;"
    "pensions;budgeting;auctions;supply and demand;trade unions;start-ups;negotiation;job interviews;"
    "public speaking;meetings;remote work;time management;habits;friendship;parenting;school lunches;"
    "learning a language;chess;the violin;jazz;choirs;oil painting;pottery;photography;theatre;poetry;crime novels;"
    "libraries;museums;football;swimming;climbing;running a marathon;yoga;gardening;houseplants;dogs;cats;horses;"
    "beekeeping;fishing;camping;hiking;train journeys;Lisbon;Kyoto;Cairo;Edinburgh;Buenos Aires;Iceland;the Sahara;"
    "the Amazon;the Alps;city parks;trams;recycling;plastic waste;drinking water;floods;droughts;elections;juries;"
    "human rights;the United Nations;calendars;prime numbers;probability;fractions;geometry;statistics;"
    "logic puzzles;optical illusions;dreams;humour;superstitions"
).split(";")
PEOPLE = (
    "a retired lighthouse keeper;a young carpenter;a librarian who can't sleep;two sisters with a boat;"
    "an old clockmaker;a postman in the mountains;a nurse on the night shift;a tired detective;"
    "a boy who collects maps;a robot gardener;a baker and her apprentice;a fox who steals shoes;"
    "a pilot lost in fog;a violinist with one string;a shy dragon;the last ferryman;a chess player and a crow;"
    "a girl who paints doors;a cook on a ship;a king without a crown;a teacher on an island;"
    "a dog that waits at the station;a watchman in a museum;a beekeeper in winter;a lost astronaut"
).split(";")
READERS = (
    "a ten-year-old;a beginner;a busy manager;my grandmother;a new colleague;a sceptical friend;students;"
    "a committee;customers;a general audience;an expert from another field;travellers"
).split(";")
FUNCTIONS = (
    "reverses the words of a sentence;checks whether a number is prime;merges two sorted lists;"
    "counts the words of a file;removes duplicates but keeps the order;finds the longest common prefix;"
    "does a binary search;sorts by insertion;parses a date;validates an e-mail address;"
    "converts between temperature scales;computes Fibonacci numbers with a cache;flattens nested lists;"
    "transposes a matrix;reads a CSV file and sums a column;groups records by a key;retries a call;"
    "writes a log line with a time stamp;checks balanced brackets;implements a stack;"
    "implements a queue with two stacks;implements a linked list;implements an LRU cache;walks a directory tree;"
    "finds the two largest numbers;rotates an array;computes the greatest common divisor;"
    "converts a number to Roman numerals;simulates dice;shuffles a deck of cards;formats a table of text;"
    "computes a running average;compares two versions like 1.10.2;counts the letters of a text;"
    "splits a list into chunks;limits the rate of calls;reads settings from JSON"
).split(";")
LANGUAGES = (
    "Python",
    "Python",
    "Python",
    "Python",
    "JavaScript",
    "TypeScript",
    "Java",
    "Go",
    "Rust",
    "C",
    "C++",
    "Bash",
    "SQL",
)
RECORDS = (
    "books:title,author,year,pages;films:title,director,year,rating;employees:name,role,salary,office;"
    "products:sku,name,price,in_stock;cities:name,country,population;recipes:name,servings,minutes,ingredients;"
    "students:name,grade,courses;cars:make,model,year,colour;orders:id,customer,items,total;"
    "animals:species,habitat,diet;songs:title,artist,seconds;users:username,email,active,roles;"
    "planets:name,radius_km,moons;events:title,date,place;servers:host,port,status,load;"
    "hotels:name,stars,rooms,city;invoices:number,date,lines,total;trains:number,from,to,departs;"
    "sensors:id,unit,value,taken_at;tickets:id,priority,status,assignee;plants:name,height_cm,light;"
    "shops:name,street,hours"
).split(";")
DOCUMENTS = (
    "a news article;a letter to the editor;the minutes of a meeting;a short report;a product description;"
    "a travel diary entry;an e-mail to all staff;a chapter of a user manual;an obituary;a press release;"
    "a short story;a speech;a review;a notice to the neighbours;a blog post;an interview;a fable;"
    "an encyclopedia entry"
).split(";")
TONGUES = ("French", "French", "German", "German", "Spanish", "Spanish", "Italian", "Portuguese", "Dutch")
NAMES = "Anna;Ben;Carla;David;Emma;Farid;Grace;Hugo;Ines;Jonas;Kim;Lena;Marco;Nora;Omar;Petra".split(";")
THINGS = "apples;books;marbles;stamps;tickets;eggs;pencils;chairs;litres of paint;bricks;oranges;bottles".split(";")
SYSTEMS = (
    "You are a helpful assistant. Answer in full and explain your reasoning.;"
    "You are an experienced teacher. Number your steps.;You are a careful editor and give back complete texts.;"
    "You are a senior engineer who writes complete, commented code.;Answer with valid JSON only.;"
    "You are a friendly adviser. Be practical.;You are precise and never invent facts."
).split(";")


def first_round(count: int, seed: int) -> list[list[dict[str, str]]]:
    """So many different conversations of a question without a document; the longer list begins with the shorter."""
    dice = random.Random(f"first round {seed}")
    makers, weights = (_chat, _list, _code, _json, _maths, _document), (26, 12, 20, 16, 14, 22)
    return _different(count, lambda: _conversation(dice, dice.choices(makers, weights)[0](dice)))


def second_round(documents: Sequence[str], seed: int) -> list[list[dict[str, str]]]:
    """A task for each of the documents."""
    dice = random.Random(f"second round {seed}")
    return [_conversation(dice, _about(dice, document)) for document in documents]


def third_round() -> list[list[dict[str, str]]]:
    """What stands in `requests.jsonl`, mixed: each question, and each document with each of its tasks."""
    found = []
    for line in REQUESTS.read_text("utf-8").splitlines():
        entry = json.loads(line)
        document, system = entry.get("document"), entry.get("system")
        texts = [entry["question"]] if document is None else []
        for place, task in enumerate(entry.get("tasks", ())):
            texts.append(f"{task}\n\n{document}" if place % 2 else f"{document}\n\n{task}")
        opening = [{"role": "system", "content": system}] if system else []
        found += [[*opening, {"role": "user", "content": text}] for text in texts]
    random.Random("third round").shuffle(found)
    return found


def _different(count: int, make: Any) -> list[list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {}
    while len(found) < count:
        conversation = make()
        found.setdefault(conversation[-1]["content"], conversation)
    return list(found.values())


def _conversation(dice: random.Random, text: str) -> list[dict[str, str]]:
    question = [{"role": "user", "content": text}]
    return [{"role": "system", "content": dice.choice(SYSTEMS)}, *question] if dice.random() < 0.2 else question


def _chat(dice: random.Random) -> str:
    topic, other, reader = dice.choice(TOPICS), dice.choice(TOPICS), dice.choice(READERS)
    opening = dice.choice(
        (
            f"Explain {topic} to {reader}.",
            f"How does one get started with {topic}?",
            f"What do most people get wrong about {topic}?",
            f"Why does {topic} matter, and to whom?",
            f"Tell me about the history of {topic}.",
            f"What is the connection between {topic} and {other}?",
            f"I have to give a talk on {topic} to {reader}. What should I say?",
            f"Compare {topic} with {other}.",
            f"I know nothing about {topic}. Teach me the basics, step by step.",
            f"Is {topic} overrated? Argue both sides.",
            f"My friend says that {topic} will be gone in twenty years. What do you think?",
            f"Describe a day in the life of somebody whose work is {topic}.",
            f"What are the main ideas behind {topic}?",
            f"I have half an hour a day for {topic}. Make a plan for four weeks.",
        )
    )
    return opening + dice.choice(
        ("", "", " Be detailed.", " Give examples.", " Use short paragraphs.", " Explain your reasons.")
    )


def _list(dice: random.Random) -> str:
    topic, many = dice.choice(TOPICS), dice.choice((4, 5, 6, 8, 10, 12))
    return dice.choice(
        (
            f"List {many} facts about {topic}.",
            f"Give me {many} tips on {topic}, each with a reason.",
            f"What are the advantages and disadvantages of {topic}?",
            f"Write {many} questions about {topic} and answer them.",
            f"Make a table about {topic} with {dice.choice((3, 4))} columns and {many} rows.",
            f"Name {many} mistakes that beginners make with {topic} and how to avoid them.",
            f"Write a checklist with {many} points for {topic}.",
            f"Make a timeline of {topic} with {many} entries.",
            f"Write a glossary with {many} terms of {topic}.",
        )
    )


def _code(dice: random.Random) -> str:
    language, does, other = dice.choice(LANGUAGES), dice.choice(FUNCTIONS), dice.choice(FUNCTIONS)
    return dice.choice(
        (
            f"Write a {language} function that {does}.",
            f"Write a {language} function that {does}, with tests.",
            f"Write a {language} program that {does} and explain it line by line.",
            f"In {language}, write a class that {does} and one that {other}. Add comments and an example.",
            f"Show me two ways to write {language} code that {does}, and compare them.",
            f"Write a small {language} module. It {does}; it also {other}. Document everything.",
            f"My {language} code that {does} is slow. What could be the reason, and how should it look?",
            f"Write a {language} command-line tool that {does}. Handle errors.",
        )
    )


def _json(dice: random.Random) -> str:
    kind, _, fields = dice.choice(RECORDS).partition(":")
    names, many = fields.split(","), dice.choice((3, 4, 5, 6, 8, 10))
    dice.shuffle(names)
    listed = ", ".join(names)
    return dice.choice(
        (
            f"Write a JSON array with {many} {kind}. Each has the fields {listed}.",
            f"Invent {many} {kind} and give them as JSON with the keys {listed}. Return JSON only.",
            f"Give me a JSON object with a list of {many} {kind} ({listed}) and a summary of them.",
            f"Write a JSON Schema for {kind} with {listed}, and a valid example.",
            f"Make a YAML file of {many} {kind} with {listed}.",
            f"Write a CSV table of {many} {kind} with the columns {listed}, then the same as JSON.",
            f"Write a SQL table for {kind} ({listed}) and insert {many} rows.",
        )
    )


def _maths(dice: random.Random) -> str:
    a, b, c = dice.randint(3, 60), dice.randint(2, 30), dice.randint(2, 12)
    name, other, thing = *dice.sample(NAMES, 2), dice.choice(THINGS)
    task = dice.choice(
        (
            f"{name} has {a} {thing}, gives {b} to {other} and then buys {c} times as many as are left. "
            "How many are there now?",
            f"Solve {c}x + {b} = {a} for x.",
            f"Solve x^2 - {b + c}x + {b * c} = 0.",
            f"What is {a} * {b} + {c}?",
            f"A train travels {a * 10} km in {c} hours. How long does it take for {b * 10} km?",
            f"Prove that the sum of {c} consecutive whole numbers that begin with n is {c}n + {c * (c - 1) // 2}.",
            f"A rectangle is {a} cm long and {b} cm wide. Compute its area, perimeter and diagonal.",
            f"Find the derivative of f(x) = {a}x^{c} - {b}x + {c} and its zeros.",
            f"Of {a + b} {thing}, {b} are broken. Two are drawn at random. How likely is it that both are whole?",
            f"{name} saves {a} euros a month at {c} percent a year. How much is it after {b} years?",
            f"Find the mean and the median of {a}, {b}, {c}, {a + b}, {a + c} and {b + c}.",
        )
    )
    return task + dice.choice(
        ("", " Show every step.", " Explain each step.", " Check the result.", " Number the steps.")
    )


def _document(dice: random.Random) -> str:
    subject = dice.choice(PEOPLE) if dice.random() < 0.4 else dice.choice(TOPICS)
    details = dice.choice(
        (
            "",
            " Give names, dates and places.",
            " With figures.",
            f" It is meant for {dice.choice(READERS)}.",
            " In three paragraphs.",
            " With dialogue.",
        )
    )
    return f"Write {dice.choice(DOCUMENTS)} about {subject}.{details}"


def _about(dice: random.Random, document: str) -> str:
    tongue, many = dice.choice(TONGUES), dice.choice((3, 4, 5))
    old, new = dice.sample(NAMES, 2)
    task = dice.choice(
        (
            "Summarise this text in a few sentences.",
            f"Summarise the text below in {many} bullet points.",
            f"Give the text a headline and a summary for {dice.choice(READERS)}.",
            "What are the main points of this text? Go through them in order.",
            f"Translate into {tongue}, all of it.",
            f"Translate the following text into {tongue} and keep the paragraphs.",
            "Give back this text with all mistakes corrected and nothing else changed.",
            "Copy this text word for word, but write all numbers as digits.",
            "Rewrite this text in the past tense. Change nothing else.",
            f"Rewrite this text for {dice.choice(READERS)}.",
            f"Give back the whole text with the name {old} replaced by {new} everywhere.",
            "Make this text more formal and give back the complete text.",
            "List all names, places, numbers and dates in this text, each with the sentence that it stands in.",
            f"Quote the {many} most important sentences exactly as they are written, and say why they matter.",
            "Extract the facts of this text as JSON.",
            f"Ask {many} questions about this text and answer each with a quotation from it.",
        )
    )
    return f"{document}\n\n{task}" if dice.random() < 0.25 else f"{task}\n\n{document}"
