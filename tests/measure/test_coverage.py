"""The interval holds the truth as often as it should, with the stopping rule on: by simulation, with a fixed seed."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.intervals import CAP_S, Scenario, Windows, at_looks, each_second_of_any_batch, judge, simulate

from breakeven.levels import DEFAULT_MAX_SECONDS
from breakeven.load.window import FIRST_LOOK_S
from breakeven.measure.arrivals import ArrivalTable
from breakeven.measure.throughput import batch_rates

WINDOWS = 480
S = 1_000_000_000


@pytest.fixture(scope="module")
def found() -> Windows:
    """Steps of 65 ms with AR(1) noise, requests of 3 s."""
    return simulate(Scenario(concurrency=4, latency_s=3.0, memory=0.9), WINDOWS, seed=7)


def test_interval_covers_the_truth_with_the_stopping_rule_on(found: Windows) -> None:
    outcome = judge(found, at_looks)
    assert outcome.with_interval == 1
    # 95 % would be 0.93 to 0.97 over 480 windows; the rule costs one or two (docs/statistics.md).
    assert 0.89 <= outcome.coverage <= 0.97
    assert outcome.half_width < 0.055
    assert abs(outcome.bias) < 0.005


def test_stopping_at_the_first_narrow_moment_covers_less(found: Windows) -> None:
    assert judge(found, each_second_of_any_batch).coverage < judge(found, at_looks).coverage - 0.03


def test_windows_that_stopped_at_a_look_stopped_at_one_of_the_three(found: Windows) -> None:
    lengths = {at_looks(found, row)[0] for row in range(WINDOWS)}
    assert lengths <= {FIRST_LOOK_S, 2 * FIRST_LOOK_S, 4 * FIRST_LOOK_S, CAP_S}
    assert CAP_S == DEFAULT_MAX_SECONDS


def test_simulated_batches_are_those_of_the_package(found: Windows) -> None:
    """One stream with all tokens of a step: what `batch_rates` makes of it is what the simulation uses."""
    at_ns = np.rint((found.elapsed_s[0] - found.elapsed_s[0, 0]) * S).astype(np.int64)
    opened_ns = round(-found.elapsed_s[0, 0] * S)
    tokens = np.diff(found.tokens[0], prepend=0).astype(np.int64)
    table = ArrivalTable([(0, list(zip(at_ns.tolist(), tokens.tolist(), strict=True)))])
    rates = batch_rates(table, opened_ns, opened_ns + 90 * S)
    assert rates == pytest.approx(found.rates(0, 90.0), rel=1e-6)
