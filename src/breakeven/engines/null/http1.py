"""HTTP/1.1 as the null server needs it: requests cut off a connection's bytes, answers framed, no blocking.

It knows neither API dialects (`api`) nor time (`steps`). Requests need a Content-Length; answers
have one, or are streamed in chunks. Connections are kept alive and may be pipelined.
"""

from __future__ import annotations

import json
import select
import socket
import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus

from breakeven.clock import ANCILLARY_SIZE, KernelClock

__all__ = ["LAST_CHUNK", "STREAM_HEAD", "Conn", "HttpError", "Request", "event", "plain", "take_request"]

STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
)
LAST_CHUNK = b"0\r\n\r\n"

_READ_BYTES = 1 << 16
_MAX_HEAD_BYTES = 1 << 16
_MAX_BODY_BYTES = 1 << 26
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class HttpError(Exception):
    """A request that gets an error for an answer, in the shape of OpenAI's errors."""

    def __init__(self, status: HTTPStatus, message: str, param: str | None = None, allow: str = "") -> None:
        super().__init__(message)
        self.status, self.param, self.allow = status, param, allow

    def answer(self) -> bytes:
        """The whole answer, head and JSON body."""
        kind = self.status.phrase.replace(" ", "") + "Error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.status.value}
        extra = f"allow: {self.allow}\r\n" if self.allow else ""
        return plain(json.dumps({"error": error}).encode(), status=self.status, extra=extra)


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request; `path` without its query, header names in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def last(self) -> bool:
        """Whether the client wants the connection closed after the answer."""
        return "close" in self.headers.get("connection", "").lower()


def plain(body: bytes, kind: str = "application/json", status: HTTPStatus = HTTPStatus.OK, extra: str = "") -> bytes:
    """An answer with a Content-Length; `extra` is whole header lines."""
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: {kind}\r\n"
    return f"{head}content-length: {len(body)}\r\n{extra}\r\n".encode() + body


def event(data: bytes) -> bytes:
    """One server-sent event in a chunk of its own."""
    return b"%x\r\ndata: %b\n\n\r\n" % (len(data) + 8, data)


def take_request(inbox: bytearray) -> Request | None:
    """Cut the first request off `inbox`; None while it is incomplete.

    Raises HttpError if the bytes are no request with a known end: the connection is of no use then.
    """
    if inbox and not chr(inbox[0]).isalpha():  # a TLS handshake, for one: it would be waited for without end
        raise HttpError(HTTPStatus.BAD_REQUEST, "these bytes are no HTTP")
    end = inbox.find(b"\r\n\r\n")
    if end < 0:
        if len(inbox) > _MAX_HEAD_BYTES:
            raise HttpError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the request's head is too large")
        return None
    line, *lines = inbox[:end].decode("latin-1").split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (h.partition(":") for h in lines)}
    method, path = _request_line(line)
    stop = end + 4 + _body_bytes(headers)
    if len(inbox) < stop:
        return None
    body = bytes(inbox[end + 4 : stop])
    del inbox[:stop]
    return Request(method, path, headers, body)


def _request_line(line: str) -> tuple[str, str]:
    parts = line.split(" ")
    if len(parts) != 3:
        raise HttpError(HTTPStatus.BAD_REQUEST, "the request line is malformed")
    if parts[2] != "HTTP/1.1":
        raise HttpError(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "only HTTP/1.1 is spoken here")
    return parts[0], parts[1].partition("?")[0]


def _body_bytes(headers: Mapping[str, str]) -> int:
    if "transfer-encoding" in headers:
        raise HttpError(HTTPStatus.LENGTH_REQUIRED, "a request's body needs a Content-Length")
    length = headers.get("content-length", "0")
    if not length.isdecimal():
        raise HttpError(HTTPStatus.BAD_REQUEST, "Content-Length is no number")
    if int(length) > _MAX_BODY_BYTES:
        raise HttpError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "the request's body is too large")
    return int(length)


class Conn:
    """One client's connection, with the bytes that came early and those that could not go yet."""

    __slots__ = ("_clock", "_epoll", "_outbox", "_sock", "arrived_ns", "closing", "fd", "inbox")

    def __init__(self, sock: socket.socket, epoll: select.epoll, clock: KernelClock) -> None:
        self._sock, self._epoll, self._clock = sock, epoll, clock
        self.arrived_ns = 0
        self._outbox = bytearray()
        self.fd = sock.fileno()
        self.inbox = bytearray()
        self.closing = False
        epoll.register(self.fd, select.EPOLLIN)

    def read(self) -> bool:
        """Move what has arrived to `inbox`; False when the client has gone."""
        while True:  # until it would block: TLS may hold decrypted bytes of which epoll knows nothing
            try:
                data = self._receive()
            except _WOULD_BLOCK:
                return True
            except OSError:
                return False
            if not data:
                return False
            if not self.closing:
                self.inbox += data

    def _receive(self) -> bytes:
        """The next bytes; `arrived_ns` is when they came in, by the kernel where it tells, however late we read."""
        stamp = None
        if isinstance(self._sock, ssl.SSLSocket):  # which reads what its own buffer holds
            data = self._sock.recv(_READ_BYTES)
        else:
            data, ancillary, _, _ = self._sock.recvmsg(_READ_BYTES, ANCILLARY_SIZE)
            stamp = ancillary[0][2] if ancillary else None
        self.arrived_ns = self._clock.stamp(stamp, 0)
        return data

    def write(self, data: bytes) -> None:
        """Send `data` in one call if the socket takes it; what it does not take goes when it can."""
        sent = 0
        if not self._outbox:
            try:
                sent = self._sock.send(data)
            except _WOULD_BLOCK:
                sent = 0
            except OSError:
                return  # the client has gone: epoll reports it, and `read` then says so
            if sent == len(data):
                return
            self._epoll.modify(self.fd, select.EPOLLIN | select.EPOLLOUT)
        self._outbox += data[sent:]

    def flush(self) -> None:
        """Send what `write` had to keep."""
        held, self._outbox = bytes(self._outbox), bytearray()
        self._epoll.modify(self.fd, select.EPOLLIN)
        self.write(held)

    def hang_up(self) -> None:
        """If the last answer has gone out, tell the client that nothing follows.

        Its own close then ends the connection: were it ours, a reset could overtake the answer.
        """
        if self.closing and not self._outbox:
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Forget the connection; closing the socket takes it out of the epoll set too."""
        self._sock.close()
