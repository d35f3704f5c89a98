"""Arms inside one server, told apart by a pin: `compare`, `tune` and `verify` as a user runs them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Run, run_in
from tests.controlled import STEP_US, Controlled, controlled
from tests.nulls import ended, has_begun

QUICK = ("--max-tokens", "8", "--duration", "0.4", "--quiet")


@pytest.fixture(scope="module")
def server() -> Iterator[Controlled]:
    with controlled() as running:
        yield running


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory, server: Controlled) -> Path:
    """A comparison of two pins and the policy, once for all tests that only read it."""
    place = tmp_path_factory.mktemp("compared")
    arms = [word for name, k in (("off", "0"), ("k2", "2"), ("free", "auto")) for word in arm(server, name, k)]
    done = run_in(
        place, "compare", *arms, "--concurrency", 2, "--cycles", 2, "--warmup", 2, *QUICK, "--output", "out",
        timeout_s=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (place / "stdout").write_text(done.stdout)
    return place / "out"


def arm(server: Controlled, name: str, k: str) -> list[str]:
    return ["--arm", f"{name}=pin:{k}@{server.arm}"]


def comparison(directory: Path) -> Any:
    return json.loads((directory / "comparison.json").read_text())


def records(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "requests.jsonl").read_bytes().splitlines()]


def pinned(server: Controlled) -> int | None:
    own: dict[str, int] | None = server.ask("GET", "/state")[1]["pinned"]
    return None if own is None else own["k"]


def test_each_arm_runs_at_the_speed_of_its_k(compared: Path) -> None:
    (load,) = comparison(compared)["loads"]
    ratios = {each["arm"]: each["throughput"]["value"] for each in load["versus"]}
    assert ratios["k2"] == pytest.approx(STEP_US[0] / STEP_US[2], rel=0.3)  # 3: a busy machine slows short steps
    assert ratios["free"] == pytest.approx(STEP_US[0] / STEP_US[None], rel=0.2)  # 1.5


def test_what_is_told_apart_stands_beside_the_verdict_and_nothing_is_warned_of(compared: Path) -> None:
    found = comparison(compared)
    assert [
        [(each["name"], each["reference"], each["other"]) for each in arm["differences"]] for arm in found["arms"]
    ] == [[], [("pin", "0", "2")], [("pin", "0", "auto")]]
    assert not [text for text in found["warnings"] if "pin" in text]


def test_no_answer_that_counts_began_under_the_pin_of_another_arm(server: Controlled, compared: Path) -> None:
    ruled = server.log()
    since = [each.since_ns for each in ruled]
    first = next(place for place, each in enumerate(ruled) if each.k is not None)
    seen = {0: 0, 2: 0, None: 0}
    for row in server.null.truth():
        began, over = (bisect_right(since, at_ns) - 1 for at_ns in (row.arrival_ns, row.last_ns))
        if began < first:
            continue  # the first look at each arm, before the first turn
        if row.finished:
            assert began == over, "an answer that came whole spans a switch"
            seen[ruled[began].k] += 1
    whole = {name: [r for r in records(compared / name) if r["outcome"] == "ok"] for name in ("off", "k2", "free")}
    assert [seen[0], seen[2]] == [len(whole["off"]), len(whole["k2"])]  # warm-up and ramp among them
    assert {r["phase"] for own in whole.values() for r in own} >= {"warmup", "ramp", "measured"}


def test_answers_that_a_turns_end_cuts_off_are_left_out(compared: Path) -> None:
    cut = [r for name in ("off", "k2", "free") for r in records(compared / name) if r["outcome"] != "ok"]
    assert {(r["outcome"], r["phase"]) for r in cut} <= {("cancelled", "drain")}


def test_the_pin_is_gone_when_the_comparison_is_over(server: Controlled, compared: Path) -> None:
    assert pinned(server) is None


def test_the_pin_is_gone_when_a_turn_is_ended_in_its_middle(tmp_path: Path, server: Controlled) -> None:
    done = ended(
        "compare", *arm(server, "off", "0"), *arm(server, "on", "4"), "--concurrency", "1", "--output", "out",
        "--max-tokens", "8", "--duration", "60",
        cwd=tmp_path, when=has_begun(tmp_path / "out" / "off" / "requests.jsonl"), number=signal.SIGINT,
        wait_s=60, end_s=60,
    )  # fmt: skip
    assert done.returncode == 130, done.stderr
    assert server.log()[-1].k is None
    assert server.log()[-2].k == 0


def test_the_pin_is_gone_when_a_record_cant_be_written(tmp_path: Path, server: Controlled) -> None:
    script = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000));"
        "from breakeven.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    arms = [*arm(server, "off", "0"), *arm(server, "on", "4")]
    done = subprocess.run(
        [sys.executable, "-c", script, "compare", *arms, "--concurrency", "4", *QUICK, "--output", "out"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert server.log()[-1].k is None


def test_a_pin_that_somebody_replaced_is_warned_of_by_the_arms_name(tmp_path: Path, server: Controlled) -> None:
    def replaced() -> bool:
        if pinned(server) == 4:
            server.ask("POST", "/pin", {"k": 2, "seconds": 60})
            return True
        return False

    arms = [*arm(server, "off", "0"), *arm(server, "on", "4")]
    done = ended(
        "compare", *arms, "--concurrency", "1", "--cycles", "1", *QUICK, "--duration", "2", "--output", "out",
        cwd=tmp_path, when=replaced, number=0, wait_s=60, end_s=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (warned,) = [text for text in comparison(tmp_path / "out")["warnings"] if "pin" in text]
    assert warned == (
        "on: its pin did not hold in 1 of 2 turns, at C=1 (somebody else pinned K=2): what was measured there is not "
        "K=4"
    )
    again = run_in(tmp_path, "compare", "out")
    assert "on: its pin did not hold in 1 of 2 turns" in " ".join(again.stdout.split())


def test_a_template_of_pins_is_tuned_and_read_again(breakeven: Run, server: Controlled) -> None:
    result = breakeven(
        "tune", "--arm", f"k{{k}}=pin:{{k}}@{server.arm}", "--k", 0, 2, 4, "--concurrency", 1, "--cycles", 2,
        "--warmup", 0, *QUICK, "--output", "out", timeout_s=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "out/schedule.json" in result.stderr
    again = breakeven("tune", "out", "--format", "json")
    assert again.returncode == 0, again.stderr
    assert {each["k"] for each in json.loads(again.stdout)["schedule"]["ranges"]} == {2}


def test_the_policy_of_the_server_is_put_to_the_proof(breakeven: Run, server: Controlled) -> None:
    arms = [*arm(server, "off", "0"), *arm(server, "on", "4"), *arm(server, "tuned", "auto")]
    result = breakeven("verify", *arms, "--concurrency", 1, "--cycles", 2, "--warmup", 0, *QUICK, timeout_s=120)
    assert result.returncode == 0, (result.stdout, result.stderr)


@pytest.mark.parametrize(
    ("arms", "words"),
    [
        (["off=pin:0@ARM", "on=pin:x@ARM"], "--arm on: 'x' is no number of draft tokens and not auto"),
        (["off=pin:0@ARM", "on=pin:3@ARM"], "does not declare K=3: it may be told 0, 2, 4"),
        (["off=pin:0@URL#1", "on=pin:4@URL#1"], "--arm off: no control page answers at http://127.0.0.1:1: start the"),
        (["off=pin:0@ARM", "on=pin:0@ARM"], "are the same server, http://127.0.0.1:PORT and the same pin, 0"),
        (["off=URL", "on=pin:4@ARM"], "are the same server: write --arm off=pin:auto@http://127.0.0.1:PORT"),
        (["off=pin:0@ARM", "on=serve:run {port}"], "would share the machine"),
    ],
)
def test_pins_that_cant_be_are_refused_in_one_line(
    breakeven: Run, tmp_path: Path, server: Controlled, arms: list[str], words: str
) -> None:
    given = [text.replace("ARM", server.arm).replace("URL", server.null.url) for text in arms]
    result = breakeven("compare", *(word for text in given for word in ("--arm", text)), *QUICK)
    assert result.returncode == 2
    assert words.replace("PORT", str(server.null.port)) in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())


def test_one_server_cant_have_two_pins_at_once(breakeven: Run, server: Controlled) -> None:
    result = breakeven("compare", *arm(server, "off", "0"), *arm(server, "on", "4"), "--concurrently", *QUICK)
    assert result.returncode == 2
    assert "--concurrently: --arm off and --arm on are one server" in result.stderr


def test_a_key_that_is_missing_is_told_before_anything_is_measured(breakeven: Run, tmp_path: Path) -> None:
    with controlled("secret") as locked:
        result = breakeven("compare", *arm(locked, "off", "0"), *arm(locked, "on", "4"), *QUICK)
        assert result.returncode == 2
        assert "put the server's BREAKEVEN_KEY into BREAKEVEN_CONTROL_KEY" in result.stderr
        assert not list(tmp_path.iterdir())
