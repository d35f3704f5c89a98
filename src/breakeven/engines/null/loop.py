"""The null server's loop: connections and steps served by one thread, and the routes that need no step.

Sockets never block. Between two steps the loop sleeps on `epoll`; during a long step it looks at the sockets
now and then.
"""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hmac import compare_digest
from http import HTTPStatus
from time import perf_counter_ns
from typing import Never

from breakeven.clock import KernelClock, ask_for_stamps
from breakeven.engines.null.api import API_PATHS, UsageCap, read_ask, wire_for
from breakeven.engines.null.http1 import Conn, HttpError, Request, plain, take_request
from breakeven.engines.null.steps import Job, StepEngine, StepRow, Timetable, TruthRow
from breakeven.errors import UsageError

__all__ = ["Server", "Setup"]

_VERSION = "null-1"  # to be raised when what a client sees changes
_KV_TOKENS = 1 << 20  # what the pretended KV cache holds
_POLL_EVERY = 64  # chunks sent between two looks at the sockets


Handler = Callable[[Conn, Request], bytes | None]
Sample = tuple[str, str, Sequence[float]]  # a metric's name, its kind, its value or its values by position


@dataclass(frozen=True, slots=True)
class Setup:
    """How a server behaves, apart from where it listens."""

    timetable: Timetable
    model: str
    usage: UsageCap
    role_chunk: bool
    api_key: str | None = field(repr=False)
    tls: ssl.SSLContext | None
    exit_on_stdin_eof: bool


class Server:
    """Accepts connections, answers at once what needs no step, and runs the engine's steps when due."""

    def __init__(self, listener: socket.socket, setup: Setup) -> None:
        self._listener, self._setup = listener, setup
        self._engine = StepEngine(setup.timetable)
        self._conns: dict[int, Conn] = {}
        self._jobs: dict[int, Job] = {}
        self._count = 0
        self._is_full = False  # as many connections as there are descriptors
        self._routes = self._make_routes()
        self._clock = KernelClock()
        ask_for_stamps(listener)  # and so of what it accepts: a request may be there before its connection is taken
        self._epoll = select.epoll()
        self._epoll.register(listener, select.EPOLLIN)
        self._stdin_fd = _watch_stdin(self._epoll) if setup.exit_on_stdin_eof else None

    def run(self) -> Never:
        """Serve until a signal, or the end of stdin, raises SystemExit."""
        while True:
            self._wait(self._engine.due_ns)
            self._poll()
            due_ns = self._engine.due_ns
            if due_ns is not None and perf_counter_ns() >= due_ns:
                self._step(due_ns)

    def _wait(self, due_ns: int | None) -> None:
        # epoll's own timeout counts whole milliseconds, select's counts microseconds
        timeout_s = None if due_ns is None else max(due_ns - perf_counter_ns(), 0) / 1e9
        select.select([self._epoll], [], [], timeout_s)

    def _step(self, due_ns: int) -> None:
        for sent, job in enumerate(self._engine.begin(due_ns), 1):
            if job.live and self._engine.deliver(job):
                del self._jobs[job.conn.fd]
                self._serve(job.conn)  # the next request may have come already
            if sent % _POLL_EVERY == 0:
                self._poll()  # so that who comes during a long step is stamped when he comes
        self._engine.boundary()

    def _poll(self) -> None:
        for fd, events in self._epoll.poll(0):
            if fd == self._listener.fileno():
                self._accept()
            elif fd == self._stdin_fd:
                _read_stdin(fd)
            else:
                self._attend(self._conns[fd], events)

    def _accept(self) -> None:
        self._clock.sync()  # wall time may have been adjusted since the last client came
        while True:
            try:
                sock = self._take_socket()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # the client left before it was seen
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                self._epoll.unregister(self._listener)  # it would be told of without end; who comes waits
                self._is_full = True
                return
            self._conns[sock.fileno()] = Conn(sock, self._epoll, self._clock)

    def _take_socket(self) -> socket.socket:
        sock, _ = self._listener.accept()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._setup.tls is None:
            return sock
        # the handshake happens within the first reads: so no client holds the others up with it
        return self._setup.tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def _attend(self, conn: Conn, events: int) -> None:
        if events & select.EPOLLOUT:
            conn.flush()
            self._hang_up(conn)
        if events & ~select.EPOLLOUT:
            if conn.read():
                self._serve(conn)
            else:
                self._close(conn)

    def _close(self, conn: Conn) -> None:
        del self._conns[conn.fd]
        if job := self._jobs.pop(conn.fd, None):
            self._engine.drop(job)
        conn.close()
        if self._is_full:
            self._is_full = False
            self._epoll.register(self._listener, select.EPOLLIN)

    def _serve(self, conn: Conn) -> None:
        """Answer the requests in the inbox in their order, up to one that has to wait for the engine."""
        while conn.fd not in self._jobs and not conn.closing:
            try:
                request = take_request(conn.inbox)
            except HttpError as error:  # where the next request would begin is not known
                conn.closing = True
                conn.write(error.answer())
                break
            if request is None:
                return
            conn.closing = request.last
            self._answer(conn, request)
        self._hang_up(conn)

    def _hang_up(self, conn: Conn) -> None:
        if conn.fd not in self._jobs:
            conn.hang_up()

    def _answer(self, conn: Conn, request: Request) -> None:
        try:
            answer = self._route(request)(conn, request)
        except HttpError as error:
            answer = error.answer()
        if answer is not None:
            conn.write(answer)

    def _route(self, request: Request) -> Handler:
        path = request.path
        if path.startswith("/v1/") or path in API_PATHS:
            self._authorise(request)
        if path not in self._routes:
            raise HttpError(HTTPStatus.NOT_FOUND, f"there is no {path} here")
        method, handler = self._routes[path]
        if request.method != method:
            raise HttpError(HTTPStatus.METHOD_NOT_ALLOWED, f"{path} wants {method}", allow=method)
        return handler

    def _authorise(self, request: Request) -> None:
        key = self._setup.api_key
        given = request.headers.get("authorization", "").encode("latin-1")
        if key is not None and not compare_digest(given, f"Bearer {key}".encode()):
            raise HttpError(HTTPStatus.UNAUTHORIZED, "a valid API key is needed")

    def _make_routes(self) -> Mapping[str, tuple[str, Handler]]:
        engine, model = self._engine, self._setup.model
        models = {"object": "list", "data": [{"id": model, "object": "model", "owned_by": "breakeven"}]}
        return {
            "/health": ("GET", lambda *_: plain(b"")),
            "/version": ("GET", lambda *_: plain(_json({"version": _VERSION}))),
            "/v1/models": ("GET", lambda *_: plain(_json(models))),
            "/metrics": ("GET", lambda *_: plain(_metrics(engine, model), "text/plain; version=0.0.4")),
            "/truth": ("GET", lambda *_: plain(_json_lines(engine.truth), "application/x-ndjson")),
            "/truth/steps": ("GET", lambda *_: plain(_json_lines(engine.steps), "application/x-ndjson")),
            "/truth/reset": ("POST", self._reset),
            **dict.fromkeys(API_PATHS, ("POST", self._complete)),
        }

    def _complete(self, conn: Conn, request: Request) -> None:
        ask = read_ask(request, self._setup.model, self._setup.usage)
        self._count += 1
        wire = wire_for(ask, self._count, self._setup.model, self._setup.role_chunk)
        self._jobs[conn.fd] = self._engine.submit(conn, ask, wire, conn.arrived_ns)

    def _reset(self, conn: Conn, request: Request) -> bytes:
        self._engine.truth.clear()
        self._engine.steps.clear()
        return plain(b"{}")


def _json(data: object) -> bytes:
    return json.dumps(data).encode()


def _json_lines(rows: Iterable[TruthRow | StepRow]) -> bytes:
    return b"".join(_json(row._asdict()) + b"\n" for row in rows)


def _metrics(engine: StepEngine, model: str) -> bytes:
    """Prometheus text with vLLM's names, and the engine's own count of slips."""
    held = sum(job.ask.prompt_tokens + job.tokens for job in engine.batch)
    samples: list[Sample] = [
        ("vllm:num_requests_running", "gauge", [sum(job.live for job in engine.batch)]),
        ("vllm:num_requests_waiting", "gauge", [len(engine.waiting)]),
        ("vllm:kv_cache_usage_perc", "gauge", [min(held / _KV_TOKENS, 1.0)]),
        ("vllm:num_preemptions_total", "counter", [0]),
        ("null:step_slips_total", "counter", [engine.slips]),
        *_speculation(engine.chunks_of),
    ]
    return "".join(_metric(model, sample) for sample in samples).encode()


def _speculation(chunks_of: Sequence[int]) -> list[Sample]:
    """vLLM's speculation counters, by the rule that a chunk of t tokens was a draft with t - 1 accepted.

    As with vLLM there are none where nothing is ever drafted: where every chunk carries one token.
    """
    drafted = len(chunks_of) - 2
    if not drafted:
        return []
    drafts = sum(chunks_of)
    by_position = [sum(chunks_of[position + 2 :]) for position in range(drafted)]
    return [
        ("vllm:spec_decode_num_drafts_total", "counter", [drafts]),
        ("vllm:spec_decode_num_draft_tokens_total", "counter", [drafts * drafted]),
        ("vllm:spec_decode_num_accepted_tokens_total", "counter", [sum(by_position)]),
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "counter", by_position),
    ]


def _metric(model: str, sample: Sample) -> str:
    name, kind, values = sample
    labels = f'engine="0",model_name={json.dumps(model)}'
    lines = [f"# TYPE {name} {kind}\n"]
    for position, value in enumerate(values):
        place = f',position="{position}"' if "_per_pos_" in name else ""
        lines.append(f"{name}{{{labels}{place}}} {float(value)}\n")
    return "".join(lines)


def _watch_stdin(epoll: select.epoll) -> int:
    try:
        epoll.register(0, select.EPOLLIN)
    except OSError:
        raise UsageError("--exit-on-stdin-eof needs a pipe or a terminal as stdin") from None
    return 0


def _read_stdin(fd: int) -> None:
    if not os.read(fd, 4096):
        raise SystemExit(0)
