"""`breakeven verify` as a user runs it: arms by turns on real sockets, and runs that exist."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from breakeven.decide.turns import ArmRun
from breakeven.engines.null import NullServer, null_server
from breakeven.runs import RunWriter
from tests.conftest import Run
from tests.decide.arms import Steps, made
from tests.decide.test_verify import BEST, OFF, ON
from tests.nulls import ended, has_begun, serving

#: Two static servers: without speculation a step takes 4 ms + 1 ms a request; with it two tokens 5 ms + 8 ms a request.
OFF_SERVER = ("--step-us", "4000", "--per-request-us", "1000", "--tokens", "1")
ON_SERVER = ("--step-us", "5000", "--per-request-us", "8000", "--tokens", "2")
#: Six tokens a step, and one: surely better and surely worse than both, however busy this machine is.
GOOD = ("--step-us", "5000", "--per-request-us", "1000", "--tokens", "6")
BAD = ("--step-us", "20000", "--tokens", "1")
QUICK = ("--cycles", "2", "--max-tokens", "12", "--duration", "0.4", "--warmup", "0", "--quiet", "--margin", "0.3")
SCHEDULE = {"schema": "breakeven.schedule/1", "model": "null", "ranges": [[1, 64, 5]]}

off, on, good = serving(*OFF_SERVER), serving(*ON_SERVER), serving(*GOOD)


def arms(*servers: tuple[str, NullServer]) -> list[str]:
    return [text for name, server in servers for text in ("--arm", f"{name}={server.url}")]


def schedule(place: Path, **fields: Any) -> Path:
    path = place / "schedule.json"
    path.write_text(json.dumps(SCHEDULE | fields))
    return path


def written(place: Path, *runs: ArmRun) -> list[Path]:
    """The runs as directories, named for their arms."""
    for name, _, run in runs:
        with RunWriter.create(place / name, run.manifest) as writer:
            for record in run.requests:
                writer.add_request(record)
            for level in run.levels:
                writer.add_level(level)
            writer.finish(interrupted=False)
    return [place / arm.name for arm in runs]


@pytest.fixture(scope="module")
def verified(
    tmp_path_factory: pytest.TempPathFactory, off: NullServer, on: NullServer, good: NullServer
) -> subprocess.CompletedProcess[str]:
    """A verification of an arm that holds, once for all tests that only read it; `args` is its directory."""
    place = tmp_path_factory.mktemp("verified")
    command = [sys.executable, "-m", "breakeven", "verify", *arms(("off", off), ("on", on), ("tuned", good)), *QUICK]
    command += ["--concurrency", "1", "4", "--output", "out", "--format", "json", "--schedule", str(schedule(place))]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=120)
    return subprocess.CompletedProcess(place / "out", done.returncode, done.stdout, done.stderr)


def test_an_arm_that_beats_both_holds_the_envelope(verified: subprocess.CompletedProcess[str]) -> None:
    assert verified.returncode == 0, verified.stderr + verified.stdout
    found = json.loads(verified.stdout)
    assert found["holding"]["sentence"].startswith(
        "tuned holds the envelope: nowhere more than 30 % below the best static arm, geometric mean "
    )
    assert [load["load"] for load in found["loads"]] == [1, 4]
    assert found["loads"][1]["envelope"]["best"] == ["off"]  # 4 / 8 ms against 8 / 37 ms
    assert set(found["loads"][0]["static"]) == {"off", "on"}


def test_what_was_printed_is_written_beside_the_comparison(verified: subprocess.CompletedProcess[str]) -> None:
    place = Path(verified.args)
    assert json.loads((place / "verification.json").read_text()) == json.loads(verified.stdout)
    comparison = json.loads((place / "comparison.json").read_text())
    assert [arm["name"] for arm in comparison["arms"]] == ["off", "on", "tuned"]


def test_what_the_engine_drafted_stands_beside_the_schedule(verified: subprocess.CompletedProcess[str]) -> None:
    found = json.loads(verified.stdout)
    for load in found["loads"]:
        assert load["drafting"]["per_draft"] == 5  # a chunk of six tokens was a draft of five
        assert load["drafting"]["expected"] == 5
    assert not any("its schedule says" in warning for warning in found["warnings"])


def test_its_directory_is_read_again_and_any_arm_can_be_the_one_to_prove(
    breakeven: Run, verified: subprocess.CompletedProcess[str], tmp_path: Path
) -> None:
    again = breakeven("verify", verified.args, "--margin", "0.3", "--format", "json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["holding"] == json.loads(verified.stdout)["holding"]
    other = breakeven("verify", verified.args, "--tuned", "off", "--margin", "0.3", "--schedule", schedule(tmp_path))
    assert other.returncode == 1
    told = " ".join(other.stdout.split())
    assert "off loses at C=1: " in told
    assert "of tuned" in told
    assert "the engine of off counts no drafts" in told


def test_an_arm_that_is_worse_than_both_loses_with_exit_code_1(
    breakeven: Run, tmp_path: Path, off: NullServer, on: NullServer
) -> None:
    with null_server(*BAD) as bad:
        result = breakeven(
            "verify", *arms(("bad", bad), ("off", off), ("on", on)), "--tuned", "bad", *QUICK, "--concurrency", 1,
            "--output", "out", timeout_s=120,
        )  # fmt: skip
    assert result.returncode == 1, result.stderr
    assert "bad loses at C=1: 0." in " ".join(result.stdout.split())
    assert json.loads((tmp_path / "out" / "verification.json").read_text())["static"] == ["off", "on"]


#: The same arm, too noisy to tell.
NOISY: Steps = {1: [15.0, 16.5, 14.0, 15.2], 8: BEST[8]}


@pytest.mark.parametrize(
    ("tuned", "code", "words"),
    [
        (BEST, 0, "tuned holds the envelope: nowhere more than 3 % below the best static arm, geometric mean "),
        ({1: BEST[1], 8: [15.8, 15.9, 15.8, 15.7]}, 1, "tuned loses at C=8: 0.9"),
        (NOISY, 1, "Undecided: intervals too wide at C=1 (±"),
    ],
)
def test_runs_that_took_turns_are_put_to_the_proof(
    breakeven: Run, tmp_path: Path, tuned: Steps, code: int, words: str
) -> None:
    directories = written(tmp_path, made("off", OFF), made("on", ON), made("tuned", tuned))
    result = breakeven("verify", *directories)
    assert result.returncode == code, result.stderr
    assert words in " ".join(result.stdout.split())


def test_an_interrupted_verification_says_what_there_is(
    tmp_path: Path, off: NullServer, on: NullServer, good: NullServer
) -> None:
    done = ended(
        "verify", *arms(("off", off), ("on", on), ("tuned", good)), *QUICK, "--duration", "60", "--output", "out",
        cwd=tmp_path, when=has_begun(tmp_path / "out" / "tuned" / "requests.jsonl"), number=signal.SIGINT,
        wait_s=30, end_s=30,
    )  # fmt: skip
    assert done.returncode == 130
    assert not done.stdout
    assert "ended too early to verify anything: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "give the arms"),
        (["--arm", "off=OFF", "--arm", "tuned=GOOD"], "verify needs two static arms or more beside the tuned one"),
        (["ARMS", "--tuned", "auto"], "--tuned auto: no arm has this name; there are off, on, tuned"),
        (["ARMS", "--rate", "2"], "--rate: below saturation"),
        (["ARMS", "--margin", "1.5"], "--margin"),
        (["ARMS", "--margin", "-0.1"], "--margin"),
        (["ARMS", "--schedule", "nowhere.json"], "nowhere.json"),
        (["ARMS", "--arm", "verification.json=GOOD"], "this name is taken"),
        (["nowhere", "else"], "nowhere holds no run"),
        (["nowhere", "--cycles", "2"], "leave --cycles out"),
    ],
)
def test_nonsense_is_refused_by_name(
    breakeven: Run, tmp_path: Path, off: NullServer, on: NullServer, good: NullServer, args: list[str], words: str
) -> None:
    three = arms(("off", off), ("on", on), ("tuned", good))
    urls = {"OFF": off.url, "GOOD": good.url}
    filled = [arg.replace("OFF", urls["OFF"]).replace("GOOD", urls["GOOD"]) for arg in args if arg != "ARMS"]
    result = breakeven("verify", *(three if "ARMS" in args else []), *filled)
    assert result.returncode == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_schedule_for_another_model_is_refused_before_anything_is_measured(
    breakeven: Run, tmp_path: Path, off: NullServer, on: NullServer, good: NullServer
) -> None:
    three = arms(("off", off), ("on", on), ("tuned", good))
    path = schedule(tmp_path, model="llama-70b")
    result = breakeven("verify", *three, *QUICK, "--output", "out", "--schedule", path)
    assert result.returncode == 2
    assert "is for the model llama-70b, not null" in result.stderr
    assert not (tmp_path / "out").exists()


def test_runs_of_unequal_loads_are_refused(breakeven: Run, tmp_path: Path) -> None:
    tuned = made("tuned", {16: BEST[8]})
    result = breakeven("verify", *written(tmp_path, made("off", OFF), made("on", ON), tuned))
    assert result.returncode == 2
    assert "no load in common" in result.stderr


def test_runs_that_did_not_take_turns_are_refused(breakeven: Run, tmp_path: Path) -> None:
    directories = written(tmp_path, made("off", OFF, how=None), made("on", ON), made("tuned", BEST))
    result = breakeven("verify", *directories)
    assert result.returncode == 2
    assert "off did not take turns with tuned" in result.stderr
