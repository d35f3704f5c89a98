"""A closed loop: C slots, each sending its next request when its last one has ended.

    ramp      slot i's first request is capped at a seeded share of max-tokens, so that starts and ends are spread
    window    opens when every slot has ended its ramp request; closes when measuring stops
    drain     slots are refilled until every request sent inside the window has ended; then the rest is cancelled

Knows nothing of HTTP or of statistics: requests go out through `send`, precision is asked of `is_precise`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Literal

from msgspec import Struct

from breakeven.clock import Clock
from breakeven.load.plan import LevelRequests, PlannedRequest
from breakeven.records import LevelPlan, Phase

__all__ = ["FIRST_LOOK_S", "ClosedLoop", "LevelTimes", "StopRule", "warm_up"]

EndedBy = Literal["requests", "duration", "precision", "max_seconds", "budget", "failures", "interrupted"]

#: Sends a request and returns when it ended, with whether all of it came; cancelling it abandons the request.
Send = Callable[[PlannedRequest], Awaitable[bool]]

#: Precision is looked at only here, and then at each doubling: stopping at the first narrow moment would cut the
#: coverage of a 95 % interval to 70-90 % (simulated, see docs/statistics.md).
FIRST_LOOK_S = 45.0
#: After a failure a slot waits, doubling up to the second value, so that a dead server is not hammered.
_BACK_OFF_S = (0.05, 1.0)
#: Slots that start in one turn of the event loop. A thousand would take a tenth of a second, in which the answers to
#: the first would pile up unread: chunks that one read brings count as one arrival.
_STARTS_A_TURN = 8


class StopRule(Struct, frozen=True, kw_only=True):
    """When a level's window closes: whichever of these comes first.

    `requests`: so many were sent inside the window and a slot is free for one more. `duration_s`, `max_seconds`:
    length of the window. `precise`: whether to look at precision. `ramp_limit_s`: the window opens then at the
    latest. `budget_s`: ramp, window and drain together, the drain taken to be as long as the ramp's longest request
    (without a ramp: as the longest so far); a ramp that takes all of it leaves no window.
    """

    requests: int | None = None
    duration_s: float | None = None
    max_seconds: float | None = None
    precise: bool = False
    ramp_limit_s: float = 600.0
    budget_s: float | None = None


class LevelTimes(Struct, kw_only=True):
    """When a level's parts began and ended (ns of the clock); the window is None with `--no-ramp`."""

    started_ns: int
    opened_ns: int | None = None
    closed_ns: int | None = None
    ended_ns: int = 0
    ended_by: EndedBy = "interrupted"
    ramp_limited: bool = False


async def warm_up(
    requests: LevelRequests, send: Send, count: int, concurrency: int, *, limit_s: float = math.inf
) -> None:
    """Sends `count` requests that no number uses, never more than `concurrency` at once.

    None is sent after `limit_s`, nor by whoever saw one fail: the level itself will show what is wrong.
    """
    left, loop = iter(range(count)), asyncio.get_running_loop()
    until_s = loop.time() + limit_s

    async def worker() -> None:
        for _ in left:
            if loop.time() >= until_s or not await send(requests.next("warmup")):
                return

    async with asyncio.TaskGroup() as group:
        for _ in range(min(count, concurrency)):
            group.create_task(worker())


class ClosedLoop:
    """Runs one level.

    Args:
        level: the load.
        requests: where the next request of a phase comes from.
        send: how requests go out.
        clock: the clock of the running event loop.
        stop: when the window closes.
        ramp: False starts all slots at once; every request counts then, and there is no window.
        is_precise: whether the interval of the throughput since the given moment (ns) is narrow enough.
        on_open: called when the window opens (without a ramp: at the start).
        on_close: called when it closes.
    """

    def __init__(
        self,
        level: LevelPlan,
        requests: LevelRequests,
        send: Send,
        clock: Clock,
        stop: StopRule,
        *,
        ramp: bool = True,
        is_precise: Callable[[int], Awaitable[bool]],
        on_open: Callable[[], None] = lambda: None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._level, self._requests, self._send, self._clock, self._stop = level, requests, send, clock, stop
        self._ramp, self._is_precise, self._on_open, self._on_close = ramp, is_precise, on_open, on_close
        self.times = LevelTimes(started_ns=clock.now_ns())
        self._opened, self._closed, self._drained = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._ramping = level.concurrency
        self._longest_s = 0.0
        self._measured = 0
        self._measuring = 0
        self._failures = 0
        self._timers: list[asyncio.TimerHandle] = []

    async def run(self) -> LevelTimes:
        """Ramp, window, drain. Cancelling it abandons all requests; `times` then still says how far it came."""
        self.times.started_ns = self._clock.now_ns()
        is_whole = False
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._look())]
                if self._ramp:
                    self._after(min(self._stop.ramp_limit_s, self._budget_left_s()), self._open, True)
                else:
                    self._open()
                for index in range(self._level.concurrency):
                    tasks.append(group.create_task(self._slot(index)))
                    if index % _STARTS_A_TURN == 0:
                        await asyncio.sleep(0)
                await self._drained.wait()
                is_whole = True
                for task in tasks:
                    task.cancel()
        finally:
            self._close("interrupted")
            if not is_whole:  # a drain that is cut short, too, leaves out the longest latencies
                self.times.ended_by = "interrupted"
            self._cancel_timers()
            self.times.ended_ns = self._clock.now_ns()
        return self.times

    @property
    def stage(self) -> str:
        """The part of the level that is running, in a word."""
        if self._closed.is_set():
            return "drain"
        return "window" if self._opened.is_set() else "ramp"

    async def _slot(self, index: int) -> None:
        if self._ramp:
            await self._request("ramp", slot=index)
            self._ramping -= 1
            if not self._ramping:
                self._open()
        while phase := self._phase():
            await self._request(phase)

    def _phase(self) -> Phase | None:
        """The phase of a request released now; None where none is to be released."""
        if not self._opened.is_set() and not self._closed.is_set():
            return "ramp"
        if self._measured == self._stop.requests:
            self._close("requests")
        if not self._ramp and self._budget_left_s() <= 0:
            self._close("budget")
        if not self._closed.is_set():
            return "measured"
        return "drain" if self._ramp and self._measuring else None

    async def _request(self, phase: Phase, *, slot: int | None = None) -> None:
        measured = phase == "measured"
        self._measured += measured
        self._measuring += measured
        began_ns = self._clock.now_ns()
        try:
            came_through = await self._send(self._requests.next(phase, slot=slot))
        finally:
            self._measuring -= measured
            self._drain()
        if not self._ramp or not self._opened.is_set():
            self._longest_s = max(self._longest_s, (self._clock.now_ns() - began_ns) / 1e9)
        await self._back_off(came_through)

    async def _back_off(self, came_through: bool) -> None:
        self._failures = 0 if came_through else self._failures + 1
        if self._failures >= max(20, 2 * self._level.concurrency):
            self._close("failures")
        if self._failures:
            shortest, longest = _BACK_OFF_S
            await asyncio.sleep(min(longest, shortest * 2.0 ** min(self._failures, 10)))

    def _open(self, limited: bool = False) -> None:
        if self._opened.is_set() or self._closed.is_set():
            return
        self._opened.set()
        self._cancel_timers()
        self.times.ramp_limited = limited
        if self._ramp:
            self.times.opened_ns = self._clock.now_ns()
        self._on_open()
        self._after(self._stop.duration_s, self._close, "duration")
        self._after(self._stop.max_seconds, self._close, "max_seconds")
        left_s = self._budget_left_s()
        if left_s <= 0:
            self._close("budget")
        elif left_s < math.inf:
            self._after(left_s, self._close, "budget")

    def _close(self, why: EndedBy) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        self.times.ended_by = why
        if self.times.opened_ns is not None:
            self.times.closed_ns = self._clock.now_ns()
        self._on_close()
        self._drain()

    def _budget_left_s(self) -> float:
        """What the budget leaves for the window; a request sent at its end still ends within the budget."""
        if self._stop.budget_s is None:
            return math.inf
        return self._stop.budget_s - (self._clock.now_ns() - self.times.started_ns) / 1e9 - self._longest_s

    def _drain(self) -> None:
        if self._closed.is_set() and not self._measuring:
            self._drained.set()

    async def _look(self) -> None:
        await self._opened.wait()
        if not self._stop.precise or self.times.opened_ns is None:
            return
        look_s = FIRST_LOOK_S
        while not self._closed.is_set():
            elapsed_s = (self._clock.now_ns() - self.times.opened_ns) / 1e9
            await asyncio.sleep(max(0.0, look_s - elapsed_s))
            if not self._closed.is_set() and await self._is_precise(self.times.opened_ns):
                self._close("precision")
            look_s *= 2

    def _cancel_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    def _after(self, delay_s: float | None, call: Callable[..., None], *args: object) -> None:
        if delay_s is not None:
            self._timers.append(asyncio.get_running_loop().call_later(delay_s, call, *args))
