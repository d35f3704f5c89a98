"""An open loop's own numbers, and whether a growing backlog is told from chance."""

from __future__ import annotations

import math

import pytest
from benchmarks.backlog import Server, queue, share_that_grows, shared, unlimited

from breakeven.measure.open_loop import backlog, open_numbers
from breakeven.records import RequestRecord
from tests.measure.handmade import MS, S, request


def late(number: int, due_s: float, sent_s: float | None, end_s: float | None, **fields: object) -> RequestRecord:
    """A request with one arrival, at its end."""
    record = request(number, due_ns=round(due_s * S), **fields)
    record.sent_ns = None if sent_s is None else round(sent_s * S)
    record.end_ns = None if end_s is None else round(end_s * S)
    if record.sent_ns is not None and record.end_ns is not None and record.outcome == "ok":
        record.arrivals = [(record.end_ns - record.sent_ns, 1)]
    return record


def test_latencies_count_from_when_a_request_was_due() -> None:
    records = [
        request(0, [(100, 1), (300, 1)], sent_s=1.0, due_ns=1 * S),
        request(1, [(100, 1), (300, 1)], sent_s=2.0, due_ns=2 * S - 500 * MS),
    ]
    found = open_numbers(records, (0, 10 * S), 0.2)
    assert (found.lateness_ms.min, found.lateness_ms.max) == (0, 500)
    assert (found.ttft_due_ms.min, found.ttft_due_ms.max) == (100, 600)
    assert (found.e2e_due_ms.min, found.e2e_due_ms.max) == (300, 800)


def test_lateness_counts_all_that_were_sent_in_the_window_and_latencies_what_ended_well() -> None:
    records = [
        request(0, [(100, 1)]),
        request(1, [], outcome="empty"),
        request(2, [(100, 1)], outcome="truncated"),
        request(3, [(100, 1)], phase="ramp"),
        request(4, [(100, 1)], phase="drain"),
        late(5, 1.0, None, 2.0, outcome="connection"),
    ]
    found = open_numbers(records, (0, 10 * S), 1.0)
    assert found.lateness_ms.count == 3
    assert found.ttft_due_ms.count == found.e2e_due_ms.count == 1


def test_rates_count_what_was_due_and_what_ended_inside_the_window_in_whatever_phase() -> None:
    records = [
        late(0, 1, 1, 11, phase="ramp"),  # ends inside
        late(1, 12, 12, 19),
        late(2, 13, 13, 14, outcome="http_error"),
        late(3, 19, 19, 25),  # due inside
        late(4, 21, 21, 26, phase="drain"),
        late(5, 19.5, 19.5, 19.9, outcome="cancelled"),  # abandoned: it did not end
    ]
    found = open_numbers(records, (10 * S, 20 * S), 0.4)
    assert found.offered_rate == pytest.approx(0.4)
    assert found.ended_rate == pytest.approx(0.3)


def test_requests_that_were_held_back_and_never_sent_were_due_all_the_same() -> None:
    """100 come a second; with two in flight 10 end, and 300 were sent when the window of 30 s closed."""
    records = [late(i, i / 100, i / 10, i / 10 + 0.2) for i in range(302)]
    found = open_numbers(records, (0, 30 * S), 100.0)
    assert found.offered_rate == pytest.approx(100, rel=0.01)
    assert found.ended_rate == pytest.approx(10, rel=0.05)
    grown = backlog(records, (0, 30 * S), 100.0)
    assert grown.last == pytest.approx(2700, abs=10)
    assert grown.grows


def test_punctual_requests_have_held_none_back() -> None:
    """At a low rate the window may close long after the last request that was due in it."""
    records = [late(i, 10.0 * i, 10.0 * i + 0.002, 10.0 * i + 1) for i in range(7)]
    assert open_numbers(records, (0, 69 * S), 0.1).offered_rate == pytest.approx(7 / 69)
    assert backlog(records, (0, 69 * S), 0.1).last == 0


def test_without_a_window_all_are_counted() -> None:
    """Offered from the first due to the last, ended until the last end: a tail is no lower rate."""
    records = [late(i, 100 + i / 20, 100 + i / 20 + 0.001, 110 + i / 20) for i in range(61)]
    found = open_numbers(records, None, 0.0)
    assert found.offered_rate == pytest.approx(20)
    assert found.ended_rate == pytest.approx(61 / 13)


@pytest.mark.parametrize("window", [None, (0, 10 * S)])
def test_nothing_and_almost_nothing_have_numbers_too(window: tuple[int, int] | None) -> None:
    for records in ([], [late(0, 1, None, None)], [late(0, 1, 1, 2)], [late(0, 1, 1, 2), late(1, 1, 1, 1)]):
        found = open_numbers(records, window, 1.0)
        assert math.isfinite(found.offered_rate)
        assert math.isfinite(found.ended_rate)
        assert found.lateness_ms.count == sum(record.sent_ns is not None for record in records)
        assert not backlog(records, (0, 10 * S), 1.0).grows


def test_backlog_is_what_was_due_and_had_not_ended() -> None:
    records = [
        late(0, 1, 1, 5),
        late(1, 9, 9, 10),  # ends as the window opens
        late(2, 9, 11, 12),  # due before, sent after
        late(3, 15, 15, 25),
        late(4, 16, 16, 26, outcome="cancelled"),
        late(5, 17, 17, None),
        late(6, 21, 21, 22, phase="drain"),
    ]
    found = backlog(records, (10 * S, 20 * S), 0.1)
    assert (found.first, found.last) == (1, 3)


def test_what_is_abandoned_when_a_level_is_interrupted_is_still_owed() -> None:
    records = [late(i, i / 10, i / 10, 29.99, outcome="cancelled") for i in range(300)]
    found = backlog(records, (0, 30 * S), 10.0)
    assert (found.last, found.grows) == (300, True)


@pytest.mark.parametrize("rho", [0.5, 0.9])
@pytest.mark.parametrize("server", [unlimited, queue, shared])
def test_a_server_that_keeps_up_has_no_growing_backlog(server: Server, rho: float) -> None:
    """At size no row is above 6 % (docs/statistics.md): more than 5 of 30 are a chance of one in a hundred then."""
    assert share_that_grows(server, rho, windows=30) <= 5 / 30


def test_bursts_are_no_growth() -> None:
    assert share_that_grows(shared, 0.8, "gamma:2", windows=30) <= 5 / 30


@pytest.mark.parametrize("arrivals", ["poisson", "constant"])
@pytest.mark.parametrize("server", [queue, shared])
def test_a_server_that_falls_behind_by_a_third_is_found(server: Server, arrivals: str) -> None:
    assert share_that_grows(server, 1.3, arrivals, windows=20) >= 0.9


def test_a_steady_rate_just_beyond_what_a_server_holds_is_found() -> None:
    assert share_that_grows(queue, 1.1, "constant", windows=3) == 1
