"""The largest load at which latencies keep within limits."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile

from msgspec import Struct

from breakeven.decide.breakeven import break_even
from breakeven.decide.quantiles import P99_REQUESTS
from breakeven.decide.ratio import LogMean, NoRatio, Ratio, log_mean
from breakeven.errors import UsageError
from breakeven.measure.stats import Distribution, Interval

__all__ = [
    "LoadLatencies",
    "Slo",
    "SloLoad",
    "Violation",
    "largest_load",
    "limit_ratio",
    "parse_slos",
    "statistic_of",
]

_METRICS = ("ttft", "tpot", "itl", "e2e")
_STATISTICS = ("p50", "p90", "p95", "p99", "mean")
_P99_OF_TURN = 100
_ITEM = re.compile(rf"({'|'.join(_METRICS)})_({'|'.join(_STATISTICS)}):(\d+(?:\.\d+)?|\.\d+)")


class Slo(Struct, frozen=True):
    """A limit: a statistic of a latency, in milliseconds."""

    metric: str
    statistic: str
    limit_ms: float

    def __str__(self) -> str:
        return f"{self.metric}_{self.statistic}:{self.limit_ms:g}"


class LoadLatencies(Struct, frozen=True):
    """An arm's latencies at a load: how many requests ended well, and the distributions (ms) by metric.

    `turns` has the same of each visit, for the noise between them; without them there is no interval.
    """

    load: float
    requests: int
    by_metric: Mapping[str, Distribution]
    turns: tuple[Mapping[str, Distribution], ...] = ()


class Violation(Struct, frozen=True):
    """A limit that a load broke; `value_ms` is None where the load has no such latency."""

    slo: Slo
    load: float
    value_ms: float | None


class SloLoad(Struct, frozen=True, kw_only=True):
    """The largest load that holds all limits.

    Attributes:
        load: interpolated on log load; None where not even the lowest load holds them.
        ci95: where a limit breaks, by the noise between visits; None where no load surely holds and one surely breaks.
        last_held: the highest measured load of those from the lowest on that hold them without a gap.
        violations: what the next load broke; empty where the highest measured load holds all: `load` is "at least".
        rumours: limits at a p99 with the loads at which it rests on fewer than 300 requests.
    """

    load: float | None
    last_held: float | None
    ci95: Interval | None = None
    violations: tuple[Violation, ...] = ()
    rumours: tuple[tuple[Slo, tuple[float, ...]], ...] = ()


def parse_slos(text: str) -> tuple[Slo, ...]:
    """`ttft_p99:2000,tpot_p50:50` in limits.

    Raises:
        UsageError: an item that is no limit, or a latency that is limited twice.
    """
    slos = []
    for item in text.split(","):
        found = _ITEM.fullmatch(item.strip().lower())
        if found is None or not float(found[3]) > 0:
            raise UsageError(
                f"--slo: {item.strip()!r} is no limit; write METRIC_STATISTIC:MS, for instance ttft_p99:2000, "
                f"with {', '.join(_METRICS)} and {', '.join(_STATISTICS)}"
            )
        slos.append(Slo(found[1], found[2], float(found[3])))
    names = [(slo.metric, slo.statistic) for slo in slos]
    for metric, statistic in names:
        if names.count((metric, statistic)) > 1:
            raise UsageError(f"--slo: {metric}_{statistic} is limited twice; keep one of the limits")
    return tuple(slos)


def largest_load(slos: Sequence[Slo], levels: Sequence[LoadLatencies]) -> SloLoad:
    """The largest load of an arm that holds all limits, from its lowest load on.

    Where the next load breaks one, the latency between the two is a straight line over log load. Latencies bend upward,
    so that the line is above them and the answer on the safe side.
    """
    levels = sorted(levels, key=lambda level: level.load)
    held = list(takewhile(lambda level: not _violations(slos, level), levels))
    rumours = tuple((slo, loads) for slo in slos if (loads := _rumours(slo, levels)))
    if not held:
        violations = _violations(slos, levels[0]) if levels else ()
        return SloLoad(load=None, last_held=None, violations=violations, rumours=rumours)
    last = held[-1]
    if len(held) == len(levels):
        return SloLoad(load=last.load, last_held=last.load, rumours=rumours)
    after = levels[len(held)]
    violations = _violations(slos, after)
    load = min(_crossing(violation, last, after) for violation in violations)
    ci95 = _interval(slos, levels, load)
    return SloLoad(load=load, last_held=last.load, ci95=ci95, violations=violations, rumours=rumours)


def statistic_of(slo: Slo, found: Distribution) -> float | None:
    """The value that the limit is for; None where there is none."""
    value: float | None = getattr(found, slo.statistic)
    return value


def limit_ratio(slo: Slo, mean: LogMean | NoRatio) -> Ratio | NoRatio:
    """How many times a latency goes into its limit: above 1 the limit holds.

    Args:
        slo: the limit.
        mean: the mean of the log latency (ms) over visits.
    """
    if isinstance(mean, NoRatio):
        return mean
    return Ratio(log=math.log(slo.limit_ms) - mean.log, se=mean.se, df=mean.df, n=round(mean.df) + 1, method="pairs")


def _interval(slos: Sequence[Slo], levels: Sequence[LoadLatencies], load: float) -> Interval | None:
    """The loads at which the first limit to break may do so, as a break-even's; it holds the estimate."""
    ends = [ends for slo in slos if (ends := _ends(slo, levels))]
    if not ends:
        return None
    lows, highs = zip(*ends, strict=True)
    return Interval(min(load, *lows), max(load, min(highs)))


def _ends(slo: Slo, levels: Sequence[LoadLatencies]) -> tuple[float, float] | None:
    ratios = {level.load: limit_ratio(slo, _over_turns(slo, level)) for level in levels}
    first = next(iter(break_even(ratios).crossings), None)
    return (first.low, first.high) if first and first.low is not None and first.high is not None else None


def _over_turns(slo: Slo, level: LoadLatencies) -> LogMean | NoRatio:
    found = [turn[slo.metric] for turn in level.turns if slo.metric in turn]
    # Of fewer requests than a hundred the 99th percentile is one of the highest, and too low on average.
    if slo.statistic == "p99" and any(each.count < _P99_OF_TURN for each in found):
        return NoRatio("few_requests", f"noise of a p99 needs {_P99_OF_TURN} requests in each turn")
    return log_mean([statistic_of(slo, each) or 0.0 for each in found])


def _value(slo: Slo, level: LoadLatencies) -> float | None:
    found = level.by_metric.get(slo.metric)
    return None if found is None else statistic_of(slo, found)


def _violations(slos: Sequence[Slo], level: LoadLatencies) -> tuple[Violation, ...]:
    values = ((slo, _value(slo, level)) for slo in slos)
    return tuple(Violation(slo, level.load, value) for slo, value in values if value is None or value > slo.limit_ms)


def _rumours(slo: Slo, levels: Sequence[LoadLatencies]) -> tuple[float, ...]:
    if slo.statistic != "p99":
        return ()
    return tuple(level.load for level in levels if level.requests < P99_REQUESTS)


def _crossing(violation: Violation, last: LoadLatencies, after: LoadLatencies) -> float:
    before = _value(violation.slo, last)
    if before is None or violation.value_ms is None:
        return last.load
    share = (violation.slo.limit_ms - before) / (violation.value_ms - before)
    return math.exp(math.log(last.load) + share * math.log(after.load / last.load))
