"""The machine under an engine: how much slower it is at a moment than on average."""

from __future__ import annotations

import math

import numpy as np

from breakeven.sim.model import Noise

__all__ = ["Machine"]

#: Parts of the noise's memory in which it stands still; a sixteenth changes it by a third of its deviation.
_TICKS_PER_MEMORY = 16
_TICKS_AT_ONCE = 1024
_HOUR_S = 3600.0


class Machine:
    """One path of noise and drift, a function of absolute virtual time: engines that share it share its moods.

    Args:
        noise: how it varies; `jitter_sd` is not the machine's but each engine's.
        seed: which path.

    The time average of 1 / `slowness` is 1 where there is no drift: a noisy engine makes as many tokens in the long run
    as one without noise, so that the truth is known. For a lognormal factor that takes a mean of the logarithm of
    sd² / 2.
    """

    def __init__(self, noise: Noise, seed: int) -> None:
        self._tick_ns = max(1, round(noise.memory_s / _TICKS_PER_MEMORY * 1e9))
        self._rng = np.random.default_rng([seed, 0])
        tick_h = self._tick_ns / 1e9 / _HOUR_S
        memory = math.exp(-1 / _TICKS_PER_MEMORY)
        self._memory, self._shock = memory, noise.sd * math.sqrt(1 - memory * memory)
        self._walk_shock = noise.walk_per_hour * math.sqrt(tick_h)
        self._drift = math.log1p(noise.drift_per_hour) * tick_h
        self._mean = noise.sd**2 / 2
        self._slow, self._walk = noise.sd * self._rng.standard_normal(), 0.0
        self._factors: list[float] = []
        self._is_still = not (noise.sd or noise.walk_per_hour or noise.drift_per_hour)

    def slowness(self, at_ns: int) -> float:
        """What a step that begins then is to be multiplied with."""
        if self._is_still:
            return 1.0
        tick = at_ns // self._tick_ns
        while tick >= len(self._factors):
            self._go_on()
        return self._factors[tick]

    def _go_on(self) -> None:
        slow_shocks, walk_shocks = self._rng.standard_normal((2, _TICKS_AT_ONCE))
        logs, slow, walk, began = [], self._slow, self._walk, len(self._factors)
        for tick, shock, step in zip(
            range(began, began + _TICKS_AT_ONCE),
            (self._shock * slow_shocks).tolist(),
            (self._walk_shock * walk_shocks).tolist(),
            strict=True,
        ):
            logs.append(self._mean + slow + walk + self._drift * tick)
            slow = self._memory * slow + shock
            walk += step
        self._slow, self._walk = slow, walk
        self._factors += np.exp(logs).tolist()
