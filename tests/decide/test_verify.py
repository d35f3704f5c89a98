"""A tuned arm put to the proof, on runs made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from breakeven.decide.schedule import Range, Schedule
from breakeven.decide.turns import ArmRun
from breakeven.decide.verify import Verification, check_roles, verify
from breakeven.errors import RunError, UsageError
from tests.decide.arms import Steps, failing, made

#: Milliseconds a token in each of four turns: at 1 `on` is the faster static arm, at 8 `off` is.
OFF: Steps = {1: [20.0, 20.2, 19.9, 20.1], 8: [15.0, 15.1, 14.9, 15.0]}
ON: Steps = {1: [15.1, 15.0, 15.2, 15.0], 8: [20.0, 20.1, 20.2, 19.9]}
BEST: Steps = {1: [15.0, 15.1, 15.1, 15.0], 8: [15.1, 14.9, 15.0, 15.0]}


def arms(tuned: Steps = BEST, **fields: Any) -> list[ArmRun]:
    return [made("off", OFF), made("on", ON), made("tuned", tuned, **fields)]


def put(tuned: Steps = BEST, **kwargs: Any) -> Verification:
    return verify(arms(tuned), **kwargs)


def test_an_arm_that_is_as_good_as_the_best_at_each_load_holds_the_envelope() -> None:
    found = put()
    assert found.holding.outcome == "holds"
    assert [load.envelope.best for load in found.loads] == [("on",), ("off",)]
    assert found.holding.mean == pytest.approx(1.0, abs=0.01)
    first = found.loads[0]
    assert first.static["off"].value == pytest.approx(20.05 / 15.05, rel=0.01)
    assert (first.static["off"].verdict, first.static["on"].verdict) == ("faster", "same")
    assert (found.tuned, found.static, found.how) == ("tuned", ("off", "on"), "pairs")


def test_an_arm_that_is_always_on_loses_where_off_is_better() -> None:
    found = put({1: BEST[1], 8: [20.1, 20.0, 20.1, 20.0]})
    assert found.holding.outcome == "loses"
    assert found.holding.sentence.startswith("tuned loses at C=8: 0.7")
    assert found.holding.sentence.endswith(" of off")


def test_the_arm_to_prove_may_stand_anywhere() -> None:
    first = verify([made("auto", BEST), made("off", OFF), made("on", ON)], "auto")
    assert (first.tuned, first.static) == ("auto", ("off", "on"))
    assert first.holding.outcome == "holds"
    assert [arm.arm for arm in first.loads[0].arms] == ["off", "on", "auto"]


def test_only_turns_that_every_arm_finished_count() -> None:
    found = verify([made("off", OFF), made("on", {1: ON[1][:3], 8: ON[8]}), made("tuned", BEST)])
    assert [load.envelope.n for load in found.loads] == [3, 4]
    assert found.loads[0].static["off"].n == 3


def test_verdicts_on_static_arms_are_corrected_over_arms_and_loads() -> None:
    found = put()
    p_values = [compared.p_holm for load in found.loads for compared in load.static.values()]
    alone = verify([made("off", {1: OFF[1]}), made("on", {1: ON[1]}), made("tuned", {1: BEST[1]})])
    assert all(p is not None for p in p_values)
    mine, its = (each.loads[0].static["off"].p_holm for each in (found, alone))
    assert mine is not None
    assert its is not None
    assert mine == pytest.approx(2 * its)  # the third smallest of four, and the smallest of two


def test_an_arm_that_failed_leaves_it_undecided_by_name() -> None:
    found = verify([made("off", OFF), made("on", ON, each=failing), made("tuned", BEST)])
    assert found.holding.outcome == "undecided"
    assert "no ratio at C=1 (on: " in found.holding.sentence


def test_a_server_that_drafts_something_else_is_told() -> None:
    spec = {"drafts": 800.0, "draft_tokens": 2400.0, "accepted": 1200.0, "acceptance_length": 2.5}
    level = {"spec": spec | {"acceptance_rate": 0.5, "per_position": []}, "counters": {"generation_tokens": 2000.0}}
    table = Schedule(model="m", ranges=(Range(1, 64, 2),))
    found = verify(arms(level=level), schedule=table)
    assert any("tuned drafted 3.0 tokens a draft" in warning for warning in found.warnings)
    assert found.loads[0].drafting.expected == 2
    assert not any("drafted" in warning for warning in verify(arms(level=level)).warnings)


@pytest.mark.parametrize(
    ("runs", "kwargs", "words"),
    [
        ([made("off", OFF), made("tuned", BEST)], {}, "two static arms or more"),
        (arms(), {"tuned": "auto"}, "--tuned auto: no arm has this name; there are off, on, tuned"),
        (arms(how=None), {}, "off and on did not take turns with tuned"),
        ([made("off", OFF), made("on", ON, how=None), made("tuned", BEST)], {}, "on did not take turns with tuned"),
        ([made(n, OFF, rate=True) for n in ("off", "on", "tuned")], {}, "off was measured in an open loop"),
        (arms(model="other"), {}, "other"),
        ([made("off", {1: OFF[1]}), made("on", ON), made("tuned", {8: BEST[8]})], {}, "no load in common"),
        (arms(), {"schedule": Schedule(model="big", ranges=(Range(1, 8, 2),))}, "for the model big, not m"),
    ],
)
def test_what_proves_nothing_is_refused(runs: list[ArmRun], kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        verify(runs, **kwargs)


def test_a_run_without_records_is_named() -> None:
    with pytest.raises(RunError, match=r"runs/on \(on\) has no records"):
        verify([made("off", OFF), made("on", {}), made("tuned", BEST)])


def test_the_last_arm_is_the_one_to_prove() -> None:
    assert check_roles(["off", "on", "k5", "auto"], None) == "auto"
    assert check_roles(["off", "on", "k5", "auto"], "k5") == "k5"
