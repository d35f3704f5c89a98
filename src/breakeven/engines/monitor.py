"""An engine's gauges and counters over a window: read once a second, beside the event loop that makes the load."""

from __future__ import annotations

import asyncio

from breakeven.engines.metrics import Scrape, Scraper, SpecStats, spec_between
from breakeven.records import EngineSample

__all__ = ["Monitor"]

_EVERY_S = 1.0
_COUNTERS = ("preemptions", "generation_tokens", "prompt_tokens")


class Monitor:
    """Reads the engine from `open` to `close`; then `samples`, `counters` and `spec` are those of the window.

    Reading happens in a thread: the event loop must not wait for a metrics page.
    """

    def __init__(self, scraper: Scraper) -> None:
        self._scraper = scraper
        self._scrapes: list[Scrape] = []
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Starts to read, now and then each second."""
        self._task = asyncio.create_task(self._watch())

    def close(self) -> None:
        """Asks for the last reading."""
        self._closing.set()

    async def finished(self) -> None:
        """Returns when the last reading is there."""
        self.close()
        if self._task is not None:
            await self._task

    def samples(self, origin_ns: int) -> list[EngineSample]:
        """The gauges at each reading, times relative to `origin_ns`."""
        return [
            EngineSample(time_ns=s.time_ns - origin_ns, running=s.running, waiting=s.waiting, kv_use=s.kv_use)
            for s in self._scrapes
            if (s.running, s.waiting, s.kv_use) != (None, None, None)
        ]

    def counters(self) -> dict[str, float]:
        """The growth of the engine's counters over the window. Without one that shrank: the engine was restarted."""
        if len(self._scrapes) < 2:
            return {}
        first, last = self._scrapes[0], self._scrapes[-1]
        grown: dict[str, float] = {}
        for name in _COUNTERS:
            before, after = getattr(first, name), getattr(last, name)
            if before is not None and after is not None and after >= before:
                grown[name] = after - before
        return grown

    def spec(self) -> SpecStats | None:
        """Speculation over the window, None where the engine tells nothing of it."""
        return spec_between(self._scrapes[0], self._scrapes[-1]) if len(self._scrapes) >= 2 else None

    async def _watch(self) -> None:
        last = False
        while not last:
            last = self._closing.is_set()
            scrape = await asyncio.to_thread(self._scraper.scrape)
            if scrape is not None:
                self._scrapes.append(scrape)
            elif not self._scrapes:
                return  # an engine that shows nothing at first is not asked each second
            if not last:
                await _either(self._closing, _EVERY_S)


async def _either(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
