"""A closed loop: C slots, each sending its next request when its last one has ended.

Ramp: slot i's first request is capped at a seeded share of max-tokens, so that starts and ends are spread; the window
opens when every slot has ended its ramp request.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

from breakeven.clock import Clock
from breakeven.load.plan import LevelRequests, PlannedRequest
from breakeven.load.window import NO_HOOKS, Hooks, LevelTimes, StopRule, Window
from breakeven.records import LevelPlan

__all__ = ["ClosedLoop", "warm_up"]

#: Sends a request and returns when it ended, with whether all of it came; cancelling it abandons the request.
Send = Callable[[PlannedRequest], Awaitable[bool]]

#: After a failure a slot waits, doubling up to the second value, so that a dead server is not hammered.
_BACK_OFF_S = (0.05, 1.0)
#: Slots that start in one turn of the event loop. A thousand would take a tenth of a second, in which the answers to
#: the first would pile up unread: chunks that one read brings count as one arrival.
_STARTS_A_TURN = 8


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
        hooks: what the window asks and tells.
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
        hooks: Hooks = NO_HOOKS,
    ) -> None:
        self._level, self._requests, self._send, self._ramp = level, requests, send, ramp
        self._ramping = level.concurrency
        self.window = Window(clock, stop, ramp=ramp, failures=max(20, 2 * level.concurrency), hooks=hooks)

    async def run(self) -> LevelTimes:
        """Ramp, window, drain. Cancelling it abandons all requests; the window's `times` say how far it came."""
        return await self.window.run(self._fill)

    async def _fill(self) -> None:
        for index in range(self._level.concurrency):
            self.window.spawn(self._slot(index))
            if index % _STARTS_A_TURN == 0:
                await asyncio.sleep(0)

    async def _slot(self, index: int) -> None:
        window = self.window
        if self._ramp:
            await self._back_off(await window.follow("ramp", self._send(self._requests.next("ramp", slot=index))))
            self._ramping -= 1
            if not self._ramping:
                window.open()
        while phase := window.admit():
            await self._back_off(await window.follow(phase, self._send(self._requests.next(phase))))

    async def _back_off(self, came_through: bool) -> None:
        if not came_through:
            shortest, longest = _BACK_OFF_S
            await asyncio.sleep(min(longest, shortest * 2.0 ** min(self.window.failures, 10)))
