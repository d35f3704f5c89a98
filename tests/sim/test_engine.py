"""Steps: who takes part, how long they last, and what they give."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from breakeven.errors import UsageError
from breakeven.load.plan import PlannedRequest
from breakeven.sim.batch import Job
from breakeven.sim.engine import Engine, Observation
from breakeven.sim.machine import Machine
from breakeven.sim.model import Acceptance, EngineModel, Lengths, Noise, Prefill
from tests.sim.handy import CROSSING, FLAT, MS, PROMPTS, level


class Rig:
    """An engine that is run by hand."""

    def __init__(
        self, model: EngineModel, k: int | Callable[[Observation], int] = 0, most_k: int | None = None
    ) -> None:
        self.engine = Engine(model, Machine(model.noise, 0), k, seed=[0], most_k=most_k)
        self.now_ns = 0
        self.steps: list[float] = []

    def send(self, max_tokens: int = 64, prompt: int = 0) -> Job:
        return self.engine.submit(PlannedRequest(level(), "measured", PROMPTS.prompts[prompt], max_tokens), self.now_ns)

    def step(self) -> list[Job]:
        ends_ns = self.engine.begin(self.now_ns)
        assert ends_ns is not None
        self.steps.append((ends_ns - self.now_ns) / MS)
        self.now_ns = ends_ns
        return self.engine.finish()

    def run(self) -> list[Job]:
        ended = []
        while self.engine.running or self.engine.waiting:
            ended += self.step()
        return ended


def test_without_drafts_each_step_gives_each_request_one_token() -> None:
    rig = Rig(FLAT)
    jobs = [rig.send(10), rig.send(20)]
    assert rig.run() == jobs
    assert [[tokens for _, tokens in job.arrivals] for job in jobs] == [[1] * 10, [1] * 20]


def test_a_request_never_gets_more_than_it_wants() -> None:
    rig = Rig(replace(FLAT, acceptance=Acceptance(default=(1.0,), decay=1.0)), k=3)
    job = rig.send(11)
    rig.run()
    assert [tokens for _, tokens in job.arrivals] == [1, 4, 4, 2]


def test_an_answer_may_end_before_max_tokens() -> None:
    rig = Rig(replace(FLAT, lengths=Lengths(median_tokens=7.0)))
    jobs = [rig.send(20), rig.send(5)]
    rig.run()
    assert [(len(job.arrivals), job.answer.is_cut) for job in jobs] == [(7, False), (5, True)]


def test_prompts_with_steps_of_their_own_hold_up_those_who_decode() -> None:
    rig = Rig(replace(FLAT, prefill=Prefill(request_ms=2.0, token_ms=0.1, chunk_tokens=None)))
    first = rig.send()
    rig.step()
    rig.step()
    second = rig.send()
    rig.step()
    rig.step()
    assert rig.steps == pytest.approx([4.5, 20.0, 4.5, 20.0])
    assert [at / MS for at, _ in first.arrivals] == pytest.approx([4.5, 24.5, 49.0])
    assert [at / MS for at, _ in second.arrivals] == pytest.approx([4.5, 24.5])


def test_prompts_that_ride_along_make_steps_longer_chunk_by_chunk() -> None:
    rig = Rig(replace(FLAT, prefill=Prefill(request_ms=2.0, token_ms=0.1, chunk_tokens=10)))
    first = rig.send()
    for _ in range(3):
        rig.step()
    second = rig.send()
    for _ in range(4):
        rig.step()
    assert rig.steps == pytest.approx([3.0, 1.0, 0.5, 23.0, 21.0, 20.5, 20.0])
    assert (len(first.arrivals), len(second.arrivals)) == (5, 2)


def test_beyond_the_largest_batch_requests_wait_their_turn() -> None:
    rig = Rig(replace(FLAT, max_batch=2))
    jobs = [rig.send(5) for _ in range(3)]
    rig.step()
    assert (rig.engine.running, rig.engine.waiting) == (2, 1)
    assert rig.run() == jobs
    assert jobs[2].arrivals[0][0] == pytest.approx(80 * MS)


def test_steps_last_as_long_as_the_table_says_for_those_who_decode() -> None:
    rig = Rig(replace(CROSSING, prefill=Prefill(chunk_tokens=None)), k=3)
    for _ in range(10):
        rig.send(40)
    rig.step()
    rig.step()
    assert rig.steps[1] == pytest.approx(24 + 4 * 10)


def test_accepted_drafts_come_as_often_as_the_model_says() -> None:
    rig = Rig(replace(FLAT, acceptance=Acceptance(default=(0.8, 0.5, 0.25))), k=3)
    for _ in range(100):
        rig.send(200)
    rig.run()
    tally = rig.engine.tally()
    shares = [count / tally.drafts for count in tally.accepted]
    assert shares == pytest.approx([0.8, 0.4, 0.1], abs=0.02)
    assert tally.draft_tokens == 3 * tally.drafts
    assert tally.tokens == 100 * 200


def test_kinds_prompts_and_requests_differ_in_their_acceptance() -> None:
    acceptance = Acceptance(default=(0.3,), kinds={"code": (0.9,)}, prompt_sd=0.8)
    rig = Rig(replace(FLAT, acceptance=acceptance), k=1)
    jobs = {prompt: [rig.send(400, prompt) for _ in range(2)] for prompt in (1, 5, 2, 6, 10)}
    rig.run()
    steps = {prompt: [len(job.arrivals) for job in twins] for prompt, twins in jobs.items()}
    assert max(*steps[1], *steps[5]) < min(*steps[2], *steps[6], *steps[10])
    assert all(abs(one - other) < 30 for one, other in steps.values())
    assert max(steps[2][0], steps[6][0], steps[10][0]) - min(steps[2][0], steps[6][0], steps[10][0]) > 30


def test_who_chooses_k_sees_what_the_last_step_did() -> None:
    seen: list[Observation] = []

    def choose(observation: Observation) -> int:
        seen.append(observation)
        return (2, 0, 1)[len(seen) % 3]

    rig = Rig(replace(FLAT, max_batch=2, kv_tokens=1000, residual_ms=1.0), choose, most_k=2)
    for _ in range(3):
        rig.send(30)
    for _ in range(4):
        rig.step()
    assert rig.steps == pytest.approx([0.0, 21.0, 25.0, 30.0], abs=1e-5)
    assert [(o.decoding, o.waiting) for o in seen] == [(2, 1)] * 3
    reading, first, second = (o.last for o in seen)
    assert reading is not None
    assert (reading.decoding, reading.prefill_tokens) == (0, 50)
    assert first is not None
    assert (first.k, first.drafts, first.accepted, first.prefill_tokens) == (0, 0, (), 0)
    assert second is not None
    assert (second.k, second.drafts, len(second.accepted)) == (1, 2, 1)
    assert seen[0].kv_use == pytest.approx((2 * 25 + 2) / 1000)


def test_a_fixed_k_and_one_chosen_each_step_give_the_same() -> None:
    model = replace(FLAT, noise=Noise(jitter_sd=0.1))
    fixed, chosen = Rig(model, 3), Rig(model, lambda seen: 3, most_k=3)
    for rig in (fixed, chosen):
        for _ in range(5):
            rig.send(50)
    assert [job.arrivals for job in fixed.run()] == [job.arrivals for job in chosen.run()]


def test_a_k_that_can_not_be_is_refused() -> None:
    rig = Rig(FLAT, lambda seen: 3, most_k=2)
    rig.send()
    rig.step()
    with pytest.raises(ValueError, match="chose K=3; it may choose 0 to 2"):
        rig.step()
    with pytest.raises(UsageError, match="no step times for K=4"):
        Rig(CROSSING, 4)


def test_a_client_that_leaves_takes_its_request_along() -> None:
    rig = Rig(replace(FLAT, max_batch=1, kv_tokens=100))
    first, second = rig.send(), rig.send(3)
    rig.step()
    rig.step()
    rig.engine.begin(rig.now_ns)
    rig.engine.drop(first)
    rig.engine.finish()
    assert len(first.arrivals) == 2
    assert rig.engine.kv_use == 0
    assert rig.run() == [second]
    assert rig.engine.kv_use == 0
