"""The load that a table is judged by, and what the table gains over it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from breakeven.decide.choice import choose
from breakeven.decide.gain import gains_at, gains_over, outside, tuned_rates
from breakeven.decide.profile import Profile, profile_of, read_profile
from breakeven.decide.rates import LoadRates
from breakeven.decide.ratio import log_mean
from breakeven.decide.verdict import DELTA
from breakeven.errors import UsageError
from breakeven.measure.stats import Interval

ARMS = ("k0", "k3")
CROSSING = {1.0: (100.0, 160.0), 4.0: (300.0, 360.0), 16.0: (800.0, 640.0)}


def rates(
    truth: Mapping[float, tuple[float, float]] = CROSSING, noise: float = 0.01, turns: int = 8
) -> list[LoadRates]:
    rng = np.random.default_rng(5)
    found = []
    for load, row in truth.items():
        drawn = {
            arm: tuple(float(rate * math.exp(noise * rng.standard_normal())) for _ in range(turns))
            for arm, rate in zip(ARMS, row, strict=True)
        }
        means = {arm: log_mean(own) for arm, own in drawn.items()}
        found.append(LoadRates(load, load, drawn, means, "pairs", f"C={load:g}"))
    return found


def over(profile: Profile, levels: list[LoadRates]) -> dict[str, tuple[float, float, float, float, float]]:
    choice = choose(levels, ARMS)
    gains = gains_over(profile, levels, ARMS, choice, tuned_rates(levels, ARMS, DELTA))
    found = {}
    for each in gains:
        ends = each.gain.ci95 or Interval(1.0, 1.0)
        assert each.gain.ci95 is not None or each.gain.is_same
        found[each.arm] = (each.tuned, each.static, each.gain.ratio, ends.low, ends.high)
    return found


def csv(place: Path, text: str) -> Path:
    path = place / "profile.csv"
    path.write_text(text)
    return path


def test_hours_of_a_day_weigh_the_same(tmp_path: Path) -> None:
    profile = read_profile(csv(tmp_path, "hour,requests_in_flight\n0,2\n1,2\n2,8\n3,0\n"))
    assert (profile.kind, profile.loads, profile.shares) == ("hours", (0.0, 2.0, 8.0), (0.25, 0.5, 0.25))
    assert profile.idle == 0.25
    assert profile.mean == 3.0


def test_a_trace_holds_each_value_until_the_next(tmp_path: Path) -> None:
    profile = read_profile(csv(tmp_path, "seconds,in_flight\n10,1\n40,5\n50,99\n"))
    assert (profile.loads, profile.shares) == ((1.0, 5.0), (0.75, 0.25))


def test_spaces_capitals_a_byte_order_mark_and_empty_lines_do_no_harm(tmp_path: Path) -> None:
    profile = read_profile(csv(tmp_path, "\ufeffHour, Requests_In_Flight \r\n0, 2 \r\n\r\n1,4\r\n"))
    assert profile.loads == (2.0, 4.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("hour,requests_in_flight\n", "has no rows"),
        (
            "time,load\n0,1\n",
            "its first line must be 'hour,requests_in_flight' or 'seconds,in_flight', not 'time,load'",
        ),
        ("hour,requests_in_flight\n0,1\n1,-3\n", "line 3: requests_in_flight is '-3', not a number from 0"),
        ("hour,requests_in_flight\n0,1\n1,\n", "line 3: requests_in_flight is missing"),
        ("hour,requests_in_flight\n0,1\n1\n", "line 3 has 1 values"),
        ("hour,requests_in_flight\n0,1\n1,2,3\n", "line 3 has 3 values"),
        ("hour,requests_in_flight\n0,nan\n", "line 2: requests_in_flight is 'nan'"),
        ("hour,requests_in_flight\n0,many\n", "line 2: requests_in_flight is 'many'"),
        ("hour,requests_in_flight\n24,1\n", "line 2: hour is 24, not one of 0 to 23"),
        ("hour,requests_in_flight\n1,1\n1,2\n", "line 3: hour 1 is there already, in line 2"),
        ("seconds,in_flight\n0,1\n", "one row: a trace needs two"),
        ("seconds,in_flight\n5,1\n5,2\n", "line 3: seconds must rise"),
        ("seconds,in_flight\n5,1\n4,2\n", "line 3: seconds must rise"),
    ],
)
def test_what_cant_be_used_is_named_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    path = csv(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        read_profile(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_text_or_absent_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG\xff\xfe\x00")
    with pytest.raises(UsageError, match="is no text"):
        read_profile(tmp_path / "a.png")
    with pytest.raises(UsageError, match="No such file"):
        read_profile(tmp_path / "absent.csv")


def test_the_gain_over_a_profile_is_that_of_the_mean_throughput() -> None:
    found = over(profile_of("p", "hours", [(1.0, 1), (16.0, 1)]), rates())
    tuned, static, ratio, low, high = found["k0"]
    assert tuned == pytest.approx((160 + 800) / 2, rel=0.03)
    assert static == pytest.approx((100 + 800) / 2, rel=0.03)
    assert low < (160 + 800) / (100 + 800) < high
    assert ratio == pytest.approx(tuned / static)
    assert found["k3"][3] < (160 + 800) / (160 + 640) < found["k3"][4]


def test_between_levels_throughput_is_interpolated_on_the_logarithms() -> None:
    tuned, static, *_ = over(profile_of("p", "hours", [(2.0, 1.0)]), rates(noise=0.001))["k0"]
    assert static == pytest.approx(math.sqrt(100 * 300), rel=0.01)
    assert tuned == pytest.approx(math.sqrt(160 * 360), rel=0.01)


def test_idle_time_brings_nothing_and_fractions_of_a_request_are_time_with_one() -> None:
    levels = rates(noise=0.001)
    half = over(profile_of("p", "trace", [(0.5, 1.0)]), levels)["k0"]
    assert half[:2] == pytest.approx((80, 50), rel=0.01)
    assert gains_over(profile_of("p", "trace", [(0.0, 1.0)]), levels, ARMS, choose(levels, ARMS), None) == []


def test_beyond_the_measured_loads_the_nearest_stands_in_and_its_time_is_told() -> None:
    levels = rates(noise=0.001)
    profile = profile_of("p", "trace", [(16.0, 3.0), (100.0, 1.0), (0.0, 0.0)])
    assert outside(profile, levels) == 0.25
    assert over(profile, levels)["k3"][0] == pytest.approx(800, rel=0.01)
    assert outside(profile_of("p", "trace", [(0.5, 1.0)]), levels) == 0
    assert outside(profile_of("p", "trace", [(0.5, 1.0)]), levels[1:]) == 1


def test_a_load_where_the_table_has_the_arm_itself_gains_nothing() -> None:
    levels = rates()
    found = gains_at(levels, ARMS, choose(levels, ARMS), tuned_rates(levels, ARMS, DELTA))
    assert [level.gains["k3"].is_same for level in found] == [True, True, False]
    assert [level.gains["k0"].is_same for level in found] == [False, False, True]
    assert found[0].gains["k0"].ratio == pytest.approx(1.6, rel=0.02)


def test_a_choice_among_equals_is_not_praised_for_its_luck() -> None:
    equal = dict.fromkeys((1.0, 2.0, 4.0, 8.0, 16.0, 32.0), (100.0, 100.0))
    levels = rates(equal, noise=0.05)
    choice = choose(levels, ARMS, must=True)
    lucky = gains_at(levels, ARMS, choice, None)
    fair = gains_at(levels, ARMS, choice, tuned_rates(levels, ARMS, DELTA))
    other = next(arm for arm in ARMS if arm != choice.arm_at(0))
    assert np.mean([level.gains[other].ratio for level in fair]) < np.mean(
        [level.gains[other].ratio for level in lucky]
    )


def test_too_few_turns_to_set_one_aside_give_no_cross_fit() -> None:
    assert tuned_rates(rates(turns=2), ARMS, DELTA) is None
    assert tuned_rates(rates(turns=3), ARMS, DELTA) is not None


def test_each_turn_is_judged_by_a_choice_that_did_not_see_it() -> None:
    level = rates({1.0: (100.0, 100.0)}, noise=0.0001, turns=6)[0]
    # Were turn 5 seen, k3 would be chosen for it too: alone it is a hundred times the rest.
    odd = level._replace(turns={"k0": level.turns["k0"], "k3": (*(90.0,) * 5, 9000.0)})
    (tuned,) = tuned_rates([odd], ARMS, DELTA) or []
    assert tuned[4:] == odd.turns["k0"][4:]
