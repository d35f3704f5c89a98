"""A small synchronous HTTP/1.1 client on the standard library, for questions asked beside the load.

Identifying a server and scraping its counters need a handful of GETs, so `http.client` is enough and nothing
is added to the dependencies; the load itself goes through `breakeven.load`. What can go wrong on the way is
told as one line that names the URL and the mend. That line never holds a secret: URLs that carry one are
refused, header values are never quoted, and neither is anything that the server sent back (some servers
repeat the key they refuse).
"""

from __future__ import annotations

import http.client
import io
import math
import re
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import SplitResult, quote, urlsplit

import msgspec

from breakeven.errors import TargetError

__all__ = ["Client", "Response", "checked_url", "shown"]

# RFC 9110, 5.6.2 and 5.5: what a field's name and value may hold.
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")

# A record of TLS type 21 (alert): how a TLS server answers plain HTTP (RFC 8446, 5.1).
_TLS_ALERT = "\x15\x03"

_TROUBLE = (OSError, http.client.HTTPException, UnicodeError)

# Kinds of trouble, the special before the general, and what to tell of each.
_MENDS: tuple[tuple[tuple[type[Exception], ...], str], ...] = (
    (
        (ConnectionRefusedError,),
        "connection refused at {url}: is the server running, and is the port right? (--server-url)",
    ),
    (
        (socket.gaierror, UnicodeError),
        "the host name of {url} can't be resolved: is it spelt right? (--server-url)",
    ),
    (
        (TimeoutError,),
        "no answer from {url} within {timeout_s:g} s: are host and port right, can they be reached from here,"
        " and is the server up? (--server-url)",
    ),
    (
        (ssl.SSLCertVerificationError,),
        "the TLS certificate of {url} can't be verified ({why}): use the host name it was issued for, or name"
        " the file of its CA in the environment variable SSL_CERT_FILE",
    ),
    (
        (ssl.SSLError,),
        "no TLS with {url} ({why}): if the server speaks plain HTTP, write http:// (--server-url)",
    ),
    (
        (ConnectionResetError, BrokenPipeError),
        "{url} closed the connection without an answer: is it an HTTP server, or does it want https://? (--server-url)",
    ),
    (
        (http.client.HTTPException,),
        "what answers at {url} doesn't speak HTTP: is the port right? (--server-url)",
    ),
    ((OSError,), "can't reach {url} ({why}): are host and port right? (--server-url)"),
)


@dataclass(frozen=True)
class Response:
    """A whole answer: its status, its headers under lower-case names, and its body."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> object:
        """The decoded body, None if it isn't JSON."""
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.DecodeError, RecursionError):
            return None


class Client:
    """One kept-alive connection to one server, opened at the first request and again whenever it was lost.

    `base_url` may carry a path (`http://host/proxy`), which goes before the path of every request.
    `timeout_s` bounds connecting, and then the whole of an answer, however slowly it comes.
    Not thread-safe: a thread that scrapes has a client of its own. Raises `TargetError` for a URL or header
    that can't be used, and from `get`, `post` and `delete` for every trouble with the connection.
    """

    def __init__(self, base_url: str, headers: Mapping[str, str], timeout_s: float) -> None:
        parts = checked_url(base_url)
        self.base_url = base_url
        self._prefix = quote(parts.path.rstrip("/"), safe="/%~!$&'()*+,;=:@")
        self._headers = _checked_headers(headers)
        self._timeout_s = timeout_s
        self._connection = _connection(parts, timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def get(self, path: str) -> Response:
        """GET `path` (with its leading slash; empty for the base URL itself)."""
        return self._request("GET", path, None)

    def try_get(self, path: str) -> Response | None:
        """GET what we can do without: None for trouble with the connection and any status but 200."""
        try:
            answer = self.get(path)
        except TargetError:
            return None
        return answer if answer.status == 200 else None

    def post(self, path: str, body: bytes) -> Response:
        """POST a JSON `body` to `path`."""
        return self._request("POST", path, body)

    def delete(self, path: str) -> Response:
        """DELETE `path`."""
        return self._request("DELETE", path, None)

    def close(self) -> None:
        """Drop the connection; a later request opens a new one."""
        self._connection.close()

    def _request(self, method: str, path: str, body: bytes | None) -> Response:
        kept_alive = self._connection.sock is not None
        try:
            try:
                return self._exchange(method, path, body)
            except (ConnectionResetError, BrokenPipeError):
                # An idle connection may be closed by the server at any moment (llama.cpp: after 5 s); only
                # on such a one is it no fault of the server.
                if not kept_alive:
                    raise
                self.close()
                return self._exchange(method, path, body)
        except _TROUBLE as error:
            self.close()
            raise TargetError(_trouble(error, shown(self.base_url), self._timeout_s)) from error

    def _exchange(self, method: str, path: str, body: bytes | None) -> Response:
        if self._connection.sock is not None:  # the last answer has left it what time it had left
            self._connection.sock.settimeout(self._timeout_s)
        headers = self._headers if body is None else {"Content-Type": "application/json", **self._headers}
        self._connection.request(method, self._prefix + path or "/", body=body, headers=headers)
        with self._connection.getresponse() as answer:
            named = {name.lower(): value for name, value in answer.getheaders()}
            return Response(answer.status, named, answer.read())


class _TimelyResponse(http.client.HTTPResponse):
    """A response that is whole within the socket's timeout, or ends in TimeoutError: head, body and all."""

    def __init__(self, sock: socket.socket, debuglevel: int = 0, method: str | None = None, url: str | None = None):
        super().__init__(sock, debuglevel, method, url)
        self.fp = io.BufferedReader(_Timely(self.fp.detach(), sock))


class _Timely(io.RawIOBase):
    """What comes from a socket until its timeout, counted from now, is over. A timeout by itself is for each wait."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket) -> None:
        self._raw, self._sock = raw, sock
        self._until_s = time.monotonic() + (sock.gettimeout() or math.inf)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        if left_s < math.inf:
            self._sock.settimeout(left_s)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


def _connection(parts: SplitResult, timeout_s: float) -> http.client.HTTPConnection:
    # The port is always given: without it http.client takes the end of an IPv6 address for one.
    connection: http.client.HTTPConnection
    if parts.scheme == "http":
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=timeout_s)
    else:
        host, context = parts.hostname or "", ssl.create_default_context()
        connection = http.client.HTTPSConnection(host, parts.port or 443, timeout=timeout_s, context=context)
    connection.response_class = _TimelyResponse
    return connection


def _checked_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """`headers`, if they can be sent. http.client would quote a refused value, and with it the key."""
    for name, value in headers.items():
        if not _TOKEN.fullmatch(name):
            raise TargetError("a header has a name that HTTP doesn't allow: write --header 'Name: value'")
        if not _VALUE.fullmatch(value):
            raise TargetError(
                f"the value of the header {name} holds a line break or a character that HTTP doesn't allow:"
                " check --header and the variable that --api-key-env names"
            )
    return dict(headers)


def shown(url: str) -> str:
    """`url` as an error may show it: on one line, without query, and hidden where it may hold a password."""
    plain = " ".join(url.split())
    if "@" in plain:
        scheme, found, _ = plain.partition("://")
        return f"{scheme}://…" if found and scheme.isalnum() else "…"
    return re.split(r"[?#]", plain, maxsplit=1)[0]


def checked_url(url: str) -> SplitResult:
    """The parts of a usable server URL: http or https, a host, maybe a port and a path, nothing else.

    Raises `TargetError` for everything else, with the mend.
    """
    parts = _split(url)
    if parts is None or not parts.hostname or re.search(r"[\s\x00-\x1f]", url):
        raise TargetError(f"{shown(url)} is no URL: write http://HOST:PORT (--server-url)")
    if parts.username is not None or parts.password is not None:
        raise TargetError(
            f"the server URL {shown(url)} carries a user name or a password: leave them out of it, and use"
            " --api-key-env or --header"
        )
    if parts.query or parts.fragment:
        raise TargetError(
            f"the server URL {shown(url)} has a '?' or '#' behind its path: leave that out, and give keys"
            " with --api-key-env or --header"
        )
    return parts


def _split(url: str) -> SplitResult | None:
    """`urlsplit`, or None where it can't; a wrong scheme or port is told apart here."""
    scheme, found, _ = url.partition("://")
    if not found:
        raise TargetError(f"{shown(url)} has no scheme: write {shown(_with_scheme(url))} (--server-url)")
    if scheme.lower() not in ("http", "https"):
        raise TargetError(f"{shown(url)} is neither http:// nor https://: correct the scheme (--server-url)")
    try:
        parts = urlsplit(url)
    except ValueError:
        return None
    try:
        usable = parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise TargetError(f"{shown(url)} has a port that isn't a number from 1 to 65535 (--server-url)")
    return parts


def _with_scheme(url: str) -> str:
    """What was probably meant by a URL without `://`: `localhost:8000`, `//host`, `http:/host`."""
    scheme = "https" if url.lower().startswith("https:") else "http"
    return f"{scheme}://" + re.sub(r"^(?:https?:)?/*", "", url, flags=re.IGNORECASE)


def _trouble(error: Exception, url: str, timeout_s: float) -> str:
    """One line on what went wrong on the way to `url`, and what to do about it."""
    if isinstance(error, http.client.BadStatusLine) and str(error).startswith(_TLS_ALERT):
        return f"{url} speaks TLS: write https:// (--server-url)"
    text = next(text for kinds, text in _MENDS if isinstance(error, kinds))
    return text.format(url=url, why=_why(error), timeout_s=timeout_s)


def _why(error: Exception) -> str:
    """The system's own word for it; never the text of an exception, which may quote what was sent."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError):
        return error.reason or "handshake failed"
    return (isinstance(error, OSError) and error.strerror) or type(error).__name__
