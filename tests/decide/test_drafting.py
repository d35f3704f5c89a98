"""Whether an arm drafted what its schedule says, by counters made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from breakeven.decide.drafting import Drafting, drafting, drafting_caveats
from breakeven.decide.schedule import Range, Schedule
from breakeven.decide.turns import turns_of
from breakeven.records import EngineSample
from tests.decide.arms import made

#: K=3 up to 4 requests, none beyond.
TABLE = Schedule(model="m", method="eagle3", ranges=(Range(1, 4, 3), Range(5, 64, 0)))
SPARING = Schedule(model="m", method="ngram", ranges=TABLE.ranges)


def spec(steps: int, drafts: int, k: int, accepted: int) -> dict[str, Any]:
    """Counters of a window in which so many of all steps verified a draft of k tokens."""
    numbers: dict[str, Any] = {"drafts": drafts, "draft_tokens": drafts * k, "accepted": accepted}
    told = {"spec": {"acceptance_length": 1 + accepted / drafts, "acceptance_rate": 0.5, "per_position": [], **numbers}}
    return told | {"counters": {"generation_tokens": float(steps + accepted)}}


def looked_at(running: Sequence[float], schedule: Schedule | None, **level: Any) -> Drafting:
    samples = [EngineSample(time_ns=i, running=batch) for i, batch in enumerate(running)]
    arm = made("tuned", {8: [20.0, 20.1]}, level={"samples": samples, **level})
    return drafting(turns_of(arm.run, 512), schedule)[8]


def test_tokens_a_draft_and_a_step_come_from_the_counters() -> None:
    found = looked_at([4.0], None, **spec(steps=1000, drafts=500, k=3, accepted=700))
    assert (found.per_draft, found.per_step) == pytest.approx((3.0, 1.5))
    assert (found.expected, found.agrees) == (None, None)


def test_what_should_be_drafted_is_averaged_over_the_batches_that_ran() -> None:
    found = looked_at([2.0, 6.0], TABLE, **spec(steps=800, drafts=200, k=3, accepted=300))
    assert found.expected == pytest.approx(3 * 2 / 8)  # the batch of six makes three times as many steps
    assert (found.k_low, found.k_high, found.running) == (0, 3, 4.0)
    assert found.agrees


@pytest.mark.parametrize(
    ("running", "schedule", "counted", "agrees"),
    [
        (4, TABLE, spec(1000, 1000, 3, 900), True),
        (4, TABLE, spec(1000, 1000, 2, 900), False),
        (4, TABLE, spec(1000, 1000, 5, 900), False),
        (4, TABLE, spec(1000, 300, 3, 200), False),  # most steps drafted nothing
        (4, SPARING, spec(1000, 300, 2, 200), True),  # n-gram finds what it finds
        (4, SPARING, spec(1000, 300, 4, 200), False),
        (8, TABLE, spec(1000, 1000, 3, 900), False),
        (8, TABLE, spec(1000, 10, 3, 9), True),  # a batch that was small for a moment
    ],
)
def test_another_k_than_the_schedules_is_seen(
    running: float, schedule: Schedule, counted: dict[str, Any], *, agrees: bool
) -> None:
    assert looked_at([running], schedule, **counted).agrees is agrees


def test_drafting_nothing_at_one_load_is_known_from_the_others() -> None:
    few = [EngineSample(time_ns=0, running=2.0)]
    many = [EngineSample(time_ns=0, running=8.0)]
    drafts, plain = (made("tuned", {8: [20.0]}, level=level) for level in (spec(100, 100, 3, 90), {}))
    turns = {2.0: turns_of(drafts.run, 512)[8], 8.0: turns_of(plain.run, 512)[8]}
    turns[2.0][0].level.samples, turns[8.0][0].level.samples = few, many
    found = drafting(turns, TABLE)
    assert found[8.0].per_draft == 0
    assert found[8.0].agrees
    turns[8.0][0].level.samples = few  # where three tokens should have been drafted
    assert drafting(turns, TABLE)[8.0].agrees is False


def test_a_load_where_it_went_wrong_is_told_by_name() -> None:
    (line,) = drafting_caveats("auto", {"C=8": looked_at([8.0], TABLE, **spec(1000, 1000, 3, 900))})
    assert line.startswith("C=8: auto drafted 3.0 tokens a draft with 8.0 requests running; its schedule says 0")
    assert not drafting_caveats("auto", {"C=4": looked_at([4.0], TABLE, **spec(1000, 1000, 3, 900))})


def test_without_counters_nothing_is_claimed() -> None:
    found = looked_at([4.0], TABLE)
    assert found.agrees is None
    assert drafting_caveats("auto", {"C=8": found}) == [
        "the engine of auto counts no drafts: that it followed the schedule is not shown"
    ]


def test_without_gauges_the_clients_count_stands_in() -> None:
    found = looked_at([], TABLE, **spec(1000, 1000, 3, 900))
    assert found.running == pytest.approx(1.0, abs=0.05)  # one request after the other
    assert found.k_high == 3
