"""The smallest load that reaches 95 % of an arm's highest throughput."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from breakeven.decide.band import interpolation, points
from breakeven.decide.ratio import LogMean, NoRatio, unpaired
from breakeven.decide.student import t_quantile
from breakeven.measure.stats import Interval

__all__ = ["KNEE_SHARE", "Knee", "knee"]

FloatArray = NDArray[np.float64]

KNEE_SHARE = 0.95
_DRAWS = 2000
_SEED = 0


class Knee(Struct, frozen=True, kw_only=True):
    """An arm's knee.

    Attributes:
        kind: `found`; `at_or_below_lowest`, where the lowest load reaches it already; `at_or_above_highest`, where
            the last load's throughput is surely more than 5 % above the one's before; `unknown`.
        load: the estimate, or the end of the range that it lies beyond; None if unknown.
        ci95: None except where found.
        grows: whether throughput at the last load is surely above that at the one before, by however little.
        why_not: why it is unknown.
    """

    kind: Literal["found", "at_or_below_lowest", "at_or_above_highest", "unknown"]
    load: float | None = None
    ci95: Interval | None = None
    grows: bool = False
    why_not: str | None = None


def knee(levels: Mapping[float, LogMean | NoRatio]) -> Knee:
    """The knee, from the mean log throughput at each load.

    The estimate lies on straight lines of log throughput over log load. The interval is a parametric bootstrap's (B.
    Efron and R. Tibshirani, *An Introduction to the Bootstrap*, 1993, ch. 6): each load's mean is drawn again from its
    t distribution, 2,000 times with a fixed seed, and the interval holds the middle 95 % of the knees, both on straight
    lines and on cubics, since throughput bends most where the knee is.
    """
    usable = {load: mean for load, mean in sorted(levels.items()) if isinstance(mean, LogMean)}
    if len(usable) < 2:
        return Knee(kind="unknown", why_not=f"{len(usable)} load{'s' * (len(usable) != 1)} with an interval: needs two")
    loads, means = list(usable), list(usable.values())
    x = np.log(loads)
    logs, errors = np.array([mean.log for mean in means]), np.array([mean.se for mean in means])
    place = float(_knees(x, logs[None], reach=0)[0])
    if place <= x[0]:
        return Knee(kind="at_or_below_lowest", load=loads[0])
    grows = _grows(means[-2], means[-1], 0.0)
    # Growth by a percent, however sure, leaves the knee where it is; by surely more than 5 % it doesn't.
    if _grows(means[-2], means[-1], -math.log(KNEE_SHARE)):
        return Knee(kind="at_or_above_highest", load=loads[-1], grows=grows)
    noise = np.random.default_rng(_SEED).standard_t([mean.df for mean in means], size=(_DRAWS, len(means)))
    drawn = logs + errors * noise
    ends = np.array([np.quantile(_knees(x, drawn, reach), [0.025, 0.975]) for reach in (0, 1)])
    ci95 = Interval(math.exp(ends[:, 0].min()), math.exp(ends[:, 1].max()))
    return Knee(kind="found", load=math.exp(place), ci95=ci95, grows=grows)


def _grows(before: LogMean, last: LogMean, by: float) -> bool:
    """Whether the log throughput is higher by more than `by`, by Welch's test at 5 % two-sided."""
    growth = unpaired(before, last, method="batches")
    if isinstance(growth, NoRatio):
        return last.log - before.log > by
    return growth.log - by > t_quantile(0.975, growth.df) * growth.se


def _knees(x: FloatArray, logs: FloatArray, reach: int) -> FloatArray:
    """Log loads of the knees of many curves, of shape (curves, loads); `reach` as in `interpolation`."""
    at = points(x)
    over = logs @ interpolation(x, at, reach).T - (logs.max(axis=1, keepdims=True) + math.log(KNEE_SHARE))
    first = np.argmax(over >= 0, axis=1)
    rows, before = np.arange(len(over)), np.maximum(first - 1, 0)
    low, high = over[rows, before], over[rows, first]
    share = np.where(first > 0, -low / np.where(high > low, high - low, 1), 0)
    found: FloatArray = at[before] + share * (at[first] - at[before])
    return found
