"""One server process: start it, wait until it answers, keep its log, end it and everything it started.

    with ServerProcess(command, url="http://127.0.0.1:8000") as server:
        ...  # server.url answers here; on leaving, the whole process group is gone

Four ways lead to the end of the server, so that none is left behind: `stop()`; leaving the `with` block; the
end of the interpreter or of the object (a finalizer); and, where we are killed outright, the end of file on
the server's standard input, of which we hold the only other end. The last one binds servers that watch their
standard input, as `llamacpp_server` does. `PR_SET_PDEATHSIG` would bind any command, but needs code between
fork and exec, unsafe in a process with threads, and strikes when the *thread* that started the server ends.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from breakeven.errors import EngineError

__all__ = ["ServerProcess", "free_port"]

POLL_S = 0.05
PROBE_TIMEOUT_S = 2.0
TAIL_BYTES = 65_536
LINES_IN_ERROR = 12


class ServerProcess:
    """A server in a session and process group of its own, answering from construction to `stop()`.

    Construction blocks until GET `url` + `health_path` returns 200. `start_timeout_s` limits that wait;
    `stop_grace_s` is the time between SIGTERM and SIGKILL. `env` replaces the environment where given.
    The log (stdout and stderr) can be read until the object is gone.

    Raises EngineError, with the end of the log, if the command can't be run, ends or stays silent.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        url: str,
        health_path: str = "/health",
        start_timeout_s: float = 60.0,
        stop_grace_s: float = 5.0,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        directory = tempfile.mkdtemp(prefix="breakeven-")
        weakref.finalize(self, shutil.rmtree, directory, ignore_errors=True)
        self.log_path = Path(directory, "server.log")
        self._process = _spawn(command, self.log_path, env)
        # Called once at most, and at interpreter exit if nobody has: what stop() promises comes from here.
        self._end = weakref.finalize(self, _end_group, self._process, stop_grace_s)
        try:
            self._wait_until_healthy(self.url + health_path, start_timeout_s)
        except BaseException:  # Ctrl-C while waiting, too, must not leave the server behind
            self.stop()
            raise

    @property
    def pid(self) -> int:
        """The process id of the server, which is its process group's id as well."""
        return self._process.pid

    def stop(self) -> None:
        """End the process group: SIGTERM, SIGKILL after the grace. Doing it again does nothing."""
        self._end()

    def log_tail(self, lines: int) -> list[str]:
        """The last `lines` lines of the log that are not blank; fewer where the log is shorter."""
        with self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - TAIL_BYTES))
            text = log.read().decode(errors="replace")
        return [line.strip() for line in text.splitlines() if line.strip()][-lines:]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _wait_until_healthy(self, health_url: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not _answers(health_url):
            self._check_alive()
            if time.monotonic() > deadline:
                raise self._failure(f"did not answer {health_url} within {timeout_s:g} s")
            time.sleep(POLL_S)
        self._check_alive()  # it may have been a stranger, on the port that ours could not have, who answered

    def _check_alive(self) -> None:
        if (code := self._process.poll()) is not None:
            raise self._failure(f"{_how_it_ended(code)} before it answered")

    def _failure(self, reason: str) -> EngineError:
        tail = " | ".join(self.log_tail(LINES_IN_ERROR)) or "(empty)"
        return EngineError(f"the server {reason}; its log ends: {tail}")


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago; nothing keeps it until the server binds it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _spawn(command: Sequence[str], log_path: Path, env: Mapping[str, str] | None) -> subprocess.Popen[bytes]:
    with log_path.open("wb") as log:
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # its end of file tells the server that we are gone
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,  # a group to signal; and a terminal's Ctrl-C reaches only us
            )
        except OSError as error:
            raise EngineError(f"can't run {command[0]}: {error.strerror}") from error


def _answers(url: str) -> bool:
    """Whether GET `url` returns 200. Straight to the host: a proxy of the environment must not answer."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=PROBE_TIMEOUT_S)
    try:
        connection.request("GET", parts.path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _end_group(process: subprocess.Popen[bytes], grace_s: float) -> None:
    _signal_group(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace_s)
    _signal_group(process.pid, signal.SIGKILL)  # also for workers that outlived their leader
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _how_it_ended(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
