"""A policy living through a world, step by step: how many tokens it makes.

No requests, only steps: a step takes what the engine says for the present batch and K, and gives what a draw says. That
is some 20 µs a step, so that an hour of a server takes a second or two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from breakeven.decide.observed import Observation, Step
from breakeven.sim.worlds import TICK_S, World

__all__ = ["Life", "live"]


class Life(NamedTuple):
    """What came of it: output tokens, seconds, steps, and changes of K, probes included."""

    tokens: float
    seconds: float
    steps: int
    switches: int


def live(world: World, choose: Callable[[Observation], int], *, seed: int = 0) -> Life:
    """Lets a policy choose K at each step of a world."""
    rng = np.random.default_rng([seed, 11])
    draws = _Draws(world, rng)
    batches = world.batches.tolist()
    lengths: dict[tuple[int, int], float] = {}
    now_s, ends_s, tokens, prompts, stale = 0.0, world.seconds, 0, 0.0, 0.0
    last: Step | None = None
    before: int | None = None
    steps = switches = 0
    switching = world.switching
    while now_s < ends_s:
        tick = int(now_s / TICK_S)
        batch = batches[tick]
        k = choose(Observation(round(now_s * 1e9), batch, 0, 0.5, last))
        length_ms = lengths.get((batch, k))
        if length_ms is None:
            length_ms = lengths[batch, k] = world.step_ms(batch, k)
        length_ms *= draws.factor(tick)
        if before is not None and before != k:
            length_ms += switching.switch_ms
            switches += 1
        reads = int(prompts)
        prompts -= reads
        length_ms += reads * world.prompt_ms
        accepted = draws.accepted(tick, batch, k, stale) if k > 0 else ()
        given = batch + sum(accepted)
        tokens += given
        prompts += given / world.prompt_tokens
        step_s = length_ms / 1e3
        if switching.stale_share:
            stale = switching.staler(stale, world.rests(k), step_s)
        last = Step(round(now_s * 1e9), round(step_s * 1e9), batch, k, batch if k > 0 else 0, accepted, 100 * reads)
        now_s += step_s
        before = k
        steps += 1
    return Life(tokens, now_s, steps, switches)


class _Draws:
    """Luck, drawn in blocks."""

    def __init__(self, world: World, rng: np.random.Generator) -> None:
        self._world, self._rng = world, rng
        self._slowness = world.slowness.tolist()
        self._survival = world.survival
        self._factors: list[float] = []
        self._tick, self._chances = -1, list[float]()

    def factor(self, tick: int) -> float:
        """How much longer than its length a step is."""
        if not self._factors:
            sd, world = self._world.engine.noise.jitter_sd, self._world
            jitter = np.exp(sd * self._rng.standard_normal(4096) - sd * sd / 2)
            jitter[self._rng.random(4096) < world.tail] *= world.tail_factor
            self._factors = jitter.tolist()
        factor: float = self._factors.pop() * self._slowness[tick]
        return factor

    def accepted(self, tick: int, batch: int, k: int, stale: float) -> tuple[int, ...]:
        """How many of a batch's drafts have each position accepted."""
        if tick != self._tick:
            self._tick, self._chances = tick, self._survival[tick].tolist()
        fresh = 1 - self._world.switching.stale_share * stale
        left, before, found = batch, 1.0, []
        for i in range(k):
            chance = self._chances[i] * fresh
            left = int(self._rng.binomial(left, min(1.0, chance / before))) if left else 0
            before = chance
            found.append(left)
        return tuple(found)
