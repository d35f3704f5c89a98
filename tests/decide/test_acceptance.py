from __future__ import annotations

import math

import pytest

from breakeven.decide.acceptance import needed_acceptance
from breakeven.decide.ratio import Ratio


def tpot(value: float, se: float = 0.01) -> Ratio:
    return Ratio(log=math.log(value), se=se, df=7, n=8, method="pairs", lower_is_better=True)


def test_needed_is_what_a_step_would_have_to_bring() -> None:
    """A step of 60 ms that brings 2 tokens against 25 ms for one: 2.4 would break even."""
    found = needed_acceptance(2.0, 3, tpot_ms=(25.0, 30.0))
    assert (found.have, found.needed, found.most, found.ci95) == (2.0, pytest.approx(2.4), 4, None)


@pytest.mark.parametrize(
    ("ratio", "k", "verdict"),
    [(0.7, 3, "met"), (1.2, 3, "not_met"), (2.2, 3, "out_of_reach"), (1.0, 3, "unknown"), (1.2, 1, "out_of_reach")],
)
def test_more_than_k_plus_1_is_out_of_reach(ratio: float, k: int, verdict: str) -> None:
    assert needed_acceptance(2.0, k, tpot_ratio=tpot(ratio)).verdict == verdict


def test_out_of_reach_only_where_the_whole_interval_is() -> None:
    assert needed_acceptance(2.0, 3, tpot_ratio=tpot(2.05, 0.1)).verdict == "not_met"
    assert needed_acceptance(2.0, 3, tpot_ratio=tpot(2.05, 0.001)).verdict == "out_of_reach"


def test_the_interval_is_that_of_tpot() -> None:
    found, ratio = needed_acceptance(2.0, 3, tpot_ratio=tpot(1.2)), tpot(1.2).interval()
    assert found.ci95 is not None
    assert (found.ci95.low, found.ci95.high) == (pytest.approx(2 * ratio.low), pytest.approx(2 * ratio.high))


def test_tpot_is_given_in_one_way() -> None:
    with pytest.raises(ValueError, match="either"):
        needed_acceptance(2.0, 3)
    with pytest.raises(ValueError, match="either"):
        needed_acceptance(2.0, 3, tpot_ratio=tpot(1.0), tpot_ms=(1.0, 1.0))
