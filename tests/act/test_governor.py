"""Between scheduler and policy: pins, faults, and what is kept."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from breakeven.act.governor import STATE_SCHEMA, Governor
from breakeven.decide.observed import Step
from breakeven.decide.policy import Policy
from breakeven.errors import UsageError


class Clock:
    """Goes on when it is told to."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000

    def __call__(self) -> int:
        return self.now_ns


def governed(k: int = 0) -> tuple[Governor, Clock]:
    """A governor of a policy that keeps to a K, of 0, 2 and 4."""
    clock = Clock()
    return Governor(Policy([0, 2, 4], mode=k), f"fixed:{k}", clock), clock


def test_a_pin_holds_its_k_until_its_time_is_over() -> None:
    governor, clock = governed()
    assert governor.choose(3, 0, 0.1) == 0
    governor.pin(4, 2.5)
    assert governor.choose(3, 0, 0.1) == 4
    assert governor.state()["pinned"] == {"k": 4, "seconds_left": 2.5}
    clock.now_ns += 2_499_999_999
    assert governor.choose(3, 0, 0.1) == 4
    clock.now_ns += 1
    assert governor.state()["pinned"] is None
    assert governor.choose(3, 0, 0.1) == 0


def test_a_pin_can_be_taken_away_and_replaced() -> None:
    governor, _ = governed()
    governor.pin(4, 100)
    governor.pin(2, 100)
    assert governor.choose(1, 0, 0.0) == 2
    governor.unpin()
    assert governor.choose(1, 0, 0.0) == 0
    assert governor.state()["pins"] == 2


@pytest.mark.parametrize(
    ("k", "seconds"), [(3, 1), ("4", 1), (True, 1), (None, 1), (4, 0), (4, -1), (4, "1"), (4, 1e9), (4, math.nan)]
)
def test_a_pin_that_cant_be_changes_nothing(k: object, seconds: object) -> None:
    governor, _ = governed()
    with pytest.raises(UsageError, match=r"declared|seconds"):
        governor.pin(k, seconds)  # type: ignore[arg-type]
    assert governor.choose(1, 0, 0.0) == 0


def test_pinned_steps_teach_the_policy() -> None:
    clock = Clock()
    governor = Governor(Policy([0, 4]), "auto", clock)
    governor.pin(4, 1000)
    for _ in range(50):
        begun_ns = clock.now_ns
        governor.choose(1, 0, 0.0)
        clock.now_ns += 20_000_000
        governor.report(Step(begun_ns, 20_000_000, 1, 4, 1, (1, 1, 0, 0), 0))
    (rate,) = [each["tokens_per_s"] for each in governor.state()["estimates"] if each["k"] == 4]
    assert rate == pytest.approx(150, rel=0.05)  # three tokens in 20 ms


def test_tells_its_state_as_json() -> None:
    governor, _ = governed(2)
    governor.choose(5, 1, 0.2)
    governor.fault("load")
    state = json.loads(json.dumps(governor.state()))
    assert (state["schema"], state["policy"], state["ks"]) == (STATE_SCHEMA, "fixed:2", [0, 2, 4])
    assert (state["k"], state["decoding"], state["steps"], state["faults"]) == (2, 5, 1, {"load": 1})
    assert [each["k"] for each in state["estimates"]] == [0, 2, 4]


def test_what_was_learned_outlives_the_process(tmp_path: Path) -> None:
    path = tmp_path / "learned.json"
    first, clock = governed()
    for _ in range(20):
        begun_ns = clock.now_ns
        first.choose(2, 0, 0.0)
        clock.now_ns += 7_000_000
        first.report(Step(begun_ns, 7_000_000, 2, 0, 0, (), 0))
    first.keep(path)
    second, _ = governed()
    assert "goes on" in second.restore(path)
    second.choose(2, 0, 0.0)
    assert second.state()["estimates"][0]["tokens_per_s"] == pytest.approx(2 / 0.007, rel=0.05)
    assert [file.name for file in tmp_path.iterdir()] == ["learned.json"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": "breakeven.policy/1", "ks": [0, 1]}', "null"])
def test_a_file_of_something_else_is_told_and_not_used(tmp_path: Path, text: str) -> None:
    path = tmp_path / "learned.json"
    path.write_text(text)
    governor, _ = governed()
    assert "not used" in governor.restore(path)
    assert governor.choose(1, 0, 0.0) == 0


def test_a_disk_that_takes_nothing_is_counted(tmp_path: Path) -> None:
    governor, _ = governed()
    governor.keep(tmp_path / "no such folder" / "learned.json")
    assert governor.faults == {"state_file": 1}
