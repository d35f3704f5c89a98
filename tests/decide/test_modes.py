"""Policies by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from breakeven.decide.modes import policy_of
from breakeven.decide.schedule import Range, Schedule
from breakeven.errors import UsageError
from tests.decide.engine_by_hand import ByHand


def test_each_name_is_its_policy(tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    path.write_text(Schedule(model="m", ranges=(Range(1, 8, 3), Range(9, 64, 0))).to_json())
    assert set(ByHand(policy_of("fixed:3", [0, 3])).run(1, 60)) == {3}
    assert set(ByHand(policy_of(f"table:{path}", [0, 3])).run(1, 60)) == {0}
    assert ByHand(policy_of(f"auto:{path}", [0, 3])).run(0.1, 4)[0] == 3
    assert ByHand(policy_of("auto", [0, 3])).run(0.1, 4)[0] == 0


@pytest.mark.parametrize(
    "name", ["", "fast", "table", "table:", "fixed", "fixed:", "fixed:x", "fixed:2", "fixed:-1", "table:no"]
)
def test_other_names_are_refused_in_one_line(name: str) -> None:
    with pytest.raises(UsageError) as refused:
        policy_of(name, [0, 3])
    assert "\n" not in str(refused.value)
