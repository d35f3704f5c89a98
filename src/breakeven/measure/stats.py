"""Small statistics: one distribution's summary, and the interval of a mean from batches."""

from __future__ import annotations

import math

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

__all__ = ["BATCHES", "Distribution", "Interval", "batch_interval", "distribution"]

#: Non-overlapping batches of a throughput interval, and Student's t for 97.5 % at BATCHES - 1 degrees of freedom
#: (Abramowitz & Stegun, table 26.10). With few long batches the batch means are nearly independent, which is what
#: the interval's coverage rests on; docs/statistics.md has it.
BATCHES = 6
_T_975_DF5 = 2.5705818

FloatArray = NDArray[np.float64]


class Distribution(Struct, frozen=True, kw_only=True):
    """A sample in numbers. `std` is the sample's (n - 1), None below two values; all None where `count` is 0."""

    count: int
    mean: float | None = None
    std: float | None = None
    min: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None


class Interval(Struct, frozen=True):
    """A 95 % interval."""

    low: float
    high: float

    @property
    def log_half_width(self) -> float:
        """Half of its width on the log scale: 0.03 is about 3 %."""
        return math.log(self.high / self.low) / 2


def distribution(values: FloatArray, weights: NDArray[np.int64] | None = None) -> Distribution:
    """Summarises values; with whole-number `weights`, as if each value stood there that many times.

    Percentiles interpolate linearly between order statistics (Hyndman & Fan's type 7, numpy's default).
    """
    if weights is None:
        weights = np.ones(len(values), dtype=np.int64)
    values, weights = values[weights > 0], weights[weights > 0]
    count = int(weights.sum())
    if count == 0:
        return Distribution(count=0)
    mean = float(np.dot(values, weights) / count)
    std = math.sqrt(float(np.dot((values - mean) ** 2, weights)) / (count - 1)) if count > 1 else None
    p50, p90, p95, p99 = _percentiles(values, weights, (0.5, 0.9, 0.95, 0.99))
    return Distribution(
        count=count,
        mean=mean,
        std=std,
        min=float(values.min()),
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        max=float(values.max()),
    )


def _percentiles(values: FloatArray, weights: NDArray[np.int64], shares: tuple[float, ...]) -> list[float]:
    order = np.argsort(values, kind="stable")
    ranked, upto = values[order], np.cumsum(weights[order])
    position = np.array(shares) * (upto[-1] - 1)
    below = np.floor(position).astype(np.int64)
    above = np.minimum(below + 1, upto[-1] - 1)
    low, high = (ranked[np.searchsorted(upto, rank, side="right")] for rank in (below, above))
    return [float(value) for value in low + (position - below) * (high - low)]


def batch_interval(batches: FloatArray) -> Interval | None:
    """The 95 % interval of the mean of `BATCHES` batch means, by Student's t; None for another number of batches."""
    if len(batches) != BATCHES:
        return None
    mean = float(batches.mean())
    half = _T_975_DF5 * float(batches.std(ddof=1)) / math.sqrt(BATCHES)
    return Interval(mean - half, mean + half)
