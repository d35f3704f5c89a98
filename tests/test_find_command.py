"""`breakeven compare --find` as a user runs it: real servers, real sockets, no grid."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from breakeven.engines.null import NullServer
from tests.conftest import Run, run_in
from tests.nulls import serving

#: A step takes 4 ms + 1 ms a request, or two tokens a step in 2 ms + 4 ms a request: equal where 2 (4 + C) = 2 + 4 C,
#: at C = 3, and far from equal at 1 and at 8.
OFF = ("--step-us", "4000", "--per-request-us", "1000", "--tokens", "1")
ON = ("--step-us", "2000", "--per-request-us", "4000", "--tokens", "2")
CROSSING = 3.0
QUICK = ("--max-tokens", "6", "--duration", "0.05", "--warmup", "0", "--quiet")

off, on = serving(*OFF), serving(*ON)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, off: NullServer, on: NullServer) -> Path:
    """A search, once for all tests that only read it. Wide enough to end soon on a busy machine."""
    place = tmp_path_factory.mktemp("found")
    command = ["compare", "--arm", f"off={off.url}", "--arm", f"on={on.url}", "--find", "break-even"]
    command += ["--between", "1:8", "--precision", "0.6", "--max-seconds", "60", *QUICK]
    done = run_in(place, *command, "--output", "out", "--format", "json", timeout_s=120)
    assert done.returncode == 0, done.stderr
    (place / "stdout").write_text(done.stdout)
    (place / "stderr").write_text(done.stderr)
    return place / "out"


def manifest(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "manifest.json").read_text())
    return found


def plans(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line)["plan"] for line in (run / "levels.jsonl").read_bytes().splitlines()]


def test_the_break_even_is_found_where_the_servers_put_it(found: Path) -> None:
    answer = json.loads((found / "comparison.json").read_text())["versus"][0]
    assert answer["sentence"].startswith("Speculation pays below")
    (crossing,) = answer["throughput"]["crossings"]
    assert crossing["low"] / 1.5 <= CROSSING <= crossing["high"] * 1.5
    assert json.loads((found.parent / "stdout").read_text())["versus"] == [answer]


def test_it_says_what_it_does_and_why_it_ends(found: Path) -> None:
    said = (found.parent / "stderr").read_text()
    assert "plan: the break-even between C=1 and C=8, within 60 %, for 1 min 00 s at most, into out" in said
    assert "C=1: 4 turns of each arm (the lowest load)" in said
    assert "search over: " in said or "search ended: time is up" in said


def test_what_was_measured_is_an_ordinary_comparison(breakeven: Run, found: Path) -> None:
    again = breakeven("compare", found, "--format", "json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["versus"] == json.loads((found / "comparison.json").read_text())["versus"]


def test_the_manifest_lists_the_levels_that_were_measured(found: Path) -> None:
    measured = {name: plans(found / name) for name in ("off", "on")}
    assert measured["off"] == measured["on"]
    for name, own in measured.items():
        listed = manifest(found / name)["levels"]
        assert {plan["index"] for plan in own} <= {plan["index"] for plan in listed}
        assert sorted(own, key=lambda plan: plan["index"]) == listed[: len(own)]
        turns = Counter(plan["concurrency"] for plan in own)
        assert all(
            [plan["run"] for plan in own if plan["concurrency"] == load] == list(range(n)) for load, n in turns.items()
        )


def test_the_largest_load_within_a_limit_is_looked_for_until_time_is_up(
    breakeven: Run, off: NullServer, on: NullServer
) -> None:
    result = breakeven(
        "compare", "--arm", f"off={off.url}", "--arm", f"on={on.url}", "--find", "slo", "--slo", "tpot_p50:9",
        "--between", "1:32", "--precision", "0.01", "--max-seconds", "4", *QUICK, "--format", "json",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "plan: the largest load that holds --slo between C=1 and C=32, within 1 %" in result.stderr
    assert "search ended: time is up" in result.stderr
    assert "ci95" in json.loads(result.stdout)["arms"][0]["slo"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--find", "break-even", "--concurrency", "1", "2"], "--find and --concurrency contradict each other"),
        (["--find", "break-even", "--rate", "1"], "--find and --rate contradict each other"),
        (["--find", "knee", "--cycles", "2"], "--find and --cycles contradict each other"),
        (["--find", "slo"], "--find slo needs limits to hold"),
        (["--find", "slo", "--slo", "ttft:fast"], "--slo"),
        (["--find", "break-even", "--between", "64:2"], "is not a range LOW:HIGH"),
        (["--find", "break-even", "--between", "7"], "is not a range LOW:HIGH"),
        (["--find", "somewhere"], "invalid choice"),
        (["--between", "1:8"], "--between says nothing without --find"),
        (["--find", "break-even", "--max-tokens", "8", "16"], "give --max-tokens one number"),
        (["--find", "break-even", "--arm", "too=serve:x {port}"], "start the servers yourself"),
    ],
)
def test_nonsense_is_refused_by_name(
    breakeven: Run, tmp_path: Path, off: NullServer, on: NullServer, args: list[str], words: str
) -> None:
    result = breakeven("compare", "--arm", f"off={off.url}", "--arm", f"on={on.url}", *args)
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())
