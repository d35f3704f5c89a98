from __future__ import annotations

import math

import numpy as np
import pytest
from benchmarks.verdicts import quantile_coverage

from breakeven.decide.quantiles import paired_quantiles, unpaired_quantiles
from breakeven.decide.ratio import NoRatio, Ratio


def visits(pairs: int, requests: int, factor: float = 1.0, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [factor * np.exp(0.2 * rng.standard_normal(requests)) for _ in range(pairs)]


def test_the_estimate_is_that_of_all_requests() -> None:
    a, b = visits(8, 50), visits(8, 50, 1.3, seed=1)
    found = paired_quantiles(a, b, 0.5)
    assert isinstance(found, Ratio)
    assert found.value == pytest.approx(np.median(np.concatenate(b)) / np.median(np.concatenate(a)))
    assert (found.n, found.df, found.lower_is_better) == (8, 7, True)
    assert found.gain < 0


def test_a_p99_needs_300_requests_in_each_arm() -> None:
    few = paired_quantiles(visits(8, 37), visits(8, 100), 0.99)
    assert isinstance(few, NoRatio)
    assert (few.reason, few.detail) == ("few_requests", "296 requests of the reference arm: a p99 needs 300")
    assert isinstance(paired_quantiles(visits(8, 37), visits(8, 100), 0.95), Ratio)
    assert isinstance(paired_quantiles(visits(8, 38), visits(8, 100, seed=2), 0.99), Ratio)


def test_visits_are_joined_until_a_part_has_requests_beyond_the_quantile() -> None:
    found = paired_quantiles(visits(8, 50), visits(8, 60, seed=1), 0.99, each_s=20.0)
    assert isinstance(found, Ratio)
    assert (found.n, found.each_s) == (4, 40.0)


def test_a_visit_in_which_nothing_ended_well_is_joined_with_its_neighbour() -> None:
    a, b = visits(4, 40), visits(4, 40, seed=1)
    found = paired_quantiles([*a[:2], np.array([]), *a[3:]], b, 0.5)
    assert isinstance(found, Ratio)
    assert found.n == 3


@pytest.mark.parametrize(
    ("reference", "other", "reason"),
    [
        ([np.array([])] * 4, visits(4, 40), "arm_failed"),
        (visits(1, 40), visits(1, 40, seed=1), "few_requests"),
        (visits(4, 1), visits(4, 1, seed=1), "few_requests"),
        ([np.full(40, 0.0)] * 4, visits(4, 40), "some_failed"),
        ([np.full(40, 7.0)] * 4, [np.full(40, 8.0)] * 4, "zero_variance"),
    ],
)
def test_what_can_t_be_compared_says_why(reference: list[np.ndarray], other: list[np.ndarray], reason: str) -> None:
    found = paired_quantiles(reference, other, 0.5)
    assert isinstance(found, NoRatio)
    assert found.reason == reason


def test_windows_that_exist_already_are_cut_into_parts() -> None:
    a, b = visits(1, 600)[0], visits(1, 600, 1.2, seed=1)[0]
    found = unpaired_quantiles(a, b, 0.99)
    assert isinstance(found, Ratio)
    assert found.method == "batches"
    assert found.value == pytest.approx(np.quantile(b, 0.99) / np.quantile(a, 0.99))
    assert isinstance(unpaired_quantiles(a[:299], b, 0.99), NoRatio)


def test_a_slow_swing_of_latencies_shows_in_the_interval() -> None:
    rng = np.random.default_rng(3)
    swing = np.exp(0.3 * np.sin(np.linspace(0, 2 * math.pi, 600)))
    still, swinging = (np.exp(0.05 * rng.standard_normal(600)) * factor for factor in (np.ones(600), swing))
    narrow, wide = unpaired_quantiles(still, still[::-1], 0.5), unpaired_quantiles(still, swinging, 0.5)
    assert isinstance(narrow, Ratio)
    assert isinstance(wide, Ratio)
    assert wide.se > 5 * narrow.se


@pytest.mark.parametrize("p", [0.5, 0.99])
def test_intervals_cover_the_truth_though_requests_resemble_each_other(p: float) -> None:
    assert quantile_coverage(p, 8, 60, shared=0.1, repeats=200, seed=1) >= 0.92
