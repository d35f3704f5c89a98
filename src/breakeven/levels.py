"""The levels of a run: in which order they come, when each ends, and how long all of them take."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import structs

from breakeven.load.trace import TraceRequest
from breakeven.load.window import FIRST_LOOK_S, StopRule
from breakeven.options import BenchOptions
from breakeven.records import LevelPlan

__all__ = ["Plan", "duration", "plan_levels", "planned_seconds", "stop_rule"]

#: What a window may take where nobody said.
DEFAULT_MAX_SECONDS = 240.0
#: An open loop's throughput is its input while the server keeps up, so that its precision says nothing: by default a
#: level sends what a 99th percentile needs.
DEFAULT_OPEN_REQUESTS = 300


def plan_levels(options: BenchOptions, trace: list[TraceRequest] | None = None) -> list[LevelPlan]:
    """All levels in the order in which they run: each sweep over lengths and loads, `runs` times."""
    bound = options.max_in_flight
    if trace is not None:
        longest = max(request.output_tokens for request in trace)
        loads = [LevelPlan(index=0, run=0, mode="trace", speed=options.speed, max_in_flight=bound, max_tokens=longest)]
    elif options.rate:
        loads = [
            LevelPlan(
                index=0, run=0, mode="open", rate=rate, arrivals=options.arrivals, max_in_flight=bound, max_tokens=n
            )
            for n in options.max_tokens
            for rate in options.rate
        ]
    else:
        loads = [
            LevelPlan(index=0, run=0, concurrency=c, max_tokens=n)
            for n in options.max_tokens
            for c in options.concurrency
        ]
    return [
        structs.replace(load, index=run * len(loads) + i, run=run)
        for run in range(options.runs)
        for i, load in enumerate(loads)
    ]


def stop_rule(options: BenchOptions, budget_s: float | None = None) -> StopRule:
    """When a level's window closes. Only a window that nothing else bounds is capped without being asked."""
    unbounded = options.requests is None and options.duration_s is None and options.trace is None
    is_open = bool(options.rate)
    return StopRule(
        requests=DEFAULT_OPEN_REQUESTS if unbounded and is_open else options.requests,
        duration_s=options.duration_s,
        max_seconds=options.max_seconds or (DEFAULT_MAX_SECONDS if unbounded else None),
        precise=unbounded and not is_open,
        budget_s=budget_s,
        watchdog_s=options.watchdog_s,
    )


class Plan(NamedTuple):
    """How long a run takes, in seconds: at least, at most, and of that what is around the windows."""

    least_s: float
    most_s: float
    around_s: float


def planned_seconds(
    options: BenchOptions, first_s: float, per_token_s: float, trace: list[TraceRequest] | None = None
) -> Plan:
    """How long a run takes, from the time one request takes alone.

    Under load requests take longer, by how much is what the run is to find out: `most_s` is a guess too.
    """
    stop = stop_rule(options)
    least = most = around = 0.0
    for level in plan_levels(options, trace):
        alone_s = first_s + per_token_s * level.max_tokens
        ramp = options.ramp and level.mode != "trace"
        around += alone_s * (2 * ramp + -(-options.warmup // _warm_up_width(level)))
        if level.mode == "open":
            around += min(1 / level.rate, stop.ramp_limit_s)  # until the first is due
        shortest, longest = _window_seconds(level, stop, alone_s, trace)
        least, most = least + shortest, most + longest
    if options.budget_s is not None:
        return Plan(options.budget_s, options.budget_s, around)
    return Plan(least + around, most + around, around)


def _warm_up_width(level: LevelPlan) -> int:
    return level.concurrency or 1


def _window_seconds(
    level: LevelPlan, stop: StopRule, alone_s: float, trace: list[TraceRequest] | None
) -> tuple[float, float]:
    """How long a level's window is, at least and at most."""
    most = min(stop.duration_s or float("inf"), stop.max_seconds or float("inf"))
    if level.mode == "trace":
        sent = (trace or [])[: stop.requests]
        span_s = min(sent[-1].at_s / level.speed, most)
        return span_s, span_s
    if stop.requests is not None:
        gap_s = alone_s / level.concurrency if level.mode == "closed" else 1 / level.rate
        span_s = min(stop.requests * gap_s, most)
        return span_s, span_s
    return min(FIRST_LOOK_S, most) if stop.precise else most, most


def duration(seconds: float) -> str:
    """Seconds for a person: 45 s, 3 min 20 s, 1 h 05 min."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"
