"""Clocks. One monotonic clock stamps everything; a virtual one runs the same code without waiting.

All times are integer nanoseconds of `time.perf_counter_ns` (CLOCK_MONOTONIC on Linux) unless a name says otherwise.
"""

from __future__ import annotations

import asyncio
import selectors
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Protocol

__all__ = [
    "ANCILLARY_SIZE",
    "Clock",
    "KernelClock",
    "MonotonicClock",
    "VirtualClock",
    "VirtualLoop",
    "ask_for_stamps",
]

#: SO_TIMESTAMPNS of Linux's asm-generic/socket.h. Its control message is a timespec of CLOCK_REALTIME; for TCP it is
#: the time of the last segment that a read took (net/ipv4/tcp.c, tcp_recv_timestamp). Python has no name for it.
SO_TIMESTAMPNS = 35
#: What `recvmsg` is to make room for: that one control message.
ANCILLARY_SIZE = socket.CMSG_SPACE(16) if hasattr(socket, "CMSG_SPACE") else 0


class Clock(Protocol):
    """What the load generator asks of a clock."""

    def now_ns(self) -> int:
        """The time now, in nanoseconds since an arbitrary but fixed moment."""
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now_ns(self) -> int:
        """`time.perf_counter_ns`."""
        return time.perf_counter_ns()


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer instead of waiting for it.

    Only for code that waits for timers and futures: sockets are never ready here. Two runs of the same code see the
    same times to the nanosecond, and timers of the same moment in the same order (not that in which they were set).
    """

    def __init__(self) -> None:
        super().__init__(_JumpingSelector(self._advance))
        self._virtual_ns = 0

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._virtual_ns / 1e9

    def _advance(self, seconds: float) -> None:
        # Rounding up: a timer must never find the clock a nanosecond short of its due time.
        self._virtual_ns += int(seconds * 1e9) + 1


class VirtualClock:
    """The clock of a `VirtualLoop`."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def now_ns(self) -> int:
        """The loop's virtual time."""
        return self._loop._virtual_ns


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, advance: Callable[[float], None]) -> None:
        super().__init__()
        self._advance = advance

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # With no timer at all only another thread can go on: wait for it as any loop does.
        ready: list[tuple[selectors.SelectorKey, int]] = super().select(None if timeout is None else 0)
        if not ready and timeout:
            self._advance(timeout)
        return ready


def ask_for_stamps(sock: socket.socket) -> None:
    """Has the kernel stamp what comes in, where it can and a timespec is two 64-bit words."""
    if sys.platform == "linux" and sys.maxsize > 2**32:
        sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)


class KernelClock:
    """Turns the kernel's receive stamps (SO_TIMESTAMPNS, CLOCK_REALTIME) into `perf_counter_ns`.

    The kernel stamps a segment when it comes in, so a client that is late to read still knows when the bytes were
    there. Wall time can be stepped, which is why the offset is measured again and again (`sync`) and a stamp that
    can't be right (before `floor_ns` or after now) is replaced by now.
    """

    #: A change of the offset beyond this between two measurements is a step, not slewing (NTP slews <= 0.5 ms/s).
    STEP_NS = 1_000_000

    def __init__(self) -> None:
        self.steps = 0
        self._offset_ns = self._measure()
        self._unpack = struct.Struct("qq").unpack

    def sync(self) -> None:
        """Measures the offset between wall time and the monotonic clock again, and counts steps."""
        offset_ns = self._measure()
        self.steps += abs(offset_ns - self._offset_ns) > self.STEP_NS
        self._offset_ns = offset_ns

    def stamp(self, timespec: bytes | None, floor_ns: int) -> int:
        """When the bytes came in, in perf_counter nanoseconds, never before `floor_ns` nor after now.

        Args:
            timespec: the 16 bytes of the SCM_TIMESTAMPNS control message, None where there was none.
            floor_ns: a moment before which these bytes can't have come, e.g. when the request was sent.
        """
        now_ns = time.perf_counter_ns()
        if timespec is None:
            return now_ns
        seconds, nanoseconds = self._unpack(timespec)
        stamp_ns = int(seconds * 1_000_000_000 + nanoseconds - self._offset_ns)
        return stamp_ns if floor_ns <= stamp_ns <= now_ns else now_ns

    @staticmethod
    def _measure() -> int:
        # The narrowest of some sandwiches: the reading that the scheduler interrupted least.
        best_width, best_offset = 1 << 62, 0
        for _ in range(9):
            before = time.perf_counter_ns()
            wall = time.time_ns()
            after = time.perf_counter_ns()
            if after - before < best_width:
                best_width, best_offset = after - before, wall - (before + after) // 2
        return best_offset
