from __future__ import annotations

import pytest

from breakeven.decide.lossless import differing, wilson


def test_prompts_that_both_answered_are_compared() -> None:
    found = differing({"a": "one", "b": "two", "c": "three"}, {"b": "two", "c": "thrice", "d": "four"})
    assert (found.prompts, found.differ, found.share) == (2, 1, 0.5)
    assert found.examples == (("c", 3),)


def test_a_text_that_ends_sooner_differs_from_its_end_on() -> None:
    assert differing({"a": "one two"}, {"a": "one"}).examples == (("a", 3),)


def test_no_prompt_in_common_has_no_share() -> None:
    found = differing({"a": "one"}, {"b": "one"})
    assert (found.prompts, found.share, found.ci95) == (0, None, None)


@pytest.mark.parametrize(("hits", "count"), [(0, 20), (1, 20), (10, 20), (20, 20)])
def test_wilsons_interval_is_scipys(hits: int, count: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    expected = stats.binomtest(hits, count).proportion_ci(method="wilson")
    assert (wilson(hits, count).low, wilson(hits, count).high) == (
        pytest.approx(expected.low, abs=1e-9),
        pytest.approx(expected.high, abs=1e-9),
    )


def test_no_difference_among_twenty_is_not_none_at_all() -> None:
    """16 %: z² / (n + z²)."""
    assert wilson(0, 20).high == pytest.approx(3.8414588 / 23.8414588, rel=1e-6)
