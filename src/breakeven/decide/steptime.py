"""How long a step takes, learned on line as a function of the decoding requests B and the drafted tokens K.

    log t(B, K) = surface(B, K) + mood + noise

The *surface* has a value at each K and knot of B (two knots an octave, linear in log B between them), and no shape
beyond that: a roofline's knee, a mixture of experts whose cost falls with load, padded batch sizes all fit. The
*mood* is what the machine does to all K alike (a neighbour, a clock, contexts that grow); it follows within a second
or two and cancels when K are compared, so that a probe now is compared with the main K now, not with the main K of a
minute ago. Both move by the same residual, clipped as Huber's psi does it (P. Huber, Ann. Math. Stat. 35, 1964): an
engine's steps have heavy tails.

A step that also reads prompts is longer by so many seconds a prompt token, which are learned beside; such steps teach
less than decode-only ones, but a full server has few others.

Steps that leave the drafter alone (`DEEP`) can't be longer than those of K = 0, which run it and draft nothing. Where
what was seen says so, both are taken for their mean (isotonic regression, R. Barlow et al., Statistical Inference under
Order Restrictions, 1972); where the one was not seen, it is as the other at the worst, and no better where nothing
near was seen of it either.

Where nothing has been seen the surface leans on a *trend* (`decide.trend`) plus what the nearest knot of the same K
was off it (regression kriging), and its doubt grows with the distance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from breakeven.decide.observed import DEEP
from breakeven.decide.trend import Point, Trend, fit_trend

__all__ = ["STRANGER", "StepTimes"]

#: 1, 2, 3, 4, 6, 8, 12, … 4096.
_KNOTS = (1, *(b for octave in range(1, 12) for b in (2**octave, 3 * 2 ** (octave - 1))), 4096)
_OCTAVES = [math.log2(b) for b in _KNOTS]
_MOST = _KNOTS[-1]

#: Steps after which the surface forgets: some ten seconds of an engine; the mood takes most of what is shorter.
_MOST_STEPS = 400.0
_MOOD_S, _MOOD_FADES_S = 1.5, 30.0
#: A mood is in part that of a load (what interpolates badly, how long its contexts are): a third of it is left when the
#: load jumps by so many octaves.
_MOOD_OCTAVES = 2.0
_SURE_STEPS = 30.0
#: The variance of a step that reads prompts, in that of a decode-only one.
_MIXED_NOISE = 3.0
#: Whatever its prompts are thought to cost, so much of a step is decoding.
_LEAST_SHARE = 0.3
#: Huber's constant is 1.345 standard deviations; 2.5 follows a true change sooner.
_CLIP = 2.5
#: A value half of whose weight is gone after so long without a look.
_HALF_LIFE_S = 1200.0
_LEAST_WEIGHT = 0.003
#: The trend is drawn anew so often, and where something new was seen or the load is another.
_LEAN_EVERY_S = 5.0
#: The standard deviation of what is not known: of a K seen nowhere, whose drafts may cost nothing or a step each; of
#: one that was seen elsewhere: at the most, next to that, and for each octave between.
_STRANGE, _FAR, _NEAR, _PER_OCTAVE = 0.7, 0.5, 0.03, 0.1
#: What a drafter that is kept in step may cost of a step of K = 0, at a load where `DEEP` was not seen.
_RENT = 0.1
#: Doubt from which on a load is unknown territory.
STRANGER = 0.2
#: The weight of a step time that was measured another day.
_ASSUMED_STEPS = 0.2
#: Of a ratio of two K, in ten minutes without a look.
_AGEING_VARIANCE_PER_S = 0.02**2 / 600


def _places() -> list[tuple[int, float]]:
    """For each batch its left knot, and how far towards the right one it is."""
    places, left = [(0, 0.0)], 0
    for batch in range(1, _MOST + 1):
        while left < len(_KNOTS) - 2 and _KNOTS[left + 1] <= batch:
            left += 1
        places.append((left, (math.log2(batch) - _OCTAVES[left]) / (_OCTAVES[left + 1] - _OCTAVES[left])))
    return places


_PLACES = _places()
#: The nearer of its knots.
_NEAREST = [left + (share > 0.5) for left, share in _PLACES]
#: Octaves between knots.
_APART = [[abs(a - b) for b in _OCTAVES] for a in _OCTAVES]


class StepTimes:
    """The surface and the mood.

    Args:
        ks: the K that there are, ascending.
        now_s: when it begins; times in a state are by the same clock.
    """

    def __init__(self, ks: Sequence[int], now_s: float = 0.0) -> None:
        self._ks = tuple(ks)
        self._row = {k: j for j, k in enumerate(self._ks)}
        self._is_deep = self._ks[0] == DEEP
        size = (len(self._ks), len(_KNOTS))
        self._log = _grid(size, 0.0)
        self._weight = _grid(size, 0.0)
        self._at_s = _grid(size, 0.0)
        self._prior_variance = _grid(size, math.inf)
        self._mood, self._scale = 0.0, 0.05
        self._prompt_s, self._prompt_count = 0.0, 0.0
        self._last_s = self._aged_s = now_s
        self._fitted_s = -math.inf
        self._centre, self._batch = 0, 0

    def learn(self, now_s: float, decoding: int, k: int, step_s: float, prompt_tokens: int = 0) -> None:
        """Takes a step in; one that also read `prompt_tokens` teaches less, and what reading costs."""
        batch = min(decoding, _MOST)
        if now_s - self._fitted_s > _LEAN_EVERY_S or abs(_PLACES[batch][0] - self._centre) > 1:
            self._lean(now_s, batch)
        if self._batch and batch != self._batch:
            self._mood *= math.exp(-((math.log2(batch / self._batch) / _MOOD_OCTAVES) ** 2))
        self._batch = batch
        j, (left, share) = self._row[k], _PLACES[batch]
        row, weights = self._log[j], self._weight[j]
        log = row[left] * (1 - share) + row[left + 1] * share + self._mood
        known = weights[left] * (1 - share) + weights[left + 1] * share
        say = 1.0
        if prompt_tokens:
            net_s = self._net_of_prompts(step_s, prompt_tokens, math.exp(log), known)
            # What prompts cost is known to a tenth or so, of which the rest of the step has its share.
            say = 1 / (_MIXED_NOISE * (step_s / net_s) ** 2 + (0.1 * (step_s / net_s - 1) / self._scale) ** 2)
            step_s = net_s
        off = math.log(step_s) - log
        limit = self._scale * _CLIP * (1 + 8 / known) if known > 0.1 else math.inf
        off = max(-limit, min(limit, off))
        elapsed_s, self._last_s = now_s - self._last_s, now_s
        self._mood *= max(0.0, 1 - elapsed_s / _MOOD_FADES_S)
        # What is off where little is known is the surface's fault, not the mood's.
        self._mood += say * off * min(0.2, elapsed_s / _MOOD_S) * known / (known + _SURE_STEPS)
        if known > 5:
            self._scale += say * (1.25 * abs(off) - self._scale) * 0.01
        self._move(now_s, j, left, say * (1 - share), off)
        self._move(now_s, j, left + 1, say * share, off)

    def _net_of_prompts(self, step_s: float, prompt_tokens: int, usual_s: float, known: float) -> float:
        """A mixed step without its prompts, in seconds. Learns what a token of them costs."""
        if known > 5:
            self._prompt_count = count = min(self._prompt_count + 1, _MOST_STEPS)
            off_s = step_s - usual_s - self._prompt_s * prompt_tokens
            limit_s = max(usual_s, self._prompt_s * prompt_tokens) * (_CLIP * self._scale + 4 / count)
            self._prompt_s = max(0.0, self._prompt_s + max(-limit_s, min(limit_s, off_s)) / prompt_tokens / count)
        least_s = _LEAST_SHARE * (usual_s if known > 0.1 else step_s)
        return max(step_s - self._prompt_s * prompt_tokens, min(step_s, least_s))

    def _move(self, now_s: float, j: int, i: int, part: float, off: float) -> None:
        """Moves a knot by its part in a residual."""
        if part < _LEAST_WEIGHT:
            return
        weight = self._weight[j][i] + part
        if weight == part:
            self._fitted_s = -math.inf  # the trend has something new to lean on
        self._log[j][i] += off * part / (weight + self._scale**2 / self._prior_variance[j][i])
        self._weight[j][i] = min(weight, _MOST_STEPS)
        self._at_s[j][i] = now_s

    def logs(self, decoding: int) -> list[float]:
        """The logarithm of a step's seconds for each K, without the mood."""
        left, share = _PLACES[min(decoding, _MOST)]
        logs = [row[left] * (1 - share) + row[left + 1] * share for row in self._log]
        if self._is_deep and logs[0] > logs[1]:
            deep, off = (weights[left + (share > 0.5)] + _LEAST_WEIGHT for weights in self._weight[:2])
            logs[0] = logs[1] = (logs[0] * deep + logs[1] * off) / (deep + off)
        return logs

    def expected_s(self, decoding: int, k: int) -> float:
        """How long a step takes in the present mood, in seconds."""
        return math.exp(self.logs(decoding)[self._row[k]] + self._mood)

    def variances(self, now_s: float, decoding: int) -> list[float]:
        """The variance of each of `logs`, without what all K share."""
        i, noise = _NEAREST[min(decoding, _MOST)], self._scale**2
        found = []
        for prior, weight, at_s in zip(self._prior_variance, self._weight, self._at_s, strict=True):
            age_s = now_s - at_s[i] if weight[i] else 0.0
            variance = 1 / (1 / min(prior[i], _STRANGE**2) + weight[i] / noise)
            found.append(variance + age_s * _AGEING_VARIANCE_PER_S)
        return found

    def is_strange(self, decoding: int, k: int) -> bool:
        """Whether nothing like this step, and nothing within an octave or two of it, has been seen."""
        i, j = _NEAREST[min(decoding, _MOST)], self._row[k]
        return bool(self._weight[j][i] == 0 and self._prior_variance[j][i] > STRANGER**2)

    def is_known(self, decoding: int, k: int) -> bool:
        """Whether a step like this has been seen at all."""
        return bool(self._weight[self._row[k]][_NEAREST[min(decoding, _MOST)]])

    def assume(self, decoding: int, k: int, step_s: float) -> None:
        """Takes a step time from elsewhere for a beginning, which the first step of its like outweighs."""
        i, j = _NEAREST[min(decoding, _MOST)], self._row[k]
        self._log[j][i], self._weight[j][i] = math.log(step_s), _ASSUMED_STEPS
        self._lean(self._aged_s, min(decoding, _MOST))

    def state(self) -> dict[str, Any]:
        """What is known, as JSON has it: for each K the knots that were seen."""
        cells = [
            [k, _KNOTS[i], self._log[j][i], self._weight[j][i], self._at_s[j][i]]
            for j, k in enumerate(self._ks)
            for i in range(len(_KNOTS))
            if self._weight[j][i]
        ]
        prompts = {"prompt_s": self._prompt_s, "prompt_count": self._prompt_count}
        return {"cells": cells, "mood": self._mood, "scale": self._scale, **prompts}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes a state over; K that there are no longer are left out.

        Raises:
            ValueError: it is no state.
        """
        place = {b: i for i, b in enumerate(_KNOTS)}
        for k, knot, log, weight, at_s in state["cells"]:
            if not (knot in place and math.isfinite(log) and 0 <= weight <= _MOST_STEPS and math.isfinite(at_s)):
                raise ValueError(f"a step time that is none: {[k, knot, log, weight, at_s]}")
            if k in self._row:
                j, i = self._row[k], place[knot]
                self._log[j][i], self._weight[j][i], self._at_s[j][i] = float(log), float(weight), float(at_s)
        mood, scale, prompt_s, count = (float(state[name]) for name in ("mood", "scale", "prompt_s", "prompt_count"))
        if not (math.isfinite(mood) and 0 < scale < 10 and 0 <= prompt_s < 1 and 0 <= count <= _MOST_STEPS):
            raise ValueError("a mood or a cost of prompts that is none")
        self._mood, self._scale, self._prompt_s, self._prompt_count = mood, scale, prompt_s, count
        self._batch = 0

    def _lean(self, now_s: float, decoding: int) -> None:
        """Ages what was seen, and puts the surface where nothing was on the trend around the present batch."""
        kept = 0.5 ** ((now_s - self._aged_s) / _HALF_LIFE_S)
        self._fitted_s = self._aged_s = now_s
        self._centre = _PLACES[decoding][0]
        centre = math.log2(decoding)
        self._weight = [[w * kept if w * kept > _LEAST_WEIGHT else 0.0 for w in row] for row in self._weight]
        points = [
            Point(_KNOTS[i], k, math.exp(self._log[j][i]), _nearness(weight, _OCTAVES[i] - centre))
            for j, k in enumerate(self._ks)
            for i, weight in enumerate(self._weight[j])
            if weight
        ]
        if points:
            trend = fit_trend(points, self._ks, decoding)
            for j, k in enumerate(self._ks):
                self._lean_row(j, k, trend)
            if self._is_deep:
                self._lean_deep()

    def _lean_row(self, j: int, k: int, trend: Trend) -> None:
        weights, row, variances = self._weight[j], self._log[j], self._prior_variance[j]
        seen = [i for i, weight in enumerate(weights) if weight]
        off = {i: row[i] - trend.log_s(_KNOTS[i], k) for i in seen}
        for i, weight in enumerate(weights):
            if not weight:
                nearest = min(seen, key=_APART[i].__getitem__, default=None)
                row[i] = trend.log_s(_KNOTS[i], k)
                variances[i] = _STRANGE**2
                if nearest is not None:
                    octaves = _APART[i][nearest]
                    row[i] += off[nearest] * math.exp(-octaves / 2)
                    variances[i] = min(_FAR, _NEAR + _PER_OCTAVE * octaves) ** 2

    def _lean_deep(self) -> None:
        """Where the drafter was never left alone, a step that does is as one of K = 0 at the worst, and conversely."""
        (deep, off), (deep_weights, off_weights), variances = self._log[:2], self._weight[:2], self._prior_variance[0]
        for i, (deep_weight, off_weight) in enumerate(zip(deep_weights, off_weights, strict=True)):
            if not deep_weight:
                is_strange = variances[i] > STRANGER**2
                deep[i] = off[i] if is_strange and off_weight else min(deep[i], off[i])
                if off_weight:
                    variances[i] = min(variances[i], _RENT**2)
            elif not off_weight:
                off[i] = max(deep[i], off[i])


def _nearness(weight: float, octaves: float) -> float:
    """A point's say in the trend: of some twenty steps at most, and of those an octave or two away little."""
    return min(weight, 20.0) * math.exp(-octaves * octaves / 4)


def _grid(size: tuple[int, int], value: float) -> list[list[float]]:
    return [[value] * size[1] for _ in range(size[0])]
