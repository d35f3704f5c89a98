from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import pytest
from benchmarks.verdicts import DOUBLING, simulate_break_evens, smooth
from msgspec.structs import replace

from breakeven.decide.breakeven import BreakEven, break_even
from breakeven.decide.ratio import NoRatio, Ratio
from breakeven.decide.student import t_quantile

LOADS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
CLOSE = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 11.0, 16.0, 23.0, 32.0)
HUMP = (-0.2, -0.2, -0.1, 0.1, 0.2, 0.2, 0.1, 0.1, -0.1, -0.2)


def levels(gains: Sequence[float], se: float = 0.01, loads: Sequence[float] = LOADS) -> Mapping[float, Ratio]:
    """Ratios of eight pairs each with given logs."""
    return {
        load: Ratio(log=gain, se=se, df=7, n=8, method="pairs", each_s=30.0)
        for load, gain in zip(loads, gains, strict=True)
    }


def mirrored(measured: Mapping[float, Ratio]) -> dict[float, Ratio | NoRatio]:
    return {load: replace(ratio, log=-ratio.log) for load, ratio in measured.items()}


def found(gains: Sequence[float], se: float = 0.01, loads: Sequence[float] = LOADS) -> BreakEven:
    return break_even(levels(gains, se, loads))


def test_the_crossing_lies_where_the_line_over_log_load_is_zero() -> None:
    result = found([0.4, 0.3, 0.2, 0.1, -0.1, -0.2])
    (crossing,) = result.crossings
    assert result.kind == "pays_below"
    assert crossing.load == pytest.approx(math.sqrt(8 * 16))
    assert crossing.between == (8, 16)
    assert result.states == ("pays",) * 4 + ("costs",) * 2
    assert result.longer == ()


def test_between_two_loads_the_interval_ends_where_the_gain_is_t_standard_errors_from_zero() -> None:
    (crossing,) = found([0.1, -0.05], loads=[4, 16]).crossings
    for end, sign in ((crossing.low, 1), (crossing.high, -1)):
        share = math.log((end or 0) / 4) / math.log(4)
        squares = np.array([1 - share, share]) ** 2
        half = t_quantile(0.975, squares.sum() ** 2 / (squares**2 / 7).sum()) * 0.01 * math.sqrt(squares.sum())
        assert 0.1 - 0.15 * share == pytest.approx(sign * half, rel=0.01)


def test_more_noise_widens_the_interval() -> None:
    widths = []
    for se in (0.005, 0.01, 0.02):
        (crossing,) = found([0.4, 0.3, 0.2, 0.1, -0.1, -0.2], se).crossings
        widths.append((crossing.high or 0) / (crossing.low or 1))
    assert widths == sorted(widths)
    assert widths[-1] > 1.5 * widths[0] - 0.5


def test_loads_in_another_unit_give_the_same_in_that_unit() -> None:
    gains = [0.4, 0.3, 0.2, 0.05, -0.1, -0.2]
    (plain,), (tripled,) = found(gains).crossings, found(gains, loads=[3 * load for load in LOADS]).crossings
    assert (tripled.load, tripled.low, tripled.high) == (
        pytest.approx(3 * (plain.load or 0)),
        pytest.approx(3 * (plain.low or 0)),
        pytest.approx(3 * (plain.high or 0)),
    )


@pytest.mark.parametrize(
    ("kind", "swapped"),
    [
        ("pays_below", "pays_above"),
        ("pays_everywhere", "pays_nowhere"),
        ("pays_up_to", "costs_up_to"),
        ("pays_from", "costs_from"),
        ("no_difference", "no_difference"),
        ("cant_tell", "cant_tell"),
    ],
)
def test_swapping_the_arms_swaps_the_answer_and_keeps_the_loads(kind: str, swapped: str) -> None:
    gains = {
        "pays_below": ([0.4, 0.3, 0.2, 0.05, -0.1, -0.2], 0.01),
        "pays_everywhere": ([0.4, 0.3, 0.2, 0.1, 0.1, 0.1], 0.01),
        "pays_up_to": ([0.4, 0.3, 0.2, 0.1, 0.01, 0.0], 0.02),
        "pays_from": ([0.0, 0.01, 0.1, 0.2, 0.2, 0.2], 0.02),
        "no_difference": ([0.0, 0.005, -0.005, 0.0, 0.0, 0.0], 0.002),
        "cant_tell": ([0.02, 0.01, -0.01, 0.01, 0.0, -0.02], 0.02),
    }[kind]
    measured = levels(*gains)
    forth, back = break_even(measured), break_even(mirrored(measured))
    assert (forth.kind, back.kind) == (kind, swapped)
    assert forth.crossings == back.crossings


def test_a_load_that_can_t_be_told_between_two_that_can_lies_in_the_interval() -> None:
    result = found([0.3, 0.2, 0.1, 0.005, -0.1, -0.2], 0.012)
    (crossing,) = result.crossings
    assert result.states[3] == "open"
    assert crossing.between == (4, 16)
    assert (crossing.low or 0) < 8 < (crossing.high or 0)
    assert result.longer == ()  # it is the break-even itself: nothing has to be decided there


def test_an_open_load_beyond_the_break_even_is_to_be_measured_longer() -> None:
    result = found([0.02, 0.3, 0.2, 0.1, -0.1, -0.2], 0.02)
    assert result.kind == "pays_below"
    assert [item.load for item in result.longer] == [1]
    assert result.longer[0].seconds


def test_a_range_that_ends_before_the_break_even_gives_one_side() -> None:
    result = found([0.4, 0.3, 0.2, 0.1, 0.03, 0.0], 0.02)
    (crossing,) = result.crossings
    assert result.kind == "pays_up_to"
    assert 8 < (crossing.low or 0) <= 32
    assert (crossing.high, crossing.between) == (None, (8, None))


def test_paying_first_and_the_same_later_is_no_crossing() -> None:
    result = found([0.4, 0.3, 0.2, 0.1, 0.001, 0.0], 0.003)
    assert (result.kind, result.states[-2:], result.longer) == ("pays_up_to", ("same", "same"), ())


def test_costing_or_the_same_pays_nowhere() -> None:
    assert found([0.0, 0.0, 0.0, -0.1, -0.1, -0.2], 0.003).kind == "pays_nowhere"


def test_holes_that_noise_leaves_are_told_as_they_are() -> None:
    assert found([0.4, 0.01, 0.3, 0.2, 0.2, 0.1], 0.02).kind == "partly"


@pytest.mark.parametrize(("sign", "kind"), [(1, "pays_between"), (-1, "pays_outside")])
def test_two_crossings_are_claimed_between_close_loads(sign: int, kind: str) -> None:
    result = found([sign * gain for gain in HUMP], loads=CLOSE)
    first, second = result.crossings
    assert result.kind == kind
    assert (first.between, second.between) == ((3, 4), (16, 23))
    assert 3 < (first.low or 0) < (first.high or 0) < 4 < 16 < (second.low or 0) < (second.high or 0) < 23


def test_two_crossings_between_loads_far_apart_are_suspected_only() -> None:
    result = found([-0.2, -0.1, 0.2, 0.2, -0.1, -0.2])
    assert result.kind == "crossings_suspected"
    assert result.add_loads == (3, 11)
    assert len(result.crossings) == 2


def test_the_loads_to_add_make_a_claim_possible() -> None:
    loads = sorted({*LOADS, *found([-0.2, -0.1, 0.2, 0.2, -0.1, -0.2]).add_loads})
    assert found([-0.2, -0.1, -0.05, 0.2, 0.2, 0.1, -0.1, -0.2], loads=loads).kind == "pays_between"


def test_more_crossings_than_two_are_suspected_however_close() -> None:
    assert found([0.2, -0.2] * 5, loads=CLOSE).kind == "crossings_suspected"


def test_latencies_have_break_evens_of_their_own() -> None:
    latencies: dict[float, Ratio | NoRatio] = {
        load: replace(ratio, lower_is_better=True) for load, ratio in levels([-0.4, -0.3, -0.2, -0.1, 0.1, 0.2]).items()
    }
    assert break_even(latencies).kind == "pays_below"


def test_loads_that_can_t_be_compared_are_left_out_and_named() -> None:
    failed = NoRatio("arm_failed", "the other arm brought nothing in any of 8 visits")
    result = break_even({**levels([0.4, 0.3, 0.2, 0.1, -0.1, -0.2]), 64.0: failed})
    assert (result.kind, result.unusable) == ("pays_below", ((64.0, failed),))
    assert break_even({64.0: failed}).kind == "nothing_to_compare"
    assert break_even({}).kind == "nothing_to_compare"


def test_an_answer_goes_to_json_and_back() -> None:
    result = found([0.02, 0.3, 0.2, 0.1, -0.1, -0.2], 0.02)
    assert msgspec.json.decode(msgspec.json.encode(result), type=BreakEven) == result


def test_one_load_is_enough_to_say_what_it_says() -> None:
    assert found([0.2], loads=[8]).kind == "pays_everywhere"
    assert found([-0.2], loads=[8]).kind == "pays_nowhere"
    assert found([0.0], 0.1, loads=[8]).kind == "cant_tell"


def test_a_bent_curve_measured_closely_is_not_missed_by_a_straight_line() -> None:
    """With little noise the line between loads is wrong where the curve bends: the band holds the cubic too."""
    loads, rng, held = np.array(DOUBLING), np.random.default_rng(2), 0
    for truth in np.exp(rng.uniform(math.log(3), math.log(60), 100)):
        gains = smooth(float(truth))(np.log(loads)) + 0.002 * rng.standard_normal(len(loads))
        (crossing,) = found(gains.tolist(), 0.002, loads.tolist()).crossings
        held += (crossing.low or 0) <= truth <= (crossing.high or math.inf)
    assert held >= 90


@pytest.mark.parametrize("noise", [[0.03] * 8, np.geomspace(0.015, 0.06, 8).tolist()])
def test_break_even_intervals_cover_the_truth(noise: list[float]) -> None:
    result = simulate_break_evens(smooth, DOUBLING, noise, pairs=8, repeats=200, seed=4)
    assert result.counted > 0.9
    assert result.covered >= 0.93
    assert result.wrong_kind == 0.0
