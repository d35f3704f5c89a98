"""A null LLM server with a known timetable: the truth against which a load generator is judged.

No model runs here. A step engine (`steps`) sends every decoding request one chunk a step, and keeps
when each request came, when its first and last chunk went out and how many tokens it carried: `GET /truth`
gives that as JSON lines, on the clock that a client on this machine reads (`time.perf_counter_ns`). One
process, one thread, sockets that never block, the standard library only.

A request's life: `Server` (`loop`) accepts the connection, cuts the request off it (`http1`) and
reads what it asks for (`api`) → the engine queues it → at the first step boundary after its prefill it
joins the batch and its stream opens → every step sends it a chunk → after the last one its `TruthRow` is
written.

Start it with `python -m breakeven.engines.null --port 0`, or from Python with `null_server()`.
"""

from __future__ import annotations

import http.client
import json
import select
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

from breakeven.engines.null.steps import StepRow, TruthRow
from breakeven.errors import EngineError

__all__ = ["NullServer", "StepRow", "TruthRow", "null_server"]

_STOP_S = 5.0  # a server that was told to stop and has not by then is killed


@dataclass(frozen=True, slots=True)
class NullServer:
    """A running null server; `url` has no path."""

    url: str
    port: int
    pid: int

    def truth(self) -> list[TruthRow]:
        """The requests that have ended since the start or the last `reset`, in the order of their ends."""
        return [TruthRow(**json.loads(line)) for line in self._call("GET", "/truth").splitlines()]

    def steps(self) -> list[StepRow]:
        """The steps since the start or the last `reset`."""
        return [StepRow(**json.loads(line)) for line in self._call("GET", "/truth/steps").splitlines()]

    def reset(self) -> None:
        """Forget the requests that have ended, and the steps; counters in /metrics go on."""
        self._call("POST", "/truth/reset")

    def _call(self, method: str, path: str) -> bytes:
        connection = _connection(self.url)
        try:
            connection.request(method, path)
            return connection.getresponse().read()
        finally:
            connection.close()


def _connection(url: str) -> http.client.HTTPConnection:
    scheme, _, place = url.partition("://")
    if scheme == "http":
        return http.client.HTTPConnection(place)
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # we started it, on this machine
    return http.client.HTTPSConnection(place, context=context)


@contextmanager
def null_server(*args: str, timeout_s: float = 10.0) -> Iterator[NullServer]:
    """A null server in a process of its own, stopped at the end whatever happens; `args` are its flags.

    Raises EngineError if it does not listen within `timeout_s`; the text carries what it said.
    """
    command = [sys.executable, "-m", "breakeven.engines.null", "--exit-on-stdin-eof", *args]
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log) as process,
    ):
        try:
            yield _await_hello(process, log, timeout_s)
        finally:
            _stop(process)


def _await_hello(process: subprocess.Popen[bytes], log: IO[bytes], timeout_s: float) -> NullServer:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], timeout_s)
    line = process.stdout.readline() if ready else b""
    if not line:
        log.seek(0)
        said = log.read().decode(errors="replace").strip()[-2000:]
        raise EngineError(f"the null server did not start in {timeout_s:g} s: {said or 'it said nothing'}")
    return NullServer(**json.loads(line), pid=process.pid)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
