"""`breakeven tune` as a user runs it."""

from __future__ import annotations

import json
import shlex
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from breakeven.decide.schedule import read_schedule
from breakeven.engines.null import null_server
from breakeven.sim.run import write_run
from tests.conftest import Run
from tests.decide.arms import made
from tests.nulls import ended, has_begun

QUICK = ("--max-tokens", "20", "--duration", "0.3", "--warmup", "0", "--quiet")
#: Milliseconds a token at C=1, 2 and 4: three drafts pay below three requests, one never most.
STEPS = {0: (10, 10, 10), 1: (9, 9.5, 11), 3: (5, 8, 14)}


def turns(base: Sequence[float], place: int) -> dict[float, list[float]]:
    """Six turns that differ by a percent or two, in another order for each arm."""
    return {
        load: [ms * (1 + 0.01 * ((turn * (place + 1) + place) % 5 - 2)) for turn in range(6)]
        for load, ms in zip((1.0, 2.0, 4.0), base, strict=True)
    }


def write(place: Path, steps: Mapping[int, Sequence[float]] = STEPS, **fields: Any) -> Path:
    """Runs of arms called k0, k1, … under one directory, as `breakeven tune` leaves them."""
    for number, (k, base) in enumerate(steps.items()):
        run = made(f"k{k}", turns(base, number), **fields).run
        write_run(place / f"k{k}", run.manifest, run.levels, run.requests)
    arms = [{"name": f"k{k}", "directory": f"k{k}"} for k in steps]
    (place / "arms.json").write_text(json.dumps({"schema": "breakeven.arms/1", "arms": arms}))
    return place


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tuning's runs, for tests that write nothing there."""
    return write(tmp_path_factory.mktemp("runs") / "tuned")


def test_three_servers_with_known_curves_get_the_right_table(breakeven: Run, tmp_path: Path) -> None:
    # Tokens a second, at one request and at eight: 111 and 500; 133 and 320; 200 and 261. Far apart, for busy machines.
    places = {0: ("8000", "1000", "1"), 1: ("10000", "5000", "2"), 5: ("8000", "22000", "6")}
    with ExitStack() as stack:
        command: list[object] = ["tune"]
        for k, (step, each, tokens) in places.items():
            flags = ("--step-us", step, "--per-request-us", each, "--tokens", tokens)
            command += ["--arm", f"s{k}={stack.enter_context(null_server(*flags)).url}"]
        command += ["--k", 0, 1, 5, "--concurrency", 1, 8, "--cycles", 2, *QUICK, "--output", "out", "--format", "json"]
        done = breakeven(*command, "--export", "vllm", timeout_s=180)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [level["arm"] for level in found["levels"]] == ["s5", "s0"]
    schedule = read_schedule(tmp_path / "out" / "schedule.json")
    assert (schedule.k_at(1), schedule.k_at(8)) == (5, 0)
    assert schedule.arms == {0: "s0", 1: "s1", 5: "s5"}
    assert schedule.batch_from == "running"
    (flag, config) = shlex.split((tmp_path / "out" / "flags.txt").read_text())
    assert flag == "--speculative-config"
    assert json.loads(config)["num_speculative_tokens"] == 5
    again = breakeven("tune", "out", "--k", 0, 1, 5, "--format", "json", "--write", "again.json")
    assert json.loads(again.stdout)["schedule"]["ranges"] == found["schedule"]["ranges"]
    assert breakeven("compare", "out", "--format", "json").returncode == 0


def test_interrupted_before_all_arms_were_measured_it_says_so_and_leaves_no_table(tmp_path: Path) -> None:
    with null_server("--step-us", "4000") as off, null_server("--step-us", "5000", "--tokens", "2") as on:
        done = ended(
            "tune", "--arm", f"off={off.url}", "--arm", f"k2={on.url}",
            "--concurrency", "1", "--output", "out", "--max-tokens", "20", "--duration", "60",
            cwd=tmp_path, when=has_begun(tmp_path / "out" / "off" / "requests.jsonl"), number=signal.SIGTERM,
            wait_s=60, end_s=60,
        )  # fmt: skip
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert not done.stdout
    assert "ended too early to tune anything: " in done.stderr
    assert not (tmp_path / "out" / "schedule.json").exists()


def test_runs_that_exist_become_a_table_in_every_form(breakeven: Run, tmp_path: Path) -> None:
    place = write(tmp_path / "runs")
    table = breakeven("tune", place)
    assert table.returncode == 0, table.stderr
    assert "Draft 3 tokens up to 2 requests in flight, none from 3." in table.stdout
    assert f"written: {place}/schedule.json, {place}/flags.txt" in table.stderr
    assert max(map(len, table.stdout.splitlines())) <= 130
    assert breakeven("tune", place, "--format", "markdown").stdout.startswith("| C | batch |")
    rows = breakeven("tune", place, "--format", "csv").stdout.splitlines()
    assert rows[0].startswith("load,batch,arm,k,")
    assert len(rows) == 1 + 3 * 3
    sglang = breakeven("tune", place, "--export", "sglang")
    assert "--speculative-adaptive-config sglang-adaptive.json" in sglang.stdout
    tiers = json.loads((place / "sglang-adaptive.json").read_text())
    assert tiers == {"1": {"candidate_steps": [3]}, "3": {"candidate_steps": [0]}}


def test_a_table_from_runs_of_several_places_is_kept_where_it_is_told_to(
    breakeven: Run, runs: Path, tmp_path: Path
) -> None:
    done = breakeven("tune", runs / "k0", runs / "k3")
    assert done.returncode == 0, done.stderr
    assert "not kept: name a file with --write" in done.stderr
    assert breakeven("tune", runs / "k0", runs / "k3", "--write", "s.json").returncode == 0
    assert read_schedule(tmp_path / "s.json").max_k == 3


def test_a_profile_gives_the_gain_in_tokens_and_money(breakeven: Run, runs: Path, tmp_path: Path) -> None:
    (tmp_path / "day.csv").write_text("hour,requests_in_flight\n0,1\n1,4\n2,0\n3,40\n")
    command = ("tune", runs, "--write", "s.json", "--profile", "day.csv", "--gpu-hour-price", "3.6", "--gpus", "2")
    done = breakeven(*command)
    assert done.returncode == 0, done.stderr
    assert "day.csv: 11.2 requests in flight on average, idle 25 %" in done.stdout
    assert "against always off (k0): 1.3" in done.stdout
    assert "25 % of the time lies outside the loads that were measured" in done.stdout
    found = json.loads(breakeven(*command, "--format", "json").stdout)
    costs = found["levels"][0]["cost_per_million"]
    assert costs["k0"] == pytest.approx(2 * 3.6 / 3600 * 1e6 / 100, rel=0.03)
    assert costs["table"] == pytest.approx(costs["k3"], rel=0.03)


def test_a_profile_is_watched_on_a_server(breakeven: Run, runs: Path) -> None:
    with null_server() as server:
        done = breakeven("tune", runs, "--write", "s.json", "--profile", server.url, "--profile-for", "1s")
    assert done.returncode == 0, done.stderr
    assert "0 requests in flight on average, idle 100 %" in done.stdout


def test_a_schedule_is_shown_as_an_engine_takes_it(breakeven: Run, runs: Path, tmp_path: Path) -> None:
    breakeven("tune", runs, "--write", "s.json")
    done = breakeven("tune", "s.json", "--export", "tensorrt-llm")
    assert done.returncode == 0, done.stderr
    assert "  draft_len_schedule:\n    2: 3\n" in done.stdout
    assert breakeven("tune", "s.json", "--model", "m").returncode == 0
    other = breakeven("tune", "s.json", "--model", "other")
    assert other.returncode == 2
    assert "s.json is for the model m, not other" in other.stderr
    assert "leave --cycles out" in breakeven("tune", "s.json", "--cycles", "3").stderr
    (tmp_path / "s.json").write_text((tmp_path / "s.json").read_text().replace("[1, 2, 3]", "[2, 2, 3]"))
    broken = breakeven("tune", "s.json")
    assert (broken.returncode, broken.stdout) == (2, "")
    assert broken.stderr.count("\n") == 1
    assert "must begin at 1" in broken.stderr


def test_arms_that_cant_be_told_apart_give_a_sentence_and_no_file(breakeven: Run, tmp_path: Path) -> None:
    place = write(tmp_path / "runs", {0: (10, 10, 10), 2: (10, 10, 10)})
    done = breakeven("tune", place)
    assert done.returncode == 1
    assert "k0 and k2 can't be told apart at C=1 to C=4: no table is made" in done.stdout
    assert not (place / "schedule.json").exists()


def test_a_table_that_the_engine_refuses_is_kept_without_flags(breakeven: Run, tmp_path: Path) -> None:
    place = write(tmp_path / "runs", {0: (5, 8, 14), 3: (10, 10, 10)})
    done = breakeven("tune", place, "--export", "tensorrt-llm")
    assert done.returncode == 1
    assert "no flags: --export tensorrt-llm: its smallest batches must draft the most" in done.stderr
    assert read_schedule(place / "schedule.json").k_at(1) == 0
    assert not (place / "flags.txt").exists()


def test_what_a_server_says_it_drafts_is_not_contradicted(breakeven: Run, tmp_path: Path) -> None:
    config = {"config": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}}
    place = write(tmp_path / "runs", {0: (10, 10, 10)})
    run = made("on", turns((5, 8, 14), 1), target=config).run
    write_run(place / "on", run.manifest, run.levels, run.requests)
    told = breakeven("tune", place / "k0", place / "on", "--format", "json")
    assert json.loads(told.stdout)["schedule"]["arms"] == {"0": "k0", "4": "on"}
    wrong = breakeven("tune", place / "k0", place / "on", "--k", "0", "3")
    assert wrong.returncode == 2
    assert "on is to draft 3 tokens, and its server said 4" in wrong.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give arms"),
        (["--arm", "on=vllm:eagle3:2", "--k", "0", "1"], "--arm on has no {k}"),
        (["--arm", "k{k}=vllm:eagle3:{k}"], "has {k}: say which draft lengths with --k"),
        (["--arm", "k{k}=vllm:eagle3:{k}", "--k", "0", "99"], "'99' is not a number of draft tokens from 0 to 64"),
        (["--arm", "k{k}=vllm:eagle3:{k}", "--k", "-1", "2"], "'-1' is not a number of draft tokens"),
        (["--arm", "k{k}=vllm:eagle3:{k}", "--k", "0", "20"], "vllm:eagle3:20: K, the draft tokens a step, is a whole"),
        (["--arm", "k{k}=vllm:eagle3:{k}", "--k", "2"], "two"),
        (["--arm", "k{k}=nowhere:{k}", "--k", "1", "2"], "--arm k1=nowhere:1: give http://"),
        (["--arm", "a=http://127.0.0.1:9", "--arm", "b=http://127.0.0.1:8", "--k", "0", "2"], "connection refused"),
        (["--arm", "a=serve:x", "--arm", "off=serve:y"], "nobody tells how many tokens --arm a drafts"),
        (
            ["--arm", "a=serve:x", "--arm", "off=serve:y", "--export", "vllm"],
            "nobody tells how many tokens --arm a drafts",
        ),
        (["--arm", "k0=serve:x", "--arm", "off=serve:y"], "draft the same"),
        (["--arm", "t=serve:x {steps} {topk}", "--vary", "steps=1,2", "topk=4", "--export", "vllm"], "has no top-k"),
        (["--arm", "t=serve:x {steps} {topk}", "--vary", "steps=1,2", "topk=4", "--export", "sglang"], "add topk=1"),
        (["--vary", "width=3"], "is not steps=1,2 or topk=1,4"),
        (["--vary", "steps=1", "steps=2", "--arm", "a=x{steps}"], "--vary steps is given twice"),
        (
            ["--arm", "k{k}=vllm:eagle3:{k}", "--k", "0", "2", "--rate", "3"],
            "--rate: a table goes by requests in flight",
        ),
        (["--arm", "k{k}=local:{k}", "--k", "1", "2", "--profile", "absent.csv"], "--profile absent.csv: No such file"),
        (["--arm", "k{k}=local:{k}", "--k", "1", "2", "--profile-for", "3m"], "--profile-for says nothing without"),
        (["absent", "other"], "absent"),
        (["absent", "other", "--cycles", "2"], "leave --cycles out"),
        (["--gpus", "2"], "--gpus says nothing without --gpu-hour-price"),
    ],
)
def test_what_cant_be_done_is_told_in_one_line(breakeven: Run, arguments: list[str], words: str) -> None:
    done = breakeven("tune", *arguments)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
