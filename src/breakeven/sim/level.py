"""One level on a simulated engine: the load generator's own loops, run in virtual time.

`load.closed` and `load.open` send their requests through a function and read a clock: here the function hands them to
an `Engine`, and the clock is the virtual loop's. Nothing of ramp, window and drain is written twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from breakeven.clock import VirtualClock, VirtualLoop
from breakeven.load.closed import ClosedLoop
from breakeven.load.open import OpenLoop
from breakeven.load.pace import due_times
from breakeven.load.plan import LevelRequests, PlannedRequest
from breakeven.load.prompts import PromptSet
from breakeven.load.window import Hooks, LevelTimes, StopRule
from breakeven.measure.arrivals import ArrivalTable
from breakeven.measure.throughput import mean_latency_ns, window_throughput
from breakeven.records import ClientCost, EngineSample, LevelPlan, LevelRecord, RequestRecord
from breakeven.sim.batch import Job, Tally
from breakeven.sim.engine import Engine

__all__ = ["Conditions", "no_cost", "record_of", "run_level"]

_SAMPLE_EVERY_S = 1.0
#: An open loop whose backlog only grows ends somewhere.
_MOST_IN_FLIGHT = 10_000


class Conditions(NamedTuple):
    """How levels are run: what is sent in which order, when windows close, how narrow is precise."""

    prompts: PromptSet
    stop: StopRule
    seed: int = 0
    precision: float = 0.05
    ramp: bool = True


async def run_level(
    engine: Engine, plan: LevelPlan, conditions: Conditions, numbers: Iterator[int]
) -> tuple[LevelRecord, list[RequestRecord]]:
    """Runs a level on an engine, within a `VirtualLoop`.

    Args:
        engine: one that nobody has used.
        plan: a closed or an open level.
        conditions: how.
        numbers: where the requests' ids come from.

    Returns:
        The level and its requests, as the load generator writes them down; times are the virtual clock's.
    """
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    driver = _Driver(engine, loop, numbers)
    times = await driver.run(plan, conditions)
    return driver.level(plan, times), driver.records


class _Driver:
    """Moves an engine through a virtual loop and writes down what its requests saw."""

    def __init__(self, engine: Engine, loop: VirtualLoop, numbers: Iterator[int]) -> None:
        self._engine, self._loop, self._numbers = engine, loop, numbers
        self._clock = VirtualClock(loop)
        self._waits: dict[Job, asyncio.Future[None]] = {}
        self._handle: asyncio.Handle | None = None
        self._sampling: asyncio.TimerHandle | None = None
        self._samples: list[EngineSample] = []
        self._task: asyncio.Task[Any] | None = None
        self._fault: Exception | None = None
        self._opened = self._closed = _Counts(engine)
        self.records: list[RequestRecord] = []

    async def run(self, plan: LevelPlan, conditions: Conditions) -> LevelTimes:
        requests = LevelRequests(plan, conditions.prompts, seed=conditions.seed, tag=None)
        hooks = Hooks(
            is_precise=lambda opened_ns: self._is_precise(opened_ns, conditions.precision),
            on_open=self._open,
            on_close=self._close,
        )
        self._task = asyncio.current_task()
        level: ClosedLoop | OpenLoop
        if plan.mode == "closed":
            level = ClosedLoop(
                plan, requests, self._send, self._clock, conditions.stop, ramp=conditions.ramp, hooks=hooks
            )
        else:
            due = due_times(plan.rate, plan.arrivals, seed=conditions.seed, run=plan.run)
            bound = plan.max_in_flight or _MOST_IN_FLIGHT
            level = OpenLoop(
                due,
                requests.next,
                self._send,
                self._clock,
                conditions.stop,
                rate=plan.rate,
                max_in_flight=bound,
                ramp=conditions.ramp,
                hooks=hooks,
            )
        try:
            times = await level.run()
        except asyncio.CancelledError:
            if self._fault is not None:
                raise self._fault from None
            raise
        finally:
            for handle in (self._handle, self._sampling):
                if handle is not None:
                    handle.cancel()
        # A level cancels what is left over in no order of its own.
        self.records.sort(key=lambda record: (record.end_ns, record.id))
        return times

    def level(self, plan: LevelPlan, times: LevelTimes) -> LevelRecord:
        """The level's record, once it is over."""
        return LevelRecord(
            plan=plan,
            started_ns=times.started_ns,
            opened_ns=times.opened_ns,
            closed_ns=times.closed_ns,
            ended_ns=times.ended_ns,
            ended_by=times.ended_by,
            ramp_limited=times.ramp_limited,
            client=no_cost(times.ended_ns - times.started_ns, self.records),
            samples=self._samples,
            counters=self._closed.counters(self._opened),
            spec=self._closed.spec(self._opened),
        )

    async def _send(self, planned: PlannedRequest, due_ns: int | None = None) -> bool:
        number, sent_ns = next(self._numbers), self._clock.now_ns()
        job = self._engine.submit(planned, sent_ns)
        wait = self._waits[job] = self._loop.create_future()
        if self._handle is None:
            self._handle = self._loop.call_soon(self._begin)
        try:
            await wait
        except asyncio.CancelledError:
            self._engine.drop(job)
            self.records.append(record_of(job, number, self._clock.now_ns(), due_ns))
            raise
        finally:
            del self._waits[job]
        self.records.append(record_of(job, number, sent_ns + job.arrivals[-1][0], due_ns))
        return True

    def _begin(self) -> None:
        try:
            ends_ns = self._engine.begin(self._clock.now_ns())
        except Exception as error:  # noqa: BLE001  whatever choosing K raised: a callback has nobody to raise it to
            self._fault = error
            if self._task is not None:
                self._task.cancel()
            return
        self._handle = None if ends_ns is None else self._loop.call_at(ends_ns / 1e9, self._finish)

    def _finish(self) -> None:
        ended = self._engine.finish()
        for job in ended:
            self._waits[job].set_result(None)
        if ended:  # after those that wait for them: what they send next takes part in the next step
            self._handle = self._loop.call_soon(self._begin)
        else:
            self._begin()

    def _open(self) -> None:
        self._opened = _Counts(self._engine)
        self._sample()

    def _sample(self) -> None:
        engine = self._engine
        self._samples.append(
            EngineSample(
                time_ns=self._clock.now_ns(), running=engine.running, waiting=engine.waiting, kv_use=engine.kv_use
            )
        )
        self._sampling = self._loop.call_later(_SAMPLE_EVERY_S, self._sample)

    def _close(self) -> None:
        self._closed = _Counts(self._engine)
        if self._sampling is not None:
            self._sampling.cancel()

    async def _is_precise(self, opened_ns: int, precision: float) -> bool:
        running = [(job.sent_ns, job.arrivals) for job in self._waits]
        ended = [(record.sent_ns or 0, record.arrivals) for record in self.records]
        latency_ns = mean_latency_ns(self.records)
        value, interval = window_throughput(
            ArrivalTable([*ended, *running]), opened_ns, self._clock.now_ns(), latency_ns
        )
        return interval is not None and (interval.high - interval.low) / 2 <= precision * value


def no_cost(wall_ns: int, records: Sequence[RequestRecord]) -> ClientCost:
    """What a client in virtual time costs."""
    chunks = sum(record.chunks for record in records)
    return ClientCost(cpu_s=0.0, wall_s=wall_ns / 1e9, chunks=chunks, lag_ms={"p50": 0.0, "p99": 0.0, "max": 0.0})


def record_of(job: Job, number: int, end_ns: int, due_ns: int | None) -> RequestRecord:
    """A request's record: `ok` if it has all its tokens, else `cancelled`."""
    planned, arrivals, sent_ns = job.planned, job.arrivals, job.sent_ns
    first_ns = sent_ns + arrivals[0][0] if arrivals else None
    ok = not job.left
    return RequestRecord(
        id=number,
        level=planned.level.index,
        phase=planned.phase,
        prompt=planned.prompt.id,
        kind=planned.prompt.kind,
        max_tokens=planned.max_tokens,
        due_ns=sent_ns if due_ns is None else due_ns,
        sent_ns=sent_ns,
        headers_ns=first_ns,
        first_ns=first_ns,
        last_ns=sent_ns + arrivals[-1][0] if arrivals else None,
        end_ns=end_ns,
        arrivals=arrivals,
        input_tokens=job.answer.input_tokens if ok else None,
        cached_tokens=0 if ok else None,
        output_tokens=job.answer.tokens - job.left,
        tokens_from="chunks",
        chunks=len(arrivals),
        outcome="ok" if ok else "cancelled",
        status=200 if arrivals else None,
        finish_reason=("length" if job.answer.is_cut else "stop") if ok else None,
    )


class _Counts:
    """An engine's counters at a moment, and what grew from one moment to another, as `engines.monitor` has it."""

    def __init__(self, engine: Engine) -> None:
        self._tally: Tally = engine.tally()
        self._prompt_tokens = engine.prompt_tokens

    def counters(self, since: _Counts) -> dict[str, float]:
        generated, read = self._tally.tokens - since._tally.tokens, self._prompt_tokens - since._prompt_tokens
        return {"preemptions": 0.0, "generation_tokens": float(generated), "prompt_tokens": float(read)}

    def spec(self, since: _Counts) -> dict[str, Any] | None:
        """Speculation, in the fields of `engines.metrics.SpecStats`; None where nothing was drafted."""
        first, last = since._tally, self._tally
        drafts, draft_tokens = last.drafts - first.drafts, last.draft_tokens - first.draft_tokens
        if not drafts:
            return None
        by_position = [after - before for before, after in zip(first.accepted, last.accepted, strict=True)]
        accepted = sum(by_position)
        return {
            "acceptance_length": 1 + accepted / drafts,
            "acceptance_rate": accepted / draft_tokens,
            "per_position": [count / drafts for count in by_position],
            "drafts": float(drafts),
            "draft_tokens": float(draft_tokens),
            "accepted": float(accepted),
        }
