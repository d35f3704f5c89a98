"""This machine's ceiling: how many chunks a second our own client takes before its loop saturates.

A null server on loopback sends chunks at a known pace, and the client's CPU time per chunk says how many fill a core.
The pace matters. Reading one stream at 100 chunks a second costs ten times as much per chunk as reading at full
speed, since each wakes the loop; and from about 50,000 a second reads bring two chunks at once, which halves the cost
per chunk but not per read. So the cost is taken at a pace where the loop is busy and still reads chunks one by one.
"""

from __future__ import annotations

import asyncio
import gc
import math
import resource
import time
from collections.abc import Sequence
from typing import NamedTuple

import uvloop
from msgspec import Struct

from breakeven.engines.null import null_server
from breakeven.errors import BreakevenError, EngineError
from breakeven.load.client import Client
from breakeven.load.cost import CostMeter
from breakeven.load.dialect import COUNTING, dialect_for
from breakeven.load.plan import PlannedRequest
from breakeven.load.prompts import Prompt
from breakeven.load.target import Target
from breakeven.measure.checks import BUSY_CORE
from breakeven.records import LevelPlan, RequestRecord

__all__ = ["PACE_PER_S", "SPARE_DESCRIPTORS", "Ceiling", "measure_ceiling", "quick_ceiling"]

#: Descriptors that the program needs beside one per request in flight.
SPARE_DESCRIPTORS = 64
#: Chunks a second over all streams: about half of what a core of 2023 takes, and of what the null server can send.
PACE_PER_S = 20_000
#: Tokens of a request, a chunk each: what a request costs besides its chunks is spread over so many.
_TOKENS = 128
#: Streams that start in one turn of the loop, as in a closed loop.
_STARTS_A_TURN = 8
#: What is not measured: the first calls of everything.
_WARM_UP_S = 0.1
#: The version that each run does: streams and seconds.
_QUICK = (100, 0.3)
#: A null server starts in a quarter of a second; a run does not wait longer than this for one.
_QUICK_START_S = 3.0


class Ceiling(Struct, frozen=True, kw_only=True):
    """What the client can take with so many streams, and the load under which that was found.

    `chunks_per_s` is what would fill `measure.checks.BUSY_CORE` of one core at `cpu_us_per_chunk`, which is that of
    reading and of parsing. `received_per_s` is what came, `reads_per_s` in how many reads; `offered_per_s` is what the
    null server was to send (None: as much as it could). `lag_ms` is the lateness of the loop under that load.
    """

    streams: int
    chunks_per_s: float
    cpu_us_per_chunk: float
    offered_per_s: float | None
    received_per_s: float
    reads_per_s: float
    lag_ms: dict[str, float]
    clock_steps: int


def measure_ceiling(
    streams: int, seconds: float, *, pace_per_s: float | None = PACE_PER_S, start_timeout_s: float = 10.0
) -> Ceiling:
    """Starts a null server, takes its chunks for a time, and stops it. Not for use inside an event loop.

    Args:
        streams: requests in flight; each takes a file descriptor.
        seconds: how long is measured; starting and stopping takes about 0.5 s more, a thousand streams a second.
        pace_per_s: chunks a second over all streams; None for as many as the server can send.
        start_timeout_s: how long the null server may take to start.

    Raises:
        EngineError: the null server did not start, or nothing came from it.
        TargetError: it can't be reached.
        OSError: no process or descriptor is left for it.
    """
    step_us = 1.0 if pace_per_s is None else streams / pace_per_s * 1e6
    with null_server("--step-us", f"{step_us:.3f}", timeout_s=start_timeout_s) as server:
        gc.disable()  # as in a run, where a collection would hold up the loop
        try:
            load = uvloop.run(_load(server.url, streams, seconds))
        finally:
            gc.enable()
    if not load.chunks:
        raise EngineError(f"the null server sent nothing to {streams} streams within {seconds:g} s")
    cost_us = load.cpu_s * 1e6 / load.chunks
    return Ceiling(
        streams=streams,
        chunks_per_s=BUSY_CORE * 1e6 / cost_us,
        cpu_us_per_chunk=cost_us,
        offered_per_s=pace_per_s,
        received_per_s=load.chunks / load.seconds,
        reads_per_s=load.reads / load.seconds,
        lag_ms=load.lag_ms,
        clock_steps=load.clock_steps,
    )


def quick_ceiling(most_streams: int) -> Ceiling | str:
    """The short version for each run, under a second: the ceiling, or why there is none. Never fails.

    It has no more than `most_streams` requests in flight, nor more than the soft limit on open files leaves.
    """
    streams, seconds = max(1, min(_QUICK[0], most_streams)), _QUICK[1]
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        streams = min(streams, max(1, soft - SPARE_DESCRIPTORS))
    try:
        return measure_ceiling(streams, seconds, start_timeout_s=_QUICK_START_S)
    except (BreakevenError, OSError) as error:
        return str(error)


class _Load(NamedTuple):
    seconds: float
    chunks: int
    reads: int
    cpu_s: float
    lag_ms: dict[str, float]
    clock_steps: int


async def _load(url: str, streams: int, seconds: float) -> _Load:
    records: list[RequestRecord] = []
    meter, client = CostMeter(), _client(url, records)
    async with client:
        await client.connect(streams)
        slots = [asyncio.create_task(_slot(client, streams, index)) for index in range(streams)]
        await asyncio.sleep(_WARM_UP_S)
        await client.caught_up()
        async with meter:
            began_ns = time.perf_counter_ns()
            await asyncio.sleep(seconds)
            ended_ns = time.perf_counter_ns()
            await _cancel(slots)
            await client.settled()  # parsing is a part of the cost
    _check(records)
    chunks, reads = _count(records, began_ns - client.origin_ns, ended_ns - client.origin_ns)
    cost = meter.cost(chunks, client.kernel_clock.steps)
    return _Load((ended_ns - began_ns) / 1e9, chunks, reads, cost.cpu_s, cost.lag_ms, cost.clock_steps)


def _client(url: str, records: list[RequestRecord]) -> Client:
    return Client(
        Target(url, {}),
        dialect_for("chat", COUNTING["continuous"]),
        "null",
        records.append,
        sampling={},
        extra_body={},
        timeout_s=60.0,
        stall_timeout_s=60.0,
    )


async def _slot(client: Client, streams: int, index: int) -> None:
    """Sends one request after the other. The first are of every length, so that ends are spread as under real load."""
    await _turns(index // _STARTS_A_TURN)
    level = LevelPlan(index=0, run=0, concurrency=streams, max_tokens=_TOKENS)
    prompt = Prompt(id="null", text="Say what comes to mind.")
    tokens = math.ceil(_TOKENS * (index + 1) / streams)
    while await client.send(PlannedRequest(level, "measured", prompt, tokens)):
        tokens = _TOKENS


async def _turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _check(records: Sequence[RequestRecord]) -> None:
    failed = [record for record in records if record.outcome not in ("ok", "cancelled")]
    if failed:  # want of descriptors, mostly
        raise EngineError(f"{len(failed)} requests to the null server failed: {failed[0].error}")


def _count(records: Sequence[RequestRecord], began_ns: int, ended_ns: int) -> tuple[int, int]:
    """Chunks and reads that came within a time. The null server's chunks have one token each."""
    came = [
        tokens
        for record in records
        if record.sent_ns is not None
        for after_ns, tokens in record.arrivals
        if began_ns <= record.sent_ns + after_ns < ended_ns
    ]
    return sum(came), len(came)
