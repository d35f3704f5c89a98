"""One HTTP exchange: the raw reads with their stamps, and what httptools makes of them afterwards.

*Stamp now, parse later*: `Connection` appends to `reads` in the socket's callback and does nothing else there.
`advance` runs off that path, in slices, and may stop anywhere.
"""

from __future__ import annotations

import httptools

__all__ = ["Exchange", "Piece"]

#: A piece of the response's body and the stamp (ns) of the read that brought it.
Piece = tuple[int, bytes]


class Exchange:
    """The response to one request, as far as it has come.

    `pieces` holds the body without HTTP framing. `complete` turns true at the end of the message, `broken` names
    what was wrong with bytes that are no HTTP. Interim responses (1xx) are skipped.
    """

    def __init__(self, sent_ns: int = 0) -> None:
        self.sent_ns = sent_ns
        self.reads: list[tuple[int, bytes]] = []
        self.pieces: list[Piece] = []
        self.status: int | None = None
        self.headers: dict[bytes, bytes] = {}
        self.headers_ns: int | None = None
        self.end_ns: int | None = None
        self.complete = False
        self.broken: str | None = None
        self._parsed = 0
        self._stamp_ns = 0
        self._parser = httptools.HttpResponseParser(self)

    @property
    def chunked(self) -> bool:
        """Whether the body's end is marked by a last chunk, so that reads need no look before one may be it."""
        return b"chunked" in self.headers.get(b"transfer-encoding", b"").lower()

    @property
    def keep_alive(self) -> bool:
        """Whether the server will take another request on this connection."""
        return self.complete and bool(self._parser.should_keep_alive())

    def advance(self) -> None:
        """Parses the HTTP framing of all reads not yet looked at."""
        reads = self.reads
        while self._parsed < len(reads) and not self.complete and not self.broken:
            self._stamp_ns, data = reads[self._parsed]
            reads[self._parsed] = (self._stamp_ns, b"")  # the pieces hold it now
            self._parsed += 1
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserError as error:
                self.broken = f"no HTTP: {error}"

    def close(self) -> None:
        """The peer closed the connection: where neither length nor chunks said it, this is the body's end."""
        self.advance()
        delimited = self.chunked or b"content-length" in self.headers
        if self.headers_ns is not None and not self.complete and not delimited:
            self.on_message_complete()

    # What httptools calls, by name.

    def on_message_begin(self) -> None:
        self.headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
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
            self.end_ns = self._stamp_ns
