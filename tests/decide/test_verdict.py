from __future__ import annotations

import math

import numpy as np
import pytest
from benchmarks.verdicts import false_claims

from breakeven.decide.ratio import NoRatio, Ratio, paired
from breakeven.decide.verdict import holm, judge, longer


def a_ratio(
    value: float, se: float, n: int = 8, *, lower_is_better: bool = False, each_s: float | None = None
) -> Ratio:
    return Ratio(
        log=math.log(value), se=se, df=n - 1, n=n, method="pairs", lower_is_better=lower_is_better, each_s=each_s
    )


@pytest.mark.parametrize(
    ("value", "se", "verdict"),
    [
        (1.00, 0.005, "same"),
        (1.01, 0.004, "same"),  # significant, and of no importance
        (1.00, 0.05, "undecided"),
        (1.019, 0.0005, "same"),
        (1.021, 0.0005, "faster"),
        (1.10, 0.02, "faster"),
        (0.90, 0.02, "slower"),
        (0.99, 0.03, "undecided"),
    ],
)
def test_verdicts(value: float, se: float, verdict: str) -> None:
    assert judge({8: a_ratio(value, se)})[8].verdict == verdict


def test_verdicts_do_not_depend_on_which_arm_is_the_reference() -> None:
    for value in np.linspace(1.0, 1.04, 41):
        forth, back = (judge({1: a_ratio(v, 0.003)})[1].verdict for v in (float(value), 1 / float(value)))
        assert back == {"faster": "slower", "slower": "faster"}.get(forth, forth)


def test_a_shorter_latency_is_faster() -> None:
    assert judge({1: a_ratio(0.8, 0.02, lower_is_better=True)})[1].verdict == "faster"


def test_among_eight_loads_one_lucky_one_is_not_quoted() -> None:
    claim = {load: a_ratio(1.0, 0.02) for load in range(1, 8)} | {8: a_ratio(1.055, 0.02)}
    lucky = judge(claim)[8]
    assert (lucky.alone, lucky.verdict) == ("faster", "undecided")
    assert lucky.p_holm == pytest.approx(8 * (lucky.p_value or 0))


def test_a_load_without_a_ratio_is_undecided_and_no_test() -> None:
    no_ratio = NoRatio("arm_failed", "the arm brought no token")
    judged = judge({1: a_ratio(1.06, 0.02), 2: no_ratio})
    assert (judged[2].verdict, judged[2].why_not) == ("undecided", no_ratio)
    assert judged[1].p_holm == judged[1].p_value


def test_holm_takes_the_smallest_times_all_the_next_times_one_less_and_never_falls() -> None:
    assert holm([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.5])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_nearer_to_a_border_takes_longer() -> None:
    lengths = [longer(1, a_ratio(value, 0.02)).observations or 0 for value in (1.05, 1.04, 1.03)]
    assert lengths == sorted(lengths)
    assert lengths[0] >= 1


def test_more_loads_in_the_claim_take_longer() -> None:
    alone, together = (longer(1, a_ratio(1.04, 0.02), tests=tests).observations or 0 for tests in (1, 8))
    assert alone < together


def test_seconds_are_told_where_a_pair_s_length_is_known() -> None:
    told = longer(4, a_ratio(1.03, 0.02, each_s=30.0))
    assert told.observations is not None
    assert told.seconds == 30.0 * told.observations
    assert longer(4, a_ratio(1.03, 0.02)).seconds is None


def test_what_no_bearable_length_decides_is_not_promised() -> None:
    assert longer(1, a_ratio(1.02, 2.0)).observations is None


def test_the_predicted_length_decides() -> None:
    rng, decided = np.random.default_rng(5), 0
    more = longer(1, a_ratio(1.04, 0.02)).observations
    assert more is not None
    for _ in range(200):
        logs = math.log(1.04) + 0.02 * math.sqrt(8) * rng.standard_normal(8 + more)
        decided += judge({1: paired([1.0] * (8 + more), np.exp(logs).tolist())})[1].verdict == "faster"
    assert 0.7 <= decided / 200 <= 0.95


@pytest.mark.parametrize("profile", ["equal", "grows x4"])
def test_equal_arms_over_eight_loads_are_called_different_in_at_most_a_twentieth(profile: str) -> None:
    quoted, alone = false_claims(profile, 8, 400, seed=3)
    assert quoted <= 0.065  # 5 % and one and a half standard errors
    assert alone > 0.15  # what Holm is there for
