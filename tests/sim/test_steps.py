"""Step times: flat under the knee, as steep as they should be beyond it, and what a table says between its points."""

from __future__ import annotations

import pytest

from breakeven.sim.steps import RooflineSteps, TableSteps

TABLE = TableSteps(points=((8, 0, 30.0), (2, 0, 20.0), (4, 4, 50.0), (8, 4, 70.0)))


def test_tokens_are_free_up_to_the_knee_and_cost_beyond_it() -> None:
    steps = RooflineSteps(base_ms=20.0, token_ms=0.5, knee_tokens=16.0)
    assert steps.step_ms(4, 3) == steps.step_ms(1, 0) == 20.0
    assert steps.step_ms(8, 3) == pytest.approx(20.0 + 0.5 * 16)


def test_drafting_costs_a_pass_for_each_token() -> None:
    steps = RooflineSteps(base_ms=20.0, draft_ms=2.0, draft_request_ms=0.1)
    assert steps.step_ms(10, 3) - steps.step_ms(10, 0) == pytest.approx(3 * (2.0 + 1.0))


def test_experts_make_the_first_tokens_the_dearest() -> None:
    steps = RooflineSteps(base_ms=10.0, expert_ms=20.0, expert_share=1 / 32)
    lengths = [steps.step_ms(batch, 0) for batch in (1, 2, 3, 200, 201)]
    assert lengths[0] == pytest.approx(10.0 + 20.0 / 32)
    assert lengths[1] - lengths[0] > lengths[2] - lengths[1] > lengths[4] - lengths[3] > 0


@pytest.mark.parametrize(
    ("batch", "k", "ms"),
    [
        (2, 0, 20.0),
        (5, 0, 25.0),
        (1, 0, 20.0),
        (14, 0, 40.0),
        (6, 4, 60.0),
        (8, 1, 40.0),
        (4, 2, (20 + 10 / 3 + 50) / 2),
    ],
    ids=["at a point", "between", "level before", "beyond", "another K", "between K", "between both"],
)
def test_a_table_is_linear_between_its_points(batch: int, k: int, ms: float) -> None:
    assert TABLE.step_ms(batch, k) == pytest.approx(ms)


def test_a_table_never_falls_beyond_its_last_point() -> None:
    assert TableSteps(points=((1, 0, 30.0), (2, 0, 20.0))).step_ms(9, 0) == 20.0


def test_a_table_has_no_length_for_a_k_outside_it() -> None:
    assert TABLE.why_not(2) is None
    assert TABLE.why_not(5) == "no step times for K=5: the table has K=0, K=4"


@pytest.mark.parametrize(
    "points", [(), ((1, 0, 20.0), (1, 0, 21.0)), ((0, 0, 20.0),), ((1, 0, -1.0),), ((1, 65, 9.0),)]
)
def test_a_table_that_says_nothing_clear_is_refused(points: tuple[tuple[float, int, float], ...]) -> None:
    with pytest.raises(ValueError, match="point"):
        TableSteps(points=points)
