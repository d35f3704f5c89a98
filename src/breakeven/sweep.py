"""The levels of a run, one after the other: load, watch, write down."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from breakeven.engines.metrics import Scraper
from breakeven.engines.monitor import Monitor
from breakeven.errors import RunError
from breakeven.load.client import Client
from breakeven.load.closed import FIRST_LOOK_S, ClosedLoop, StopRule, warm_up
from breakeven.load.cost import CostMeter
from breakeven.load.plan import LevelRequests
from breakeven.load.prompts import PromptSet
from breakeven.measure.arrivals import ArrivalTable
from breakeven.measure.level import LevelSummary, summarize_level
from breakeven.measure.throughput import mean_latency_ns, window_throughput
from breakeven.options import BenchOptions
from breakeven.records import LevelPlan, LevelRecord, RequestRecord
from breakeven.report.live import Live
from breakeven.report.table import level_line
from breakeven.runs import RunWriter

__all__ = ["Plan", "Sweep", "duration", "plan_levels", "planned_seconds", "stop_rule"]

#: What a precision-driven level may take where nobody said.
DEFAULT_MAX_SECONDS = 240.0
#: The most of a level's budget that its warm-up may take.
_WARM_UP_SHARE = 0.25


def plan_levels(options: BenchOptions) -> list[LevelPlan]:
    """All levels in the order in which they run: each sweep over lengths and concurrencies, `runs` times."""
    loads = [(c, n) for n in options.max_tokens for c in options.concurrency]
    return [
        LevelPlan(index=run * len(loads) + i, run=run, concurrency=concurrency, max_tokens=max_tokens)
        for run in range(options.runs)
        for i, (concurrency, max_tokens) in enumerate(loads)
    ]


def stop_rule(options: BenchOptions, budget_s: float | None = None) -> StopRule:
    """When a level's window closes. Only a window that nothing else bounds is capped without being asked."""
    unbounded = options.requests is None and options.duration_s is None
    return StopRule(
        requests=options.requests,
        duration_s=options.duration_s,
        max_seconds=options.max_seconds or (DEFAULT_MAX_SECONDS if unbounded else None),
        precise=unbounded,
        budget_s=budget_s,
    )


class Plan(NamedTuple):
    """How long a run takes, in seconds: at least, at most, and of that what is around the windows."""

    least_s: float
    most_s: float
    around_s: float


def planned_seconds(options: BenchOptions, first_s: float, per_token_s: float) -> Plan:
    """How long a run takes, from the time one request takes alone.

    Under load requests take longer, by how much is what the run is to find out: `most_s` is a guess too.
    """
    stop = stop_rule(options)
    least = most = around = 0.0
    for level in plan_levels(options):
        alone_s = first_s + per_token_s * level.max_tokens
        around += alone_s * (2 * options.ramp + -(-options.warmup // level.concurrency))
        if stop.requests is not None:
            shortest = longest = alone_s * stop.requests / level.concurrency
        else:
            shortest = longest = stop.duration_s or stop.max_seconds or 0.0
            shortest = min(shortest, FIRST_LOOK_S) if stop.precise else shortest
        least, most = least + shortest, most + longest
    if options.budget_s is not None:
        return Plan(options.budget_s, options.budget_s, around)
    return Plan(least + around, most + around, around)


class Sweep:
    """Runs the levels of a run with one client.

    `record` is the client's callback for records; `summaries` holds the levels that are over.
    """

    def __init__(
        self,
        options: BenchOptions,
        prompts: PromptSet,
        writer: RunWriter,
        live: Live,
        shared_cores: int | None,
        planned_s: float,
    ) -> None:
        self._options, self._prompts, self._writer, self._live = options, prompts, writer, live
        self._shared_cores, self._planned_s = shared_cores, planned_s
        self._loop: ClosedLoop | None = None
        self._levels = len(plan_levels(options))
        self._records: list[RequestRecord] = []
        # Not from the seed: a second run with the same seed must find no cache either.
        self._tag = secrets.token_hex(4) if options.unique else None
        self._task: asyncio.Task[Any] | None = None
        self._failure: RunError | None = None
        self.summaries: list[LevelSummary] = []

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
        """Runs all levels. Cancelling it writes down the level it was in, then raises."""
        self._task = asyncio.current_task()
        self._began_s = time.monotonic()
        self._ends_s = self._began_s + (self._options.budget_s or math.inf)
        try:
            for level in levels:
                await self._run_level(client, level, scraper)
        except asyncio.CancelledError:
            if self._failure is not None:
                raise self._failure from None
            raise

    async def _run_level(self, client: Client, level: LevelPlan, scraper: Scraper) -> None:
        self._records, self._loop, self._level_began_s = [], None, time.monotonic()
        options, monitor = self._options, Monitor(scraper)
        ends_s = time.monotonic() + (self._ends_s - time.monotonic()) / (self._levels - level.index)
        requests = LevelRequests(level, self._prompts, seed=options.seed, tag=self._tag)
        display = asyncio.create_task(self._display(client, level))
        try:
            await client.connect(level.concurrency)
            limit_s = _WARM_UP_SHARE * (ends_s - time.monotonic())
            await warm_up(requests, client.send, options.warmup, level.concurrency, limit_s=limit_s)
            budget_s = max(0.0, ends_s - time.monotonic()) if options.budget_s else None
            await self._measure(client, level, self._closed_loop(client, level, requests, budget_s, monitor), monitor)
        finally:
            display.cancel()

    def _closed_loop(
        self, client: Client, level: LevelPlan, requests: LevelRequests, budget_s: float | None, monitor: Monitor
    ) -> ClosedLoop:
        options = self._options
        self._loop = ClosedLoop(
            level,
            requests,
            client.send,
            client.clock,
            stop_rule(options, budget_s),
            ramp=options.ramp,
            is_precise=lambda opened_ns: self._is_precise(client, level, opened_ns),
            on_open=monitor.open,
            on_close=monitor.close if options.ramp else lambda: None,
        )
        return self._loop

    async def _measure(self, client: Client, level: LevelPlan, loop: ClosedLoop, monitor: Monitor) -> None:
        meter, chunks, steps = CostMeter(), client.chunks, client.kernel_clock.steps
        try:
            async with meter:
                try:
                    with _uncollected():
                        await loop.run()
                finally:
                    await monitor.finished()
                    await client.settled()
        finally:
            origin_ns, times = client.origin_ns, loop.times
            record = LevelRecord(
                plan=level,
                started_ns=times.started_ns - origin_ns,
                opened_ns=times.opened_ns - origin_ns if times.opened_ns else None,
                closed_ns=times.closed_ns - origin_ns if times.closed_ns else None,
                ended_ns=times.ended_ns - origin_ns,
                ended_by=times.ended_by,
                ramp_limited=times.ramp_limited,
                client=meter.cost(client.chunks - chunks, client.kernel_clock.steps - steps),
                samples=monitor.samples(origin_ns),
                counters=monitor.counters(),
                spec=msgspec.to_builtins(monitor.spec()),
            )
            self._writer.add_level(record)
            summary = summarize_level(record, self._records, shared_cores=self._shared_cores)
            self.summaries.append(summary)
            self._live.say(level_line(summary))

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
        where = f"level {level.index + 1}/{self._levels}  C={level.concurrency}  max-tokens={level.max_tokens}"
        while True:
            await client.caught_up()
            history.append((client.clock.now_ns(), client.tokens_so_far()))
            (then_ns, then), (now_ns, now) = history[0], history[-1]
            rate = (now - then) / ((now_ns - then_ns) / 1e9) if now_ns > then_ns else 0.0
            ended = sum(record.phase != "warmup" for record in self._records)
            stage = self._loop.stage if self._loop else "warm-up"
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
        if not level.index:
            return max(self._planned_s - (now_s - self._began_s), 0.0)
        mean_s = (self._level_began_s - self._began_s) / level.index
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


def duration(seconds: float) -> str:
    """Seconds for a person: 45 s, 3 min 20 s, 1 h 05 min."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"
