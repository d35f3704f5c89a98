"""Tokens per second over a window, from arrivals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from breakeven.measure.stats import BATCHES, FloatArray, Interval, batch_interval

__all__ = ["Arrivals", "tokens_until", "window_throughput"]

#: One request: when it was sent (ns) and its arrivals, each `(ns after sent, tokens)`.
Arrivals = tuple[int, Sequence[tuple[int, int]]]


def tokens_until(requests: Iterable[Arrivals], edges_ns: FloatArray) -> FloatArray:
    """Tokens that arrived before each edge, summed over requests.

    An arrival's tokens are spread evenly over the gap before it, so that an edge does not jump by a chunk; the first
    arrival's have no gap and count whole from their moment on.
    """
    total = np.zeros(len(edges_ns))
    for sent_ns, arrivals in requests:
        if arrivals:
            table = np.asarray(arrivals, dtype=np.float64)
            total += np.interp(edges_ns, sent_ns + table[:, 0], np.cumsum(table[:, 1]), left=0.0)
    return total


def window_throughput(
    requests: Iterable[Arrivals], opened_ns: int, closed_ns: int, mean_e2e_ns: float | None
) -> tuple[float, Interval | None]:
    """Output throughput of a window in tokens a second, with its 95 % interval.

    Args:
        requests: all that had tokens in the window, however they ended.
        opened_ns, closed_ns: the window.
        mean_e2e_ns: the mean latency of its requests. A batch shorter than two of them has correlated neighbours, so
            a window of less than `BATCHES` such batches carries no interval.
    """
    edges_ns = np.linspace(opened_ns, closed_ns, BATCHES + 1)
    rates = np.diff(tokens_until(requests, edges_ns)) / ((closed_ns - opened_ns) / BATCHES / 1e9)
    batch_ns = (closed_ns - opened_ns) / BATCHES
    enough = mean_e2e_ns is not None and batch_ns >= 2 * mean_e2e_ns
    return float(rates.mean()), batch_interval(rates) if enough else None
