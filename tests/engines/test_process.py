"""The one way in which local processes are held: nothing is left of them, whoever is killed."""

from __future__ import annotations

import ast
import http.client
import os
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from breakeven.engines import guard
from breakeven.engines.process import ServerProcess, free_port, is_healthy
from breakeven.errors import EngineError
from tests.engines.processes import PYTHONPATH, TREE, has_run, marked, new_marker, within

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")

HOLDER = """
import sys, time
from tests.engines.processes import has_run, within
from breakeven.engines.process import ServerProcess
port, *command = sys.argv[1:]
server = ServerProcess(command, url=f"http://127.0.0.1:{port}", stop_grace_s=0.2)
assert within(20, lambda: has_run(server.log_tail(9)))
print(server.pid, flush=True)
time.sleep(600)
"""

LOADING = """
import http.server, sys
left = [3]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        left[0] -= self.path == "/health"
        self.send_response(503 if self.path == "/health" and left[0] >= 0 else 200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def started(code: str, *args: str, **options: object) -> ServerProcess:
    port = free_port()
    command = [sys.executable, "-c", code, str(port), *args]
    return ServerProcess(command, url=f"http://127.0.0.1:{port}", **options)  # type: ignore[arg-type]


@on_linux
def test_stop_ends_workers_in_sessions_of_their_own_and_those_without_a_parent() -> None:
    marker = new_marker()
    with started(TREE, marker, stop_grace_s=0.2) as server:
        assert within(20, lambda: has_run(server.log_tail(9)))
        assert len(marked(marker)) == 5  # the guard as well
    assert marked(marker) == []


@on_linux
def test_nothing_is_left_when_we_are_killed_outright(tmp_path: Path) -> None:
    marker, port = new_marker(), str(free_port())
    command = [sys.executable, "-c", HOLDER, port, sys.executable, "-c", TREE, port, marker]
    env = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": PYTHONPATH}  # whose log nobody is left to delete
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert len(marked(marker)) == 6
        holder.kill()
    assert within(20, lambda: marked(marker) == [])


@on_linux
def test_nothing_is_left_when_we_end_without_a_word(tmp_path: Path) -> None:
    marker, port = new_marker(), str(free_port())
    code = HOLDER.replace("time.sleep(600)", "")
    command = [sys.executable, "-c", code, port, sys.executable, "-c", TREE, port, marker]
    subprocess.run(
        command,
        check=True,
        timeout=60,
        env=os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": PYTHONPATH},
        stdout=subprocess.DEVNULL,
    )
    assert marked(marker) == []
    assert list(tmp_path.iterdir()) == []


@on_linux
def test_a_guard_that_is_killed_outright_takes_the_server_along() -> None:
    server = started(LOADING, marker := new_marker())
    os.kill(server.pid, signal.SIGKILL)
    assert within(20, lambda: marked(marker) == [])
    assert server.exit_code() == 128 + signal.SIGKILL
    server.stop()


@on_linux
def test_a_guard_that_is_told_to_end_takes_all_along() -> None:
    marker = new_marker()
    server = started(TREE, marker, stop_grace_s=0.2)
    assert within(20, lambda: has_run(server.log_tail(9)))
    os.kill(server.pid, signal.SIGTERM)
    assert within(20, lambda: server.exit_code() == 128 + signal.SIGKILL)
    assert marked(marker) == []


@on_linux
def test_a_server_that_ends_by_itself_leaves_no_worker_behind() -> None:
    marker = new_marker()
    code = (
        "import subprocess, sys; subprocess.Popen(['sh', '-c', 'sleep 600; :', *sys.argv[2:]], start_new_session=True)"
    )
    with pytest.raises(EngineError, match=r"exited with 0 before it answered \(it has to stay in the foreground\)"):
        started(code, marker)
    assert marked(marker) == []


def test_the_end_of_a_server_is_seen_by_its_exit_code() -> None:
    code = TREE.replace(
        "self.end_headers()", "self.end_headers(); self.wfile.flush(); self.path == '/end' and os._exit(7)"
    )
    with started("import os" + code, stop_grace_s=0.2) as server:
        assert server.exit_code() is None
        connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=20)
        connection.request("GET", "/end")
        connection.close()
        assert within(20, lambda: server.exit_code() is not None)
        assert server.exit_code() == 7


def test_what_the_server_finds_on_its_input_is_what_was_given_and_no_end() -> None:
    code = "import sys; print(sys.stdin.readline(), flush=True)" + LOADING
    with started(code, stdin=b"words\n") as server:
        assert server.log_tail(9)[0] == "words"


def test_a_server_that_watches_its_input_can_end_in_its_own_time() -> None:
    code = (
        "import os, sys, threading, time\n"
        "def watch(): sys.stdin.read(); time.sleep(0.3); print('farewell', flush=True); os._exit(0)\n"
        "threading.Thread(target=watch, daemon=True).start()\n"
    )
    with started(code + LOADING, patience_s=20) as server:
        pass
    assert server.log_tail(1) == ["farewell"]
    assert server.exit_code() == 0


def test_a_server_that_is_loading_is_not_healthy_yet_whatever_models_it_lists() -> None:
    calls: list[float] = []
    with started(LOADING, while_waiting=lambda _, seconds: calls.append(seconds)) as server:
        told = [line.split('"')[1:] for line in server.log_tail(20)]
    assert [status.strip(" -") for _, status in told] == ["503", "503", "503", "200"]
    assert len(calls) >= 3
    assert calls == sorted(calls)


@pytest.mark.parametrize(
    ("health", "models", "healthy"),
    [
        (200, None, True),
        (503, 200, False),
        (500, 200, False),
        (None, None, False),
        (404, 200, True),
        (404, 401, True),
        (404, 404, False),
        (404, None, False),
        (401, 200, True),
    ],
)
def test_health_is_told_by_health_and_where_there_is_none_by_the_models(
    health: int | None, models: int | None, healthy: bool
) -> None:
    answers = {"/health": health, "/v1/models": models}
    assert is_healthy(answers.__getitem__) is healthy


def test_a_given_log_stays_and_is_named_and_shows_neither_colours_nor_secrets(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    code = r"print('\x1b[1;31mkey\x1b[0m sk-12345'); raise SystemExit(3)"
    with pytest.raises(EngineError) as caught:
        started(code, log_path=log, hidden=["sk-12345"])
    assert str(caught.value) == f"the server exited with 3 before it answered; its log ({log}) ends: key ***"
    assert "sk-12345" in log.read_text()


def test_a_program_that_may_not_be_run_is_named(tmp_path: Path) -> None:
    program = tmp_path / "server"
    program.touch(0o644)
    with pytest.raises(EngineError, match=rf"^can't run {program}: Permission denied$"):
        ServerProcess([str(program)], url=f"http://127.0.0.1:{free_port()}")


def test_a_file_that_is_no_program_fails_with_the_reason(tmp_path: Path) -> None:
    program = tmp_path / "server"
    program.write_bytes(b"\0no program")
    program.chmod(0o755)
    with pytest.raises(EngineError, match=rf"exited with 126 .*can't run {program}: Exec format error$"):
        ServerProcess([str(program)], url=f"http://127.0.0.1:{free_port()}")


def test_the_guard_is_readable_for_the_pythons_of_other_machines() -> None:
    ast.parse(Path(guard.__file__).read_text("utf-8"), feature_version=(3, 6))
