"""What is sent is fixed by the seed: the same prompts in the same order at every level and in every arm."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from breakeven.load.plan import LevelRequests, PlannedRequest
from breakeven.load.prompts import Prompt, PromptSet, load_prompts
from breakeven.records import LevelPlan, Phase

BUILT_IN = load_prompts(None)


def level(concurrency: int = 8, max_tokens: int = 512, index: int = 0, run: int = 0) -> LevelPlan:
    return LevelPlan(index=index, run=run, concurrency=concurrency, max_tokens=max_tokens)


def requests(plan: LevelPlan, *, prompts: PromptSet = BUILT_IN, seed: int = 0, tag: str | None = None) -> LevelRequests:
    return LevelRequests(plan, prompts, seed=seed, tag=tag)


def take(source: LevelRequests, phase: Phase, count: int) -> list[PlannedRequest]:
    return [source.next(phase) for _ in range(count)]


def caps(concurrency: int, max_tokens: int = 512, seed: int = 0) -> list[int]:
    source = requests(level(concurrency, max_tokens), seed=seed)
    return [source.next("ramp", slot=slot).max_tokens for slot in range(concurrency)]


def test_measured_order_is_the_same_at_every_level_and_in_every_arm() -> None:
    plans = [level(1), level(250, index=7), level(8, 64, index=3, run=2), level(8)]
    orders = {tuple(r.prompt.id for r in take(requests(plan), "measured", 300)) for plan in plans}
    assert len(orders) == 1


def test_measured_order_does_not_depend_on_what_else_was_sent() -> None:
    source, other = requests(level()), requests(level())
    expected = [r.prompt.id for r in take(source, "measured", 50)]
    found = []
    for i in range(50):
        take(other, "ramp" if i % 2 else "warmup", i % 5)
        found.append(other.next("measured").prompt.id)
        take(other, "drain", i % 3)
    assert found == expected


def test_prompts_are_cycled() -> None:
    names = [r.prompt.id for r in take(requests(level()), "measured", 300)]
    count = len(BUILT_IN.prompts)
    assert names[:count] == [prompt.id for prompt in BUILT_IN.prompts]
    assert names[count:] == names[: 300 - count]


@pytest.mark.parametrize("start", range(8))
def test_each_run_of_eight_measured_requests_holds_every_kind(start: int) -> None:
    kinds = [r.prompt.kind for r in take(requests(level()), "measured", 320)]
    every = {prompt.kind for prompt in BUILT_IN.prompts}
    assert all(set(kinds[i : i + 8]) == every for i in range(start, 312, 8))


def test_phases_before_and_after_start_elsewhere_in_the_order() -> None:
    source = requests(level())
    first = [source.next(phase).prompt.id for phase in ("warmup", "ramp", "measured", "drain")]
    assert len(set(first)) == 4


@given(st.integers(1, 5), st.sampled_from(["warmup", "ramp", "measured", "drain"]))
def test_a_few_prompts_are_enough_for_every_phase(count: int, phase: Phase) -> None:
    few = PromptSet(source="few", prompts=BUILT_IN.prompts[:count])
    assert len({r.prompt.id for r in take(requests(level(), prompts=few), phase, 20)}) == count


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 4096), st.integers(0, 10**9))
def test_ramp_caps_are_a_stratified_uniform_share(concurrency: int, max_tokens: int, seed: int) -> None:
    """One share in each C-th of the way, so that starts and ends are spread from the first request on."""
    found = sorted(caps(concurrency, max_tokens, seed))
    for i, cap in enumerate(found):
        assert 1 <= cap <= max_tokens
        assert i / concurrency * max_tokens <= cap < (i + 1) / concurrency * max_tokens + 1


def test_ramp_caps_are_in_no_order() -> None:
    found = caps(64)
    assert found not in (sorted(found), sorted(found, reverse=True))
    assert abs(sum(found[:32]) - sum(found[32:])) < 0.4 * sum(found)


def test_ramp_caps_follow_the_seed_and_the_load_and_nothing_else() -> None:
    assert caps(16, seed=1) == caps(16, seed=1)
    assert caps(16, seed=1) != caps(16, seed=2)
    again = requests(level(16, index=5, run=3), seed=1)
    assert [again.next("ramp", slot=slot).max_tokens for slot in range(16)] == caps(16, seed=1)


def test_caps_belong_to_slots_whatever_the_order_of_asking() -> None:
    source = requests(level(8))
    order = random.Random(3).sample(range(8), 8)
    found = {slot: source.next("ramp", slot=slot).max_tokens for slot in order}
    assert [found[slot] for slot in range(8)] == caps(8)


def test_only_a_slots_first_request_is_capped() -> None:
    source = requests(level(2, 512))
    for phase in ("warmup", "ramp", "measured", "drain"):
        assert {r.max_tokens for r in take(source, phase, 10)} == {512}


def test_requests_know_their_level_and_phase() -> None:
    plan = level(3)
    planned = requests(plan).next("drain")
    assert (planned.level, planned.phase) == (plan, "drain")


def test_unique_prompts_differ_in_their_first_words_over_phases_levels_and_repeats() -> None:
    few = PromptSet(source="few", prompts=(Prompt(id="a", text="same"),))
    texts, names = set(), set()
    for index in range(3):
        source = requests(level(index=index), prompts=few, tag="t")
        for phase in ("warmup", "ramp", "measured", "drain"):
            for planned in take(source, phase, 10):
                text = planned.prompt.as_text()
                assert text.endswith("] same")
                texts.add(text.split()[0])
                names.add(planned.prompt.id)
    assert len(texts) == len(names) == 3 * 4 * 10


def test_unique_prompts_differ_by_their_tag_alone() -> None:
    def first(tag: str) -> Prompt:
        return requests(level(), tag=tag).next("measured").prompt

    assert first("a") == first("a")
    assert first("a").as_messages() != first("b").as_messages()
    assert first("a").kind == first("b").kind
