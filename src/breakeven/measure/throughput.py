"""Tokens per second over a window, from arrivals."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from breakeven.measure.arrivals import ArrivalTable
from breakeven.measure.stats import BATCHES, FloatArray, Interval, batch_interval
from breakeven.records import LevelRecord, RequestRecord

__all__ = ["batch_rates", "mean_latency_ns", "window_of", "window_throughput"]


def window_of(level: LevelRecord) -> tuple[int, int] | None:
    """When a level's window opened and closed; None where it had none, or one without length."""
    if level.opened_ns is None or level.closed_ns is None or level.closed_ns <= level.opened_ns:
        return None
    return level.opened_ns, level.closed_ns


def window_throughput(
    table: ArrivalTable, opened_ns: int, closed_ns: int, latency_ns: float | None
) -> tuple[float, Interval | None]:
    """Output throughput of a window in tokens a second, with its 95 % interval.

    Args:
        table: all requests that had tokens in the window, however they ended.
        opened_ns, closed_ns: the window.
        latency_ns: the mean latency under this load. A batch shorter than two of it has correlated neighbours, so a
            window of less than `BATCHES` such batches carries no interval.
    """
    rates = batch_rates(table, opened_ns, closed_ns)
    enough = latency_ns is not None and (closed_ns - opened_ns) / BATCHES >= 2 * latency_ns
    return float(rates.mean()), batch_interval(rates) if enough else None


def batch_rates(table: ArrivalTable, opened_ns: int, closed_ns: int) -> FloatArray:
    """Tokens a second in each of `BATCHES` equal parts of a window.

    An arrival's tokens are spread evenly over the gap before it, so that no edge jumps by a chunk; the first
    arrival's have no gap and count whole from their moment on.
    """
    gap_ns = np.maximum(table.at_ns - table.before_ns, 1)
    edges_ns = np.linspace(opened_ns, closed_ns, BATCHES + 1)
    arrived = [np.dot(table.tokens, np.clip((edge - table.before_ns) / gap_ns, 0, 1)) for edge in edges_ns]
    return np.diff(arrived) / ((closed_ns - opened_ns) / BATCHES / 1e9)


def mean_latency_ns(records: Iterable[RequestRecord]) -> float | None:
    """Mean time to the last output of the requests sent inside the window that ended well; None without any."""
    latest = [r.arrivals[-1][0] for r in records if r.phase == "measured" and r.outcome == "ok" and r.arrivals]
    return sum(latest) / len(latest) if latest else None
