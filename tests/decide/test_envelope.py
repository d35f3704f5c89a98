"""The tuned arm over the best of several static ones, whose best is not picked by luck."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from breakeven.decide.envelope import EnvelopeRatio, envelope_ratio, over_levels
from breakeven.decide.ratio import NoRatio, Ratio, paired
from breakeven.decide.verdict import more_wanted
from breakeven.measure.stats import FloatArray

NOISE = 0.03


def drawn(rng: np.random.Generator, below: Sequence[float], blocks: int) -> FloatArray:
    """Rates of a tuned arm as fast as the best static one, then of static arms so far below it."""
    means = np.array([0.0, *below])
    rates: FloatArray = np.exp(NOISE * rng.standard_normal((len(means), blocks)) - means[:, None])
    return rates


def ratio_of(rates: FloatArray) -> EnvelopeRatio:
    found = envelope_ratio(rates[0].tolist(), {f"k{k}": own.tolist() for k, own in enumerate(rates[1:])})
    assert isinstance(found, EnvelopeRatio)
    return found


@pytest.mark.parametrize("blocks", [3, 4, 8, 11])
def test_where_one_arm_leads_clearly_it_is_the_ratio_to_that_arm(blocks: int) -> None:
    rates = drawn(np.random.default_rng(0), (0.5, 0.0, 0.4), blocks)
    found, plain = ratio_of(rates), paired(rates[2].tolist(), rates[0].tolist())
    assert isinstance(plain, Ratio)
    assert (found.log, found.se, found.df) == pytest.approx((plain.log, plain.se, plain.df))
    assert found.interval() == plain.interval()
    assert (found.best, found.lag, found.n) == (("k1",), 0.0, blocks)


def test_each_half_is_compared_with_the_arm_that_the_other_half_chose() -> None:
    # k0 is the faster one in the first and third cycle, k1 in the others.
    tuned = [1.0, 1.01, 0.99, 1.0, 1.01, 1.0, 0.99, 1.01]
    k0 = [1.2, 1.2, 1.0, 1.0, 1.2, 1.2, 1.0, 1.0]
    k1 = [1.0, 1.0, 1.2, 1.2, 1.0, 1.0, 1.2, 1.2]
    found = envelope_ratio(tuned, {"k0": k0, "k1": k1})
    assert isinstance(found, EnvelopeRatio)
    assert found.value == pytest.approx(1.0, abs=0.01)  # 0.83 if each block were compared with its own best
    assert found.best == ("k1", "k0")
    # Either arm brings 1.095 over all blocks, which the chosen ones fell short of.
    assert found.lag == pytest.approx(0.75 * math.log(1.2) / 2)
    half = math.log(found.interval().high) - found.log
    assert math.log(found.interval().low) == pytest.approx(found.log - found.lag - half)


def test_a_drift_within_turns_does_not_choose_the_arm() -> None:
    # Whoever comes first in a turn is 5 % faster; k0 comes first in even turns, and is 1 % faster by itself.
    first = np.array([1.05, 1.0] * 4)
    found = envelope_ratio(
        [1.0, 1.001, 0.999, 1.0, 1.002, 1.0, 1.001, 1.0], {"k0": (1.01 * first).tolist(), "k1": first[::-1].tolist()}
    )
    assert isinstance(found, EnvelopeRatio)
    assert found.best == ("k0",)


@pytest.mark.parametrize("below", [(0.0, 0.0), (0.0, 0.02), (0.0, 0.0, 0.0, 0.0, 0.0), (0.0, 0.02, 0.02, 0.02, 0.02)])
def test_the_interval_holds_the_true_ratio(below: tuple[float, ...]) -> None:
    rng = np.random.default_rng(1)
    found = [ratio_of(drawn(rng, below, 8)) for _ in range(400)]
    covered = [ratio.interval().low <= 1 <= ratio.interval().high for ratio in found]
    assert np.mean(covered) >= 0.93
    if not any(below):
        spread = np.std([ratio.log for ratio in found]) / math.sqrt(len(found))
        assert abs(np.mean([ratio.log for ratio in found])) < 3 * spread  # unbiased where all are equal


def test_the_mean_over_levels_holds_it_too() -> None:
    rng = np.random.default_rng(2)
    found = [over_levels([ratio_of(drawn(rng, (0.0, 0.02, 0.02), 8)) for _ in range(6)]) for _ in range(150)]
    assert np.mean([ratio.interval().low <= 1 <= ratio.interval().high for ratio in found]) >= 0.93


def test_the_mean_over_equal_levels_is_as_sure_as_all_of_them() -> None:
    one = EnvelopeRatio(log=-0.01, se=0.02, df=6, lag=0.004, n=8)
    mean = over_levels([one] * 4)
    assert (mean.log, mean.se, mean.df, mean.lag) == pytest.approx((-0.01, 0.01, 24, 0.004))


def test_the_noisiest_level_has_the_fewest_degrees_of_freedom_to_give() -> None:
    sure, loose = (EnvelopeRatio(log=0.0, se=se, df=6, lag=0.0, n=8) for se in (0.001, 0.1))
    assert over_levels([sure, sure, loose]).df == pytest.approx(6, rel=0.01)


def test_an_arm_that_failed_spoils_the_level_by_name() -> None:
    found = envelope_ratio([1.0] * 4, {"off": [1.0, 1.1, 0.0, 1.0], "on": [2.0] * 4})
    assert isinstance(found, NoRatio)
    assert found.reason == "some_failed"
    assert found.detail.startswith("off: ")
    failed = envelope_ratio([0.0] * 4, {"off": [1.0] * 4, "on": [2.0] * 4}, name="auto")
    assert isinstance(failed, NoRatio)
    assert failed.detail.startswith("auto brought nothing")


@pytest.mark.parametrize("blocks", [0, 1])
def test_too_few_blocks_have_no_ratio(blocks: int) -> None:
    found = envelope_ratio([1.0] * blocks, {"off": [1.0] * blocks, "on": [2.0] * blocks})
    assert isinstance(found, NoRatio)
    assert found.reason == "too_few"


def test_more_blocks_are_predicted_by_the_root_law() -> None:
    now = EnvelopeRatio(log=0.0, se=0.02, df=1000, lag=0.0, n=8)
    more = more_wanted(now.n, lambda times: now.after(times).half_width <= now.half_width / 2)
    assert more == pytest.approx(24, abs=2)
    assert more_wanted(now.n, lambda times: now.after(times).interval().low >= 1.01) is None
