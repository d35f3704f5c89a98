"""The null server's step engine: a batch, a queue before it and a timetable that it keeps.

A step lasts `StepTable.step_us(B)` microseconds, B being the number of requests that decode; at its end each
of them gets one chunk. Steps follow an absolute schedule: the work of a late step shortens the wait for the
next one. All times are `time.perf_counter_ns`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from time import perf_counter_ns
from typing import NamedTuple

from breakeven.engines.null.api import Ask, Wire
from breakeven.engines.null.http1 import STREAM_HEAD, Conn, plain

__all__ = ["Job", "StepEngine", "StepRow", "StepTable", "Timetable", "TruthRow"]


class TruthRow(NamedTuple):
    """One request as the server saw it, `id` being the one in its answer. A time is 0 where nothing was sent.

    `first_ns` and `last_ns` are read right after the send of the first and the last chunk that carries
    tokens (of the whole answer, if it is no stream). `finished` is false where the client left early.
    """

    id: str
    arrival_ns: int
    first_ns: int
    last_ns: int
    tokens: int
    chunks: int
    finished: bool


class StepRow(NamedTuple):
    """One step: when the timetable had it end, when its last chunk was sent, how many requests it served."""

    due_ns: int
    sent_ns: int
    batch: int


class StepTable:
    """The length of a step by the number of decoding requests: linear between and beyond its points."""

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        self._points = tuple(points)
        self._loads = [load for load, _ in points]

    def step_us(self, batch: int) -> float:
        """The length of a step of `batch` requests, in microseconds; at least 1."""
        if len(self._points) == 1:
            return self._points[0][1]
        right = min(max(bisect_left(self._loads, batch), 1), len(self._points) - 1)
        (b0, t0), (b1, t1) = self._points[right - 1 : right + 1]
        return max(t0 + (t1 - t0) * (batch - b0) / (b1 - b0), 1.0)


@dataclass(frozen=True, slots=True)
class Timetable:
    """What the engine keeps to.

    `tokens` are those of a request's chunks, cycled; `time_scale` multiplies every duration.
    """

    step_table: StepTable
    tokens: tuple[int, ...]
    prefill_us: float
    max_batch: int
    time_scale: float

    @property
    def prefill_ns(self) -> int:
        """From a request's arrival until it may join the batch."""
        return int(self.prefill_us * self.time_scale * 1000)

    def step_ns(self, batch: int) -> int:
        """The length of a step of `batch` requests."""
        return int(self.step_table.step_us(batch) * self.time_scale * 1000)


@dataclass(eq=False, slots=True)
class Job:
    """One completion request in the engine; `live` until it ends or its client leaves."""

    conn: Conn
    ask: Ask
    wire: Wire
    arrival_ns: int
    ready_ns: int
    first_ns: int = 0
    last_ns: int = 0
    tokens: int = 0
    chunks: int = 0
    live: bool = True

    def truth(self) -> TruthRow:
        """What the server's record says of it."""
        finished = self.tokens == self.ask.max_tokens
        times = (self.arrival_ns, self.first_ns, self.last_ns)
        return TruthRow(self.wire.ident, *times, self.tokens, self.chunks, finished)


class StepEngine:
    """The requests that decode (`batch`), those that wait, and the record of both.

    When `due_ns` has come, the caller works through the step boundary: `begin`, `deliver` to every live
    request that it gave, `boundary`.
    """

    def __init__(self, timetable: Timetable) -> None:
        self.timetable = timetable
        self._cycle = timetable.tokens
        self._due_ns = 0
        self.batch: list[Job] = []
        self.waiting: deque[Job] = deque()
        self.truth: list[TruthRow] = []
        self.steps: list[StepRow] = []
        self.slips = 0  # how often the schedule was given up
        self.chunks_of = [0] * (max(self._cycle) + 1)  # how many chunks ever carried so many tokens

    @property
    def due_ns(self) -> int | None:
        """When the running step ends or, with nothing decoding, the next request is ready; None if idle."""
        if self.batch:
            return self._due_ns
        return self.waiting[0].ready_ns if self.waiting else None

    def submit(self, conn: Conn, ask: Ask, wire: Wire, arrival_ns: int) -> Job:
        """Queue a request that arrived then, in the order of arrivals, not of reads."""
        job = Job(conn, ask, wire, arrival_ns, arrival_ns + self.timetable.prefill_ns)
        insort(self.waiting, job, key=attrgetter("arrival_ns"))
        return job

    def drop(self, job: Job) -> None:
        """Forget a request whose client has left; if it decodes, its step still ends when it was to end."""
        job.live = False
        self.truth.append(job.truth())
        if job in self.waiting:
            self.waiting.remove(job)

    def begin(self, due_ns: int) -> list[Job]:
        """Begin the work of the step boundary due then; gives the requests that decode.

        A boundary that is late by less than a step keeps its place in the schedule. A later one starts the
        schedule again from now, and counts as a slip.
        """
        late_ns = perf_counter_ns() - due_ns
        if self.batch and late_ns > self.timetable.step_ns(len(self.batch)):
            self.slips += 1
            due_ns += late_ns
        self._due_ns = due_ns
        return self.batch

    def deliver(self, job: Job) -> bool:
        """Send a request its next chunk; True if that was the last. This is the hot path."""
        ask = job.ask
        tokens = min(self._cycle[job.chunks % len(self._cycle)], ask.max_tokens - job.tokens)
        job.tokens += tokens
        job.chunks += 1
        self.chunks_of[tokens] += 1
        if ask.stream:
            job.conn.write(job.wire.chunk(tokens, job.tokens))
            if job.chunks == 1:
                job.first_ns = perf_counter_ns()
        if job.tokens < ask.max_tokens:
            return False
        self._finish(job)
        return True

    def boundary(self) -> None:
        """End the work of a step boundary: take in whoever is ready and set when the next step ends.

        Ready means at the time that the timetable gives the boundary, not when its work was done: so who
        decodes together does not depend on how busy the machine is.
        """
        if self.batch:
            self.steps.append(StepRow(self._due_ns, perf_counter_ns(), len(self.batch)))
        self.batch = [job for job in self.batch if job.live]
        limit = self.timetable.max_batch
        while self.waiting and len(self.batch) < limit and self.waiting[0].ready_ns <= self._due_ns:
            self._admit(self.waiting.popleft())
        self._due_ns += self.timetable.step_ns(len(self.batch))

    def _admit(self, job: Job) -> None:
        self.batch.append(job)
        if job.ask.stream:
            job.conn.write(STREAM_HEAD + job.wire.opening())

    def _finish(self, job: Job) -> None:
        if job.ask.stream:
            job.last_ns = perf_counter_ns()
            job.conn.write(job.wire.closing(job.tokens))
        else:
            job.conn.write(plain(job.wire.answer(job.tokens)))
            job.first_ns = job.last_ns = perf_counter_ns()
            job.chunks = 1  # all its steps reached the client as one
        job.live = False
        self.truth.append(job.truth())
