"""Every check, once where it passes and once where it fails."""

from __future__ import annotations

from typing import Any

import pytest

from breakeven.measure.checks import Check
from breakeven.measure.level import summarize_level
from breakeven.records import ClientCost, EngineSample, LevelRecord, RequestRecord
from tests.measure.handmade import S, level_record, request, steady_stream

#: Checks of every kind of load, and those that only a closed or an open loop has.
COMMON = {
    "cut_short",
    "failures",
    "engine_in_flight",
    "steady",
    "client",
    "shared_cpu",
    "token_total",
    "token_times",
    "token_counts",
    "degenerate",
    "first_arrival",
    "cache",
    "preemptions",
    "clock",
}
CLOSED = COMMON | {"in_flight", "drift"}
OPEN = COMMON | {"late", "backlog"}


def checks_of(level: LevelRecord, records: list[RequestRecord], *, shared_cores: int | None = None) -> dict[str, Check]:
    return {check.name: check for check in summarize_level(level, records, shared_cores=shared_cores).checks}


def check(name: str, level: LevelRecord, records: list[RequestRecord], *, shared_cores: int | None = None) -> Check:
    return checks_of(level, records, shared_cores=shared_cores)[name]


def gauges(running: float, waiting: float | None = None) -> list[EngineSample]:
    return [EngineSample(time_ns=S, running=running, waiting=waiting)]


def cost(**fields: Any) -> ClientCost:
    known: dict[str, Any] = {
        "cpu_s": 1.0,
        "wall_s": 60.0,
        "chunks": 100,
        "lag_ms": {"p50": 0.0, "p99": 0.5, "max": 1.0},
    }
    return ClientCost(**(known | fields))


def test_a_sound_level_passes_every_check_there_is() -> None:
    level = level_record(samples=gauges(1, 0), counters={"preemptions": 0.0})
    records = steady_stream(cached_tokens=0, input_tokens=100)
    found = checks_of(level, records, shared_cores=2)
    assert set(found) == CLOSED
    assert [check.name for check in found.values() if not check.ok] == []


def open_level(opened_s: float | None = 0.0, closed_s: float | None = 60.0, **fields: Any) -> LevelRecord:
    return level_record(opened_s, closed_s, **({"mode": "open", "rate": 0.5, "concurrency": 0} | fields))


def test_a_sound_open_level_passes_every_check_there_is() -> None:
    level = open_level(samples=gauges(1, 0), counters={"preemptions": 0.0})
    found = checks_of(level, steady_stream(cached_tokens=0, input_tokens=100), shared_cores=2)
    assert set(found) == OPEN
    assert [check.name for check in found.values() if not check.ok] == []
    assert "the requests of the start had ended" in found["steady"].detail


def test_a_trace_has_no_window_and_no_check_of_one() -> None:
    level = level_record(None, None, mode="trace", ended_by="trace", counters={"preemptions": 0.0})
    found = checks_of(level, steady_stream(cached_tokens=0, input_tokens=100), shared_cores=2)
    assert set(found) == OPEN - {"backlog", "steady", "engine_in_flight"}
    assert [check.name for check in found.values() if not check.ok] == []


def test_requests_that_went_out_late_were_another_load() -> None:
    records = steady_stream()
    for record in records[1:]:
        record.due_ns -= 9_000_000
    assert check("late", open_level(), records).ok
    records[0].due_ns -= 30_000_000
    records[0].phase = "drain"
    assert check("late", open_level(), records).ok
    records[1].due_ns -= 30_000_000
    found = check("late", open_level(), records)
    assert not found.ok
    assert found.detail.startswith("requests were sent 3")


def test_a_rate_that_the_server_cannot_hold_is_told_in_numbers() -> None:
    """Two come a second and one ends."""
    records = [request(i, [(1000 + 500 * i, 1)], sent_s=0.5 * i) for i in range(120)]
    found = check("backlog", open_level(rate=2.0), records)
    assert not found.ok
    assert found.detail == "from 1 to 60 requests due and not ended; 2 came and 0.983 ended a second"
    held = check("backlog", open_level(), steady_stream())
    assert held.ok
    assert held.detail == "from 1 to 0 requests due and not ended; 0.5 came and 0.483 ended a second"


def test_an_open_loop_that_never_opened_its_window_says_what_it_waited_for() -> None:
    found = check("steady", open_level(None, None), [request(0, [(10, 1)], phase="ramp")])
    assert found.detail == "no window: measuring ended before the requests of the start had ended"
    assert "backlog" not in checks_of(open_level(None, None), steady_stream())


def test_an_open_loops_tokens_may_come_unevenly() -> None:
    """They come as its requests do; only of a closed loop's they tell that the server changed."""
    assert not check("drift", level_record(), slowing(62.5)).ok
    assert "drift" not in checks_of(open_level(), slowing(62.5))


@pytest.mark.parametrize("ended_by", ["requests", "duration", "precision", "max_seconds", "budget", "trace"])
def test_measuring_that_came_to_its_end_is_whole(ended_by: str) -> None:
    assert check("cut_short", level_record(ended_by=ended_by), []).ok


@pytest.mark.parametrize("ended_by", ["interrupted", "killed", "failures", "watchdog"])
def test_measuring_that_was_stopped_is_cut_short(ended_by: str) -> None:
    found = check("cut_short", level_record(ended_by=ended_by), [])
    assert not found.ok
    assert ended_by in found.detail


def test_failures_in_any_phase_are_told_with_an_example() -> None:
    records = [
        request(0, [(10, 1)]),
        request(1, phase="ramp", outcome="http_error", error="HTTP 503: busy"),
        request(2, phase="drain", outcome="http_error", error="HTTP 503: busy"),
        request(3, outcome="timeout", error="no end within 5 s"),
        request(4, outcome="cancelled"),
    ]
    found = check("failures", level_record(), records)
    assert not found.ok
    assert found.detail == "2 http_error, 1 timeout of 5 requests after warm-up; e.g. HTTP 503: busy"
    assert check("failures", level_record(), [records[0], records[4]]).ok


def test_fewer_in_flight_than_asked_for() -> None:
    assert check("in_flight", level_record(), steady_stream()).ok
    assert not check("in_flight", level_record(concurrency=2), steady_stream()).ok
    assert check("in_flight", level_record(0, 61.2), steady_stream()).ok
    assert not check("in_flight", level_record(0, 61.3), steady_stream()).ok


def test_engine_that_counts_others() -> None:
    records = steady_stream(concurrency=20)
    assert check("engine_in_flight", level_record(samples=gauges(18, 2), concurrency=20), records).ok
    assert check("engine_in_flight", level_record(samples=gauges(18.5), concurrency=20), records).ok
    assert not check("engine_in_flight", level_record(samples=gauges(18, 7), concurrency=20), records).ok
    assert not check("engine_in_flight", level_record(samples=gauges(4), concurrency=20), records).ok
    assert "engine_in_flight" not in checks_of(level_record(concurrency=20), records)


def test_steady_needs_a_window_that_opened_after_the_ramp() -> None:
    records = steady_stream()
    ramp = [request(0, [(10, 1)], phase="ramp")]
    cases = {
        "every slot had ended": check("steady", level_record(), records),
        "every request counts": check("steady", level_record(None, None), records),
        "measuring ended before": check("steady", level_record(None, None), ramp),
        "closed as soon as it had opened": check("steady", level_record(3, 3), ramp),
        "opened before every slot": check("steady", level_record(ramp_limited=True), records),
    }
    assert [found.ok for found in cases.values()] == [True, False, False, False, False]
    for words, found in cases.items():
        assert words in found.detail


def slowing(step_after_ms: float) -> list[RequestRecord]:
    """A stream whose steps take 50 ms in the window's first half and another time in its second."""
    return [
        *steady_stream(seconds=30),
        *(
            request(100 + i, [((n + 1) * step_after_ms, 1) for n in range(40)], sent_s=30 + i * 0.04 * step_after_ms)
            for i in range(round(30 / (0.04 * step_after_ms)))
        ),
    ]


def test_drift_between_the_halves() -> None:
    assert check("drift", level_record(), slowing(51)).ok
    found = check("drift", level_record(), slowing(62.5))
    assert not found.ok
    assert found.detail.startswith("-20")


def test_a_first_half_without_a_token_is_drift() -> None:
    late = steady_stream(seconds=20)
    for record in late:
        assert record.sent_ns is not None
        record.sent_ns += 40 * S
    assert not check("drift", level_record(), late).ok


def test_nothing_drifts_where_nothing_came_or_there_is_no_window() -> None:
    assert "drift" not in checks_of(level_record(), [])
    assert "drift" not in checks_of(level_record(None, None), steady_stream())


@pytest.mark.parametrize(
    ("fields", "ok"),
    [
        ({}, True),
        ({"cpu_s": 48.0}, True),
        ({"cpu_s": 49.0}, False),
        ({"lag_ms": {"p50": 0.1, "p99": 11.0, "max": 12.0}}, False),
        ({"lag_ms": {}}, True),
    ],
)
def test_client_that_is_busy_or_late_is_saturated(fields: dict[str, Any], ok: bool) -> None:
    summary = summarize_level(level_record(client=cost(**fields)), [], shared_cores=None)
    assert next(check.ok for check in summary.checks if check.name == "client") is ok
    assert summary.client["saturated"] is not ok


@pytest.mark.parametrize(
    ("ceiling", "ok"),
    [(None, True), (40_000.0, True), (39_000.0, False)],
)
def test_client_that_takes_above_half_of_its_ceiling_is_saturated(ceiling: float | None, ok: bool) -> None:
    """1.2 million chunks in a minute: 20,000 a second."""
    level = level_record(client=cost(chunks=1_200_000, ceiling_chunks_per_s=ceiling))
    summary = summarize_level(level, [], shared_cores=None)
    found = next(check for check in summary.checks if check.name == "client")
    assert found.ok is ok
    assert summary.client["saturated"] is not ok
    assert ("20,000 chunks/s came, of" in found.detail) is (ceiling is not None)


def test_client_of_a_level_without_a_record_is_not_known() -> None:
    level = level_record(client=ClientCost(cpu_s=0, wall_s=0, chunks=0, lag_ms={}))
    assert "not known" in check("client", level, [], shared_cores=2).detail
    assert "shared_cpu" not in checks_of(level, [], shared_cores=2)


def test_client_takes_cores_from_the_server_beside_it() -> None:
    assert check("shared_cpu", level_record(client=cost(cpu_s=5.9)), [], shared_cores=2).ok
    assert not check("shared_cpu", level_record(client=cost(cpu_s=6.1)), [], shared_cores=2).ok
    assert "shared_cpu" not in checks_of(level_record(client=cost(cpu_s=50)), [])


def test_answers_without_any_count_make_every_number_of_tokens_a_guess() -> None:
    known, unknown = request(0, [(10, 1)]), request(1, [(10, 1)], total_known=False)
    assert check("token_total", level_record(), [known]).ok
    assert not check("token_total", level_record(), [known, unknown]).ok


def test_counts_that_are_guessed_make_token_times_a_guess() -> None:
    counted, guessed = request(0, [(10, 1)]), request(1, [(10, 1)], tokens_from="estimated")
    assert check("token_times", level_record(), [counted]).ok
    found = check("token_times", level_record(), [counted, guessed])
    assert not found.ok
    assert found.detail.startswith("1 of 2 ")


def test_usage_that_contradicts_the_chunks() -> None:
    """One token may have a count and no chunk: the end of sequence."""
    arrivals = [(10, 1), (20, 4)]
    assert check("token_counts", level_record(), [request(0, arrivals, output_tokens=6)]).ok
    assert not check("token_counts", level_record(), [request(0, arrivals, output_tokens=7)]).ok
    assert not check("token_counts", level_record(), [request(0, arrivals, output_tokens=3)]).ok


def test_answers_that_loop() -> None:
    looping = [request(i, [(10, 1)], repetition=0.9) for i in range(2)]
    others = [request(10 + i, [(10, 1)], repetition=0.3) for i in range(18)]
    assert check("degenerate", level_record(), looping + others).ok
    assert not check("degenerate", level_record(), looping + others[1:]).ok


@pytest.mark.parametrize(
    ("arrivals", "ok"),
    [
        ([(10, 1), (20, 1), (30, 1)], True),
        ([(10, 8), (20, 1), (30, 1)], True),
        ([(10, 9), (20, 1), (30, 1)], False),
        ([(10, 16), (20, 4), (30, 4)], True),
        ([(10, 300), (20, 4), (30, 4)], False),
        ([(10, 1)], True),
        ([(10, 512)], False),
    ],
)
def test_first_arrival_much_larger_than_the_rest(arrivals: list[tuple[float, int]], ok: bool) -> None:
    assert check("first_arrival", level_record(), [request(i, arrivals) for i in range(5)]).ok is ok


def test_prompts_sent_twice_may_be_cached_where_the_server_does_not_say() -> None:
    assert check("cache", level_record(), [request(i, [(10, 1)]) for i in range(3)]).ok
    twice = [request(i, [(10, 1)], prompt="same") for i in range(3)]
    assert not check("cache", level_record(), twice).ok


def test_cached_tokens_decide_where_the_server_counts_them() -> None:
    told = [request(i, [(10, 1)], prompt="same", input_tokens=100, cached_tokens=20) for i in range(3)]
    assert check("cache", level_record(), told).ok
    told[0].cached_tokens = 30
    found = check("cache", level_record(), told)
    assert not found.ok
    assert found.detail.startswith("23%")


def test_preemptions() -> None:
    assert check("preemptions", level_record(counters={"preemptions": 0.0}), []).ok
    assert not check("preemptions", level_record(counters={"preemptions": 3.0}), []).ok
    assert "preemptions" not in checks_of(level_record(samples=gauges(1)), [])


def test_steps_of_the_wall_clock() -> None:
    assert check("clock", level_record(), []).ok
    assert not check("clock", level_record(client=cost(clock_steps=1)), []).ok


def test_an_empty_level_is_checked_without_a_request() -> None:
    found = checks_of(level_record(None, None, ended_by="failures"), [])
    assert not found["in_flight"].ok
    assert not found["steady"].ok
    assert not found["cut_short"].ok
    assert not {"token_times", "degenerate", "first_arrival", "cache"} & set(found)
