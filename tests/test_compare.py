"""`breakeven compare` as a user runs it: real servers, real sockets, arms by turns."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from breakeven.engines.null import NullServer, null_server
from tests.conftest import Run, run_in
from tests.nulls import ended, has_begun, serving

#: Without speculation a step takes 4 ms + 1 ms a request.
OFF = ("--step-us", "4000", "--per-request-us", "1000", "--tokens", "1")
#: With it two tokens a step, which takes 5 ms and 4 ms a request: pays while 2 (4 + C) > 5 + 4 C, below C = 1.5.
ON = ("--step-us", "5000", "--per-request-us", "4000", "--tokens", "2")
QUICK = ("--max-tokens", "20", "--duration", "0.4", "--warmup", "0", "--quiet")

off, on = serving(*OFF), serving(*ON)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory, off: NullServer, on: NullServer) -> Path:
    """A comparison of both, once for all tests that only read it."""
    place = tmp_path_factory.mktemp("compared")
    command = ["compare", "--arm", f"off={off.url}", "--arm", f"on={on.url}", "--concurrency", "1", "2", "4"]
    done = run_in(place, *command, "--cycles", "2", *QUICK, "--output", "out", "--format", "json")
    assert done.returncode == 0, done.stderr
    (place / "stdout").write_text(done.stdout)
    return place / "out"


def comparison(directory: Path) -> Any:
    return json.loads((directory / "comparison.json").read_text())


def levels(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "levels.jsonl").read_bytes().splitlines()]


def test_the_break_even_is_where_the_servers_put_it(compared: Path) -> None:
    found = comparison(compared)["versus"][0]
    (crossing,) = found["throughput"]["crossings"]
    assert crossing["load"] == pytest.approx(1.5, rel=0.15)
    assert found["sentence"].startswith("Speculation pays below 1.")


def test_arms_take_turns_in_abba_order_and_never_at_once(compared: Path) -> None:
    turns = []
    for name in ("off", "on"):
        started = json.loads((compared / name / "manifest.json").read_text())["started"]
        seconds = float(started[17:26]) + 60 * int(started[14:16])
        turns += [
            (seconds + level["started_ns"] / 1e9, seconds + level["ended_ns"] / 1e9, name, level["plan"]["concurrency"])
            for level in levels(compared / name)
        ]
    turns.sort()
    order = [name for _, _, name, concurrency in turns if concurrency == 1]
    assert order == ["off", "on", "on", "off", "off", "on", "on", "off"]
    assert all(before[1] <= after[0] + 0.005 for before, after in pairwise(turns))


def test_both_arms_are_sent_the_same_prompts(compared: Path) -> None:
    sent = []
    for name in ("off", "on"):
        requests = [json.loads(line) for line in (compared / name / "requests.jsonl").read_bytes().splitlines()]
        requests.sort(key=lambda request: request["id"])
        sent.append([r["prompt"] for r in requests if r["level"] == 1 and r["phase"] == "measured"][:4])
    assert sent[0] == sent[1]


def test_what_was_printed_is_what_was_written(compared: Path) -> None:
    assert json.loads((compared.parent / "stdout").read_text()) == comparison(compared)


def test_a_comparison_can_be_read_again_wherever_it_was_moved(breakeven: Run, compared: Path, tmp_path: Path) -> None:
    shutil.copytree(compared, tmp_path / "elsewhere")
    again = breakeven("compare", "elsewhere", "--format", "json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["versus"] == comparison(compared)["versus"]
    both = breakeven("compare", "elsewhere/off", "elsewhere/on", "--format", "json")
    assert json.loads(both.stdout)["versus"] == comparison(compared)["versus"]
    assert json.loads(both.stdout)["how"] == "pairs"


def test_an_arm_of_a_comparison_is_not_resumed_as_a_bench(breakeven: Run, compared: Path) -> None:
    result = breakeven("bench", "--resume", compared / "on")
    assert result.returncode == 2
    assert "an arm of a comparison" in result.stderr


def test_every_format_is_printed(breakeven: Run, compared: Path) -> None:
    table = breakeven("compare", compared).stdout
    assert "Speculation pays below" in table
    assert max(map(len, table.splitlines())) <= 120
    assert breakeven("compare", compared, "--format", "markdown").stdout.startswith("|")
    assert breakeven("compare", compared, "--format", "csv").stdout.count("\n") == 1 + 3 * 2


def test_a_limit_gives_the_largest_load_of_each_arm(breakeven: Run, compared: Path) -> None:
    found = json.loads(breakeven("compare", compared, "--slo", "tpot_p50:7", "--format", "json").stdout)
    off, on = (arm["slo"]["load"] for arm in found["arms"])
    assert off == pytest.approx(3.0, rel=0.2)  # 4 + C <= 7 ms
    assert on == pytest.approx(2.25, rel=0.2)  # (5 + 4 C) / 2 <= 7 ms


def test_open_loops_are_compared_by_latency(breakeven: Run, off: NullServer, on: NullServer) -> None:
    result = breakeven(
        "compare", "--arm", f"off={off.url}", "--arm", f"on={on.url}", "--rate", "5", "10", "--cycles", "2", *QUICK,
        "--format", "json",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["mode"] == "open"
    assert found["versus"][0]["throughput"] is None


def test_arms_on_machines_of_their_own_can_be_loaded_at_once(
    breakeven: Run, tmp_path: Path, off: NullServer, on: NullServer
) -> None:
    began = time.monotonic()
    result = breakeven(
        "compare", "--arm", f"off={off.url}", "--arm", f"on={on.url}", "--concurrency", 1, "--cycles", 2, *QUICK,
        "--concurrently", "--output", "out",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert time.monotonic() - began < 30
    spans = [(lev["plan"]["run"], lev["opened_ns"], lev["closed_ns"]) for lev in levels(tmp_path / "out" / "off")]
    assert len(spans) == 4


def test_three_arms_are_compared_with_the_first(breakeven: Run, off: NullServer, on: NullServer) -> None:
    with null_server(*OFF) as third:
        result = breakeven(
            "compare", "--arm", f"off={off.url}", "--arm", f"on={on.url}", "--arm", f"again={third.url}",
            "--concurrency", 1, "--cycles", 2, *QUICK, "--format", "json",
        )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert [versus["arm"] for versus in json.loads(result.stdout)["versus"]] == ["on", "again"]


def test_more_cycles_until_the_ratio_is_precise(
    breakeven: Run, tmp_path: Path, off: NullServer, on: NullServer
) -> None:
    for precision, most in (("0.9", 2), ("0.0001", 8)):
        out = f"out-{precision}"
        result = breakeven(
            "compare", "--arm", f"off={off.url}", "--arm", f"on={on.url}", "--concurrency", 1, "--cycles", 1,
            "--max-tokens", 8, "--duration", "0.2", "--warmup", 0, "--quiet", "--precision", precision, "--output", out,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        assert len(levels(tmp_path / out / "on")) == most


def test_arms_that_are_started_take_turns_as_whole_sweeps(breakeven: Run, tmp_path: Path) -> None:
    def serve(flags: tuple[str, ...]) -> str:
        return f"serve:{sys.executable} -m breakeven.engines.null --port {{port}} {' '.join(flags)}"

    result = breakeven(
        "compare", "--arm", f"off={serve(OFF)}", "--arm", f"on={serve(ON)}", "--concurrency", 1, 4, *QUICK,
        "--duration", 1.5, "--output", "out",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert comparison(tmp_path / "out")["how"] == "sweeps"
    assert "Speculation pays below" in result.stdout
    for name in ("off", "on"):
        plans = [level["plan"] for level in levels(tmp_path / "out" / name)]
        assert [(plan["run"], plan["concurrency"]) for plan in plans] == [(r, c) for r in range(3) for c in (1, 4)]
        ids = [
            json.loads(line)["id"] for line in (tmp_path / "out" / name / "requests.jsonl").read_bytes().splitlines()
        ]
        assert len(set(ids)) == len(ids)
        assert (tmp_path / "out" / name / "server.log").exists()


def test_an_interrupted_comparison_rests_on_what_is_there(tmp_path: Path, off: NullServer, on: NullServer) -> None:
    path = tmp_path / "out" / "on" / "levels.jsonl"
    command = ["compare", "--arm", f"off={off.url}", "--arm", f"on={on.url}", "--concurrency", "1", "2"]
    done = ended(
        *command, "--cycles", "2", *QUICK, "--duration", "1", "--output", "out",
        cwd=tmp_path, when=lambda: path.exists() and len(path.read_bytes().splitlines()) >= 5, number=signal.SIGINT,
        wait_s=40,
    )  # fmt: skip
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
    assert "speculation" in done.stdout.lower()


def test_interrupted_before_both_arms_were_measured_it_says_so_and_nothing_else(
    tmp_path: Path, off: NullServer, on: NullServer
) -> None:
    command = ["compare", "--arm", f"off={off.url}", "--arm", f"on={on.url}", "--concurrency", "1"]
    done = ended(
        *command, "--output", "out", "--max-tokens", "20", "--duration", "60",
        cwd=tmp_path, when=has_begun(tmp_path / "out" / "off" / "requests.jsonl"), number=signal.SIGTERM,
    )  # fmt: skip
    assert done.returncode == 128 + signal.SIGTERM
    assert not done.stdout
    assert "ended too early to compare anything: out/" in done.stderr
    assert not (tmp_path / "out" / "comparison.json").exists()


def test_sweeps_that_end_while_a_server_starts_are_still_written_down(tmp_path: Path) -> None:
    null = f"serve:{sys.executable} -m breakeven.engines.null --port {{port}} --step-us 4000"
    slow = f"serve:{sys.executable} -c 'import time; time.sleep(60)' {{port}}"
    command = [sys.executable, "-m", "breakeven", "compare", "--arm", f"off={null}", "--arm", f"on={slow}"]
    command += ["--concurrency", "1", *QUICK, "--output", "out"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 20
    log = tmp_path / "out" / "off" / "server.log"
    while time.monotonic() < deadline and not log.exists():
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM
    assert "ended too early to compare anything" in stderr
    assert json.loads((tmp_path / "out" / "off" / "manifest.json").read_text())["interrupted"]
    assert (tmp_path / "out" / "off" / "summary.json").exists()


def test_a_comparison_of_which_one_arm_was_measured_is_called_that(
    breakeven: Run, compared: Path, tmp_path: Path
) -> None:
    shutil.copytree(compared, tmp_path / "part")
    shutil.rmtree(tmp_path / "part" / "on")
    result = breakeven("compare", "part")
    assert result.returncode == 2
    assert "part is a comparison that was ended early: of its arms only off was measured" in result.stderr


def test_a_run_is_not_compared_with_itself(breakeven: Run, compared: Path, tmp_path: Path) -> None:
    (tmp_path / "again").symlink_to(compared / "off")
    result = breakeven("compare", compared / "off", "again")
    assert result.returncode == 2
    assert "are the same run" in result.stderr


def test_pointers_of_another_schema_are_refused(breakeven: Run, compared: Path, tmp_path: Path) -> None:
    shutil.copytree(compared, tmp_path / "later")
    arms = tmp_path / "later" / "arms.json"
    arms.write_text(arms.read_text().replace("breakeven.arms/1", "breakeven.arms/9"))
    result = breakeven("compare", "later")
    assert result.returncode == 2
    assert "is of schema breakeven.arms/9" in result.stderr


def test_of_three_arms_two_that_are_one_server_are_compared_by_force(
    breakeven: Run, tmp_path: Path, off: NullServer, on: NullServer
) -> None:
    args = ("compare", "--arm", f"off={off.url}", "--arm", f"on={on.url}", "--arm", f"too={off.url}", *QUICK)
    args += ("--concurrency", "1", "--cycles", "1", "--force", "--output", "out")
    result = breakeven(*args)
    assert result.returncode == 0, result.stderr
    assert "--force: off and too are the same server" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "give two arms"),
        (["--arm", "off=OFF"], "two arms or more"),
        (["--arm", "off=OFF", "--arm", "off=ON"], "two arms have this name"),
        (["--arm", "off=OFF", "--arm", "on=ON", "--arm", "too=OFF"], "are the same server"),
        (["--arm", "off=OFF", "--arm", "on=OFF/v1/"], "are the same server"),
        (["--arm", "off=OFF", "--arm", "..=ON"], "--arm ..: an arm's directory is named for it"),
        (["--arm", "off=OFF", "--arm", "arms.json=ON"], "--arm arms.json: an arm's directory is named for it"),
        (["--arm", "off=OFF", "--arm", "on=ON", "--concurrency", "2", "1", "2"], "--concurrency 2 is given twice"),
        (["--arm", "off=OFF", "--arm", "on=ON", "--rate", "0.5", ".5"], "--rate 0.5 is given twice"),
        (["--arm", "off=OFF", "--arm", "on=ON", "--slo", ""], "--slo: '' is no limit"),
        (["--arm", "off=OFF", "--arm", "on=somewhere"], "give http://"),
        (["--arm", "off=OFF", "--arm", "=ON"], "is not an arm"),
        (["--arm", "off=OFF", "--arm", "on=local:no-such"], "no speculation 'no-such'"),
        (["--arm", "off=OFF", "--arm", "on=ON", "--slo", "ttft:fast"], "--slo"),
        (["--arm", "off=OFF", "--arm", "on=ON", "--no-ramp"], "--no-ramp"),
        (["--arm", "off=OFF", "--arm", "on=ON", "--label", "mine"], "--label"),
        (["--serve-timeout", "5"], "says nothing without --serve or --vllm or --arm"),
        (["nowhere", "else"], "nowhere holds no run"),
        (["nowhere", "--cycles", "2"], "leave --cycles out"),
    ],
)
def test_nonsense_is_refused_by_name(
    breakeven: Run, tmp_path: Path, off: NullServer, on: NullServer, args: list[str], words: str
) -> None:
    result = breakeven("compare", *(arg.replace("OFF", off.url).replace("ON", on.url) for arg in args))
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())


def test_unlike_servers_are_refused_before_anything_is_measured(
    breakeven: Run, tmp_path: Path, off: NullServer
) -> None:
    with null_server("--model", "other") as other:
        args = ("compare", "--arm", f"off={off.url}", "--arm", f"on={other.url}", "--concurrency", 1, "--cycles", 2)
        result = breakeven(*args, *QUICK, "--output", "out")
        assert result.returncode == 2
        assert "model" in result.stderr
        assert not (tmp_path / "out" / "off").exists()
        assert breakeven(*args, *QUICK, "--output", "forced", "--force").returncode == 0


def test_a_server_that_never_gets_healthy_is_told_with_its_log(breakeven: Run, tmp_path: Path, off: NullServer) -> None:
    dies = f"serve:{sys.executable} -c 'raise SystemExit(\"no such model\")' {{port}}"
    result = breakeven("compare", "--arm", f"off={off.url}", "--arm", f"on={dies}", "--concurrency", 1, *QUICK)
    assert result.returncode == 2
    assert "no such model" in result.stderr


def test_the_place_of_another_run_is_not_overwritten(
    breakeven: Run, tmp_path: Path, off: NullServer, on: NullServer
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("precious")
    result = breakeven("compare", "--arm", f"off={off.url}", "--arm", f"on={on.url}", *QUICK, "--output", "out")
    assert result.returncode == 2
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_the_embedded_engine_is_compared_with_itself(breakeven: Run) -> None:
    pytest.importorskip("xllamacpp")
    result = breakeven(
        "compare", "--arm", "off=local:", "--arm", "on=local:ngram-simple", "--concurrency", 1, "--cycles", 1,
        "--max-tokens", 8, "--kind", "maths", "--duration", 4, "--warmup", 0, "--quiet",
        timeout_s=300,  # its threads wait for each other in a loop, which a busy machine makes very slow
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "speculation" in result.stdout.lower()
