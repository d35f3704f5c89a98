"""The window of a level: when it opens and closes, and when all that was sent inside it has ended.

    ramp      the server fills up; the loop says when it has
    window    opens then; closes when measuring stops
    drain     the load is kept up until every request sent inside the window has ended; then the rest is cancelled

What kind of load fills it is the business of `closed` and `open`. Knows nothing of HTTP or of statistics: requests
are awaitables, precision is asked of `is_precise`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Literal, NamedTuple

from msgspec import Struct

from breakeven.clock import Clock
from breakeven.records import Phase

__all__ = ["FIRST_LOOK_S", "NO_HOOKS", "EndedBy", "Hooks", "LevelTimes", "StopRule", "Window"]

EndedBy = Literal[
    "requests", "duration", "precision", "max_seconds", "budget", "trace", "failures", "watchdog", "lost", "interrupted"
]

#: Precision is looked at only here, and then at each doubling: stopping at the first narrow moment would cut the
#: coverage of a 95 % interval to 70-90 % (simulated, see docs/statistics.md).
FIRST_LOOK_S = 45.0
#: How often the watchdog looks at least.
_WATCH_S = 0.5


class StopRule(Struct, frozen=True, kw_only=True):
    """When a level's window closes: whichever of these comes first.

    `requests`: so many were sent inside the window and one more is to be sent. `duration_s`, `max_seconds`: length of
    the window. `precise`: whether to look at precision. `ramp_limit_s`: the window opens then at the latest.
    `turnovers`: the window lasts so many times the ramp's longest request, and `turnovers_least_s` at least.
    `budget_s`: ramp, window and drain together, the drain taken to be as long as the ramp's longest request (without
    a ramp: as the longest so far); a ramp that takes all of it leaves no window. `watchdog_s`: the whole level ends,
    running requests and all, when requests are running and the server has sent nothing for so long.
    """

    requests: int | None = None
    duration_s: float | None = None
    max_seconds: float | None = None
    precise: bool = False
    turnovers: float | None = None
    turnovers_least_s: float = 5.0
    ramp_limit_s: float = 600.0
    budget_s: float | None = None
    watchdog_s: float | None = None


class LevelTimes(Struct, kw_only=True):
    """When a level's parts began and ended (ns of the clock); the window is None with `--no-ramp`."""

    started_ns: int
    opened_ns: int | None = None
    closed_ns: int | None = None
    ended_ns: int = 0
    ended_by: EndedBy = "interrupted"
    ramp_limited: bool = False


async def _never(_: int) -> bool:
    return False


def _nothing() -> None:
    pass


class Hooks(NamedTuple):
    """What a level's window asks and tells.

    `is_precise`: asked whether the interval of the throughput since the given moment (ns) is narrow enough. `on_open`,
    `on_close`: told that the window opens (without a ramp: at the start) and closes. `heard_ns`: asked when the server
    was last heard, for the watchdog.
    """

    is_precise: Callable[[int], Awaitable[bool]] = _never
    on_open: Callable[[], None] = _nothing
    on_close: Callable[[], None] = _nothing
    heard_ns: Callable[[], int] = int


#: For a load that nobody watches.
NO_HOOKS = Hooks()


class Window:
    """Runs one level's window around a load.

    Args:
        clock: the clock of the running event loop.
        stop: when the window closes.
        ramp: False opens it at once; every request counts then, and `times` has no window.
        failures: so many failures in a row close it.
        hooks: what it asks and tells.
    """

    def __init__(self, clock: Clock, stop: StopRule, *, ramp: bool, failures: int, hooks: Hooks) -> None:
        self._clock, self._stop, self._ramp, self._failures_limit, self._hooks = clock, stop, ramp, failures, hooks
        self.times = LevelTimes(started_ns=clock.now_ns())
        self._opened, self._closed, self._drained = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._longest_s = 0.0
        self._measured = self._measuring = self._running = 0
        self._idle_ns = self._silent_ns = self.times.started_ns
        self._timers: list[asyncio.TimerHandle] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.failures = 0

    async def run(self, load: Callable[[], Coroutine[Any, Any, None]]) -> LevelTimes:
        """Runs a load from ramp to drain. Cancelling it abandons all requests; `times` still says how far it came.

        Args:
            load: sends requests by `follow`, in the phase that `admit` gives, in tasks that it starts with `spawn`.
                What of it is running when the window has drained is cancelled.
        """
        self.times.started_ns = self._idle_ns = self._silent_ns = self._clock.now_ns()
        is_whole = False
        try:
            async with asyncio.TaskGroup() as self._group:
                self.spawn(self._look())
                self.spawn(self._watch())
                if self._ramp:
                    self._after(min(self._stop.ramp_limit_s, self._budget_left_s()), self.open, True)
                else:
                    self.open()
                self.spawn(load())
                await self._drained.wait()
                is_whole = True
                for task in self._tasks:
                    task.cancel()
        finally:
            self.close("interrupted")
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

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts a task that ends with the level."""
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def admit(self) -> Phase | None:
        """The phase of a request released now; None where none is to be released any more."""
        if not self._opened.is_set() and not self._closed.is_set():
            return "ramp"
        if self._measured == self._stop.requests:
            self.close("requests")
        if not self._ramp and self._budget_left_s() <= 0:
            self.close("budget")
        if not self._closed.is_set():
            return "measured"
        return "drain" if self._ramp and self._measuring else None

    async def follow(self, phase: Phase, request: Awaitable[bool]) -> bool:
        """Awaits a request of a phase; returns whether all of its answer came."""
        measured = phase == "measured"
        self._measured += measured
        self._measuring += measured
        began_ns = self._clock.now_ns()
        if not self._running:  # until now the server owed nothing: that time is no silence of its
            self._silent_ns = max(self._silent_ns, self._hooks.heard_ns()) + began_ns - self._idle_ns
        self._running += 1
        try:
            came_through = await request
        finally:
            self._measuring -= measured
            self._running -= 1
            self._idle_ns = self._clock.now_ns()
            self._drain()
        if not self._ramp or not self._opened.is_set():
            self._longest_s = max(self._longest_s, (self._clock.now_ns() - began_ns) / 1e9)
        self.failures = 0 if came_through else self.failures + 1
        if self.failures >= self._failures_limit:
            self.close("failures")
        return came_through

    def open(self, limited: bool = False) -> None:
        """Opens the window; `limited` says that the ramp was not over. Only the first call counts."""
        if self._opened.is_set() or self._closed.is_set():
            return
        self._opened.set()
        self._cancel_timers()
        self.times.ramp_limited = limited
        if self._ramp:
            self.times.opened_ns = self._clock.now_ns()
        self._hooks.on_open()
        self._after(self._stop.duration_s, self.close, "duration")
        self._after(self._stop.max_seconds, self.close, "max_seconds")
        if self._stop.turnovers is not None:
            lasts_s = max(self._stop.turnovers_least_s, self._stop.turnovers * self._longest_s)
            self._after(lasts_s, self.close, "duration")
        left_s = self._budget_left_s()
        if left_s <= 0:
            self.close("budget")
        elif left_s < math.inf:
            self._after(left_s, self.close, "budget")

    def close(self, why: EndedBy) -> None:
        """Closes the window, for the first reason that is given."""
        if self._closed.is_set():
            return
        self._closed.set()
        self.times.ended_by = why
        if self.times.opened_ns is not None:
            self.times.closed_ns = self._clock.now_ns()
        self._hooks.on_close()
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
            if not self._closed.is_set() and await self._hooks.is_precise(self.times.opened_ns):
                self.close("precision")
            look_s *= 2

    async def _watch(self) -> None:
        """Ends the level, drain and all, once the server owes an answer and has been silent for too long."""
        if self._stop.watchdog_s is None:
            return
        while True:
            heard_ns = max(self._hooks.heard_ns(), self._silent_ns)
            left_s = self._stop.watchdog_s - (self._clock.now_ns() - heard_ns) / 1e9
            if self._running and left_s <= 0:
                break
            await asyncio.sleep(min(max(left_s, _WATCH_S), self._stop.watchdog_s))
        self.close("watchdog")
        self.times.ended_by = "watchdog"  # in the drain, too: what it waits for will not come
        self._drained.set()

    def _cancel_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    def _after(self, delay_s: float | None, call: Callable[..., None], *args: object) -> None:
        if delay_s is not None:
            self._timers.append(asyncio.get_running_loop().call_later(delay_s, call, *args))
