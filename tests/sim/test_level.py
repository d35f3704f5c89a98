"""Levels in virtual time: the records that come of them are those of a real run, and known to the step."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from breakeven.load.window import StopRule
from breakeven.measure.level import LevelSummary, summarize_level
from breakeven.records import LevelPlan, LevelRecord, RequestRecord
from breakeven.sim.engine import Observation
from breakeven.sim.level import Conditions
from breakeven.sim.model import EngineModel, Noise, Prefill
from breakeven.sim.run import simulate
from tests.sim.handy import CROSSING, FLAT, PROMPTS, S, conditions, level


def run(model: EngineModel, plan: LevelPlan, k: int, under: Conditions) -> tuple[LevelRecord, list[RequestRecord]]:
    (record,), requests = simulate(model, [plan], k, under)
    return record, requests


def summary(model: EngineModel, plan: LevelPlan, k: int, under: Conditions) -> LevelSummary:
    return summarize_level(*run(model, plan, k, under), shared_cores=None)


@pytest.mark.parametrize("concurrency", [1, 3, 24])
def test_without_noise_drafts_or_prefill_throughput_is_requests_over_step_time(concurrency: int) -> None:
    found = summary(FLAT, level(concurrency), 0, conditions())
    # A prompt's own step takes no time here and gives a token: 64 of them in 63 steps.
    assert found.output_throughput.value == pytest.approx(concurrency / 0.02 * 64 / 63, rel=0.002)


def test_prefill_takes_its_part_of_the_time() -> None:
    slow = replace(FLAT, prefill=Prefill(request_ms=100.0, chunk_tokens=None))
    found = summary(slow, level(2), 0, conditions(120.0))
    # In the time of a request two are read, its own and the other's.
    assert found.output_throughput.value == pytest.approx(2 * 64 / (63 * 0.02 + 2 * 0.1), rel=0.01)
    assert found.ttft_ms.p50 == pytest.approx(100.0, abs=1)


def test_a_level_passes_every_check_and_is_said_in_full() -> None:
    record, requests = run(replace(CROSSING, noise=Noise(sd=0.05)), level(8), 3, conditions(60.0))
    found = summarize_level(record, requests, shared_cores=None)
    assert [check.name for check in found.checks if not check.ok] == []
    assert {check.name for check in found.checks} >= {
        "engine_in_flight",
        "drift",
        "client",
        "token_counts",
        "preemptions",
    }
    assert found.in_flight["mean"] == pytest.approx(8, abs=0.01)
    assert found.engine is not None
    assert found.engine["running"] == pytest.approx(8, abs=0.5)
    assert len(record.samples) == pytest.approx(61, abs=1)
    assert {r.phase for r in requests} == {"ramp", "measured", "drain"}
    assert {r.outcome for r in requests} == {"ok", "cancelled"}
    assert sorted(r.id for r in requests) == list(range(len(requests)))


def test_counters_agree_with_what_requests_saw() -> None:
    record, requests = run(CROSSING, level(8), 3, conditions(60.0))
    opened_ns, closed_ns = record.opened_ns, record.closed_ns
    assert opened_ns is not None
    assert closed_ns is not None
    inside = [
        (n, i)
        for r in requests
        for i, (at_ns, n) in enumerate(r.arrivals)
        if opened_ns < (r.sent_ns or 0) + at_ns <= closed_ns
    ]
    assert record.counters["generation_tokens"] == pytest.approx(sum(n for n, _ in inside), abs=40)
    assert record.spec is not None
    assert record.spec["drafts"] == pytest.approx(sum(i > 0 for _, i in inside), abs=16)
    assert record.spec["draft_tokens"] == 3 * record.spec["drafts"]
    assert record.spec["acceptance_length"] == pytest.approx(1 + sum(record.spec["per_position"]))
    assert list(record.spec["per_position"]) == pytest.approx([0.7, 0.42, 0.21], abs=0.03)


def test_without_drafts_there_is_nothing_to_say_of_speculation() -> None:
    assert run(CROSSING, level(), 0, conditions())[0].spec is None


def test_the_same_seed_gives_the_same_records_to_the_nanosecond() -> None:
    noisy = replace(CROSSING, noise=Noise(sd=0.1, jitter_sd=0.1))
    one, same, other = (msgspec.json.encode(run(noisy, level(4), 3, conditions(20.0, seed))) for seed in (3, 3, 4))
    assert one == same
    assert one != other


def test_every_arm_is_sent_the_same_prompts_in_the_same_order() -> None:
    def measured(k: int) -> list[str]:
        requests = [r for r in run(CROSSING, level(4), k, conditions())[1] if r.phase == "measured"]
        return [r.prompt for r in sorted(requests, key=lambda r: (r.sent_ns, r.id))]

    off, on = measured(0), measured(3)
    assert set(off[:12]) == {f"p{i}" for i in range(12)}
    assert set(on[:12]) == set(off[:12])


def test_an_open_loop_sends_what_is_due_and_no_more() -> None:
    plan = LevelPlan(index=0, run=0, max_tokens=32, mode="open", rate=5.0, arrivals="poisson")
    record, requests = run(CROSSING, plan, 3, conditions(100.0))
    found = summarize_level(record, requests, shared_cores=None)
    assert record.ended_by == "duration"
    assert found.output_throughput.value == pytest.approx(5.0 * 32, rel=0.15)
    assert all(r.sent_ns is not None and r.sent_ns >= r.due_ns for r in requests)


def test_a_level_may_end_when_it_is_precise() -> None:
    stop = StopRule(precise=True, max_seconds=240.0)
    record, _ = run(CROSSING, level(4), 3, Conditions(PROMPTS, stop, precision=0.05))
    assert record.ended_by == "precision"
    assert record.opened_ns is not None
    assert record.closed_ns is not None
    assert record.closed_ns - record.opened_ns == pytest.approx(45 * S, rel=1e-6)


def test_what_a_policy_raises_comes_out_as_it_is() -> None:
    def faulty(seen: Observation) -> int:
        if seen.now_ns > 3 * S:
            raise ZeroDivisionError("a policy's fault")
        return 1

    with pytest.raises(ZeroDivisionError, match="a policy's fault"):
        simulate(CROSSING, [level(4)], faulty, conditions(), most_k=3)
