"""Bad input: one line that names the flag and the mend, exit code 2, nothing written, no traceback."""

from __future__ import annotations

import resource
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from breakeven.engines.null import NullServer, null_server
from tests.conftest import Run

QUICK = ("--requests", "2", "--concurrency", "1", "--max-tokens", "4", "--warmup", "0", "--no-ramp")


@pytest.fixture(scope="module")
def server() -> Iterator[NullServer]:
    with null_server("--step-us", "1000", "--model", "served") as running:
        yield running


@pytest.fixture(scope="module")
def locked() -> Iterator[NullServer]:
    with null_server("--step-us", "1000", "--api-key", "the-right-key") as running:
        yield running


def refused(result: subprocess.CompletedProcess[str], *words: str) -> str:
    """Asserts that a command was refused in one line that holds all the words; returns the line."""
    assert result.returncode == 2, result.stderr
    lines = [line for line in result.stderr.splitlines() if not line.startswith(("warning:", "plan:"))]
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in lines[0]
    return lines[0]


def answering(status: int, body: bytes, content_type: str = "application/json") -> Iterator[str]:
    """A server that lists a model and answers every completion with the same status and body."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_list = self.path == "/v1/models"
            self.reply(200 if is_list else 404, b'{"object":"list","data":[{"id":"m","object":"model"}]}')

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.reply(status, body)

        def reply(self, code: int, content: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{httpd.server_address[1]}"
        finally:
            httpd.shutdown()
            thread.join()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), ("--server-url", "--local")),
        (("--server-url", "http://x", "--local"), ("--server-url", "--local")),
        (("--server-url", "localhost:8000"), ("http://localhost:8000", "--server-url")),
        (("--server-url", "ftp://localhost"), ("http://", "--server-url")),
        (("--local", "magic"), ("magic", "ngram-simple")),
        (("--concurrency", "0"), ("--concurrency", "whole number from 1")),
        (("--concurrency", "-3"), ("--concurrency",)),
        (("--concurrency", "many"), ("--concurrency", "'many'")),
        (("--max-tokens", "0"), ("--max-tokens",)),
        (("--requests", "0"), ("--requests",)),
        (("--duration", "0"), ("--duration", "90s")),
        (("--duration", "nan"), ("--duration",)),
        (("--budget", "soon"), ("--budget", "20m")),
        (("--precision", "5"), ("--precision", "0.05")),
        (("--precision", "nan"), ("--precision",)),
        (("--temperature", "-1"), ("--temperature",)),
        (("--temperature", "inf"), ("--temperature",)),
        (("--warmup", "-1"), ("--warmup",)),
        (("--runs", "0"), ("--runs",)),
        (("--header", "no colon"), ("--header", "Name: value")),
        (("--extra-body", "{"), ("--extra-body", "JSON object")),
        (("--extra-body", "[1]"), ("--extra-body", "JSON object")),
        (("--extra-body", '{"max_tokens": 9}'), ("--extra-body", "max_tokens can't be set here: use --max-tokens")),
        (("--extra-body", '{"stream": false}'), ("--extra-body", "always streams")),
        (("--local", "--concurrency", "300"), ("--concurrency", "256")),
        (("--label", "a/b"), ("--label",)),
        (("--api", "grpc"), ("--api", "chat")),
        (("--local", "--api-key-env", "NOT_SET_ANYWHERE"), ("--api-key-env", "NOT_SET_ANYWHERE")),
        (("--local", "--prompts", "missing.jsonl"), ("--prompts", "missing.jsonl")),
        (("--local", "--prompts", "random:lots"), ("--prompts", "random:512")),
        (("--local", "--kind", "poems"), ("--kind", "poems", "chat")),
    ],
)
def test_nonsense_is_refused_by_name(
    breakeven: Run, tmp_path: Path, args: tuple[str, ...], words: tuple[str, ...]
) -> None:
    refused(breakeven("bench", *args), *words)
    assert not list(tmp_path.iterdir())


def test_nothing_listens_there(breakeven: Run, tmp_path: Path) -> None:
    refused(breakeven("bench", "--server-url", f"http://127.0.0.1:{free_port()}", *QUICK), "--server-url", "port")
    assert not list(tmp_path.iterdir())


def test_no_such_host(breakeven: Run) -> None:
    refused(breakeven("bench", "--server-url", "http://no-such-host.invalid:8000", *QUICK), "--server-url")


def test_a_port_that_speaks_no_http(breakeven: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=greet, args=(listener,))
        thread.start()
        refused(breakeven("bench", "--server-url", f"http://127.0.0.1:{listener.getsockname()[1]}", *QUICK), "HTTP")
        thread.join()


def greet(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
        connection.recv(65536)


def test_https_asked_of_a_plain_server(breakeven: Run, server: NullServer) -> None:
    refused(breakeven("bench", "--server-url", server.url.replace("http:", "https:"), *QUICK), "http://")


def test_a_web_server_that_is_no_llm_server(breakeven: Run, tmp_path: Path) -> None:
    handler = partial(QuietFiles, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        try:
            refused(breakeven("bench", "--server-url", f"http://127.0.0.1:{httpd.server_port}", *QUICK), "--server-url")
        finally:
            httpd.shutdown()
            thread.join()


class QuietFiles(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def test_a_missing_key_and_a_wrong_one(breakeven: Run, locked: NullServer) -> None:
    line = refused(breakeven("bench", "--server-url", locked.url, *QUICK), "--api-key-env")
    assert "401" in line
    wrong = breakeven("bench", "--server-url", locked.url, *QUICK, env={"OPENAI_API_KEY": "the-wrong-key"})
    assert "the-wrong-key" not in refused(wrong, "--api-key-env") + wrong.stdout


def test_the_right_key_is_used_and_never_written(breakeven: Run, locked: NullServer, tmp_path: Path) -> None:
    result = breakeven(
        "bench", "--server-url", locked.url, *QUICK, "--api-key-env", "MY_KEY", "--header", "X-Other: hush-hush",
        "--output", "out", env={"MY_KEY": "the-right-key"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    everything = result.stdout + result.stderr + "".join(path.read_text() for path in (tmp_path / "out").iterdir())
    assert "the-right-key" not in everything
    assert "hush-hush" not in everything


def test_a_header_of_the_users_own_stands_in_place_of_the_key(breakeven: Run, locked: NullServer) -> None:
    header = ("--header", "authorization: Bearer the-right-key")
    result = breakeven("bench", "--server-url", locked.url, *QUICK, *header, env={"OPENAI_API_KEY": "another"})
    assert result.returncode == 0, result.stderr


def test_runs_of_the_same_second_get_directories_of_their_own(
    breakeven: Run, server: NullServer, tmp_path: Path
) -> None:
    args = ("bench", "--server-url", server.url, *QUICK)
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(lambda _: breakeven(*args), range(3)))
    assert [result.returncode for result in results] == [0, 0, 0]
    assert len(list((tmp_path / "runs").iterdir())) == 3


@pytest.mark.parametrize("redirections", ["2>&-", ">&- 2>&-", "2>/dev/full"])
def test_closed_and_full_streams_stop_no_run(server: NullServer, tmp_path: Path, redirections: str) -> None:
    command = [sys.executable, "-m", "breakeven", "bench", "--server-url", server.url, *QUICK, "--output", "out"]
    result = subprocess.run(f"{shlex.join(command)} {redirections}", shell=True, cwd=tmp_path, stdout=subprocess.PIPE)
    assert result.returncode == 0
    assert (tmp_path / "out" / "summary.json").exists()


def test_no_such_model(breakeven: Run, server: NullServer) -> None:
    refused(breakeven("bench", "--server-url", server.url, "--model", "other", *QUICK), "--model", "served")


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (403, b'{"error":{"message":"not for you"}}', ("403", "not for you", "--api-key-env")),
        (404, b'{"detail":"Not Found"}', ("404", "--api")),
        (422, b'{"detail":[{"msg":"extra fields not permitted"}]}', ("422", "not permitted", "--extra-body")),
        (500, b"<html>boom</html>", ("500", "boom", "log")),
        (200, b'{"choices":[{"text":"all at once"}]}', ("text/event-stream",)),
    ],
)
def test_a_server_that_refuses_the_first_request(
    breakeven: Run, status: int, body: bytes, words: tuple[str, ...]
) -> None:
    for url in answering(status, body):
        refused(breakeven("bench", "--server-url", url, *QUICK), *words)


def test_more_connections_than_descriptors(breakeven: Run, server: NullServer) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard > 10**7:
        pytest.skip("this machine has no limit on open files")
    result = breakeven("bench", "--server-url", server.url, "--concurrency", hard, *QUICK[:2])
    refused(result, "--concurrency", "ulimit")


def test_a_directory_that_holds_another_run(breakeven: Run, server: NullServer, tmp_path: Path) -> None:
    assert breakeven("bench", "--server-url", server.url, *QUICK, "--output", "out").returncode == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    refused(breakeven("bench", "--server-url", server.url, *QUICK, "--output", "out"), "--output", "out")
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}


def test_summarize_says_what_is_no_run(breakeven: Run, tmp_path: Path) -> None:
    refused(breakeven("summarize", "nowhere"), "nowhere")
    refused(breakeven("summarize", tmp_path), "manifest.json")


def test_help_is_cheap() -> None:
    """Under 0.2 s of CPU, so that it feels like nothing; the best of three, since the machine may be busy."""
    best = min(cpu_seconds("-m", "breakeven", "bench", "--help") for _ in range(3))
    assert best < 0.2


def cpu_seconds(*args: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *args], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("load", ["--concurrency 1", "--rate 5"])
def test_too_few_descriptors_for_anything(tmp_path: Path, load: str) -> None:
    command = f"ulimit -n 60; exec {sys.executable} -m breakeven bench --server-url http://127.0.0.1:1 {load}"
    result = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert result.returncode == 2
    assert "60 open files are too few" in result.stderr
    assert "Traceback" not in result.stderr
