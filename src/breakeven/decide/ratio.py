"""How many times the one arm is the other at one load, with its standard error, on the log scale.

Ratios of rates multiply, and their noise does too: on the log scale both add up, and swapping the arms only changes the
sign. Whatever can't be compared is a `NoRatio` with its reason; no NaN leaves this module.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from msgspec import Struct

from breakeven.decide.student import t_quantile, two_sided_p
from breakeven.measure.stats import BATCHES, Interval

__all__ = [
    "ROUNDING",
    "LogMean",
    "Method",
    "NoRatio",
    "Ratio",
    "Reason",
    "log_mean",
    "paired",
    "unpaired",
    "window_mean",
]

#: Where the standard error comes from: the pairs of visits, repeated sweeps, or the batches within each arm's window.
Method = Literal["pairs", "sweeps", "batches"]
Reason = Literal["arm_failed", "some_failed", "too_few", "zero_variance", "no_interval", "few_requests"]

#: A spread below one in a billion is rounding: the values are the same number, not a measurement of noise.
ROUNDING = 1e-9


#: Pairs from which the effect of their order is worth the degree of freedom that it costs: here t grows by 3 %, with
#: four pairs by 35 %. It is the default of `compare`; with drift of 2 % a turn the interval is 15 % narrower, with 5 %
#: it is 40 % (docs/statistics.md).
_ORDERED = 8


class NoRatio(Struct, frozen=True):
    """Why there is no ratio, as a word and in words."""

    reason: Reason
    detail: str


class LogMean(Struct, frozen=True):
    """The mean of an arm's log throughput (or latency) at a load, with its standard error and degrees of freedom."""

    log: float
    se: float
    df: float


class Ratio(Struct, frozen=True, kw_only=True):
    """Other arm over reference at one load.

    Attributes:
        log: the estimate, natural logarithm.
        se, df: its standard error and degrees of freedom.
        n: how many observations it rests on: pairs, or the smaller arm's sweeps or batches.
        method: what the observations are.
        lower_is_better: true for latencies, whose ratio below 1 is a gain.
        each_s: what one more observation would cost in seconds, where that is known.
    """

    log: float
    se: float
    df: float
    n: int
    method: Method
    lower_is_better: bool = False
    each_s: float | None = None

    @property
    def value(self) -> float:
        """The ratio itself."""
        return math.exp(self.log)

    @property
    def gain(self) -> float:
        """The log ratio with its sign such that positive means: the other arm is the better one."""
        return -self.log if self.lower_is_better else self.log

    @property
    def p_value(self) -> float:
        """Two-sided, of no difference."""
        return two_sided_p(self.log / self.se, self.df)

    def interval(self, confidence: float = 0.95) -> Interval:
        """Student's t interval of the ratio."""
        half = t_quantile((1 + confidence) / 2, self.df) * self.se
        return Interval(math.exp(self.log - half), math.exp(self.log + half))


def paired(
    reference: Sequence[float],
    other: Sequence[float],
    *,
    method: Method = "pairs",
    lower_is_better: bool = False,
    each_s: float | None = None,
    names: tuple[str, str] = ("the reference arm", "the other arm"),
) -> Ratio | NoRatio:
    """The ratio from pairs of neighbouring visits (A B | B A | …) or from alternating sweeps: t over log ratios.

    Drift favours the first visit of each pair, so the arms in turn: it falls out of the mean, and from `_ORDERED` pairs
    on out of the noise too, by the analysis of a crossover, in which pairs are compared with those of the same order
    (M. Hills and P. Armitage, *Br. J. Clin. Pharmacol.* 8, 1979).

    Args:
        reference, other: each arm's throughput (or latency) in pair order, of equal length; the reference goes first
            in every other pair.
        each_s: how long a pair took.
        names: what the arms are called where one of them failed.
    """
    if failed := _unusable(reference, names[0]) or _unusable(other, names[1]):
        return failed
    logs = np.log(np.asarray(other)) - np.log(np.asarray(reference))
    mean = _mean_of(logs)
    if isinstance(mean, NoRatio):
        return mean
    if len(logs) >= _ORDERED:
        mean = _mean_of_both_orders(logs[::2], logs[1::2])
    return Ratio(
        log=mean.log,
        se=mean.se,
        df=mean.df,
        n=len(logs),
        method=method,
        lower_is_better=lower_is_better,
        each_s=each_s,
    )


def unpaired(
    reference: LogMean | NoRatio,
    other: LogMean | NoRatio,
    *,
    method: Method,
    lower_is_better: bool = False,
    each_s: float | None = None,
) -> Ratio | NoRatio:
    """The ratio of two arms that were measured one after the other.

    After B. L. Welch (*Biometrika* 34, 1947). It knows the noise within each arm and nothing of what the machine did
    between them: under drift of some percent its 95 % intervals hold the truth in 83 to 90 of 100 cases.
    """
    if isinstance(reference, NoRatio):
        return reference
    if isinstance(other, NoRatio):
        return other
    variances = np.array([reference.se**2, other.se**2])
    if math.sqrt(variances.sum()) < ROUNDING:
        return NoRatio("zero_variance", "all values of each arm are the same number")
    return Ratio(
        log=other.log - reference.log,
        se=math.sqrt(variances.sum()),
        df=float(variances.sum() ** 2 / (variances**2 / np.array([reference.df, other.df])).sum()),
        n=int(min(reference.df, other.df)) + 1,
        method=method,
        lower_is_better=lower_is_better,
        each_s=each_s,
    )


def log_mean(values: Sequence[float]) -> LogMean | NoRatio:
    """An arm's mean over visits or repeated sweeps that count as independent."""
    if failed := _unusable(values, "the arm"):
        return failed
    return _mean_of(np.log(np.asarray(values)))


def window_mean(value: float, ci95: tuple[float, float] | None) -> LogMean | NoRatio:
    """An arm's mean from one window's throughput and its interval of batch means.

    The standard error goes to the log scale by the delta method: d log v = dv / v.
    """
    if not value > 0:
        return NoRatio("arm_failed", "the arm brought no token")
    if ci95 is None:
        return NoRatio("no_interval", "the window was too short for an interval; measure longer")
    half = (ci95[1] - ci95[0]) / 2
    return LogMean(math.log(value), half / t_quantile(0.975, BATCHES - 1) / value, BATCHES - 1)


def _mean_of(logs: np.ndarray[tuple[int], np.dtype[np.float64]]) -> LogMean | NoRatio:
    if len(logs) < 2:
        return NoRatio("too_few", f"{len(logs)} observation{'s' * (len(logs) != 1)}: noise needs at least two to show")
    spread = float(logs.std(ddof=1))
    if spread < ROUNDING:
        return NoRatio("zero_variance", f"all {len(logs)} observations are the same number")
    return LogMean(float(logs.mean()), spread / math.sqrt(len(logs)), len(logs) - 1)


def _mean_of_both_orders(
    forth: np.ndarray[tuple[int], np.dtype[np.float64]], back: np.ndarray[tuple[int], np.dtype[np.float64]]
) -> LogMean:
    """The middle of the two orders' means, with the spread within the orders."""
    df = len(forth) + len(back) - 2
    squares = sum(float(((logs - logs.mean()) ** 2).sum()) for logs in (forth, back))
    # Where the pairs differ by their order alone, what is left of the spread is rounding; it still has to divide.
    spread = max(math.sqrt(squares / df), ROUNDING)
    return LogMean(float(forth.mean() + back.mean()) / 2, spread / 2 * math.sqrt(1 / len(forth) + 1 / len(back)), df)


def _unusable(values: Sequence[float], whose: str) -> NoRatio | None:
    """Leaving out the visits that failed would compare what is left with another load, so they spoil the ratio."""
    usable = sum(math.isfinite(value) and value > 0 for value in values)
    if usable == len(values):
        return None
    if not usable:
        return NoRatio("arm_failed", f"{whose} brought nothing in any of {len(values)} visits")
    return NoRatio("some_failed", f"{whose} brought nothing in {len(values) - usable} of {len(values)} visits")
