"""From the pieces of a response to arrivals: which read brought how many tokens, and how it ended.

Token counts come from the server. Where it counts in every chunk, an arrival's tokens are the growth of that count;
else its total is spread over the arrivals, and the record says so.
"""

from __future__ import annotations

import math
import time
from itertools import accumulate, pairwise
from typing import NamedTuple

import msgspec

from breakeven.load.dialect import Dialect, Meaning, error_text
from breakeven.load.exchange import Piece
from breakeven.load.sse import Event, EventParser
from breakeven.records import TokensFrom

__all__ = ["Counted", "Transcript", "repetition"]

#: Where a server gives no count at all: about four characters a token in English, the rule of thumb of OpenAI's docs.
CHARACTERS_PER_TOKEN = 4


class _Arrival:
    """One read that brought output: its stamp, chunks and characters, and the server's count after it."""

    __slots__ = ("characters", "chunks", "count", "stamp_ns")

    def __init__(self, stamp_ns: int) -> None:
        self.stamp_ns = stamp_ns
        self.chunks = 0
        self.characters = 0
        self.count: int | None = None


class Counted(NamedTuple):
    """A response in tokens: its arrivals as `(stamp_ns, tokens)`, the total, and where the counts come from."""

    arrivals: list[tuple[int, int]]
    output_tokens: int
    tokens_from: TokensFrom


class Transcript:
    """What the events of one response said so far."""

    def __init__(self, dialect: Dialect) -> None:
        self._decode = dialect.decode
        self._events = EventParser()
        self._parsed = 0
        self._arrivals: list[_Arrival] = []
        self._texts: list[str] = []
        self._counts: dict[int, int] = {}
        self._total: int | None = None
        self.characters = 0
        self.chunks = 0
        self.input_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.finish_reason: str | None = None
        self.done = False
        self.error: str | None = None
        self.garbage: str | None = None

    def advance(self, pieces: list[Piece], until_ns: int) -> bool:
        """Parses pieces not yet looked at, until the clock passes `until_ns`; returns whether all are done."""
        while self._parsed < len(pieces):
            stamp_ns, data = pieces[self._parsed]
            pieces[self._parsed] = (stamp_ns, b"")
            self._parsed += 1
            for event in self._events.feed(data):
                self._take(stamp_ns, event)
            if time.perf_counter_ns() >= until_ns:
                break
        return self._parsed >= len(pieces)

    def close(self, stamp_ns: int) -> None:
        """The response is over: an event without its empty line still counts."""
        for event in self._events.close():
            self._take(stamp_ns, event)

    @property
    def text(self) -> str:
        """All output so far."""
        return "".join(self._texts)

    def tokens_so_far(self, tokens_per_character: float) -> int:
        """Output tokens parsed so far; from the rate where the server has not counted yet."""
        if self._total is not None:
            return self._total
        return sum(self._counts.values()) if self._counts else round(self.characters * tokens_per_character)

    def counted(self, tokens_per_character: float = 1 / CHARACTERS_PER_TOKEN) -> Counted:
        """The response in tokens. The rate is used only where the server has given no count (yet)."""
        arrivals = self._arrivals
        stamps = [arrival.stamp_ns for arrival in arrivals]
        counts = [arrival.count for arrival in arrivals if arrival.count is not None]
        total = self._total if self._total is not None else sum(self._counts.values()) if self._counts else None
        origin: TokensFrom
        if counts and len(counts) == len(arrivals):
            tokens, origin = [max(0, b - a) for a, b in pairwise([0, *counts])], "chunks"
            total = sum(tokens) if total is None else total
        else:
            guess = max(self.chunks, math.ceil(self.characters * tokens_per_character))
            tokens, origin = _spread(arrivals, guess if total is None else total, guessed=total is None)
            total = guess if total is None else total
        return Counted(list(zip(stamps, tokens, strict=True)), total, origin)

    def _take(self, stamp_ns: int, event: Event) -> None:
        if event.data == b"[DONE]":
            self.done = True
            return
        try:
            meaning = self._decode(event.data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            if event.type == b"error":
                self.error = self.error or error_text(event.data)
            self.garbage = self.garbage or f"an event that is no chunk: {error}"
            return
        if event.type == b"error" and meaning.error is None:
            meaning = meaning._replace(error=error_text(event.data))
        self._note(meaning)
        text = self._new_text(meaning)
        if text:
            self._arrive(stamp_ns, text, meaning)
        elif meaning.finish_reason and meaning.output_tokens is not None and self._arrivals:
            # An end-of-sequence token has a count but no text, and no arrival of its own: it joins the last one.
            self._arrivals[-1].count = sum(self._counts.values())

    def _note(self, meaning: Meaning) -> None:
        self.error = self.error or meaning.error
        self.finish_reason = meaning.finish_reason or self.finish_reason
        if meaning.input_tokens is not None:
            self.input_tokens = meaning.input_tokens
        if meaning.cached_tokens is not None:
            self.cached_tokens = meaning.cached_tokens
        if meaning.is_total:
            self._total = meaning.output_tokens
        elif meaning.output_tokens is not None:
            self._counts[meaning.choice] = meaning.output_tokens

    def _new_text(self, meaning: Meaning) -> str:
        # SGLang sends the whole text so far, or only what is new where the server runs with incremental output.
        if meaning.is_whole and meaning.text.startswith(so_far := self.text):
            return meaning.text[len(so_far) :]
        return meaning.text

    def _arrive(self, stamp_ns: int, text: str, meaning: Meaning) -> None:
        if not self._arrivals or self._arrivals[-1].stamp_ns != stamp_ns:
            self._arrivals.append(_Arrival(stamp_ns))
        arrival = self._arrivals[-1]
        arrival.chunks += 1
        arrival.characters += len(text)
        arrival.count = sum(self._counts.values()) if meaning.output_tokens is not None else None
        self.chunks += 1
        self.characters += len(text)
        self._texts.append(text)


def _spread(arrivals: list[_Arrival], total: int, *, guessed: bool) -> tuple[list[int], TokensFrom]:
    """A total over arrivals: one token a chunk where that explains it, else in proportion to the length of text."""
    if not arrivals:
        return [], "estimated" if guessed else "total"
    chunks = [arrival.chunks for arrival in arrivals]
    spare = total - sum(chunks)
    if len(arrivals) == 1 or 0 <= spare <= 1:  # 1: the end-of-sequence token, which has no chunk
        return [*chunks[:-1], chunks[-1] + spare], "estimated" if guessed else "total"
    characters = list(accumulate(arrival.characters for arrival in arrivals))
    # The first arrival brought at least one token, or it would be none.
    upto = [max(min(1, total), round(total * seen / characters[-1])) for seen in characters]
    return [b - a for a, b in pairwise([0, *upto])], "estimated"


def repetition(text: str) -> float:
    """The share of a text that one repeating passage at its end fills; 0 below three repeats.

    Greedy decoding of small models ends in such loops, which drafters predict perfectly.
    """
    tail = text[-2000:]
    key = tail[-24:]
    period = len(tail) - len(key) - tail.rfind(key, 0, len(tail) - 1) if len(tail) > len(key) else 0
    if not 0 < period <= len(tail) - len(key):
        return 0.0
    same = 0
    while same < len(tail) - period and tail[-1 - same] == tail[-1 - same - period]:
        same += 1
    covered = same + period
    return covered / len(text) if covered >= 3 * period else 0.0
