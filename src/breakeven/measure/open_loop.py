"""What an open loop has beside the rest: lateness, latencies from when a request was due, and its backlog."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from msgspec import Struct

from breakeven.measure.stats import BATCHES, Distribution, FloatArray, distribution
from breakeven.records import RequestRecord

__all__ = ["Backlog", "OpenNumbers", "backlog", "open_numbers"]

#: Student's t for 97.5 % at BATCHES - 2 degrees of freedom, those of a straight line through the batches (Abramowitz &
#: Stegun, table 26.10).
_T_975_DF4 = 2.7764451
#: The variance of the number of ends, as a share of a Poisson process's: by simulation, the least at which false alarms
#: stay near 5 % also where answers take longer than the window (docs/statistics.md).
_ENDS = 0.5


class OpenNumbers(Struct, frozen=True, kw_only=True):
    """An open loop's own numbers, of the requests sent in the window.

    `offered_rate` counts requests due, `ended_rate` answers that ended (well or not), both a second of the window.
    Without a window they count all: requests due from the first to the last, ends until the last.
    `lateness_ms` is from due to sent; `ttft_due_ms` and `e2e_due_ms` count from when the request was due, as its user
    would.
    """

    offered_rate: float
    ended_rate: float
    lateness_ms: Distribution
    ttft_due_ms: Distribution
    e2e_due_ms: Distribution


class Backlog(Struct, frozen=True, kw_only=True):
    """Requests due and not ended: how many when the window opened and closed, and whether that was growth."""

    first: int
    last: int
    grows: bool


def open_numbers(records: Sequence[RequestRecord], window: tuple[int, int] | None, rate: float) -> OpenNumbers:
    """The numbers of an open loop.

    Args:
        records: the level's requests after warm-up.
        window: from when to when (ns); None counts the whole level.
        rate: requests due a second by the plan; 0 for a trace.
    """
    sent = [(r, r.sent_ns - r.due_ns) for r in records if r.phase == "measured" and r.sent_ns is not None]
    well = [(r, late_ns) for r, late_ns in sent if r.outcome == "ok" and r.arrivals]
    late, waited = (np.array([late_ns for _, late_ns in some], dtype=np.float64) for some in (sent, well))
    first, last = (np.array([r.arrivals[at][0] for r, _ in well], dtype=np.float64) for at in (0, -1))
    offered, ended = _rates(records, window, rate)
    return OpenNumbers(
        offered_rate=offered,
        ended_rate=ended,
        lateness_ms=distribution(late / 1e6),
        ttft_due_ms=distribution((waited + first) / 1e6),
        e2e_due_ms=distribution((waited + last) / 1e6),
    )


def backlog(records: Sequence[RequestRecord], window: tuple[int, int], rate: float) -> Backlog:
    """Whether the server falls behind.

    The mean backlog in each of `BATCHES` parts of the window is fitted by a straight line. The backlog grows where its
    slope is significant (t, 97.5 %) and its growth is beyond two standard deviations of what chance brings: the number
    of n arrivals scatters by n CV^2 (of renewals: D. R. Cox, *Renewal Theory*, 1962, ch. 4), that of ends by about half
    of n.

    Args:
        records: the level's requests after warm-up.
        window: from when to when (ns).
        rate: requests due a second by the plan.
    """
    start_ns, stop_ns = window
    due, end = _spans(records, stop_ns, rate)
    edges = np.linspace(start_ns, stop_ns, BATCHES + 1)
    means = np.array([_mean_alive(due, end, a, b) for a, b in pairwise(edges)])
    first, last = (int(((due <= at) & (end > at)).sum()) for at in window)
    arrived = np.sort(due[(due >= start_ns) & (due < stop_ns)])
    chance = math.sqrt(len(arrived) * (_squared_cv(np.diff(arrived)) + _ENDS))
    grows = last - first > 2 * chance and _slope_t(means) > _T_975_DF4
    return Backlog(first=first, last=last, grows=grows)


def _rates(records: Sequence[RequestRecord], window: tuple[int, int] | None, rate: float) -> tuple[float, float]:
    """Requests due a second, and ended."""
    if window:
        start_ns, stop_ns = window
        due, end = _spans(records, stop_ns, rate)
        seconds = (stop_ns - start_ns) / 1e9
        due, end = (at[(at >= start_ns) & (at < stop_ns)] for at in (due, end))
        return len(due) / seconds, len(end) / seconds
    due, end = _spans(records, 0, 0.0)
    end = end[end < math.inf]
    if len(due) < 2 or not len(end):
        return 0.0, 0.0
    gaps_ns, span_ns = float(np.ptp(due)), float(end.max() - due.min())
    return (len(due) - 1) * 1e9 / gaps_ns if gaps_ns else 0.0, len(end) * 1e9 / span_ns if span_ns > 0 else 0.0


def _spans(records: Sequence[RequestRecord], stop_ns: int, rate: float) -> tuple[FloatArray, FloatArray]:
    """When requests were due and when they ended; what was abandoned never did.

    With `--max-in-flight` the last one sent may have waited while others came due that never were: those stand here,
    evenly spaced at the level's rate, or a server that can't hold it would seem to be asked for no more than it gives.
    """
    ended = [None if record.outcome == "cancelled" else record.end_ns for record in records]
    due = np.array([record.due_ns for record in records], dtype=np.float64)
    end = np.array([math.inf if end_ns is None else end_ns for end_ns in ended], dtype=np.float64)
    last = max((r for r in records if r.sent_ns is not None), key=lambda record: record.due_ns, default=None)
    if last is None or last.sent_ns is None or not rate:
        return due, end
    gap_ns = 1e9 / rate
    unsent = np.arange(last.due_ns + gap_ns, min(last.sent_ns, stop_ns), gap_ns)
    return np.concatenate([due, unsent]), np.concatenate([end, np.full(len(unsent), math.inf)])


def _squared_cv(gaps: FloatArray) -> float:
    """The squared coefficient of variation; that of a Poisson process where there is too little to tell."""
    return float(gaps.var(ddof=1) / gaps.mean() ** 2) if len(gaps) > 1 and gaps.any() else 1.0


def _mean_alive(due: FloatArray, end: FloatArray, start: float, stop: float) -> float:
    inside = np.clip(end, start, stop) - np.clip(due, start, stop)
    return float(inside.sum() / (stop - start)) if stop > start else 0.0


def _slope_t(values: FloatArray) -> float:
    """The t statistic of the slope of a straight line through equally spaced values."""
    at = np.arange(len(values)) - (len(values) - 1) / 2
    slope = float(at @ values / (at @ at))
    rest = values - values.mean() - slope * at
    error = math.sqrt(float(rest @ rest) / (len(values) - 2) / float(at @ at))
    return slope / error if error else math.copysign(math.inf, slope)
