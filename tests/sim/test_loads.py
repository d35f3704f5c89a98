"""Load profiles: what they look like, and how they are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from breakeven.errors import UsageError
from breakeven.sim.loads import path_of


def loads(profile: str, seconds: float = 120.0) -> list[int]:
    """One value a second."""
    return [int(load) for load in path_of(profile, seconds, 1.0)]


def test_a_constant_load_is_one() -> None:
    assert loads("constant:7", 5) == [7] * 5


def test_a_ramp_rises_and_falls_over_the_whole_time() -> None:
    found = loads("ramp:1:61")
    assert found[0] == 1
    assert found[60] == 61
    assert found[:60] == sorted(found[:60])
    assert found[60:] == sorted(found[60:], reverse=True)


def test_a_step_stands_at_either_for_half_a_period() -> None:
    assert loads("step:2:9:20", 40) == ([2] * 10 + [9] * 10) * 2


def test_a_day_is_low_at_its_ends_and_high_in_the_middle() -> None:
    found = loads("day:4:40")
    assert (found[0], found[60]) == (4, 40)
    assert abs(found[30] - 22) <= 1
    assert loads("day:4:40:60")[:60] == loads("day:4:40:60")[60:]


def test_a_burst_is_short() -> None:
    found = loads("burst:1:50:20", 60)
    assert sorted(set(found)) == [1, 50]
    assert found.count(50) == 6


def test_a_trace_holds_each_value_until_the_next_and_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("seconds,in_flight\n100,3\n102,8\n\n104,0\n")
    assert loads(f"trace:{tmp_path / 't.csv'}", 8) == [3, 3, 8, 8, 1, 1, 3, 3]


@pytest.mark.parametrize(
    "profile",
    (
        " constant constant:0 constant:1:2 ramp:1 ramp:8:1 ramp:1:8:60 step:1:2:0 step:1:2:3:4 day:1:x wave:1:8 "
        "constant:nan ramp:1:inf burst:1:9999999 trace trace:"
    ).split(" "),
)
def test_other_profiles_are_refused(profile: str) -> None:
    with pytest.raises(UsageError, match=r"--profile .*: give constant:C"):
        path_of(profile, 60, 1.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no row"),
        ("seconds,in_flight\n", "no row"),
        ("0,1\n1\n", "line 2"),
        ("0,1\n0,2\n", "line 2"),
        ("0,-1\n", "line 1"),
        ("0,nan\n", "line 1"),
        ("s,n\n0,1\nx,2\n", "line 3"),
    ],
)
def test_a_trace_that_is_none_is_refused_by_its_line(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(UsageError, match=said):
        path_of(f"trace:{tmp_path / 't.csv'}", 60, 1.0)


def test_a_trace_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match=r"trace:nowhere\.csv: No such file"):
        path_of("trace:nowhere.csv", 60, 1.0)
