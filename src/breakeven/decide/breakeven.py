"""The loads at which the other arm starts or stops paying, and how sure that is.

The break-even's interval is the set of loads at which the log ratio can't be told from 0 at 95 % (after E. C. Fieller,
*J. R. Statist. Soc. B* 16, 1954), between two loads at which it can, with opposite signs. For closed loops: below
saturation an open loop's output is its input in both arms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal

from msgspec import Struct

from breakeven.decide.band import Curve
from breakeven.decide.ratio import NoRatio, Ratio
from breakeven.decide.verdict import DELTA, Judgement, Longer, Verdict, judge, longer

__all__ = ["BreakEven", "Crossing", "Kind", "State", "break_even"]

State = Literal["pays", "costs", "same", "open"]
Kind = Literal[
    "pays_everywhere",
    "pays_nowhere",
    "no_difference",
    "pays_below",
    "pays_above",
    "pays_between",
    "pays_outside",
    "pays_up_to",
    "pays_from",
    "costs_up_to",
    "costs_from",
    "partly",
    "crossings_suspected",
    "cant_tell",
    "nothing_to_compare",
]

_STATES: dict[Verdict, State] = {"faster": "pays", "slower": "costs", "same": "same", "undecided": "open"}
#: Two crossings are a claim about a hump, which needs loads this close around each of its sides.
_CLOSE = math.sqrt(2)


class Crossing(Struct, frozen=True, kw_only=True):
    """A break-even: the estimate and the 95 % interval, each None where the data has none.

    An interval open on one side means that the crossing, if there is one, lies beyond the other side. `between` are
    the nearest decided loads on either side, None where there is none.
    """

    load: float | None
    low: float | None
    high: float | None
    between: tuple[float | None, float | None]


class BreakEven(Struct, frozen=True, kw_only=True):
    """Where the other arm pays.

    Attributes:
        kind: the shape of the answer. `pays_below`, `pays_above`, `pays_between` and `pays_outside` (below and above a
            middle) have counted crossings; `…_up_to` and `…_from` know one end and not what lies beyond; `partly` is
            neither; `crossings_suspected` saw more crossings than its loads can bear out.
        loads, ratios, states: the loads that can be compared, in rising order, and what was found at each.
        judgements: the verdicts behind the states.
        crossings: break-evens in rising order.
        longer: the loads to measure longer for a fuller answer.
        add_loads: loads to measure as well, for more crossings than one.
        unusable: the loads that can't be compared, with the reason.
        delta: below which arms are called the same.
    """

    kind: Kind
    loads: tuple[float, ...] = ()
    ratios: tuple[Ratio, ...] = ()
    states: tuple[State, ...] = ()
    judgements: tuple[Judgement, ...] = ()
    crossings: tuple[Crossing, ...] = ()
    longer: tuple[Longer, ...] = ()
    add_loads: tuple[int, ...] = ()
    unusable: tuple[tuple[float, NoRatio], ...] = ()
    delta: float = DELTA


def break_even(levels: Mapping[float, Ratio | NoRatio], delta: float = DELTA) -> BreakEven:
    """Where the other arm pays, from the ratio at each load (requests in flight).

    Loads are decided by `judge` over all of them, and only decided ones bear a crossing.
    """
    unusable = tuple((load, ratio) for load, ratio in sorted(levels.items()) if isinstance(ratio, NoRatio))
    usable = {load: ratio for load, ratio in sorted(levels.items()) if isinstance(ratio, Ratio)}
    if not usable:
        return BreakEven(kind="nothing_to_compare", unusable=unusable, delta=delta)
    judged = judge(usable, delta)
    loads = tuple(usable)
    states = tuple(_STATES[judgement.verdict] for judgement in judged.values())
    curve = Curve(loads, tuple(usable.values()))
    changes = _changes(states)
    kind = _kind_of_changes(states, changes, loads) if changes else _kind_of_one_sign(states)
    return BreakEven(
        kind=kind,
        loads=loads,
        ratios=curve.ratios,
        states=states,
        judgements=tuple(judged.values()),
        crossings=_crossings(kind, curve, states, changes),
        longer=tuple(
            longer(load, ratio, tests=len(loads), delta=delta)
            for place, (load, ratio) in enumerate(usable.items())
            if states[place] == "open" and not any(i < place < j for i, j in changes)
        ),
        add_loads=_between(loads, changes) if kind == "crossings_suspected" else (),
        unusable=unusable,
        delta=delta,
    )


def _changes(states: Sequence[State]) -> list[tuple[int, int]]:
    """The places of neighbouring decided loads with opposite signs."""
    decided = [place for place, state in enumerate(states) if state in ("pays", "costs")]
    return [(i, j) for i, j in pairwise(decided) if states[i] != states[j]]


def _kind_of_changes(states: Sequence[State], changes: Sequence[tuple[int, int]], loads: Sequence[float]) -> Kind:
    pays_first = states[changes[0][0]] == "pays"
    if len(changes) == 1:
        return "pays_below" if pays_first else "pays_above"
    if len(changes) > 2 or _between(loads, changes):
        return "crossings_suspected"
    return "pays_outside" if pays_first else "pays_between"


def _kind_of_one_sign(states: Sequence[State]) -> Kind:
    found = set(states)
    if found == {"pays"}:
        return "pays_everywhere"
    if found == {"same"}:
        return "no_difference"
    if found <= {"costs", "same"}:
        return "pays_nowhere"
    if found <= {"same", "open"}:
        return "cant_tell"
    sign: State = "pays" if "pays" in found else "costs"
    count = states.count(sign)
    if set(states[:count]) == {sign}:
        return "pays_up_to" if sign == "pays" else "costs_up_to"
    if set(states[-count:]) == {sign}:
        return "pays_from" if sign == "pays" else "costs_from"
    return "partly"


def _crossings(
    kind: Kind, curve: Curve, states: Sequence[State], changes: Sequence[tuple[int, int]]
) -> tuple[Crossing, ...]:
    loads = curve.loads
    if changes:
        return tuple(_counted(curve, loads[i], loads[j]) for i, j in changes)
    if kind in ("pays_up_to", "costs_up_to"):
        known, end = loads[sum(state in ("pays", "costs") for state in states) - 1], loads[-1]
        zeros = curve.zeros(known, end)
        low = zeros.low if zeros else known
        return (Crossing(load=curve.crossing(known, end), low=low, high=None, between=(known, None)),)
    if kind in ("pays_from", "costs_from"):
        known, end = loads[-sum(state in ("pays", "costs") for state in states)], loads[0]
        zeros = curve.zeros(end, known)
        high = zeros.high if zeros else known
        return (Crossing(load=curve.crossing(end, known), low=None, high=high, between=(None, known)),)
    return ()


def _counted(curve: Curve, low: float, high: float) -> Crossing:
    zeros = curve.zeros(low, high)
    return Crossing(
        load=curve.crossing(low, high),
        low=zeros.low if zeros else low,
        high=zeros.high if zeros else high,
        between=(low, high),
    )


def _between(loads: Sequence[float], changes: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Whole loads that are missing around crossings, in the geometric middle of neighbours that are too far apart."""
    gaps = [(loads[k], loads[k + 1]) for i, j in changes for k in range(i, j)]
    # Loads are whole numbers: from 2 the nearest that is not closer than sqrt 2 is 3.
    return tuple(sorted({round(math.sqrt(a * b)) for a, b in gaps if b > math.ceil(a * _CLOSE)}))
