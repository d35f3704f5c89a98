"""A null LLM server with a known timetable: the truth against which a load generator is judged.

No model runs here. A step engine (`null_steps`) sends every decoding request one chunk a step, and keeps
when each request came, when its first and last chunk went out and how many tokens it carried: `GET /truth`
gives that as JSON lines, on the clock that a client on this machine reads (`time.perf_counter_ns`). One
process, one thread, sockets that never block, the standard library only.

A request's life: `Server` (`null_loop`) accepts the connection, cuts the request off it (`null_http`) and
reads what it asks for (`null_api`) → the engine queues it → at the first step boundary after its prefill it
joins the batch and its stream opens → every step sends it a chunk → after the last one its `TruthRow` is
written.

Start it with `python -m breakeven.engines.null --port 0`, or from Python with `null_server()`.
"""

from __future__ import annotations

import argparse
import http.client
import json
import resource
import select
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import IO, NoReturn

from breakeven.engines.null_loop import Server, Setup
from breakeven.engines.null_steps import StepRow, StepTable, Timetable, TruthRow
from breakeven.errors import BreakevenError, EngineError, UsageError

__all__ = ["NullServer", "StepRow", "TruthRow", "main", "null_server"]

_STOP_S = 5.0  # a server that was told to stop and has not by then is killed


# ---- the command ----


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM, SIGINT or stdin's end; say why on stderr and return 2 if that can't begin."""
    signal.signal(signal.SIGTERM, _exit)
    signal.signal(signal.SIGINT, _exit)
    flags = _parser().parse_args(argv)
    try:
        _raise_file_limit()
        listener = _listen(flags.host, flags.port)
        server = Server(listener, _setup(flags))
    except BreakevenError as error:
        print(f"null server: {error}", file=sys.stderr)
        return 2
    print(_hello(flags, listener), flush=True)
    return server.run()


def _exit(*_: object) -> NoReturn:
    raise SystemExit(0)


def _raise_file_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _setup(flags: argparse.Namespace) -> Setup:
    return Setup(
        timetable=Timetable(_table(flags), flags.tokens, flags.prefill_us, flags.max_batch, flags.time_scale),
        model=flags.model,
        usage=flags.usage,
        role_chunk=flags.role_chunk,
        api_key=flags.api_key,
        tls=_tls_context(flags.tls_cert, flags.tls_key) if flags.tls_cert else None,
        exit_on_stdin_eof=flags.exit_on_stdin_eof,
    )


def _table(flags: argparse.Namespace) -> StepTable:
    if flags.step_table is None:
        return StepTable([(0, flags.step_us), (1, flags.step_us + flags.per_request_us)])
    if flags.per_request_us:
        raise UsageError("--step-table says how long steps last: leave --per-request-us out")
    table: StepTable = flags.step_table
    return table


def _tls_context(cert: str, key: str | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key)
    except OSError as error:
        raise UsageError(f"--tls-cert and --tls-key can't be used: {error}") from None
    return context


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=16384)
    except OSError as error:
        raise UsageError(f"can't listen at --host {host} --port {port}: {error}") from None
    listener.setblocking(False)
    return listener


def _hello(flags: argparse.Namespace, listener: socket.socket) -> str:
    """The line that tells whoever started the server where it listens."""
    port = listener.getsockname()[1]
    host = f"[{flags.host}]" if ":" in flags.host else flags.host
    return json.dumps({"port": port, "url": f"{'https' if flags.tls_cert else 'http'}://{host}:{port}"})


def _parser() -> argparse.ArgumentParser:
    about = "Serve an LLM API without a model: one chunk a step, by a known timetable."
    parser = argparse.ArgumentParser("python -m breakeven.engines.null", description=about)
    add = parser.add_argument
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=0, help="0 takes a free one, which the line on stdout tells (default 0)")
    add("--model", default="null", help="the model's name (default null)")
    _add_timetable(parser)
    caps = ["per-chunk", "final", "none"]
    add("--usage", choices=caps, default=caps[0], help="the most that it tells of token counts, if asked")
    add("--role-chunk", action="store_true", help="open a chat stream with a chunk that has no text")
    add("--api-key", metavar="KEY", help="demand it as bearer token on /v1/... and /generate")
    add("--tls-cert", metavar="FILE", help="PEM file; turns TLS on")
    add("--tls-key", metavar="FILE", help="PEM file, where the certificate's file doesn't hold the key")
    add("--exit-on-stdin-eof", action="store_true", help="exit when stdin ends, as it does with the parent")
    return parser


def _add_timetable(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    base = parser.add_mutually_exclusive_group().add_argument
    base("--step-us", type=_positive, default=10_000.0, metavar="D0", help="a step lasts D0 + D1*B µs with")
    add("--per-request-us", type=_not_negative, default=0.0, metavar="D1", help="B requests (10000 and 0)")
    base("--step-table", type=_step_table, metavar="B:US,...", help="points instead, linear between them")
    add("--prefill-us", type=_not_negative, default=0.0, help="from arrival to the batch (default 0)")
    add("--tokens", type=_token_cycle, default=(1,), metavar="N,...", help="a request's chunks, cycled (1)")
    add("--max-batch", type=_count, default=sys.maxsize, help="how many decode; others queue (default all)")
    add("--time-scale", type=_positive, default=1.0, help="multiplies every duration (default 1)")


def _checked(value: float, good: bool, want: str) -> float:
    if not good:
        raise argparse.ArgumentTypeError(f"{value} is not {want}")
    return value


def _positive(text: str) -> float:
    return _checked(float(text), 0 < float(text) < float("inf"), "above zero")


def _not_negative(text: str) -> float:
    return _checked(float(text), 0 <= float(text) < float("inf"), "zero or above")


def _count(text: str) -> int:
    return int(_checked(int(text), int(text) >= 1, "1 or above"))


def _token_cycle(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split(","))


def _step_table(text: str) -> StepTable:
    pairs = [part.split(":") for part in text.split(",")]
    points = [(_count(load), _positive(us)) for load, us in pairs]
    if any(left >= right for (left, _), (right, _) in pairwise(points)):
        raise argparse.ArgumentTypeError("the batch sizes of the points must rise")
    return StepTable(points)


# ---- for tests and benchmarks ----


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


if __name__ == "__main__":
    sys.exit(main())
