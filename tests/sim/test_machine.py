"""The machine's speed is a path through time: shared by all who ask, of known memory, and fair in the long run."""

from __future__ import annotations

import math

import numpy as np
import pytest

from breakeven.sim.machine import Machine
from breakeven.sim.model import Noise
from tests.sim.handy import MS, S


def path(noise: Noise, seconds: int, *, every_ms: int = 100, seed: int = 1) -> np.ndarray:
    machine = Machine(noise, seed)
    return np.array([machine.slowness(at) for at in range(0, seconds * S, every_ms * MS)])


def test_who_asks_when_doesnt_change_the_path() -> None:
    noise = Noise(sd=0.2, memory_s=2.0, walk_per_hour=0.1)
    one, other = Machine(noise, 7), Machine(noise, 7)
    late = other.slowness(500 * S)
    assert [one.slowness(at * S) for at in (3, 90, 500)] == [other.slowness(3 * S), other.slowness(90 * S), late]
    assert Machine(noise, 8).slowness(500 * S) != late


def test_noise_has_the_spread_and_the_memory_that_were_asked_for() -> None:
    logs = np.log(path(Noise(sd=0.15, memory_s=1.0), 10_000))
    logs -= logs.mean()
    assert logs.std() == pytest.approx(0.15, rel=0.05)
    after_half_a_second = float(logs[:-5] @ logs[5:] / (logs @ logs))
    assert after_half_a_second == pytest.approx(math.exp(-0.5), abs=0.05)


def test_noise_leaves_the_mean_speed_alone() -> None:
    speeds = 1 / path(Noise(sd=0.3, memory_s=0.5), 10_000)
    assert speeds.mean() == pytest.approx(1.0, abs=0.01)


def test_drift_makes_steps_longer_by_the_hour() -> None:
    machine = Machine(Noise(drift_per_hour=0.1), 0)
    assert machine.slowness(0) == pytest.approx(1.0)
    assert machine.slowness(2 * 3600 * S) == pytest.approx(1.21, rel=1e-3)


def test_a_walk_has_gone_as_far_after_an_hour_as_was_asked_for() -> None:
    noise = Noise(walk_per_hour=0.05, memory_s=60.0)
    ends = [math.log(Machine(noise, seed).slowness(3600 * S)) for seed in range(300)]
    assert np.std(ends) == pytest.approx(0.05, rel=0.15)


def test_a_machine_without_moods_is_always_the_same() -> None:
    assert Machine(Noise(jitter_sd=0.3), 0).slowness(10**15) == 1.0
