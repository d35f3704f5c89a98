"""Server-sent events out of bytes, however they were cut (WHATWG HTML, section 9.2, "event stream interpretation").

Lines end with LF, CRLF or CR; an empty line ends an event. The parser is fed as bytes come and copies an
event only when it is whole, so a megabyte event in small reads stays linear.
"""

from __future__ import annotations

__all__ = ["Event", "EventParser"]

_BOM = b"\xef\xbb\xbf"


#: One dispatched event: its type (`message` unless the server named one) and its data lines, joined by LF.
Event = tuple[bytes, bytes]


class EventParser:
    """Cuts a byte stream into events. `feed` returns what became complete, `close` what the end left over."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._skip_lf = False
        self._at_start = True

    def feed(self, data: bytes) -> list[Event]:
        """Takes the next bytes; returns the events that they complete, in order."""
        if self._at_start:
            data = self._drop_bom(data)
        if self._skip_lf and data:
            data = data.removeprefix(b"\n")
            self._skip_lf = False
        if b"\r" in data:
            self._skip_lf = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if b"\n" not in data:
            self._keep(data)
            return []
        return self._cut(data)

    def skim(self, pieces: list[bytes]) -> bytes | None:
        """The data of pieces that are one event of a JSON object each, joined by commas; None if any is not.

        Nearly all are, and this saves half of the time that `feed` takes. Where it gives None it has changed nothing.
        """
        if self._parts or self._skip_lf:
            return None
        for piece in pieces:
            if not (piece.startswith(b"data: {") and piece.endswith(b"}\n\n")):
                return None
        data = b",".join([piece[6:-2] for piece in pieces])
        if b"\n" in data or b"\r" in data:
            return None
        self._at_start = False
        return data

    def close(self) -> list[Event]:
        """The last event where the server forgot its empty line. Lenient on purpose: its tokens were produced."""
        rest, self._parts = b"".join(self._parts), []
        event = _event(rest.removeprefix(_BOM) if self._at_start else rest)
        return [event] if event else []

    def _drop_bom(self, data: bytes) -> bytes:
        data = b"".join((*self._parts, data))
        self._parts = []
        if len(data) < len(_BOM) and _BOM.startswith(data):
            self._parts = [data] if data else []
            return b""
        self._at_start = False
        return data.removeprefix(_BOM)

    def _keep(self, data: bytes) -> None:
        if data:
            self._parts.append(data)

    def _cut(self, data: bytes) -> list[Event]:
        parts = self._parts
        if parts and data.startswith(b"\n") and parts[-1].endswith(b"\n"):
            data, parts = b"".join((*parts, data)), []
        blocks = data.split(b"\n\n")
        if len(blocks) == 1:
            parts.append(data)
            return []
        blocks[0] = b"".join((*parts, blocks[0]))
        rest = blocks.pop()
        self._parts = [rest] if rest else []
        return [event for block in blocks if (event := _event(block))]


def _event(block: bytes) -> Event | None:
    if block.startswith(b"data: ") and b"\n" not in block:
        return b"message", block[6:]
    kind, data = b"message", []
    for line in block.split(b"\n"):
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            data.append(value)
        elif name == b"event":
            kind = value or b"message"
        elif name == b"error":  # no field of the standard's: how llama.cpp put its errors until 2025
            kind, data = b"error", [value]
    return (kind, b"\n".join(data)) if data else None
