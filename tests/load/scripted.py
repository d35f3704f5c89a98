"""A server that does what a script says, byte by byte, over real sockets; and a client's view of it.

A script is a list of steps, one script for each connection on which the client says something (the last one is used
again for any further):

    b"…"      send these bytes
    0.05      wait so many seconds
    READ      read one whole request; `server.requests` has it
    CLOSE     close in order (FIN)
    RESET     close with a reset (RST)

or any function of the `Peer`. After its last step a connection stays open until the client closes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import uvloop

from breakeven.load.client import Client
from breakeven.load.dialect import COUNTING, Dialect, dialect_for
from breakeven.load.plan import PlannedRequest
from breakeven.load.prompts import Prompt
from breakeven.load.target import Target
from breakeven.records import LevelPlan, RequestRecord

Step = bytes | float | Callable[["Peer"], object]
Script = Sequence[Step]


class Request(NamedTuple):
    """A request as the server read it: on which connection, its path, its headers (lower case) and its JSON body."""

    connection: int
    path: str
    headers: dict[str, str]
    body: Any


class Peer:
    """The server's end of one connection."""

    def __init__(self, server: Scripted, sock: socket.socket, number: int) -> None:
        self.server, self.socket, self.number = server, sock, number
        self._rest = b""

    def read(self) -> Request:
        """Reads one whole request; raises `ConnectionError` at the end of the stream."""
        head = self.read_head()
        lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
        size = int(headers["content-length"])
        body = bytearray(self._rest)
        while len(body) < size:
            body += self._recv()
        self._rest = bytes(body[size:])
        request = Request(self.number, lines[0].split()[1], headers, json.loads(body[:size]))
        self.server.requests.append(request)
        return request

    def read_head(self) -> bytes:
        """Reads a request's head and leaves its body."""
        while b"\r\n\r\n" not in self._rest:
            self._rest += self._recv()
        head, _, self._rest = self._rest.partition(b"\r\n\r\n")
        return head

    def send(self, data: bytes) -> None:
        """Sends, and notes when."""
        self.server.sent_ns.append(time.perf_counter_ns())
        self.socket.sendall(data)

    def send_raw(self, data: bytes) -> None:
        """Sends past TLS."""
        socket.socket.send(self.socket, data)

    def close(self) -> None:
        if isinstance(self.socket, ssl.SSLSocket):
            with contextlib.suppress(OSError):
                self.socket.settimeout(0)
                self.socket.unwrap()  # says close_notify, and does not wait for the client's
        self.socket.close()

    def reset(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def play(self, script: Script) -> None:
        """Does the steps, then waits for the client to close."""
        self.do(script)
        while self.is_open and self.socket.recv(1 << 16):
            pass

    def do(self, script: Script) -> None:
        """Does the steps, as far as the connection lasts."""
        for step in script:
            if not self.is_open:
                return
            if isinstance(step, bytes):
                self.send(step)
            elif isinstance(step, int | float):
                self.server.stopping.wait(step)
            else:
                step(self)

    @property
    def is_open(self) -> bool:
        return self.socket.fileno() >= 0

    def _recv(self) -> bytes:
        data = self.socket.recv(1 << 18)
        if not data:
            raise ConnectionError("the client closed the connection")
        return data


READ: Step = Peer.read
READ_HEAD: Step = Peer.read_head
CLOSE: Step = Peer.close
RESET: Step = Peer.reset


def each(answer: Callable[[Request], bytes]) -> Step:
    """A step that answers each request by a function."""

    def serve(peer: Peer) -> None:
        while True:
            peer.send(answer(peer.read()))

    return serve


class Scripted:
    """The server. `accepted_ns` has a time for each connection on which the client said something."""

    def __init__(self, scripts: Sequence[Script], context: ssl.SSLContext | None, host: str, buffer: int) -> None:
        self.requests: list[Request] = []
        self.sent_ns: list[int] = []
        self.accepted_ns: list[int] = []
        self.stopping = threading.Event()
        self._scripts, self._context = scripts, context
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        if buffer:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        self._listener.bind((host, 0))
        self._listener.listen(128)
        place = f"[{host}]" if ":" in host else host
        self.url = f"{'https' if context else 'http'}://{place}:{self._listener.getsockname()[1]}"
        self._acceptor = threading.Thread(target=self._accept)
        self._acceptor.start()

    def stop_listening(self) -> None:
        """From now on connections are refused; those that are open go on."""
        if self._listener.fileno() >= 0:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._acceptor.join()
            self._listener.close()

    def stop(self) -> None:
        self.stopping.set()
        self.stop_listening()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(sock)
            thread = threading.Thread(target=self._serve, args=(sock,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            with sock:
                if not sock.recv(1, socket.MSG_PEEK):
                    return
                with self._lock:
                    number = len(self.accepted_ns)
                    self.accepted_ns.append(time.perf_counter_ns())
                self._play(sock, number)
        except OSError:
            pass  # the client went away, which is its right

    def _play(self, sock: socket.socket, number: int) -> None:
        script = self._scripts[min(number, len(self._scripts) - 1)]
        if self._context is None:
            Peer(self, sock, number).play(script)
            return
        with self._context.wrap_socket(sock, server_side=True) as tls:
            self._sockets.append(tls)
            Peer(self, tls, number).play(script)


@contextlib.contextmanager
def scripted(
    *scripts: Script, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1", receive_buffer: int = 0
) -> Iterator[Scripted]:
    """Runs a scripted server. A script that fails otherwise than by its client's leaving fails the test."""
    server = Scripted(scripts, tls, host, receive_buffer)
    try:
        yield server
    finally:
        server.stop()


# ---- what it says ----

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(value: Any) -> bytes:
    """One event, as the engines put it."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def token(text: str | None, count: int | None = None, *, finish: str | None = None, **more: Any) -> bytes:
    """An event of a chat stream: one piece of text and, with `count`, the usage so far."""
    usage = {} if count is None else {"usage": {"prompt_tokens": 7, "completion_tokens": count}}
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}], **usage, **more})


def usage(count: int, **more: Any) -> bytes:
    """A usage-only event."""
    return event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": count, **more}})


def stream(*events: bytes) -> bytes:
    """A whole response: each event a chunk."""
    return HEAD + b"".join(map(chunk, events)) + LAST


#: A whole answer of three tokens.
ANSWER = stream(token("one", 1), token(" two", 2), token(" three", 3, finish="stop"), usage(3), DONE)


def answer(status: int, body: bytes, kind: str = "application/json", *headers: str) -> bytes:
    """A response that is no stream."""
    lines = [f"HTTP/1.1 {status} Whatever", f"Content-Type: {kind}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


# ---- a client's view ----

CHAT = dialect_for("chat", COUNTING["continuous"])
LEVEL = LevelPlan(index=4, run=0, concurrency=1, max_tokens=64)
PLANNED = PlannedRequest(LEVEL, "measured", Prompt(id="greeting", kind="chat", text="Say hello."), 64)


def client_of(
    server: Scripted,
    records: list[RequestRecord],
    *,
    dialect: Dialect = CHAT,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 10.0,
    stall_timeout_s: float = 10.0,
    **options: Any,
) -> Client:
    """A client of the server that appends its records to a list."""
    defaults: dict[str, Any] = {"sampling": {"temperature": 0}, "extra_body": {}, "keep_text": True}
    target = Target(server.url, headers or {})
    return Client(
        target, dialect, "m", records.append, timeout_s=timeout_s, stall_timeout_s=stall_timeout_s, **defaults | options
    )


def records_of(server: Scripted, count: int = 1, *, pause_s: float = 0.0, **options: Any) -> list[RequestRecord]:
    """Sends requests one after the other (`pause_s` apart); returns their records."""
    records: list[RequestRecord] = []

    async def send() -> None:
        async with client_of(server, records, **options) as client:
            for _ in range(count):
                await client.send(PLANNED)
                await client.settled()
                if pause_s:
                    await asyncio.sleep(pause_s)

    run(send())
    return records


def record_of(*script: Step, **options: Any) -> RequestRecord:
    """Sends one request to a server that reads it and then goes on with the script; returns its record."""
    with scripted([READ, *script]) as server:
        (record,) = records_of(server, **options)
        return record


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine on uvloop, as the command line does; never longer than 20 s, and nothing fails unseen in it."""
    reported: list[dict[str, Any]] = []

    async def limited() -> Any:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
        async with asyncio.timeout(20):
            return await coroutine

    result = uvloop.run(limited())
    assert not reported
    return result
