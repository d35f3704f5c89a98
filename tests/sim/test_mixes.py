"""Mixes of prompts over time."""

from __future__ import annotations

import pytest

from breakeven.errors import UsageError
from breakeven.sim.mixes import Mix, Phase, read_mix
from tests.sim.handy import KINDS, PROMPTS


def test_phases_are_read_as_written() -> None:
    assert read_mix("code+json:120,chat") == (Phase(("code", "json"), 120.0), Phase(("chat",), 300.0))


@pytest.mark.parametrize("text", ["", "code:x", "code:0", "code:nan", ":10", "code++json:10", "code:10,,chat:5"])
def test_what_is_no_mix_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--mix"):
        read_mix(text)


def test_each_phase_sends_its_kinds_in_turn_and_comes_again() -> None:
    mix = Mix(PROMPTS, read_mix("code+json+json:10,chat:20"))
    assert [mix.next(at_s).kind for at_s in (0, 1, 9.9)] == ["code", "json", "json"]
    assert {mix.next(at_s).kind for at_s in (10, 15, 29.9)} == {"chat"}
    assert mix.next(31).kind == "code"
    assert [mix.phase_at(at_s) for at_s in (0, 10, 30, 40)] == [0, 1, 0, 1]


def test_without_kinds_all_prompts_are_sent() -> None:
    mix = Mix(PROMPTS, [Phase((), 10.0)])
    assert {mix.next(0.0).kind for _ in range(8)} == set(KINDS)


def test_a_kind_without_prompts_is_named() -> None:
    with pytest.raises(UsageError, match="no prompts of the kind poems; there are chat, code"):
        Mix(PROMPTS, [Phase(("poems",), 10.0)])
