"""Runs that are interrupted, servers that hang or die in the middle, and going on from there."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from breakeven.engines.null import NullServer, null_server
from breakeven.engines.process import free_port
from breakeven.measure.summary import summarize
from breakeven.runs import read_run
from tests.conftest import Run

#: Fast enough that a level of some requests takes no time: 10 tokens are 20 ms.
QUICK = ("--step-us", "2000")
#: Three levels; the second lasts long enough to be interrupted.
LEVELS = ("--concurrency", "1", "2", "3", "--max-tokens", "10", "--warmup", "0", "--output", "out")


@pytest.fixture
def server() -> Iterator[NullServer]:
    with null_server(*QUICK) as running:
        yield running


def start(tmp_path: Path, *args: object, prefix: Sequence[str] = ()) -> subprocess.Popen[str]:
    command = [*prefix, sys.executable, "-m", "breakeven", "bench", *map(str, args)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True)


def lines(directory: Path, name: str = "requests.jsonl") -> list[dict[str, Any]]:
    path = directory / name
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def wait_for(level: int, count: int, directory: Path, process: subprocess.Popen[str]) -> None:
    """Waits until `count` requests of a level have ended."""
    until = time.monotonic() + 30
    path = directory / "requests.jsonl"
    wanted = b'"level":%d,' % level
    while not path.exists() or path.read_bytes().count(wanted) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.02)


def summary(directory: Path) -> Any:
    return json.loads((directory / "summary.json").read_text())


def manifest(directory: Path) -> Any:
    return json.loads((directory / "manifest.json").read_text())


@contextmanager
def server_at(port: int, *args: str) -> Iterator[NullServer]:
    with null_server("--port", str(port), *args) as running:
        yield running


# ---- resuming ----


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_goes_on_at_the_level_it_was_in(breakeven: Run, tmp_path: Path, server: NullServer, number: int) -> None:
    out = tmp_path / "out"
    process = start(tmp_path, "--server-url", server.url, *LEVELS, "--duration", "2")
    wait_for(1, 5, out, process)
    process.send_signal(number)
    process.communicate(timeout=20)
    first = [line for line in lines(out) if line["level"] == 0]
    cut = sum(line["level"] == 1 for line in lines(out))
    assert first
    assert cut

    result = breakeven("bench", "--resume", "out")

    assert result.returncode == 0, result.stderr
    assert "1 of 3 levels are finished; going on at level 2, C=2" in result.stderr
    assert [line for line in lines(out) if line["level"] == 0] == first
    assert len(lines(out, "requests.cut.jsonl")) >= cut
    levels = summary(out)["levels"]
    assert [level["name"] for level in levels] == ["C=1", "C=2", "C=3"]
    assert all(level["ended_by"] == "duration" for level in levels)
    assert all(level["requests"]["failed"] == 0 for level in levels)
    assert not manifest(out)["interrupted"]
    assert len(manifest(out)["resumed"]) == 1
    ids = [line["id"] for line in lines(out)]
    assert len(set(ids)) == len(ids)


def test_a_signal_that_was_ignored_stays_so(tmp_path: Path, server: NullServer) -> None:
    nohup = ("sh", "-c", 'trap "" HUP; exec "$@"', "sh")
    process = start(tmp_path, "--server-url", server.url, *LEVELS, "--duration", "1", prefix=nohup)
    wait_for(0, 3, tmp_path / "out", process)
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=40)
    assert process.returncode == 0
    assert [level["ended_by"] for level in summary(tmp_path / "out")["levels"]] == ["duration"] * 3


def test_times_of_a_resumed_run_go_on_where_they_were(breakeven: Run, tmp_path: Path, server: NullServer) -> None:
    out = tmp_path / "out"
    process = start(tmp_path, "--server-url", server.url, *LEVELS, "--duration", "1")
    wait_for(1, 3, out, process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    before = max(line["end_ns"] for line in lines(out))
    assert breakeven("bench", "--resume", "out").returncode == 0
    assert min(line["sent_ns"] for line in lines(out) if line["level"] > 0) > before
    assert breakeven("summarize", "out", "--format", "json").stdout == (out / "summary.json").read_text()


def test_a_run_can_be_resumed_twice(breakeven: Run, tmp_path: Path, server: NullServer) -> None:
    out = tmp_path / "out"
    args: tuple[object, ...] = ("--server-url", server.url, *LEVELS, "--duration", "1.5")
    for level in (1, 2):
        process = start(tmp_path, *args)
        wait_for(level, 3, out, process)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=20)
        args = ("--resume", "out")
    result = breakeven("bench", "--resume", "out")
    assert "2 of 3 levels are finished; going on at level 3, C=3" in result.stderr
    assert [level["ended_by"] for level in summary(out)["levels"]] == ["duration"] * 3
    assert len(manifest(out)["resumed"]) == 2


def test_a_complete_run_has_nothing_to_resume(breakeven: Run, tmp_path: Path, server: NullServer) -> None:
    args = ("--server-url", server.url, "--concurrency", 1, "--requests", 2, "--max-tokens", 4, "--output", "out")
    assert breakeven("bench", *args).returncode == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    result = breakeven("bench", "--resume", "out")
    assert result.returncode == 2
    assert "all 1 levels of this run are finished" in result.stderr
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def interrupted(tmp_path: Path, server: NullServer, *more: object) -> Path:
    out = tmp_path / "out"
    process = start(tmp_path, "--server-url", server.url, *LEVELS, "--duration", "60", *more)
    wait_for(0, 2, out, process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    return out


def test_a_run_is_not_resumed_with_flags_of_another(breakeven: Run, tmp_path: Path, server: NullServer) -> None:
    interrupted(tmp_path, server)
    result = breakeven("bench", "--resume", "out", "--duration", "5")
    assert result.returncode == 2
    assert "leave --duration out" in result.stderr


def test_a_run_is_not_resumed_against_another_model(breakeven: Run, tmp_path: Path, server: NullServer) -> None:
    out = interrupted(tmp_path, server)
    before = lines(out)
    with null_server(*QUICK, "--model", "other") as other:
        result = breakeven("bench", "--resume", "out", "--server-url", other.url)
    assert result.returncode == 2
    assert "the model was null and is now other" in result.stderr
    assert lines(out) == before


def test_a_server_may_have_moved(breakeven: Run, tmp_path: Path, server: NullServer) -> None:
    out = tmp_path / "out"
    process = start(tmp_path, "--server-url", server.url, *LEVELS, "--duration", "1")
    wait_for(2, 2, out, process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    with null_server(*QUICK) as other:
        assert breakeven("bench", "--resume", "out", "--server-url", other.url).returncode == 0
    assert len(summary(out)["levels"]) == 3


def test_secrets_have_to_be_given_again(breakeven: Run, tmp_path: Path) -> None:
    with null_server(*QUICK, "--api-key", "sesame-4711") as closed:
        out = tmp_path / "out"
        env = {"OPENAI_API_KEY": "sesame-4711"}
        command = [sys.executable, "-m", "breakeven", "bench", "--server-url", closed.url, *LEVELS, "--duration", "60"]
        command += ["--header", "X-Team: blue-42"]
        process = subprocess.Popen(command, cwd=tmp_path, env=os.environ | env, stderr=subprocess.PIPE, text=True)
        wait_for(0, 2, out, process)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
        assert "give it again" in breakeven("bench", "--resume", "out", env=env).stderr
        without_key = breakeven("bench", "--resume", "out", "--header", "X-Team: blue-42")
        assert without_key.returncode == 2
        assert "had a key" in without_key.stderr
        written = b"".join(path.read_bytes() for path in out.iterdir())
        assert b"sesame-4711" not in written
        assert b"blue-42" not in written


def test_a_run_that_is_being_written_is_not_resumed(breakeven: Run, tmp_path: Path, server: NullServer) -> None:
    out = tmp_path / "out"
    process = start(tmp_path, "--server-url", server.url, *LEVELS, "--duration", "60")
    wait_for(0, 2, out, process)
    result = breakeven("bench", "--resume", "out")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert result.returncode == 2
    assert "another process is writing" in result.stderr


def test_there_is_no_run_to_resume(breakeven: Run) -> None:
    result = breakeven("bench", "--resume", "nowhere")
    assert result.returncode == 2
    assert "nowhere holds no run" in result.stderr


# ---- kill -9 at any moment ----

#: Levels so short that kills meet every part of a run, its start and its end above all.
SHORT = (*LEVELS[:4], "--max-tokens", 5, "--warmup", 0, "--duration", "0.25", "--quiet")
#: About how long such a run takes on a busy machine.
LASTS_S = 3.5


def test_a_run_that_is_killed_again_and_again_ends_whole(breakeven: Run, tmp_path: Path, server: NullServer) -> None:
    """BREAKEVEN_KILLS=20 has it killed twenty times."""
    rng, kills, runs = random.Random(5), int(os.environ.get("BREAKEVEN_KILLS", "3")), 0
    fresh: tuple[object, ...] = ("--server-url", server.url, *SHORT, "--output", "run")
    while kills:
        out = tmp_path / f"run{runs}"
        fresh, runs, whole = (*fresh[:-1], out.name), runs + 1, False
        args = fresh
        while not whole:
            process = start(tmp_path, *args)
            is_killed = kills > 0 and killed_somewhere(process, out, rng)
            _, stderr = process.communicate(timeout=40)
            kills -= is_killed
            if not is_killed:
                assert process.returncode == 0, stderr
                whole = True
            elif not (out / "manifest.json").exists():
                assert "holds no run" in breakeven("bench", "--resume", out.name).stderr  # it begins anew
            elif read_as_far_as_it_came(out):
                assert "are finished" in breakeven("bench", "--resume", out.name).stderr
                assert breakeven("summarize", out.name).returncode == 0
                whole = True
            else:
                args = ("--resume", out.name, "--quiet")
        assert_whole(out)
        assert breakeven("summarize", out.name, "--format", "json").stdout == (out / "summary.json").read_text()
    told = Counter((row.tokens, row.finished) for row in server.truth())
    kept = [
        line
        for path in tmp_path.glob("run*")
        for name in ("requests", "requests.cut")
        for line in whole_lines(path, name)
    ]
    assert sum(line["outcome"] == "ok" for line in kept) <= sum(n for (_, finished), n in told.items() if finished)


@pytest.mark.parametrize("left", ["manifest.tmp", "manifest.json"])
def test_a_run_that_is_killed_as_it_begins_is_in_nobodys_way(
    breakeven: Run, tmp_path: Path, server: NullServer, left: str
) -> None:
    """The one is a manifest that was not whole yet, so that the run begins anew; the other can be gone on with."""
    args: tuple[object, ...] = (
        "--server-url",
        server.url,
        *SHORT[:4],
        "--requests",
        3,
        "--max-tokens",
        5,
        "--output",
        "out",
    )
    assert breakeven("bench", *args).returncode == 0
    out = tmp_path / "out"
    begun = manifest(out) | {"ended": None}
    for path in out.iterdir():
        path.unlink()
    (out / left).write_text(json.dumps(begun))
    if left == "manifest.json":
        assert breakeven("summarize", "out").returncode == 0
        args = ("--resume", "out")
    assert breakeven("bench", *args).returncode == 0
    assert [level["requests"]["ok"] for level in summary(out)["levels"]] == [3, 3, 3]


def killed_somewhere(process: subprocess.Popen[str], out: Path, rng: random.Random) -> bool:
    """Kills it at a random moment, or just after one of its files has changed; False if it was over before that."""
    name = rng.choice([None, "", "manifest.json", "requests.jsonl", "levels.jsonl", "summary.json"])
    began = stamp_of(out / name) if name is not None else 0
    until = time.monotonic() + (rng.uniform(0, LASTS_S) if name is None else 40)
    count = rng.randrange(3) if name == "levels.jsonl" else 0
    while time.monotonic() < until and process.poll() is None:
        if name is not None and stamp_of(out / name) != began:
            if not count:
                time.sleep(rng.uniform(0, 0.01))
                break
            began, count = stamp_of(out / name), count - 1
        time.sleep(0.0005)
    if process.poll() is not None:
        return False
    process.kill()
    process.wait()
    return process.returncode == -signal.SIGKILL


def stamp_of(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def whole_lines(directory: Path, name: str) -> list[dict[str, Any]]:
    path = directory / f"{name}.jsonl"
    written = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in written if line.endswith(b"\n")]


def read_as_far_as_it_came(out: Path) -> bool:
    """A killed run can be read, and no number stands in it twice; whether all its levels are over."""
    run = read_run(out)
    summarize(run)
    assert not [number for number, times in Counter(record.id for record in run.requests).items() if times > 1]
    over = [level.plan.index for level in run.levels if level.ended_by == "duration"]
    assert over == list(range(len(over)))
    return len(over) == 3


def assert_whole(out: Path) -> None:
    """Every level stands there once, and its numbers are those of the records on disk."""
    assert read_as_far_as_it_came(out)
    kept = lines(out)
    levels = summary(out)["levels"]
    assert [level["name"] for level in levels] == ["C=1", "C=2", "C=3"]
    assert [line["ended_by"] for line in lines(out, "levels.jsonl")] == ["duration"] * 3
    for index, level in enumerate(levels):
        counted = [line for line in kept if line["level"] == index]
        inside = [line for line in counted if line["phase"] == "measured"]
        assert level["requests"]["ok"] == len(inside)
        assert level["requests"]["failed"] == 0
        assert level["output_tokens"] == sum(line["output_tokens"] for line in counted)
        assert all(line["output_tokens"] == 5 for line in inside)
        assert max(line["end_ns"] for line in counted) - min(line["sent_ns"] for line in counted) < 30e9


# ---- servers that hang or die ----


def test_a_dead_server_ends_the_run_which_goes_on_when_it_is_back(breakeven: Run, tmp_path: Path) -> None:
    out, port = tmp_path / "out", free_port()
    with server_at(port, *QUICK) as server:
        process = start(tmp_path, "--server-url", server.url, *LEVELS, "--duration", "2")
        wait_for(1, 3, out, process)
    _, stderr = process.communicate(timeout=50)
    assert process.returncode == 1
    assert "is gone" in stderr
    assert "breakeven bench --resume out" in stderr
    assert "Traceback" not in stderr
    levels = summary(out)["levels"]
    assert [(level["name"], level["ended_by"]) for level in levels] == [("C=1", "duration"), ("C=2", "lost")]
    assert levels[1]["requests"]["failed"] > 0
    assert manifest(out)["interrupted"]
    with server_at(port, *QUICK):
        assert breakeven("bench", "--resume", "out").returncode == 0
    levels = summary(out)["levels"]
    assert [level["requests"]["failed"] for level in levels] == [0, 0, 0]


def test_a_hanging_server_is_noticed_by_the_watchdog(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with null_server(*QUICK) as server:
        process = start(tmp_path, "--server-url", server.url, *LEVELS, "--duration", "3", "--watchdog", "1")
        wait_for(0, 3, out, process)
        os.kill(server.pid, signal.SIGSTOP)  # its port still takes connections, and nothing ever comes
        time.sleep(4)
        os.kill(server.pid, signal.SIGCONT)
        _, stderr = process.communicate(timeout=50)
    assert process.returncode == 0, stderr
    assert [level["ended_by"] for level in summary(out)["levels"]] == ["watchdog", "duration", "duration"]
    outcomes = Counter(line["outcome"] for line in lines(out) if line["level"] == 0)
    assert outcomes["ok"] >= 2
    assert outcomes["cancelled"] == 1


def test_a_server_that_only_refuses_ends_a_level_but_not_the_run(tmp_path: Path, breakeven: Run) -> None:
    """It answers, so that it is not gone: the next level may be another matter."""
    from tests.load.scripted import ANSWER, Request, answer, each, scripted

    def refuse(request: Request) -> bytes:
        if request.body.get("max_tokens") == 16:  # the probe
            return ANSWER
        return answer(500, b'{"error": {"message": "out of memory"}}')

    with scripted_llm(scripted, each, refuse) as url:
        result = breakeven(
            "bench", "--server-url", url, "--concurrency", 1, 2, "--max-tokens", 10, "--warmup", 0, "--output", "out"
        )
    assert result.returncode == 0, result.stderr
    levels = summary(tmp_path / "out")["levels"]
    assert [level["ended_by"] for level in levels] == ["failures", "failures"]
    assert "out of memory" in result.stdout


@contextmanager
def scripted_llm(scripted: Any, each: Any, post: Any) -> Iterator[str]:
    """A scripted server that lists a model to whoever asks."""
    from tests.load.scripted import Peer, answer

    def serve(peer: Peer) -> None:
        while True:
            head = peer.read_head()
            if head.startswith(b"GET /v1/models"):
                peer.send(answer(200, b'{"data": [{"id": "m", "owned_by": "me"}]}'))
            elif head.startswith(b"GET"):
                peer.send(answer(404, b"{}"))
            else:
                peer._rest = head + b"\r\n\r\n" + peer._rest
                peer.send(post(peer.read()))

    with scripted([serve]) as server:
        yield server.url


def test_a_full_disk_keeps_what_is_done_and_the_run_goes_on(breakeven: Run, tmp_path: Path, server: NullServer) -> None:
    out = tmp_path / "out"
    limited = ("sh", "-c", 'ulimit -f 40; exec "$@"', "sh")  # files of at most 20 kB
    process = start(tmp_path, "--server-url", server.url, *LEVELS, "--duration", "2", prefix=limited)
    _, stderr = process.communicate(timeout=50)
    assert process.returncode == 2
    assert "breakeven bench --resume out" in stderr
    assert "Traceback" not in stderr
    assert breakeven("summarize", "out").returncode == 0
    assert breakeven("bench", "--resume", "out").returncode == 0
    assert [level["ended_by"] for level in summary(out)["levels"]] == ["duration"] * 3


def test_output_that_has_no_room_is_told_in_one_line(breakeven: Run, tmp_path: Path, server: NullServer) -> None:
    args = ("--server-url", server.url, "--concurrency", 1, "--requests", 2, "--max-tokens", 4, "--output", "out")
    assert breakeven("bench", *args).returncode == 0
    command = [sys.executable, "-m", "breakeven", "summarize", "out"]
    with open("/dev/full", "w") as full:
        result = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True)
    words = "breakeven summarize: error: what is to be printed can't be written: No space left on device\n"
    assert (result.returncode, result.stderr) == (2, words)


# ---- servers that breakeven starts ----


NULL = f"{sys.executable} -m breakeven.engines.null --port {{port}} --step-us 2000"


def test_a_served_command_is_measured_and_stopped(breakeven: Run, tmp_path: Path) -> None:
    command = f"{NULL} --api-key sesame-4711"
    result = breakeven(
        "bench", "--serve", command, "--concurrency", 2, "--requests", 4, "--max-tokens", 10, "--output", "out",
        env={"OPENAI_API_KEY": "sesame-4711"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert summary(tmp_path / "out")["levels"][0]["requests"]["ok"] == 4
    assert manifest(tmp_path / "out")["server_host"]["cores"] >= 1
    assert b"sesame-4711" not in b"".join(path.read_bytes() for path in (tmp_path / "out").iterdir())
    assert (tmp_path / "out" / "server.log").exists()
    port = int(manifest(tmp_path / "out")["target"]["url"].rpartition(":")[2])
    assert not [pid for pid in processes() if f"--port {port}" in pid]


def processes() -> list[str]:
    """The command lines of all processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_the_server_starts_leaves_nothing_behind(tmp_path: Path, number: int) -> None:
    command = f"sh -c 'echo up; exec sleep 600' {tmp_path.name} {{port}}"
    env = os.environ | {"TMPDIR": str(tmp_path)}
    command_line = [sys.executable, "-m", "breakeven", "bench", "--serve", command]
    process = subprocess.Popen(command_line, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 30
    while not any(path.read_text() for path in tmp_path.glob("breakeven-*/server.log")):
        assert time.monotonic() < until
        time.sleep(0.02)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=40)
    assert process.returncode == 128 + number
    assert "Traceback" not in stderr
    assert list(tmp_path.iterdir()) == []
    assert not [line for line in processes() if tmp_path.name in line]


def test_a_served_command_that_dies_ends_the_run_with_its_log(tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start(tmp_path, "--serve", NULL, *LEVELS, "--duration", "60")
    wait_for(0, 3, out, process)
    port = manifest(out)["target"]["url"].rpartition(":")[2]
    marker = f"breakeven.engines.null --port {port} "
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        if marker in path.read_bytes().replace(b"\0", b" ").decode() and b"guard" not in path.read_bytes():
            os.kill(int(path.parent.name), signal.SIGKILL)
    _, stderr = process.communicate(timeout=50)
    assert process.returncode == 1, stderr
    assert "is gone" in stderr
    assert lines(out, "levels.jsonl")[0]["ended_by"] == "lost"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("no-such-program --port {port}", "can't run no-such-program"),
        (f"{sys.executable} -m breakeven.engines.null --port 80", "has no {port}"),
        (f"{sys.executable} -c 'raise SystemExit(\"out of memory\")' {{port}}", "out of memory"),
        ("'unfinished {port}", "quot"),
    ],
)
def test_a_command_that_serves_nothing_is_refused(breakeven: Run, tmp_path: Path, command: str, words: str) -> None:
    result = breakeven("bench", "--serve", command, "--output", "out")
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()
