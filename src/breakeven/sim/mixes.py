"""What is asked over time: kinds of prompts by turns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from breakeven.errors import UsageError
from breakeven.load.prompts import Prompt, PromptSet

__all__ = ["Mix", "Phase", "read_mix"]


class Phase(NamedTuple):
    """So many seconds of prompts of these kinds, each as often as it is named; no kinds are all."""

    kinds: tuple[str, ...]
    seconds: float


class Mix:
    """Phases by turns, over and over.

    Args:
        prompts: what there is.
        phases: one or more.

    Raises:
        UsageError: a kind has no prompts.
    """

    def __init__(self, prompts: PromptSet, phases: Sequence[Phase]) -> None:
        there = sorted({prompt.kind for prompt in prompts.prompts})
        for kind in (kind for phase in phases for kind in phase.kinds):
            if kind not in there:
                raise UsageError(f"--mix: no prompts of the kind {kind}; there are {', '.join(there)}")
        self.phases = tuple(phases)
        self._ends_s = list(accumulate(phase.seconds for phase in phases))
        self._prompts = [_in_turn(prompts, phase) for phase in phases]
        self._sent = [0] * len(phases)

    def phase_at(self, at_s: float) -> int:
        """The number of the phase at a moment."""
        at_s %= self._ends_s[-1]
        return next(i for i, end_s in enumerate(self._ends_s) if at_s < end_s)

    def prompts_of(self, phase: int) -> tuple[Prompt, ...]:
        """All prompts of a phase, in the order in which they are sent."""
        return self._prompts[phase]

    def next(self, at_s: float) -> Prompt:
        """The next prompt."""
        phase = self.phase_at(at_s)
        number = self._sent[phase]
        self._sent[phase] += 1
        return self._prompts[phase][number % len(self._prompts[phase])]


def _in_turn(prompts: PromptSet, phase: Phase) -> tuple[Prompt, ...]:
    if not phase.kinds:
        return prompts.prompts
    of_kind = {kind: [prompt for prompt in prompts.prompts if prompt.kind == kind] for kind in phase.kinds}
    rounds = max(map(len, of_kind.values()))
    return tuple(of_kind[kind][i % len(of_kind[kind])] for i in range(rounds) for kind in phase.kinds)


def read_mix(text: str) -> tuple[Phase, ...]:
    """The phases of `KIND[+KIND…][:SECONDS],…`, of which a phase without a length lasts five minutes.

    Raises:
        UsageError: it is written otherwise.
    """
    phases = []
    for part in text.split(","):
        names, _, seconds = part.partition(":")
        kinds = tuple(names.split("+"))
        try:
            lasts_s = float(seconds or 300.0)
        except ValueError:
            lasts_s = 0.0
        if not (all(kinds) and 1 <= lasts_s <= 1e6):
            raise UsageError(f"--mix {text}: give KIND[+KIND…][:SECONDS], … such as code+json:120,chat:120")
        phases.append(Phase(kinds, lasts_s))
    return tuple(phases)
