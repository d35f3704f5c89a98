"""A level's numbers from its records: which request counts where."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from breakeven.measure.level import LevelSummary, _in_flight, summarize_level
from breakeven.records import ClientCost, EngineSample, LevelRecord, RequestRecord
from tests.measure.handmade import S, level_record, request, steady_stream


def summarize(level: LevelRecord, records: list[RequestRecord]) -> LevelSummary:
    return summarize_level(level, records, shared_cores=None)


def by_phase() -> list[RequestRecord]:
    """One request a phase, 10 s each, back to back from -10 s, a token a second; the window is 10 to 20 s."""
    ticks = [((i + 1) * 1000, 1) for i in range(10)]
    return [
        request(0, ticks, sent_s=-10, phase="warmup"),
        request(1, ticks, sent_s=0, phase="ramp"),
        request(2, ticks, sent_s=10, phase="measured"),
        request(3, ticks, sent_s=20, phase="drain"),
    ]


def test_latencies_are_those_of_measured_requests() -> None:
    records = by_phase()
    for record, first_ms in zip(records, (1, 2, 4, 8), strict=True):
        record.arrivals[0] = (first_ms * 1_000_000, 1)
    found = summarize(level_record(10, 20), records)
    assert (found.ttft_ms.count, found.ttft_ms.mean) == (1, pytest.approx(4))
    assert found.requests == {"ok": 1, "failed": 0, "by_outcome": {"ok": 1}, "reconnects": 0, "retries": 0}


def test_throughput_counts_the_tokens_of_all_phases_inside_the_window() -> None:
    found = summarize(level_record(5, 25), by_phase())
    # 5 of the ramp's, all 10 measured, 5 of the drain's; less what the spread of a first arrival shifts.
    assert found.output_throughput.value == pytest.approx(20 / 20, abs=0.1)
    assert found.output_throughput.window_s == 20


def test_warm_up_is_in_no_number() -> None:
    level = level_record(10, 20)
    noisy = by_phase()
    noisy[0] = msgspec.structs.replace(noisy[0], outcome="http_error", output_tokens=999, cached_tokens=5)
    assert summarize(level, noisy) == summarize(level, by_phase()[1:])
    without_window = level_record(None, None)
    assert summarize(without_window, noisy) == summarize(without_window, by_phase()[1:])


def test_output_tokens_and_whole_run_count_all_after_warm_up() -> None:
    found = summarize(level_record(10, 20), by_phase())
    assert found.output_tokens == 30
    assert found.output_throughput.whole_run == pytest.approx(30 / 30)


def test_failures_are_counted_apart_and_in_no_latency() -> None:
    records = [
        request(0, [(100, 1), (200, 1)]),
        request(1, [(900, 1), (990, 1)], outcome="truncated"),
        request(2, outcome="http_error", status=503, error="HTTP 503"),
        request(3, outcome="http_error", status=503, error="HTTP 503"),
    ]
    found = summarize(level_record(), records)
    assert (found.requests["ok"], found.requests["failed"]) == (1, 3)
    assert found.requests["by_outcome"] == {"http_error": 2, "ok": 1, "truncated": 1}
    assert found.ttft_ms.mean == pytest.approx(100)
    assert found.output_tokens == 4


def test_cancelled_requests_are_no_failures_but_their_tokens_came() -> None:
    found = summarize(level_record(0, 1), [request(0, [(100, 1), (200, 1)], outcome="cancelled")])
    assert (found.requests["ok"], found.requests["failed"]) == (0, 0)
    assert found.requests["by_outcome"] == {"cancelled": 1}
    assert found.output_throughput.value == pytest.approx(2)
    assert found.ttft_ms.count == 0


def test_without_a_window_the_whole_run_is_the_throughput() -> None:
    found = summarize(level_record(None, None), [request(0, [(1000, 5), (2000, 5)], sent_s=3)])
    assert found.output_throughput.value == found.output_throughput.whole_run == pytest.approx(10 / 2)
    assert found.output_throughput.ci95 is None
    assert found.output_throughput.window_s is None
    assert found.in_flight["mean"] == pytest.approx(1)


def test_a_window_without_length_is_none() -> None:
    found = summarize(level_record(1, 1), [request(0, [(1000, 5), (2000, 5)])])
    assert found.output_throughput.value == pytest.approx(5)
    assert found.output_throughput.window_s is None
    assert found.in_flight["mean"] == pytest.approx(1)


def test_interval_surrounds_the_value() -> None:
    rng = random.Random(1)
    records, at_s = [], 0.0
    for number in range(40):
        arrivals = [(50.0 * (i + 1), rng.randint(1, 4)) for i in range(40)]
        records.append(request(number, arrivals, sent_s=at_s))
        at_s += 2.0
    found = summarize(level_record(5, 65), records).output_throughput
    assert found.ci95 is not None
    low, high = found.ci95
    assert low < found.value < high
    assert found.value == pytest.approx((low + high) / 2)


def test_requests_longer_than_half_a_batch_leave_no_interval() -> None:
    found = summarize(level_record(0, 60), steady_stream(e2e_s=6, seconds=60))
    assert found.output_throughput.ci95 is None
    assert found.output_throughput.value == pytest.approx(20, rel=0.02)


def test_reconnects_and_retries_of_measured_requests_are_counted() -> None:
    records = [
        request(0, [(100, 1)], phase="ramp", reconnects=5, retries=5),
        request(1, [(100, 1)], reconnects=1),
        request(2, [(100, 1)], reconnects=1, retries=3),
    ]
    found = summarize(level_record(), records).requests
    assert (found["reconnects"], found["retries"]) == (2, 3)


@pytest.mark.parametrize(
    ("plan", "name", "load"),
    [
        ({"concurrency": 8}, "C=8", {"mode": "closed", "concurrency": 8, "max_tokens": 512}),
        (
            {"mode": "open", "rate": 0.5, "arrivals": "gamma:2", "max_in_flight": 9},
            "0.5/s",
            {"mode": "open", "rate": 0.5, "arrivals": "gamma:2", "max_in_flight": 9, "max_tokens": 512},
        ),
        ({"mode": "trace", "speed": 10.0}, "trace x10", {"mode": "trace", "speed": 10.0, "max_tokens": 512}),
    ],
)
def test_a_level_is_named_by_its_load(plan: dict[str, Any], name: str, load: dict[str, Any]) -> None:
    found = summarize(level_record(**plan), steady_stream())
    assert (found.name, found.load) == (name, load)


def test_only_levels_that_are_no_closed_loop_have_an_open_loops_numbers() -> None:
    assert summarize(level_record(concurrency=1), steady_stream()).open_loop is None
    found = summarize(level_record(mode="open", rate=0.5), steady_stream()).open_loop
    assert found is not None
    assert (found.offered_rate, found.ended_rate) == (pytest.approx(0.5), pytest.approx(0.5, abs=0.02))
    assert found.ttft_due_ms.count == 30
    trace = summarize(level_record(None, None, mode="trace"), steady_stream()).open_loop
    assert trace is not None
    assert trace.offered_rate == pytest.approx(0.5)


def test_a_level_without_a_request_is_all_zeros_and_nones() -> None:
    for level in (level_record(), level_record(None, None)):
        found = summarize(level, [])
        assert found.requests == {"ok": 0, "failed": 0, "by_outcome": {}, "reconnects": 0, "retries": 0}
        assert found.output_throughput.value == 0
        assert found.in_flight == {"mean": 0, "max": 0}
        assert found.decode_rate is None
        assert found.e2e_ms.count == 0


def test_a_level_where_nothing_was_ok_has_counts_and_no_latency() -> None:
    records = [request(i, outcome="connection", error="refused", end_s=0.1 * i, sent_s=0.1 * i) for i in range(20)]
    found = summarize(level_record(None, None, ended_by="failures"), records)
    assert found.requests["failed"] == 20
    assert found.output_throughput.value == 0
    assert found.ttft_ms.mean is None


def test_requests_that_were_never_sent_are_counted_and_in_no_time() -> None:
    unsent = request(0, outcome="connection", error="refused")
    unsent.sent_ns = None
    found = summarize(level_record(None, None), [unsent])
    assert found.requests["failed"] == 1
    assert found.in_flight == {"mean": 0, "max": 0}


def test_numbers_do_not_depend_on_the_order_of_the_records() -> None:
    records = steady_stream(concurrency=3, seconds=30)
    shuffled = random.Random(2).sample(records, len(records))
    level = level_record(0, 30, concurrency=3)
    assert json.loads(msgspec.json.encode(summarize(level, records))) == json.loads(
        msgspec.json.encode(summarize(level, shuffled))
    )


def test_client_cost_is_per_chunk() -> None:
    cost = ClientCost(cpu_s=0.5, wall_s=10, chunks=1000, lag_ms={"p50": 1.0, "p99": 2.0, "max": 3.0})
    found = summarize(level_record(client=cost), []).client
    assert found == {"cpu_us_per_chunk": 500.0, "lag_ms": {"p50": 1.0, "p99": 2.0, "max": 3.0}, "saturated": False}
    assert (
        summarize(level_record(client=ClientCost(cpu_s=0.5, wall_s=10, chunks=0, lag_ms={})), []).client[
            "cpu_us_per_chunk"
        ]
        is None
    )


def test_engine_gauges_are_means_and_none_where_it_has_none() -> None:
    samples = [EngineSample(time_ns=i, running=float(i), kv_use=None) for i in (1, 2, 3)]
    found = summarize(level_record(samples=samples, counters={"preemptions": 4.0}), []).engine
    assert found == {"running": 2.0, "waiting": None, "kv_use": None, "preemptions": 4.0}
    assert summarize(level_record(), []).engine is None


def test_positions_that_no_draft_reached_are_left_off() -> None:
    spec = {"acceptance_length": 1.5, "acceptance_rate": 0.25, "per_position": [0.4, 0.0, 0.1, 0.0, 0.0]}
    found = summarize(level_record(spec=spec), []).spec
    assert found is not None
    assert found["per_position"] == [0.4, 0.0, 0.1]
    silent = summarize(level_record(spec=spec | {"per_position": [0.0] * 48}), []).spec
    assert silent is not None
    assert silent["per_position"] is None


spans = st.lists(st.tuples(st.integers(-50, 150), st.integers(0, 80)), max_size=25)


@settings(deadline=None)
@given(spans, st.integers(0, 60), st.integers(1, 60))
def test_in_flight_agrees_with_counting_each_nanosecond(
    spans: list[tuple[int, int]], start_ns: int, length_ns: int
) -> None:
    records = []
    for number, (sent_ns, took_ns) in enumerate(spans):
        record = request(number)
        record.sent_ns, record.end_ns = sent_ns, sent_ns + took_ns
        records.append(record)
    counts = [
        sum(sent <= moment < sent + took for sent, took in spans) for moment in range(start_ns, start_ns + length_ns)
    ]
    found = _in_flight(records, start_ns, start_ns + length_ns)
    assert found["mean"] == pytest.approx(sum(counts) / length_ns)
    assert found["max"] == max(counts)


def test_slots_refilled_at_once_are_not_counted_twice() -> None:
    found = summarize(level_record(0, 60, concurrency=4), steady_stream(concurrency=4))
    assert found.in_flight == {"mean": pytest.approx(4), "max": 4}


def test_no_number_is_infinite_or_undefined() -> None:
    """Records at the edges of what can happen: encoding them must give no null where a number was computed."""
    odd = [
        request(0, [(0, 1)]),
        request(1, [(0, 1), (0.000001, 1)]),
        request(2, [(1, 0), (2, 0)]),
        request(3, [(1, 0)], output_tokens=1),
        request(4, [(1, 10**12), (2, 10**12)]),
        request(5, outcome="empty", end_s=0.0),
    ]
    for window in ((0, 1e-9), (0, 60), (None, None)):
        text = msgspec.json.encode(summarize(level_record(*window), odd)).decode()
        value = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in the summary"))
        for name in ("ttft_ms", "e2e_ms", "itl_ms", "per_request_throughput"):
            assert None not in value[name].values(), name
        assert None not in (value["output_throughput"]["value"], value["decode_rate"])


def test_start_ns_of_zero_is_a_time() -> None:
    record = request(0, [(1000, 10)], sent_s=0)
    assert summarize(level_record(None, None, started_ns=-S), [record]).output_throughput.value == pytest.approx(10)
