"""Policies under a load that varies, in the simulated engine and on the command line."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from breakeven.cli import main
from breakeven.errors import RunError, UsageError
from breakeven.report.contest import render_contest
from breakeven.runs import read_run
from breakeven.sim.contest import Contest, ContestOptions, hold_contest, table_of
from breakeven.sim.model import Acceptance
from tests.sim.handy import CROSSING, PROMPTS

#: At these loads K=3 wins with few requests and loses with many.
SWING = ContestOptions(profile="step:2:48:40", duration_s=80.0, max_tokens=64)


def hold(options: ContestOptions = SWING, model: Any = CROSSING) -> Contest:
    return hold_contest(options, model, PROMPTS, version="1")


def test_auto_finds_what_the_table_was_told() -> None:
    contest = hold()
    entries = {entry.name: entry for entry in contest.entries}
    assert list(entries) == ["off", "on", "table", "auto"]
    assert entries["table"].regret < 0.02
    assert entries["auto"].regret < 0.06
    assert entries["auto"].of_best_static > 1.0
    assert min(entries["off"].regret, entries["on"].regret) > 0.04
    assert set(entries["off"].ks) == {0}
    assert set(entries["on"].ks) == {3}
    assert entries["off"].switches == entries["on"].switches == 0
    assert set(entries["table"].ks) == set(entries["auto"].ks) == {0, 3}
    assert 0 < entries["auto"].probe_share < 0.02
    assert all(not entry.faults for entry in contest.entries)


def test_auto_follows_prompts_that_no_table_knows_of() -> None:
    acceptance = Acceptance(default=(0.3,), kinds={"code": (0.95, 0.95, 0.95), "chat": (0.05,)})
    options = replace(SWING, profile="constant:8", mix="code:60,chat:60", duration_s=240.0, policies=("table", "auto"))
    table, auto = hold(options, replace(CROSSING, acceptance=acceptance)).entries
    assert auto.tokens > 1.05 * table.tokens
    assert auto.regret < 0.15


def test_the_table_is_the_model_s_own() -> None:
    table = table_of(CROSSING, PROMPTS, (0, 3), 64, 64)
    assert [each.k for each in table.ranges] == [3, 0]
    border = table.ranges[1].lo
    tokens = 1 + 0.7 + 0.7 * 0.6 + 0.7 * 0.6 * 0.5
    rates = [tokens / CROSSING.step_ms(b, 3, drafter=True) * CROSSING.step_ms(b, 0, drafter=True) for b in range(1, 65)]
    assert abs(border - next(b for b, rate in enumerate(rates, 1) if rate < 1)) <= 1


def test_the_same_seed_makes_the_same_contest() -> None:
    options = replace(SWING, duration_s=10.0)
    assert hold(options) == hold(options)
    assert hold(replace(options, seed=1)) != hold(options)


def test_runs_are_written_as_bench_writes_them(tmp_path: Path) -> None:
    options = replace(SWING, duration_s=20.0, policies=("off", "auto", "fixed:3"), output=tmp_path)
    contest = hold(options)
    for entry, name in zip(contest.entries, ("off", "auto", "fixed3"), strict=True):
        run = read_run(tmp_path / name)
        assert (tmp_path / name / "summary.json").exists()
        assert run.manifest.label == name
        assert sum(request.output_tokens or 0 for request in run.requests) == pytest.approx(entry.tokens, rel=0.01)
        assert len({request.id for request in run.requests}) == len(run.requests)
    with pytest.raises(RunError, match="holds another run"):
        hold(options)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"policies": ("fastest",)}, "--policy fastest: give off"),
        ({"policies": ("fixed:2",)}, "the policy fixed:2: K is one of 0, 3"),
        ({"policies": ("table:none.json",)}, "none.json"),
        ({"policies": ("off",), "ks": (1, 3)}, "--policy off"),
        ({"ks": (3,)}, "two or more K"),
        ({"ks": (0, 70)}, "--k 70"),
        ({"profile": "ramp"}, "--profile ramp"),
        ({"mix": "code:5,chat:5"}, "acceptance.kinds"),
    ],
)
def test_what_can_not_be_is_refused_before_anything_runs(fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        hold(replace(SWING, **fields, output=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_the_drawing_shows_the_load_and_each_policy_s_k() -> None:
    text = render_contest(hold(), "table")
    rows = {line.split("  ")[0].strip(): line for line in text.splitlines()}
    bars = rows["load 2 to 48"]
    assert {"▁", "█"} <= set(bars)
    drawn = next(line for name, line in rows.items() if name == "auto K")
    assert [drawn[i] for i, bar in enumerate(bars) if bar == "█"].count("0") > bars.count("█") / 2
    assert [drawn[i] for i, bar in enumerate(bars) if bar == "▁"].count("3") > bars.count("▁") / 2


def test_the_command_prints_all_forms(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "m.json").write_bytes(msgspec.json.encode(CROSSING))
    command = ["simulate", "--profile", "ramp:1:32", "--model", str(tmp_path / "m.json"), "--k", "0", "3"]
    command += ["--duration", "10", "--max-tokens", "32", "--policy", "off,auto"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "policy" in text
    assert "regret" in text
    assert main([*command, "--format", "csv"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [row["name"] for row in rows] == ["off", "auto"]
    assert main([*command, "--format", "json"]) == 0
    assert [entry["name"] for entry in json.loads(capsys.readouterr().out)["entries"]] == ["off", "auto"]
    assert main([*command, "--format", "markdown"]) == 0
    assert "| off | " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--policy", "auto"], "--policy needs a load that varies"),
        (["--mix", "code:5"], "--mix needs a load that varies"),
        (["--profile", "ramp:1:8", "--concurrency", "1"], "--profile and --concurrency contradict"),
        (["--profile", "ramp:1:8", "--rate", "1"], "--profile and --rate contradict"),
    ],
)
def test_flags_that_do_not_fit_are_named(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *flags]) == 2
    assert said in capsys.readouterr().err


def test_a_policy_twice_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--profile", "ramp:1:8", "--policy", "auto,auto"])
    assert "each once" in capsys.readouterr().err
