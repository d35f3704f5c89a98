"""The levels of a run, one after the other: load, watch, write down."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, TypedDict

import msgspec

from breakeven.engines.metrics import Scraper
from breakeven.engines.monitor import Monitor
from breakeven.errors import RunError
from breakeven.levels import duration, plan_levels, stop_rule
from breakeven.load.client import Client
from breakeven.load.closed import ClosedLoop, warm_up
from breakeven.load.cost import CostMeter
from breakeven.load.open import OpenLoop
from breakeven.load.pace import due_times
from breakeven.load.plan import LevelRequests, PlannedRequest, TraceRequests
from breakeven.load.prompts import PromptSet
from breakeven.load.trace import TraceRequest
from breakeven.load.window import Window
from breakeven.measure.arrivals import ArrivalTable
from breakeven.measure.level import LevelSummary, summarize_level
from breakeven.measure.throughput import mean_latency_ns, window_throughput
from breakeven.options import BenchOptions
from breakeven.records import ClientCost, LevelPlan, LevelRecord, Phase, RequestRecord
from breakeven.report.live import Live
from breakeven.report.table import level_line
from breakeven.runs import RunWriter

__all__ = ["Sweep"]

#: The most of a level's budget that its warm-up may take.
_WARM_UP_SHARE = 0.25
#: Connections that stand open when an open loop starts.
_FIRST_CONNECTIONS = 64


class _Around(TypedDict):
    """What both loops are told of their window."""

    ramp: bool
    is_precise: Callable[[int], Awaitable[bool]]
    on_open: Callable[[], None]
    on_close: Callable[[], None]
    heard_ns: Callable[[], int]


class Sweep:
    """Runs the levels of a run with one client.

    Args:
        options: what was asked for.
        prompts: what is sent.
        trace: what is sent when, for levels that follow a trace.
        writer: where records go.
        live: where progress is shown.
        shared_cores: how many cores client and server share; None where the server runs elsewhere.
        planned_s: how long the run may take.
        max_in_flight: requests that can run at once, for levels that set no bound.
        ceiling: chunks a second that this client can take, None where that is not known.
        is_alive: whether the server still answers; asked (in a thread) where a level ended in failures.

    `record` is the client's callback for records; `summaries` holds the levels that are over, `lost` whether the sweep
    ended because the server was gone.
    """

    def __init__(
        self,
        options: BenchOptions,
        prompts: PromptSet,
        trace: list[TraceRequest] | None,
        writer: RunWriter,
        live: Live,
        *,
        shared_cores: int | None,
        planned_s: float,
        max_in_flight: int,
        ceiling: float | None,
        is_alive: Callable[[], bool],
    ) -> None:
        self._options, self._prompts, self._trace = options, prompts, trace
        self._writer, self._live = writer, live
        self._shared_cores, self._planned_s, self._max_in_flight = shared_cores, planned_s, max_in_flight
        self._ceiling, self._is_alive = ceiling, is_alive
        self._window: Window | None = None
        self._levels = len(plan_levels(options, trace))
        self._done = 0
        self._records: list[RequestRecord] = []
        # Not from the seed: a second run with the same seed must find no cache either.
        self._tag = secrets.token_hex(4) if options.unique else None
        self._task: asyncio.Task[Any] | None = None
        self._failure: RunError | None = None
        self.summaries: list[LevelSummary] = []
        self.lost = False

    def record(self, record: RequestRecord) -> None:
        """Takes a finished request's record. One that can't be written ends the sweep: `run` raises why."""
        self._records.append(record)
        try:
            self._writer.add_request(record)
        except RunError as error:
            self._failure = self._failure or error
            if self._task is not None:
                self._task.cancel()

    async def run(self, client: Client, levels: Sequence[LevelPlan], scraper: Scraper) -> None:
        """Runs these levels, or as many as the server lives to see. Cancelling it writes down the one it was in."""
        self._task = asyncio.current_task()
        self._began_s = time.monotonic()
        share = len(levels) / self._levels  # of the budget: the rest went to levels that are done
        self._ends_s = self._began_s + (self._options.budget_s or math.inf) * share
        try:
            for level in levels:
                await self._run_level(client, level, scraper)
                if self.lost:
                    return
                self._done += 1
        except asyncio.CancelledError:
            if self._failure is not None:
                raise self._failure from None
            raise

    async def _run_level(self, client: Client, level: LevelPlan, scraper: Scraper) -> None:
        self._records, self._window, self._level_began_s = [], None, time.monotonic()
        options, monitor = self._options, Monitor(scraper)
        ends_s = time.monotonic() + (self._ends_s - time.monotonic()) / (self._levels - level.index)
        requests = LevelRequests(level, self._prompts, seed=options.seed, tag=self._tag)
        width = level.concurrency or min(_FIRST_CONNECTIONS, self._most_in_flight(level))
        display = asyncio.create_task(self._display(client, level))
        try:
            await client.connect(width)
            limit_s = _WARM_UP_SHARE * (ends_s - time.monotonic())
            await warm_up(requests, client.send, options.warmup, level.concurrency or 1, limit_s=limit_s)
            budget_s = max(0.0, ends_s - time.monotonic()) if options.budget_s else None
            await self._measure(client, level, self._loop(client, level, requests, budget_s, monitor), monitor)
        finally:
            display.cancel()

    def _loop(
        self, client: Client, level: LevelPlan, requests: LevelRequests, budget_s: float | None, monitor: Monitor
    ) -> ClosedLoop | OpenLoop:
        options, stop = self._options, stop_rule(self._options, budget_s)
        ramp = options.ramp and level.mode != "trace"
        around: _Around = {
            "ramp": ramp,
            "is_precise": lambda opened_ns: self._is_precise(client, level, opened_ns),
            "on_open": monitor.open,
            "on_close": monitor.close if ramp else lambda: None,
            "heard_ns": lambda: client.heard_ns,
        }
        loop: ClosedLoop | OpenLoop
        if level.mode == "closed":
            loop = ClosedLoop(level, requests, client.send, client.clock, stop, **around)
        else:
            due, rate, next_request = self._schedule(level, requests)
            bound = self._most_in_flight(level)
            loop = OpenLoop(
                due, next_request, client.send, client.clock, stop, rate=rate, max_in_flight=bound, **around
            )
        self._window = loop.window
        return loop

    def _schedule(
        self, level: LevelPlan, requests: LevelRequests
    ) -> tuple[Iterable[float], float, Callable[[Phase], PlannedRequest]]:
        """When an open loop's requests are due, how many a second that are, and where the next one comes from."""
        seed, trace = self._options.seed, self._trace
        if trace is None:
            return due_times(level.rate, level.arrivals, seed=seed), level.rate, requests.next
        own = self._prompts if self._options.prompts else None
        rate = len(trace) / max(trace[-1].at_s / level.speed, 1.0)
        sent = TraceRequests(level, trace, own, seed=seed, tag=self._tag)
        return (request.at_s / level.speed for request in trace), rate, sent.next

    def _most_in_flight(self, level: LevelPlan) -> int:
        return level.max_in_flight or self._max_in_flight

    async def _measure(self, client: Client, level: LevelPlan, loop: ClosedLoop | OpenLoop, monitor: Monitor) -> None:
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
            origin_ns, times = client.origin_ns, loop.window.times
            record = LevelRecord(
                plan=level,
                started_ns=times.started_ns - origin_ns,
                opened_ns=times.opened_ns - origin_ns if times.opened_ns else None,
                closed_ns=times.closed_ns - origin_ns if times.closed_ns else None,
                ended_ns=times.ended_ns - origin_ns,
                ended_by=times.ended_by,
                ramp_limited=times.ramp_limited,
                client=self._cost(meter, client.chunks - chunks, client.kernel_clock.steps - steps),
                samples=monitor.samples(origin_ns),
                counters=monitor.counters(),
                spec=msgspec.to_builtins(monitor.spec()),
            )
            self._writer.add_level(record)
            summary = summarize_level(record, self._records, shared_cores=self._shared_cores)
            self.summaries.append(summary)
            self._live.say(level_line(summary))

    async def _look_for_server(self, window: Window) -> None:
        """Notes in the window's times that the server is gone, where a level ended as if it were."""
        is_doubtful = window.failures or window.times.ended_by == "watchdog"
        if is_doubtful and not await asyncio.to_thread(self._is_alive):
            self.lost, window.times.ended_by = True, "lost"

    def _cost(self, meter: CostMeter, chunks: int, clock_steps: int) -> ClientCost:
        return msgspec.structs.replace(meter.cost(chunks, clock_steps), ceiling_chunks_per_s=self._ceiling)

    async def _is_precise(self, client: Client, level: LevelPlan, opened_ns: int) -> bool:
        await client.caught_up()
        opened_ns, now_ns = opened_ns - client.origin_ns, client.clock.now_ns() - client.origin_ns
        ended = [(record.sent_ns, record.arrivals) for record in self._records if record.sent_ns is not None]
        table = ArrivalTable([*ended, *client.partial(level.index)])
        value, interval = window_throughput(table, opened_ns, now_ns, mean_latency_ns(self._records))
        return interval is not None and (interval.high - interval.low) / 2 <= self._options.precision * value

    async def _display(self, client: Client, level: LevelPlan) -> None:
        """Draws the live line each second; the rate is that of the last few seconds."""
        if self._options.quiet:
            return
        history: deque[tuple[int, int]] = deque(maxlen=4)
        where = f"level {level.index + 1}/{self._levels}  {level.name}  max-tokens={level.max_tokens}"
        while True:
            await client.caught_up()
            history.append((client.clock.now_ns(), client.tokens_so_far()))
            (then_ns, then), (now_ns, now) = history[0], history[-1]
            rate = (now - then) / ((now_ns - then_ns) / 1e9) if now_ns > then_ns else 0.0
            ended = sum(record.phase != "warmup" for record in self._records)
            stage = self._window.stage if self._window else "warm-up"
            self._live.update(
                f"{where}  {stage}  {client.in_flight} in flight  {ended} done  {rate:.0f} tok/s"
                f"  about {duration(self._seconds_left(level))} left"
            )
            await asyncio.sleep(1.0)

    def _seconds_left(self, level: LevelPlan) -> float:
        """Until the run ends: by the levels so far, before there is one by the plan, with a budget by that."""
        now_s = time.monotonic()
        if self._options.budget_s is not None:
            return self._ends_s - now_s
        if not self._done:
            return max(self._planned_s - (now_s - self._began_s), 0.0)
        mean_s = (self._level_began_s - self._began_s) / self._done
        return max((self._levels - level.index) * mean_s - (now_s - self._level_began_s), 0.0)


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
