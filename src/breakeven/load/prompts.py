"""Prompts: the built-in set, a user's file, or random words; in one balanced, seeded order."""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from breakeven.errors import PromptsError

__all__ = ["Prompt", "PromptSet", "load_prompts", "random_words"]

#: Short common words, nearly all one token in the vocabularies of today's models.
_WORDS = (
    "the of and to in is that it was for on are as with his they at be this from have or by one had not but what "
    "all were when we there can an your which their said if do will each about how up out them then she many some "
    "so these would other into has more her two like him see time could no make than first been its who now "
    "people my made over did down only way find use may water long little very after words called just where most "
    "know"
).split()


class Prompt(Struct, frozen=True, kw_only=True):
    """One prompt: chat `messages` or a plain `text` (exactly one is set), with a name and a kind."""

    id: str
    kind: str = "custom"
    messages: tuple[dict[str, Any], ...] | None = None
    text: str | None = None

    def as_messages(self) -> list[dict[str, Any]]:
        """The prompt for a chat API; a plain text becomes one user message."""
        return list(self.messages) if self.messages else [{"role": "user", "content": self.text}]

    def as_text(self) -> str:
        """The prompt for a completion API; messages become labelled paragraphs, since no template is known here."""
        if self.text is not None:
            return self.text
        turns = [f"{message['role'].capitalize()}: {_text_of(message['content'])}" for message in self.messages or ()]
        return "\n\n".join([*turns, "Assistant:"])

    def tagged(self, tag: str) -> Prompt:
        """The same prompt behind a tag, so that no prefix cache knows its beginning; its id carries the tag too."""
        name = f"{self.id}#{tag}"
        if self.messages is None:
            return msgspec.structs.replace(self, id=name, text=f"[{tag}] {self.text}")
        first, *rest = self.messages
        tagged = {**first, "content": _tagged_content(first["content"], tag)}
        return msgspec.structs.replace(self, id=name, messages=(tagged, *rest))


class PromptSet(Struct, frozen=True, kw_only=True):
    """Prompts in the order in which they are sent, and where they are from."""

    source: str
    prompts: tuple[Prompt, ...]

    @property
    def sha256(self) -> str:
        """A digest of all prompts in their order: two runs with equal digests sent the same."""
        return hashlib.sha256(msgspec.json.encode(self.prompts)).hexdigest()

    @property
    def is_random(self) -> bool:
        """Whether the text is random words, which no drafter predicts as it would predict language."""
        return self.source.startswith("random:")


def load_prompts(source: str | None, kinds: Sequence[str] = (), *, seed: int = 0) -> PromptSet:
    """The prompts of `source` in balanced order.

    Args:
        source: None for the built-in set, a JSON-lines file, or `random:N` for prompts of about N tokens.
        kinds: only prompts of these kinds; all where empty.
        seed: of the order, and of random prompts.

    Raises:
        PromptsError: the source can't be read, holds no prompt, or has none of the kinds.
    """
    if source is None:
        text = resources.files("breakeven").joinpath("data/prompts.jsonl").read_text("utf-8")
        prompts = list(_parse(text.split("\n"), "the built-in set"))
    elif source.startswith("random:"):
        prompts = _random_prompts(source, seed)
    else:
        prompts = list(_parse(_read_lines(source), source))
    if not prompts:
        raise PromptsError(f"--prompts {source}: no prompt in it; it needs one JSON object a line")
    return PromptSet(source=source or "built-in", prompts=tuple(_balance(_pick(prompts, kinds), seed)))


def random_words(count: int, seed: int) -> list[str]:
    """So many random words, each about a token."""
    return random.Random(f"random words {seed}").choices(_WORDS, k=count)


def _read_lines(source: str) -> list[str]:
    try:
        text = Path(source).read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise PromptsError(f"--prompts {source}: {why}; give a JSON-lines file or random:N") from None
    if text.lstrip().startswith("["):  # how ShareGPT's file is published
        raise PromptsError(f"--prompts {source}: a JSON array; it needs one JSON object a line: jq -c '.[]' {source}")
    return text.split("\n")  # not splitlines(): JSON strings may hold U+2028 and other separators as they are


def _parse(lines: Iterable[str], source: str) -> Iterator[Prompt]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield _prompt(msgspec.json.decode(line), f"{number}")
            except (msgspec.DecodeError, RecursionError) as error:
                raise PromptsError(f"--prompts {source}: line {number}: {error}; it needs a JSON object") from None
            except PromptsError as error:
                raise PromptsError(f"--prompts {source}: line {number}: {error}") from None


def _prompt(value: object, number: str) -> Prompt:
    if not isinstance(value, dict):
        raise PromptsError("it needs a JSON object")
    name, kind = str(number if value.get("id") is None else value["id"]), str(value.get("kind") or "custom")
    if isinstance(value.get("prompt"), str) and value["prompt"]:
        return Prompt(id=name, kind=kind, text=value["prompt"])
    messages = value.get("messages") or _from_sharegpt(value.get("conversations"))
    if not isinstance(messages, list) or not messages or not all(_is_message(message) for message in messages):
        raise PromptsError(
            "it needs `messages` (OpenAI: each with role and content), `prompt` (text) or `conversations` (ShareGPT), "
            "none of them empty"
        )
    return Prompt(id=name, kind=kind, messages=tuple(messages))


def _is_message(value: object) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    content = value.get("content")
    is_parts = isinstance(content, list) and all(isinstance(part, dict) for part in content)
    return (isinstance(content, str) or is_parts) and bool(content)


def _from_sharegpt(turns: object) -> list[dict[str, Any]]:
    """ShareGPT's turns up to the last one that is not the assistant's: its answer is what the server shall give."""
    roles = {
        "human": "user",
        "user": "user",
        "gpt": "assistant",
        "assistant": "assistant",
        "system": "system",
    }
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return []
    messages = [{"role": roles.get(str(turn.get("from")), "user"), "content": turn.get("value")} for turn in turns]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    return messages


def _random_prompts(source: str, seed: int, count: int = 128) -> list[Prompt]:
    size = source.removeprefix("random:")
    if not size.isdecimal() or not 1 <= int(size) <= 200_000:
        raise PromptsError(f"--prompts {source}: the length must be 1 to 200000 tokens, e.g. random:512")
    rng = random.Random(f"random prompts {seed}")
    texts = (" ".join(rng.choices(_WORDS, k=int(size))) for _ in range(count))
    return [Prompt(id=f"random-{i:03}", kind="random", text=text) for i, text in enumerate(texts)]


def _pick(prompts: list[Prompt], kinds: Sequence[str]) -> list[Prompt]:
    there = sorted({prompt.kind for prompt in prompts})
    unknown = sorted(set(kinds) - set(there))
    if unknown:
        raise PromptsError(f"--kind {' '.join(unknown)}: no such prompts; there are {', '.join(there)}")
    return [prompt for prompt in prompts if not kinds or prompt.kind in kinds]


def _balance(prompts: list[Prompt], seed: int) -> list[Prompt]:
    """Shuffles within kinds and deals the kinds evenly: with k kinds of equal size, any run of k holds each.

    Levels see prompts from the start of this order, so its balance is what keeps their mixes alike.
    """
    rng = random.Random(f"prompt order {seed}")
    by_kind: defaultdict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        by_kind[prompt.kind].append(prompt)
    dealt = []
    for kind in sorted(by_kind):
        turn = rng.random()  # the same in each round, so that runs which begin within a round are balanced too
        rng.shuffle(by_kind[kind])
        dealt += [((i + 0.5) / len(by_kind[kind]), turn, p) for i, p in enumerate(by_kind[kind])]
    return [prompt for *_, prompt in sorted(dealt, key=lambda item: item[:2])]


def _text_of(content: str | list[dict[str, Any]]) -> str:
    """A message's text; of one in parts, what is text in it."""
    return content if isinstance(content, str) else "\n".join(str(part["text"]) for part in content if "text" in part)


def _tagged_content(content: str | list[dict[str, Any]], tag: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return f"[{tag}] {content}"
    return [{"type": "text", "text": f"[{tag}]"}, *content]
