"""The null server's command: `python -m breakeven.engines.null --port 0`."""

from __future__ import annotations

import argparse
import json
import resource
import signal
import socket
import ssl
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import NoReturn

from breakeven.engines.null.loop import Server, Setup
from breakeven.engines.null.steps import StepTable, Timetable
from breakeven.errors import BreakevenError, UsageError

__all__ = ["main"]


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


if __name__ == "__main__":
    sys.exit(main())
