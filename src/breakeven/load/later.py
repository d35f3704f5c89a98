"""Work that can wait: done in slices of at most a millisecond between two looks at the sockets."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

__all__ = ["Later"]

#: One slice. The event loop polls its sockets between slices, so this bounds what parsing adds to a read's delay.
SLICE_NS = 1_000_000

#: A job works until the given `perf_counter_ns` and returns whether it is done.
Job = Callable[[int], bool]


class Later:
    """Two queues of jobs: `urgent` ones (has a response ended?) go before all others (parse its events)."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._urgent: deque[Job] = deque()
        self._jobs: deque[Job] = deque()
        self._scheduled = False

    def add(self, job: Job, *, urgent: bool = False) -> None:
        """Queues a job; it runs in this turn of the loop at the earliest."""
        (self._urgent if urgent else self._jobs).append(job)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._slice)

    async def drained(self) -> None:
        """Returns when all that was queued before this call has been done."""
        done = self._loop.create_future()

        def mark(_: int) -> bool:
            if not done.done():
                done.set_result(None)
            return True

        self.add(mark)
        await done

    def _slice(self) -> None:
        until_ns = time.perf_counter_ns() + SLICE_NS
        try:
            while queue := self._urgent or self._jobs:
                job = queue.popleft()
                if not job(until_ns):
                    queue.appendleft(job)
                if time.perf_counter_ns() >= until_ns:
                    break
        finally:  # a job that raises is reported by the loop; the others go on
            self._scheduled = bool(self._urgent or self._jobs)
            if self._scheduled:
                self._loop.call_soon(self._slice)
