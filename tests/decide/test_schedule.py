"""The table as a file, and how it comes from what was measured."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from breakeven.decide import schedule as module
from breakeven.decide.borders import growing, ranges_of
from breakeven.decide.choice import choose
from breakeven.decide.rates import LoadRates
from breakeven.decide.ratio import log_mean
from breakeven.decide.schedule import Border, Level, Limit, Range, Rate, Schedule, read_schedule
from breakeven.decide.tuned import TunedArm, tune
from breakeven.errors import UsageError
from breakeven.records import EngineSample
from tests.decide.arms import failing, made

SCHEDULE = Schedule(
    model="m",
    ranges=(Range(1, 4, 3), Range(5, 9, 1), Range(10, 64, 0)),
    engine="vllm",
    engine_version="0.32.0",
    method="eagle3",
    speculation={"method": "eagle3", "model": "head"},
    max_tokens=512,
    borders=(Border(2, 6), Border(8, 12)),
    arms={0: "k0", 1: "k1", 3: "k3"},
    measured_to=32.0,
    levels=(Level(1.0, 0.98, 3, {0: Rate(10.0, 9.0, 11.0), 3: Rate(20.0)}),),
    limit=Limit("found", 20.0, 16.0, 28.0),
    source="runs/x",
    created="2026-11-30T00:00:00+00:00",
)


def written(path: Path, **changes: Any) -> Path:
    found = json.loads(SCHEDULE.to_json()) | changes
    path.write_text(json.dumps({name: value for name, value in found.items() if value is not ...}))
    return path


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    path.write_text(SCHEDULE.to_json())
    assert read_schedule(path) == SCHEDULE
    assert "[1, 4, 3],\n" in path.read_text()


def test_a_file_needs_no_more_than_model_and_ranges(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text('{"schema": "breakeven.schedule/1", "model": "m", "ranges": [[1, 8, 2]]}')
    assert read_schedule(path).k_at(100) == 2


def test_a_batch_has_the_draft_length_of_its_range_and_beyond_the_last_that_of_the_last() -> None:
    assert [SCHEDULE.k_at(batch) for batch in (0, 1, 4, 5, 9, 10, 64, 1000)] == [3, 3, 3, 1, 1, 0, 0, 0]


def test_a_batch_that_wobbles_around_a_border_keeps_its_range() -> None:
    at, seen = SCHEDULE.range_at(4), []
    for batch in (4, 5, 4, 5, 6, 5, 4, 3, 2, 12, 9, 1):
        at = SCHEDULE.range_at(batch, at)
        seen.append(at)
    assert seen == [0, 0, 0, 0, 1, 1, 1, 1, 0, 2, 2, 0]


def test_a_schedule_for_another_model_is_refused() -> None:
    SCHEDULE.check_model("m")
    with pytest.raises(UsageError, match="for the model m, not other"):
        SCHEDULE.check_model("other")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schema": "breakeven.schedule/9"}, "no schedule: its schema is 'breakeven.schedule/9'"),
        ({"model": ...}, "'model' is missing"),
        ({"model": 3}, "model must be a name"),
        ({"ranges": []}, "ranges is empty"),
        ({"ranges": [[2, 8, 1]]}, r"\[2, 8, 1\] must begin at 1"),
        ({"ranges": [[1, 4, 1], [6, 9, 0]]}, r"\[6, 9, 0\] must begin at 5"),
        ({"ranges": [[1, 0, 1]]}, "ends before it begins"),
        ({"ranges": [[1, 4, 65]]}, "K that is not from 0 to 64"),
        ({"ranges": [[1, 4, -1]]}, "K that is not from 0 to 64"),
        ({"ranges": [[1, 4.5, 1]]}, "in whole numbers"),
        ({"ranges": [[1, True, 1]]}, "in whole numbers"),
        ({"borders": [{"down": 2, "up": 6}]}, "borders has 1 for 3 ranges"),
        ({"borders": [{"down": 5, "up": 6}, {"down": 8, "up": 12}]}, "the border at 5 needs down below it"),
        ({"borders": [{"down": 2}, {"down": 8, "up": 12}]}, "needs down and up"),
        ({"measured_to": -1}, "measured_to must be a number from 0"),
        ({"levels": [{"load": 1, "batch": 1, "k": 0, "rates": {"0": {"value": 0}}}]}, "tokens a second above 0"),
        ({"levels": [{"load": 1, "batch": 1, "k": 0, "rates": {"0": 12.5}}]}, "need a value each"),
        ({"levels": [{"load": 1, "batch": 1, "k": 0}]}, "'rates' is missing"),
        ({"engine": 7}, "engine must be a text"),
    ],
)
def test_what_cant_be_used_is_named_in_one_line(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = written(tmp_path / "s.json", **changes)
    with pytest.raises(UsageError, match=words) as caught:
        read_schedule(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_schedule_at_all_is_named(tmp_path: Path) -> None:
    (tmp_path / "no.json").write_text("[1, 2")
    (tmp_path / "list.json").write_text("[1, 2]")
    for name, words in (("absent.json", "can't be read"), ("no.json", "is no JSON"), ("list.json", "is no schedule")):
        with pytest.raises(UsageError, match=words):
            read_schedule(tmp_path / name)


def test_an_engines_process_needs_nothing_but_the_standard_library_to_read_it() -> None:
    tree = ast.parse(Path(module.__file__).read_text("utf-8"))
    found = {
        (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name) or ""
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    own = {name for name in found if name.split(".")[0] not in sys.stdlib_module_names}
    assert own == {"breakeven.errors"}


# ---- from what was measured ----


def rates(
    logs: Mapping[float, Mapping[str, float]], noise: float = 0.01, turns: int = 8, seed: int = 1
) -> list[LoadRates]:
    """By load and arm the true log throughput, with noise of each turn."""
    rng = np.random.default_rng(seed)
    found = []
    for load, row in logs.items():
        drawn = {arm: np.exp(log + noise * rng.standard_normal(turns)) for arm, log in row.items()}
        by_arm = {arm: tuple(map(float, own)) for arm, own in drawn.items()}
        means = {arm: log_mean(own) for arm, own in by_arm.items()}
        found.append(LoadRates(load, load, by_arm, means, "pairs", f"C={load:g}"))
    return found


def falling(*loads: float) -> dict[float, dict[str, float]]:
    """k3 gains 40 % at one request and crosses k0 at 8; k1 is in between, best at no load."""
    return {load: {"k0": 5.0, "k1": 5.0 - 0.05, "k3": 5.0 + 0.4 * (1 - np.log2(load) / 3)} for load in loads}


def test_each_load_gets_its_best_and_a_border_lies_where_the_curves_cross() -> None:
    levels = rates(falling(1, 2, 4, 16, 32))
    choice = choose(levels, ["k0", "k1", "k3"])
    assert [(each.start, each.stop, each.arm) for each in choice.segments] == [(0, 3, "k3"), (3, 5, "k0")]
    ranges, (border,) = ranges_of(choice, levels, {"k0": 0, "k1": 1, "k3": 3}, 256)
    assert [each.k for each in ranges] == [3, 0]
    assert ranges[0].lo == 1
    assert ranges[0].hi == pytest.approx(8, abs=1)
    assert ranges[1] == Range(ranges[0].hi + 1, 256, 0)
    assert 4 <= border.down < ranges[1].lo - 1
    assert ranges[1].lo < border.up <= 16


def test_neighbours_that_dont_differ_significantly_are_merged() -> None:
    wobbling = {load: {"k1": 5.0 + 0.004 * (-1) ** i, "k2": 5.0, "k9": 4.0} for i, load in enumerate((1.0, 2, 4, 8))}
    choice = choose(rates(wobbling, noise=0.03), ["k1", "k2", "k9"])
    assert len(choice.segments) == 1


def test_evidence_adds_up_over_neighbouring_loads() -> None:
    small = {
        load: {"k0": 5.0 + 0.03 * (load > 2), "k1": 5.0 + 0.4 * (load <= 2)} for load in (1.0, 2, 4, 8, 16, 32, 64)
    }
    levels = rates(small, noise=0.02, seed=3)
    alone = [choose([level], ["k0", "k1"]).why_not is not None for level in levels[2:]]
    assert sum(alone) >= 2
    assert [each.arm for each in choose(levels, ["k0", "k1"]).segments] == ["k1", "k0"]


def test_the_smaller_of_two_that_are_the_same_is_taken() -> None:
    same = {load: {"k1": 5.0, "k2": 5.002, "k9": 4.0} for load in (1.0, 2, 4)}
    choice = choose(rates(same, noise=0.004), ["k1", "k2", "k9"])
    assert [each.arm for each in choice.segments] == ["k1"]
    assert choice.tied == (("k2",),)


def test_arms_that_cant_be_told_apart_give_no_table() -> None:
    equal = {load: dict.fromkeys(("k0", "k1", "k2", "k3"), 5.0) for load in (1.0, 2, 4, 8)}
    found = [choose(rates(equal, noise=0.04, seed=seed), ["k0", "k1", "k2", "k3"]) for seed in range(30)]
    assert sum(choice.why_not is None for choice in found) <= 4
    silent = next(choice for choice in found if choice.why_not)
    assert silent.segments == ()
    assert (silent.why_not or "").startswith("k0, k1, k2 and k3 can't be told apart at C=1 to C=8: no table is made")


def test_loads_at_which_requests_only_queue_say_nothing_of_larger_batches() -> None:
    levels = rates(falling(1, 2, 4, 8))
    running = [level._replace(batch=batch) for level, batch in zip(levels, (0.98, 1.9, 3.8, 3.9), strict=True)]
    kept, left = growing(running)
    assert [level.load for level in kept] == [1, 2, 4]
    assert [level.load for level in left] == [8]


def test_a_border_between_neighbouring_batches_has_room_for_no_band() -> None:
    levels = rates({1.0: {"k0": 5.0, "k3": 5.4}, 2.0: {"k0": 5.0, "k3": 4.6}})
    ranges, (border,) = ranges_of(choose(levels, ["k0", "k3"]), levels, {"k0": 0, "k3": 3}, None)
    assert ranges == (Range(1, 1, 3), Range(2, 2, 0))
    assert border == Border(1, 2)


# ---- from runs ----


def arm(k: int, steps: Mapping[float, Sequence[float]], **fields: Any) -> TunedArm:
    return TunedArm(k, fields.pop("topk", 1), fields.pop("draft_tokens", None), made(f"k{k}", steps, **fields))


def steps(*base: float) -> dict[float, list[float]]:
    """Milliseconds a token at C=1, 2 and 4, in six turns that differ a little."""
    return {
        load: [ms * (1 + 0.01 * ((turn * int(ms) + turn) % 5 - 2)) for turn in range(6)]
        for load, ms in zip((1, 2, 4), base, strict=True)
    }


def test_runs_become_a_schedule() -> None:
    tuned = tune([arm(3, steps(5, 8, 14)), arm(0, steps(10, 10, 10))], source="runs/x")
    assert tuned.schedule is not None
    assert [(each.k, each.lo) for each in tuned.schedule.ranges] == [(3, 1), (0, 3)]
    assert tuned.schedule.batch_from == "concurrency"
    assert any("no engine tells how many requests it runs" in text for text in tuned.warnings)
    assert (tuned.off, tuned.on, tuned.is_cross_fitted) == ("k0", "k3", True)
    assert tuned.levels[0].gains is not None
    assert tuned.levels[0].gains.gains["k0"].ratio == pytest.approx(2.0, rel=0.03)
    assert tuned.levels[0].gains.gains["k3"].is_same
    assert tuned.schedule.levels[0].rates[0].value == pytest.approx(100, rel=0.03)


def test_an_arm_that_failed_at_a_load_is_left_out_and_named() -> None:
    bad = made("k5", steps(4, 4, 4), each=lambda record: failing(record) if record.level >= 12 else record)
    arms = [arm(0, steps(10, 10, 10)), arm(3, steps(5, 8, 14)), TunedArm(5, 1, None, bad)]
    tuned = tune(arms, source="x")
    assert any(text.startswith("k5 brought nothing at C=4") for text in tuned.warnings)
    assert tuned.schedule is not None
    assert tuned.schedule.max_k == 3


def test_two_arms_of_one_draft_length_are_refused() -> None:
    other = made("again", steps(5, 8, 14))
    with pytest.raises(UsageError, match="k3 and again both draft 3 tokens"):
        tune([arm(3, steps(5, 8, 14)), TunedArm(3, 1, None, other)], source="x")


def test_trees_are_ranked_and_stay_out_of_the_table() -> None:
    tree = TunedArm(2, 4, 16, made("tree", steps(3, 8, 14)))
    tuned = tune([arm(0, steps(10, 10, 10)), arm(3, steps(5, 8, 14)), tree], source="x")
    assert tuned.levels[0].best == "tree"
    assert tuned.levels[0].arm == "k3"
    assert any(re.match(r"C=1: the tree tree is 6\d % faster than the table's k3", text) for text in tuned.warnings)
    alone = tune([tree, TunedArm(1, 4, 4, made("bush", steps(4, 8, 14)))], source="x")
    assert alone.schedule is None
    assert "that an engine can switch between none is left" in (alone.why_not or "")


def test_the_batch_is_the_engines_own_count_and_the_table_ends_where_the_engine_does() -> None:
    level = {"samples": [EngineSample(time_ns=0, running=6.0, waiting=0.0, kv_use=None)]}
    target = {"config": {"max_num_seqs": 48, "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}}
    runs: list[dict[float, list[float]]] = [{4: own[4]} for own in (steps(10, 10, 10), steps(5, 8, 14))]
    tuned = tune([arm(k, own, target=target, level=level) for k, own in zip((0, 3), runs, strict=True)], source="x")
    assert tuned.schedule is not None
    assert tuned.schedule.batch_from == "running"
    assert (tuned.schedule.levels[0].batch, tuned.schedule.measured_to) == (6.0, 6.0)
    assert tuned.schedule.ranges[-1].hi == 48
    assert (tuned.schedule.method, tuned.schedule.speculation) == ("ngram", {"method": "ngram"})
