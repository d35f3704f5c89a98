"""One HTTP exchange: the raw reads with their stamps, and what httptools makes of them afterwards.

*Stamp now, parse later*: `Connection` appends to `reads` in the socket's callback and does nothing else there.
`advance` runs off that path, in slices, and may stop anywhere.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable

import httptools

__all__ = ["Exchange", "Piece"]

#: A piece of the response's body and the stamp (ns) of the read that brought it.
Piece = tuple[int, bytes]


class Exchange:
    """The response to one request, as far as it has come.

    `reads` holds what has come and was not looked at, `pieces` the body that this gave, without HTTP framing.
    `complete` turns true at the end of the message, `broken` names what was wrong with bytes that are no HTTP.
    `begun` says whether a byte of an answer has come, `keep_alive` whether the server will take another request on
    this connection.
    Interim responses (1xx) are skipped. Over TLS, `decrypt` turns the bytes of a read into plain ones.
    """

    def __init__(self) -> None:
        self.sent_ns = 0
        self.reads: list[tuple[int, bytes]] = []
        self.decrypt: Callable[[bytes], bytes] | None = None
        self.pieces: list[Piece] = []
        self.status: int | None = None
        self.headers: dict[bytes, bytes] = {}
        self.headers_ns: int | None = None
        self.end_ns: int | None = None
        self.begun = False
        self.complete = False
        self.keep_alive = False
        self.broken: str | None = None
        self._stamp_ns = 0
        self._parser = httptools.HttpResponseParser(self)

    @property
    def chunked(self) -> bool:
        """Whether the body's end is marked by a last chunk, so that reads need no look before one may be it."""
        return b"chunked" in self.headers.get(b"transfer-encoding", b"").lower()

    @property
    def media_type(self) -> bytes:
        """The body's type without its parameters, in lower case; empty where the server named none."""
        return self.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()

    @property
    def encoding(self) -> str:
        """How the body is compressed; empty where it is not."""
        encoding = self.headers.get(b"content-encoding", b"").strip().lower()
        return "" if encoding == b"identity" else encoding.decode("latin-1")

    @property
    def last_read_ns(self) -> int:
        """When bytes last came, 0 if none did."""
        return self.reads[-1][0] if self.reads else self._stamp_ns

    def advance(self) -> None:
        """Parses the HTTP framing of all reads."""
        if not self.reads:
            return
        reads, self.reads = self.reads, []
        feed, decrypt, latest_ns = self._parser.feed_data, self.decrypt, self._stamp_ns
        for stamp_ns, data in reads:
            if self.broken:
                return
            if stamp_ns > latest_ns:  # never back, though the wall clock was set back
                self._stamp_ns = latest_ns = stamp_ns
            try:
                if plain := decrypt(data) if decrypt else data:
                    self.begun = True
                    feed(plain)
            except httptools.HttpParserError as error:
                self._break(f"no HTTP: {error}")
            except httptools.HttpParserUpgrade:  # is no HttpParserError
                self._break("no HTTP: the server switched protocols")
            except ssl.SSLError as error:
                self._break(f"TLS: {error.reason}")

    def close(self) -> None:
        """The peer closed the connection: where neither length nor chunks said it, this is the body's end."""
        self.advance()
        is_delimited = self.chunked or b"content-length" in self.headers
        if self.headers_ns is not None and not (self.complete or self.broken or is_delimited):
            self.on_message_complete()

    def release(self) -> None:
        """Lets go of the parser, which holds this object in its turn: nothing is to come.

        A circle would be left to the collector, which is off while a level runs.
        """
        del self._parser

    def _break(self, why: str) -> None:
        if self.complete:
            self.keep_alive = False  # what follows a whole response can't spoil it, only the next one
        else:
            self.broken = why

    # What httptools calls, by name.

    def on_message_begin(self) -> None:
        if self.complete:
            raise httptools.HttpParserError("an answer that nobody asked for")
        self.headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.headers_ns is None:  # else a trailer
            self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status >= 200:
            self.headers_ns = self._stamp_ns

    def on_body(self, body: bytes) -> None:
        self.pieces.append((self._stamp_ns, body))

    def on_message_complete(self) -> None:
        if self.status is not None and self.status >= 200:
            self.complete = True
            self.keep_alive = self._parser.should_keep_alive()  # the parser forgets it after this call
            self.end_ns = self._stamp_ns
