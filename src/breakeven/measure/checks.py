"""The checks that every level carries. A failed one is printed beside the number that it taints."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from msgspec import Struct

from breakeven.measure.arrivals import ArrivalTable
from breakeven.measure.open_loop import backlog, open_numbers
from breakeven.measure.throughput import batch_rates, window_of
from breakeven.records import LevelRecord, RequestRecord

__all__ = ["Check", "run_checks"]

#: The share of a core from which the loop's reads queue behind its own work.
BUSY_CORE = 0.8
#: A loop this late at its 99th percentile no longer reads chunks one by one.
LATE_MS = 10.0
#: The share of the client's ceiling above which a level is marked: the ceiling was found in a moment, with one prompt
#: and no bursts, so half of it is kept in hand.
NEAR_CEILING = 0.5
#: On a machine shared with the server, the share of all cores that the client may take before it shows.
SHARED_CPU = 0.05


class Check(Struct, frozen=True):
    """What was looked at, whether it was all right, and the finding in words."""

    name: str
    ok: bool
    detail: str


def run_checks(
    level: LevelRecord,
    records: Sequence[RequestRecord],
    table: ArrivalTable,
    *,
    in_flight: float,
    engine: Mapping[str, float | None] | None,
    shared_cores: int | None,
) -> list[Check]:
    """All checks that can be done on a level.

    Args:
        level: what is known of the level as a whole.
        records, table: its requests after warm-up, and their arrivals.
        in_flight: how many of them were in flight on average.
        engine: the engine's gauges and preemptions over the window.
        shared_cores: how many cores client and server share; None where the server runs elsewhere.
    """
    engine = engine or {}
    measured = [record for record in records if record.phase == "measured"]
    well = [record for record in measured if record.outcome == "ok"]
    return [
        _cut_short(level),
        _failures(records),
        *_load(level, records, in_flight),
        *(_engine_in_flight(in_flight, engine) if window_of(level) else ()),
        *_steady(level, any_measured=bool(measured)),
        *_drift(level, table),
        _client(level),
        *_shared_cpu(level, shared_cores),
        *_counts(well),
        *_degenerate(well),
        *_first_arrival(well),
        *_cache(well),
        *_preemptions(engine),
        _clock(level),
    ]


def _cut_short(level: LevelRecord) -> Check:
    ok = level.ended_by not in ("interrupted", "killed", "failures", "watchdog", "lost")
    return Check("cut_short", ok, f"measuring was ended by {level.ended_by}")


def _failures(records: Sequence[RequestRecord]) -> Check:
    failed = Counter(str(record.outcome) for record in records if record.outcome not in ("ok", "cancelled"))
    if not failed:
        return Check("failures", True, "no request failed")
    error = next(record.error for record in records if record.outcome == failed.most_common(1)[0][0])
    return Check("failures", False, f"{_counted(failed)} of {len(records)} requests after warm-up; e.g. {error}")


def _load(level: LevelRecord, records: Sequence[RequestRecord], in_flight: float) -> Iterator[Check]:
    """Whether the load was what the level says."""
    plan, window = level.plan, window_of(level)
    if plan.mode == "closed":
        ok = in_flight >= 0.98 * plan.concurrency
        yield Check("in_flight", ok, f"{in_flight:.1f} of {plan.concurrency} on average")
        return
    late = [(r.sent_ns - r.due_ns) / 1e6 for r in records if r.sent_ns is not None and r.phase == "measured"]
    if late:
        p99 = float(np.percentile(late, 99))
        yield Check("late", p99 <= LATE_MS, f"requests were sent {p99:.1f} ms after they were due, at p99")
    if window and plan.mode == "open":
        found, numbers = backlog(records, window, plan.rate), open_numbers(records, window, plan.rate)
        yield Check(
            "backlog",
            not found.grows,
            f"from {found.first} to {found.last} requests due and not ended; {_rate(numbers.offered_rate)} came and "
            f"{_rate(numbers.ended_rate)} ended a second",
        )


def _engine_in_flight(ours: float, engine: Mapping[str, float | None]) -> Iterator[Check]:
    running, waiting = engine.get("running"), engine.get("waiting")
    if running is None:
        return
    seen = running + (waiting or 0.0)
    # Gauges are samples of a number that moves by one at each end and start.
    ok = abs(seen - ours) <= max(1.0, 0.1 * ours)
    yield Check("engine_in_flight", ok, f"the engine counts {seen:.1f} running and waiting, the client {ours:.1f}")


def _steady(level: LevelRecord, *, any_measured: bool) -> Iterator[Check]:
    if level.plan.mode == "trace":
        return
    is_open = level.plan.mode == "open"
    filled = "the requests of the start had ended" if is_open else "every slot had ended its ramp request"
    if level.opened_ns is None and any_measured:
        yield Check("steady", False, "no window: every request counts, those of the start and of the end too")
    elif level.opened_ns is None:
        yield Check("steady", False, f"no window: measuring ended before {filled}")
    elif window_of(level) is None:
        yield Check("steady", False, "no window: it closed as soon as it had opened")
    elif level.ramp_limited:
        yield Check("steady", False, f"the window opened before {filled}")
    else:
        yield Check("steady", True, f"{filled} when the window opened")


def _drift(level: LevelRecord, table: ArrivalTable) -> Iterator[Check]:
    # An open loop's tokens come as its requests do: by chance more in one half than in the other.
    window = window_of(level) if level.plan.mode == "closed" else None
    rates = batch_rates(table, *window) if window else np.zeros(2)
    first, second = np.split(rates, 2)
    if not rates.any():
        return
    if not first.any():
        yield Check("drift", False, "no token in the window's first half")
        return
    change = float(second.mean() / first.mean() - 1)
    # Both: large enough to matter, and beyond twice the standard error of the difference of three batches each.
    noise = 2 * float(np.sqrt((first.var(ddof=1) + second.var(ddof=1)) / 3)) / float(first.mean())
    ok = abs(change) <= max(0.05, noise)
    yield Check("drift", ok, f"{change:+.1%} tokens from the window's first half to its second")


def _client(level: LevelRecord) -> Check:
    cost = level.client
    if not cost.wall_s:
        return Check("client", True, "not known: the level's record is missing")
    busy, lag = cost.cpu_s / cost.wall_s, cost.lag_ms.get("p99", 0.0)
    rate, ceiling = cost.chunks / cost.wall_s, cost.ceiling_chunks_per_s or math.inf
    ok = busy <= BUSY_CORE and lag <= LATE_MS and rate <= NEAR_CEILING * ceiling
    found = f"the client took {busy:.0%} of a core, its loop was {lag:.1f} ms late at p99"
    if ceiling < math.inf:
        found += f"; {rate:,.0f} chunks/s came, of {ceiling:,.0f} that it takes on this machine"
    return Check("client", ok, found)


def _shared_cpu(level: LevelRecord, cores: int | None) -> Iterator[Check]:
    cost = level.client
    if cores is None or not cost.wall_s:
        return
    share = cost.cpu_s / cost.wall_s / cores
    yield Check("shared_cpu", share <= SHARED_CPU, f"the client took {share:.1%} of the machine it shares")


def _counts(well: Sequence[RequestRecord]) -> Iterator[Check]:
    if not well:
        return
    unknown = sum(not record.total_known for record in well)
    yield Check("token_total", not unknown, f"{unknown} of {len(well)} answers without any count from the server")
    guessed = sum(record.tokens_from == "estimated" for record in well)
    yield Check(
        "token_times",
        not guessed,
        f"{guessed} of {len(well)} answers without counts per chunk: spread by length of text",
    )
    # One token may have a count and no chunk: the end of sequence.
    off = sum(
        abs(sum(tokens for _, tokens in r.arrivals) - r.output_tokens) > 1
        or (r.total_known and r.chunks > r.output_tokens)  # a chunk of output is a token at least
        for r in well
    )
    yield Check("token_counts", not off, f"{off} of {len(well)} answers where usage contradicts the chunks")


def _degenerate(well: Sequence[RequestRecord]) -> Iterator[Check]:
    looping = sum(record.repetition > 0.5 for record in well)
    if well:
        ok = looping <= 0.1 * len(well)
        yield Check("degenerate", ok, f"{looping} of {len(well)} answers end in a loop")


def _first_arrival(well: Sequence[RequestRecord]) -> Iterator[Check]:
    firsts = [r.arrivals[0][1] for r in well if r.arrivals]
    if not firsts:
        return
    laters = [statistics.median(tokens for _, tokens in r.arrivals[1:]) for r in well if len(r.arrivals) > 1]
    first, later = statistics.median(firsts), statistics.median(laters) if laters else 0
    ok = first <= max(8, 4 * later)
    yield Check("first_arrival", ok, f"{first:g} tokens at first, {later:g} in later arrivals (medians)")


def _cache(well: Sequence[RequestRecord]) -> Iterator[Check]:
    told = [r for r in well if r.cached_tokens is not None and r.input_tokens]
    repeated = sum(count > 1 for count in Counter(record.prompt for record in well).values())
    if told:
        share = sum(r.cached_tokens or 0 for r in told) / sum(r.input_tokens or 0 for r in told)
        yield Check(
            "cache",
            share <= 0.2,
            f"{share:.0%} of input tokens came from a prefix cache",
        )
    elif well:
        yield Check("cache", not repeated, f"{repeated} prompts were sent more than once")


def _preemptions(engine: Mapping[str, float | None]) -> Iterator[Check]:
    count = engine.get("preemptions")
    if count is not None:
        yield Check("preemptions", count <= 0, f"{count:g} requests were put back by the engine")


def _clock(level: LevelRecord) -> Check:
    steps = level.client.clock_steps
    return Check("clock", not steps, f"wall time was stepped {steps} times" if steps else "wall time was not stepped")


def _rate(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _counted(outcomes: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in outcomes.most_common())
