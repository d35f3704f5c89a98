"""From the pieces of a response to arrivals: which read brought how many tokens, and how it ended.

Token counts come from the server. Where it counts in every chunk, an arrival's tokens are the growth of that count;
else its total is spread over the arrivals, and the record says so.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from breakeven.load.dialect import UNDECODABLE, Dialect, Meaning, error_text
from breakeven.load.exchange import Piece
from breakeven.load.sse import EventParser
from breakeven.records import TokensFrom

__all__ = ["Counted", "Transcript", "repetition"]

#: Where a server gives no count at all: about four characters a token in English, the rule of thumb of OpenAI's docs.
CHARACTERS_PER_TOKEN = 4
#: Reasons to finish that are faults: vLLM and SGLang say `abort` where they drop a request, routers say `error`.
_GIVEN_UP = ("abort", "error")
#: Pieces parsed between two looks at the clock, some 0.2 ms; their JSON is decoded in one call.
_BATCH = 64


class Counted(NamedTuple):
    """A response in tokens: its arrivals as `(stamp_ns, tokens)`, the total, and where the counts come from."""

    arrivals: list[tuple[int, int]]
    output_tokens: int
    tokens_from: TokensFrom


class Transcript:
    """What the events of one response said so far.

    Four lists run in parallel, an entry for each arrival (a read that brought output): its stamp, its chunks, its
    characters, and the server's count after it, None where it gave none.
    """

    def __init__(self, dialect: Dialect) -> None:
        self._decode = dialect.decode
        self._events = EventParser()
        self._stamps: list[int] = []
        self._chunks: list[int] = []
        self._characters: list[int] = []
        self._counts: list[int | None] = []
        self._texts: list[str] = []
        self._so_far: dict[int, str | None] = {}
        self._choices: dict[int, int] = {}
        self._seen, self._ended = {0}, set[int]()
        self._total: int | None = None
        self.input_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.finish_reason: str | None = None
        self.done = False
        self.error: str | None = None
        self.garbage: str | None = None

    def advance(self, pieces: list[Piece], until_ns: int) -> bool:
        """Takes pieces off the list until the clock passes `until_ns`; returns whether it took all."""
        while pieces:
            batch = pieces[:_BATCH]
            del pieces[:_BATCH]
            if not self._skim(batch):
                self._read(batch)
            if time.perf_counter_ns() >= until_ns:
                break
        return not pieces

    def close(self, stamp_ns: int) -> None:
        """The response is over: an event without its empty line still counts, the beginning of one does not."""
        garbage = self.garbage
        self._take([(stamp_ns, *event) for event in self._events.close()])
        self.garbage = garbage

    @property
    def text(self) -> str:
        """All output so far."""
        return "".join(self._texts)

    @property
    def characters(self) -> int:
        """Characters of output so far."""
        return sum(self._characters)

    @property
    def chunks(self) -> int:
        """Events so far that carried output."""
        return sum(self._chunks)

    def tokens_so_far(self, tokens_per_character: float) -> int:
        """Output tokens so far; from the rate where the server has not counted yet."""
        counted = self._counted_total()
        return round(self.characters * tokens_per_character) if counted is None else counted

    def counted(self, tokens_per_character: float = 1 / CHARACTERS_PER_TOKEN) -> Counted:
        """The response in tokens. The rate is used only where the server has given no count (yet)."""
        total = self._counted_total()
        counts = [count for count in self._counts if count is not None]
        if counts and len(counts) == len(self._counts):
            tokens = [max(0, after - before) for before, after in pairwise([0, *counts])]
            if self._total is not None and self._total - sum(tokens) == 1:
                tokens[-1] += 1  # the end-of-sequence token, which llama.cpp counts in the total alone
            return Counted(list(zip(self._stamps, tokens, strict=True)), total or 0, "chunks")
        guess = max(self.chunks, math.ceil(self.characters * tokens_per_character))
        tokens, origin = _spread(guess if total is None else total, self._chunks, self._characters)
        arrivals = list(zip(self._stamps, tokens, strict=True))
        return Counted(arrivals, guess if total is None else total, "estimated" if total is None else origin)

    @property
    def finished(self) -> bool:
        """Whether the answer said that it was over: [DONE], or a reason to finish for each of its choices."""
        return self.done or self._seen <= self._ended

    @property
    def total_known(self) -> bool:
        """Whether the number of tokens is the server's; else it is a guess from the length of text."""
        return self._counted_total() is not None or not self._stamps

    def _counted_total(self) -> int | None:
        if self._total is not None:
            return self._total
        return sum(self._choices.values()) if self._choices else None

    def _skim(self, pieces: list[Piece]) -> bool:
        """The fast way, at half the cost, for pieces that are one chunk each; False if these are not."""
        payload = self._events.skim([data for _, data in pieces])
        if payload is None:
            return False
        try:
            meanings = self._decode(payload)
        except UNDECODABLE:
            return False
        if len(meanings) != len(pieces):
            return False
        for (stamp_ns, _), meaning in zip(pieces, meanings, strict=True):
            self._note(stamp_ns, meaning)
        return True

    def _read(self, pieces: list[Piece]) -> None:
        feed = self._events.feed
        self._take([(stamp_ns, *event) for stamp_ns, data in pieces for event in feed(data)])

    def _take(self, events: list[tuple[int, bytes, bytes]]) -> None:
        stamps: list[int] = []
        payloads: list[bytes] = []
        for stamp_ns, kind, data in events:
            if data.startswith(b"[DONE]"):
                self.done = True
            elif kind == b"error":
                self._note_all(stamps, payloads)  # first, since one of them may hold the first error
                stamps, payloads = [], []
                self.error = self.error or error_text(data)
            elif data:  # else a sign of life
                stamps.append(stamp_ns)
                payloads.append(data)
        self._note_all(stamps, payloads)

    def _note_all(self, stamps: list[int], payloads: list[bytes]) -> None:
        for stamp_ns, meaning in zip(stamps, self._meanings(payloads), strict=True):
            self._note(stamp_ns, meaning)

    def _meanings(self, payloads: list[bytes]) -> list[Meaning]:
        try:
            meanings = self._decode(b",".join(payloads))
            if len(meanings) == len(payloads):
                return meanings
            why = "more than one JSON value"
        except UNDECODABLE as error:
            why = str(error)
        if len(payloads) > 1:  # one of them is bad: the others still count
            return [meaning for payload in payloads for meaning in self._meanings([payload])]
        self.garbage = self.garbage or f"an event that is no chunk: {why}"
        return [Meaning()]

    def _note(self, stamp_ns: int, meaning: Meaning) -> None:
        text, count = meaning.text, meaning.output_tokens
        if meaning.is_rare:
            count = self._note_rare(meaning)
            if meaning.is_whole:
                text = self._new_in(meaning)
        elif count is not None:
            self._choices[0] = count
            if len(self._choices) > 1:
                count = sum(self._choices.values())
        if not text:
            if meaning.finish_reason and count is not None and self._counts:
                # An end-of-sequence token has a count but no text, and no arrival of its own: it joins the last one.
                self._counts[-1] = count
            return
        self._texts.append(text)
        if self._stamps and self._stamps[-1] == stamp_ns:
            self._chunks[-1] += 1
            self._characters[-1] += len(text)
            self._counts[-1] = count
        else:
            self._stamps.append(stamp_ns)
            self._chunks.append(1)
            self._characters.append(len(text))
            self._counts.append(count)

    def _note_rare(self, meaning: Meaning) -> int | None:
        """Notes all but the text; returns the count over all choices."""
        count = meaning.output_tokens
        if meaning.is_total:
            self._total = count
        elif count is not None:
            self._choices[meaning.choice] = count
            count = sum(self._choices.values())
        self._seen.add(meaning.choice)
        self.error = self.error or meaning.error
        if reason := meaning.finish_reason:
            self._ended.add(meaning.choice)
            self.finish_reason = reason
            if reason in _GIVEN_UP:
                self.error = self.error or f"the engine gave the answer up ({reason})"
        if meaning.input_tokens is not None:
            self.input_tokens = meaning.input_tokens
        if meaning.cached_tokens is not None:
            self.cached_tokens = meaning.cached_tokens
        return count

    def _new_in(self, meaning: Meaning) -> str:
        """What an event adds that may hold all text so far (SGLang), or only what is new (SGLang, incremental)."""
        text, so_far = meaning.text, self._so_far.get(meaning.choice, "")
        if so_far is None:
            return text
        if text.startswith(so_far):
            self._so_far[meaning.choice] = text
            return text[len(so_far) :]
        if meaning.finish_reason and so_far.startswith(text):  # cut back to where a stop string begins
            return ""
        self._so_far[meaning.choice] = None  # not all of it: so it is, and was, only what is new
        return text


def _spread(total: int, chunks: list[int], characters: list[int]) -> tuple[list[int], TokensFrom]:
    """A total over arrivals: one token a chunk where that explains it, else in proportion to the length of text."""
    if not chunks:
        return [], "total"
    spare = total - sum(chunks)
    if len(chunks) == 1 or 0 <= spare <= 1:  # 1: the end-of-sequence token, which has no chunk
        return [*chunks[:-1], chunks[-1] + spare], "total"
    seen = np.cumsum(characters)
    # The first arrival brought at least one token, or it would be none.
    upto = np.maximum(np.rint(total * seen / seen[-1]), min(1, total)).astype(np.int64)
    tokens: list[int] = np.diff(upto, prepend=0).tolist()
    return tokens, "estimated"


def repetition(text: str) -> float:
    """The share of a text that one repeating passage at its end fills; 0 below three repeats.

    Greedy decoding of small models ends in such loops, which drafters predict perfectly. A passage is found if it
    repeats the text's last 24 characters within its last 2,000.
    """
    tail = text[-2000:]
    key = tail[-24:]
    most = least = 0
    while len(key) < len(tail) - least and (start := tail.rfind(key, 0, len(tail) - least - 1)) >= 0:
        period = len(tail) - len(key) - start
        covered = _covered(text, period)
        if covered >= 3 * period:
            most = max(most, covered)
        # A longer period that fits into this one's run reaches no further than it (Fine and Wilf).
        least = max(period, covered - period)
    return most / len(text) if text else 0.0


def _covered(text: str, period: int) -> int:
    """How much of a text's end repeats with this period: the longest end that equals what stands a period before it."""
    # By bisection, since an end of an equal end is equal.
    sizes = range(1, len(text) - period + 1)
    return period + bisect_left(sizes, True, key=lambda size: text[-size:] != text[-size - period : -period])
