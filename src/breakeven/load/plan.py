"""What will be sent, fixed before the first byte: a pure function of the seed and of a request's number."""

from __future__ import annotations

import hashlib
import math
import random
import struct
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from breakeven.load.prompts import Prompt, PromptSet, random_words
from breakeven.load.trace import TraceRequest
from breakeven.records import LevelPlan, Phase

__all__ = ["LevelRequests", "PlannedRequest", "TraceRequests"]

#: Repeats begin so many prompts apart: whole rounds of the eight built-in kinds, to stay balanced.
_PROMPTS_A_RUN = 24
#: Tokens of a block of a trace's prompts (Mooncake's hash_ids).
_BLOCK = 512
#: Words from which a trace's prompts are cut: as many as 16 bits of a digest can name.
_POOL = 1 << 16
#: Each cut begins with so many words of its own, since of a million prompts many are cut from the same place: with 8 of
#: about 100 words the odds against any two of a million beginning alike are 10,000 to 1.
_HEAD = 8


class PlannedRequest(NamedTuple):
    """One request to send: which prompt, how long at most, in which phase of its level."""

    level: LevelPlan
    phase: Phase
    prompt: Prompt
    max_tokens: int


class LevelRequests:
    """The requests of one level, phase by phase.

    Each phase counts for itself: the k-th measured request has the same prompt at every level and in every arm,
    however many the ramp took. Repeats (`LevelPlan.run`) begin further on in the order, in every arm alike. With `tag`,
    each prompt begins with it and a number, as no prompt before did. Ramp request i is capped at a share of max-tokens
    that is uniform over the slots (stratified, in seeded order, the largest 1), so that the slots' starts and ends are
    spread from the first.
    """

    def __init__(self, level: LevelPlan, prompts: PromptSet, *, seed: int, tag: str | None) -> None:
        self._level, self._prompts, self._tag = level, prompts.prompts, tag
        self._sent: Counter[Phase] = Counter()
        again = f" {level.run}" if level.run else ""
        rng = random.Random(f"ramp {seed} {level.concurrency} {level.max_tokens}{again}")
        slots = level.concurrency
        self._shares = [(i + rng.random()) / slots for i in range(slots)]
        self._shares[-1:] = [1.0] * bool(slots)  # whole, so that the ramp tells how long a request takes
        rng.shuffle(self._shares)

    def next(self, phase: Phase, *, slot: int | None = None) -> PlannedRequest:
        """The next request of a phase; with `slot`, that slot's capped ramp request."""
        number = self._sent[phase]
        self._sent[phase] += 1
        start = self._offset(phase) + _PROMPTS_A_RUN * self._level.run
        prompt = self._prompts[(start + number) % len(self._prompts)]
        if self._tag:
            prompt = prompt.tagged(f"{self._tag}-{self._level.index}-{phase}-{number}")
        max_tokens = self._level.max_tokens
        cap = max_tokens if slot is None else max(1, math.ceil(self._shares[slot] * max_tokens))
        return PlannedRequest(self._level, phase, prompt, cap)

    def _offset(self, phase: Phase) -> int:
        # Warm-up, ramp and drain start elsewhere in the order, so that they don't warm a cache for what is measured.
        return {
            "measured": 0,
            "ramp": len(self._prompts) // 2,
            "warmup": -8,
            "drain": len(self._prompts) // 4,
        }[phase]


class TraceRequests:
    """The requests of a trace, in its order, each with its number of tokens in and out.

    Prompts are random words, about one token each; blocks that a trace names are the same words wherever they stand, so
    that a prefix cache finds what it found then. With `prompts` those are sent in turn instead, and only the answers'
    lengths are the trace's. With `tag` no prompt of another run or level is repeated.
    """

    def __init__(
        self,
        level: LevelPlan,
        trace: Sequence[TraceRequest],
        prompts: PromptSet | None,
        *,
        seed: int,
        tag: str | None,
    ) -> None:
        self._level, self._trace, self._prompts = level, trace, prompts
        self._tag = f"{tag}-{level.index}" if tag else ""
        self._sent = 0
        if prompts is None:
            self._words = random_words(_POOL, seed)
            self._pool = " ".join(self._words)
            self._starts = [0, *accumulate(len(word) + 1 for word in self._words)]

    def next(self, phase: Phase) -> PlannedRequest:
        """The next request, in whatever phase."""
        number = self._sent
        self._sent += 1
        request = self._trace[number]
        if self._prompts is None:
            prompt = Prompt(id=f"trace-{number}", kind="trace", text=self._text(number, request))
        else:
            prompt = self._prompts.prompts[number % len(self._prompts.prompts)]
            if self._tag:
                prompt = prompt.tagged(f"{self._tag}-{number}")
        return PlannedRequest(self._level, phase, prompt, request.output_tokens)

    def _text(self, number: int, request: TraceRequest) -> str:
        parts, left = [], request.input_tokens
        for block in request.blocks[: -(-left // _BLOCK)]:
            parts.append(self._cut(f"block {block}", min(_BLOCK, left)))  # a trace names the last one too, if shorter
            left -= _BLOCK
        if left > 0:
            parts.append(self._cut(f"request {number}", left))
        return " ".join(parts)

    def _cut(self, name: str, count: int) -> str:
        """So many words: the same for the same name, from a place in the pool that the name gives."""
        digest = hashlib.blake2b(f"{self._tag} {name}".encode(), digest_size=2 * (_HEAD + 1)).digest()
        start, *head = struct.unpack(f"<{_HEAD + 1}H", digest)
        text = " ".join([self._words[number] for number in head[:count]])
        count -= _HEAD
        while count > 0:
            stop = min(start + count, _POOL)
            text += " " + self._pool[self._starts[start] : self._starts[stop] - 1]
            count -= stop - start
            start = 0
        return text
