"""Which load a comparison measures next for an arm's knee, and for how many turns; see `decide.find`."""

from __future__ import annotations

import math
from collections.abc import Mapping

from breakeven.decide.blocks import (
    FIRST,
    LOWEST_FIRST,
    POOLED_DF,
    STEP,
    Block,
    Pace,
    Search,
    Stop,
    best,
    closer,
    in_time,
)
from breakeven.decide.knee import KNEE_SHARE, knee
from breakeven.decide.ratio import LogMean, NoRatio

__all__ = ["next_for_knee"]

#: Throughput that grows by less than half of what the knee allows has got to its top.
_FLAT = -math.log(KNEE_SHARE) / 2


def next_for_knee(
    seen: Mapping[int, LogMean | NoRatio], search: Search, pace: Pace, left_s: float = math.inf
) -> Block | Stop:
    """Where to measure next for an arm's knee; like `next_for_break_even`, from its mean log throughputs."""
    if not seen:
        return Block(search.low, LOWEST_FIRST, "the lowest load")
    means = {load: mean for load, mean in sorted(seen.items()) if isinstance(mean, LogMean)}
    if search.low not in means:
        return Stop("nothing can be measured there", False)
    end = min([search.high, *(load - 1 for load in seen if load not in means)])
    turns = sum(round(mean.df) + 1 for mean in means.values())
    return in_time(_to_the_top(means, end) or _narrower_knee(means, search, pace), turns, pace, left_s)


def _to_the_top(means: Mapping[int, LogMean], end: int) -> Block | None:
    """A higher load while throughput still grows."""
    loads = list(means)
    if loads[-1] >= end:
        return None
    if len(loads) < 2:
        return Block(min(end, loads[-1] * STEP), FIRST, "throughput may grow")
    a, b = loads[-2:]
    growth = (means[b].log - means[a].log) * math.log(STEP) / math.log(b / a)
    top = max(means.values(), key=lambda mean: mean.log)
    if growth <= _FLAT or means[b].log < top.log:
        return None
    return Block(min(end, b * STEP), FIRST, "throughput still grows")


def _narrower_knee(means: Mapping[int, LogMean], search: Search, pace: Pace) -> Block | Stop:
    found = knee({float(load): mean for load, mean in means.items()})
    if found.ci95 is None or found.load is None:
        return Stop("the knee lies beyond the range", True)
    # Throughput bends most at the knee.
    if nearer := closer(found.load, list(means), search.precision / 2):
        return nearer
    now = found.ci95.log_half_width
    if now <= search.precision:
        return Stop("the interval is as narrow as asked for", True)
    wanted = (found.ci95.low, math.sqrt(found.ci95.low * found.load), found.load, found.ci95.high)
    loads, highest = list(means), max(means, key=lambda load: means[load].log)
    inside = {load for place in wanted if loads[0] <= (load := round(place)) <= loads[-1]}
    beside = {load for load in loads if found.ci95.low / STEP <= load <= found.ci95.high * STEP}
    return best(
        sorted(inside | beside | {highest}),
        lambda load, turns: _knee_width_after(means, load, turns),
        now,
        search,
        pace,
        {load: round(mean.df) + 1 for load, mean in means.items()},
    )


def _knee_width(means: Mapping[int, LogMean]) -> float:
    found = knee({float(load): mean for load, mean in means.items()})
    return found.ci95.log_half_width if found.ci95 else math.inf


def _knee_width_after(means: Mapping[int, LogMean], load: int, turns: int) -> float:
    variances = [(mean.se**2 * (mean.df + 1), mean.df) for mean in means.values()]
    pooled = sum(variance * df for variance, df in variances) / sum(df for _, df in variances)
    if load in means:
        own = means[load]
        n = own.df + 1 + turns
        variance = (own.se**2 * (own.df + 1) * own.df + pooled * POOLED_DF) / (own.df + POOLED_DF)
        after = LogMean(own.log, math.sqrt(variance / n), n - 1)
    else:
        after = LogMean(_log_at(means, load), math.sqrt(pooled / turns), turns - 1.0)
    return _knee_width({**means, load: after})


def _log_at(means: Mapping[int, LogMean], load: int) -> float:
    a, b = max(each for each in means if each < load), min(each for each in means if each > load)
    share = math.log(load / a) / math.log(b / a)
    return (1 - share) * means[a].log + share * means[b].log
