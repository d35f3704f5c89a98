"""An engine of a few lines that shows a policy what it wants to see, in its own time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from breakeven.decide.observed import Observation, Step
from breakeven.decide.policy import Policy

#: Milliseconds of a step, by decoding requests and drafted tokens.
Steps = Callable[[int, int], float]


def roofline(batch: int, k: int) -> float:
    """20 ms, a tenth of it for each draft, and what more than 24 tokens cost: K=3 pays below some 14 requests."""
    return 20.0 + 2.0 * k + 0.7 * max(0, batch * (k + 1) - 24)


class ByHand:
    """Runs a policy for so many seconds at a time.

    Args:
        policy: who chooses.
        steps: milliseconds of a step.
        chances: of each draft position.
        jitter: the deviation of the logarithm of a step.
        spoil: what is made of an observation before the policy sees it.
    """

    def __init__(
        self,
        policy: Policy,
        steps: Steps = roofline,
        chances: Sequence[float] = (0.7, 0.7, 0.7),
        *,
        jitter: float = 0.03,
        seed: int = 1,
        spoil: Callable[[Observation], Observation] = lambda seen: seen,
    ) -> None:
        self.policy, self.steps, self.chances, self.jitter, self.spoil = policy, steps, list(chances), jitter, spoil
        self.rng = random.Random(seed)
        self.now_ns = 0
        self.last: Step | None = None
        self.waiting = 0
        self.slow: Callable[[float], float] = lambda now_s: 1.0

    def run(self, seconds: float, batch: int | Callable[[float], int]) -> list[int]:
        """The K of each step."""
        until_ns, chosen = self.now_ns + seconds * 1e9, []
        while self.now_ns < until_ns:
            b = batch if isinstance(batch, int) else batch(self.now_ns / 1e9)
            k = self.policy.choose(self.spoil(Observation(self.now_ns, b, self.waiting, 0.2, self.last)))
            chosen.append(k)
            factor = math.exp(self.rng.gauss(0, self.jitter)) * self.slow(self.now_ns / 1e9)
            step_ns = round(self.steps(b, k) * 1e6 * factor)
            self.last = Step(self.now_ns, step_ns, b, k, b if k else 0, self.accepted(b, k), 0)
            self.now_ns += step_ns
        return chosen

    def accepted(self, batch: int, k: int) -> tuple[int, ...]:
        """Of each position how many drafts had it accepted."""
        left, found = batch, []
        for i in range(k):
            left = sum(self.rng.random() < self.chances[i] for _ in range(left))
            found.append(left)
        return tuple(found)


def share(chosen: Sequence[int], k: int) -> float:
    """The share of steps that drafted `k` tokens."""
    return sum(each == k for each in chosen) / len(chosen)
