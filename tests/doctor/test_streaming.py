"""Answers that come one by one, all at once, in bursts, or too short to tell."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from breakeven.doctor.streaming import streaming
from tests.measure.handmade import request


def arrivals(*bursts: int, gap_ms: float, within_ms: float = 0.1, first_ms: float = 300.0) -> list[tuple[float, int]]:
    """One-token arrivals: bursts of so many, so far apart."""
    return [
        (first_ms + number * gap_ms + i * within_ms, 1) for number, count in enumerate(bursts) for i in range(count)
    ]


@pytest.mark.parametrize(
    ("stamps", "state"),
    [
        (arrivals(*[1] * 64, gap_ms=20), "ok"),
        (arrivals(*[1] * 64, gap_ms=1), "ok"),
        (arrivals(*[3] * 21, gap_ms=20), "ok"),
        (arrivals(*[4] * 16, gap_ms=20), "problem"),
        (arrivals(32, 32, gap_ms=600), "problem"),
        (arrivals(64, gap_ms=20), "problem"),
        (arrivals(*[1] * 64, gap_ms=1, first_ms=60_000), "ok"),
        (arrivals(*[1] * 7, gap_ms=20), "unknown"),
    ],
    ids=["one by one", "quickly", "in threes", "in fours", "two buffers", "at once", "after a long prefill", "short"],
)
def test_how_events_lie_in_time_decides(stamps: Sequence[tuple[float, int]], state: str) -> None:
    found = streaming(request(0, stamps), is_speculating=False)
    assert found.state == state
    assert (found.mend is not None) is (state == "problem")


def test_the_finding_says_what_it_rests_on() -> None:
    found = streaming(request(0, arrivals(48, 16, gap_ms=600)), is_speculating=False)
    assert "64 events in 2 bursts over 602 ms, 75% of the tokens in the first" in found.finding
    assert "proxy_buffering off" in (found.mend or "")
    assert found.numbers["bursts"] == 2


def test_accepted_drafts_come_in_bursts_without_a_proxy() -> None:
    in_bursts, at_once = request(0, arrivals(*[6] * 10, gap_ms=50)), request(0, arrivals(60, gap_ms=50))
    assert streaming(in_bursts, is_speculating=True).state == "note"
    assert streaming(at_once, is_speculating=True).state == "problem"


def test_chunks_in_one_read_are_one_arrival_of_several_events() -> None:
    found = streaming(request(0, [(300.0 + 50 * i, 8) for i in range(8)], chunks=64), is_speculating=False)
    assert found.state == "problem"
    assert "64 events in 8 bursts" in found.finding


def test_a_server_that_puts_many_tokens_into_an_event_is_coarse_itself() -> None:
    found = streaming(request(0, [(500.0, 32), (900.0, 32)]), is_speculating=False)
    assert found.state == "note"
    assert found.finding.startswith("the server puts 32 tokens into an event")
    assert "--stream-interval" in (found.mend or "")


def test_a_request_that_failed_is_a_problem() -> None:
    found = streaming(request(0, outcome="truncated", error="the server closed the connection"), is_speculating=False)
    assert found.state == "problem"
    assert "truncated, the server closed the connection" in found.finding
