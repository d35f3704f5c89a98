"""What is sent is fixed by the seed: the same prompts in the same order at every level and in every arm."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from breakeven.load.plan import LevelRequests, PlannedRequest, TraceRequests
from breakeven.load.prompts import Prompt, PromptSet, load_prompts
from breakeven.load.trace import TraceRequest
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
    plans = [level(1), level(250, index=7), level(8, 64, index=3), level(8)]
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
    again = requests(level(16, index=5), seed=1)
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


def of_trace(
    trace: Sequence[TraceRequest],
    *,
    prompts: PromptSet | None = None,
    seed: int = 0,
    tag: str | None = None,
    index: int = 0,
) -> list[PlannedRequest]:
    plan = LevelPlan(index=index, run=0, mode="trace", max_tokens=max(r.output_tokens for r in trace))
    source = TraceRequests(plan, trace, prompts, seed=seed, tag=tag)
    return [source.next("measured") for _ in trace]


def words(request: PlannedRequest) -> list[str]:
    return request.prompt.as_text().split()


def shared(one: list[str], other: list[str]) -> int:
    """How many words two prompts begin with alike."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize("count", [1, 7, 8, 9, 100, 7000, 65_535, 65_536, 200_000])
def test_a_traces_prompt_has_as_many_words_as_it_had_tokens(count: int) -> None:
    for blocks in ((), (1,), tuple(range(count // 512)), tuple(range(-(-count // 512)))):
        (planned,) = of_trace([TraceRequest(0, count, 5, blocks)])
        assert len(words(planned)) == count


def test_a_traces_answers_are_as_long_as_they_were() -> None:
    found = of_trace([TraceRequest(0, 5, 17), TraceRequest(1, 5, 3)])
    assert [(r.max_tokens, r.phase, r.prompt.id) for r in found] == [
        (17, "measured", "trace-0"),
        (3, "measured", "trace-1"),
    ]


def test_blocks_that_a_trace_names_twice_are_the_same_words() -> None:
    """As a prefix cache found them: the shared blocks alike, what follows not; the last block may be cut short."""
    first, second, third = (
        words(r)
        for r in of_trace(
            [
                TraceRequest(0, 2000, 5, (46, 47, 2353, 2354)),
                TraceRequest(1, 1500, 5, (46, 47, 9000)),
                TraceRequest(2, 700, 5, (46, 47)),
            ]
        )
    )
    assert 1024 <= shared(first, second) < 1024 + 8
    assert shared(first, third) == 700


def test_requests_of_a_trace_begin_unlike_where_it_names_no_block() -> None:
    """A cache that was never there must not be found: 5,000 prompts, and no two share as much as 8 words."""
    found = sorted(words(r) for r in of_trace([TraceRequest(i, 20, 5) for i in range(5000)]))
    assert max(shared(one, other) for one, other in pairwise(found)) < 8


def test_a_traces_prompts_follow_the_seed() -> None:
    trace = [TraceRequest(i, 50, 5, (i,)) for i in range(3)]
    assert of_trace(trace, seed=1) == of_trace(trace, seed=1)
    assert of_trace(trace, seed=1) != of_trace(trace, seed=2)


def test_unique_prompts_of_a_trace_differ_over_levels_and_tags_and_keep_what_they_share() -> None:
    trace = [TraceRequest(0, 600, 5, (1,)), TraceRequest(1, 600, 5, (1,))]
    runs = [of_trace(trace, tag=tag, index=index) for tag in ("a", "b") for index in (0, 1)]
    assert [shared(*map(words, run)) >= 512 for run in runs] == [True] * 4
    firsts = sorted(words(run[0]) for run in runs)
    assert max(shared(one, other) for one, other in pairwise(firsts)) < 8
    assert {len(words(r)) for run in runs for r in run} == {600}


def test_a_traces_own_prompts_are_sent_in_turn() -> None:
    few = PromptSet(source="few", prompts=BUILT_IN.prompts[:3])
    trace = [TraceRequest(i, 50, i + 1) for i in range(7)]
    found = of_trace(trace, prompts=few)
    assert [r.prompt for r in found] == [few.prompts[i % 3] for i in range(7)]
    assert [r.max_tokens for r in found] == [1, 2, 3, 4, 5, 6, 7]
    assert len({r.prompt.id for r in of_trace(trace, prompts=few, tag="t")}) == 7


def test_repeats_begin_further_on_in_the_same_order() -> None:
    first, third = (LevelRequests(level(run=run), BUILT_IN, seed=0, tag=None) for run in (0, 2))
    from_start = [first.next("measured").prompt.id for _ in range(60)]
    assert [third.next("measured").prompt.id for _ in range(12)] == from_start[48:]
