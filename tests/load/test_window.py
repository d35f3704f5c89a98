"""The watchdog of a level's window, in virtual time: it ends what waits for a silent server, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from breakeven.clock import VirtualClock, VirtualLoop
from breakeven.load.window import Hooks, LevelTimes, StopRule, Window

S = 1_000_000_000

Load = Callable[["Rig"], Coroutine[Any, Any, None]]


class Rig:
    """A window around a load; the server was last heard at `heard_ns`, if the load says so."""

    def __init__(self, stop: StopRule, *, ramp: bool = True, failures: int = 10**6) -> None:
        self.loop = VirtualLoop()
        self.clock = VirtualClock(self.loop)
        self.heard_ns = 0
        self.cancelled = 0

        async def never(opened_ns: int) -> bool:
            return False

        self.window = Window(
            self.clock,
            stop,
            ramp=ramp,
            failures=failures,
            hooks=Hooks(heard_ns=lambda: self.heard_ns),
        )

    def run(self, load: Load) -> LevelTimes:
        try:
            return self.loop.run_until_complete(self.window.run(lambda: load(self)))
        finally:
            assert not asyncio.all_tasks(self.loop)
            self.loop.close()

    async def answer(self, after_s: float, *, well: bool = True) -> bool:
        """A request whose answer comes whole, at once, after a time."""
        try:
            await asyncio.sleep(after_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if well:
            self.hear()
        return well

    async def drip(self, every_s: float, seconds: float) -> bool:
        """An answer of which a little comes now and then."""
        for _ in range(round(seconds / every_s)):
            await asyncio.sleep(every_s)
            self.hear()
        return True

    def hear(self) -> None:
        self.heard_ns = self.clock.now_ns()

    async def send(self, request: Awaitable[bool]) -> bool:
        phase = self.window.admit()
        assert phase is not None
        return await self.window.follow(phase, request)


NEVER_S = 1e6


async def one_after_the_other(rig: Rig, gap_s: float, took_s: float, count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(gap_s)
        await rig.send(rig.answer(took_s))
        rig.window.open()


@pytest.mark.parametrize("watchdog_s", [0.3, 5.0, 300.0])
def test_a_server_that_falls_silent_ends_the_level(watchdog_s: float) -> None:
    async def load(rig: Rig) -> None:
        await one_after_the_other(rig, 0.0, 0.2, 3)
        await rig.send(rig.answer(NEVER_S))

    rig = Rig(StopRule(watchdog_s=watchdog_s))
    times = rig.run(load)
    assert times.ended_by == "watchdog"
    assert times.ended_ns / S == pytest.approx(0.6 + watchdog_s, abs=0.51)
    assert times.closed_ns == times.ended_ns
    assert rig.cancelled == 1


def test_a_server_that_never_says_anything_ends_the_level_in_the_ramp() -> None:
    async def load(rig: Rig) -> None:
        await rig.send(rig.answer(NEVER_S))

    rig = Rig(StopRule(watchdog_s=20))
    times = rig.run(load)
    assert (times.ended_by, times.opened_ns) == ("watchdog", None)
    assert times.ended_ns / S == pytest.approx(20, abs=0.5)
    assert rig.cancelled == 1


def test_all_that_runs_is_cancelled() -> None:
    async def load(rig: Rig) -> None:
        for _ in range(50):
            rig.window.spawn(follow(rig))

    async def follow(rig: Rig) -> None:
        await rig.send(rig.answer(NEVER_S))

    rig = Rig(StopRule(watchdog_s=20), ramp=False)
    assert rig.run(load).ended_by == "watchdog"
    assert rig.cancelled == 50


def test_in_the_drain_too() -> None:
    async def load(rig: Rig) -> None:
        await rig.send(rig.answer(1.0))
        rig.window.open()
        await rig.send(rig.answer(NEVER_S))

    rig = Rig(StopRule(duration_s=10, watchdog_s=60))
    times = rig.run(load)
    assert times.closed_ns == pytest.approx(11 * S, abs=10)
    assert times.ended_by == "watchdog"
    assert times.ended_ns / S == pytest.approx(61, abs=0.5)


@pytest.mark.parametrize("gap_s", [3.0, 100.0, 299.5, 301.0, 1000.0])
def test_time_between_rare_requests_is_no_silence(gap_s: float) -> None:
    """At 0.01 requests a second the server is idle for longer than the watchdog waits."""

    async def load(rig: Rig) -> None:
        await one_after_the_other(rig, gap_s, 2.0, 12)
        rig.window.close("trace")

    assert Rig(StopRule(watchdog_s=300)).run(load).ended_by == "trace"


def test_a_request_after_a_long_idle_time_has_all_of_the_watchdogs_time() -> None:
    async def load(rig: Rig) -> None:
        await one_after_the_other(rig, 0.0, 1.0, 1)
        await asyncio.sleep(1000)
        await rig.send(rig.answer(299))
        await asyncio.sleep(1000)
        await rig.send(rig.answer(NEVER_S))

    times = Rig(StopRule(watchdog_s=300)).run(load)
    assert times.ended_by == "watchdog"
    assert times.ended_ns / S == pytest.approx(1 + 1000 + 299 + 1000 + 300, abs=0.6)


def test_not_while_anything_comes() -> None:
    async def load(rig: Rig) -> None:
        await rig.send(rig.drip(9.0, 900.0))
        rig.window.close("trace")

    assert Rig(StopRule(watchdog_s=10), ramp=False).run(load).ended_by == "trace"


def test_one_answer_that_comes_excuses_one_that_does_not() -> None:
    """The server is at work; a request that is lost is a matter of --stall-timeout."""

    async def load(rig: Rig) -> None:
        rig.window.spawn(lost(rig))
        for _ in range(20):
            await rig.send(rig.answer(9.0))
        rig.window.close("trace")

    async def lost(rig: Rig) -> None:
        await rig.send(rig.answer(100))

    assert Rig(StopRule(watchdog_s=10), ramp=False).run(load).ended_by == "trace"


def test_requests_that_time_out_one_after_the_other_are_silence() -> None:
    """Or a hung server would take twenty times --stall-timeout to end a level of one request at a time."""

    async def load(rig: Rig) -> None:
        while True:
            await rig.send(rig.answer(120, well=False))
            await asyncio.sleep(1.0)

    times = Rig(StopRule(watchdog_s=300), ramp=False).run(load)
    assert times.ended_by == "watchdog"
    assert times.ended_ns / S == pytest.approx(302, abs=1)


def test_failures_that_the_server_told_are_no_silence() -> None:
    async def load(rig: Rig) -> None:
        for _ in range(30):
            await rig.send(rig.answer(8, well=False))
            rig.hear()
        rig.window.close("trace")

    assert Rig(StopRule(watchdog_s=10), ramp=False).run(load).ended_by == "trace"


def test_without_a_watchdog_a_silent_server_is_waited_for() -> None:
    async def load(rig: Rig) -> None:
        await rig.send(rig.answer(10_000))
        rig.window.close("trace")

    assert Rig(StopRule(), ramp=False).run(load).ended_by == "trace"
