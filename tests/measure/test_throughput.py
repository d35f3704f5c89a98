"""Tokens a second over a window: nothing lost, nothing counted twice, no jump at an edge."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from breakeven.measure.arrivals import ArrivalTable
from breakeven.measure.stats import BATCHES
from breakeven.measure.throughput import batch_rates, mean_latency_ns, window_of, window_throughput
from tests.measure.handmade import MS, S, level_record, request, steady_stream

streams = st.lists(
    st.tuples(
        st.integers(0, 20 * S),
        st.lists(st.tuples(st.integers(1, 3 * S), st.integers(0, 16)), max_size=12),
    ),
    max_size=8,
)


def table_of(streams: list[tuple[int, list[tuple[int, int]]]]) -> ArrivalTable:
    """Gaps to arrivals."""
    return ArrivalTable(
        [
            (
                sent_ns,
                [(int(at), tokens) for at, (_, tokens) in zip(np.cumsum([g for g, _ in steps]), steps, strict=True)],
            )
            for sent_ns, steps in streams
        ]
    )


def tokens_in(table: ArrivalTable, opened_ns: int, closed_ns: int) -> float:
    return float(batch_rates(table, opened_ns, closed_ns).sum() * (closed_ns - opened_ns) / BATCHES / S)


@settings(deadline=None)
@given(streams, st.integers(1, 5 * S), st.integers(1, 5 * S))
def test_a_window_that_holds_all_holds_every_token(
    streams: list[tuple[int, list[tuple[int, int]]]], before_ns: int, after_ns: int
) -> None:
    table = table_of(streams)
    first, last = (int(table.at_ns.min()), int(table.at_ns.max())) if len(table.at_ns) else (0, 0)
    assert tokens_in(table, first - before_ns, last + after_ns) == pytest.approx(int(table.tokens.sum()), abs=1e-6)


@settings(deadline=None)
@given(streams, st.lists(st.integers(0, 60 * S), min_size=3, max_size=3, unique=True))
def test_windows_side_by_side_hold_what_the_whole_holds(
    streams: list[tuple[int, list[tuple[int, int]]]], edges: list[int]
) -> None:
    table = table_of(streams)
    a, b, c = sorted(edges)
    assert tokens_in(table, a, b) + tokens_in(table, b, c) == pytest.approx(tokens_in(table, a, c), abs=1e-6)


def test_an_edge_moves_tokens_smoothly() -> None:
    """Ten tokens in one chunk a second after the one before: a window that ends in between holds its share."""
    table = ArrivalTable([(0, [(1 * S, 1), (2 * S, 10)])])
    held = [tokens_in(table, 0, int(end_s * S)) for end_s in (1.1, 1.25, 1.5, 2.0, 3.0)]
    assert held == pytest.approx([2, 3.5, 6, 11, 11])


def test_the_first_arrival_counts_whole_from_its_moment_on() -> None:
    table = ArrivalTable([(0, [(5 * S, 4)])])
    assert tokens_in(table, 0, 5 * S) == 0
    assert tokens_in(table, 0, 5 * S + 1) == pytest.approx(4)
    assert tokens_in(table, 5 * S, 6 * S) == pytest.approx(4)
    assert tokens_in(table, 5 * S + 1, 6 * S) == 0


def test_rate_of_a_steady_stream_is_the_same_in_every_batch() -> None:
    table = ArrivalTable.of(steady_stream(concurrency=4, seconds=80))
    assert batch_rates(table, 10 * S, 70 * S) == pytest.approx(np.full(BATCHES, 80.0), rel=0.01)


def test_interval_needs_batches_of_twice_the_latency() -> None:
    table = ArrivalTable.of(steady_stream(seconds=60))
    assert window_throughput(table, 0, 60 * S, 5.0 * S)[1] is not None
    assert window_throughput(table, 0, 60 * S, 5.01 * S)[1] is None
    assert window_throughput(table, 0, 60 * S, None)[1] is None


def test_window_of_nothing_is_zero() -> None:
    value, interval = window_throughput(ArrivalTable([]), 0, 60 * S, 1.0 * S)
    assert value == 0
    assert interval is not None
    assert (interval.low, interval.high) == (0, 0)


def test_mean_latency_is_that_of_requests_sent_inside_that_ended_well() -> None:
    records = [
        request(0, [(1000, 1)]),
        request(1, [(2000, 1), (3000, 1)]),
        request(2, [(9000, 1)], phase="ramp"),
        request(3, [(9000, 1)], phase="drain"),
        request(4, [(9000, 1)], outcome="truncated"),
        request(5),
    ]
    assert mean_latency_ns(records) == 2000 * MS
    assert mean_latency_ns(records[2:]) is None


@pytest.mark.parametrize(
    ("opened_s", "closed_s", "window"),
    [(1, 3, (1 * S, 3 * S)), (None, None, None), (None, 3, None), (1, None, None), (2, 2, None), (0, 1, (0, S))],
)
def test_a_window_has_a_beginning_an_end_and_a_length(
    opened_s: float | None, closed_s: float | None, window: tuple[int, int] | None
) -> None:
    assert window_of(level_record(opened_s, closed_s)) == window
