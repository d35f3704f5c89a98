"""TTFT, TPOT, ITL, ICL, E2E on records whose answers are known by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from breakeven.measure.arrivals import ArrivalTable
from breakeven.measure.latency import latencies
from tests.measure.handmade import request


def test_chunks_of_one_three_and_two_tokens() -> None:
    """Each chunk 20 ms after the one before: a token takes 20, 20/3 or 10 ms, which the tokens weigh."""
    found = latencies([request(0, [(100, 1), (120, 1), (140, 3), (160, 2)])])
    assert found.ttft_ms.mean == pytest.approx(100)
    assert found.e2e_ms.mean == pytest.approx(160)
    assert found.icl_ms.count == 3
    assert found.icl_ms.mean == pytest.approx(20)
    assert found.itl_ms.count == 6
    assert found.itl_ms.mean == pytest.approx(10)
    assert (found.itl_ms.min, found.itl_ms.max) == pytest.approx((20 / 3, 20))
    assert found.itl_ms.p50 == pytest.approx((20 / 3 + 10) / 2)
    assert found.tpot_ms.mean == pytest.approx(60 / 6)
    assert found.decode_rate == pytest.approx(100)
    assert found.per_request_throughput.mean == pytest.approx(7 / 0.16)


def test_first_arrival_of_several_tokens_is_left_out_of_tpot() -> None:
    found = latencies([request(0, [(50, 4), (90, 2)])])
    assert found.tpot_ms.mean == pytest.approx(40 / 2)
    assert found.decode_rate == pytest.approx(2 / 0.040)


def test_arrival_without_a_token_joins_the_next_in_itl_only() -> None:
    found = latencies([request(0, [(10, 1), (20, 0), (30, 2), (40, 0), (50, 0), (60, 1)])])
    assert found.itl_ms.count == 3
    assert sorted([found.itl_ms.min, found.itl_ms.max]) == pytest.approx([10, 30])
    assert found.itl_ms.mean == pytest.approx((10 + 10 + 30) / 3)
    assert found.icl_ms.count == 5
    assert found.icl_ms.mean == pytest.approx(10)


def test_arrivals_at_the_end_without_a_token_are_no_inter_token_latency() -> None:
    found = latencies([request(0, [(10, 1), (20, 1), (30, 0)])])
    assert found.itl_ms.count == 1
    assert found.e2e_ms.mean == pytest.approx(30)


def test_join_does_not_reach_into_the_next_request() -> None:
    found = latencies([request(0, [(10, 1), (20, 0)]), request(1, [(500, 1), (510, 1)], sent_s=9)])
    assert (found.itl_ms.count, found.itl_ms.mean) == (1, pytest.approx(10))


def test_answer_of_one_arrival_has_no_tpot_and_no_gaps() -> None:
    found = latencies([request(0, [(80, 5)])])
    assert (found.tpot_ms.count, found.icl_ms.count, found.itl_ms.count) == (0, 0, 0)
    assert found.decode_rate is None
    assert found.ttft_ms.mean == found.e2e_ms.mean == pytest.approx(80)
    assert found.per_request_throughput.mean == pytest.approx(5 / 0.080)


def test_tpot_is_undefined_where_all_tokens_came_first() -> None:
    """n = n1 although there was a second arrival: it brought text and no token."""
    found = latencies([request(0, [(80, 5), (90, 0)]), request(1, [(10, 1), (30, 1)])])
    assert (found.tpot_ms.count, found.tpot_ms.mean) == (1, pytest.approx(20))
    assert found.decode_rate == pytest.approx(1 / 0.020)


def test_end_of_sequence_token_counts_in_tpot_though_it_had_no_chunk() -> None:
    found = latencies([request(0, [(10, 1), (40, 2)], output_tokens=4)])
    assert found.tpot_ms.mean == pytest.approx(30 / 3)


def test_per_request_distributions_weigh_requests_and_itl_weighs_tokens() -> None:
    short = request(0, [(10, 1), (20, 1)])
    long = request(1, [(10, 1), *((10 + 30 * (i + 1), 1) for i in range(9))])
    found = latencies([short, long])
    assert found.tpot_ms.mean == pytest.approx((10 + 30) / 2)
    assert found.itl_ms.mean == pytest.approx((10 + 9 * 30) / 10)


def test_no_request_has_no_numbers() -> None:
    found = latencies([])
    for values in (found.ttft_ms, found.tpot_ms, found.itl_ms, found.icl_ms, found.e2e_ms):
        assert (values.count, values.mean) == (0, None)
    assert found.decode_rate is None


def test_arrival_in_the_nanosecond_of_sending_divides_by_nothing() -> None:
    found = latencies([request(0, [(0, 3)])])
    assert found.e2e_ms.mean == 0
    assert found.per_request_throughput.count == 0


@settings(deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(1, 500), st.integers(0, 5)), min_size=1, max_size=20), max_size=8))
def test_table_agrees_with_a_walk_through_the_arrivals(gaps: list[list[tuple[int, int]]]) -> None:
    """ITL as the definition says it, request by request, arrival by arrival."""
    records, expected = [], []
    for number, steps in enumerate(gaps):
        at_ms, since_ms, arrivals = 0, 0, []
        for position, (gap_ms, tokens) in enumerate(steps):
            at_ms, since_ms = at_ms + gap_ms, since_ms + gap_ms
            arrivals.append((at_ms, tokens))
            if position and tokens:
                expected += [since_ms / tokens] * tokens
            if tokens or not position:
                since_ms = 0
        records.append(request(number, arrivals, sent_s=number))
    found = latencies(records).itl_ms
    assert found.count == len(expected)
    if expected:
        assert found.mean == pytest.approx(float(np.mean(expected)))
        assert found.p99 == pytest.approx(float(np.percentile(expected, 99)))


def test_table_leaves_out_requests_without_arrivals_and_unsent_ones() -> None:
    unsent = request(2, [(5, 1)], output_tokens=1)
    unsent.sent_ns = None
    table = ArrivalTable.of([request(0), request(1, [(10, 1), (20, 2)], sent_s=1), unsent])
    assert table.at_ns.tolist() == [1_010_000_000, 1_020_000_000]
    assert table.before_ns.tolist() == [1_010_000_000, 1_010_000_000]
    assert table.is_first.tolist() == [True, False]
    assert table.e2e_ns.tolist() == [20_000_000]
