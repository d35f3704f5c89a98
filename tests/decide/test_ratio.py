from __future__ import annotations

import math

import numpy as np
import pytest

from breakeven.decide.ratio import LogMean, NoRatio, Ratio, log_mean, paired, unpaired, window_mean
from breakeven.measure.stats import batch_interval


def the_ratio(found: Ratio | NoRatio) -> Ratio:
    assert isinstance(found, Ratio)
    return found


def test_pairs_give_students_t_over_their_log_ratios() -> None:
    found = the_ratio(paired([100, 110, 90, 100], [105, 121, 90, 108], each_s=30.0))
    logs = np.log([1.05, 1.1, 1.0, 1.08])
    half = 3.1824463 * logs.std(ddof=1) / 2  # t at 0.975 for 3 degrees of freedom
    assert (found.log, found.n, found.df, found.each_s) == (pytest.approx(logs.mean()), 4, 3, 30.0)
    assert found.interval().low == pytest.approx(math.exp(logs.mean() - half), rel=1e-7)
    assert found.interval().high == pytest.approx(math.exp(logs.mean() + half), rel=1e-7)


def test_drift_that_hits_both_visits_of_a_pair_falls_out() -> None:
    drift, ratios = np.array([1.0, 1.2, 0.7, 2.0]), np.array([1.05, 1.06, 1.04, 1.05])
    still = the_ratio(paired([100.0] * 4, list(100 * ratios)))
    drifting = the_ratio(paired(list(100 * drift), list(100 * ratios * drift)))
    assert (drifting.log, drifting.se) == (pytest.approx(still.log), pytest.approx(still.se))


def test_drift_from_visit_to_visit_falls_out_of_the_noise_from_eight_pairs_on() -> None:
    noise = np.array([0.01, -0.02, 0.03, 0.0, -0.01, 0.02, -0.03, 0.01])
    for n, shrinks in ((7, False), (8, True), (9, True)):
        logs = np.resize(noise, n)
        # Speed that falls by 5 % a visit: in A B the second is the slower one for it, in B A the first.
        order = 0.05 * np.where(np.arange(n) % 2, 1, -1)
        still, drifting = (the_ratio(paired([1.0] * n, list(np.exp(each)))) for each in (logs, logs + order))
        assert (drifting.se == pytest.approx(still.se)) == shrinks
        if shrinks:
            assert drifting.log == pytest.approx(still.log)
            assert drifting.df == n - 2


def test_pairs_that_only_their_order_tells_apart_still_have_some_noise() -> None:
    found = the_ratio(paired([1.0] * 8, [1.1, 1.2] * 4))
    assert 0 < found.se < 1e-6
    assert found.value == pytest.approx(math.sqrt(1.1 * 1.2))


def test_swapped_arms_give_the_inverse() -> None:
    a, b = [100.0, 110.0, 95.0], [120.0, 125.0, 119.0]
    forth, back = the_ratio(paired(a, b)), the_ratio(paired(b, a))
    assert forth.interval().low == pytest.approx(1 / back.interval().high)
    assert forth.p_value == pytest.approx(back.p_value)


def test_a_p_value_below_a_twentieth_is_an_interval_without_1() -> None:
    for high in (1.01, 1.02, 1.03, 1.05, 1.1):
        found = the_ratio(paired([1.0] * 4, [0.99, high, 1.0, high]))
        inside = found.interval()
        assert (found.p_value < 0.05) == (not inside.low <= 1 <= inside.high)


def test_a_latency_gains_where_its_ratio_is_below_1() -> None:
    found = the_ratio(paired([50, 51, 52], [40, 41, 43], lower_is_better=True))
    assert found.value < 1 < math.exp(found.gain)


@pytest.mark.parametrize(
    ("reference", "other", "reason"),
    [
        ([100, 100], [0, 0], "arm_failed"),
        ([0, 0, 0], [1, 2, 3], "arm_failed"),
        ([100, 101, 99], [100, 0, 100], "some_failed"),
        ([100, 101, 99], [100, -1, 100], "some_failed"),
        ([100, 101, 99], [100, math.nan, 100], "some_failed"),
        ([100], [120], "too_few"),
        ([], [], "too_few"),
        ([100, 100, 100], [100, 100, 100], "zero_variance"),
        ([100, 200, 300], [110, 220, 330], "zero_variance"),
    ],
)
def test_what_can_t_be_compared_says_why(reference: list[float], other: list[float], reason: str) -> None:
    found = paired(reference, other)
    assert isinstance(found, NoRatio)
    assert found.reason == reason


def test_a_failed_arm_is_named() -> None:
    found = paired([1.0, 2.0], [0.0, 0.0])
    assert isinstance(found, NoRatio)
    assert "other arm brought nothing" in found.detail


def test_two_windows_are_compared_by_welch() -> None:
    first, second = np.array([98.0, 101, 100, 103, 99, 99]), np.array([110.0, 105, 125, 118, 96, 106])
    arms = []
    for batches in (first, second):
        interval = batch_interval(batches)
        assert interval is not None
        arms.append(window_mean(float(batches.mean()), (interval.low, interval.high)))
    found = the_ratio(unpaired(*arms, method="batches"))
    variances = [batches.var(ddof=1) / 6 / batches.mean() ** 2 for batches in (first, second)]
    assert found.value == pytest.approx(second.mean() / first.mean())
    assert found.se == pytest.approx(math.sqrt(sum(variances)), rel=1e-6)
    assert found.df == pytest.approx(sum(variances) ** 2 / sum(v * v / 5 for v in variances), rel=1e-6)
    assert 5 <= found.df <= 10


def test_repeated_sweeps_of_independent_runs_match_scipys_welch_test() -> None:
    stats = pytest.importorskip("scipy.stats")
    a, b = [100.0, 104.0, 99.0], [111.0, 109.0, 118.0]
    found = the_ratio(unpaired(log_mean(a), log_mean(b), method="sweeps"))
    expected = stats.ttest_ind(np.log(b), np.log(a), equal_var=False)
    assert (found.p_value, found.df) == (pytest.approx(expected.pvalue), pytest.approx(expected.df))


def test_one_arm_without_noise_leaves_the_other_s() -> None:
    found = the_ratio(unpaired(LogMean(1.0, 0.0, 5), LogMean(1.1, 0.02, 5), method="batches"))
    assert (found.se, found.df) == (pytest.approx(0.02), pytest.approx(5))


def test_windows_without_noise_or_interval_or_tokens_say_so() -> None:
    still = LogMean(1.0, 0.0, 5)
    reasons = [
        unpaired(still, still, method="batches"),
        unpaired(window_mean(100.0, None), still, method="batches"),
        unpaired(still, window_mean(0.0, (0.0, 0.0)), method="batches"),
        unpaired(still, log_mean([3.0]), method="sweeps"),
    ]
    found = [item.reason if isinstance(item, NoRatio) else None for item in reasons]
    assert found == ["zero_variance", "no_interval", "arm_failed", "too_few"]
