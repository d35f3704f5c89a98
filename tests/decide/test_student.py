from __future__ import annotations

import math

import pytest

from breakeven.decide.student import t_quantile, tail, two_sided_p


@pytest.mark.parametrize(
    ("p", "df", "expected"),
    [
        (0.975, 1, 12.7062047),
        (0.975, 5, 2.5705818),
        (0.95, 2, 2.9199856),
        (0.995, 10, 3.1692727),
        (0.9, 120, 1.2886462),
    ],
)
def test_quantiles_are_those_of_the_printed_tables(p: float, df: float, expected: float) -> None:
    assert t_quantile(p, df) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("df", [0.5, 1, 1.3, 2, 3.7, 5, 30, 1e3, 1e5])
def test_tails_and_quantiles_are_scipys_for_any_degrees_of_freedom(df: float) -> None:
    stats = pytest.importorskip("scipy.stats")
    for p in (1e-5, 0.4, 0.500001, 0.55, 0.8, 0.975, 0.9999, 1 - 1e-9):
        assert t_quantile(p, df) == pytest.approx(stats.t.ppf(p, df), rel=1e-8)
    for t in (0.0, 1e-9, 0.3, 1.0, 2.5, 30.0):
        assert tail(t, df) == pytest.approx(stats.t.sf(t, df), abs=1e-9)


def test_two_sided_p_takes_both_tails() -> None:
    assert two_sided_p(-2.5705818, 5) == pytest.approx(0.05, abs=1e-8)
    assert two_sided_p(0.0, 5) == 1.0


def test_one_degree_of_freedom_is_cauchy() -> None:
    assert tail(3.0, 1) == pytest.approx(0.5 - math.atan(3.0) / math.pi)


def test_the_median_is_zero_and_the_other_side_its_mirror() -> None:
    assert t_quantile(0.5, 3.3) == 0.0
    assert t_quantile(0.1, 3.3) == -t_quantile(0.9, 3.3)
