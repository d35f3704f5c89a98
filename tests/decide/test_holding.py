"""The verdict on a tuned arm over all loads, and its one line."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from breakeven.decide.envelope import EnvelopeRatio
from breakeven.decide.holding import Holding, holding
from breakeven.decide.ratio import NoRatio
from breakeven.decide.student import t_quantile


def at(value: float, half: float, best: tuple[str, ...] = ("on",)) -> EnvelopeRatio:
    """A ratio whose 95 % interval is so wide to either side, in log."""
    return EnvelopeRatio(log=math.log(value), se=half / t_quantile(0.975, 6), df=6, lag=0.0, n=8, best=best)


def held(ratios: Mapping[float, EnvelopeRatio | NoRatio], *, margin: float = 0.03) -> Holding:
    return holding(ratios, {load: f"C={load:g}" for load in ratios}, arm="tuned", margin=margin)


def test_it_holds_where_it_is_surely_above_the_margin_everywhere() -> None:
    found = held({1: at(1.0, 0.01), 8: at(0.99, 0.01)})
    assert found.outcome == "holds"
    assert [level.state for level in found.levels] == ["holds", "holds"]
    assert found.sentence.startswith(
        "tuned holds the envelope: nowhere more than 3 % below the best static arm, geometric mean 0.995 (95 %: 0.9"
    )


def test_it_holds_by_its_mean_where_no_level_surely_fails_and_all_are_as_fine_as_the_margin() -> None:
    found = held({1: at(1.01, 0.01), 8: at(0.98, 0.02), 16: at(1.0, 0.01)})
    assert found.outcome == "holds"
    assert [level.state for level in found.levels] == ["holds", "close", "holds"]
    assert "at no load surely more than 3 % below the best static arm (lowest at C=8: 0.980 (95 %" in found.sentence


def test_one_level_surely_below_the_margin_loses_whatever_the_mean() -> None:
    found = held({1: at(1.2, 0.01), 8: at(0.94, 0.02, ("on", "off"))})
    assert found.outcome == "loses"
    assert found.mean is not None
    assert found.mean > 1
    assert found.sentence == "tuned loses at C=8: 0.940 (95 %: 0.921 to 0.959) of on or off"


def test_losing_somewhere_is_corrected_for_the_number_of_levels() -> None:
    barely = at(0.95, 0.019)  # wholly below 0.97 if it were alone
    assert held({8: barely}).outcome == "loses"
    many: dict[float, EnvelopeRatio | NoRatio] = {load: at(0.98, 0.03) for load in range(1, 7)}
    found = held(many | {8: barely})
    assert found.levels[-1].state == "close"
    assert found.outcome != "loses"


def test_being_a_little_low_everywhere_loses_over_all_loads() -> None:
    found = held({load: at(0.955, 0.025) for load in range(1, 7)})
    assert found.outcome == "loses"
    assert {level.state for level in found.levels} == {"close"}
    assert found.sentence.startswith("tuned loses over all loads: geometric mean 0.955 (95 %: 0.9")
    assert found.sentence.endswith(" of the best static arm, below 0.97")


def test_a_wide_level_leaves_it_undecided_and_says_what_would_do() -> None:
    found = held({1: at(1.0, 0.01), 8: at(1.0, 0.05)})
    assert found.outcome == "undecided"
    # 8 blocks at 5 % would be 8 · (5/3)² = 22 at 3 %, but t falls from 2.45 to 2.15: 18 do, which is 5 cycles more.
    assert found.sentence == "undecided: intervals too wide at C=8 (±5.0 %), 5 more cycles would do"


def test_a_mean_that_reaches_below_the_margin_is_undecided() -> None:
    found = held({1: at(0.975, 0.02), 8: at(0.975, 0.02)})
    assert found.outcome == "undecided"
    assert found.sentence.startswith("undecided: the geometric mean 0.975 (95 %: 0.9")
    assert found.sentence.endswith(" more cycles would do")
    below = held({1: at(0.968, 0.025), 8: at(0.968, 0.025)})
    assert below.sentence.endswith("and no bearable number of cycles would do")


@pytest.mark.parametrize("others", [{}, {1.0: at(1.0, 0.01)}])
def test_a_level_without_a_ratio_is_no_level_that_holds(others: dict[float, EnvelopeRatio | NoRatio]) -> None:
    found = held(others | {8.0: NoRatio("some_failed", "off: it brought nothing in 1 of 8 visits")})
    assert found.outcome == "undecided"
    assert found.sentence == "undecided: no ratio at C=8 (off: it brought nothing in 1 of 8 visits)"


def test_the_margin_is_what_was_asked_for() -> None:
    assert held({8: at(0.93, 0.02)}, margin=0.03).outcome == "loses"
    assert held({8: at(0.93, 0.02)}, margin=0.1).outcome == "holds"
