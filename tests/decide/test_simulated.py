"""Comparisons of simulated arms find the truth: a small form of `benchmarks/comparisons.py`, with fixed seeds."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from benchmarks.comparisons import (
    CLOSE,
    DOUBLING,
    PAIRS,
    QUIET,
    TURN,
    Outcome,
    drifting,
    equal_arms,
    five_percent,
    hump,
    kinds,
    one_break_even,
    pair_of,
    take_turns,
    throughput,
)

from breakeven.alternation import LOOKS, TURNOVERS
from breakeven.decide.breakeven import Kind

#: Where the ratio is looked at.
AT = [PAIRS * look for look in LOOKS]


def times(name: str, run: Callable[[int], Outcome], runs: int) -> int:
    """In how many runs something was so."""
    return sum(run(seed).get(name, False) for seed in range(runs))


def test_a_levels_interval_covers_the_true_throughput() -> None:
    assert times("covered", throughput(0.3), 24) >= 21


@pytest.mark.parametrize("share", [0.0, 0.05])
def test_a_ratios_interval_covers_the_truth_under_drift(share: float) -> None:
    assert times("covered", drifting(share, precision=None), 8) >= 7


def test_equal_arms_are_told_apart_in_no_more_than_a_twentieth_of_comparisons() -> None:
    assert times("a difference quoted", equal_arms((1, 2)), 6) <= 1


def test_five_percent_are_found() -> None:
    assert times("found", five_percent(), 5) >= 4


def test_a_break_even_lies_in_its_interval() -> None:
    outcomes = [one_break_even(DOUBLING[:4])(seed) for seed in range(2)]
    assert [outcome["counted"] and outcome["covered"] for outcome in outcomes] == [True] * 2


@pytest.mark.parametrize(
    ("gain", "loads", "kind"),
    [
        (lambda load: 0.2, (1, 2, 4), "pays_everywhere"),
        (lambda load: -0.2, (1, 2, 4), "pays_nowhere"),
        (hump, CLOSE, "pays_between"),
        (lambda load: 0.01 - 0.01 * math.log(load), (1, 2, 4), "cant_tell"),
    ],
)
def test_curves_get_their_kind(gain: Callable[[float], float], loads: tuple[int, ...], kind: Kind) -> None:
    assert kinds(gain, loads, QUIET)(1) == {kind: True}


def test_turns_end_at_the_first_look_at_which_the_ratio_is_precise() -> None:
    pair = pair_of(lambda load: 0.1)
    assert TURN.turnovers == TURNOVERS[0]
    counts = [len(take_turns(pair, 1, 1, precision=precision).other) for precision in (1.0, 1e-9)]
    assert counts == [AT[0], AT[-1]]
