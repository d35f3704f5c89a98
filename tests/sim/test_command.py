"""`breakeven simulate` as a call: a run for each K, from a model, a file or runs that were measured."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from breakeven.cli import main
from breakeven.errors import RunError, UsageError
from breakeven.runs import read_run
from breakeven.sim.command import SimulateOptions, Simulation, simulate_command
from tests.sim.handy import CROSSING

QUICK: dict[str, Any] = {"concurrency": (1, 8), "max_tokens": 64, "duration_s": 20.0}


def run(options: SimulateOptions) -> Simulation:
    return simulate_command(options, version="1")


def test_each_k_gets_a_run_and_the_model_its_true_break_even() -> None:
    done = run(SimulateOptions(**QUICK))
    assert [arm.k for arm in done.runs] == [0, 3]
    assert [level.load["concurrency"] for level in done.runs[0].summary.levels] == [1, 8]
    assert (
        done.runs[1].summary.levels[0].output_throughput.value > done.runs[0].summary.levels[0].output_throughput.value
    )
    assert done.runs[0].directory is None
    assert len(done.truths) == 1
    assert done.truths[0].startswith("K=3 against K=0 in this model: break-even at ")


def test_runs_are_written_and_a_model_can_be_fitted_to_them(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_bytes(msgspec.json.encode(CROSSING))
    options = SimulateOptions(**QUICK, model=tmp_path / "m.json", output=tmp_path / "out")
    done = run(options)
    directories = [tmp_path / "out/k0", tmp_path / "out/k3"]
    assert [arm.directory for arm in done.runs] == directories
    assert all((directory / "summary.json").exists() for directory in directories)
    assert read_run(directories[1]).manifest.label == "k3"
    again = run(SimulateOptions(**QUICK, from_runs=tuple(directories)))
    for first, fitted in zip(done.runs, again.runs, strict=True):
        for level, twin in zip(first.summary.levels, fitted.summary.levels, strict=True):
            assert twin.output_throughput.value == pytest.approx(level.output_throughput.value, rel=0.08)
    with pytest.raises(RunError, match="holds another run"):
        run(options)


def test_several_runs_are_one_document_and_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    load = ["simulate", "--concurrency", "1", "2", "--max-tokens", "16", "--duration", "5"]
    assert main([*load, "--format", "json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == ["k0", "k3"]
    assert main([*load, "--format", "csv"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [(row["k"], row["concurrency"]) for row in rows] == [("0", "1"), ("0", "2"), ("3", "1"), ("3", "2")]
    assert all(None not in row and None not in row.values() for row in rows)


def test_a_prompt_that_takes_forever_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text('{"prefill": {"request_ms": 1e308, "token_ms": 1e308}}')
    with pytest.raises(UsageError, match="prefill: request_ms and token_ms must be from 0 to 1000000000"):
        run(SimulateOptions(**QUICK, model=tmp_path / "m.json"))


def test_an_open_loop_has_rates_and_no_break_even() -> None:
    done = run(SimulateOptions(rate=(2.0,), max_tokens=32, ks=(0,)))
    (found,) = done.runs[0].summary.levels
    assert found.load["mode"] == "open"
    assert found.load["rate"] == 2.0
    assert done.truths == []


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model": Path("m.json"), "from_runs": (Path("r"),)}, "either --model FILE or --from RUN"),
        ({"model": Path("none.json")}, "--model none.json"),
        ({"from_runs": (Path("none"),)}, "none holds no run"),
        ({"ks": (0, 3, 3)}, "--k 0 3 3: each K once"),
        ({"ks": (0, 70)}, "--k 70"),
        ({"kinds": ("poems",)}, "--kind poems"),
    ],
)
def test_what_can_not_be_is_refused_before_anything_runs(fields: dict[str, object], said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        run(SimulateOptions(**fields, output=tmp_path / "out"))
    assert not (tmp_path / "out").exists()
