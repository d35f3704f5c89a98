"""What a search sees of the turns that were taken, and what it makes of its answer."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from breakeven.finding import Finding
from breakeven.options import FindOptions
from breakeven.records import LevelPlan

LEVEL = LevelPlan(index=0, run=0, concurrency=1, max_tokens=16)


def search(
    find: FindOptions, rates: dict[str, Callable[[float], float]], *, noise: float = 0.01, turn_s: float = 0.0
) -> tuple[dict[str, list[Any]], list[str]]:
    """Takes the turns that a search asks for; a token takes a thousandth of a second times C over the rate.

    Returns:
        By arm the summaries of its turns, and what was said.
    """
    rng = np.random.default_rng(2)
    summaries: dict[str, list[Any]] = {name: [] for name in rates}
    said: list[str] = []
    finding = Finding(find, LEVEL, summaries, lambda: turn_s * len(summaries["off"]), said.append)
    for level in finding.levels(lambda level: None):
        for name, rate in rates.items():
            found = rate(level.concurrency) * float(np.exp(noise * rng.standard_normal()))
            tpot_ms = 1000 * level.concurrency / found
            summaries[name].append(
                SimpleNamespace(plan=level, load=level.load, rate=found, tpot_ms=SimpleNamespace(p50=tpot_ms))
            )
    return summaries, said


def loads(summaries: dict[str, list[Any]]) -> set[int]:
    return {summary.load["concurrency"] for summary in summaries["off"]}


OFF: Callable[[float], float] = lambda load: 1000 * load / (4 + load)  # noqa: E731
ON: Callable[[float], float] = lambda load: 2000 * load / (2 + 4 * load)  # noqa: E731


def test_turns_are_numbered_by_load_and_levels_in_their_order() -> None:
    summaries, said = search(FindOptions(what="break-even", between=(1, 32)), {"off": OFF, "on": ON})
    plans = [summary.plan for summary in summaries["off"]]
    assert [plan.index for plan in plans] == list(range(len(plans)))
    for load in loads(summaries):
        assert [plan.run for plan in plans if plan.concurrency == load] == list(
            range(sum(plan.concurrency == load for plan in plans))
        )
    assert {2, 3, 4} & loads(summaries)  # the break-even is at 3
    assert said[-1] == "search over: the interval is as narrow as asked for"


def test_of_several_arms_each_break_even_is_looked_for() -> None:
    late: Callable[[float], float] = lambda load: 1000 * load / (2 + 1.2 * load)  # noqa: E731
    summaries, said = search(
        FindOptions(what="break-even", between=(1, 64), precision=0.2), {"off": OFF, "on": ON, "late": late}
    )
    assert said[-1].startswith("search over")
    assert any(8 <= load <= 12 for load in loads(summaries))  # 4 + C = 2 + 1.2 C at 10
    assert {2, 3, 4} & loads(summaries)


def test_limits_are_looked_for_in_each_arm() -> None:
    find = FindOptions(what="slo", between=(1, 64), precision=0.1, slo="tpot_p50:9")
    summaries, said = search(find, {"off": OFF, "on": ON})
    assert said[-1] == "search over: the interval is as narrow as asked for"
    assert {4, 5, 6} & loads(summaries)  # 4 + C <= 9, and (2 + 4 C) / 2 <= 9
    assert max(loads(summaries)) <= 16


def test_the_knee_of_each_arm_is_looked_for() -> None:
    summaries, said = search(FindOptions(what="knee", between=(1, 8), precision=0.2), {"off": OFF, "on": ON})
    assert said[-1].startswith("search over")
    assert max(loads(summaries)) == 8


def test_time_that_is_up_ends_it() -> None:
    find = FindOptions(what="break-even", between=(1, 64), precision=0.001, max_seconds=20.0)
    summaries, said = search(find, {"off": OFF, "on": ON}, noise=0.05, turn_s=1.0)
    assert said[-1] == "search ended: time is up"
    assert len(summaries["off"]) <= 22


@pytest.mark.parametrize(
    ("find", "words"),
    [
        (FindOptions(what="knee"), "each arm's knee between C=1 and C=256, within 10 %"),
        (
            FindOptions(what="break-even", between=(2, 64), precision=0.05, max_seconds=5400),
            "the break-even between C=2 and C=64, within 5 %, for 1 h 30 min at most",
        ),
    ],
)
def test_what_is_looked_for_in_words(find: FindOptions, words: str) -> None:
    assert Finding(find, LEVEL, {}, lambda: 0.0, print).describe() == words
