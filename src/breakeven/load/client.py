"""The client: planned requests in, records out. A server's fault becomes a record's outcome, never an exception."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

import msgspec

from breakeven.clock import KernelClock, MonotonicClock
from breakeven.load.connection import Connection, words
from breakeven.load.dialect import Dialect
from breakeven.load.flight import Flight
from breakeven.load.later import Later
from breakeven.load.plan import PlannedRequest
from breakeven.load.target import Target
from breakeven.records import RequestRecord

__all__ = ["Client"]

#: How often deadlines are looked at; a time-out is late by at most this.
_WATCH_S = 0.25
#: Requests looked at in one turn of the event loop, at some 2 us each.
_WATCHED_A_TURN = 256
#: A connection that isn't there after this long is one that failed.
_CONNECT_TIMEOUT_S = 20.0


class Client:
    """Sends requests to one target, over as many keep-alive connections as there are requests in flight.

    Use as an async context manager. `on_record` gets each request's record soon after its response ended; times in
    records are relative to `origin_ns`. A request that is refused for now (429 or 5xx) is sent again up to `retries`
    times, within the time that it has as a whole.
    """

    def __init__(
        self,
        target: Target,
        dialect: Dialect,
        model: str,
        on_record: Callable[[RequestRecord], None],
        *,
        sampling: Mapping[str, Any],
        extra_body: Mapping[str, Any],
        timeout_s: float,
        stall_timeout_s: float,
        keep_text: bool = False,
        origin_ns: int | None = None,
        first_id: int = 0,
        retries: int = 0,
    ) -> None:
        self._target, self._dialect, self._model, self._on_record = target, dialect, model, on_record
        self._sampling, self._extra = sampling, (dialect.counting, extra_body)
        self._timeout_ns, self._stall_ns = int(timeout_s * 1e9), int(stall_timeout_s * 1e9)
        self._keep_text, self._retries = keep_text, retries
        self._flights: set[Flight] = set()
        self._idle: list[Connection] = []
        self._is_closed = False
        self._sent = first_id
        self._heard_ns = 0
        self._finished_tokens = 0
        self._finished_characters = 0
        self.clock = MonotonicClock()
        self.kernel_clock = KernelClock()
        self.origin_ns = self.clock.now_ns() if origin_ns is None else origin_ns
        self.chunks = 0

    async def __aenter__(self) -> Self:
        self._later = Later(asyncio.get_running_loop())
        self._endpoint = await self._target.resolve()
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watcher.cancel()
        self._is_closed = True
        for connection in self._idle:
            connection.close()

    async def connect(self, count: int) -> None:
        """Opens connections until `count` are idle, so that a level starts without handshakes.

        What can't be opened now is left to the request that will need it.
        """
        self._idle = [connection for connection in self._idle if connection.usable]
        missing = max(0, count - len(self._idle))
        for start in range(0, missing, 64):  # a listen queue is often 128 long
            await asyncio.gather(*(self._open_idle() for _ in range(min(64, missing - start))))

    async def send(self, planned: PlannedRequest, due_ns: int | None = None) -> bool:
        """Sends one request; returns when its response has ended, with whether it was a whole answer.

        `due_ns` is when the plan wanted it sent; None for now. Cancelling abandons the request: its record says
        `cancelled`.
        """
        flight = Flight(self._sent, planned, self._dialect, due_ns=self.clock.now_ns() if due_ns is None else due_ns)
        self._sent += 1
        self._flights.add(flight)
        try:
            await self._fly(flight, self.encode(planned))
        except asyncio.CancelledError:
            flight.fail("cancelled", "the level ended before the response did")
            raise
        except OSError as error:
            flight.fail("connection", words(error) or f"no connection within {_CONNECT_TIMEOUT_S:g} s")
        finally:
            self._flights.discard(flight)
            flight.end(self.clock.now_ns())
            self._heard_ns = max(self._heard_ns, flight.heard_ns)
            self._later.add(lambda until_ns: self._finish(flight, until_ns))
        return flight.came_through

    def encode(self, planned: PlannedRequest) -> bytes:
        """The bytes of a request as `send` writes them."""
        body = self._dialect.body(planned.prompt, self._model, planned.max_tokens, self._sampling)
        for extra in self._extra:
            for name, value in extra.items():
                ours = body.get(name)
                body[name] = {**ours, **value} if isinstance(ours, dict) and isinstance(value, dict) else value
        return self._target.post(self._dialect.path, msgspec.json.encode(body))

    async def settled(self) -> None:
        """Returns when every response that has ended so far has become a record."""
        await self._later.drained()

    async def caught_up(self) -> None:
        """Returns when all bytes that have come so far are parsed, those of running requests included."""
        for flight in self._flights:
            self._later.add(flight.parse)
        await self._later.drained()

    @property
    def next_id(self) -> int:
        """The number that the next request will have."""
        return self._sent

    @property
    def in_flight(self) -> int:
        """Requests sent whose responses have not ended."""
        return len(self._flights)

    @property
    def heard_ns(self) -> int:
        """When bytes of any answer last came from the server (`perf_counter_ns`); 0 if none ever did."""
        return max(self._heard_ns, max((flight.heard_ns for flight in self._flights), default=0))

    def partial(self, level: int) -> list[tuple[int, list[tuple[int, int]]]]:
        """The running requests of a level as far as they are parsed: `(sent_ns, arrivals)`, like a record's."""
        rate = self._tokens_per_character()
        return [
            (flight.exchange.sent_ns - self.origin_ns, flight.arrivals(rate))
            for flight in self._flights
            if flight.planned.level.index == level and flight.exchange.sent_ns
        ]

    def tokens_so_far(self) -> int:
        """Output tokens of all requests, finished or running, as far as they are parsed."""
        rate = self._tokens_per_character()
        return self._finished_tokens + sum(flight.tokens(rate) for flight in self._flights)

    def _tokens_per_character(self) -> float:
        return self._finished_tokens / self._finished_characters if self._finished_characters else 0.25

    async def _open(self) -> Connection:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            connection = await Connection.open(self._endpoint, self.kernel_clock, self._later)
        if self._is_closed:  # while it was made, by a cancelled `connect` that could not wait
            connection.close()
        return connection

    async def _open_idle(self) -> None:
        with contextlib.suppress(OSError):
            self._idle.append(await self._open())

    async def _fly(self, flight: Flight, request: bytes) -> None:
        await self._try(flight, request)
        while flight.retries < self._retries and flight.may_be_retried:
            left_ns = flight.exchange.sent_ns + self._timeout_ns - self.clock.now_ns()
            pause_ns = flight.pause_ns(time.time_ns())
            await asyncio.sleep(min(pause_ns, left_ns) / 1e9)
            if pause_ns >= left_ns:
                return  # it would have no time left
            flight.begin_again()
            await self._try(flight, request)

    async def _try(self, flight: Flight, request: bytes) -> None:
        while self._idle and not self._idle[-1].usable:
            self._idle.pop()
        connection = self._idle.pop() if self._idle else await self._open()
        await self._exchange(flight, connection, request)
        if flight.may_be_resent and connection.exchanges > 1:
            flight.reconnects += 1
            await self._exchange(flight, await self._open(), request)

    async def _exchange(self, flight: Flight, connection: Connection, request: bytes) -> None:
        flight.connection = connection
        await connection.exchange(request, flight.exchange, self.clock.now_ns)
        if connection.usable:
            self._idle.append(connection)

    def _finish(self, flight: Flight, until_ns: int) -> bool:
        if not flight.parse(until_ns):
            return False
        record = flight.record(self.origin_ns, self._target.scrub, keep_text=self._keep_text)
        flight.exchange.release()
        self.chunks += record.chunks
        self._finished_tokens += record.output_tokens
        self._finished_characters += flight.transcript.characters
        self._on_record(record)
        return True

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_S)
            self.kernel_clock.sync()
            for number, flight in enumerate(list(self._flights), 1):
                if flight in self._flights:
                    flight.check_deadlines(self.clock.now_ns(), self._timeout_ns, self._stall_ns)
                if number % _WATCHED_A_TURN == 0:
                    await asyncio.sleep(0)
