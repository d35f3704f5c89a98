"""Virtual time costs no time and keeps the order of timers; the kernel's stamps land on our clock."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakeven.clock import KernelClock, MonotonicClock, VirtualClock, VirtualLoop


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)


async def now_ns() -> int:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return VirtualClock(loop).now_ns()


def test_sleeping_costs_no_wall_time() -> None:
    async def sleep_a_week() -> float:
        for _ in range(7):
            await asyncio.sleep(24 * 3600)
        return await now_ns() / 1e9

    began = time.perf_counter()
    assert run(sleep_a_week()) == pytest.approx(7 * 24 * 3600, abs=1e-6)
    assert time.perf_counter() - began < 1


def test_virtual_time_stands_still_while_code_runs() -> None:
    async def work() -> tuple[int, int]:
        before = await now_ns()
        time.sleep(0.01)
        await asyncio.sleep(0)
        return before, await now_ns()

    before, after = run(work())
    assert before == after


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30))
def test_timers_keep_their_order(delays_ms: list[int]) -> None:
    """None early, none late; those of one moment go in an order that is the same each time."""

    async def collect() -> list[tuple[int, int, int]]:
        fired: list[tuple[int, int, int]] = []

        async def note(number: int, delay_ms: int) -> None:
            await asyncio.sleep(delay_ms / 1e3)
            fired.append((delay_ms, number, await now_ns() - delay_ms * 10**6))

        await asyncio.gather(*(note(number, delay_ms) for number, delay_ms in enumerate(delays_ms)))
        return fired

    fired = run(collect())
    assert [delay for delay, _, _ in fired] == sorted(delays_ms)
    assert fired == run(collect())
    assert all(0 <= late_ns <= 1000 for _, _, late_ns in fired)


def test_two_runs_see_the_same_times() -> None:
    async def times() -> list[int]:
        seen = []

        async def tick(step_s: float) -> None:
            for _ in range(50):
                await asyncio.sleep(step_s)
                seen.append(await now_ns())

        await asyncio.gather(tick(0.0123), tick(0.0071), tick(1e-6))
        return seen

    assert run(times()) == run(times())


def test_time_limits_work_in_virtual_time() -> None:
    async def wait() -> int:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(100):
                await asyncio.Event().wait()
        return await now_ns()

    assert run(wait()) == pytest.approx(100e9, abs=1e3)


def test_waiting_for_a_thread_burns_no_cpu() -> None:
    """With no timer set there is nothing to jump to: the loop waits as any other does."""
    began = time.thread_time()
    run(asyncio.to_thread(time.sleep, 0.3))
    assert time.thread_time() - began < 0.15


def timespec(wall_ns: int) -> bytes:
    return struct.pack("qq", *divmod(wall_ns, 10**9))


def test_the_kernels_stamp_lands_on_our_clock() -> None:
    clock = KernelClock()
    before_ns, wall_ns, after_ns = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
    time.sleep(0.002)
    stamp_ns = clock.stamp(timespec(wall_ns), floor_ns=0)
    assert before_ns - 50_000 <= stamp_ns <= after_ns + 50_000


def test_no_stamp_is_now() -> None:
    before_ns = MonotonicClock().now_ns()
    assert before_ns <= KernelClock().stamp(None, floor_ns=0) <= time.perf_counter_ns()


@pytest.mark.parametrize("off_ns", [-60 * 10**9, -20_000_000, 20_000_000, 60 * 10**9])
def test_a_stamp_that_cant_be_right_is_now(off_ns: int) -> None:
    """Before the request was sent, or after now: the wall clock was stepped."""
    clock, sent_ns = KernelClock(), time.perf_counter_ns()
    time.sleep(0.001)
    before_ns = time.perf_counter_ns()
    stamp_ns = clock.stamp(timespec(time.time_ns() + off_ns), floor_ns=sent_ns)
    assert before_ns <= stamp_ns <= time.perf_counter_ns()


def test_a_step_of_the_wall_clock_is_counted_and_made_good() -> None:
    clock = KernelClock()
    clock.sync()
    assert clock.steps == 0
    clock._offset_ns += 5_000_000
    clock.sync()
    clock.sync()
    assert clock.steps == 1
    before_ns, wall_ns, after_ns = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
    assert before_ns - 50_000 <= clock.stamp(timespec(wall_ns), floor_ns=0) <= after_ns + 50_000


def test_slewing_is_no_step() -> None:
    clock = KernelClock()
    clock._offset_ns -= 300_000
    clock.sync()
    assert clock.steps == 0
