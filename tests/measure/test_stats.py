"""Distributions against numpy's on the values written out, and the interval of six batch means."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from breakeven.measure.stats import BATCHES, Distribution, batch_interval, distribution

values = st.floats(min_value=-1e9, max_value=1e9, allow_subnormal=False)


@settings(deadline=None)
@given(st.lists(st.tuples(values, st.integers(0, 20)), max_size=40))
def test_weights_count_as_repeats(weighted: list[tuple[float, int]]) -> None:
    sample = np.array([value for value, _ in weighted], dtype=np.float64)
    weights = np.array([weight for _, weight in weighted], dtype=np.int64)
    written_out = np.repeat(sample, weights)
    found = distribution(sample, weights)
    assert found.count == len(written_out)
    if not found.count:
        assert found == Distribution(count=0)
        return
    scale = 1 + float(np.abs(written_out).max())
    assert found.mean == pytest.approx(written_out.mean(), abs=1e-12 * scale)
    assert (found.min, found.max) == (written_out.min(), written_out.max())
    for share, percentile in ((50, found.p50), (90, found.p90), (95, found.p95), (99, found.p99)):
        assert percentile == pytest.approx(np.percentile(written_out, share), abs=1e-12 * scale)
    if found.count > 1:
        assert found.std == pytest.approx(written_out.std(ddof=1), abs=1e-7 * scale)


@settings(deadline=None)
@given(st.lists(values, min_size=1, max_size=60))
def test_percentiles_lie_in_order_between_the_extremes(sample: list[float]) -> None:
    d = distribution(np.array(sample))
    assert None not in (d.min, d.p50, d.p90, d.p95, d.p99, d.max)
    ordered = [d.min, d.p50, d.p90, d.p95, d.p99, d.max]
    assert ordered == sorted(ordered)


def test_nothing_has_no_numbers() -> None:
    assert distribution(np.array([])) == Distribution(count=0)


def test_one_value_has_no_spread() -> None:
    d = distribution(np.array([3.0]))
    assert (d.count, d.mean, d.std, d.min, d.p50, d.p99, d.max) == (1, 3.0, None, 3.0, 3.0, 3.0, 3.0)


def test_one_value_of_several_tokens_has_a_spread_of_zero() -> None:
    assert distribution(np.array([3.0]), np.array([5])).std == 0.0


def test_known_sample() -> None:
    d = distribution(np.arange(1.0, 11.0))
    assert (d.mean, d.p50, d.min, d.max) == (5.5, 5.5, 1.0, 10.0)
    assert d.p90 == pytest.approx(9.1)
    assert d.std == pytest.approx(math.sqrt(82.5 / 9))


def test_interval_of_six_batches_is_student_s_t() -> None:
    interval = batch_interval(np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))
    assert interval is not None
    half = 2.5705818366147395 * math.sqrt(3.5) / math.sqrt(6)  # scipy.stats.t.ppf(0.975, 5), variance 3.5
    assert (interval.low, interval.high) == pytest.approx((3.5 - half, 3.5 + half))


@pytest.mark.parametrize("count", [0, 1, BATCHES - 1, BATCHES + 1])
def test_any_other_number_of_batches_has_no_interval(count: int) -> None:
    assert batch_interval(np.ones(count)) is None


def test_interval_of_independent_batches_covers_the_truth() -> None:
    draws = np.random.default_rng(1).normal(10.0, 2.0, size=(4000, BATCHES))
    intervals = [batch_interval(row) for row in draws]
    covered = np.mean([i is not None and i.low <= 10.0 <= i.high for i in intervals])
    assert 0.94 <= covered <= 0.96
