"""An open loop: requests go out when they are due, whether the server keeps up or not.

The schedule is absolute: a late request goes at once and its lateness is recorded, the next is due when it was due
anyway. Ramp: the window opens when every request that was sent before the first answer was whole has ended; from then
on the server holds as many requests as it holds under this load.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from breakeven.clock import Clock
from breakeven.load.plan import PlannedRequest
from breakeven.load.window import NO_HOOKS, Hooks, LevelTimes, StopRule, Window
from breakeven.records import Phase

__all__ = ["OpenLoop"]

#: Sends a request that was due at the given moment (ns); returns when it ended, with whether all of it came.
SendDue = Callable[[PlannedRequest, int], Awaitable[bool]]

#: Failures in a row that end a level: those of so many seconds, but no fewer than the second figure.
_FAILING = (5.0, 20)
#: The shortest sleep before a request is due. uvloop's timers count milliseconds: less would not wait but spin.
_SHORTEST_S = 0.001


class OpenLoop:
    """Runs one level.

    Args:
        due: when requests are due, in seconds after the start, ascending; where it ends, the level ends.
        next_request: the next request of a phase.
        send: how requests go out.
        clock: the clock of the running event loop.
        stop: when the window closes.
        rate: how many are due a second, about.
        max_in_flight: so many are running at most; further ones wait, and are late.
        ramp: False has every request count, and no window.
        hooks: what the window asks and tells.
    """

    def __init__(
        self,
        due: Iterable[float],
        next_request: Callable[[Phase], PlannedRequest],
        send: SendDue,
        clock: Clock,
        stop: StopRule,
        *,
        rate: float,
        max_in_flight: int,
        ramp: bool = True,
        hooks: Hooks = NO_HOOKS,
    ) -> None:
        self._due, self._next, self._send, self._clock = due, next_request, send, clock
        self._room = asyncio.Semaphore(max_in_flight)
        self._sent = self._ended = 0
        self._first_wave: int | None = None
        self._left_of_wave = 0
        self.window = Window(clock, stop, ramp=ramp, failures=max(_FAILING[1], round(_FAILING[0] * rate)), hooks=hooks)

    async def run(self) -> LevelTimes:
        """Ramp, window, drain. Cancelling it abandons all requests; the window's `times` say how far it came."""
        return await self.window.run(self._release)

    async def _release(self) -> None:
        start_ns = self._clock.now_ns()
        for at_s in self._due:
            due_ns = start_ns + round(at_s * 1e9)
            await self._until(due_ns)
            await self._room.acquire()
            phase = self.window.admit()
            if phase is None or (phase == "drain" and self._drained_enough()):
                return
            self.window.spawn(self._request(self._sent, phase, due_ns))
            self._sent += 1
            await asyncio.sleep(0)  # of requests that are due together, each is sent before the next is made
        self.window.close("trace")

    async def _until(self, due_ns: int) -> None:
        # Again and again, since a loop's timers may be a little early.
        while (left_ns := due_ns - self._clock.now_ns()) > 0:
            await asyncio.sleep(max(left_ns / 1e9, _SHORTEST_S))

    async def _request(self, number: int, phase: Phase, due_ns: int) -> None:
        try:
            came_through = await self.window.follow(phase, self._send(self._next(phase), due_ns))
        finally:
            self._room.release()
        self._note_end(number, came_through)

    def _note_end(self, number: int, came_through: bool) -> None:
        self._ended += 1
        if self._first_wave is None and came_through:  # what is refused at once fills no server
            self._first_wave, self._left_of_wave = self._sent, self._sent - self._ended
        elif self._first_wave is not None and number < self._first_wave:
            self._left_of_wave -= 1
        if self._first_wave is not None and not self._left_of_wave:
            self.window.open()

    def _drained_enough(self) -> bool:
        """Whether the load was kept up for as long again as the window: a backlog may never come down under it."""
        times = self.window.times
        if times.opened_ns is None or times.closed_ns is None:
            return True
        return self._clock.now_ns() - times.closed_ns > times.closed_ns - times.opened_ns
