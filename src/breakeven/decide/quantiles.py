"""Ratios of latency quantiles, from the values of single requests.

Requests that run together resemble each other, so that an interval from requests as if independent is too narrow. Here
the estimate is that of all requests and its noise comes from sections of them, each long enough to be nearly
independent: sectioning (S. Asmussen and P. Glynn, *Stochastic Simulation*, III.5a; M. Nakayama, *ACM TOMACS* 24, 2014),
on the log scale. Sections scatter around the estimate of the whole, which takes their bias into the noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from breakeven.decide.ratio import ROUNDING, LogMean, NoRatio, Ratio, unpaired
from breakeven.measure.stats import BATCHES

__all__ = ["P99_REQUESTS", "paired_quantiles", "unpaired_quantiles"]

FloatArray = NDArray[np.float64]

#: A 99th percentile of fewer requests carries no verdict.
P99_REQUESTS = 300
#: The fewest requests of a section. A high quantile needs more: so many that one of them lies beyond it.
_SECTION_REQUESTS = 5


def paired_quantiles(
    reference: Sequence[FloatArray], other: Sequence[FloatArray], p: float, *, each_s: float | None = None
) -> Ratio | NoRatio:
    """The ratio of a latency's quantile between arms that alternated.

    Args:
        reference, other: per visit, in pair order, the latencies of its requests (any unit, positive).
        p: the quantile, 0.5 or 0.99 for instance.
        each_s: how long a pair took.
    """
    if failed := _unusable(reference, p, "reference arm") or _unusable(other, p, "other arm"):
        return failed
    sections = _sections(list(zip(reference, other, strict=True)), p)
    whole = _log_quantile(np.concatenate(other), p) - _log_quantile(np.concatenate(reference), p)
    mean = _around(whole, np.array([_log_quantile(b, p) - _log_quantile(a, p) for a, b in sections]))
    if isinstance(mean, NoRatio):
        return mean
    return Ratio(
        log=mean.log,
        se=mean.se,
        df=mean.df,
        n=len(sections),
        method="pairs",
        lower_is_better=True,
        each_s=None if each_s is None else each_s * len(reference) / len(sections),
    )


def unpaired_quantiles(reference: FloatArray, other: FloatArray, p: float) -> Ratio | NoRatio:
    """The same between two windows that exist already.

    Args:
        reference, other: the latencies in the order in which the requests were sent; each is cut into as many sections
            as a throughput has batches.
    """
    if failed := _unusable([reference], p, "reference arm") or _unusable([other], p, "other arm"):
        return failed
    arms = []
    for values in (reference, other):
        sections = _sections([(part,) for part in np.array_split(values, BATCHES)], p)
        arms.append(_around(_log_quantile(values, p), np.array([_log_quantile(part, p) for (part,) in sections])))
    return unpaired(arms[0], arms[1], method="batches", lower_is_better=True)


def _sections(parts: Sequence[tuple[FloatArray, ...]], p: float) -> list[tuple[FloatArray, ...]]:
    """Neighbouring parts joined until each section has enough requests of each arm; what is left joins the last."""
    # Rounded, since 1 / (1 - 0.99) is a little less than a hundred in floats.
    enough = max(_SECTION_REQUESTS, round(1 / (1 - p)))
    sections: list[tuple[FloatArray, ...]] = []
    for part in parts:
        if sections and min(map(len, sections[-1])) < enough:
            sections[-1] = _joined(sections[-1], part)
        else:
            sections.append(part)
    if len(sections) > 1 and min(map(len, sections[-1])) < enough:
        sections[-2:] = [_joined(*sections[-2:])]
    return sections


def _joined(first: tuple[FloatArray, ...], second: tuple[FloatArray, ...]) -> tuple[FloatArray, ...]:
    return tuple(np.concatenate(arm) for arm in zip(first, second, strict=True))


def _around(whole: float, sections: FloatArray) -> LogMean | NoRatio:
    count = len(sections)
    if count < 2:
        return NoRatio("few_requests", "too few requests for two parts, between which noise could show")
    spread = math.sqrt(float(((sections - whole) ** 2).sum()) / (count - 1))
    if spread < ROUNDING:
        return NoRatio("zero_variance", f"the quantile is the same number in all {count} parts")
    return LogMean(whole, spread / math.sqrt(count), count - 1)


def _log_quantile(values: FloatArray, p: float) -> float:
    return math.log(float(np.quantile(values, p)))


def _unusable(parts: Sequence[FloatArray], p: float, whose: str) -> NoRatio | None:
    total = sum(map(len, parts))
    if not total:
        return NoRatio("arm_failed", f"no request of the {whose} ended well")
    if p >= 0.99 and total < P99_REQUESTS:
        return NoRatio("few_requests", f"{total} requests of the {whose}: a p99 needs {P99_REQUESTS}")
    if any(not np.all(part > 0) for part in parts):
        return NoRatio("some_failed", f"a latency of the {whose} is not above zero")
    return None
