"""The K that vLLM is told of beforehand, and the drafter."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from breakeven.decide.declared import METHODS, declared, drafter
from breakeven.decide.schedule import Range, Schedule
from breakeven.errors import UsageError

HEAD = {"method": "eagle3", "model": "head"}


def schedule(*ranges: tuple[int, int, int], **fields: Any) -> Schedule:
    return Schedule(model="m", ranges=tuple(Range(*each) for each in ranges), **fields)


FALLING = schedule((1, 8, 3), (9, 64, 0))


def rows(table: tuple[Range, ...]) -> list[tuple[int, int, int]]:
    return [(each.lo, each.hi, each.k) for each in table]


def test_without_a_schedule_the_smallest_stands_where_the_others_need_no_room() -> None:
    assert rows(declared([0, 2, 4], 256)) == [(1, 1, 4), (2, 2, 2), (3, 256, 0)]
    assert rows(declared([3, 1], 2)) == [(1, 1, 3), (2, 2, 1)]


def test_a_schedule_stays_as_it_is_where_it_has_every_k() -> None:
    assert rows(declared([0, 3], 256, FALLING)) == [(1, 8, 3), (9, 256, 0)]
    assert rows(declared([0, 3], 20, FALLING)) == [(1, 8, 3), (9, 20, 0)]


def test_a_k_between_two_neighbours_stands_at_their_border() -> None:
    assert rows(declared([0, 1, 2, 3], 64, FALLING)) == [(1, 7, 3), (8, 8, 2), (9, 9, 1), (10, 64, 0)]


def test_larger_ones_stand_at_the_smallest_batch_and_smaller_ones_at_the_largest() -> None:
    assert rows(declared([0, 3, 5], 64, FALLING)) == [(1, 1, 5), (2, 8, 3), (9, 64, 0)]
    # Not at 64, where a full server would have it all the time.
    assert rows(declared([0, 2], 64, schedule((1, 64, 2)))) == [(1, 62, 2), (63, 63, 0), (64, 64, 2)]


def test_an_addition_stands_within_the_batches_that_any_vllm_holds() -> None:
    table = declared([0, 2], 256, schedule((1, 256, 2)))
    assert next(each.hi for each in table if each.k == 0) < 128
    assert table[-1].hi == 256


def test_a_range_that_the_server_never_reaches_is_declared_within() -> None:
    assert rows(declared([0, 3], 4, FALLING)) == [(1, 2, 3), (3, 3, 0), (4, 4, 3)]


def test_too_few_batch_sizes_are_refused() -> None:
    with pytest.raises(UsageError, match=r"--max-num-seqs 2: .* 3 or more"):
        declared([0, 2, 4], 2)


@settings(max_examples=30, deadline=None)
@given(
    ks=st.sets(st.integers(0, 16), min_size=2),
    spare=st.integers(0, 150),
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 16)), max_size=5),
)
def test_every_k_stands_in_a_table_without_gaps(ks: set[int], spare: int, lengths: list[tuple[int, int]]) -> None:
    ranges, lo = [], 1
    for length, k in lengths:
        ranges.append((lo, lo + length - 1, k))
        lo += length
    known = schedule(*ranges) if ranges else None
    ks |= {k for _, k in lengths}
    most = len(ks) + spare
    table = declared(sorted(ks), most, known)
    assert {each.k for each in table} == ks
    assert table[0].lo == 1
    assert table[-1].hi == most
    assert all(one.hi + 1 == other.lo and one.k != other.k for one, other in pairwise(table))


def test_the_drafter_is_the_schedules_unless_another_is_asked_for() -> None:
    known = schedule((1, 8, 3), engine="vllm", method="eagle3", speculation=HEAD | {"quantization": "fp8"})
    assert drafter(known) == {"method": "eagle3", "model": "head", "quantization": "fp8"}
    assert drafter(known, None, "other") == {"method": "eagle3", "model": "other", "quantization": "fp8"}
    assert drafter(known, "ngram") == {"method": "ngram"}
    sglang = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "head"}
    assert drafter(schedule((1, 8, 3), engine="sglang", method="EAGLE3", speculation=sglang)) == HEAD


@pytest.mark.parametrize(
    ("known", "method", "model", "words"),
    [
        (None, None, None, "--method is missing: give one of ngram,"),
        (FALLING, None, None, "the schedule doesn't tell its drafter"),
        (schedule((1, 8, 3), method="ngram-simple"), None, None, "the schedule's drafter ngram-simple"),
        (None, "magic", None, "--method magic"),
        (None, "eagle3", None, "--method eagle3 needs --draft-model"),
        (schedule((1, 8, 3), method="eagle3"), None, None, "--method eagle3 needs --draft-model"),
        (None, "ngram", "head", "--draft-model says nothing beside --method ngram"),
    ],
)
def test_a_drafter_that_vllm_would_refuse(
    known: Schedule | None, method: str | None, model: str | None, words: str
) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        drafter(known, method, model)
    assert "\n" not in str(refused.value)


def test_only_methods_with_a_model_of_their_own_need_one() -> None:
    for method, needs_model in METHODS.items():
        assert ("model" in drafter(None, method, "d" if needs_model else None)) == needs_model
