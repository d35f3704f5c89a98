"""Measuring one level: load it, watch the engine, write it down."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any, NamedTuple, Self

import msgspec

from breakeven.engines.control import Hold, Pin
from breakeven.engines.metrics import Scraper
from breakeven.engines.monitor import Monitor
from breakeven.errors import RunError
from breakeven.load.client import Client
from breakeven.load.closed import ClosedLoop, warm_up
from breakeven.load.cost import CostMeter
from breakeven.load.open import OpenLoop
from breakeven.load.pace import due_times
from breakeven.load.plan import LevelRequests, PlannedRequest, TraceRequests
from breakeven.load.prompts import PromptSet
from breakeven.load.trace import TraceRequest
from breakeven.load.window import Hooks, StopRule, Window
from breakeven.measure.arrivals import ArrivalTable
from breakeven.measure.level import LevelSummary, summarize_level
from breakeven.measure.throughput import mean_latency_ns, window_throughput
from breakeven.options import BenchOptions
from breakeven.records import ClientCost, LevelPlan, LevelRecord, Phase, RequestRecord
from breakeven.runs import RunWriter

__all__ = ["Material", "Measurer", "Progress"]

#: Connections that stand open when an open loop starts.
_FIRST_CONNECTIONS = 64


class Material(NamedTuple):
    """What is sent: prompts, and for levels that follow a trace what is sent when."""

    prompts: PromptSet
    trace: list[TraceRequest] | None


class Progress(NamedTuple):
    """How far the running level is; `rate` is tokens a second over the last few seconds."""

    stage: str
    in_flight: int
    ended: int
    rate: float


class Measurer:
    """Measures levels with one client. An async context manager: the client is open inside.

    Args:
        options: what was asked for.
        material: what is sent.
        writer: where records go.
        make_client: makes the client, given its callback for records.
        scraper: reads the engine's counters.
        shared_cores: how many cores client and server share; None where the server runs elsewhere.
        max_in_flight: requests that can run at once, for levels that set no bound.
        ceiling: chunks a second that this client can take, None where that is not known.
        is_alive: whether the server still answers; asked (in a thread) where a level ended in failures.
        pin: what to pin on the server's control page as long as a level lasts.

    `summaries` holds the levels that are over, `lost` whether the last one ended because the server was gone.
    """

    def __init__(
        self,
        options: BenchOptions,
        material: Material,
        writer: RunWriter,
        make_client: Callable[[Callable[[RequestRecord], None]], Client],
        scraper: Scraper,
        *,
        shared_cores: int | None,
        max_in_flight: int,
        ceiling: float | None,
        is_alive: Callable[[], bool],
        pin: Pin | None = None,
    ) -> None:
        self._options, self._material, self._writer, self._scraper = options, material, writer, scraper
        self._shared_cores, self._max_in_flight, self._ceiling = shared_cores, max_in_flight, ceiling
        self._is_alive, self._pin = is_alive, pin
        self.client = make_client(self._record)
        self._window: Window | None = None
        self._hold: Hold | None = None
        self._records: list[RequestRecord] = []
        # Not from the seed: a second run with the same seed must find no cache either.
        self._tag = secrets.token_hex(4) if options.unique else None
        self._task: asyncio.Task[Any] | None = None
        self._failure: RunError | None = None
        self.summaries: list[LevelSummary] = []
        self.lost = False

    async def __aenter__(self) -> Self:
        await self.client.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.client.__aexit__(*error)

    async def measure(
        self, level: LevelPlan, stop: Callable[[], StopRule], *, warmup: int, warmup_limit_s: float = math.inf
    ) -> LevelSummary:
        """Measures one level and writes it down, also where it is cancelled in the middle.

        Args:
            level: the load.
            stop: asked when the warm-up is over: when the window closes.
            warmup: requests before, which don't count; `warmup_limit_s` is the latest at which one is sent.

        Raises:
            RunError: a record can't be written.
            TargetError: the server doesn't take the pin; nothing was sent.
        """
        # What was in flight has ended: at the end of a level the client gives up whatever still runs.
        with self._pin.held() if self._pin else contextlib.nullcontext() as self._hold:
            return await self._measure(level, stop, warmup, warmup_limit_s)

    async def _measure(
        self, level: LevelPlan, stop: Callable[[], StopRule], warmup: int, warmup_limit_s: float
    ) -> LevelSummary:
        self._task = asyncio.current_task()
        self._records, self._window, monitor = [], None, Monitor(self._scraper)
        requests = LevelRequests(level, self._material.prompts, seed=self._options.seed, tag=self._tag)
        try:
            await self.client.connect(level.concurrency or min(_FIRST_CONNECTIONS, self._most_in_flight(level)))
            await warm_up(requests, self.client.send, warmup, level.concurrency or 1, limit_s=warmup_limit_s)
            return await self._run(level, self._loop(level, requests, stop(), monitor), monitor)
        except asyncio.CancelledError:
            if self._failure is not None:
                raise self._failure from None
            raise

    async def watch(self) -> AsyncIterator[Progress]:
        """How far it is, each second."""
        history: deque[tuple[int, int]] = deque(maxlen=4)
        while True:
            await self.client.caught_up()
            history.append((self.client.clock.now_ns(), self.client.tokens_so_far()))
            (then_ns, then), (now_ns, now) = history[0], history[-1]
            rate = (now - then) / ((now_ns - then_ns) / 1e9) if now_ns > then_ns else 0.0
            ended = sum(record.phase != "warmup" for record in self._records)
            stage = self._window.stage if self._window else "warm-up"
            yield Progress(stage, self.client.in_flight, ended, rate)
            await asyncio.sleep(1.0)

    def _record(self, record: RequestRecord) -> None:
        """Takes a finished request's record. One that can't be written ends the level: `measure` raises why."""
        self._records.append(record)
        try:
            self._writer.add_request(record)
        except RunError as error:
            self._failure = self._failure or error
            if self._task is not None:
                self._task.cancel()

    def _loop(
        self, level: LevelPlan, requests: LevelRequests, stop: StopRule, monitor: Monitor
    ) -> ClosedLoop | OpenLoop:
        ramp = self._options.ramp and level.mode != "trace"
        hooks = Hooks(
            is_precise=lambda opened_ns: self._is_precise(level, opened_ns),
            on_open=monitor.open,
            on_close=monitor.close if ramp else lambda: None,
            heard_ns=lambda: self.client.heard_ns,
        )
        loop: ClosedLoop | OpenLoop
        if level.mode == "closed":
            loop = ClosedLoop(level, requests, self.client.send, self.client.clock, stop, ramp=ramp, hooks=hooks)
        else:
            due, rate, next_request = self._schedule(level, requests)
            bound = self._most_in_flight(level)
            loop = OpenLoop(
                due,
                next_request,
                self.client.send,
                self.client.clock,
                stop,
                rate=rate,
                max_in_flight=bound,
                ramp=ramp,
                hooks=hooks,
            )
        self._window = loop.window
        return loop

    def _schedule(
        self, level: LevelPlan, requests: LevelRequests
    ) -> tuple[Iterable[float], float, Callable[[Phase], PlannedRequest]]:
        """When an open loop's requests are due, how many a second that are, and where the next one comes from."""
        seed, (prompts, trace) = self._options.seed, self._material
        if trace is None:
            return due_times(level.rate, level.arrivals, seed=seed, run=level.run), level.rate, requests.next
        own = prompts if self._options.prompts else None
        rate = len(trace) / max(trace[-1].at_s / level.speed, 1.0)
        sent = TraceRequests(level, trace, own, seed=seed, tag=self._tag)
        return (request.at_s / level.speed for request in trace), rate, sent.next

    def _most_in_flight(self, level: LevelPlan) -> int:
        return level.max_in_flight or self._max_in_flight

    async def _run(self, level: LevelPlan, loop: ClosedLoop | OpenLoop, monitor: Monitor) -> LevelSummary:
        client = self.client
        meter, chunks, steps = CostMeter(), client.chunks, client.kernel_clock.steps
        try:
            async with meter:
                try:
                    with _uncollected():
                        await loop.run()
                    await self._look_for_server(loop.window)
                finally:
                    await monitor.finished()
                    await client.settled()
        finally:
            cost = meter.cost(client.chunks - chunks, client.kernel_clock.steps - steps)
            summary = self._write_down(level, loop.window, monitor, cost)
        return summary

    def _write_down(self, level: LevelPlan, window: Window, monitor: Monitor, cost: ClientCost) -> LevelSummary:
        origin_ns, times = self.client.origin_ns, window.times
        record = LevelRecord(
            plan=level,
            started_ns=times.started_ns - origin_ns,
            opened_ns=times.opened_ns - origin_ns if times.opened_ns else None,
            closed_ns=times.closed_ns - origin_ns if times.closed_ns else None,
            ended_ns=times.ended_ns - origin_ns,
            ended_by=times.ended_by,
            ramp_limited=times.ramp_limited,
            client=msgspec.structs.replace(cost, ceiling_chunks_per_s=self._ceiling),
            samples=monitor.samples(origin_ns),
            counters=monitor.counters(),
            spec=msgspec.to_builtins(monitor.spec()),
            pin_broken=self._hold.broken() if self._hold else None,
        )
        self._writer.add_level(record)
        self.summaries.append(summarize_level(record, self._records, shared_cores=self._shared_cores))
        return self.summaries[-1]

    async def _look_for_server(self, window: Window) -> None:
        """Notes in the window's times that the server is gone, where a level ended as if it were."""
        is_doubtful = window.failures or window.times.ended_by == "watchdog"
        if is_doubtful and not await asyncio.to_thread(self._is_alive):
            self.lost, window.times.ended_by = True, "lost"

    async def _is_precise(self, level: LevelPlan, opened_ns: int) -> bool:
        await self.client.caught_up()
        opened_ns, now_ns = opened_ns - self.client.origin_ns, self.client.clock.now_ns() - self.client.origin_ns
        ended = [(record.sent_ns, record.arrivals) for record in self._records if record.sent_ns is not None]
        table = ArrivalTable([*ended, *self.client.partial(level.index)])
        value, interval = window_throughput(table, opened_ns, now_ns, mean_latency_ns(self._records))
        return interval is not None and (interval.high - interval.low) / 2 <= self._options.precision * value


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage collection: with a thousand streams a full one stops the event loop for 50 ms.

    Requests leave no circles of references behind, so that memory does not grow for want of it. What is there when
    it comes back is records, frozen so that nobody looks through them for garbage.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
