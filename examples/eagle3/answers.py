"""The target model answers the prompts, and what it knows at each token is kept: that is what a drafter gets to see.

Usage: answers.py MODEL WORK [--first N] [--second N] [--third N]

Writes WORK/answers.jsonl, a conversation a line: `tokens` are the ids of prompt and answer, `opening` is where the
user's text begins, `prompt` where the answer does. WORK/states.bin has four bf16 vectors for each of those tokens, in
the same order: the states before the layers 2, n/2 and n - 3, and before the last norm. Started again, it goes on
where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import torch
from prompts import first_round, second_round, third_round
from target import Cache, Target
from torch import Tensor
from transformers import AutoTokenizer

#: Conversations decoded together, and the most tokens of one.
SLOTS, LONGEST = 56, 960
#: Two thirds are greedy, as breakeven measures; the others keep the drafter from seeing nothing but likely words.
GREEDY, TEMPERATURE = 2 / 3, 0.7
#: Where answers are cut. A third goes on after its end, as benchmarks with `ignore_eos` do.
ANSWER, GO_ON = (128, 160, 192, 224), 1 / 3
#: Tokens of an answer that become a document of the second round.
DOCUMENT = (80, 220)
SEED = 1


class Slot:
    """A conversation that is being answered."""

    def __init__(self, prompt: list[int], number: int) -> None:
        dice = random.Random(f"answer {SEED} {number}")
        self.tokens, self.prompt = list(prompt), len(prompt)
        self.temperature = 0.0 if dice.random() < GREEDY else TEMPERATURE
        self.end = len(prompt) + dice.choice(ANSWER)
        self.goes_on = dice.random() < GO_ON
        self.states: list[Tensor] = []

    def add(self, likeliest: int, logits: Tensor, stop: int) -> bool:
        """Takes the next token; returns whether the answer is complete."""
        drawn = self.temperature and torch.multinomial((logits / self.temperature).softmax(-1), 1)
        self.tokens.append(int(drawn) if self.temperature else likeliest)
        return len(self.tokens) >= self.end or (self.tokens[-1] == stop and not self.goes_on)


class Answering:
    """Answers prompts, `SLOTS` at a time; a slot that is free takes the next prompt."""

    def __init__(self, target: Target, stop: int, work: Path) -> None:
        self._target, self._stop = target, stop
        self._cache = Cache(target, SLOTS, LONGEST)
        self._work, self.done = work, _read(work)

    def answer(self, prompts: list[list[int]], first: int, total: int) -> None:
        """Answers the prompts that are not answered yet; the first of them has the number `first`."""
        known = {entry["number"] for entry in self.done}
        waiting = [(number, ids) for number, ids in enumerate(prompts, first) if number not in known]
        # Those that run together shall be alike in length: each step reads the cache up to the longest of them.
        waiting.sort(key=lambda each: -len(each[1]))
        slots: list[tuple[int, Slot] | None] = [None] * SLOTS
        began_s, tokens = time.monotonic(), 0
        with (self._work / "answers.jsonl").open("a") as lines, (self._work / "states.bin").open("ab") as states:
            while waiting or any(slots):
                for place in range(SLOTS):
                    if slots[place] is None and waiting:
                        number, ids = waiting.pop()
                        slots[place] = (number, self._begin(Slot(ids, number), place))
                for place in self._step(slots):
                    number, slot = slots[place]
                    tokens += len(slot.tokens) - slot.prompt
                    self._write(number, slot, lines, states)
                    slots[place] = None
                    rate = tokens / (time.monotonic() - began_s)
                    print(f"answers: {len(self.done)}/{total}, {rate:.0f} tok/s", end="\r", flush=True)
        print()

    def _begin(self, slot: Slot, place: int) -> Slot:
        positions = torch.arange(slot.prompt)[None]
        states = self._target(torch.tensor([slot.tokens]), positions, self._cache, slice(place, place + 1))[0]
        slot.states.append(states.bfloat16())
        logits = self._target.logits(states[-1, -1])
        slot.add(int(logits.argmax()), logits, self._stop)
        return slot

    def _step(self, slots: list[tuple[int, Slot] | None]) -> list[int]:
        """One token more in each slot; returns the places of the conversations that are complete."""
        tokens = torch.tensor([[held[1].tokens[-1] if held else 0] for held in slots])
        positions = torch.tensor([[len(held[1].tokens) - 1 if held else 0] for held in slots])
        states = self._target(tokens, positions, self._cache, slice(None))
        logits = self._target.logits(states[:, 0, -1])
        likeliest, kept, complete = logits.argmax(-1).tolist(), states.bfloat16(), []
        for place, held in enumerate(slots):
            if held is not None:
                held[1].states.append(kept[place])
                if held[1].add(likeliest[place], logits[place], self._stop):
                    complete.append(place)
        return complete

    def _write(self, number: int, slot: Slot, lines: TextIO, states: BinaryIO) -> None:
        """The last token has no states, so it is left out. States come first: a line says that its states are whole."""
        kept = torch.cat(slot.states)
        tokens = slot.tokens[: len(kept)]
        states.write(kept.view(torch.int16).numpy().tobytes())
        states.flush()
        # A conversation's first token begins its first message, the system's; the next of its kind begins the user's.
        entry = {"number": number, "opening": tokens.index(tokens[0], 1), "prompt": slot.prompt, "tokens": tokens}
        self.done.append(entry)
        lines.write(json.dumps(entry) + "\n")
        lines.flush()


def main() -> None:
    """Answers what is not answered yet."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--first", type=int, default=800, help="conversations without a document")
    parser.add_argument("--second", type=int, default=240, help="conversations about an answer to one of the first")
    parser.add_argument("--third", type=int, help="requests of requests.jsonl (all)")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    target = Target(args.model)
    _cut(args.work, target.hidden)
    answering = Answering(target, tokenizer.eos_token_id, args.work)

    def encode(conversations: list[list[dict[str, str]]]) -> list[list[int]]:
        texts = [tokenizer.apply_chat_template(c, add_generation_prompt=True, tokenize=False) for c in conversations]
        return [ids[: LONGEST - max(ANSWER)] for ids in tokenizer(texts)["input_ids"]]

    third = encode(third_round()[: args.third])
    total = args.first + args.second + len(third)
    answering.answer(encode(first_round(args.first, SEED)), 0, total)
    answered = sorted((e for e in answering.done if e["number"] < args.first), key=lambda e: e["number"])
    documents = [tokenizer.decode(ids, skip_special_tokens=True) for ids in _documents(answered, args.second)]
    answering.answer(encode(second_round(documents, SEED)), args.first, total)
    answering.answer(third, args.first + args.second, total)


def _read(work: Path) -> list[dict[str, Any]]:
    path = work / "answers.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _cut(work: Path, hidden: int) -> None:
    """Takes away what a run that was ended left half written: a line that is cut, states without their line."""
    lines, states = work / "answers.jsonl", work / "states.bin"
    if lines.exists():
        text = lines.read_text()
        lines.write_text(text[: text.rfind("\n") + 1])
        os.truncate(states, sum(len(entry["tokens"]) for entry in _read(work)) * 4 * hidden * 2)


def _documents(answered: list[dict[str, Any]], count: int) -> list[list[int]]:
    """Beginnings of answers that are long enough, one for each conversation of the second round."""
    dice = random.Random(f"documents {SEED}")
    answers = [entry["tokens"][entry["prompt"] :] for entry in answered]
    return [
        ids[: dice.randint(*DOCUMENT)] for ids in dice.sample([ids for ids in answers if len(ids) > DOCUMENT[0]], count)
    ]


if __name__ == "__main__":
    main()
