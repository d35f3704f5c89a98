"""Which load a comparison measures next, and for how many turns, where nobody gave a grid.

Loads go up until the answer is bracketed. From then on turns go where, by what is known so far, a second of measuring
narrows the answer's interval most, as many at once as are expected to do. Peers double until a limit breaks and then
halve the gap, one visit a load and each taken at its word: here a load may be visited again, and what ends the search
is the interval of the answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from msgspec import structs

from breakeven.decide.band import Curve
from breakeven.decide.blocks import (
    FIRST,
    LOWEST_FIRST,
    POOLED_DF,
    SIZES,
    STEP,
    SURE,
    Block,
    Pace,
    Search,
    Stop,
    beside,
    best,
    closer,
    in_time,
    is_apart,
)
from breakeven.decide.breakeven import BreakEven, Crossing, break_even
from breakeven.decide.ratio import NoRatio, Ratio
from breakeven.decide.student import t_quantile
from breakeven.decide.verdict import SIGNIFICANCE

__all__ = ["next_for_break_even"]

#: How far a step goes while no crossing is near, if turns there take at most so many times as long; and how far the
#: first one goes, where little is in flight and turns take about as long whatever the load.
_LONG_STEP, _AS_LONG, _FIRST_STEP = 4, 1.5, 8
#: A neighbour of a crossing that counts for less than this at the crossing may stay with few turns.
_COUNTS = 0.3
#: `POOLED_DF` where the search ends, since that is where a load that happens to scatter little would do harm.
_POOLED_AT_END = 20.0


def next_for_break_even(
    seen: Mapping[int, Ratio | NoRatio], search: Search, pace: Pace, left_s: float = math.inf
) -> Block | Stop:
    """Where to measure next for the loads at which the gain is 0.

    Args:
        seen: the ratio at each load so far.
        search: what is asked for.
        pace: how long turns take.
        left_s: the time that is left.
    """
    if not seen:
        return Block(search.low, LOWEST_FIRST, "the lowest load")
    found = break_even({float(load): ratio for load, ratio in seen.items()})
    if isinstance(seen.get(search.low), NoRatio):
        return Stop("nothing can be compared there", False)
    # What fails at a load fails above it too.
    end = min([search.high, *(int(load) - 1 for load, _ in found.unusable)])
    chosen = _between_crossings(found) or _upward(found, end, pace) or _narrower(found, search, pace)
    return in_time(chosen or _undecided(found, end, pace), sum(ratio.n for ratio in found.ratios), pace, left_s)


# ---- the bracket ----


def _between_crossings(found: BreakEven) -> Block | None:
    """More crossings than one need loads close around each (`decide.breakeven`)."""
    if found.kind != "crossings_suspected" or not found.add_loads:
        return None
    return Block(found.add_loads[0], FIRST, "another sign change: loads between are needed to be sure of it")


def _upward(found: BreakEven, end: int, pace: Pace) -> Block | None:
    """A higher load, until one is found beyond the crossing, or what is there to be found lies below."""
    top, state = int(found.loads[-1]), found.states[-1]
    signs = [each for each in found.states if each in ("pays", "costs")]
    changed = len(set(signs)) > 1
    if top >= end or (changed and state != "pays"):
        return None
    why = "what pays here may cost again" if changed else "no crossing so far"
    further = Block(min(end, top * _stride(found, pace)), FIRST, why)
    # Some load may have turned already: to be sure of that, or to look where it will be plain?
    turned = [] if changed or not signs else _turned(found, pays=signs[0] == "costs")
    sure = min(turned, key=lambda block: block.turns * pace.at(block.load), default=None)
    # The sign there is seen already, which a load farther on may yet fail to show in its first turns.
    if sure and sure.turns * pace.at(sure.load) <= 2 * further.turns * pace.at(further.load):
        return sure
    return further


def _turned(found: BreakEven, *, pays: bool) -> list[Block]:
    """Turns that would make sure of a sign, at loads that are still open and seem to have it."""
    return [
        Block(int(load), more, "to be sure of its sign")
        for place, load in enumerate(found.loads)
        if found.states[place] == "open" and (found.ratios[place].gain > 0) == pays
        if (more := _turns_to_decide(found, place)) is not None
    ]


def _stride(found: BreakEven, pace: Pace) -> int:
    """Long where the last two loads show no crossing so near, and turns there are hardly longer."""
    top = found.loads[-1]
    if len(found.loads) < 2:
        return _FIRST_STEP
    if pace.at(top * _LONG_STEP) > _AS_LONG * pace.at(top):
        return STEP
    (a, b), (before, last) = found.loads[-2:], (ratio.gain for ratio in found.ratios[-2:])
    towards = (before - last) * math.copysign(1, last) / math.log(b / a)
    ahead = abs(last) / towards if towards > 0 else math.inf
    return _LONG_STEP if ahead > math.log(_LONG_STEP) else STEP


def _undecided(found: BreakEven, end: int, pace: Pace) -> Block | Stop:
    """No crossing is sure, up to the end: the loads left open get turns while that is bearable, the cheapest first."""
    left = [*_turned(found, pays=True), *_turned(found, pays=False)]
    if left:
        return min(left, key=lambda block: block.turns * pace.at(block.load))
    if "open" in found.states:
        return Stop("no bearable time would tell", False)
    return Stop(f"there is no crossing from {found.loads[0]:g} to {end}", True)


def _turns_to_decide(found: BreakEven, place: int) -> int | None:
    """So many more would tell a gain from 0 there, if it is what it seems to be; None if that is not bearable."""
    ratio, spread = found.ratios[place], _spreads(found.ratios)[place]
    for more in (2, 4, *SIZES):
        n = ratio.n + more
        t = t_quantile(1 - SIGNIFICANCE / 2 / len(found.loads), _df(n))
        if abs(ratio.gain) >= (t + 1) * spread / math.sqrt(n):
            return more
    return None


# ---- the interval ----


def _narrower(found: BreakEven, search: Search, pace: Pace) -> Block | Stop | None:
    """Turns where they narrow the widest crossing most a second; None where no crossing has an interval."""
    sure = [crossing for crossing in found.crossings if crossing.low is not None and crossing.high is not None]
    if not sure or len(sure) < len(found.crossings):
        return None
    widest = max(sure, key=_width)
    if nearer := closer(_middle(widest), found.loads, search.precision):
        return nearer
    if max(_width(widest), _steady_width(found, widest)) <= search.precision:
        return _surer(found, widest) or Stop("the interval is as narrow as asked for", True)
    return best(
        _places(found, widest),
        lambda load, turns: _width_after(found, widest, load, turns),
        _width(widest),
        search,
        pace,
        dict(zip(found.loads, (ratio.n for ratio in found.ratios), strict=True)),
    )


def _surer(found: BreakEven, crossing: Crossing) -> Block | None:
    """Turns at the crossing's neighbours, where few of them happen to make a narrow interval."""
    at, (below, above) = _middle(crossing), beside(_middle(crossing), found.loads)
    turns = {load: ratio.n for load, ratio in zip(found.loads, found.ratios, strict=True)}
    share = math.log(at / below) / math.log(above / below) if above > below else 0.0
    # A neighbour that hardly counts for the line between the two may stay with few.
    few = [load for load, weight in ((below, 1 - share), (above, share)) if weight >= _COUNTS and turns[load] < SURE]
    load = min(few, key=lambda load: turns[load], default=0.0)
    more = SURE - turns.get(load, SURE)
    return Block(int(load), more + more % 2, "to make sure of it") if few else None


def _middle(crossing: Crossing) -> float:
    return crossing.load or math.sqrt((crossing.low or 1.0) * (crossing.high or 1.0))


def _width(crossing: Crossing) -> float:
    return math.log(crossing.high / crossing.low) / 2 if crossing.low and crossing.high else math.inf


def _places(found: BreakEven, crossing: Crossing) -> list[int]:
    """Whole loads worth a thought: those measured from one sure neighbour to the other, and such as are apart."""
    low, high, middle = crossing.low or 1.0, crossing.high or 1.0, _middle(crossing)
    least, most = (load or middle for load in crossing.between)
    new = {round(place) for place in (low, math.sqrt(low * middle), middle, math.sqrt(middle * high), high)}
    measured = {int(load) for load in found.loads if least <= load <= most}
    return sorted(measured | {load for load in new if least < load < most and is_apart(load, found.loads)})


def _width_after(found: BreakEven, crossing: Crossing, load: int, turns: int) -> float:
    """What the interval will be if that load gets so many turns more and shows what is expected of it."""
    least, most = crossing.between
    assert least is not None
    assert most is not None
    spreads = dict(zip(found.loads, _spreads(found.ratios), strict=True))
    ratios = dict(zip(found.loads, found.ratios, strict=True))
    if load in ratios:
        n, log = ratios[load].n + turns, ratios[load].log
    else:
        n, log = turns, _gain_at(ratios, load) * (-1 if found.ratios[0].lower_is_better else 1)
    spread = spreads.get(load) or math.sqrt(sum(each**2 for each in spreads.values()) / len(spreads))
    ratios[load] = structs.replace(found.ratios[0], log=log, se=spread / math.sqrt(n), df=_df(n), n=n)
    near = _around(sorted(ratios), least, most)
    zeros = Curve(tuple(near), tuple(ratios[each] for each in near)).zeros(least, most)
    return zeros.log_half_width if zeros else 0.0


def _steady_width(found: BreakEven, crossing: Crossing) -> float:
    """The width if each load scattered nearer to what all do: one that happens to scatter little ends no search."""
    least, most = crossing.between
    assert least is not None
    assert most is not None
    each = zip(found.ratios, _spreads(found.ratios, _POOLED_AT_END), strict=True)
    ratios = tuple(structs.replace(ratio, se=spread / math.sqrt(ratio.n)) for ratio, spread in each)
    zeros = Curve(found.loads, ratios).zeros(least, most)
    return zeros.log_half_width if zeros else 0.0


def _around(loads: Sequence[float], least: float, most: float) -> list[float]:
    """Those from one to the other and one more on either side: the cubic reaches no farther."""
    first, last = loads.index(least), loads.index(most)
    return list(loads[max(0, first - 1) : last + 2])


def _gain_at(ratios: Mapping[float, Ratio], load: float) -> float:
    loads = sorted(ratios)
    a, b = max(each for each in loads if each < load), min(each for each in loads if each > load)
    share = math.log(load / a) / math.log(b / a)
    return (1 - share) * ratios[a].gain + share * ratios[b].gain


def _spreads(ratios: Sequence[Ratio], pooled_df: float = POOLED_DF) -> list[float]:
    """The standard deviation of one observation at each load, each drawn toward that of all."""
    own = [(ratio.se**2 * ratio.n, ratio.df) for ratio in ratios]
    pooled = sum(variance * df for variance, df in own) / sum(df for _, df in own)
    return [math.sqrt((variance * df + pooled * pooled_df) / (df + pooled_df)) for variance, df in own]


def _df(n: int) -> float:
    """As `decide.ratio.paired` has it: from eight pairs on their order takes one."""
    return float(n - 2 if n >= 8 else n - 1)
