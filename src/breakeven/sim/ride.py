"""An engine under a load profile: as many requests in flight as the profile says, whoever chooses K.

A request that ends is followed by the next one unless the profile has fallen; where it rises, more are sent. It is a
closed loop whose C moves, so that the throughput is the engine's own and not that of the arrivals.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from breakeven.decide.observed import Observation
from breakeven.load.plan import PlannedRequest
from breakeven.records import LevelPlan, LevelRecord, RequestRecord
from breakeven.sim.batch import Job
from breakeven.sim.engine import ChooseK, Engine
from breakeven.sim.level import no_cost, record_of
from breakeven.sim.machine import Machine
from breakeven.sim.mixes import Mix
from breakeven.sim.model import EngineModel

__all__ = ["Ride", "ride"]


class Ride(NamedTuple):
    """What came of it.

    Attributes:
        tokens: given within the time.
        switches: steps that drafted another K than the step before.
        k_seconds: for each tick the seconds of decoding with each K, of shape (ticks, most K + 1).
        level: a record without a window.
        requests: their records, in order of their ends; those that were still running are cancelled.
    """

    tokens: int
    switches: int
    k_seconds: NDArray[np.float64]
    level: LevelRecord
    requests: list[RequestRecord]


def ride(
    model: EngineModel,
    path: NDArray[np.int64],
    tick_s: float,
    mix: Mix,
    choose: ChooseK,
    *,
    most_k: int,
    max_tokens: int,
    drafter: bool,
    seed: int,
) -> Ride:
    """Runs an engine to the end of a path of requests in flight.

    Args:
        model: the engine.
        path: requests in flight at each tick.
        tick_s: how long a tick is.
        mix: what is sent.
        choose: says the K of each step.
        most_k: the longest draft.
        max_tokens: of an answer.
        drafter: whether one is loaded.
        seed: of luck and of the machine's moods: the same for all that are compared.
    """
    watch = _Watch(choose, len(path), tick_s, most_k)
    engine = Engine(model, Machine(model.noise, seed), watch.choose, seed=[seed, 0, 0], most_k=most_k, drafter=drafter)
    plan = LevelPlan(index=0, run=0, max_tokens=max_tokens, concurrency=int(path.max()))
    loads, ends_ns = path.tolist(), round(len(path) * tick_s * 1e9)
    running: dict[Job, int] = {}
    records: list[RequestRecord] = []
    now_ns = 0
    while now_ns < ends_ns:
        load = loads[min(int(now_ns / tick_s / 1e9), len(loads) - 1)]
        while len(running) < load:
            planned = PlannedRequest(plan, "measured", mix.next(now_ns / 1e9), max_tokens)
            running[engine.submit(planned, now_ns)] = len(running) + len(records)
        now_ns = engine.begin(now_ns) or ends_ns
        for job in engine.finish():
            records.append(record_of(job, running.pop(job), now_ns, None))
    tokens = engine.tally().tokens
    for job, number in running.items():
        records.append(record_of(job, number, now_ns, None))
    client = no_cost(now_ns, records)
    level = LevelRecord(plan=plan, started_ns=0, ended_ns=now_ns, ended_by="duration", client=client)
    return Ride(tokens, watch.switches, watch.k_seconds, level, records)


class _Watch:
    """Asks for K and writes down which was used when."""

    def __init__(self, choose: ChooseK, ticks: int, tick_s: float, most_k: int) -> None:
        self._choose, self._tick_ns = choose, tick_s * 1e9
        self.k_seconds = np.zeros((ticks, most_k + 1))
        self.switches = 0
        self._before: int | None = None

    def choose(self, seen: Observation) -> int:
        k = self._choose(seen)
        if seen.last is not None and seen.last.decoding:
            tick = min(int(seen.last.begun_ns / self._tick_ns), len(self.k_seconds) - 1)
            self.k_seconds[tick, seen.last.k] += seen.last.step_ns / 1e9
        self.switches += self._before is not None and self._before != k
        self._before = k
        return k
