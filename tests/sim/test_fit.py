"""A model fitted to a run of a known model is that model, within the noise."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from breakeven.errors import UsageError
from breakeven.runs import Run
from breakeven.sim.fit import fit
from breakeven.sim.model import Acceptance, EngineModel, Lengths, Noise, Prefill
from breakeven.sim.run import Arm, manifest_of, simulate
from breakeven.sim.steps import TableSteps
from breakeven.sim.truth import true_break_evens
from tests.sim.handy import CROSSING, PROMPTS, conditions, level

LOADS = (1, 2, 4, 8, 16, 32)
KNOWN = replace(
    CROSSING,
    prefill=Prefill(request_ms=3.0, token_ms=0.08),
    noise=Noise(sd=0.06, memory_s=1.0, jitter_sd=0.04),
    acceptance=Acceptance(default=(0.7, 0.6, 0.5), kinds={"code": (0.9, 0.85, 0.8)}, prompt_sd=0.4),
    lengths=Lengths(median_tokens=80.0, prompt_sd=0.4),
    max_batch=24,
)


def run_of(model: EngineModel, k: int, loads: tuple[int, ...] = LOADS, seconds: float = 30.0) -> Run:
    plans = [level(c, 128, index=i) for i, c in enumerate(loads)]
    levels, requests = simulate(model, plans, k, conditions(seconds))
    return Run(manifest_of(f"k{k}", Arm(model, k), plans, conditions(), {}, version="1"), requests, levels, None)


@pytest.fixture(scope="module")
def fitted() -> EngineModel:
    return fit([run_of(KNOWN, 0), run_of(KNOWN, 3)])


def test_step_times_come_back(fitted: EngineModel) -> None:
    assert isinstance(fitted.steps, TableSteps)
    assert fitted.steps.ks == [0, 3]
    for batch, k, ms in fitted.steps.points:
        assert ms == pytest.approx(KNOWN.steps.step_ms(round(batch), k), rel=0.06), (batch, k)
    assert fitted.max_batch == 24


def test_what_a_prompt_costs_comes_back(fitted: EngineModel) -> None:
    # All prompts are equally long here: what is theirs and what is their tokens' can't be told apart.
    assert fitted.prefill.request_ms + 25 * fitted.prefill.token_ms == pytest.approx(5.0, rel=0.15)


def test_acceptance_and_lengths_come_back(fitted: EngineModel) -> None:
    # A little apart from what was put in: logistic effects of mean 0 don't leave the mean probability alone.
    assert fitted.acceptance.kinds["code"] == pytest.approx((0.9, 0.85, 0.8), abs=0.04)
    assert fitted.acceptance.kinds["chat"] == pytest.approx((0.7, 0.6, 0.5), abs=0.05)
    assert fitted.acceptance.prompt_sd == pytest.approx(0.4, abs=0.15)
    assert fitted.lengths is not None
    assert fitted.lengths.median_tokens == pytest.approx(80.0, rel=0.15)
    assert fitted.lengths.prompt_sd == pytest.approx(0.4, abs=0.12)


def test_noise_comes_back(fitted: EngineModel) -> None:
    assert fitted.noise.sd == pytest.approx(0.06, rel=0.3)
    assert fitted.noise.jitter_sd == pytest.approx(0.04, rel=0.3)
    assert 0.4 < fitted.noise.memory_s < 2.5


def test_the_break_even_comes_back(fitted: EngineModel) -> None:
    (true,) = true_break_evens(KNOWN, KNOWN, PROMPTS, k=3, max_tokens=128)
    (found,) = true_break_evens(fitted, fitted, PROMPTS, k=3, max_tokens=128)
    assert found == pytest.approx(true, rel=0.1)


def test_one_request_at_a_time_tells_prefill_by_the_first_token() -> None:
    quiet = replace(KNOWN, noise=Noise(), lengths=None)
    fitted = fit([run_of(quiet, 0, loads=(1,))])
    assert fitted.prefill.request_ms + 25 * fitted.prefill.token_ms == pytest.approx(5.0, rel=0.02)
    assert fitted.step_ms(1, 0, drafter=False) == pytest.approx(21.0, rel=1e-3)
    assert fitted.lengths is None
    assert (fitted.noise.sd, fitted.max_batch) == (0.0, EngineModel().max_batch)


def test_a_fitted_model_can_be_kept(fitted: EngineModel) -> None:
    assert msgspec.json.decode(msgspec.json.encode(fitted), type=EngineModel) == fitted


def test_runs_that_say_nothing_of_steps_are_refused() -> None:
    run = run_of(KNOWN, 0, loads=(1,), seconds=5.0)
    for record in run.requests:
        record.tokens_from = "estimated"
    with pytest.raises(UsageError, match="--from"):
        fit([run])
