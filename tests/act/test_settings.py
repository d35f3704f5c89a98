"""What `BREAKEVEN_*` may say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from breakeven.act.settings import DEFAULT_PORT, Control, read_control
from breakeven.errors import UsageError


def test_says_nothing_by_default() -> None:
    assert read_control({}) == Control()
    assert Control().port == DEFAULT_PORT


def test_variables_override_the_file(tmp_path: Path) -> None:
    file = tmp_path / "control.json"
    file.write_text(json.dumps({"policy": "fixed:2", "port": 9999, "objective_ms": 50}))
    control = read_control({"BREAKEVEN_CONFIG": str(file), "BREAKEVEN_PORT": "0", "BREAKEVEN_STATE": "/s.json"})
    assert control == Control(policy="fixed:2", port=0, objective_ms=50.0, state=Path("/s.json"))


@pytest.mark.parametrize(("value", "is_set"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_what_is_on_or_off(value: str, *, is_set: bool) -> None:
    control = read_control({"BREAKEVEN_DEEP": value, "BREAKEVEN_UNTRIED": value})
    assert (control.deep, control.untried) == (is_set, is_set)


def test_others_may_reach_the_page_only_where_pins_need_a_key() -> None:
    with pytest.raises(UsageError, match=r"BREAKEVEN_HOST=0\.0\.0\.0.*BREAKEVEN_KEY"):
        read_control({"BREAKEVEN_HOST": "0.0.0.0"})
    assert read_control({"BREAKEVEN_HOST": "0.0.0.0", "BREAKEVEN_KEY": "k"}).host == "0.0.0.0"
    for host in ("localhost", "127.0.0.7", "::1"):
        assert read_control({"BREAKEVEN_HOST": host}).host == host


@pytest.mark.parametrize(
    ("name", "value"),
    [("PORT", "x"), ("PORT", "65536"), ("PORT", "80.5"), ("OBJECTIVE_MS", "0"), ("OBJECTIVE_MS", "nan")],
)
def test_names_the_variable_that_cant_be(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"BREAKEVEN_{name}={value}"):
        read_control({f"BREAKEVEN_{name}": value})


@pytest.mark.parametrize("text", ["{", "[1]", '{"polcy": "auto"}'])
def test_names_the_file_that_cant_be(tmp_path: Path, text: str) -> None:
    file = tmp_path / "control.json"
    file.write_text(text)
    with pytest.raises(UsageError, match="BREAKEVEN_CONFIG"):
        read_control({"BREAKEVEN_CONFIG": str(file)})


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="BREAKEVEN_CONFIG"):
        read_control({"BREAKEVEN_CONFIG": str(tmp_path / "none.json")})
