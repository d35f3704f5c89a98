"""What the load generator itself costs: CPU time, and how late its event loop runs."""

from __future__ import annotations

import asyncio
import resource
import time
from typing import Self

import numpy as np

from breakeven.records import ClientCost

__all__ = ["CostMeter"]

#: Rare enough to cost nothing, often enough for a 99th percentile of a level's lateness.
_BEAT_S = 0.1


class CostMeter:
    """Measures from entering to leaving (an async context manager): CPU of this process and lateness of the loop."""

    async def __aenter__(self) -> Self:
        self._lateness_s: list[float] = []
        self._loop = asyncio.get_running_loop()
        self._cpu_s, self._began_s = _cpu_s(), time.perf_counter()
        self._timer = self._loop.call_later(_BEAT_S, self._beat, self._began_s + _BEAT_S)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._timer.cancel()
        self._cpu_s, self._began_s = _cpu_s() - self._cpu_s, time.perf_counter() - self._began_s

    def cost(self, chunks: int, clock_steps: int) -> ClientCost:
        """The cost, once measuring is over, for so many chunks received."""
        lag: dict[str, float] = {}
        if self._lateness_s:
            p50, p99, most = np.percentile(np.array(self._lateness_s) * 1e3, [50, 99, 100])
            lag = {"p50": float(p50), "p99": float(p99), "max": float(most)}
        return ClientCost(cpu_s=self._cpu_s, wall_s=self._began_s, chunks=chunks, lag_ms=lag, clock_steps=clock_steps)

    def _beat(self, due_s: float) -> None:
        now_s = time.perf_counter()
        self._lateness_s.append(max(0.0, now_s - due_s))
        self._timer = self._loop.call_later(_BEAT_S, self._beat, now_s + _BEAT_S)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
