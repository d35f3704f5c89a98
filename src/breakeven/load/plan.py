"""What will be sent, fixed before the first byte: a pure function of the seed and of a request's number."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import NamedTuple

from breakeven.load.prompts import Prompt, PromptSet
from breakeven.records import LevelPlan, Phase

__all__ = ["LevelRequests", "PlannedRequest"]


class PlannedRequest(NamedTuple):
    """One request to send: which prompt, how long at most, in which phase of its level."""

    level: LevelPlan
    phase: Phase
    prompt: Prompt
    max_tokens: int


class LevelRequests:
    """The requests of one level, phase by phase.

    Each phase counts for itself: the k-th measured request has the same prompt at every level and in every arm,
    however many the ramp took. With `tag`, each prompt begins with it and a number, as no prompt before did. Ramp
    request i is capped at a share of max-tokens that is uniform over the slots (stratified, in seeded order), so that
    the slots' starts and ends are spread from the first.
    """

    def __init__(self, level: LevelPlan, prompts: PromptSet, *, seed: int, tag: str | None) -> None:
        self._level, self._prompts, self._tag = level, prompts.prompts, tag
        self._sent: Counter[Phase] = Counter()
        rng = random.Random(f"ramp {seed} {level.concurrency} {level.max_tokens}")
        slots = level.concurrency
        self._shares = [(i + rng.random()) / slots for i in range(slots)]
        rng.shuffle(self._shares)

    def next(self, phase: Phase, *, slot: int | None = None) -> PlannedRequest:
        """The next request of a phase; with `slot`, that slot's capped ramp request."""
        number = self._sent[phase]
        self._sent[phase] += 1
        prompt = self._prompts[(number + self._offset(phase)) % len(self._prompts)]
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
