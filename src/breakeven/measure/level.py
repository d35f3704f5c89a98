"""From a level's records to its numbers: one entry of summary.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from breakeven.measure.arrivals import ArrivalTable
from breakeven.measure.checks import Check, run_checks
from breakeven.measure.latency import latencies
from breakeven.measure.open_loop import OpenNumbers, open_numbers
from breakeven.measure.stats import Distribution
from breakeven.measure.throughput import mean_latency_ns, window_of, window_throughput
from breakeven.records import LevelRecord, RequestRecord

__all__ = ["LevelSummary", "Throughput", "summarize_level"]


class Throughput(Struct, frozen=True, kw_only=True):
    """Tokens a second: inside the window with its 95 % interval, and over the whole level; `window_s` None if none."""

    value: float
    ci95: tuple[float, float] | None
    whole_run: float
    window_s: float | None


class LevelSummary(Struct, frozen=True, kw_only=True):
    """One level in numbers. Latencies are of requests sent inside the window; `requests` counts those.

    `output_tokens` counts all requests after warm-up. `engine` and `spec` are None where the engine tells nothing,
    `open_loop` in a closed loop.
    """

    load: dict[str, Any]
    name: str
    run: int
    requests: dict[str, Any]
    output_tokens: int
    output_throughput: Throughput
    per_request_throughput: Distribution
    decode_rate: float | None
    ttft_ms: Distribution
    tpot_ms: Distribution
    itl_ms: Distribution
    icl_ms: Distribution
    e2e_ms: Distribution
    in_flight: dict[str, float]
    open_loop: OpenNumbers | None
    engine: dict[str, float | None] | None
    spec: dict[str, Any] | None
    client: dict[str, Any]
    checks: list[Check]
    ended_by: str

    @property
    def rate(self) -> float:
        """Output tokens a second; 0 where no request ended well, whatever the tokens before the failures."""
        return self.output_throughput.value if self.requests["ok"] else 0.0


def summarize_level(level: LevelRecord, records: Iterable[RequestRecord], *, shared_cores: int | None) -> LevelSummary:
    """The numbers of one level.

    Args:
        level: what is known of the level as a whole.
        records: its requests, in any order; warm-up is left out here.
        shared_cores: how many cores client and server share; None where the server runs elsewhere.
    """
    # A fixed order: sums of floats differ in the last digit with their order, and a summary must come out the same
    # from memory and from disk.
    after_warmup = sorted((record for record in records if record.phase != "warmup"), key=lambda record: record.id)
    measured = [record for record in after_warmup if record.phase == "measured"]
    well = [record for record in measured if record.outcome == "ok"]
    numbers = latencies(well)
    table = ArrivalTable.of(after_warmup)
    outcomes = Counter(record.outcome for record in measured)
    span = _span(level, after_warmup)
    in_flight, engine = _in_flight(after_warmup, *span), _engine(level)
    is_open = level.plan.mode != "closed"
    checks = run_checks(
        level, after_warmup, table, in_flight=in_flight["mean"], engine=engine, shared_cores=shared_cores
    )
    return LevelSummary(
        load=level.plan.load,
        name=level.plan.name,
        run=level.plan.run,
        requests={
            "ok": outcomes["ok"],
            "failed": sum(outcomes.values()) - outcomes["ok"] - outcomes["cancelled"],
            "by_outcome": dict(sorted(outcomes.items())),
            "reconnects": sum(record.reconnects for record in measured),
            "retries": sum(record.retries for record in measured),
        },
        output_tokens=sum(record.output_tokens for record in after_warmup),
        output_throughput=_throughput(level, after_warmup, table),
        per_request_throughput=numbers.per_request_throughput,
        decode_rate=numbers.decode_rate,
        ttft_ms=numbers.ttft_ms,
        tpot_ms=numbers.tpot_ms,
        itl_ms=numbers.itl_ms,
        icl_ms=numbers.icl_ms,
        e2e_ms=numbers.e2e_ms,
        in_flight=in_flight,
        open_loop=open_numbers(after_warmup, window_of(level), level.plan.rate) if is_open else None,
        engine=engine,
        spec=_spec(level),
        client={
            "cpu_us_per_chunk": level.client.cpu_s * 1e6 / level.client.chunks if level.client.chunks else None,
            "lag_ms": level.client.lag_ms,
            "saturated": any(check.name == "client" and not check.ok for check in checks),
        },
        checks=checks,
        ended_by=level.ended_by,
    )


def _span(level: LevelRecord, records: Sequence[RequestRecord]) -> tuple[int, int]:
    """The window, or where there is none the time from the first request's start to the last one's end."""
    if window := window_of(level):
        return window
    started = [record.sent_ns for record in records if record.sent_ns is not None]
    ended = [record.end_ns for record in records if record.end_ns is not None]
    return (min(started), max(ended)) if started and ended else (level.started_ns, level.ended_ns)


def _throughput(level: LevelRecord, records: Sequence[RequestRecord], table: ArrivalTable) -> Throughput:
    whole = _whole_run(records)
    window = window_of(level)
    if window is None:
        return Throughput(value=whole, ci95=None, whole_run=whole, window_s=None)
    opened_ns, closed_ns = window
    value, interval = window_throughput(table, opened_ns, closed_ns, mean_latency_ns(records))
    return Throughput(
        value=value,
        ci95=(interval.low, interval.high) if interval else None,
        whole_run=whole,
        window_s=(closed_ns - opened_ns) / 1e9,
    )


def _whole_run(records: Sequence[RequestRecord]) -> float:
    sent = [record.sent_ns for record in records if record.sent_ns is not None]
    ends = [record.end_ns for record in records if record.end_ns is not None]
    tokens = sum(record.output_tokens for record in records)
    return tokens / ((max(ends) - min(sent)) / 1e9) if sent and ends and max(ends) > min(sent) else 0.0


def _in_flight(records: Sequence[RequestRecord], start_ns: int, stop_ns: int) -> dict[str, float]:
    alive = [(r.sent_ns, r.end_ns) for r in records if r.sent_ns is not None and r.end_ns is not None]
    if not alive or stop_ns <= start_ns:
        return {"mean": 0.0, "max": 0}
    spans = np.clip(np.array(alive, dtype=np.int64), start_ns, stop_ns)
    mean = float((spans[:, 1] - spans[:, 0]).sum() / (stop_ns - start_ns))
    # Ends sort before starts at the same moment: a slot refilled is not two requests.
    moments = np.concatenate([spans[:, 1], spans[:, 0]])
    steps = np.repeat([-1, 1], len(spans))
    running = np.cumsum(steps[np.argsort(moments, kind="stable")])
    return {"mean": mean, "max": int(running.max(initial=0))}


def _engine(level: LevelRecord) -> dict[str, float | None] | None:
    if not level.samples and "preemptions" not in level.counters:
        return None

    def mean(name: str) -> float | None:
        values = [value for sample in level.samples if (value := getattr(sample, name)) is not None]
        return sum(values) / len(values) if values else None

    preemptions = level.counters.get("preemptions")
    return {name: mean(name) for name in ("running", "waiting", "kv_use")} | {"preemptions": preemptions}


def _spec(level: LevelRecord) -> dict[str, Any] | None:
    if level.spec is None:
        return None
    positions = list(level.spec["per_position"])
    while positions and not positions[-1]:  # llama.cpp shows 48 of them, however short its drafts
        positions.pop()
    return {
        "acceptance_length": level.spec["acceptance_length"],
        "acceptance_rate": level.spec["acceptance_rate"],
        "per_position": positions or None,
    }
