from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from breakeven.decide.breakeven import break_even
from breakeven.decide.knee import Knee
from breakeven.decide.ratio import NoRatio, Ratio
from breakeven.decide.verdict import Longer
from breakeven.decide.words import break_even_sentence, knee_words, longer_words
from breakeven.measure.stats import Interval
from tests.decide.test_verdict import a_ratio

LOADS = (1, 2, 4, 8, 16, 32)


def sentence(
    ratios: Sequence[float],
    se: float = 0.01,
    loads: Sequence[float] = LOADS,
    other: str = "on",
    *,
    latency: bool = False,
) -> str:
    measured: dict[float, Ratio | NoRatio] = {
        load: Ratio(log=math.log(ratio), se=se, df=7, n=8, method="pairs", lower_is_better=latency, each_s=30.0)
        for load, ratio in zip(loads, ratios, strict=True)
    }
    return break_even_sentence(break_even(measured), reference="off", other=other)


@pytest.mark.parametrize(
    ("ratios", "se", "expected"),
    [
        (
            [1.5, 1.4, 1.2, 0.99, 0.9, 0.86],
            0.01,
            "Speculation pays below 7.7 requests in flight (95 %: 7.1 to 8.7) and costs 14 % at 32",
        ),
        (
            [0.9, 0.95, 1.05, 1.1, 1.2, 1.2],
            0.01,
            "Speculation pays above 2.9 requests in flight (95 %: 2.5 to 3.2) and costs 10 % at 1",
        ),
        (
            [1.63, 1.5, 1.4, 1.3, 1.2, 1.08],
            0.01,
            "Speculation pays at every load measured (1 to 32): between 8 % and 63 % faster",
        ),
        (
            [0.97, 0.95, 0.9, 0.9, 0.88, 0.86],
            0.005,
            "Speculation pays nowhere: between 3 % and 14 % slower at every load measured (1 to 32)",
        ),
        (
            [1.0, 1.0, 0.95, 0.9, 0.88, 0.86],
            0.005,
            "Speculation pays nowhere: costs at 4 to 32 (between 5 % and 14 % slower), "
            "no difference beyond 2 % at 1 and 2",
        ),
        (
            [1.0, 1.001, 1.002, 1.0, 0.999, 1.0],
            0.002,
            "Speculation makes no difference beyond 2 % at every load measured (1 to 32)",
        ),
        (
            [0.8, 0.9, 1.2, 1.2, 0.9, 0.8],
            0.01,
            "Speculation seems to cross break-even 2 times, near 2.6 and 12 requests in flight: measure C=3 and 11 too",
        ),
    ],
)
def test_what_a_person_can_quote(ratios: list[float], se: float, expected: str) -> None:
    assert sentence(ratios, se) == expected


def test_what_the_data_leaves_open_comes_with_what_to_do() -> None:
    text = sentence([1.0] * 6, 0.02)
    assert text.startswith(
        "The data can't tell where speculation pays: measure C=1, C=2, C=4, C=8, C=16 and C=32 about "
    )
    assert text.endswith(" min longer each")


def test_an_end_that_is_not_seen_is_told_as_a_bound() -> None:
    text = sentence([1.5, 1.4, 1.3, 1.2, 1.1, 1.0], 0.02)
    assert text.startswith(
        "Speculation pays at 1 to 16 (between 10 % and 50 % faster), undecided at 32; its break-even"
    )
    assert "lies above" in text


def test_a_hump_is_told_with_its_best() -> None:
    loads = (1, 2, 3, 4, 6, 8, 11, 16, 23, 32)
    text = sentence([0.8, 0.8, 0.9, 1.1, 1.2, 1.25, 1.1, 1.1, 0.9, 0.8], 0.01, loads)
    assert text.startswith("Speculation pays between 3.5 (95 %: ")
    assert text.endswith("25 % faster at 8")


def test_other_arms_are_called_by_name() -> None:
    assert sentence([1.1] * 6, other="k=3").startswith("k=3 against off pays at every load")


def test_latencies_are_shorter_not_faster() -> None:
    assert sentence([0.5, 0.6, 0.7, 0.7, 0.8, 0.9], latency=True).endswith("between 10 % and 50 % shorter")


def test_nothing_to_compare_says_why() -> None:
    failed = break_even({8.0: NoRatio("arm_failed", "the other arm brought nothing in any of 8 visits")})
    assert break_even_sentence(failed, reference="off", other="on") == (
        "Speculation can't be judged: at 8 the other arm brought nothing in any of 8 visits"
    )
    assert "no load was measured in both arms" in break_even_sentence(break_even({}), reference="a", other="b")


def test_loads_without_a_verdict_are_never_counted_among_those_that_pay() -> None:
    failed = NoRatio("arm_failed", "on brought nothing in any of 8 visits")
    found = break_even({1.0: a_ratio(1.4, 0.01), 4.0: a_ratio(1.2, 0.01), 8.0: failed, 16.0: failed})
    assert break_even_sentence(found, reference="off", other="on") == (
        "Speculation pays at every load with a verdict (1 to 4): between 20 % and 40 % faster; no verdict at 8 and 16"
    )
    crossing = break_even({1.0: a_ratio(1.4, 0.01), 4.0: failed, 8.0: a_ratio(0.8, 0.01)})
    assert break_even_sentence(crossing, reference="off", other="on").endswith("costs 20 % at 8; no verdict at 4")


def test_one_load_is_not_called_every() -> None:
    assert sentence([1.1], loads=[8]) == "Speculation pays at the one load measured (8): 10 % faster"


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ([Longer(8, 8, 240), Longer(16, 7, 235)], "measure C=8 and C=16 about 4 min longer each"),
        ([Longer(8, 8, 240), Longer(16, 9, 500)], "measure C=8 about 4 min and C=16 about 9 min longer"),
        ([Longer(8, 2, 41)], "measure C=8 about 50 s longer"),
        ([Longer(8, 12, None)], "measure C=8 by 12 observations longer"),
        ([Longer(8, None, None), Longer(4, 1, 100)], "measure C=4 about 2 min longer"),
        ([Longer(8, None, None)], "no bearable time would decide C=8"),
    ],
)
def test_how_much_longer(loads: list[Longer], expected: str) -> None:
    assert longer_words(loads) == expected


@pytest.mark.parametrize(
    ("knee", "expected"),
    [
        (Knee(kind="found", load=12.3, ci95=Interval(9.96, 15.2)), "12 requests in flight (95 %: 10 to 15)"),
        (
            Knee(kind="found", load=12.3, ci95=Interval(9.96, 15.2), grows=True),
            "12 requests in flight (95 %: 10 to 15), and throughput still grows a little at the highest load",
        ),
        (Knee(kind="at_or_above_highest", load=32.0), "at or above 32 requests in flight"),
        (Knee(kind="at_or_below_lowest", load=1.0), "at or below 1 requests in flight"),
        (
            Knee(kind="unknown", why_not="1 load with an interval: needs two"),
            "not known: 1 load with an interval: needs two",
        ),
    ],
)
def test_knees_in_words(knee: Knee, expected: str) -> None:
    assert knee_words(knee) == expected
