from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from benchmarks.verdicts import DOUBLING, knee_coverage

from breakeven.decide.knee import knee
from breakeven.decide.ratio import LogMean, NoRatio


def levels(
    rates: Sequence[float], se: float = 0.005, loads: Sequence[float] = DOUBLING
) -> dict[float, LogMean | NoRatio]:
    return {load: LogMean(math.log(rate), se, 7) for load, rate in zip(loads, rates, strict=False)}


def test_the_knee_lies_where_the_line_reaches_95_percent_of_the_highest() -> None:
    found = knee(levels([10, 20, 40, 80, 100, 100, 100], 1e-6))
    share = math.log(0.95 * 100 / 80) / math.log(100 / 80)
    assert found.kind == "found"
    assert found.load == pytest.approx(8 * 2**share)
    assert found.ci95 is not None
    assert found.ci95.low <= found.load <= found.ci95.high


def test_throughput_that_still_grows_at_the_last_load_has_no_knee_yet() -> None:
    found = knee(levels([10, 20, 40, 80]))
    assert (found.kind, found.load, found.ci95, found.grows) == ("at_or_above_highest", 8.0, None, True)


def test_growth_of_a_percent_is_no_growth_however_sure() -> None:
    found = knee(levels([10, 20, 40, 80, 100, 101], 1e-4))
    assert (found.kind, found.grows) == ("found", True)
    assert 8 < (found.load or 0) < 16


def test_growth_within_noise_leaves_the_knee_open_to_the_last_load() -> None:
    found = knee(levels([10, 20, 40, 80, 88], 0.06))
    assert found.kind == "found"
    assert found.ci95 is not None
    assert found.ci95.high > 14


def test_throughput_that_falls_after_its_best_has_its_knee_before_it() -> None:
    assert (knee(levels([10, 20, 40, 80, 60, 40])).load or 0) < 8


def test_a_flat_arm_is_at_its_knee_from_the_start() -> None:
    assert knee(levels([100, 101, 100])).kind == "at_or_below_lowest"


def test_the_same_data_gives_the_same_interval() -> None:
    measured = levels([10, 20, 40, 80, 95, 100, 100], 0.02)
    assert knee(measured) == knee(measured)


def test_levels_without_an_interval_are_left_out() -> None:
    failed = NoRatio("no_interval", "too short")
    assert knee({1.0: failed, 2.0: failed}).why_not == "0 loads with an interval: needs two"
    assert knee(levels([10, 20, 20, 20]) | {16.0: failed}).kind == "found"


def test_knees_cover_the_truth() -> None:
    kinds, covered, width = knee_coverage(DOUBLING, 4.0, 0.01, 8, repeats=60, seed=1)
    assert kinds["found"] > 56
    assert covered >= 0.9
    assert width < 2
