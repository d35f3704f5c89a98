"""Leaving the drafter alone: a K of its own, entered when staying in step has cost what a cold return will."""

from __future__ import annotations

import math

import pytest

from breakeven.decide.comeback import Comeback
from breakeven.decide.observed import DEEP
from breakeven.decide.policy import Policy
from breakeven.decide.steptime import StepTimes
from tests.decide.engine_by_hand import ByHand, roofline, share


class Drafter(ByHand):
    """An engine that pays a `rent` of each step for a drafter that isn't left alone.

    Left alone it falls behind within a second; back at work it is whole again after some `fades_s`, and until then
    loses that share of its drafts at first.
    """

    rent, fades_s, loses = 0.08, 3.0, 0.8

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy, self._step_ms)
        self.stale = 0.0

    def _step_ms(self, batch: int, k: int) -> float:
        return roofline(batch, max(k, 0)) * (1 if k == DEEP else 1 + self.rent)

    def accepted(self, batch: int, k: int) -> tuple[int, ...]:
        step_s = self.steps(batch, k) / 1e3
        if k == DEEP:
            self.stale = 1 - (1 - self.stale) * math.exp(-step_s)
        else:
            self.stale *= math.exp(-step_s / self.fades_s)
        return super().accepted(round(batch * (1 - self.loses * self.stale)), k)


def test_a_busy_server_leaves_its_drafter_alone_and_a_calm_one_takes_it_back() -> None:
    rig = Drafter(Policy([0, 3], deep=True))
    assert rig.policy.ks == (DEEP, 0, 3)
    for _ in range(3):
        rig.run(90, 60)
        assert share(rig.run(30, 60), DEEP) > 0.9
        rig.run(30, 4)
        assert share(rig.run(30, 4), 3) > 0.95
    assert not rig.policy.faults


def test_a_load_that_soon_falls_again_is_not_worth_it() -> None:
    rig = Drafter(Policy([0, 3], deep=True))
    swinging = lambda now_s: 60 if int(now_s / 3) % 2 else 4  # noqa: E731
    rig.run(60, swinging)
    assert share(rig.run(120, swinging), DEEP) < 0.1


def test_nothing_is_gained_where_the_drafter_costs_nothing_at_0() -> None:
    rig = Drafter(Policy([0, 3], deep=True))
    rig.rent = 0.0
    rig.run(60, 60)
    assert share(rig.run(60, 60), DEEP) < 0.1


def test_is_found_where_keeping_in_step_is_worse_than_drafting() -> None:
    # At 16 requests one draft is better than none that costs as much, and to leave the drafter alone better than both.
    rig = Drafter(Policy([0, 1, 3], deep=True))
    rig.rent, rig.chances = 0.3, [0.2, 0.2, 0.2]
    assert share(rig.run(60, 16)[-500:], DEEP) > 0.9


def test_what_a_return_costs_is_measured() -> None:
    def fades(fades_s: float) -> float:
        rig = Drafter(Policy([0, 3], deep=True))
        rig.fades_s = fades_s
        for _ in range(8):
            rig.run(60, 60)
            rig.run(40, 8)
        learned = rig.policy.state()["belief"]["comeback"]["fades_s"]
        assert isinstance(learned, float)
        return learned

    assert fades(1.0) < 2.5 < 5.0 < fades(8.0)


@pytest.mark.parametrize("loses", [0.07, 0.8])
def test_what_is_left_of_a_drafter_is_measured_in_the_first_pause_and_at_each_return(loses: float) -> None:
    rig = Drafter(Policy([0, 3], deep=True))
    rig.loses = loses
    comeback = rig.policy._belief._comeback
    rig.run(60, 4)
    expected = comeback.left
    rig.run(60, 60)
    first = comeback.left
    assert abs(first - (1 - loses)) < abs(expected - (1 - loses))
    for _ in range(4):
        rig.run(30, 4)
        rig.run(30, 60)
    assert comeback.left == pytest.approx(max(0.3, 1 - loses), abs=0.1)  # no less than 0.3 is believed
    assert rig.policy.probe_share < 0.01


def test_a_drafter_that_loses_little_is_left_alone_the_sooner() -> None:
    def waits(loses: float) -> int:
        rig = Drafter(Policy([0, 3], deep=True))
        rig.loses = loses
        for _ in range(4):
            rig.run(40, 4)
            rig.run(40, 60)
        rig.run(40, 4)
        began_ns = rig.now_ns
        while rig.policy.k != DEEP:
            rig.run(0.1, 16)
        return rig.now_ns - began_ns

    assert waits(0.07) < waits(0.8) / 2


def test_the_first_drafts_after_a_return_say_what_was_left_where_no_look_did() -> None:
    comeback = Comeback(0.5)
    comeback.pause(0.0, 0.6)
    assert not comeback.asks(1.0)
    assert comeback.asks(4.0)
    comeback.resume(10.0)
    for tenths in range(150):
        acceptance = 0.54 if tenths < 10 else 0.6
        comeback.look(10.0 + tenths / 10, 16 * acceptance, 16, 0.6)
    # Half a comparison at 0.5 and one at 0.9.
    assert comeback.left == pytest.approx((0.9 * 0.5**0.5) ** (2 / 3), rel=0.02)


def test_comes_back_for_prompts_that_changed_while_it_was_away() -> None:
    rig = Drafter(Policy([0, 3], deep=True))
    rig.chances = [0.2, 0.2, 0.2]
    assert share(rig.run(60, 16)[-500:], DEEP) > 0.9
    rig.chances = [0.95, 0.95, 0.95]
    rig.run(400, 16)
    assert share(rig.run(30, 16), 3) > 0.9


def test_visits_are_paid_from_what_probes_may_cost() -> None:
    rig = Drafter(Policy([0, 3], deep=True))
    rig.run(60, 60)
    assert share(rig.run(1200, 60), DEEP) > 0.95
    assert rig.policy.probe_share < 0.01


def test_comes_back_at_once_where_drafts_are_known_to_pay() -> None:
    rig = Drafter(Policy([0, 3], deep=True))
    rig.run(30, 4)
    assert share(rig.run(60, 60)[-100:], DEEP) == 1.0
    assert share(rig.run(2, 4), 3) > 0.7


def test_goes_deep_the_sooner_the_more_that_was_worth_before() -> None:
    rig = Drafter(Policy([0, 3], deep=True))
    waited = []
    for _ in range(6):
        rig.run(30, 4)
        began_ns = rig.now_ns
        while rig.policy.k != DEEP:
            rig.run(0.1, 16)
        waited.append(rig.now_ns - began_ns)
        rig.run(60, 16)
    assert waited[-1] < 0.6 * waited[1]


def test_what_runs_no_drafter_is_never_thought_slower_than_what_does() -> None:
    times = StepTimes((DEEP, 0, 3))
    for i in range(20):
        for k, step_s in ((0, 0.020), (DEEP, 0.022)):
            times.learn(i / 10, 8, k, step_s)
    deep, off, _ = times.logs(8)
    assert deep <= off
    for i in range(20):
        times.learn(2 + i / 10, 128, 0, 0.040)
    deep, off, _ = times.logs(128)
    assert deep <= off
    assert not times.is_strange(128, DEEP), "it is as K = 0 at the worst"


def test_is_no_better_than_k_0_where_nothing_near_was_seen() -> None:
    times = StepTimes((DEEP, 0, 3))
    for i in range(20):
        for k, step_s in ((0, 0.045), (3, 0.177)):
            times.learn(i / 10, 64, k, step_s)
    deep, off, _ = times.logs(64)
    assert deep == off


def test_goes_on_from_a_state_in_which_the_drafter_was_left_alone() -> None:
    rig = Drafter(Policy([0, 3], deep=True))
    rig.run(30, 4)
    rig.run(60, 60)
    assert rig.policy.k == DEEP
    again = Policy([0, 3], deep=True)
    again.restore(rig.policy.state())
    rig.policy = again
    rig.run(5, 60)
    rig.run(2, 4)
    assert again.k == 3
    assert again.state()["belief"]["yields"]["p"][0] > 0.6, "stale drafts are no news of the prompts"


def test_a_pin_is_no_sign_of_what_being_deep_is_worth() -> None:
    rig = Drafter(Policy([0, 3], deep=True))
    rig.policy.mode = DEEP
    rig.run(30, 60)
    rig.policy.mode = 3
    rig.run(1, 60)
    assert rig.policy.state()["belief"]["comeback"]["worth"] == 1.0


def test_an_engine_that_never_drafts_can_leave_its_drafter_alone() -> None:
    rig = Drafter(Policy([0], deep=True))
    rig.run(30, 60)
    rig.policy.mode = DEEP
    assert set(rig.run(5, 60)) == {DEEP}
    assert not rig.policy.faults


def test_a_state_of_a_policy_that_went_deep_is_not_that_of_one_that_cant() -> None:
    rig = Drafter(Policy([0, 3], deep=True))
    rig.run(120, 60)
    state = rig.policy.state()
    again = Policy([0, 3], deep=True)
    again.restore(state)
    assert again.state() == state
    with pytest.raises(ValueError, match="no state"):
        Policy([0, 3]).restore(state)


@pytest.mark.parametrize("mode", [0, 3, DEEP])
def test_a_fixed_k_stays(mode: int) -> None:
    policy = Policy([0, 3], deep=True)
    policy.mode = mode
    assert set(Drafter(policy).run(5, lambda now_s: 4 if now_s < 2 else 60)) == {mode}
    assert not policy.faults


def test_needs_a_k_of_0() -> None:
    with pytest.raises(ValueError, match="deep is beside K=0"):
        Policy([1, 3], deep=True)
