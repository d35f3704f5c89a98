"""The policy on an engine that is run by hand: what it finds, when it moves, and what it survives."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from breakeven.decide.observed import Observation, Step
from breakeven.decide.policy import Policy, Settings
from breakeven.decide.schedule import Level, Range, Rate, Schedule
from breakeven.decide.steptime import StepTimes
from tests.decide.engine_by_hand import ByHand, roofline, share

TABLE = Schedule(model="m", ranges=(Range(1, 8, 3), Range(9, 64, 0)))


def settled(rig: ByHand, batch: int, seconds: float = 10.0) -> int:
    """The K that a policy uses most at a load, once it had time to find it."""
    chosen = rig.run(seconds, batch)[-100:]
    return max(set(chosen), key=chosen.count)


def test_finds_the_best_k_of_each_load_knowing_nothing() -> None:
    rig = ByHand(Policy([0, 1, 3]))
    assert settled(rig, 2) == 3
    assert settled(rig, 60) == 0
    assert settled(rig, 2) == 3
    assert not rig.policy.faults


def test_a_cost_that_falls_and_rises_with_the_load_is_no_trouble() -> None:
    # As in a mixture of experts: drafts cost most where few run, pay at middle loads, and cost again at high ones.
    def steps(batch: int, k: int) -> float:
        return 20 * (1 + (1.2 * k if batch < 4 or batch > 40 else 0.05 * k))

    rig = ByHand(Policy([0, 3]), steps)
    assert [settled(rig, batch, 20) for batch in (2, 16, 100, 16, 2)] == [0, 3, 0, 3, 0]


def test_forgets_prompts_that_are_gone() -> None:
    rig = ByHand(Policy([0, 3]))
    assert settled(rig, 8) == 3
    rig.chances = [0.1, 0.1, 0.1]
    assert settled(rig, 8, 30) == 0
    rig.chances = [0.9, 0.9, 0.9]
    assert settled(rig, 8, 120) == 3, "a time without drafts must not starve it of knowledge"


def test_what_slows_one_load_is_not_held_against_another() -> None:
    times, rng = StepTimes((0, 3)), random.Random(1)
    for i in range(800):
        times.learn(i / 10, 64 if i % 20 < 10 else 1, 0, 0.02 * math.exp(rng.gauss(0, 0.05)))
    for i in range(100):
        times.learn(80 + i / 10, 64, 0, 0.03 * math.exp(rng.gauss(0, 0.05)))
    assert times.expected_s(64, 0) > 0.025
    times.learn(90, 1, 0, 0.02)
    assert times.expected_s(1, 0) == pytest.approx(0.02, rel=0.05)


def test_a_mood_is_kept_from_one_start_to_the_next() -> None:
    times, rng = StepTimes((0, 3)), random.Random(1)
    for i in range(500):
        times.learn(i / 10, 64, 0, (0.02 if i < 400 else 0.03) * math.exp(rng.gauss(0, 0.05)))
    again = StepTimes((0, 3), 50.0)
    again.restore(times.state())
    again.learn(50.0, 64, 0, 0.03)
    assert again.expected_s(64, 0) == pytest.approx(times.expected_s(64, 0), rel=0.05)


def test_works_little_between_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, worked = Policy([0, 3]), 0

    def choose(seen: Observation) -> int:
        nonlocal worked
        worked += 1
        return own(seen)

    rig = ByHand(policy)
    rig.run(30, 4)
    own = policy._choose
    monkeypatch.setattr(policy, "_choose", choose)
    steps = len(rig.run(30, 4))
    assert 0 < worked < 0.4 * steps


def test_the_machine_that_gets_slower_for_all_changes_nothing() -> None:
    rig = ByHand(Policy([0, 3]))
    assert settled(rig, 4) == 3
    switches = rig.policy.switches
    rig.slow = lambda now_s: 1.0 + 0.5 * (int(now_s) % 20 < 10)
    rig.run(120, 4)
    assert rig.policy.switches == switches


def test_steps_that_take_ten_times_as_long_now_and_then_are_not_believed() -> None:
    rig = ByHand(Policy([0, 3]))
    rig.run(10, 4)
    rig.slow = lambda now_s: 10.0 if rig.rng.random() < 0.01 else 1.0
    assert share(rig.run(60, 4), 3) > 0.95


def test_within_the_dead_band_it_stays_where_it_is() -> None:
    # K=2 is half a percent better than K=3, which is in use.
    def steps(batch: int, k: int) -> float:
        return {0: 40.0, 2: 0.995 * 20 * 2.19 / 2.533, 3: 20.0}[k]

    schedule = Schedule(model="m", ranges=(Range(1, 64, 3),))
    rig = ByHand(Policy([0, 2, 3], schedule=schedule), steps, jitter=0.02)
    rig.run(120, 8)
    assert rig.policy.switches <= 1


def test_a_load_that_creeps_up_leaves_no_k_behind() -> None:
    """K = 0 was seen at low loads only, where it is worth half, and what is hoped of it never gets better by itself."""
    rig = ByHand(Policy([0, 5]), lambda b, k: 20 + 2 * k + 0.35 * max(0, b * (k + 1) - 60), [0.8] * 5)
    rig.run(600, lambda now_s: 3 + round(now_s / 5))
    assert share(rig.run(30, 120), 0) > 0.9


def test_slow_steps_are_no_reason_to_be_hasty() -> None:
    """Of an engine of half a second a step it sees few; it doesn't go back and forth between K that it never saw."""
    rig = ByHand(Policy([0, 1, 3]), lambda b, k: 15 * roofline(b, k), jitter=0.15)
    rig.run(400, lambda now_s: (1, 4, 16, 32, 8, 2)[int(now_s / 20) % 6])
    assert rig.policy.switches < 30  # 47 of a policy whose patience was seconds alone


def test_dwells() -> None:
    moments: list[float] = []
    policy = Policy([0, 3], settings=Settings(dwell_s=2.0))
    rig, before = ByHand(policy), policy.k

    def batch(now_s: float) -> int:
        nonlocal before
        if policy.k != before:
            moments.append(now_s)
            before = policy.k
        return 64 if int(now_s / 0.4) % 2 else 1

    rig.run(60, batch)
    assert len(moments) > 2
    assert min(b - a for a, b in pairwise(moments)) >= 2.0 - 0.2


def test_a_large_gain_is_taken_within_half_a_second() -> None:
    policy = Policy([0, 3])
    rig = ByHand(policy)
    for batch in (2, 60, 2, 60):
        rig.run(15, batch)
    chosen = rig.run(0.8, 2)
    assert share(chosen[-10:], 3) > 0.8


def test_a_switch_that_is_dear_is_made_when_waiting_has_cost_as_much() -> None:
    def switches(price_ms: float) -> int:
        before = 0

        def steps(batch: int, k: int) -> float:
            nonlocal before
            extra, before = price_ms * (k != before), k
            return roofline(batch, k) + extra

        policy = Policy([0, 3])
        rig = ByHand(policy, steps)
        rig.run(120, lambda now_s: 4 if int(now_s) % 2 else 24)
        return policy.switches

    assert switches(0) > 60
    assert switches(800) < switches(0) / 3


@pytest.mark.parametrize("batch", [4, 60])
def test_probes_are_spread_and_stay_within_their_budget(batch: int) -> None:
    policy = Policy([0, 1, 2, 3])
    rig = ByHand(policy)
    rig.run(20, batch)
    spent_before = policy.probe_share * 20
    chosen = rig.run(300, batch)
    best = max(set(chosen), key=chosen.count)
    lost = sum(1 - rate(batch, k) / rate(batch, best) for k in chosen if k != best) / len(chosen)
    assert 0 <= lost < 0.01
    assert (policy.probe_share * 320 - spent_before) / 300 < 0.01
    runs = "".join(str(int(k != best)) for k in chosen).split("0")
    assert max(map(len, runs)) <= 20, "a probe is a few steps"


def rate(batch: int, k: int) -> float:
    return batch * sum(0.7**i for i in range(k + 1)) / roofline(batch, k)


def test_no_probes_while_the_latency_that_was_promised_is_at_risk() -> None:
    # A token takes 26 ms / 2.5 = 10 ms.
    at_risk = Policy([0, 3], settings=Settings(objective_ms=10.5), schedule=TABLE)
    ByHand(at_risk).run(60, 4)
    assert at_risk.probe_steps <= 10, "only while nothing is known"
    safe = Policy([0, 3], settings=Settings(objective_ms=100.0), schedule=TABLE)
    ByHand(safe).run(60, 4)
    assert safe.probe_steps > at_risk.probe_steps
    queue = Policy([0, 3], settings=Settings(objective_ms=100.0), schedule=TABLE)
    rig = ByHand(queue)
    rig.waiting = 3
    rig.run(60, 4)
    assert queue.probe_steps == 0


def test_a_drafter_that_a_pause_leaves_behind_comes_back_all_the_same() -> None:
    # While K is 0 three in four drafts fail at once; after a return that fades within some seconds.
    stale = 0.0

    class Stale(ByHand):
        def accepted(self, batch: int, k: int) -> tuple[int, ...]:
            nonlocal stale
            step_s = self.steps(batch, k) / 1e3
            stale = stale * math.exp(-step_s / 3) if k else 1 - (1 - stale) * math.exp(-step_s)
            return super().accepted(round(batch * (1 - 0.6 * stale)), k)

    policy = Policy([0, 3])
    rig = Stale(policy)
    for _ in range(3):
        rig.run(40, 60)
        chosen = rig.run(40, 6)
    assert share(chosen[-400:], 3) > 0.9


def test_what_k_0_really_costs_is_measured() -> None:
    # A drafter that goes on working while it is off: a step of K=0 takes as long as one of K=1.
    rig = ByHand(Policy([0, 1], schedule=TABLE), lambda batch, k: 20.0, chances=[0.05])
    assert settled(rig, 30, 60) == 1


def test_begins_with_what_the_table_says_and_what_was_measured_for_it() -> None:
    assert ByHand(Policy([0, 3], schedule=TABLE)).run(0.1, 4) == [3] * len(ByHand(Policy([3])).run(0.1, 4))
    rates = {k: Rate(rate(60, k) * 1e3) for k in (0, 3)}
    wrong = Schedule(model="m", ranges=(Range(1, 64, 3),), levels=(Level(60.0, 60.0, 3, rates),))
    told, untold = ByHand(Policy([0, 3], schedule=wrong)), ByHand(Policy([0, 3], schedule=TABLE))
    estimates = {each.k: each for each in told.policy.estimates(60)}
    assert estimates[0].tokens_per_s == pytest.approx(rates[0].value, rel=0.15)
    assert estimates[0].doubt < {each.k: each for each in untold.policy.estimates(60)}[0].doubt
    assert settled(told, 60, 3) == 0


def test_unknown_territory_takes_the_nearest_known_for_a_guess() -> None:
    rig = ByHand(Policy([0, 3]))
    rig.run(30, 40)
    far, near = ({e.k: e for e in rig.policy.estimates(batch)} for batch in (2, 36))
    assert near[3].doubt < far[3].doubt
    assert near[0].tokens_per_s / near[3].tokens_per_s == pytest.approx(rate(36, 0) / rate(36, 3), rel=0.1)


@pytest.mark.parametrize("mode", [0, 3])
def test_a_fixed_k_is_that_k(mode: int) -> None:
    policy = Policy([0, 3], mode=mode)
    rig = ByHand(policy)
    assert set(rig.run(5, lambda now_s: 1 if now_s < 2 else 60)) == {mode}
    assert policy.k == mode


def test_a_table_is_obeyed() -> None:
    policy = Policy([0, 3], mode="table", schedule=TABLE)
    rig = ByHand(policy)
    assert set(rig.run(2, 8)) == {3}
    assert set(rig.run(2, 9)) == {0}
    assert policy.fallback_steps == 0
    with pytest.raises(ValueError, match="needs a schedule"):
        Policy([0, 3], mode="table")


def test_a_table_s_k_that_the_engine_may_not_be_told_becomes_the_next_smaller_one() -> None:
    schedule = Schedule(model="m", ranges=(Range(1, 8, 5), Range(9, 64, 0)))
    policy = Policy([1, 3], mode="table", schedule=schedule)
    assert [ByHand(policy).run(0.05, batch)[-1] for batch in (8, 20)] == [3, 1]


@pytest.mark.parametrize(("ks", "mode"), [([], "auto"), ([-1, 3], "auto"), ([0, 3], 2)])
def test_k_that_can_not_be_are_refused(ks: list[int], mode: Any) -> None:
    with pytest.raises(ValueError, match="K"):
        Policy(ks, mode=mode)


def test_a_state_is_small_json_and_goes_on_where_it_was() -> None:
    rig = ByHand(Policy([0, 1, 3]))
    for batch in (2, 60, 8):
        rig.run(20, batch)
    text = json.dumps(rig.policy.state())
    assert len(text) < 10_000
    again = Policy([0, 1, 3])
    again.restore(json.loads(text))
    assert again.k == rig.policy.k
    assert again.state() == rig.policy.state()
    for batch in (2, 60):
        for mine, other in zip(again.estimates(batch), rig.policy.estimates(batch), strict=True):
            assert mine.tokens_per_s == pytest.approx(other.tokens_per_s, rel=1e-6)
    continued = ByHand(again)
    assert share(continued.run(5, 60)[50:], 0) > 0.9, "nothing is learned anew"


def test_a_state_of_a_policy_that_had_run_for_days_is_not_aged_by_them() -> None:
    rig = ByHand(Policy([0, 3]))
    rig.policy.choose(Observation(0, 4, 0, 0.2, None))
    for hour in range(1, 60):  # a clock may go on by a day at most
        rig.policy.choose(Observation(hour * 3600 * 10**9, 4, 0, 0.2, None))
    rig.now_ns = 60 * 3600 * 10**9
    rig.run(20, 4)
    state = rig.policy.state()
    again = Policy([0, 3])
    again.restore(json.loads(json.dumps(state)))
    ByHand(again).run(0.1, 4)
    weights = {(k, knot): weight for k, knot, _, weight, _ in again.state()["belief"]["times"]["cells"]}
    for k, knot, _, weight, _ in state["belief"]["times"]["cells"]:
        assert weights[k, knot] >= 0.99 * weight


def test_a_state_that_was_taken_stays_as_it_was_while_the_policy_goes_on() -> None:
    rig = ByHand(Policy([0, 3]))
    rig.run(5, 4)
    state = rig.policy.state()
    text = json.dumps(state)
    rig.run(20, 60)
    assert json.dumps(state) == text


def test_a_fixed_k_is_kept_whatever_the_engine_says() -> None:
    policy = Policy([0, 3], mode=3)
    seen = Observation(0, None, 0, 0.2, None)  # type: ignore[arg-type]
    assert policy.choose(seen) == 3
    assert policy.faults["decoding"] == 1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda state: state | {"schema": "other"},
        lambda state: state | {"ks": [0, 2]},
        lambda state: state | {"k": 7},
        lambda state: {k: v for k, v in state.items() if k != "belief"},
        lambda state: state | {"belief": state["belief"] | {"yields": {"p": [2.0] * 3, "weight": [1], "at_s": [0]}}},
        lambda state: state | {"now_s": "noon"},
        lambda state: [],
    ],
)
def test_a_state_that_is_none_is_refused_and_nothing_of_it_stays(spoil: Callable[[Any], Any]) -> None:
    rig = ByHand(Policy([0, 1, 3]))
    rig.run(5, 4)
    fresh = Policy([0, 1, 3])
    before = fresh.state()
    with pytest.raises(ValueError, match="no state"):
        fresh.restore(spoil(rig.policy.state()))
    assert fresh.state() == before


def _last(seen: Observation, **fields: Any) -> Observation:
    return seen if seen.last is None else seen._replace(last=seen.last._replace(**fields))


NAN = float("nan")
FAULTS: dict[str, tuple[str, Callable[[Observation], Observation]]] = {
    "now NaN": ("clock", lambda seen: seen._replace(now_ns=NAN)),  # type: ignore[arg-type]
    "now backwards": ("clock", lambda seen: seen._replace(now_ns=10**12 - seen.now_ns)),
    "now a text": ("exception", lambda seen: seen._replace(now_ns="noon")),  # type: ignore[arg-type]
    "decoding none": ("decoding", lambda seen: seen._replace(decoding=None)),  # type: ignore[arg-type]
    "decoding below zero": ("decoding", lambda seen: seen._replace(decoding=-4)),
    "step time NaN": ("step_time", lambda seen: _last(seen, step_ns=NAN)),
    "step time below zero": ("step_time", lambda seen: _last(seen, step_ns=-5)),
    "step time of an hour": ("step_time", lambda seen: _last(seen, step_ns=3600 * 10**9)),
    "step time missing": ("exception", lambda seen: _last(seen, step_ns=None)),
    "K unknown": ("k", lambda seen: _last(seen, k=17)),
    "K missing": ("k", lambda seen: _last(seen, k=None)),
    "batch of a half": ("decoding", lambda seen: _last(seen, decoding=2.5)),
    "more accepted than drafted": ("accepted", lambda seen: _last(seen, k=3, accepted=(999, 1, 1))),
    "accepted after a rejection": ("accepted", lambda seen: _last(seen, k=3, accepted=(1, 2, 1))),
    "accepted NaN": ("accepted", lambda seen: _last(seen, k=3, accepted=(NAN, NAN, NAN))),
    "accepted beyond K": ("accepted", lambda seen: _last(seen, k=0, accepted=(1, 1, 1))),
    "accepted missing": ("exception", lambda seen: _last(seen, accepted=None)),
    "prompts NaN": ("prefill_tokens", lambda seen: _last(seen, prefill_tokens=NAN)),
    "no observation": ("exception", lambda seen: None),  # type: ignore[arg-type, return-value]
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_signal_that_can_not_be_is_counted_and_answered_by_the_table(name: str) -> None:
    kind, spoil = FAULTS[name]
    policy = Policy([0, 3], schedule=TABLE)
    rig = ByHand(policy, spoil=spoil)
    chosen = rig.run(6, 4)
    assert policy.faults[kind] > 50
    if kind != "clock":
        assert set(chosen[-50:]) == {3}, "the table's K, whatever was believed"
    rig.spoil = lambda seen: seen
    rig.run(11, 30)  # what an exception costs is over
    policy.faults.clear()
    rig.run(60, 60)
    assert share(rig.run(20, 60), 0) > 0.9, "it works again once the signals do"
    assert policy.faults.total() <= 1  # the clock that was mended jumps once


@pytest.mark.parametrize("name", FAULTS)
def test_signals_that_fail_now_and_then_change_nothing(name: str) -> None:
    kind, spoil = FAULTS[name]
    policy = Policy([0, 3], schedule=TABLE)
    count = 0

    def sometimes(seen: Observation) -> Observation:
        nonlocal count
        count += 1
        return spoil(seen) if count % 70 == 0 else seen

    rig = ByHand(policy, spoil=sometimes)
    rig.run(30, 60)
    assert policy.faults[kind] >= 1
    if kind != "exception":
        assert share(rig.run(30, 60), 0) > 0.9


def test_one_bad_signal_loses_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, learned, count = Policy([0, 3]), 0, 0

    def spoil(seen: Observation) -> Observation:
        nonlocal count
        count += 1
        return seen if count % 5 else seen._replace(decoding=None)  # type: ignore[arg-type]

    rig = ByHand(policy, spoil=spoil)
    rig.run(10, 60)
    own = policy._belief.learn

    def learn(now_s: float, step: Step) -> None:
        nonlocal learned
        learned += 1
        own(now_s, step)

    monkeypatch.setattr(policy._belief, "learn", learn)
    assert learned == 0
    assert len(rig.run(10, 60)) - learned < 5


def test_signals_that_stop_leave_the_table_in_charge() -> None:
    policy = Policy([0, 3], schedule=TABLE)
    rig = ByHand(policy)
    rig.chances = [0.0, 0.0, 0.0]
    assert settled(rig, 4, 30) == 0
    rig.spoil = lambda seen: seen._replace(last=None)
    rig.run(5, 4)
    assert set(rig.run(5, 4)) == {3}
    assert policy.fallback_steps > 0
    rig.spoil = lambda seen: seen
    assert settled(rig, 4, 5) == 0, "what was known is known still"


def test_whatever_raises_inside_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy([0, 3], schedule=TABLE)
    rig = ByHand(policy)
    rig.run(10, 60)
    monkeypatch.setattr(policy, "_decide", lambda seen, elapsed_s: 1 / 0)
    assert set(rig.run(2, 60)) == {0}
    assert policy.faults["exception"] >= 1
    monkeypatch.undo()
    rig.run(12, 60)
    assert policy.fallback_steps > 0
    assert settled(rig, 60) == 0


def test_steps_that_read_prompts_teach_what_prompts_cost_and_no_more() -> None:
    # Every other step reads a prompt, which takes as long as the step.
    class Reading(ByHand):
        def run(self, seconds: float, batch: Any) -> list[int]:
            plain = self.steps
            reads = False

            def steps(b: int, k: int) -> float:
                nonlocal reads
                reads = not reads
                return plain(b, k) + (30.0 if reads else 0.0)

            def mark(seen: Observation) -> Observation:
                return _last(seen, prefill_tokens=300 if reads else 0)

            self.steps, self.spoil = steps, mark
            return super().run(seconds, batch)

    rig = Reading(Policy([0, 3]))
    rig.run(20, 4)
    estimates = {each.k: each.tokens_per_s for each in rig.policy.estimates(4)}
    assert estimates[3] == pytest.approx(1e3 * rate(4, 3), rel=0.1)


def test_a_step_is_learned_from_once() -> None:
    policy = Policy([0, 3])
    step = Step(0, 20_000_000, 4, 0, 0, (), 0)
    for i in range(5):
        policy.choose(Observation(i * 20_000_000, 4, 0, 0.1, step))
    cells = policy.state()["belief"]["times"]["cells"]
    assert cells == []  # the first step of a K may have been a switch; the other four were the same one
