"""Blocks of turns that a search may ask for: how long they take, and which of them is worth its time.

How often one looks is part of the method: the interval is read only when a block is over, and a block is made as long
as what is known says it has to be, so that looks are few (docs/statistics.md has what that covers).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

from msgspec import Struct, structs

__all__ = [
    "APART",
    "FIRST",
    "LOWEST_FIRST",
    "MOST_TURNS",
    "POOLED_DF",
    "SIZES",
    "STEP",
    "SURE",
    "Block",
    "Pace",
    "Search",
    "Stop",
    "beside",
    "best",
    "closer",
    "in_time",
    "is_apart",
]

#: Turns of each arm at a load that nobody has seen: three ABBA cycles. With two Student's t asks for nearly twice the
#: difference before a sign is sure; at the lowest load, where arms tend to differ most, two are often enough.
FIRST, LOWEST_FIRST = 6, 4
#: How far a step up goes.
STEP = 2
#: Loads are at least so far apart: a cubic through closer ones makes much of their noise beside them.
APART = 1.2
#: A crossing in the middle of a gap as wide as so many times the precision (on log load), or as far from the loads
#: beside it, is believed, up to a gap of 1.6; in a wider one a curve may bend unseen.
_CLOSE, _WIDEST = 2.5, math.log(1.6)
#: Turns of a block, in whole cycles.
SIZES = (6, 8, 12, 16, 24, 32)
#: What a load is judged by before it is chosen: so many turns more.
_TRIAL = 8
#: So many turns have the loads on either side of an estimate at least before the search is over.
SURE = 12
#: All loads together get no more turns of each arm than eight loads of a grid do at most.
MOST_TURNS = 256
#: Of the precision that is asked for, what a block is to reach: half of all blocks would miss the whole of it.
_AIM = 0.9
#: How much what all loads scatter counts for the scatter of one of them, in degrees of freedom.
POOLED_DF = 4.0


class Search(Struct, frozen=True, kw_only=True):
    """What is looked for: between which loads, and how narrow its 95 % interval is to be (half of it, on log load)."""

    low: int = 1
    high: int = 256
    precision: float = 0.1


class Block(Struct, frozen=True):
    """So many turns of each arm at a load, and why there."""

    load: int
    turns: int
    why: str


class Stop(Struct, frozen=True):
    """The search is over. `reached`: it has what was asked for, or is sure that it is not there."""

    why: str
    reached: bool


class Pace(Struct, frozen=True):
    """How long a turn of each arm takes together, in seconds, by load in rising order."""

    seconds: Mapping[int, float]

    def at(self, load: float) -> float:
        """Between loads on a line over log load; beyond the highest it grows with the load, at most in proportion."""
        if not self.seconds:
            return 0.0
        places = sorted(self.seconds.items())
        if load <= places[0][0] or len(places) == 1:
            return places[0][1]
        (a, before), (b, after) = next((pair for pair in pairwise(places) if load <= pair[1][0]), places[-2:])
        steep = math.log(after / before) / math.log(b / a)
        if load > b:
            before, a, steep = after, b, min(1.0, max(0.0, steep))
        return before * math.exp(steep * math.log(load / a))


def in_time(chosen: Block | Stop, turns: int, pace: Pace, left_s: float) -> Block | Stop:
    if isinstance(chosen, Stop):
        return chosen
    if turns >= MOST_TURNS:
        return Stop(f"{turns} turns of each arm and still not sure", False)
    each_s = pace.at(chosen.load)
    fits = math.inf if left_s == math.inf else left_s / each_s
    if fits < 2:
        return Stop("time is up", False)
    return chosen if fits >= chosen.turns else structs.replace(chosen, turns=int(fits) // 2 * 2)


def closer(at: float, loads: Sequence[float], precision: float) -> Block | None:
    """A load at the estimate, where its measured neighbours are far from it."""
    below, above = beside(at, loads)
    # A curve's deviation from the straight line between two loads goes with the product of the distances to them.
    far = math.log(at / below) * math.log(above / at) > (min(_CLOSE * precision, _WIDEST) / 2) ** 2
    nearest = sorted(range(int(below) + 1, math.ceil(above)), key=lambda load: abs(math.log(load / at)))
    load = next((load for load in nearest if is_apart(load, loads)), None)
    return Block(load, SURE, "its neighbours are far apart") if far and load is not None else None


def is_apart(load: int, measured: Sequence[float]) -> bool:
    return all(load >= APART * each or each >= APART * load for each in measured)


def beside(at: float, loads: Sequence[float]) -> tuple[float, float]:
    return max(load for load in loads if load <= at), min(load for load in loads if load >= at)


def best(
    loads: Iterable[int],
    width_after: Callable[[int, int], float],
    now: float,
    search: Search,
    pace: Pace,
    turns_at: Mapping[float, int],
) -> Block:
    """The load at which a second narrows the interval most, with as many turns as it takes, if it does."""

    def worth(load: int) -> float:
        return (now - width_after(load, _TRIAL)) / pace.at(load) if pace.at(load) else now - width_after(load, _TRIAL)

    load = max(loads, key=worth)
    # At least as many as it has: looks at the same place, each a little later, would pick a lucky moment.
    sizes = [turns for turns in SIZES if turns >= turns_at.get(load, 0)] or [SIZES[-1]]
    enough = (turns for turns in sizes if width_after(load, turns) <= _AIM * search.precision)
    return Block(load, next(enough, max(_TRIAL, sizes[0])), f"±{100 * now:.0f} % so far, narrows fastest here")
