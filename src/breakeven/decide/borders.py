"""From the arms that belong to loads to ranges of the engine's batch, with a dead band around each border."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

from breakeven.decide.choice import Choice
from breakeven.decide.rates import LoadRates
from breakeven.decide.schedule import Border, Range

__all__ = ["batch_of", "growing", "ranges_of"]

N = TypeVar("N", int, float)

#: Within the dead band two draft lengths differ by less than this: being on the wrong side costs no more.
_BAND = 0.01


def batch_of(level: LoadRates) -> int:
    """The engine's batch at a load; the client's concurrency where no engine told."""
    return max(1, round(level.load if level.batch is None else level.batch))


def growing(levels: Sequence[LoadRates]) -> tuple[list[LoadRates], list[LoadRates]]:
    """The loads whose batch is larger than that of all before, and the others: there requests only queue."""
    kept: list[LoadRates] = []
    left: list[LoadRates] = []
    for level in levels:
        (kept if not kept or batch_of(level) > batch_of(kept[-1]) else left).append(level)
    return kept, left


def ranges_of(
    choice: Choice, levels: Sequence[LoadRates], ks: Mapping[str, int], most: int | None
) -> tuple[tuple[Range, ...], tuple[Border, ...]]:
    """The ranges, from 1 to the largest batch, and the borders between them.

    A border lies where the two draft lengths' throughputs cross, on a straight line of their log ratio over log batch
    between the loads on either side; in the middle where they don't. The dead band ends where the line says that they
    differ by 1 %, a request from the border at least, and never beyond the measured batches on either side.

    Args:
        choice: which arm belongs to which load.
        levels: its loads, of growing batches (`growing`).
        ks: each arm's K.
        most: the largest batch that the engine allows; None where it doesn't tell, then the table ends at the highest
            load that was measured.
    """
    ranges, borders, lo = [], [], 1
    for lower, upper in pairwise(choice.segments):
        at, border = _border(levels[lower.stop - 1], levels[upper.start], lower.arm, upper.arm)
        ranges.append(Range(lo, at - 1, ks[lower.arm]))
        borders.append(border)
        lo = at
    last = levels[-1]
    ranges.append(Range(lo, max(most or round(last.load), batch_of(last)), ks[choice.segments[-1].arm]))
    return tuple(ranges), tuple(borders)


def _border(below: LoadRates, above: LoadRates, lower: str, upper: str) -> tuple[int, Border]:
    """The first batch of the upper range, and the dead band."""
    low, high = batch_of(below), batch_of(above)
    gains = [(level.log(upper) or 0.0) - (level.log(lower) or 0.0) for level in (below, above)]
    at = _clamped(math.floor(_where(0.0, gains, low, high)) + 1, low + 1, high)
    up = _clamped(max(at + 1, math.ceil(_where(_BAND, gains, low, high))), at, high)
    down = _clamped(min(at - 2, math.floor(_where(-_BAND, gains, low, high))), low, at - 1)
    return at, Border(down, up)


def _where(gain: float, gains: Sequence[float], low: int, high: int) -> float:
    """The batch at which the upper range's arm is better by so much; in the middle where the line doesn't rise."""
    before, after = gains
    share = 0.5 if not before < 0 < after else _clamped((gain - before) / (after - before), 0.0, 1.0)
    return low * math.exp(share * math.log(high / low))


def _clamped(value: N, low: N, high: N) -> N:
    return max(low, min(value, high))
