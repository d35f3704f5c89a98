"""A request on its way: its exchange, its transcript, and how both become a record."""

from __future__ import annotations

from collections.abc import Callable

from breakeven.load.connection import Connection
from breakeven.load.dialect import Dialect, error_text
from breakeven.load.exchange import Exchange
from breakeven.load.plan import PlannedRequest
from breakeven.load.retry import wait_ns
from breakeven.load.transcript import Transcript, repetition
from breakeven.records import Outcome, RequestRecord

__all__ = ["Flight"]

#: After this silence a connection is looked at unasked, see `Connection.check`.
_QUIET_NS = 250_000_000
#: A whole answer with at most so many pieces unread is read at once, to know whether it was one: some 50 us.
_SHORT = 16
#: What a record keeps of a server's words, in characters; and what is read of a refusal for them, in bytes.
_ERROR_LIMIT, _BODY_LIMIT = 300, 1 << 16


class Flight:
    """One request from the moment it is due to the moment its record is made."""

    def __init__(self, number: int, planned: PlannedRequest, dialect: Dialect, *, due_ns: int) -> None:
        self._number, self._due_ns = number, due_ns
        self.planned = planned
        self.exchange = Exchange()
        self.transcript = Transcript(dialect)
        self.connection: Connection | None = None
        self.reconnects = 0
        self.retries = 0
        self._failure: tuple[Outcome, str] | None = None
        self._heard_ns = self._looked_ns = 0

    @property
    def came_through(self) -> bool:
        """Whether a whole answer came, told when it has ended.

        The end of a long one is not read for that: whatever it says, the server had work to do first.
        """
        exchange = self.exchange
        if not self._is_stream or self._failure is not None:
            return False
        if len(exchange.pieces) > _SHORT:
            return exchange.complete or any(b"[DONE]" in data for _, data in exchange.pieces[-_SHORT:])
        while not self.parse(0):
            pass
        self._close_transcript()
        return self._outcome()[0] == "ok"

    @property
    def heard_ns(self) -> int:
        """When bytes of an answer last came, of refused tries too; 0 if none did."""
        return max(self._heard_ns, self.exchange.last_read_ns)

    @property
    def may_be_resent(self) -> bool:
        """Whether the connection went away before a single byte of an answer: the server has not seen the request."""
        lost = self.connection is not None and self.connection.failure is not None
        return lost and not self.exchange.begun and self._failure is None

    @property
    def may_be_retried(self) -> bool:
        """Whether the server refused the request for now: 429 or 5xx."""
        status = self.exchange.status
        is_refusal = status is not None and (status == 429 or 500 <= status < 600)
        return is_refusal and not self.exchange.broken and self._failure is None

    def pause_ns(self, wall_ns: int) -> int:
        """How long to wait before the next try; begins the wait, in which no connection is ours."""
        self.connection, self.exchange.end_ns = None, None
        return wait_ns(self.exchange.headers.get(b"retry-after"), self.retries, self._number, wall_ns)

    def begin_again(self) -> None:
        """The wait is over: the next try, timed from when the first one was sent."""
        refused, self.exchange = self.exchange, Exchange()
        self.exchange.sent_ns = refused.sent_ns
        self._heard_ns = max(self._heard_ns, refused.last_read_ns)
        refused.release()
        self.retries += 1

    def fail(self, outcome: Outcome, why: str) -> None:
        """Notes what the client itself knows of the end; the first reason stands."""
        self._failure = self._failure or (outcome, why)

    def end(self, now_ns: int) -> None:
        """The response is over, complete or not."""
        self.exchange.end_ns = self.exchange.end_ns or now_ns

    def check_deadlines(self, now_ns: int, timeout_ns: int, stall_ns: int) -> None:
        """Gives the request up where it took longer than it may, or where its stream fell silent."""
        exchange, connection = self.exchange, self.connection
        sent_ns, heard_ns = exchange.sent_ns, exchange.last_read_ns
        if not sent_ns or connection is None:
            return
        if heard_ns != self._looked_ns and now_ns - heard_ns > _QUIET_NS:
            # Once a silence: a reset that was not told of came with what was read last.
            self._looked_ns = 0 if connection.check() else heard_ns
        if now_ns - sent_ns > timeout_ns:
            why = f"no end within {timeout_ns / 1e9:g} s (--timeout)"
        elif heard_ns and now_ns - heard_ns > stall_ns:
            why = f"silent for {stall_ns / 1e9:g} s (--stall-timeout)"
        else:
            return
        exchange.advance()  # the end may have come unnoticed, with more bytes behind it
        if connection.usable and not (exchange.complete or exchange.broken):
            self.fail("timeout", why)
        connection.abandon()

    def parse(self, until_ns: int) -> bool:
        """Parses what has come, until the clock passes `until_ns`; returns whether that was all."""
        self.exchange.advance()
        return not self._is_stream or self.transcript.advance(self.exchange.pieces, until_ns)

    def arrivals(self, tokens_per_character: float) -> list[tuple[int, int]]:
        """The arrivals parsed so far, as a record has them: `(ns after sent, tokens)`."""
        stamped = self.transcript.counted(tokens_per_character).arrivals
        return [(stamp_ns - self.exchange.sent_ns, tokens) for stamp_ns, tokens in stamped]

    def tokens(self, tokens_per_character: float) -> int:
        """Output tokens parsed so far."""
        return self.transcript.tokens_so_far(tokens_per_character)

    def record(self, origin_ns: int, scrub: Callable[[str], str], *, keep_text: bool) -> RequestRecord:
        """The record of this request, once all is parsed; times relative to `origin_ns`, errors scrubbed of secrets."""
        exchange, transcript, planned = self.exchange, self.transcript, self.planned
        if self._is_stream:
            self._close_transcript()
        outcome, error = self._outcome()
        counted = transcript.counted()
        arrivals = [(stamp_ns - exchange.sent_ns, tokens) for stamp_ns, tokens in counted.arrivals]

        def since_start(stamp_ns: int | None) -> int | None:
            return stamp_ns - origin_ns if stamp_ns else None

        return RequestRecord(
            id=self._number,
            level=planned.level.index,
            phase=planned.phase,
            prompt=planned.prompt.id,
            kind=planned.prompt.kind,
            max_tokens=planned.max_tokens,
            due_ns=self._due_ns - origin_ns,
            sent_ns=since_start(exchange.sent_ns),
            headers_ns=since_start(exchange.headers_ns),
            first_ns=since_start(exchange.sent_ns + arrivals[0][0]) if arrivals else None,
            last_ns=since_start(exchange.sent_ns + arrivals[-1][0]) if arrivals else None,
            end_ns=since_start(exchange.end_ns),
            arrivals=arrivals,
            input_tokens=transcript.input_tokens,
            cached_tokens=transcript.cached_tokens,
            output_tokens=counted.output_tokens,
            tokens_from=counted.tokens_from,
            total_known=transcript.total_known,
            chunks=transcript.chunks,
            outcome=outcome,
            status=exchange.status,
            error=scrub(error)[:_ERROR_LIMIT] if error else None,
            finish_reason=transcript.finish_reason,
            reconnects=self.reconnects,
            retries=self.retries,
            repetition=round(repetition(transcript.text), 4),
            text=transcript.text if keep_text else None,
        )

    def _close_transcript(self) -> None:
        exchange = self.exchange  # bytes may have come behind the response's end
        self.transcript.close((exchange.complete and exchange.end_ns) or exchange.last_read_ns)

    @property
    def _is_stream(self) -> bool:
        exchange = self.exchange
        is_ok = exchange.headers_ns is not None and exchange.status is not None and 200 <= exchange.status < 300
        return is_ok and exchange.media_type == b"text/event-stream" and not exchange.encoding

    def _outcome(self) -> tuple[Outcome, str | None]:
        exchange = self.exchange
        lost = self.connection.failure if self.connection else None
        if self._failure:
            return self._failure
        if exchange.broken:
            return "protocol", exchange.broken
        if exchange.headers_ns is None or exchange.status is None:
            return "connection", lost or "no answer"
        if not 200 <= exchange.status < 300:
            return "http_error", f"HTTP {exchange.status}: {self._refusal()}"
        if exchange.encoding:
            return "protocol", f"answered in Content-Encoding: {exchange.encoding}, though asked for identity"
        if not self._is_stream:
            kind = exchange.headers.get(b"content-type", b"nothing").decode("latin-1")
            return "protocol", f"answered with {kind}, not with text/event-stream"
        return self._stream_outcome(lost)

    def _stream_outcome(self, lost: str | None) -> tuple[Outcome, str | None]:
        transcript = self.transcript
        if transcript.error:
            return "stream_error", transcript.error
        if not self.exchange.complete and not transcript.finished:
            was_reset = self.connection is not None and self.connection.was_reset
            return "connection" if was_reset else "truncated", lost
        if transcript.garbage:
            return "protocol", transcript.garbage
        if not transcript.finished:
            return "truncated", "the stream ended without a finish reason or [DONE]"
        if not transcript.chunks:
            return "empty", "no chunk carried output"
        return "ok", None

    def _refusal(self) -> str:
        exchange = self.exchange
        if location := exchange.headers.get(b"location"):
            return f"redirected to {location.decode('latin-1')}"
        if exchange.encoding:
            return f"a text in {exchange.encoding}"
        return error_text(b"".join(data for _, data in exchange.pieces)[:_BODY_LIMIT])
