"""Latencies per request, by the definitions of docs/metrics.md. All in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from breakeven.measure.arrivals import ArrivalTable
from breakeven.measure.stats import Distribution, distribution
from breakeven.records import RequestRecord

__all__ = ["Latencies", "latencies"]


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
    table = ArrivalTable.of(records)
    output = np.array([record.output_tokens for record in records if record.arrivals], dtype=np.int64)
    after_first = output - table.tokens[table.first]
    decode_ns = table.at_ns[table.last] - table.at_ns[table.first]
    decodes = (after_first > 0) & (decode_ns > 0)
    gap_ns, gap_tokens = table.without_empty()
    later = ~table.is_first
    e2e_ns = table.e2e_ns
    total_ns = int(decode_ns[decodes].sum())
    return Latencies(
        per_request_throughput=distribution(output[e2e_ns > 0] / (e2e_ns[e2e_ns > 0] / 1e9)),
        ttft_ms=distribution((table.at_ns[table.first] - table.sent_ns) / 1e6),
        tpot_ms=distribution(decode_ns[decodes] / 1e6 / after_first[decodes]),
        itl_ms=distribution(gap_ns / 1e6 / gap_tokens, gap_tokens),
        icl_ms=distribution((table.at_ns - table.before_ns)[later] / 1e6),
        e2e_ms=distribution(e2e_ns / 1e6),
        decode_rate=int(after_first[decodes].sum()) / (total_ns / 1e9) if total_ns else None,
    )
