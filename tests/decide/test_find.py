"""What a search measures next, on curves that are known."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from breakeven.decide.blocks import APART, FIRST, LOWEST_FIRST, MOST_TURNS, Block, Pace, Search, Stop
from breakeven.decide.breakeven import BreakEven, break_even
from breakeven.decide.find import next_for_break_even
from breakeven.decide.findknee import next_for_knee
from breakeven.decide.knee import Knee, knee
from breakeven.decide.ratio import NoRatio, log_mean, paired

#: The log of other over reference, or of throughput, at a load.
Curve = Callable[[float], float]


class World:
    """Turns with noise around a curve; a turn takes a second and `per_load_s` more for each request in flight."""

    def __init__(self, curve: Curve, *, noise: float = 0.03, seed: int = 1, per_load_s: float = 0.02) -> None:
        self._curve, self._noise, self._per_load_s = curve, noise, per_load_s
        self._rng = np.random.default_rng(seed)
        self.values: dict[int, list[float]] = {}
        self.blocks: list[Block] = []

    def measure(self, block: Block) -> None:
        self.blocks.append(block)
        drawn = self._curve(block.load) + self._noise * self._rng.standard_normal(block.turns)
        self.values.setdefault(block.load, []).extend(np.exp(drawn))

    @property
    def pace(self) -> Pace:
        return Pace({load: 1 + self._per_load_s * load for load in self.values})

    @property
    def turns(self) -> int:
        return sum(map(len, self.values.values()))

    def look(self, search: Search, left_s: float = math.inf) -> Block | Stop:
        seen = {load: paired([1.0] * len(own), own) for load, own in self.values.items()}
        return next_for_break_even(seen, search, self.pace, left_s)

    def find(self, search: Search) -> tuple[BreakEven, Stop]:
        while isinstance(chosen := self.look(search), Block):
            self.measure(chosen)
        return break_even({load: paired([1.0] * len(own), own) for load, own in self.values.items()}), chosen

    def find_knee(self, search: Search) -> tuple[Knee, Stop]:
        while True:
            means = {load: log_mean(own) for load, own in self.values.items()}
            chosen = next_for_knee(means, search, self.pace)
            if isinstance(chosen, Stop):
                return knee({float(load): mean for load, mean in means.items()}), chosen
            self.measure(chosen)


def falling(crossing: float) -> Curve:
    return lambda load: 0.3 * math.tanh(0.7 * math.log(crossing / load))


def test_it_begins_at_the_lowest_load() -> None:
    assert next_for_break_even({}, Search(low=3), Pace({})) == Block(3, LOWEST_FIRST, "the lowest load")


@pytest.mark.parametrize("crossing", [2.5, 12.0, 70.0])
def test_a_crossing_is_found_as_narrow_as_asked_for(crossing: float) -> None:
    world = World(falling(crossing))
    found, stop = world.find(Search(precision=0.15))
    assert stop.reached
    (only,) = found.crossings
    assert found.kind == "pays_below"
    assert only.low is not None
    assert only.high is not None
    assert math.log(only.high / only.low) / 2 <= 0.15
    assert only.low <= crossing <= only.high
    assert max(world.values) <= 4 * crossing + 2  # what lies far beyond costs most time and tells nothing
    assert world.turns < 120


def test_a_reversed_curve_is_followed_to_the_end_of_the_range() -> None:
    """Where an arm begins to pay it may cease again."""
    world = World(lambda load: -falling(6.0)(load))
    found, stop = world.find(Search(high=64, precision=0.2))
    assert (found.kind, stop.reached) == ("pays_above", True)
    assert max(world.values) == 64


@pytest.mark.parametrize(("height", "kind"), [(0.2, "pays_everywhere"), (-0.2, "pays_nowhere")])
def test_without_a_crossing_it_says_so_as_soon_as_the_end_is_sure(height: float, kind: str) -> None:
    world = World(lambda load: height)
    found, stop = world.find(Search(high=64))
    assert (found.kind, stop) == (kind, Stop("there is no crossing from 1 to 64", True))
    assert world.turns <= 6 * FIRST


def test_a_hump_gets_the_loads_that_a_claim_of_two_crossings_needs() -> None:
    world = World(lambda load: 0.25 - 0.25 * math.log(load / 8) ** 2, noise=0.02)
    found, _ = world.find(Search(high=128, precision=0.2))
    assert found.kind == "pays_between"
    first, second = found.crossings
    assert first.load == pytest.approx(8 / math.e, rel=0.2)
    assert second.load == pytest.approx(8 * math.e, rel=0.2)
    assert any("another sign change" in block.why for block in world.blocks)


def test_equal_arms_are_given_up_in_bearable_time() -> None:
    world = World(lambda load: 0.0, noise=0.05)
    _, stop = world.find(Search(high=64))
    assert world.turns <= MOST_TURNS + 32
    assert stop.why


def test_loads_keep_apart_and_turns_come_in_whole_cycles() -> None:
    world = World(falling(20.0), noise=0.06)
    world.find(Search(precision=0.08))
    loads = sorted(world.values)
    assert all(b >= APART * a for a, b in pairwise(loads))
    assert all(block.turns % 2 == 0 for block in world.blocks)


def test_a_crossing_has_a_load_near_it_before_it_is_believed() -> None:
    """Far apart the straight line between two loads, and the cubic too, may miss a bend."""
    world = World(lambda load: 0.4 if load < 10 else -0.4, noise=0.02)
    found, _ = world.find(Search(precision=0.5))
    (only,) = found.crossings
    assert only.load is not None
    near = [load for load in world.values if 0.8 < load / only.load < 1.25]
    assert near


def test_a_block_is_no_longer_than_the_time_that_is_left() -> None:
    world = World(falling(12.0))
    world.measure(Block(1, FIRST, ""))
    assert isinstance(chosen := world.look(Search(), left_s=5.0), Block)
    assert chosen.turns == 4  # of 1.02 s each, whole cycles
    assert world.look(Search(), left_s=1.0) == Stop("time is up", False)


def test_turns_go_where_a_second_tells_most() -> None:
    gains = {2: 0.4, 10: 0.05, 13: -0.05, 60: -0.4}
    seen = {
        load: paired([1.0] * 12, [math.exp(gain + 0.06 * math.cos(turn)) for turn in range(12)])
        for load, gain in gains.items()
    }
    for dear, expected in ((13, 10), (10, 13)):
        pace = Pace({load: 10.0 if load == dear else 1.0 for load in gains})
        chosen = next_for_break_even(seen, Search(precision=0.05), pace)
        assert isinstance(chosen, Block)
        assert chosen.load == expected


def test_a_load_at_which_an_arm_fails_ends_the_range() -> None:
    seen = {load: paired([1.0] * 6, [1.2 + 0.001 * i for i in range(6)]) for load in (1, 2, 4)}
    failed = NoRatio("arm_failed", "on brought nothing")
    chosen = next_for_break_even({**seen, 8: failed}, Search(), Pace({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0}))
    assert isinstance(chosen, Block)
    assert 4 < chosen.load < 8
    nothing = next_for_break_even({1: failed}, Search(), Pace({1: 1.0}))
    assert nothing == Stop("nothing can be compared there", False)


def test_the_knee_is_found_and_the_range_is_not_searched_beyond_the_top() -> None:
    world = World(lambda load: math.log(min(load, 20.0)), noise=0.02)
    found, stop = world.find_knee(Search(precision=0.15))
    assert stop.reached
    assert found.ci95 is not None
    assert found.load == pytest.approx(19.0, rel=0.15)
    assert math.log(found.ci95.high / found.ci95.low) / 2 <= 0.15
    assert max(world.values) == 64


def test_a_knee_beyond_the_range_is_called_that() -> None:
    found, stop = World(math.log).find_knee(Search(high=16))
    assert (found.kind, stop) == ("at_or_above_highest", Stop("the knee lies beyond the range", True))


def test_the_pace_between_and_beyond_measured_loads() -> None:
    pace = Pace({4: 10.0, 16: 40.0})
    assert pace.at(1) == 10.0
    assert pace.at(8) == pytest.approx(20.0)
    assert pace.at(64) == pytest.approx(160.0)
    assert Pace({4: 10.0, 16: 10.0}).at(64) == pytest.approx(10.0)
