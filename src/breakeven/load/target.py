"""Where requests go: a URL taken apart, its headers, its TLS context, and the secrets that no file may show."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Mapping
from urllib.parse import urlsplit

from breakeven.errors import TargetError
from breakeven.load.connection import Endpoint, words

__all__ = ["Target"]

_HIDDEN = "***"


class Target:
    """A server at a URL.

    Args:
        base_url: scheme, host, port and an optional path prefix, e.g. `https://[::1]:8000/proxy`; no `/v1`.
        headers: sent with each request. Their values count as secrets.
    """

    def __init__(self, base_url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(base_url)
        self.base_url = base_url
        self._host = parts.hostname or ""
        self._is_tls = parts.scheme == "https"
        self._port = parts.port or (443 if self._is_tls else 80)
        self._prefix = parts.path.rstrip("/")
        self._netloc = parts.netloc
        self._fields = _header_fields(parts.netloc, headers)
        words = {word for value in headers.values() for word in value.split() if len(word) > 3}
        self._secrets = sorted(words, key=len, reverse=True)  # so that none leaves the rest of a longer one

    async def resolve(self) -> Endpoint:
        """The first address of the host that takes a connection.

        Raises:
            TargetError: the name has no address, or none of them answers.
        """
        loop = asyncio.get_running_loop()
        try:
            infos = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise TargetError(f"--server-url: no address for {self._host}: {error.strerror}") from None
        why = ""
        for family, _, _, _, sockaddr in infos:
            with socket.socket(family, socket.SOCK_STREAM) as sock:
                sock.setblocking(False)
                try:
                    async with asyncio.timeout(10):
                        await loop.sock_connect(sock, sockaddr)
                except (OSError, TimeoutError) as error:
                    why = words(error) or "timed out"
                    continue
            return Endpoint((family, sockaddr), (self._tls_context(), self._host) if self._is_tls else None)
        raise TargetError(f"--server-url: nothing listens at {self._netloc}: {why}")

    @property
    def is_loopback(self) -> bool:
        """Whether the server runs on this machine and so shares its cores with the client."""
        return self._host in ("localhost", "::1") or self._host.startswith("127.")

    def post(self, path: str, body: bytes) -> bytes:
        """The bytes of a POST of a JSON body."""
        line = f"POST {self._prefix}{path} HTTP/1.1\r\n".encode("latin-1")
        return b"%b%bContent-Length: %d\r\n\r\n%b" % (line, self._fields, len(body), body)

    def scrub(self, text: str) -> str:
        """The text without any header's value: servers like to quote the key that they refuse."""
        for secret in self._secrets:
            text = text.replace(secret, _HIDDEN)
        return text

    def _tls_context(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        context.set_alpn_protocols(["http/1.1"])
        return context


def _header_fields(host: str, headers: Mapping[str, str]) -> bytes:
    """All fields but the length; the user's stand in place of ours."""
    ours = {"Host": host, "Accept": "text/event-stream", "Accept-Encoding": "identity"}
    ours["Content-Type"] = "application/json"
    theirs = {name.lower() for name in headers}
    kept = {name: value for name, value in ours.items() if name.lower() not in theirs}
    fields = kept | {name: value for name, value in headers.items() if name.lower() != "content-length"}
    return "".join(f"{name}: {value}\r\n" for name, value in fields.items()).encode("latin-1")
