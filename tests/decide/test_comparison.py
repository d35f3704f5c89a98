"""From runs to verdicts: on simulated arms whose truth is known, and on small ones made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import pytest
from msgspec import structs

from breakeven.decide.comparison import ArmRun, Comparison, compare
from breakeven.decide.slo import parse_slos
from breakeven.decide.turns import decoding
from breakeven.errors import RunError, UsageError
from breakeven.measure.latency import latencies
from breakeven.records import EngineSample, RequestRecord, Turns
from breakeven.sim.model import Acceptance, EngineModel, Noise
from breakeven.sim.truth import true_acceptance_length, true_break_evens
from tests.decide.arms import alternated, failing, made
from tests.measure.handmade import S, request
from tests.sim.handy import CROSSING, PROMPTS

LOADS = (1, 2, 4, 8, 16, 32)
NOISY: EngineModel = structs.replace(CROSSING, noise=Noise(sd=0.05, memory_s=0.5))
#: Steps of four turns each; the noise is the same in no two.
SLOW, FAST = [20.0, 20.2, 19.9, 20.1], [15.0, 15.2, 15.1, 14.9]


def only(comparison: Comparison) -> Any:
    """The only load of a comparison of two arms."""
    return comparison.loads[0].versus[0]


@pytest.fixture(scope="module")
def crossing() -> tuple[list[ArmRun], Comparison]:
    arms = alternated(NOISY, LOADS)
    return arms, compare(arms, slos=parse_slos("tpot_p50:30"))


def test_the_true_break_even_lies_in_the_interval(crossing: tuple[list[ArmRun], Comparison]) -> None:
    _, found = crossing
    (truth,) = true_break_evens(NOISY, NOISY, PROMPTS, k=3, max_tokens=64)
    (versus,) = found.versus
    assert versus.throughput is not None
    assert versus.throughput.kind == "pays_below"
    (place,) = versus.throughput.crossings
    assert place.low is not None
    assert place.high is not None
    assert place.low <= truth <= place.high
    assert versus.sentence.startswith("Speculation pays below ")
    assert (found.how, found.mode, found.max_tokens) == ("pairs", "closed", 64)


def test_each_load_has_its_verdicts(crossing: tuple[list[ArmRun], Comparison]) -> None:
    _, found = crossing
    first, last = found.loads[0].versus[0], found.loads[-1].versus[0]
    assert (first.throughput.verdict, last.throughput.verdict) == ("faster", "slower")
    assert first.throughput.n == 4
    assert (first.tpot_p50.verdict, last.tpot_p50.verdict) == ("faster", "slower")
    assert first.tpot_p99.why_not is not None
    assert first.tpot_p99.why_not.reason == "few_requests"
    assert first.tpot_p99.value == pytest.approx(
        found.loads[0].arms[1].tpot_ms.p99 / found.loads[0].arms[0].tpot_ms.p99  # type: ignore[operator]
    )
    assert all(level.arms[0].ci95 and level.arms[0].ok and not level.arms[0].failed for level in found.loads)


def test_acceptance_stands_beside_what_is_needed(crossing: tuple[list[ArmRun], Comparison]) -> None:
    _, found = crossing
    truth = true_acceptance_length(NOISY, PROMPTS, k=3, max_tokens=64)
    for level in found.loads:
        off, on = level.arms
        assert off.acceptance_length is None
        assert on.acceptance_length == pytest.approx(truth, rel=0.06)
        assert off.tokens_per_step == 1.0
        needed = level.versus[0].needed
        assert needed is not None
        assert needed.most == 4
        assert needed.have == on.tokens_per_step
        assert needed.needed == pytest.approx(needed.have * (level.versus[0].tpot_p50.value or 0))
    assert [found.loads[i].versus[0].needed.verdict for i in (0, -1)] == ["met", "not_met"]  # type: ignore[union-attr]


def test_latencies_have_break_evens_of_their_own(crossing: tuple[list[ArmRun], Comparison]) -> None:
    _, found = crossing
    versus = found.versus[0]
    assert versus.tpot.break_even.kind == "pays_below"
    assert versus.tpot.sentence.startswith("speculation pays below")
    assert versus.ttft.break_even.kind != "pays_below"


def test_knees_and_limits_are_each_arms_own(crossing: tuple[list[ArmRun], Comparison]) -> None:
    _, found = crossing
    off, on = found.arms
    assert off.knee is not None
    assert off.knee.kind == "at_or_above_highest"
    assert off.slo is not None
    assert on.slo is not None
    assert off.slo.last_held == 8  # 21 + 1 ms a request
    assert found.slos == ("tpot_p50:30",)


def test_a_comparison_comes_back_from_json(crossing: tuple[list[ArmRun], Comparison]) -> None:
    _, found = crossing
    assert found.schema == "breakeven.comparison/1"
    assert msgspec.json.decode(msgspec.json.encode(found), type=Comparison) == found


def test_equal_arms_get_no_difference() -> None:
    found = compare(alternated(NOISY, (1, 4, 16), ks=(3, 3), names=("a", "b")))
    verdicts = {level.versus[0].throughput.verdict for level in found.loads}
    assert verdicts <= {"same", "undecided"}
    assert not found.versus[0].kinds


def test_kinds_whose_answer_is_another_one_have_their_own() -> None:
    model = structs.replace(
        NOISY, acceptance=Acceptance(default=(0.7, 0.6, 0.5), kinds={"code": (0.97, 0.97, 0.97)}, decay=1.0)
    )
    found = compare(alternated(model, (2, 8, 24)))
    kinds = {kind.kind: kind for kind in found.versus[0].kinds}
    assert all(each.value > 1.3 for each in kinds["code"].differs)
    assert all(each.value < 1 for each in kinds["chat"].differs)
    assert kinds["code"].sentence.startswith("for code: speculation pays at every load measured")
    assert kinds["chat"].sentence.startswith("for chat: speculation pays below")


def test_decoding_adds_up_to_tpot_and_decode_rate() -> None:
    records = [
        request(0, [(10, 1), (30, 4), (40, 0), (50, 3)]),
        request(1, [(10, 5)]),
        request(2, [(10, 1), (110, 2)]),
    ]
    found, numbers = decoding(records), latencies(records)
    assert (found.ns / found.tokens / 1e6).tolist() == pytest.approx([40 / 7, 50])
    assert numbers.tpot_ms.mean == pytest.approx((40 / 7 + 50) / 2)
    assert found.tokens.sum() / found.ns.sum() * 1e9 == pytest.approx(numbers.decode_rate)
    assert found.arrivals.tolist() == [2, 1]  # one of the three brought nothing


def test_runs_that_did_not_take_turns_are_compared_by_their_batches() -> None:
    noise = [20.0, 20.4, 19.8, 20.2]
    found = compare([made("off", {1: [20.0], 2: [20.0]}, how=None), made("on", {1: [15.0], 2: [15.0]}, how=None)])
    assert found.how == "batches"
    assert any("did not take turns with off" in text for text in found.warnings)
    assert found.versus[0].kinds_why_not
    repeated = compare([made("off", {1: noise}, how=None), made("on", {1: SLOW}, how=None)])
    assert only(repeated).throughput.n == 4
    assert only(repeated).throughput.value == pytest.approx(1.0, rel=0.01)


def test_turns_of_another_group_are_no_pairs() -> None:
    off, on = made("off", {1: SLOW}), made("on", {1: FAST})
    on.run.manifest.turns = Turns(group="another", arm="on", how="pairs")
    assert compare([off, on]).how == "batches"


def test_pairs_take_out_what_hits_both_turns() -> None:
    drift = [20.0, 22.0, 24.0, 26.0]
    faster = [step / 1.1 * noise for step, noise in zip(drift, (1, 1.001, 1, 0.999), strict=True)]
    found = compare([made("off", {1: drift}), made("on", {1: faster})])
    ratio = only(found).throughput
    assert ratio.value == pytest.approx(1.1, rel=1e-3)
    assert ratio.ci95.high - ratio.ci95.low < 0.01
    assert ratio.verdict == "faster"


def test_sweeps_are_pairs_of_another_kind() -> None:
    found = compare([made("off", {1: SLOW}, how="sweeps"), made("on", {1: FAST}, how="sweeps")])
    assert found.how == "sweeps"
    assert found.versus[0].throughput is not None
    assert found.versus[0].throughput.ratios[0].method == "sweeps"


def test_values_without_noise_have_a_ratio_and_no_verdict() -> None:
    found = compare([made("off", {1: [20.0] * 4}), made("on", {1: [16.0] * 4})])
    ratio = only(found).throughput
    assert ratio.value == pytest.approx(1.25)
    assert (ratio.ci95, ratio.why_not.reason) == (None, "zero_variance")
    assert "all 4 observations are the same number" in found.versus[0].sentence


def at(load: int, change: Any, on: ArmRun) -> ArmRun:
    """The arm with the records of one load changed."""
    levels = {level.plan.index for level in on.run.levels if level.plan.concurrency == load}
    on.run.requests[:] = [change(r) if r.level in levels else r for r in on.run.requests]
    return on


def test_a_load_at_which_an_arm_failed_has_no_ratio_and_the_rest_goes_on() -> None:
    on = at(2, failing, made("on", {1: FAST, 2: FAST, 4: FAST}))
    found = compare([made("off", {1: SLOW, 2: SLOW, 4: SLOW}), on])
    failed = found.loads[1].versus[0].throughput
    assert failed.value is None
    assert failed.why_not is not None
    assert failed.why_not.detail == "on brought nothing in any of 4 visits"
    assert found.loads[1].arms[1].failed == 160
    assert found.versus[0].throughput is not None
    assert found.versus[0].throughput.loads == (1, 4)
    assert "failures" in found.loads[1].arms[1].failed_checks
    assert msgspec.json.decode(msgspec.json.encode(found), type=Comparison) == found


@pytest.mark.parametrize("how", ["pairs", None])
def test_an_arm_that_failed_everywhere_leaves_nothing_to_compare(how: Literal["pairs"] | None) -> None:
    on = made("on", {1: FAST, 2: FAST}, how=how, each=failing)
    with pytest.raises(UsageError, match=r"^nothing to compare: at every load "):
        compare([made("off", {1: SLOW, 2: SLOW}, how=how), on])


def test_a_run_without_records_is_named() -> None:
    off, on = made("off", {1: SLOW}), made("on", {1: FAST})
    on.run.requests.clear()
    with pytest.raises(RunError, match=r"^runs/on \(on\) has no records: measure it again"):
        compare([off, on])


def test_arms_need_names_of_their_own_and_company() -> None:
    off = made("off", {1: SLOW})
    with pytest.raises(UsageError, match="two arms or more"):
        compare([off])
    with pytest.raises(UsageError, match="2 arms are called off"):
        compare([off, off])


def test_a_cut_last_line_is_told_and_the_rest_used() -> None:
    off, on = made("off", {1: SLOW}), made("on", {1: FAST})
    on.run.damaged = "the last line of requests.jsonl is cut"
    found = compare([off, on])
    assert "on: the last line of requests.jsonl is cut; the run is used up to it" in found.warnings
    assert only(found).throughput.verdict == "faster"


def test_a_turn_that_was_cut_short_leaves_its_pair_out() -> None:
    off, on = made("off", {1: SLOW}), made("on", {1: [*FAST[:3], 40.0]})
    on.run.levels[3] = structs.replace(on.run.levels[3], ended_by="interrupted")
    found = compare([off, on])
    assert only(found).throughput.n == 3
    assert found.loads[0].arms[1].turns == 3
    assert "on: measuring was cut short at C=1" in found.warnings


def test_unlike_runs_are_compared_by_force_alone() -> None:
    arms = [made("off", {1: SLOW}), made("on", {1: FAST}, model="another")]
    with pytest.raises(UsageError, match="on is unlike off"):
        compare(arms)
    assert compare(arms, force=True).warnings[0].startswith("--force: on is unlike off: the model")


def test_only_loads_that_all_arms_measured_are_compared() -> None:
    found = compare([made("off", {1: SLOW, 2: SLOW}), made("on", {2: FAST, 4: FAST})])
    assert [level.name for level in found.loads] == ["C=2"]
    arms = [made("off", {1: SLOW, 2: SLOW}), made("on", {1: FAST, 2: FAST})]
    arms[0].run.levels[:] = arms[0].run.levels[:4]  # planned, and interrupted before
    arms[1].run.levels[:] = arms[1].run.levels[4:]
    with pytest.raises(UsageError, match="no load in common: off has C=1; on has C=2"):
        compare(arms)


def test_open_loops_have_break_evens_of_latencies_alone() -> None:
    rates = {0.5: SLOW, 1.0: SLOW, 2.0: SLOW}
    on = made("on", {0.5: FAST, 1.0: FAST, 2.0: [25.0, 25.2, 25.1, 24.9]}, rate=True)
    found = compare([made("off", rates, rate=True), on])
    versus = found.versus[0]
    assert found.mode == "open"
    assert [level.name for level in found.loads] == ["0.5/s", "1/s", "2/s"]
    assert versus.throughput is None
    assert "below saturation the output equals the input" in versus.sentence
    assert versus.tpot.sentence.startswith("speculation pays below 1.")
    assert "requests a second" in versus.tpot.sentence
    assert "in flight" not in versus.tpot.sentence
    assert all(arm.knee is None for arm in found.arms)


def test_acceptance_is_pooled_over_turns_by_its_counters() -> None:
    on = made("on", {1: FAST})
    for level, (drafts, accepted) in zip(on.run.levels, [(100, 150), (300, 150), (0, 0), (0, 0)], strict=True):
        spec = {"acceptance_length": 9.0, "acceptance_rate": 0.1, "per_position": [0.5] * 5, "drafts": drafts}
        level.spec = spec | {"draft_tokens": 5 * drafts, "accepted": accepted} if drafts else None
    found = compare([made("off", {1: SLOW}), on]).loads[0]
    assert found.arms[1].acceptance_length == pytest.approx(1 + 300 / 400)
    assert found.versus[0].needed is not None
    assert found.versus[0].needed.most == 6  # five positions are counted


def test_without_counters_acceptance_is_the_turns_mean_and_nothing_is_needed_without_k() -> None:
    on = made("on", {1: FAST})
    for level, length in zip(on.run.levels, (1.5, 2.5, 1.5, 2.5), strict=True):
        level.spec = {"acceptance_length": length, "acceptance_rate": None, "per_position": []}
    found = compare([made("off", {1: SLOW}), on]).loads[0]
    assert found.arms[1].acceptance_length == 2.0
    assert found.versus[0].needed is None
    on.run.manifest.target["config"] = {"speculative_num_steps": 4}
    needed = compare([made("off", {1: SLOW}), on]).loads[0].versus[0].needed
    assert needed is not None
    assert needed.most == 5


def test_engines_that_ran_other_batches_at_the_same_load_are_told() -> None:
    def arm(name: str, steps: Sequence[float], running: float) -> ArmRun:
        return made(name, {8: steps}, level={"samples": [EngineSample(time_ns=S, running=running)]})

    found = compare([arm("off", SLOW, 8.0), arm("on", FAST, 6.0)])
    assert "C=8: the engine ran 8.0 requests at once in off, 6.0 in on" in found.warnings
    assert not any("at once" in text for text in compare([arm("off", SLOW, 8.0), arm("on", FAST, 7.7)]).warnings)


def test_configuration_stands_beside_the_verdict() -> None:
    config = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}
    found = compare([made("off", {1: SLOW}), made("on", {1: FAST}, target={"version": "0.33.0", "config": config})])
    off, on = found.arms
    assert off.differences == ()
    assert [each.name for each in on.differences] == [
        "version",
        "speculative_config.method",
        "speculative_config.num_speculative_tokens",
    ]
    assert on.speculation["speculative_config.method"] == "ngram"


def test_three_arms_are_each_compared_with_the_first() -> None:
    late = made("k5", {1: FAST, 2: FAST}, how=None)
    found = compare([made("off", {1: SLOW, 2: SLOW}), made("k3", {1: FAST, 2: FAST}), late])
    assert [(versus.arm, versus.how) for versus in found.versus] == [("k3", "pairs"), ("k5", "batches")]
    assert found.how == "batches"
    assert [versus.arm for versus in found.loads[0].versus] == ["k3", "k5"]
    assert "k5 did not take turns with off" in "".join(found.warnings)
    assert found.versus[0].sentence.startswith("k3 against off pays at every load")


def speaking(differs: Sequence[str] = (), phase: str = "measured") -> Any:
    """Gives each request a text of its own: that of its prompt, but for the prompts that differ."""

    def each(record: RequestRecord) -> RequestRecord:
        text = f"{record.prompt} said{' otherwise' if record.prompt in differs else ''}"
        return structs.replace(record, text=text, phase=phase)

    return each


def test_texts_that_differ_are_counted_between_arms_and_between_passes() -> None:
    off, on = made("off", {1: SLOW}, each=speaking()), made("on", {1: FAST}, each=speaking(["p1", "p7"]))
    second = {level.plan.index for level in off.run.levels if level.plan.run == 1}
    off.run.requests[:] = [
        speaking(["p3"])(record) if record.level in second else record for record in off.run.requests
    ]
    found = compare([off, on]).losslessness
    assert found.why_not is None
    assert (found.between["on"].prompts, found.between["on"].differ) == (40, 2)
    assert (found.within["off"].differ, found.within["on"].differ) == (1, 0)
    assert found.between["on"].ci95 is not None


def test_passes_of_runs_with_one_level_a_load_are_two_of_its_loads() -> None:
    off, on = (made(name, {1: [20.0], 2: [20.1]}, how=None, each=speaking()) for name in ("off", "on"))
    found = compare([off, on]).losslessness
    assert found.within["off"].prompts == 40
    assert found.between["on"].prompts == 80


def test_texts_that_tell_nothing_are_not_compared() -> None:
    silent = compare([made("off", {1: SLOW}), made("on", {1: FAST})]).losslessness
    assert silent.why_not == "no texts were kept: --keep-text keeps them"
    hot = {"flags": {"temperature": 0.8}, "each": speaking()}
    found = compare([made("off", {1: SLOW}, **hot), made("on", {1: FAST}, **hot)]).losslessness
    assert found.why_not == "at temperature 0.8 any two answers differ"
    assert not found.between


def test_ramp_requests_and_other_lengths_are_no_texts_to_compare() -> None:
    def each(record: RequestRecord) -> RequestRecord:
        number = int(record.prompt[1:])
        spoken: RequestRecord = speaking(phase="ramp" if number == 0 else "measured")(record)
        return structs.replace(spoken, max_tokens=99) if number == 1 else spoken

    found = compare([made("off", {1: SLOW}, each=speaking()), made("on", {1: FAST}, each=each)]).losslessness
    assert found.between["on"].prompts == 38


def test_answers_that_loop_in_one_arm_are_named_with_their_kinds() -> None:
    def looping(record: RequestRecord) -> RequestRecord:
        return structs.replace(record, repetition=0.9) if record.kind == "code" else record

    found = compare([made("off", {1: SLOW}), made("on", {1: FAST}, each=looping)])
    (each,) = found.repeating
    assert (each.arm, each.name, each.share, each.kinds) == ("on", "C=1", 0.5, {"code": 1.0})
    assert any(
        text.startswith("on: 50 % of the answers at C=1 end in a loop (at most code 100 %)") for text in found.warnings
    )
    assert found.loads[0].arms[0].repeating == 0.0


def test_p99s_have_intervals_from_300_requests_on() -> None:
    def found(turns: int) -> Any:
        rising = [20.0 + 0.1 * number for number in range(turns)]
        off, on = made("off", {1: rising}), made("on", {1: [0.75 * step - 0.01 for step in rising]})
        return only(compare([off, on])).tpot_p99

    assert found(7).why_not.detail == "280 requests of the reference arm: a p99 needs 300"
    assert found(8).ci95 is not None
    assert found(8).value == pytest.approx(0.75, rel=0.02)
