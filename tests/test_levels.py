"""The levels of a run: their order, when each ends, and how long all of them take."""

from __future__ import annotations

from typing import Any

import pytest

from breakeven.levels import Plan, duration, plan_levels, planned_seconds, stop_rule
from breakeven.load.trace import TraceRequest
from breakeven.options import BenchOptions

TRACE = [TraceRequest(0.0, 10, 5), TraceRequest(10.0, 10, 90), TraceRequest(40.0, 10, 20)]


def options(**fields: Any) -> BenchOptions:
    return BenchOptions(**({"server_url": "http://x", "warmup": 0, "max_tokens": (100,)} | fields))


def planned(trace: list[TraceRequest] | None = None, /, **fields: Any) -> Plan:
    """With a server whose requests of 100 tokens take 2 s alone."""
    return planned_seconds(options(**fields), 1.0, 0.01, trace)


def test_each_sweep_runs_over_lengths_and_loads() -> None:
    found = plan_levels(options(concurrency=(1, 8), max_tokens=(64, 128), runs=2))
    assert [(p.index, p.run, p.max_tokens, p.name) for p in found] == [
        (index, run, length, name)
        for index, (run, length, name) in enumerate(
            (run, length, name) for run in (0, 1) for length in (64, 128) for name in ("C=1", "C=8")
        )
    ]


def test_rates_make_open_levels() -> None:
    found = plan_levels(options(rate=(0.5, 20), arrivals="gamma:2", max_in_flight=9, max_tokens=(64,), runs=2))
    assert [(p.mode, p.run, p.name) for p in found] == [
        ("open", run, name) for run in (0, 1) for name in ("0.5/s", "20/s")
    ]
    assert {(p.arrivals, p.max_in_flight, p.max_tokens) for p in found} == {("gamma:2", 9, 64)}


def test_a_trace_makes_one_level_a_run() -> None:
    found = plan_levels(options(trace="file", speed=10.0, runs=2), TRACE)
    assert [(p.mode, p.run, p.name, p.max_tokens) for p in found] == [
        ("trace", 0, "trace x10", 90),
        ("trace", 1, "trace x10", 90),
    ]


@pytest.mark.parametrize(
    ("given", "requests", "duration_s", "max_seconds", "precise"),
    [
        ({}, None, None, 240, True),
        ({"requests": 9}, 9, None, None, False),
        ({"duration_s": 9}, None, 9, None, False),
        ({"max_seconds": 9}, None, None, 9, True),
        ({"rate": (1,)}, 300, None, 240, False),
        ({"rate": (1,), "requests": 9}, 9, None, None, False),
        ({"rate": (1,), "duration_s": 9, "max_seconds": 5}, None, 9, 5, False),
        ({"trace": "file"}, None, None, None, False),
        ({"trace": "file", "requests": 2}, 2, None, None, False),
    ],
)
def test_when_a_level_ends(
    given: dict[str, Any], requests: int | None, duration_s: float | None, max_seconds: float | None, precise: bool
) -> None:
    found = stop_rule(options(watchdog_s=77, **given), budget_s=5.0)
    assert (found.requests, found.duration_s, found.max_seconds, found.precise) == (
        requests,
        duration_s,
        max_seconds,
        precise,
    )
    assert (found.watchdog_s, found.budget_s) == (77, 5.0)


def test_open_levels_take_as_long_as_their_requests_need_to_come() -> None:
    assert planned(rate=(0.5, 2), requests=40) == Plan(80 + 20 + 8 + 2.5, 80 + 20 + 8 + 2.5, 8 + 2.5)
    assert planned(rate=(2,)).least_s == 150 + 4 + 0.5
    assert planned(rate=(0.5,)).least_s == 240 + 4 + 2  # 300 requests would take 600 s
    assert planned(rate=(2,), duration_s=30).least_s == 30 + 4 + 0.5
    assert planned(rate=(2,), requests=40, max_seconds=10).least_s == 10 + 4 + 0.5


def test_a_trace_takes_as_long_as_it_says() -> None:
    assert planned(TRACE, trace="file") == Plan(40, 40, 0)
    assert planned(TRACE, trace="file", speed=10.0).least_s == 4
    assert planned(TRACE, trace="file", runs=3).least_s == 120
    assert planned(TRACE, trace="file", duration_s=15).least_s == 15
    assert planned(TRACE, trace="file", requests=2).least_s == 10
    assert planned(TRACE, trace="file", requests=99).least_s == 40


def test_closed_levels_take_as_long_as_their_rule() -> None:
    assert planned(concurrency=(1, 4), requests=8) == Plan(16 + 4 + 8, 16 + 4 + 8, 8)
    assert planned(concurrency=(1,)) == Plan(45 + 4, 240 + 4, 4)
    assert planned(concurrency=(1,), ramp=False, duration_s=10) == Plan(10, 10, 0)


def test_warm_up_is_part_of_it() -> None:
    assert planned(concurrency=(4,), requests=8, warmup=5).around_s == 4 + 4
    assert planned(rate=(2,), requests=8, warmup=5).around_s == 10 + 4 + 0.5


def test_a_budget_is_what_it_takes() -> None:
    assert planned(rate=(2,), budget_s=60) == Plan(60, 60, 4.5)


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0 s"), (45.4, "45 s"), (60, "1 min 00 s"), (200, "3 min 20 s"), (3900, "1 h 05 min")]
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_rare_request_is_waited_for() -> None:
    rare = planned_seconds(BenchOptions(rate=(0.01,), duration_s=3, warmup=0), 0.1, 0.01)
    assert rare.least_s >= 100
