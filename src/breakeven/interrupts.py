"""Signals that end a run early, in order."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

__all__ = ["until_signal"]

#: What ends a run early: Ctrl-C, a scheduler, a terminal that is gone.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


async def until_signal(work: Coroutine[Any, Any, None]) -> int:
    """Awaits the work; SIGINT, SIGTERM or SIGHUP ends it early and in order. Returns the signal's number, else 0.

    A second signal changes nothing, then and after: what is done is being written down, and the program will end. One
    that is ignored, as nohup(1) has it for SIGHUP, stays so.
    """
    task, loop, received = asyncio.ensure_future(work), asyncio.get_running_loop(), 0
    before = {number: signal.getsignal(number) for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN}

    def stop(number: int) -> None:
        nonlocal received
        if not received:
            received = number
            task.cancel()

    for number in before:
        loop.add_signal_handler(number, stop, number)
    try:
        await task
    except asyncio.CancelledError:
        if not received:
            raise
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN if received else handler)
    return received
