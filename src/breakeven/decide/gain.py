"""What a table of draft lengths gains against drafting the same number at every load.

A table that was picked as the best of several looks better on the data that it was picked on than it is. So it is
cross-fitted: for each ABBA cycle the choice is made on all other cycles, and judged on this one (M. Stone, *J. R.
Statist. Soc. B* 36, 1974). What is judged so is the way of choosing, on a cycle less than there are: a little worse
than the table itself, never flattered. The interval spans that of the ratios so found and that of the table on the
turns that it was made from: where a choice is close they differ by more than their noise, and the truth lies between
(docs/statistics.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from breakeven.decide.band import interpolation
from breakeven.decide.choice import Choice, choose
from breakeven.decide.profile import Profile
from breakeven.decide.rates import LoadRates
from breakeven.decide.ratio import NoRatio, Ratio, paired
from breakeven.decide.student import t_quantile
from breakeven.measure.stats import Interval

__all__ = ["Gain", "LevelGains", "ProfileGain", "gains_at", "gains_over", "outside", "tuned_rates"]

FloatArray = NDArray[np.float64]
#: Turns from which a cycle, which is two of them, can be set aside; with fewer it is one turn.
_CYCLES_FROM = 6


class Gain(Struct, frozen=True, kw_only=True):
    """The table against one draft length: the ratio of throughputs.

    Attributes:
        ratio: 1.05 is 5 % more tokens a second.
        ci95: None where the table has the same arm in every turn (`is_same`), or there is no interval.
    """

    ratio: float
    ci95: Interval | None = None
    is_same: bool = False


class LevelGains(Struct, frozen=True, kw_only=True):
    """At one load: the tuned tokens a second (cross-fitted), and the gain against each arm alone."""

    load: float
    rate: float
    gains: dict[str, Gain]


class ProfileGain(Struct, frozen=True, kw_only=True):
    """Over a profile, the table against one arm alone, in mean tokens a second over the whole time."""

    arm: str
    tuned: float
    static: float
    gain: Gain


def tuned_rates(levels: Sequence[LoadRates], arms: Sequence[str], delta: float) -> list[tuple[float, ...]] | None:
    """By load what the table would have brought in each turn, the arm being chosen without that turn's cycle.

    None where there is too little to choose from without it: fewer than three turns at a load, or no pairs.
    """
    if any(len(level.turns.get(arms[0], ())) < 3 for level in levels):
        return None
    folds = [_folds(len(level.turns[arms[0]])) for level in levels]
    picks = [
        choose(
            [level.only(_others(own, fold)) for level, own in zip(levels, folds, strict=True)], arms, delta, must=True
        )
        for fold in range(max(map(len, folds)))
    ]
    return [
        tuple(level.turns[picks[fold].arm_at(i)][turn] for fold, turns in enumerate(folds[i]) for turn in turns)
        for i, level in enumerate(levels)
    ]


def _folds(turns: int) -> list[list[int]]:
    """The turns by cycle; an odd one at the end goes with the last cycle."""
    if turns < _CYCLES_FROM:
        return [[turn] for turn in range(turns)]
    cycles = [[turn, turn + 1] for turn in range(0, turns - 1, 2)]
    if turns % 2:
        cycles[-1].append(turns - 1)
    return cycles


def _others(folds: Sequence[Sequence[int]], fold: int) -> list[int]:
    """All turns but those of a cycle; a load with fewer cycles goes round."""
    return [turn for number, turns in enumerate(folds) for turn in turns if number != fold % len(folds)]


def gains_at(
    levels: Sequence[LoadRates], arms: Sequence[str], choice: Choice, tuned: Sequence[Sequence[float]] | None
) -> list[LevelGains]:
    """The gain at each load against each arm; with `tuned` None on the turns that the choice was made on."""
    return [
        LevelGains(
            load=level.load,
            rate=math.exp(_log(level, choice.arm_at(i), rates)),
            gains={arm: _gain(level, arm, choice.arm_at(i), rates) for arm in arms},
        )
        for i, level, rates in _with_rates(levels, tuned)
    ]


def gains_over(
    profile: Profile,
    levels: Sequence[LoadRates],
    arms: Sequence[str],
    choice: Choice,
    tuned: Sequence[Sequence[float]] | None,
) -> list[ProfileGain]:
    """The gain over a profile against each arm.

    Throughput is interpolated on straight lines of its logarithm over log load, and held beyond the measured loads. The
    ratio's variance is that of the paired log ratios at each load, by the delta method, with F. Satterthwaite's degrees
    of freedom.
    """
    weights, shares = _weights(profile, [level.load for level in levels])
    found = []
    for arm in arms:
        static, parts = _over(weights, shares, [level.log(arm) or 0.0 for level in levels])
        if not static:  # nothing but idle time
            continue
        on_same = _total_gain(weights, shares, levels, arm, choice, None, static, parts)
        total, gain = on_same
        if tuned is not None:
            total, fitted = _total_gain(weights, shares, levels, arm, choice, tuned, static, parts)
            gain = Gain(ratio=fitted.ratio, ci95=_hull(fitted.ci95, on_same[1].ci95))
        if all(choice.arm_at(i) == arm for i, part in enumerate(parts) if part):
            total, gain = static, Gain(ratio=1.0, is_same=True)
        found.append(ProfileGain(arm=arm, tuned=total, static=static, gain=gain))
    return found


def _with_rates(
    levels: Sequence[LoadRates], tuned: Sequence[Sequence[float]] | None
) -> list[tuple[int, LoadRates, Sequence[float] | None]]:
    return [(i, level, None if tuned is None else tuned[i]) for i, level in enumerate(levels)]


def _log(level: LoadRates, chosen: str, rates: Sequence[float] | None) -> float:
    """The table's mean log throughput at a load."""
    return level.log(chosen) or 0.0 if rates is None else float(np.log(np.asarray(rates)).mean())


def _ratio(level: LoadRates, arm: str, chosen: str, rates: Sequence[float] | None) -> Ratio | NoRatio | None:
    """The table over an arm at a load; None where they are the same in every turn."""
    if rates is None:
        return None if arm == chosen else level.ratio(arm, chosen)
    if tuple(rates) == level.turns[arm]:
        return None
    return paired(level.turns[arm], rates, method=level.method, names=(arm, "the table"))


def _gain(level: LoadRates, arm: str, chosen: str, rates: Sequence[float] | None) -> Gain:
    """Where the table has the arm itself it gains nothing, whatever it would have had without some turns."""
    if arm == chosen:
        return Gain(ratio=1.0, is_same=True)
    ci95 = _interval(_ratio(level, arm, chosen, None))
    if rates is not None:
        ci95 = _hull(ci95, _interval(_ratio(level, arm, chosen, rates)))
    return Gain(ratio=math.exp(_log(level, chosen, rates) - (level.log(arm) or 0.0)), ci95=ci95)


def _interval(found: Ratio | NoRatio | None) -> Interval | None:
    if found is None:
        return Interval(1.0, 1.0)
    return found.interval() if isinstance(found, Ratio) else None


def _hull(one: Interval | None, other: Interval | None) -> Interval | None:
    """What spans both; None where one is missing."""
    if one is None or other is None:
        return None
    return Interval(min(one.low, other.low), max(one.high, other.high))


def _total_gain(
    weights: FloatArray,
    shares: FloatArray,
    levels: Sequence[LoadRates],
    arm: str,
    choice: Choice,
    tuned: Sequence[Sequence[float]] | None,
    static: float,
    parts: FloatArray,
) -> tuple[float, Gain]:
    """Mean tokens a second of the table over a profile, and its ratio to an arm's."""
    rows = _with_rates(levels, tuned)
    logs = [_log(level, choice.arm_at(i), rates) for i, level, rates in rows]
    total, own_parts = _over(weights, shares, logs)
    every = {i: _ratio(level, arm, choice.arm_at(i), rates) for i, level, rates in rows}
    ratios = {i: found for i, found in every.items() if found is not None and parts[i]}
    return total, _profile_gain(total / static, ratios, (parts + own_parts) / 2)


def outside(profile: Profile, levels: Sequence[LoadRates]) -> float:
    """The share of time with more requests in flight than were measured, or fewer (but any)."""
    low, high = levels[0].load, levels[-1].load
    return sum(
        share
        for load, share in zip(profile.loads, profile.shares, strict=True)
        if load > high or (load > 0 and max(load, 1.0) < low)
    )


def _weights(profile: Profile, loads: Sequence[float]) -> tuple[FloatArray, FloatArray]:
    """What each level counts for at each of the profile's loads, and the time that they last without the idle time."""
    at = np.maximum(np.array(profile.loads), 1.0)
    shares = np.array(profile.shares) * np.minimum(np.array(profile.loads), 1.0)
    if len(loads) == 1:
        return np.ones((len(at), 1)), shares
    x = np.log(loads)
    return interpolation(x, np.clip(np.log(at), x[0], x[-1]), 0), shares


def _over(weights: FloatArray, shares: FloatArray, logs: Sequence[float]) -> tuple[float, FloatArray]:
    """Mean tokens a second over all time, and by level d log of that / d log rate, which sum to 1."""
    rates = shares * np.exp(weights @ np.array(logs))
    total = float(rates.sum())
    return total, rates @ weights / total if total else np.zeros(len(logs))


def _profile_gain(ratio: float, ratios: Mapping[int, Ratio | NoRatio], parts: FloatArray) -> Gain:
    if not ratios:
        return Gain(ratio=1.0, ci95=Interval(1.0, 1.0))
    usable = {i: found for i, found in ratios.items() if isinstance(found, Ratio)}
    variances = {i: (float(parts[i]) * found.se) ** 2 for i, found in usable.items()}
    total = sum(variances.values())
    if len(usable) < len(ratios):
        return Gain(ratio=ratio)
    df = total**2 / sum(variance**2 / usable[i].df for i, variance in variances.items())
    half = t_quantile(0.975, df) * math.sqrt(total)
    return Gain(ratio=ratio, ci95=Interval(ratio * math.exp(-half), ratio * math.exp(half)))
