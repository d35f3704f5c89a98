"""Latencies per request, by the definitions of docs/metrics.md. All in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from msgspec import Struct

from breakeven.measure.stats import Distribution, distribution
from breakeven.records import RequestRecord

__all__ = ["Latencies", "inter_token_gaps", "latencies"]


class Latencies(Struct, frozen=True, kw_only=True):
    """The distributions over requests (for ICL over gaps, for ITL over tokens), and the pooled decode rate in tok/s.

    `decode_rate` is the sum of tokens after first arrivals over the sum of times from first to last arrival.
    """

    per_request_throughput: Distribution
    ttft_ms: Distribution
    tpot_ms: Distribution
    itl_ms: Distribution
    icl_ms: Distribution
    e2e_ms: Distribution
    decode_rate: float | None


def latencies(records: Sequence[RequestRecord]) -> Latencies:
    """Summarises requests that ended well. A latency that a request does not have (TPOT of one arrival) is left out."""
    e2e, ttft, rate, tpot, gaps, tokens, chunk_gaps = [], [], [], [], [], [], []
    late_tokens, late_ns = 0, 0
    for record in records:
        arrivals = record.arrivals
        if not arrivals:
            continue
        (first, first_tokens), (last, _) = arrivals[0], arrivals[-1]
        ttft.append(first / 1e6)
        e2e.append(last / 1e6)
        if last > 0:
            rate.append(record.output_tokens / (last / 1e9))
        after_first = record.output_tokens - first_tokens
        if after_first > 0 and last > first:
            tpot.append((last - first) / 1e6 / after_first)
            late_tokens, late_ns = late_tokens + after_first, late_ns + last - first
        chunk_gaps += [(b[0] - a[0]) / 1e6 for a, b in pairwise(arrivals)]
        for gap_ms, count in inter_token_gaps(arrivals):
            gaps.append(gap_ms)
            tokens.append(count)
    return Latencies(
        per_request_throughput=_summary(rate),
        ttft_ms=_summary(ttft),
        tpot_ms=_summary(tpot),
        itl_ms=distribution(np.array(gaps), np.array(tokens, dtype=np.int64)),
        icl_ms=_summary(chunk_gaps),
        e2e_ms=_summary(e2e),
        decode_rate=late_tokens / (late_ns / 1e9) if late_ns else None,
    )


def inter_token_gaps(arrivals: Sequence[tuple[int, int]]) -> list[tuple[float, int]]:
    """`(ms per token, tokens)` of each arrival after the first; one that adds no token joins the next."""
    gaps, before = [], arrivals[0][0] if arrivals else 0
    for at, tokens in arrivals[1:]:
        if tokens > 0:
            gaps.append(((at - before) / 1e6 / tokens, tokens))
            before = at
    return gaps


def _summary(values: list[float]) -> Distribution:
    return distribution(np.array(values, dtype=np.float64))
