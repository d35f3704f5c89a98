"""An engine's gauges and counters over a window: read once a second, beside the event loop that makes the load."""

from __future__ import annotations

import asyncio
from typing import Protocol

from breakeven.engines.metrics import Scrape
from breakeven.records import EngineSample

__all__ = ["Monitor"]

_EVERY_S = 1.0
_COUNTERS = ("preemptions", "drafts", "draft_tokens", "accepted", "generation_tokens", "prompt_tokens")


class _Scraper(Protocol):
    def scrape(self) -> Scrape | None: ...


class Monitor:
    """Reads the engine from `open` to `close`; then `samples`, `counters` and `per_position` hold the window.

    Reading happens in a thread: the event loop must not wait for a metrics page.
    """

    def __init__(self, scraper: _Scraper | None) -> None:
        self._scraper = scraper
        self._scrapes: list[Scrape] = []
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Starts to read, now and then each second."""
        if self._scraper is not None:
            self._task = asyncio.create_task(self._watch(self._scraper))

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
        """The growth of each counter over the window. Empty if one shrank: the engine was restarted."""
        if len(self._scrapes) < 2:
            return {}
        first, last = self._scrapes[0], self._scrapes[-1]
        grown: dict[str, float] = {}
        for name in _COUNTERS:
            before, after = getattr(first, name), getattr(last, name)
            if before is not None and after is not None:
                grown[name] = after - before
        if any(growth < 0 for growth in grown.values()):
            return {}
        if last.acceptance_length is not None:
            grown["acceptance_length"] = last.acceptance_length
        return grown

    def per_position(self) -> list[float]:
        """Accepted draft tokens at each draft position over the window."""
        if not self.counters() or not self._scrapes[-1].accepted_per_pos:
            return []
        first, last = self._scrapes[0].accepted_per_pos, self._scrapes[-1].accepted_per_pos
        before = (*first, *[0.0] * (len(last) - len(first)))
        return [b - a for a, b in zip(before, last, strict=True)]

    async def _watch(self, scraper: _Scraper) -> None:
        last = False
        while not last:
            last = self._closing.is_set()
            scrape = await asyncio.to_thread(scraper.scrape)
            if scrape is not None:
                self._scrapes.append(scrape)
            if not last:
                await _either(self._closing, _EVERY_S)


async def _either(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
