"""What a policy believes of its engine and drafter, from the steps it was shown: all parts of it together.

Of a batch of B requests, K is worth y(K) / t(B, K) tokens a second and request: `decide.yields` knows y,
`decide.steptime` t, `decide.comeback` what a pause does to y, and `decide.prices` what a switch costs. Doubts are
first-order: variances of the parts, carried through the logarithm of their ratio (the delta method).

A pause is the time at K = 0 or, where the engine can leave the drafter alone, that at `DEEP`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from breakeven.decide.comeback import Comeback
from breakeven.decide.observed import DEEP, Step
from breakeven.decide.prices import Prices
from breakeven.decide.schedule import Level
from breakeven.decide.steptime import StepTimes
from breakeven.decide.yields import Yields

__all__ = ["Belief", "Estimate"]


#: The share of acceptance that is taken to be left after `DEEP`. How long a return takes is measured, which together
#: with it makes the price.
_LEFT_BEHIND = 0.5


class Estimate(NamedTuple):
    """What is believed of a K at a load: tokens a second of all requests; the doubt of its ratio to the K in use."""

    k: int
    tokens_per_s: float
    doubt: float


class Belief:
    """Learns from steps, and compares K.

    Args:
        ks: the K that there are, ascending.
        now_s: when it begins.
    """

    def __init__(self, ks: Sequence[int], now_s: float = 0.0) -> None:
        self._ks = tuple(ks)
        self._place = {k: j for j, k in enumerate(self._ks)}
        self._yields, self._times = Yields(max(self._ks)), StepTimes(self._ks, now_s)
        self._pause = self._ks[0] if self._ks[0] <= 0 else None  # the K that a pause is spent at
        self._prices, self._comeback = Prices(), Comeback(_LEFT_BEHIND if self._pause == DEEP else 1.0)
        self._before: int | None = None  # the K of the step before
        self._log_tokens = [0.0] * len(self._ks)

    def assume(self, levels: Sequence[Level]) -> None:
        """Begins with step times that follow from measured rates, for a drafter as it is guessed to be."""
        tokens = self._yields.tokens()
        for level in levels:
            batch = max(1, round(level.batch))
            for k, rate in level.rates.items():
                if k in self._place:
                    self._times.assume(batch, k, batch * tokens[k] / rate.value)

    def learn(self, now_s: float, step: Step) -> None:
        """Takes a step in. The first one after a switch teaches what a switch costs, and nothing else."""
        before, self._before = self._before, step.k
        b, k, took_s = step.decoding, step.k, step.step_ns / 1e9
        if before == k:
            if k > 0:
                self._learn_drafts(now_s, b, k, step.accepted)
            self._times.learn(now_s, b, k, took_s, step.prefill_tokens)
        elif before is not None and not step.prefill_tokens and self._times.is_known(b, k):
            share = (b + sum(step.accepted)) / (b * self._yields.tokens()[max(k, 0)])
            self._prices.learn(before, k, took_s, share * self._times.expected_s(b, k))

    def _learn_drafts(self, now_s: float, decoding: int, k: int, accepted: Sequence[int]) -> None:
        """Takes drafts in for what they would have been of a drafter that is in step."""
        hits = accepted[0] if accepted else 0
        # Drafts of a drafter that was left alone say what is left of it, and nothing of the prompts.
        is_lost = self._pause == DEEP and self._comeback.is_stale(now_s)
        if self._comeback.look(now_s, hits, decoding, self._yields.first) and not is_lost:
            self._yields.learn(now_s, decoding * self._comeback.fresh(now_s), k, accepted)

    def begin(self, now_s: float, k: int) -> None:
        """Takes over while `k` is in use."""
        if k == DEEP:
            self._comeback.pause(now_s, self._yields.first)

    def switched(self, now_s: float, before: int, after: int, saved_s: float | None = None) -> None:
        """The K in use changes: a pause begins or ends, or neither. `saved_s` is what being `DEEP` saved, if known."""
        if saved_s is not None:
            self._comeback.saved(saved_s, self._yields.tokens()[-1])
        if after == self._pause:
            self._comeback.pause(now_s, self._yields.first)
        elif before == self._pause:
            self._comeback.resume(now_s)

    def gains(self, decoding: int, k: int) -> list[float]:
        """For each K the logarithm of its tokens a second over those of `k`; as of the last `doubts`."""
        logs = self._times.logs(decoding)
        mine = self._log_tokens[self._place[k]] - logs[self._place[k]]
        return [tokens - log - mine for tokens, log in zip(self._log_tokens, logs, strict=True)]

    def doubts(self, now_s: float, decoding: int, k: int) -> list[float]:
        """The standard deviation of each of the gains over `k`; zero for `k` itself."""
        tokens = self._yields.tokens()
        self._log_tokens = [math.log(tokens[max(each, 0)]) for each in self._ks]
        return self._doubts(tokens, now_s, decoding, k)

    def _doubts(self, tokens: Sequence[float], now_s: float, decoding: int, k: int) -> list[float]:
        times, chances = self._times.variances(now_s, decoding), self._yields.variances(now_s)
        own, mine = times[self._place[k]], self._yields.slopes(tokens, k)
        doubts = []
        for each, time in zip(self._ks, times, strict=True):
            differences = zip(self._yields.slopes(tokens, each), mine, chances, strict=True)
            doubts.append(math.sqrt(time + own + sum((a - b) ** 2 * chance for a, b, chance in differences)))
        doubts[self._place[k]] = 0.0
        return doubts

    def estimates(self, now_s: float, decoding: int, k: int) -> list[Estimate]:
        """What is believed of each K, ascending."""
        tokens = self._yields.tokens()
        doubts = self._doubts(tokens, now_s, decoding, k)
        return [
            Estimate(each, decoding * tokens[max(each, 0)] / self._times.expected_s(decoding, each), doubt)
            for each, doubt in zip(self._ks, doubts, strict=True)
        ]

    def step_s(self, decoding: int, k: int) -> float:
        """How long a decode-only step takes now, in seconds."""
        return self._times.expected_s(decoding, k)

    def token_s(self, decoding: int, k: int) -> float:
        """The time per output token of a request, in seconds."""
        return self._times.expected_s(decoding, k) / self._yields.tokens()[max(k, 0)]

    def is_strange(self, decoding: int, k: int) -> bool:
        """Whether nothing like such a step has been seen."""
        return self._times.is_strange(decoding, k)

    def price_s(self, before: int, after: int) -> float:
        """What a switch costs, in seconds of work. What coming back from `DEEP` costs is asked for going there."""
        tokens, comeback_s = self._yields.tokens(), 0.0
        if after == DEEP:
            comeback_s = self._comeback.rent_s(tokens[-1])
        elif before == self._pause != DEEP:
            comeback_s = self._comeback.price_s(tokens[after])
        return self._prices.of(before, after) + comeback_s

    def asks(self, now_s: float) -> bool:
        """Whether drafts of a drafter that is left alone would tell what is left of it."""
        return self._pause == DEEP and self._comeback.asks(now_s)

    def visit_s(self, after: int) -> float:
        """What it costs to come back from `DEEP` and to go there again."""
        return self._comeback.price_s(self._yields.tokens()[-1]) + self.price_s(after, DEEP)

    def look_s(self, before: int, after: int) -> float:
        """What the two switches of a probe cost, in seconds of work."""
        return self._prices.of(before, after) + self._prices.of(after, before)

    def state(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        return {name: part.state() for name, part in self._parts().items()}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes a state over; if it raises, nothing here is of use any more.

        Raises:
            KeyError, TypeError, ValueError: it is no state.
        """
        for name, part in self._parts().items():
            part.restore(state[name])

    def _parts(self) -> dict[str, Yields | StepTimes | Prices | Comeback]:
        return {"yields": self._yields, "times": self._times, "prices": self._prices, "comeback": self._comeback}
