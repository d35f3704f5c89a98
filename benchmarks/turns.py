"""Servers that step by turns, so that what a shared machine does to one it does to all within a second.

On a machine with neighbours two runs of half a minute differ by a tenth, and two steps in a row hardly. So of several
vLLM servers under load only one makes steps at a time, for a fraction of a second each: `scheduler`, which vLLM is told
to take for its own, waits before a step until it is this server's turn, and the clock by which a policy learns stands
still meanwhile. `Turns` gives the turns and counts the time of each.

    flags = {name: turns.flags(name) for name in names}    # for start_vllm, with this folder in PYTHONPATH
"""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

#: Of each server two numbers that one side writes and the other reads: whether it may step, and whether it does.
_MAY, _DOES, _SEAT_BYTES = 0, 1, 2
_LOOK_S = 0.0003

_waited_ns = 0


class Turns:
    """Gives turns to servers.

    Args:
        names: the servers.
        turn_s: a turn ends with the first step that ends after so many seconds.
    """

    def __init__(self, names: Sequence[str], turn_s: float) -> None:
        self._seats = {name: i for i, name in enumerate(names)}
        self._turn_s = turn_s
        self._path = Path(tempfile.mkdtemp(prefix="turns-")) / "seats"
        self._path.write_bytes(bytes(_SEAT_BYTES * len(names)))
        self._shared = _open(self._path)

    def flags(self, name: str) -> list[str]:
        """What vLLM has to be told."""
        seat = {"turns": str(self._path), "seat": self._seats[name]}
        return ["--scheduler-cls", "turns.scheduler", "--additional-config", json.dumps(seat)]

    def run(self, first: int, has_ended: Callable[[str], bool]) -> dict[str, float]:
        """Gives turns until each server has ended its work; the seconds that each had. `first` has the first turn."""
        names = list(self._seats)
        took_s = dict.fromkeys(names, 0.0)
        for name in cycle(names[first % len(names) :] + names[: first % len(names)]):
            if all(map(has_ended, names)):
                break
            if not has_ended(name):
                took_s[name] += self._turn(name, has_ended)
        return took_s

    def _turn(self, name: str, has_ended: Callable[[str], bool]) -> float:
        seat = _SEAT_BYTES * self._seats[name]
        began_s = time.perf_counter()
        self._shared[seat + _MAY] = 1
        while time.perf_counter() < began_s + self._turn_s and not has_ended(name):
            time.sleep(_LOOK_S)
        self._shared[seat + _MAY] = 0
        while self._shared[seat + _DOES] and not has_ended(name):
            time.sleep(_LOOK_S)
        return time.perf_counter() - began_s

    def free(self) -> None:
        """Lets all go on at once, so that they can end. It is the last that is done with it."""
        for seat in self._seats.values():
            self._shared[_SEAT_BYTES * seat + _MAY] = 1
        shutil.rmtree(self._path.parent, ignore_errors=True)


def scheduler(*args: Any, **kwargs: Any) -> Any:
    """vLLM's scheduler, or breakeven's where a policy is set, which waits for its turn before each step."""
    config = kwargs.get("vllm_config", args[0] if args else None)
    own_ns = time.monotonic_ns
    time.monotonic_ns = lambda: own_ns() - _waited_ns
    # Imported after the clock was changed.
    from breakeven.act import vllm as governed

    if "BREAKEVEN_POLICY" in os.environ:
        engine = governed.scheduler(*args, **kwargs)
    else:
        from vllm.v1.core.sched.scheduler import Scheduler

        engine = Scheduler(*args, **kwargs)
    seat = config.additional_config
    engine.schedule = _by_turns(engine.schedule, _open(Path(seat["turns"])), _SEAT_BYTES * seat["seat"])
    return engine


def _by_turns(own: Callable[..., Any], shared: mmap.mmap, seat: int) -> Callable[..., Any]:
    """vLLM's method that begins a step, once it is this server's turn."""

    def schedule(*args: Any, **kwargs: Any) -> Any:
        global _waited_ns
        began_ns = time.perf_counter_ns()
        shared[seat + _DOES] = 1
        if shared[seat + _MAY]:
            return own(*args, **kwargs)
        _signal_workers(signal.SIGSTOP)
        while not shared[seat + _MAY]:
            shared[seat + _DOES] = 0
            while not shared[seat + _MAY]:
                time.sleep(_LOOK_S)
            shared[seat + _DOES] = 1
        _signal_workers(signal.SIGCONT)
        _waited_ns += time.perf_counter_ns() - began_ns
        return own(*args, **kwargs)

    return schedule


def _signal_workers(number: int) -> None:
    """vLLM's workers look for work without a pause for a second after each step, which would be another's time."""
    for worker in multiprocessing.active_children():
        if worker.pid is not None:
            os.kill(worker.pid, number)


def _open(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)
