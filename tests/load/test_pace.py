"""When requests of an open loop are due: the law of their gaps, and that nothing but seed and rate moves them."""

from __future__ import annotations

import math
import statistics
from itertools import islice, pairwise

import pytest
import uvloop

from breakeven.clock import MonotonicClock
from breakeven.load.open import OpenLoop
from breakeven.load.pace import check_arrivals, due_times
from breakeven.load.plan import LevelRequests, PlannedRequest
from breakeven.load.prompts import Prompt, PromptSet
from breakeven.load.window import StopRule
from breakeven.records import LevelPlan

KINDS = ["poisson", "constant", "gamma:0.5", "gamma:1", "gamma:3"]


def gaps(rate: float, arrivals: str, *, seed: int = 0, count: int = 20_000) -> list[float]:
    return [b - a for a, b in pairwise([0.0, *islice(due_times(rate, arrivals, seed=seed), count)])]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("arrivals", "cv"), [("poisson", 1.0), ("constant", 0.0), ("gamma:0.5", 0.5), ("gamma:1", 1.0), ("gamma:3", 3.0)]
)
def test_gaps_have_the_mean_and_the_cv_of_their_law(arrivals: str, cv: float, seed: int) -> None:
    found = gaps(200.0, arrivals, seed=seed)
    mean = statistics.fmean(found)
    assert mean == pytest.approx(1 / 200, rel=max(4 * cv / math.sqrt(len(found)), 1e-9))
    assert statistics.stdev(found) / mean == pytest.approx(cv, rel=0.1, abs=1e-9)


@pytest.mark.parametrize("arrivals", ["poisson", "gamma:1"])
@pytest.mark.parametrize("seed", range(5))
def test_poisson_gaps_pass_a_kolmogorov_smirnov_test_at_200_a_second(arrivals: str, seed: int) -> None:
    found = sorted(gaps(200.0, arrivals, seed=seed, count=10_000))
    n = len(found)
    distance = max(
        max((i + 1) / n - law, law - i / n) for i, gap in enumerate(found) for law in [1 - math.exp(-200 * gap)]
    )
    assert distance < 1.63 / math.sqrt(n)  # the 1 % point of Kolmogorov's distribution


def test_gaps_do_not_depend_on_each_other() -> None:
    found = gaps(1.0, "poisson")
    mean, variance = statistics.fmean(found), statistics.variance(found)
    lagged = statistics.fmean((a - mean) * (b - mean) for a, b in pairwise(found)) / variance
    assert abs(lagged) < 4 / math.sqrt(len(found))


@pytest.mark.parametrize("arrivals", KINDS)
def test_every_rate_sees_the_same_pattern_stretched(arrivals: str) -> None:
    slow, fast = (list(islice(due_times(rate, arrivals, seed=7), 500)) for rate in (0.5, 20.0))
    assert slow == pytest.approx([at * 40 for at in fast])


@pytest.mark.parametrize("arrivals", ["poisson", "gamma:2"])
def test_patterns_follow_the_seed(arrivals: str) -> None:
    def first(seed: int) -> list[float]:
        return list(islice(due_times(1.0, arrivals, seed=seed), 20))

    assert first(3) == first(3)
    assert first(3) != first(4)


def test_repeats_of_a_level_have_arrivals_of_their_own_and_the_first_those_of_no_repeat() -> None:
    def first(**run: int) -> list[float]:
        return list(islice(due_times(1.0, "poisson", seed=3, **run), 20))

    assert first() == first(run=0)
    assert first(run=1) == first(run=1)
    assert len({tuple(first(run=run)) for run in range(8)}) == 8


@pytest.mark.parametrize("arrivals", KINDS)
def test_due_times_ascend_and_have_no_end(arrivals: str) -> None:
    found = list(islice(due_times(1000.0, arrivals, seed=0), 50_000))
    assert found == sorted(found)
    assert found[0] >= 0
    assert found[-1] == pytest.approx(50, rel=0.1)


@pytest.mark.parametrize("text", ["poisson", "constant", "gamma:0.01", "gamma:2.5", "gamma:100"])
def test_known_arrivals_pass(text: str) -> None:
    assert check_arrivals(text) == text


@pytest.mark.parametrize(
    "text",
    ["", "Poisson", "gamma", "gamma:", "gamma:0", "gamma:-1", "gamma:nan", "gamma:inf", "gamma:101", "uniform:1"],
)
def test_other_arrivals_are_no_arrivals(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - argparse asks for no more
        check_arrivals(text)


class _CountingClock(MonotonicClock):
    looks = 0

    def now_ns(self) -> int:
        self.looks += 1
        return super().now_ns()


class _RealTime:
    """An open loop on uvloop's clock; requests take no time."""

    def __init__(self, rate: float, count: int) -> None:
        self.clock = _CountingClock()
        self.late_ns: list[int] = []
        plan = LevelPlan(index=0, run=0, max_tokens=8, mode="open", rate=rate)
        prompts = PromptSet(source="test", prompts=(Prompt(id="p", text="x"),))

        async def never(opened_ns: int) -> bool:
            return False

        self.loop = OpenLoop(
            due_times(rate, "poisson", seed=0),
            LevelRequests(plan, prompts, seed=0, tag=None).next,
            self.send,
            self.clock,
            StopRule(requests=count),
            rate=rate,
            max_in_flight=1000,
            ramp=False,
        )

    async def send(self, planned: PlannedRequest, due_ns: int) -> bool:
        self.late_ns.append(self.clock.now_ns() - due_ns)
        return True


@pytest.mark.parametrize(("rate", "count"), [(1000.0, 600), (50.0, 30)])
def test_in_real_time_no_request_is_early_and_most_are_hardly_late(rate: float, count: int) -> None:
    rig = _RealTime(rate, count)
    uvloop.run(rig.loop.run())
    assert len(rig.late_ns) == count
    assert min(rig.late_ns) >= 0
    assert sorted(rig.late_ns)[count // 4] < 5e6  # a loaded machine may be late with the rest


def test_waiting_does_not_spin() -> None:
    """uvloop's timers count milliseconds: asked for less, the loop would turn without a pause."""
    rig = _RealTime(100.0, 60)
    uvloop.run(rig.loop.run())
    assert rig.clock.looks < 10 * 60
