"""Worlds: engines, drafters, loads and mixes of prompts drawn at random, in which policies are judged.

All in ticks: what the load is, how far drafts get, and how slow the machine is are functions of the time alone, the
same whatever a policy does. That is what makes a clairvoyant's best possible (`sim.clairvoyant`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from breakeven.decide.observed import DEEP
from breakeven.sim.loads import path_of
from breakeven.sim.machine import Machine
from breakeven.sim.model import EngineModel, Noise
from breakeven.sim.steps import RooflineSteps, StepTimes, TableSteps

__all__ = ["TICK_S", "Switching", "World", "random_world"]

TICK_S = 0.25

FloatArray = NDArray[np.float64]
_Number = TypeVar("_Number", float, FloatArray)


@dataclass(frozen=True)
class Switching:
    """What switching costs beside a worse K.

    Attributes:
        switch_ms: by which the first step after a switch is longer.
        stale_share: of drafts that fail at once while all of the drafter's cache is stale.
        stale_s: the time constant in which it becomes whole again once the drafter works, as requests come and go; it
            gets stale within a second while it rests.
    """

    switch_ms: float = 0.0
    stale_share: float = 0.0
    stale_s: float = 5.0

    #: The time constant of getting stale, in seconds.
    GETTING_STALE_S = 1.0

    def staler(self, stale: _Number, rests: bool, seconds: float) -> _Number:
        """How stale the drafter is after so long at work or at rest; one number, or many."""
        if rests:
            return 1 - (1 - stale) * math.exp(-seconds / self.GETTING_STALE_S)
        return stale * math.exp(-seconds / self.stale_s)


@dataclass(frozen=True)
class World:
    """One world.

    Attributes:
        name: of what it is made.
        engine: its step times and jitter.
        ks: the K that may be chosen, ascending from 0, or from `DEEP` where the drafter can be left alone.
        switching: what that costs.
        batches: decoding requests at each tick.
        survival: at each tick, the probability that all of the first 1, 2, … draft tokens are accepted.
        slowness: of the machine at each tick.
        tail: the share of steps that take longer by `tail_factor`.
        prompt_tokens: output tokens to each prompt.
        prompt_ms: what reading one costs, in a step that is then not decode-only.
    """

    name: str
    engine: EngineModel
    ks: tuple[int, ...]
    switching: Switching
    batches: NDArray[np.int64]
    survival: FloatArray
    slowness: FloatArray
    tail: float = 0.0
    tail_factor: float = 3.0
    prompt_tokens: float = 300.0
    prompt_ms: float = 0.0

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return len(self.batches) * TICK_S

    def step_ms(self, batch: int, k: int) -> float:
        """A step without noise."""
        return self.engine.step_ms(batch, max(k, 0), drafter=k != DEEP)

    def rests(self, k: int) -> bool:
        """Whether the drafter falls behind at this K: at 0, or only at `DEEP` where there is that."""
        return k == self.ks[0]

    def tokens_per_s(self, k: int, fresh: FloatArray | float = 1.0) -> FloatArray:
        """The expected rate at each tick with drafts of `k` tokens, of which a share `fresh` has a chance at all.

        Of an array of shares the rates have the shape (shares, ticks).
        """
        batches, places = np.unique(self.batches, return_inverse=True)
        lengths = np.array([self.step_ms(int(batch), k) for batch in batches])
        steps_ms = lengths[places] * self.slowness * self.tail_mean
        given = self.batches * (1 + np.multiply.outer(fresh, self.survival[:, : max(k, 0)].sum(axis=1)))
        rates: FloatArray = given / (steps_ms + given * self.prompt_ms / self.prompt_tokens) * 1e3
        return rates

    @property
    def tail_mean(self) -> float:
        """The mean factor of the steps' tail."""
        return 1 + self.tail * (self.tail_factor - 1)


def random_world(seed: int, *, minutes: float = 30.0, deep: bool = False) -> World:
    """A world of its own for each seed; `deep`: whose drafter is in step at K = 0, at a price, or can be left alone."""
    rng = np.random.default_rng([seed, 7])
    ks = [(0, 3), (0, 5), (0, 2, 4), (0, 1, 2, 4), (0, 1, 2, 3, 5), (0, 1, 3, 7)][rng.integers(6)]
    seconds = minutes * 60
    shape, steps = _steps(rng, ks)
    load, batches = _load(rng, seconds)
    mix, survival = _survival(rng, len(batches), ks[-1], batches)
    memory_s = _log_uniform(rng, 0.5, 60)
    noise = Noise(sd=rng.uniform(0, 0.1), memory_s=memory_s, jitter_sd=rng.uniform(0.01, 0.08))
    draft_ms = steps.step_ms(1, ks[-1]) * 0.03
    engine = EngineModel(steps=steps, residual_ms=rng.choice([0.0, 1.0]) * draft_ms, noise=noise)
    machine = Machine(noise, seed)
    world = World(
        name=f"{shape}, {load}, {mix}",
        engine=engine,
        ks=ks,
        switching=_switching(rng, steps.step_ms(1, 0)),
        batches=batches,
        survival=survival,
        slowness=np.array([machine.slowness(round(i * TICK_S * 1e9)) for i in range(len(batches))]),
        tail=rng.choice([0.0, rng.uniform(0, 0.02)]),
        tail_factor=rng.uniform(2, 6),
        prompt_tokens=rng.uniform(100, 800),
        prompt_ms=rng.uniform(2, 40),
    )
    return _deep(np.random.default_rng([seed, 13]), world) if deep else world


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(math.log(low), math.log(high))))


def _steps(rng: np.random.Generator, ks: tuple[int, ...]) -> tuple[str, StepTimes]:
    """Dense, mixture of experts, compute-bound from the start, or a bumpy table with padded batches."""
    shape = ["dense", "experts", "compute", "bumpy"][rng.choice(4, p=[0.35, 0.25, 0.15, 0.25])]
    base = _log_uniform(rng, 8, 40)
    knee = _log_uniform(rng, 6, 300) if shape != "compute" else rng.uniform(0, 4)
    request_ms = base * _log_uniform(rng, 0.001, 0.02)
    per_token = _log_uniform(rng, 0.01, 0.1) if shape == "compute" else rng.uniform(0.4, 1.2) / max(knee, 8)
    roofline = RooflineSteps(
        base_ms=base,
        request_ms=request_ms,
        token_ms=base * per_token,
        knee_tokens=knee,
        expert_ms=base * rng.uniform(0.5, 3) if shape == "experts" else 0.0,
        expert_share=rng.uniform(0.02, 0.2),
        draft_ms=base * _log_uniform(rng, 0.005, 0.12),
        draft_request_ms=base * _log_uniform(rng, 0.0001, 0.003),
    )
    return (shape, _bumpy(rng, roofline, ks)) if shape == "bumpy" else (shape, roofline)


def _bumpy(rng: np.random.Generator, roofline: RooflineSteps, ks: tuple[int, ...]) -> TableSteps:
    """The same, with batches padded to powers of two and each K's own bumps: rising in B or not."""
    points = []
    for k in ks:
        for octave in range(10):
            bump = math.exp(0.08 * rng.standard_normal())
            low, high = 2**octave, 2 ** (octave + 1) - 1
            for batch in {low, high}:
                points.append((float(batch), k, roofline.step_ms(high, k) * bump))
    return TableSteps(points=tuple(points))


def _load(rng: np.random.Generator, seconds: float) -> tuple[str, NDArray[np.int64]]:
    """One of the profiles, or a random walk as a service's trace has it; with the wobble of a batch."""
    low, high = _log_uniform(rng, 1, 12), _log_uniform(rng, 16, 200)
    period = _log_uniform(rng, 30, 600)
    kind = ["constant", "step", "ramp", "day", "burst", "walk"][rng.integers(6)]
    if kind == "walk":
        walk = np.cumsum(rng.standard_normal(math.ceil(seconds / TICK_S))) * math.sqrt(TICK_S / period)
        middle, reach = math.log(low * high) / 2, math.log(high / low) / 2
        path = np.exp(middle + reach * np.sin(walk))
    else:
        text = {
            "constant": f"constant:{_log_uniform(rng, 1, 200):.3f}",
            "ramp": f"ramp:{low:.3f}:{high:.3f}",
        }.get(kind, f"{kind}:{low:.3f}:{high:.3f}:{period:.3f}")
        path = path_of(text, seconds, TICK_S).astype(float)
    wobble = _slow_noise(rng, len(path), rng.uniform(0.5, 5)) * rng.uniform(0, 0.7)
    batches = np.clip(np.rint(path + wobble * np.sqrt(path)), 1, 500)
    return kind, batches.astype(np.int64)


def _survival(rng: np.random.Generator, ticks: int, most_k: int, batches: NDArray[np.int64]) -> tuple[str, FloatArray]:
    """How far drafts get: kinds of prompts whose shares stay, change at once, or go up and down."""
    kinds = []
    for _ in range(3):
        first, decay = rng.uniform(0.25, 0.92), rng.uniform(0.75, 1.0)
        kinds.append(np.cumprod([first * decay**i for i in range(most_k)]))
    mix = ["same mix", "mixes by turns", "mixes that slide"][rng.choice(3, p=[0.4, 0.35, 0.25])]
    shares = np.tile(rng.dirichlet([0.5] * 3), (ticks, 1))
    if mix == "mixes by turns":
        other = rng.dirichlet([0.5] * 3)
        lasts = rng.uniform(120, 480)
        shares[(np.arange(ticks) * TICK_S) % (2 * lasts) >= lasts] = other
    elif mix == "mixes that slide":
        other = rng.dirichlet([0.5] * 3)
        height = (1 - np.cos(2 * math.pi * np.arange(ticks) * TICK_S / rng.uniform(300, 1800)))[:, None] / 2
        shares = shares * (1 - height) + other * height
    survival = shares @ np.array(kinds)
    # The requests that happen to be there: their own luck averages out over a batch.
    luck = _slow_noise(rng, ticks, rng.uniform(4, 20)) * rng.uniform(0, 0.6) / np.sqrt(batches)
    odds = survival / (1 - np.minimum(survival, 0.999)) * np.exp(luck)[:, None]
    return mix, odds / (1 + odds)


def _slow_noise(rng: np.random.Generator, ticks: int, memory_s: float) -> FloatArray:
    """Normal noise of deviation 1 that forgets within `memory_s`."""
    keep = math.exp(-TICK_S / memory_s)
    noise, at = np.empty(ticks), rng.standard_normal()
    shocks = (rng.standard_normal(ticks) * math.sqrt(1 - keep * keep)).tolist()
    for i, shock in enumerate(shocks):
        at = keep * at + shock
        noise[i] = at
    return noise


def _deep(rng: np.random.Generator, world: World) -> World:
    """The same with a drafter that costs 2 to 15 % of a lone request's step at K = 0."""
    residual_ms = rng.uniform(0.02, 0.15) * world.step_ms(1, world.ks[-1])
    return replace(
        world,
        engine=msgspec.structs.replace(world.engine, residual_ms=residual_ms),
        ks=(DEEP, *world.ks),
        switching=Switching(world.switching.switch_ms, rng.uniform(0.05, 0.9), rng.uniform(2, 10)),
    )


def _switching(rng: np.random.Generator, step_ms: float) -> Switching:
    """Half of all engines switch for free; three in ten leave the drafter behind while it is off."""
    switch_ms = rng.choice([0.0, rng.uniform(0, 3) * step_ms])
    stale = rng.random() < 0.3
    return Switching(switch_ms, rng.uniform(0.1, 0.5) if stale else 0.0, rng.uniform(2, 10))
