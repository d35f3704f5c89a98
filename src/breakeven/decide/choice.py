"""Which arm belongs to which load: a few runs of neighbouring loads, each with the arm that is best there.

Taking the best arm at each load by itself follows the noise: neighbours would differ for no reason, and each border
costs the engine switches. So it begins with one arm for all loads, the one with the highest mean log throughput, and a
run of neighbouring loads gets another only where that one is significantly faster over the run (binary segmentation: A.
Olshen et al., *Biostatistics* 5, 2004, with Student's t of paired log ratios for the statistic). Evidence adds up over
neighbours: three percent at each of four loads are found where they could not be at one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from breakeven.decide.rates import LoadRates
from breakeven.decide.ratio import ROUNDING, NoRatio
from breakeven.decide.student import t_quantile, two_sided_p
from breakeven.decide.verdict import DELTA, SIGNIFICANCE

__all__ = ["Choice", "Segment", "choose"]

FloatArray = NDArray[np.float64]


class Segment(NamedTuple):
    """Loads from index `start` up to but without `stop` take one arm."""

    start: int
    stop: int
    arm: str

    @property
    def levels(self) -> range:
        """The indices of its loads."""
        return range(self.start, self.stop)


class Choice(NamedTuple):
    """The arm for each load.

    Attributes:
        segments: of one arm each, neighbours of different ones; they hold all loads.
        tied: for each segment the arms that can't be told apart from its own there.
        why_not: why no choice is to be made, in a sentence without its full stop; then there are no segments.
    """

    segments: tuple[Segment, ...]
    tied: tuple[tuple[str, ...], ...]
    why_not: str | None = None

    def arm_at(self, level: int) -> str:
        """The arm for the load of this index."""
        return next(each.arm for each in self.segments if each.start <= level < each.stop)


class _Test(NamedTuple):
    """How much an arm is better than another over some loads: mean log ratio, standard error, degrees of freedom."""

    log: float
    se: float
    df: float

    @property
    def p_value(self) -> float:
        return two_sided_p(self.log / self.se, self.df)

    def is_same(self, delta: float) -> bool:
        """Whether the 90 % interval lies within ±delta, and no difference is not rejected."""
        half = t_quantile(0.95, self.df) * self.se
        return abs(self.log) + half <= math.log1p(delta) and self.p_value >= SIGNIFICANCE


def choose(levels: Sequence[LoadRates], arms: Sequence[str], delta: float = DELTA, *, must: bool = False) -> Choice:
    """The arm for each load.

    A run is split off where another arm is better over it at 5 %, by Bonferroni's correction for the arms and the loads
    that the run was picked from. Where two arms are the same within `delta` (and not shown to differ) the earlier
    takes the segment: fewer drafts leave more of the KV cache and of the machine to others.

    Args:
        levels: by rising load; every arm brought something in every turn.
        arms: which to choose from, in the order in which they are preferred if they are equal: the smallest K first.
        delta: closer than this is the same.
        must: choose even where the arms can't be told apart.
    """
    pairs = _Pairs(levels, arms)
    if not must and not pairs.differ():
        return Choice((), (), _cant_tell(levels, arms))
    segments = [Segment(0, len(levels), pairs.best_over(range(len(levels))))]
    while (found := _split(segments, pairs)) is not None:
        segments = found
    segments = _joined([each._replace(arm=pairs.first_equal(each, delta)) for each in segments])
    return Choice(tuple(segments), tuple(pairs.tied(each) for each in segments))


def _cant_tell(levels: Sequence[LoadRates], arms: Sequence[str]) -> str:
    span = levels[0].name if len(levels) == 1 else f"{levels[0].name} to {levels[-1].name}"
    return (
        f"{', '.join(arms[:-1])} and {arms[-1]} can't be told apart at {span}: no table is made; measure longer "
        "(--cycles), at loads that lie further apart, or leave it as it is"
    )


class _Pairs:
    """The log ratios of all pairs of arms at all loads: `log`, `se` and `df` of shape (loads, arms, arms).

    `log[i, a, b]` is how much b is better than a; `logs` of shape (loads, arms) is the mean log throughput.
    """

    def __init__(self, levels: Sequence[LoadRates], arms: Sequence[str]) -> None:
        self.arms = list(arms)
        shape = (len(levels), len(arms), len(arms))
        self.log, self.se, self.df = np.zeros(shape), np.full(shape, np.nan), np.ones(shape)
        self.logs = np.array(
            [[-math.inf if (log := level.log(arm)) is None else log for arm in arms] for level in levels]
        )
        for i, level in enumerate(levels):
            for a, b in combinations(range(len(arms)), 2):
                self._set(i, a, b, level)

    def _set(self, i: int, a: int, b: int, level: LoadRates) -> None:
        found = level.ratio(self.arms[a], self.arms[b])
        if isinstance(found, NoRatio):
            if found.reason != "zero_variance":
                return
            # The same ratio in every turn: as sure as numbers can be.
            log, se, df = self.logs[i, b] - self.logs[i, a], ROUNDING, 1.0
        else:
            log, se, df = found.log, found.se, found.df
        self.log[i, a, b], self.log[i, b, a] = log, -log
        self.se[i, a, b] = self.se[i, b, a] = se
        self.df[i, a, b] = self.df[i, b, a] = df

    def test(self, levels: range, a: int, b: int) -> _Test | None:
        """b against a over some loads, each counting the same; df are F. Satterthwaite's (*Biometrics* 2, 1946)."""
        own = slice(levels.start, levels.stop)
        variances = self.se[own, a, b] ** 2
        if not np.isfinite(variances).all():
            return None
        total = float(variances.sum())
        df = total**2 / float((variances**2 / self.df[own, a, b]).sum())
        return _Test(float(self.log[own, a, b].mean()), math.sqrt(total) / len(levels), df)

    def differ(self) -> bool:
        """Whether any two arms do: at a load, or over all; by Bonferroni over all that is looked at."""
        n = len(self.logs)
        runs = [range(i, i + 1) for i in range(n)] + ([range(n)] if n > 1 else [])
        pairs = list(combinations(range(len(self.arms)), 2))
        tests = [found for run in runs for a, b in pairs if (found := self.test(run, a, b)) is not None]
        return any(found.p_value * len(tests) < SIGNIFICANCE for found in tests)

    def best_over(self, *runs: range) -> str:
        """The arm with the highest mean log throughput over some loads."""
        return self.arms[int(np.argmax(self.logs[[i for run in runs for i in run]].sum(axis=0)))]

    def first_equal(self, segment: Segment, delta: float) -> str:
        """The first arm that is the same as the segment's own."""
        own = self.arms.index(segment.arm)
        for other in range(own):
            found = self.test(segment.levels, other, own)
            if found is not None and found.is_same(delta):
                return self.arms[other]
        return segment.arm

    def tied(self, segment: Segment) -> tuple[str, ...]:
        """The arms that are not significantly slower than the segment's own over its loads."""
        own = self.arms.index(segment.arm)
        tests = {b: self.test(segment.levels, b, own) for b in range(len(self.arms)) if b != own}
        usable = [found for found in tests.values() if found is not None]
        return tuple(
            self.arms[b]
            for b, found in tests.items()
            if found is not None and (found.log <= 0 or found.p_value * len(usable) >= SIGNIFICANCE)
        )


def _split(segments: Sequence[Segment], pairs: _Pairs) -> list[Segment] | None:
    """The segments with one more run split off, the most significant one; None if there is no significant one."""
    candidates = [found for place in range(len(segments)) for found in _better_runs(segments[place], place, pairs)]
    if not candidates:
        return None
    _, place, run = min(candidates, key=lambda each: each[0])
    old = segments[place]
    left, right = range(old.start, run.start), range(run.stop, old.stop)
    rest = [part for part in (left, right) if part]
    kept = pairs.best_over(*rest) if rest else old.arm
    parts = [Segment(part.start, part.stop, kept) for part in rest]
    parts.append(Segment(run.start, run.stop, pairs.best_over(run)))
    found = _joined([*segments[:place], *sorted(parts), *segments[place + 1 :]])
    return found if found != list(segments) else None


def _better_runs(segment: Segment, place: int, pairs: _Pairs) -> Iterator[tuple[float, int, range]]:
    own = pairs.arms.index(segment.arm)
    family = (len(pairs.arms) - 1) * len(segment.levels)
    for start in segment.levels:
        for stop in range(start + 1, segment.stop + 1):
            for b in range(len(pairs.arms)):
                run = range(start, stop)
                found = pairs.test(run, own, b) if b != own else None
                if found is not None and found.log > 0 and found.p_value * family < SIGNIFICANCE:
                    yield found.p_value, place, run


def _joined(segments: Sequence[Segment]) -> list[Segment]:
    joined: list[Segment] = []
    for each in segments:
        if joined and joined[-1].arm == each.arm:
            joined[-1] = joined[-1]._replace(stop=each.stop)
        else:
            joined.append(each)
    return joined
