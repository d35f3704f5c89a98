"""The worked-out truth is what long simulations find."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from breakeven.errors import UsageError
from breakeven.measure.level import summarize_level
from breakeven.sim.model import Acceptance, EngineModel, Lengths, Noise, Prefill
from breakeven.sim.run import simulate
from breakeven.sim.steps import RooflineSteps, TableSteps
from breakeven.sim.truth import true_acceptance_length, true_break_evens, true_throughput
from tests.sim.handy import CROSSING, FLAT, PROMPTS, conditions, level

VARIED = replace(
    CROSSING,
    acceptance=Acceptance(default=(0.7, 0.6, 0.5), kinds={"code": (0.9,)}, prompt_sd=0.4, request_sd=0.3),
    lengths=Lengths(median_tokens=60.0, prompt_sd=0.4, request_sd=0.2),
)
ALONE = replace(VARIED, prefill=Prefill(request_ms=5.0, token_ms=0.1, chunk_tokens=None))
CHUNKED = replace(VARIED, prefill=Prefill(request_ms=5.0, token_ms=0.1, chunk_tokens=10))


def found(model: EngineModel, concurrency: int, k: int, seconds: float) -> tuple[float, float]:
    """Throughput and acceptance length of a long level."""
    (record,), requests = simulate(model, [level(concurrency)], k, conditions(seconds))
    numbers = summarize_level(record, requests, shared_cores=None)
    return numbers.output_throughput.value, (numbers.spec or {"acceptance_length": 1.0})["acceptance_length"]


@pytest.mark.parametrize(
    ("model", "concurrency", "k", "seconds"),
    [
        (VARIED, 1, 3, 300.0),
        (VARIED, 12, 0, 60.0),
        (VARIED, 12, 3, 100.0),
        (ALONE, 5, 3, 150.0),
        (CHUNKED, 5, 3, 150.0),
        (replace(VARIED, max_batch=6), 12, 3, 120.0),
    ],
    ids=["one", "off", "on", "prompts alone", "small chunks", "queue"],
)
def test_throughput_is_that_of_a_long_run(model: EngineModel, concurrency: int, k: int, seconds: float) -> None:
    throughput, acceptance_length = found(model, concurrency, k, seconds)
    truth = true_throughput(model, PROMPTS, concurrency=concurrency, k=k, max_tokens=64)
    assert throughput == pytest.approx(truth, rel=0.025)
    assert acceptance_length == pytest.approx(true_acceptance_length(model, PROMPTS, k=k, max_tokens=64), rel=0.025)


def test_noise_leaves_the_truth_alone() -> None:
    noisy = replace(FLAT, noise=Noise(sd=0.4, memory_s=0.3, jitter_sd=0.3))
    throughput, _ = found(noisy, 2, 0, 300.0)
    assert throughput == pytest.approx(true_throughput(noisy, PROMPTS, concurrency=2, k=0, max_tokens=64), rel=0.05)


def test_where_no_step_is_shared_it_is_exact() -> None:
    alone = replace(FLAT, prefill=Prefill(request_ms=7.0, chunk_tokens=None))
    truth = true_throughput(alone, PROMPTS, concurrency=4, k=0, max_tokens=64)
    assert truth == pytest.approx(64 / (63 / 4 * 0.02 + 0.007), rel=1e-12)
    assert true_throughput(alone, PROMPTS, concurrency=4, k=0, max_tokens=1) == pytest.approx(1 / 0.007)


def test_speculation_pays_at_low_load_and_costs_at_high() -> None:
    (load,) = true_break_evens(CROSSING, CROSSING, PROMPTS, k=3, max_tokens=64)
    assert 2 < load < 64

    def ratio(c: int) -> float:
        on, off = (true_throughput(CROSSING, PROMPTS, concurrency=c, k=k, max_tokens=64) for k in (3, 0))
        return on / off

    assert ratio(1) > 1.2
    assert ratio(int(load)) > 1 > ratio(int(load) + 1)
    assert ratio(64) < 0.8


def test_experts_give_two_break_evens() -> None:
    steps = RooflineSteps(
        base_ms=4.0, expert_ms=40.0, expert_share=1 / 24, token_ms=0.35, knee_tokens=100.0, draft_ms=2.0
    )
    model = EngineModel(steps=steps, acceptance=Acceptance(default=(0.65,), decay=1.0), max_batch=512)
    first, second = true_break_evens(model, model, PROMPTS, k=3, max_tokens=256)
    assert 1 < first < 20 < second < 300


def test_there_may_be_no_break_even() -> None:
    free = replace(FLAT, acceptance=Acceptance(default=(1.0,), decay=1.0))
    assert true_break_evens(free, free, PROMPTS, k=3, max_tokens=64, most=64) == []


def test_a_loaded_drafter_slows_k_0_down() -> None:
    loaded = replace(FLAT, residual_ms=5.0)
    plain, idle = (
        true_throughput(loaded, PROMPTS, concurrency=2, k=0, max_tokens=64, drafter=drafter)
        for drafter in (False, True)
    )
    assert plain / idle == pytest.approx(25 / 20, rel=0.01)


def test_there_is_no_truth_without_step_times() -> None:
    table = EngineModel(steps=TableSteps(points=((1, 0, 20.0),)))
    with pytest.raises(UsageError, match="no step times for K=3"):
        true_throughput(table, PROMPTS, concurrency=1, k=3, max_tokens=64)
