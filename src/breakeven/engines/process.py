"""One server process: start it, wait until it answers, keep its log, end it and everything it started.

    with ServerProcess(command, url="http://127.0.0.1:8000") as server:
        ...  # server.url answers here; on leaving, nothing that the command started is left

The server runs under a `guard`, a small process that ends it with all its descendants when its own standard input
ends, of which we hold the only other end. Four ways lead there: `stop()`; leaving the `with` block; the end of the
interpreter or of the object (a finalizer); and that we are killed outright.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Self
from urllib.parse import urlsplit

from breakeven.engines import guard
from breakeven.errors import EngineError

__all__ = ["ServerProcess", "free_port", "is_healthy"]

POLL_S = 0.05
POLL_AT_MOST_S = 1.0
PROBE_TIMEOUT_S = 2.0
TAIL_BYTES = 65_536
LINES_IN_ERROR = 12
#: For the guard's own start and end, on a busy machine.
GUARD_S = 10.0

# Colours and cursor movements (ECMA-48 control sequences) in a log are not for our terminal.
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0e-\x1f\x7f]")


class ServerProcess:
    """A server in a session of its own, answering from construction to `stop()`.

    Construction blocks until GET `url` + `health_path` returns 200, or /v1/models does where there is no such path.
    `start_timeout_s` limits that wait; `while_waiting(server, seconds)` is called again and again meanwhile. With
    `wait` False `wait_until_healthy()` is what blocks, so that several servers can start at the same time. At the end
    the server's standard input is closed, `patience_s` later it gets SIGTERM, `stop_grace_s` later SIGKILL.
    `env` replaces the environment where given; `stdin` is what the server finds on its standard input, which stays
    open. `hidden` are strings that `log_tail` and errors show as ***.

    The log (stdout and stderr) is written to `log_path`, which stays and is named in errors; where none is given,
    it can be read until the object is gone.

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
        patience_s: float = 0.0,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        log_path: Path | None = None,
        hidden: Sequence[str] = (),
        while_waiting: Callable[[ServerProcess, float], None] | None = None,
        wait: bool = True,
    ) -> None:
        self.url, self._health_path = url.rstrip("/"), health_path
        self._hidden, self._log_is_kept = tuple(hidden), log_path is not None
        self.log_path = log_path or Path(self._temporary_directory(), "server.log")
        self._process = _spawn(command, self.log_path, env, patience_s, stop_grace_s)
        # Called once at most, and at interpreter exit if nobody has: what stop() promises comes from here.
        limit_s = patience_s + stop_grace_s + guard.KILL_LIMIT_S + GUARD_S
        self._end = weakref.finalize(self, _end, self._process, limit_s)
        _write(self._process.stdin, stdin)
        if wait:
            self.wait_until_healthy(start_timeout_s, while_waiting)

    @property
    def pid(self) -> int:
        """The process id of the server's guard, which lives as long as anything that the server started."""
        return self._process.pid

    def wait_until_healthy(
        self, timeout_s: float, while_waiting: Callable[[ServerProcess, float], None] | None = None
    ) -> None:
        """Return once the server answers; end it and raise EngineError, with the end of the log, if it does not."""
        try:
            self._wait(timeout_s, while_waiting)
        except BaseException:  # Ctrl-C while waiting, too, must not leave the server behind
            self.stop()
            raise

    def is_healthy(self) -> bool:
        """Whether the server is ready for requests."""
        return is_healthy(lambda path: _status(self.url + path), self._health_path)

    def exit_code(self) -> int | None:
        """None while the server runs; then its exit code, 128 + N after signal N."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def stop(self) -> None:
        """End the server and all that it started, and wait until it is gone. Doing it again does nothing."""
        self._end()

    def log_tail(self, lines: int) -> list[str]:
        """The last `lines` lines of the log that are not blank; fewer where the log is shorter."""
        with self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - TAIL_BYTES))
            text = log.read().decode(errors="replace")
        for secret in self._hidden:
            text = text.replace(secret, "***")
        cleaned = (_CONTROL.sub("", line).strip() for line in text.splitlines())
        return [line for line in cleaned if line][-lines:]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _temporary_directory(self) -> str:
        directory = tempfile.mkdtemp(prefix="breakeven-")
        weakref.finalize(self, shutil.rmtree, directory, ignore_errors=True)
        return directory

    def _wait(self, timeout_s: float, while_waiting: Callable[[ServerProcess, float], None] | None) -> None:
        began = time.monotonic()
        while not self.is_healthy():
            self._check_alive()
            waited_s = time.monotonic() - began
            if waited_s > timeout_s:
                raise self._failure(f"did not answer {self.url}{self._health_path} within {timeout_s:g} s")
            if while_waiting is not None:
                while_waiting(self, waited_s)
            time.sleep(min(POLL_AT_MOST_S, max(POLL_S, waited_s / 20)))  # many servers log each request
        self._check_alive()  # it may have been a stranger, on the port that ours could not have, who answered

    def _check_alive(self) -> None:
        if (code := self.exit_code()) is not None:
            background = " (it has to stay in the foreground)" if code == 0 else ""
            raise self._failure(f"{_how_it_ended(code)} before it answered{background}")

    def _failure(self, reason: str) -> EngineError:
        tail = " | ".join(self.log_tail(LINES_IN_ERROR)) or "(empty)"
        where = f" ({self.log_path})" if self._log_is_kept else ""
        return EngineError(f"the server {reason}; its log{where} ends: {tail}")


def free_port() -> int:
    """A TCP port that was free a moment ago on all of this machine's addresses; nothing keeps it for the server."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def is_healthy(ask: Callable[[str], int | None], health_path: str = "/health") -> bool:
    """Whether a server is ready; `ask(path)` gives the status of its answer to GET, None if there is none.

    /v1/models decides only where the server has no `health_path`: llama.cpp's lists its model while it is loading
    it, with /health at 503. That it refuses strangers (401, 403) shows that it is up.
    """
    status = ask(health_path)
    if status is None or status >= 500:
        return False
    return status == 200 or ask("/v1/models") in (200, 401, 403)


def _spawn(
    command: Sequence[str], log_path: Path, env: Mapping[str, str] | None, patience_s: float, grace_s: float
) -> subprocess.Popen[bytes]:
    _check_program(command[0], env)
    with log_path.open("wb") as log:
        return subprocess.Popen(
            # The file itself, apart from all that the environment or the current folder could put in its way.
            [sys.executable, "-I", "-S", guard.__file__, str(patience_s), str(grace_s), *command],
            stdin=subprocess.PIPE,  # its end of file tells the guard that we are gone
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,  # a terminal's Ctrl-C reaches only us
        )


def _check_program(program: str, env: Mapping[str, str] | None) -> None:
    if shutil.which(program, path=(os.environ if env is None else env).get("PATH")) is None:
        number = errno.EACCES if Path(program).exists() else errno.ENOENT
        raise EngineError(f"can't run {program}: {os.strerror(number)}")


def _write(stdin: IO[bytes] | None, data: bytes) -> None:
    assert stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it ended already, which is noticed and told elsewhere
        stdin.write(data)
        stdin.flush()


def _status(url: str) -> int | None:
    """The status of GET `url`. Straight to the host: a proxy of the environment must not answer."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=PROBE_TIMEOUT_S)
    try:
        connection.request("GET", parts.path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _end(process: subprocess.Popen[bytes], limit_s: float) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()  # it hangs; the server gets SIGTERM by that
        process.wait()


def _how_it_ended(code: int) -> str:
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(code - 128).name}"
    return f"exited with {code}"
