"""The log ratio between measured loads, with its 95 % band, over log load."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from breakeven.decide.ratio import Ratio
from breakeven.decide.student import t_quantile
from breakeven.measure.stats import Interval

__all__ = ["Curve", "interpolation", "points"]

FloatArray = NDArray[np.float64]

#: Points at which a curve is looked at between two neighbouring loads; where it crosses a line is between two of them.
_POINTS = 12


class Curve(Struct, frozen=True):
    """Gains (log ratios, positive where the other arm is better) at loads in rising order.

    An interpolated gain is a weighted sum of measured ones, so that its variance is the sum of theirs with squared
    weights, and its degrees of freedom are F. Satterthwaite's (*Biometrics Bulletin* 2, 1946). Each load has a variance
    of its own: where the noise differs between loads, one pooled over them is too small for some (docs/statistics.md).

    Two interpolations bear the band: the straight line between neighbours, right for a curve with kinks (a server that
    switches K), and the cubic through four of them, right for a smooth one. Where they differ the band spans both.
    """

    loads: tuple[float, ...]
    ratios: tuple[Ratio, ...]

    def zeros(self, low: float, high: float) -> Interval | None:
        """The hull of all loads from `low` to `high` at which the band holds 0; None if it does at none."""
        at = points(np.log([load for load in self.loads if low <= load <= high]))
        below, above = self._band(at)
        # Where an edge of the band is zero the other is not beyond it: every root of either belongs to the set.
        held = np.concatenate([at[(below <= 0) & (above >= 0)], _roots(at, below), _roots(at, above)])
        return Interval(float(np.exp(held.min())), float(np.exp(held.max()))) if len(held) else None

    def crossing(self, low: float, high: float) -> float | None:
        """Where the straight lines cross 0 from `low` to `high`; the middle of the outer ones if they do more often."""
        within = [
            (load, ratio.gain) for load, ratio in zip(self.loads, self.ratios, strict=True) if low <= load <= high
        ]
        loads, gains = np.array(within).T
        found = _roots(np.log(loads), gains)
        return float(np.exp((found[0] + found[-1]) / 2)) if len(found) else None

    def _band(self, at: FloatArray) -> tuple[FloatArray, FloatArray]:
        gains = np.array([ratio.gain for ratio in self.ratios])
        variances, df = np.array([(ratio.se**2, ratio.df) for ratio in self.ratios]).T
        lows, highs = [], []
        for reach in (0, 1):
            weights = interpolation(np.log(self.loads), at, reach)
            parts = weights**2 * variances
            variance = parts.sum(axis=1)
            quantiles = [t_quantile(0.975, float(own)) for own in variance**2 / (parts**2 / df).sum(axis=1)]
            half = np.array(quantiles) * np.sqrt(variance)
            lows.append(weights @ gains - half)
            highs.append(weights @ gains + half)
        return np.minimum(*lows), np.maximum(*highs)


def interpolation(x: FloatArray, at: FloatArray, reach: int) -> FloatArray:
    """Lagrange's weights: what each value at `x` counts for at each point, of shape (points, values).

    Args:
        x: at least two places in rising order.
        at: points from the first to the last of them.
        reach: 0 for the straight line between a point's two neighbours, 1 for the cubic through one more on either side
            (a parabola in the first and last gap).
    """
    left = np.clip(np.searchsorted(x, at, side="right") - 1, 0, len(x) - 2)
    weights = np.zeros((len(at), len(x)))
    for i in np.unique(left):
        rows, nodes = left == i, range(max(0, i - reach), min(len(x), i + 2 + reach))
        for j in nodes:
            others = [k for k in nodes if k != j]
            weights[rows, j] = np.prod([(at[rows] - x[k]) / (x[j] - x[k]) for k in others], axis=0)
    return weights


def points(x: FloatArray) -> FloatArray:
    """All of `x` with points evenly between its neighbours."""
    gaps = [np.linspace(a, b, _POINTS, endpoint=False) for a, b in pairwise(x)]
    return np.concatenate([*gaps, x[-1:]])


def _roots(x: FloatArray, y: FloatArray) -> FloatArray:
    """Where straight lines through the points change their sign, in rising order."""
    i = np.flatnonzero(np.sign(y[:-1]) * np.sign(y[1:]) < 0)
    roots: FloatArray = x[i] - y[i] * (x[i + 1] - x[i]) / (y[i + 1] - y[i])
    return np.sort(np.concatenate([x[y == 0], roots]))
