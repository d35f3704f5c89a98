"""How many requests are in flight over time: the load profiles, and the mixes of prompts that come with them.

    constant:C              step:LOW:HIGH[:PERIOD]      ramp:LOW:HIGH
    day:LOW:HIGH[:PERIOD]   burst:LOW:HIGH[:PERIOD]     trace:FILE

A ramp rises over half of the time and falls over the other. A step stands at LOW and HIGH by turns, each half a period
(two minutes). A day is a raised cosine (period: the whole time). A burst stands at LOW and jumps to HIGH for a tenth of
its period (a minute). A trace is a CSV file of `seconds,in_flight`, each row holding until the next.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from breakeven.errors import UsageError

__all__ = ["path_of"]

FloatArray = NDArray[np.float64]

_MOST = 4096
#: Of those that repeat; None: the whole time.
_PERIODS_S = {"step": 120.0, "day": None, "burst": 60.0}
_BURST_SHARE = 0.1


def path_of(profile: str, seconds: float, tick_s: float) -> NDArray[np.int64]:
    """The requests in flight at each tick, from 1.

    Args:
        profile: one of those above.
        seconds: how long.
        tick_s: the length of a tick.

    Raises:
        UsageError: there is no such profile.
    """
    kind, _, rest = profile.partition(":")
    times: FloatArray = np.arange(max(1, math.ceil(seconds / tick_s)), dtype=np.float64) * tick_s
    if kind == "trace" and rest:
        return _read_path(Path(rest), times)
    try:
        low, high, period_s = _numbers(kind, [float(part) for part in rest.split(":")], seconds)
    except ValueError:
        raise UsageError(
            f"--profile {profile}: give constant:C, step:LOW:HIGH[:SECONDS], ramp:LOW:HIGH, day:LOW:HIGH[:SECONDS], "
            f"burst:LOW:HIGH[:SECONDS] or trace:FILE, with 1 <= LOW <= HIGH <= {_MOST}"
        ) from None
    return _whole(low + (high - low) * _height(kind, times, seconds, period_s))


def _numbers(kind: str, numbers: list[float], seconds: float) -> tuple[float, float, float]:
    """LOW, HIGH and the period of a profile; ValueError where they are no such."""
    if kind == "constant":
        (low,), high, period_s = numbers, numbers[0], seconds
    elif kind == "ramp":
        (low, high), period_s = numbers, seconds
    elif kind in _PERIODS_S:
        low, high, *rest = numbers
        (period_s,) = rest or [_PERIODS_S[kind] or seconds]
    else:
        raise ValueError(kind)
    if not (1 <= low <= high <= _MOST and 0 < period_s < math.inf):
        raise ValueError(numbers)
    return low, high, period_s


def _height(kind: str, times: FloatArray, seconds: float, period_s: float) -> FloatArray:
    """Where between LOW and HIGH each moment is, from 0 to 1."""
    if kind == "ramp":
        return 1 - np.abs(1 - 2 * times / seconds)
    if kind == "day":
        return (1 - np.cos(2 * math.pi * times / period_s)) / 2
    if kind == "step":
        return (times % period_s >= period_s / 2).astype(float)
    if kind == "burst":
        return (times % period_s >= period_s * (1 - _BURST_SHARE)).astype(float)
    return np.zeros_like(times)


def _read_path(path: Path, times: FloatArray) -> NDArray[np.int64]:
    """The requests in flight that a file says, at each of `times` (seconds); it begins anew where it ends.

    Raises:
        UsageError: it can't be read, or a row is no time and number.
    """
    try:
        rows = list(csv.reader(path.read_text("utf-8-sig").splitlines()))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"--profile trace:{path}: {getattr(error, 'strerror', None) or error}") from None
    at_s: list[float] = []
    loads: list[float] = []
    for number, row in enumerate(rows, 1):
        if not row or (number == 1 and not row[0].strip()[:1].isdigit()):
            continue  # the header
        try:
            moment, load = float(row[0]), float(row[1])
            if not (moment > (at_s or [-math.inf])[-1] and 0 <= load <= _MOST):
                raise ValueError(row)
        except (ValueError, IndexError):
            wanted = f"seconds,in_flight with rising seconds and at most {_MOST} in flight"
            raise UsageError(f"--profile trace:{path}: line {number}: it needs {wanted}") from None
        at_s.append(moment)
        loads.append(load)
    if not at_s:
        raise UsageError(f"--profile trace:{path}: no row of seconds,in_flight in it")
    length = at_s[-1] - at_s[0] + (at_s[-1] - at_s[0]) / max(1, len(at_s) - 1) if len(at_s) > 1 else 1.0
    places = np.searchsorted(np.array(at_s) - at_s[0], times % length, side="right") - 1
    return _whole(np.array(loads)[places])


def _whole(loads: FloatArray) -> NDArray[np.int64]:
    """Whole requests, one at least."""
    found: NDArray[np.int64] = np.maximum(1, np.rint(loads)).astype(np.int64)
    return found
