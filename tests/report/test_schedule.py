"""A tuned table in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from msgspec import structs

from breakeven.decide.export import export
from breakeven.decide.knee import Knee
from breakeven.decide.schedule import Border, Range, Schedule
from breakeven.decide.tuned import Tuned, TunedArm, tune
from breakeven.measure.stats import Interval
from breakeven.report.schedule import Price, render_tuned, table_words
from tests.decide.arms import failing, made

NUMBERS: Mapping[str, Sequence[float]] = {"k0": (10, 10, 10), "k1": (9, 9.5, 11), "k3": (5, 8, 14)}


@pytest.fixture(scope="module")
def tuned() -> Tuned:
    """Three drafts pay up to two requests."""
    arms = []
    for place, (name, base) in enumerate(NUMBERS.items()):
        turns = [1 + 0.01 * ((turn * (place + 1) + place) % 5 - 2) for turn in range(6)]
        steps = {load: [ms * turn for turn in turns] for load, ms in zip((1.0, 2.0, 4.0), base, strict=True)}
        arms.append(TunedArm(int(name[1:]), 1, None, made(name, steps)))
    return tune(arms, source="runs/x")


def test_off_that_failed_at_a_load_is_nothing_to_gain_over() -> None:
    arms = []
    for name, base in NUMBERS.items():
        steps = {
            load: [ms, ms * 1.01, ms * 0.99, ms, ms * 1.01, ms * 0.99] for load, ms in zip((1, 2, 4), base, strict=True)
        }
        failed = {"each": lambda record: failing(record) if record.level >= 12 else record} if name == "k0" else {}
        arms.append(TunedArm(int(name[1:]), 1, None, made(name, steps, **failed)))
    found = tune(arms, source="x")
    assert found.off is None
    assert "k0 brought nothing at C=4" in " ".join(render_tuned(found, None, "table").split())


def with_ranges(tuned: Tuned, *ranges: tuple[int, int, int], batch_from: str = "running") -> Tuned:
    assert tuned.schedule is not None
    known: Schedule = replace(tuned.schedule, ranges=tuple(Range(*each) for each in ranges), batch_from=batch_from)
    borders = tuple(Border(each.lo - 2, each.lo + 1) for each in known.ranges[1:])
    return structs.replace(tuned, schedule=replace(known, borders=borders))


@pytest.mark.parametrize(
    ("ranges", "words"),
    [
        ([(1, 64, 2)], "Draft 2 tokens at every load that was measured"),
        ([(1, 64, 0)], "Draft no token at every load that was measured"),
        ([(1, 8, 3), (9, 64, 0)], "Draft 3 tokens up to 8 requests in the batch, none from 9"),
        (
            [(1, 8, 3), (9, 9, 2), (10, 20, 1), (21, 64, 0)],
            "Draft 3 tokens up to 8 requests in the batch, 2 at 9, 1 from 10 to 20, none from 21",
        ),
        ([(1, 2, 0), (3, 64, 1)], "Draft nothing up to 2 requests in the batch, 1 from 3"),
    ],
)
def test_the_table_is_said_in_a_sentence(tuned: Tuned, ranges: list[tuple[int, int, int]], words: str) -> None:
    assert table_words(with_ranges(tuned, *ranges)) == words


def test_the_whole_answer_stands_under_the_numbers(tuned: Tuned) -> None:
    assert tuned.schedule is not None
    text = render_tuned(tuned, export(tuned.schedule, "vllm"), "table", Price(2.0, 2))
    lines = text.splitlines()
    assert lines[1].split() == ["C", "batch", "k0", "k1", "k3", "best", "table", "k0", "k3", "table", "k0", "k3"]
    assert lines[2].split()[:2] == ["1", "-"]
    assert "Draft 3 tokens up to 2 requests in flight, none from 3." in text
    assert "at 3, from K=3 to K=0: with a dead band, up at 4 and down at 2" in text
    assert max(map(len, lines)) <= 130


def test_five_arms_and_their_gains_fit_a_wide_terminal(tuned: Tuned) -> None:
    rates = [level.rates * 2 for level in tuned.levels]
    levels = tuple(structs.replace(level, rates=own[:5]) for level, own in zip(tuned.levels, rates, strict=True))
    five = structs.replace(tuned, arms=(tuned.arms * 2)[:5], levels=levels)
    table = render_tuned(five, None, "table").split("\n\n")[0]
    assert max(map(len, table.splitlines())) <= 140


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            Knee(kind="found", load=20.2, ci95=Interval(16.0, 28.0)),
            "--max-num-seqs 21: beyond it throughput grows by less than 5 %; 20 requests in flight (95 %: 16 to 28)",
        ),
        (Knee(kind="at_or_above_highest", load=31.8), "not reached: throughput still grows at 32 requests"),
        (Knee(kind="unknown", why_not="1 load"), "not known: 1 load"),
    ],
)
def test_the_largest_batch_is_told_with_its_interval_or_why_not(tuned: Tuned, found: Knee, words: str) -> None:
    assert words in " ".join(render_tuned(structs.replace(tuned, limit=found), None, "table").split())


def test_arms_that_cant_be_told_apart_have_their_numbers_and_a_sentence(tuned: Tuned) -> None:
    levels = tuple(structs.replace(level, arm=None, gains=None) for level in tuned.levels)
    none = structs.replace(tuned, schedule=None, why_not="k0 and k1 can't be told apart", limit=None, levels=levels)
    text = render_tuned(none, None, "table", Price(1.0))
    assert "k0 and k1 can't be told apart." in text
    assert "table against" not in text
    assert "**k0 and k1 can't be told apart.**" in render_tuned(none, None, "markdown")
