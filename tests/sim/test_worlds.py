"""Worlds drawn at random, lives in them, and the most that anybody could make of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest

from breakeven.decide.observed import DEEP, Observation
from breakeven.decide.policy import Policy
from breakeven.sim.clairvoyant import best_tokens, static_tokens
from breakeven.sim.model import EngineModel, Noise
from breakeven.sim.steps import TableSteps
from breakeven.sim.stepwise import live
from breakeven.sim.worlds import TICK_S, Switching, World, random_world

#: One request: 20 ms without drafts. Eight: 30 ms; three drafts take 10 and 60 ms more.
STEPS = TableSteps(points=((1, 0, 20.0), (8, 0, 30.0), (1, 3, 30.0), (8, 3, 90.0)))


def world(batches: list[int], *, switching: Switching | None = None, jitter: float = 0.02) -> World:
    ticks = len(batches)
    return World(
        name="made",
        engine=EngineModel(steps=STEPS, noise=Noise(jitter_sd=jitter)),
        ks=(0, 3),
        switching=switching or Switching(),
        batches=np.array(batches),
        survival=np.tile([0.8, 0.6, 0.4], (ticks, 1)),
        slowness=np.ones(ticks),
    )


@pytest.mark.parametrize("k", [0, 3])
def test_a_life_makes_the_tokens_that_were_worked_out(k: int) -> None:
    made = replace(world([1] * 80 + [8] * 80), prompt_tokens=50.0, prompt_ms=25.0, tail=0.05)
    life = live(made, lambda seen: k)
    assert life.tokens / life.seconds * made.seconds == pytest.approx(static_tokens(made)[k], rel=0.04)
    assert life.switches == 0


def test_switches_and_a_stale_drafter_cost_what_they_should() -> None:
    plain, turn = world([1] * 240), iter(range(10**6))
    dear = replace(plain, switching=Switching(switch_ms=20.0))
    first = live(plain, lambda seen: 3)
    other = live(dear, lambda seen: 3 * (next(turn) // 5 % 2))
    assert other.switches == pytest.approx(other.steps / 5, abs=2)
    assert other.tokens / other.seconds < 0.8 * first.tokens / first.seconds
    stale = replace(plain, switching=Switching(stale_share=0.9, stale_s=1e6))

    def late(seen: Observation) -> int:
        return 0 if seen.now_ns < 10e9 else 3

    assert live(stale, late).tokens < 0.8 * live(plain, late).tokens


def test_a_policy_is_shown_decode_only_steps_and_those_that_read_prompts() -> None:
    seen = []

    def choose(observation: Observation) -> int:
        seen.append(observation)
        return 3

    live(replace(world([8] * 40), prompt_tokens=60.0, prompt_ms=30.0), choose)
    lasts = [observation.last for observation in seen if observation.last is not None]
    assert {bool(step.prefill_tokens) for step in lasts} == {True, False}
    assert all(step.k == 3 and len(step.accepted) == 3 and step.drafts == 8 for step in lasts)


@pytest.mark.parametrize("switch_ms", [0.0, 60.0, 400.0])
def test_the_clairvoyant_is_as_good_as_the_best_of_all_ways(switch_ms: float) -> None:
    made = world([1, 8, 1, 8, 8, 1, 1, 1], switching=Switching(switch_ms=switch_ms))
    rates = {k: made.tokens_per_s(k) for k in made.ks}

    def tokens(ks: tuple[int, ...]) -> float:
        given = sum(rates[k][tick] * TICK_S for tick, k in enumerate(ks))
        return given - sum(rates[b][i] * switch_ms / 1e3 for i, (a, b) in enumerate(pairwise(ks), 1) if a != b)

    assert best_tokens(made) == pytest.approx(max(map(tokens, product(made.ks, repeat=8))))


def test_the_clairvoyant_is_never_below_who_stands_still() -> None:
    for seed in range(9000, 9006):
        made = random_world(seed, minutes=2)
        assert best_tokens(made) >= max(static_tokens(made).values()) * 0.999, made.name


def test_a_drafter_that_can_be_left_alone_is_worth_it_to_who_knows() -> None:
    """At rest it costs nothing and falls behind; at K = 0 it costs something and doesn't."""
    made = random_world(9002, minutes=2, deep=True)
    assert made.ks[:2] == (DEEP, 0)
    static = static_tokens(made)
    assert static[DEEP] > static[0]
    assert best_tokens(made) >= max(static.values()) * 0.999
    without = replace(made, ks=made.ks[1:], switching=replace(made.switching, stale_share=0.0))
    assert best_tokens(made) >= best_tokens(without)
    assert [made.rests(k) for k in made.ks[:3]] == [True, False, False]
    life = live(made, lambda seen: DEEP)
    assert life.tokens / life.seconds * made.seconds == pytest.approx(static[DEEP], rel=0.04)


def test_a_seed_is_a_world() -> None:
    one, again, other = (random_world(seed, minutes=1) for seed in (9001, 9001, 9002))
    assert one.name == again.name
    assert one.engine == again.engine
    assert np.array_equal(one.batches, again.batches)
    assert np.array_equal(one.survival, again.survival)
    assert other.engine != one.engine


def test_worlds_are_of_all_kinds() -> None:
    names = {part for seed in range(9000, 9080) for part in random_world(seed, minutes=0.2).name.split(", ")}
    assert names >= {"dense", "experts", "compute", "bumpy", "constant", "step", "ramp", "day", "burst", "walk"}
    assert names >= {"same mix", "mixes by turns", "mixes that slide"}


def test_the_policy_finds_its_way_in_worlds_that_it_was_not_tuned_in() -> None:
    """A small part of `benchmarks/policies.py`, whose figures are in docs/policy.md."""
    regrets = []
    for seed in (9100, 9101, 9103, 9104):
        made = random_world(seed, minutes=3)
        policy = Policy(made.ks)
        life = live(made, policy.choose, seed=seed)
        regrets.append(1 - life.tokens / life.seconds * made.seconds / best_tokens(made))
        worse = min(static_tokens(made)[k] for k in (0, made.ks[-1]))
        assert life.tokens / life.seconds * made.seconds > 0.98 * worse
        assert policy.probe_share < 0.02
        assert not policy.faults
    assert float(np.mean(regrets)) < 0.05
