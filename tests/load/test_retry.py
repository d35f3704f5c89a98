"""Requests that are refused for now: whether they are sent again, after which wait, and what the record says."""

from __future__ import annotations

import asyncio
import threading
import time
from email.utils import formatdate

import pytest

from breakeven.load.retry import wait_ns
from breakeven.records import RequestRecord
from tests.load.scripted import (
    ANSWER,
    CLOSE,
    PLANNED,
    READ,
    Step,
    answer,
    client_of,
    record_of,
    records_of,
    run,
    scripted,
)

S = 1_000_000_000
NOW_S = 1_800_000_000


def busy(status: int = 429, *headers: str) -> bytes:
    return answer(status, b'{"error": {"message": "busy"}}', "application/json", *headers)


AT_ONCE = busy(429, "Retry-After: 0")


# ---- the wait ----


@pytest.mark.parametrize(
    ("value", "wait_s"),
    [
        (b"0", 0),
        (b"7", 7),
        (b" 120 ", 120),
        (b"99999999999999999999", 99999999999999999999),
        (formatdate(NOW_S + 90, usegmt=True).encode(), 90),
        (time.strftime("%A, %d-%b-%y %H:%M:%S GMT", time.gmtime(NOW_S + 5)).encode(), 5),
        (time.asctime(time.gmtime(NOW_S + 5)).encode(), 5),
        (formatdate(NOW_S - 90, usegmt=True).encode(), 0),
    ],
)
def test_the_server_is_taken_at_its_word(value: bytes, wait_s: int) -> None:
    assert wait_ns(value, 0, 0, NOW_S * S) == wait_s * S


@pytest.mark.parametrize(
    "value", [None, b"", b"soon", b"-1", b"1.5", b"\xff", b"9" * 5000, b"Wed, 99 Foo 2026 00:00:00 GMT", b"(", b"1,2"]
)
def test_without_its_word_waits_double_up_to_eight_seconds(value: bytes | None) -> None:
    waits = [wait_ns(value, retries, 1, NOW_S * S) / S for retries in range(12)]
    longest = [0.5, 1, 2, 4, *[8] * 8]
    assert all(most / 2 <= wait <= most for wait, most in zip(waits, longest, strict=True))


def test_waits_differ_between_requests_and_not_between_runs() -> None:
    waits = [wait_ns(None, 0, seed, NOW_S * S) for seed in range(50)]
    assert len(set(waits)) == 50
    assert waits == [wait_ns(None, 0, seed, NOW_S * S) for seed in range(50)]


# ---- the tries ----


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_off_by_default(status: int) -> None:
    with scripted([READ, busy(status), READ, ANSWER]) as server:
        (record,) = records_of(server)
        assert (record.outcome, record.status, record.retries) == ("http_error", status, 0)
        assert len(server.requests) == 1


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_refused_request_is_sent_again_and_timed_from_the_first_try(status: int) -> None:
    script = [READ, 0.05, busy(status, "Retry-After: 0"), READ, 0.05, busy(status, "Retry-After: 0"), READ, ANSWER]
    with scripted(script) as server:
        (record,) = records_of(server, retries=2)
        assert (record.outcome, record.status, record.retries, record.reconnects) == ("ok", 200, 2, 0)
        assert (record.text, record.output_tokens, record.error) == ("one two three", 3, None)
        assert [request.connection for request in server.requests] == [0, 0, 0]
        assert len({str(request.body) for request in server.requests}) == 1
    assert record.sent_ns is not None
    assert record.first_ns is not None
    assert record.first_ns - record.sent_ns > 0.1 * S
    assert record.arrivals[0][0] > 0.1 * S


def test_the_wait_is_as_long_as_the_server_asks_for() -> None:
    script = [READ, busy(503, "Retry-After: 1"), READ, ANSWER]
    with scripted(script) as server:
        (record,) = records_of(server, retries=1)
        assert server.sent_ns[1] - server.sent_ns[0] > 0.99 * S  # timers are whole milliseconds
    assert (record.outcome, record.retries) == ("ok", 1)


def test_not_more_often_than_asked_for() -> None:
    with scripted([READ, AT_ONCE] * 5) as server:
        (record,) = records_of(server, retries=3)
        assert (record.outcome, record.status, record.error) == ("http_error", 429, "HTTP 429: busy")
        assert (record.retries, len(server.requests)) == (3, 4)


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
def test_what_is_wrong_for_good_is_not_sent_again(status: int) -> None:
    with scripted([READ, busy(status, "Retry-After: 0"), READ, ANSWER]) as server:
        (record,) = records_of(server, retries=3)
        assert (record.outcome, record.status, record.retries) == ("http_error", status, 0)


def test_the_last_try_decides() -> None:
    with scripted([READ, busy(429, "Retry-After: 0", "Connection: close")], [READ, CLOSE]) as server:
        (record,) = records_of(server, retries=3)
        assert (record.outcome, record.status, record.retries) == ("connection", None, 1)


def test_the_connection_may_be_gone_after_the_wait() -> None:
    """The next try takes a new one: nothing was sent on the old one, so it is no reconnect."""
    with scripted([READ, busy(503, "Retry-After: 1"), 0.05, CLOSE], [READ, ANSWER]) as server:
        (record,) = records_of(server, retries=1)
        assert (record.outcome, record.retries, record.reconnects) == ("ok", 1, 0)


def test_all_tries_together_have_the_time_of_one() -> None:
    drip: list[Step] = [step for _ in range(20) for step in (READ, 0.1, AT_ONCE)]
    began = time.monotonic()
    record = record_of(0.1, AT_ONCE, *drip, retries=100, timeout_s=0.6)
    assert time.monotonic() - began < 2
    assert record.outcome in ("timeout", "http_error")
    assert 1 < record.retries < 10


def test_a_wait_beyond_its_time_ends_with_it() -> None:
    """Nothing is sent any more; the record is that of the refusal."""
    with scripted([READ, busy(503, "Retry-After: 3600"), READ, ANSWER]) as server:
        (record,) = records_of(server, retries=5, timeout_s=0.4)
        assert (record.outcome, record.status, record.retries) == ("http_error", 503, 0)
        assert len(server.requests) == 1
    assert record.end_ns is not None
    assert record.sent_ns is not None
    assert 0.35 * S < record.end_ns - record.sent_ns < 1.5 * S


def test_a_cancelled_wait_is_a_cancelled_request() -> None:
    async def cancel() -> None:
        async with client_of(server, records, retries=5) as client:
            task = asyncio.create_task(client.send(PLANNED))
            while not client._idle:
                await asyncio.sleep(0.005)
            assert client.in_flight == 1
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await client.settled()
            assert await client.send(PLANNED)
            await client.settled()

    records: list[RequestRecord] = []
    with scripted([READ, busy(503, "Retry-After: 3600"), READ, ANSWER]) as server:
        run(cancel())
    assert [(record.outcome, record.retries) for record in records] == [("cancelled", 0), ("ok", 0)]


def test_a_wait_holds_no_connection() -> None:
    """Another request uses it meanwhile, and no deadline of the waiting one closes it."""

    async def send_both() -> None:
        async with client_of(server, records, retries=1, stall_timeout_s=0.1) as client:
            waiting = asyncio.create_task(client.send(PLANNED))
            while not client._idle:
                await asyncio.sleep(0.005)
            assert await client.send(PLANNED)
            await waiting
            await client.settled()

    records: list[RequestRecord] = []
    with scripted([READ, busy(503, "Retry-After: 1"), READ, 0.5, ANSWER, READ, ANSWER]) as server:
        run(send_both())
        assert [request.connection for request in server.requests] == [0, 0, 0]
    assert [(record.id, record.outcome, record.retries) for record in records] == [(1, "ok", 0), (0, "ok", 1)]


def test_what_was_heard_of_a_refused_try_is_not_forgotten() -> None:
    async def listen() -> None:
        async with client_of(server, [], retries=1) as client:
            task = asyncio.create_task(client.send(PLANNED))
            while len(server.requests) < 2:
                await asyncio.sleep(0.005)
            assert client.heard_ns >= server.sent_ns[0] - 1e6
            let_go.set()
            assert await task

    let_go = threading.Event()
    with scripted([READ, AT_ONCE, READ, lambda _: let_go.wait(5), ANSWER]) as server:
        run(listen())


def test_a_refusal_that_breaks_is_broken() -> None:
    head = b"HTTP/1.1 503 Busy\r\nRetry-After: 0\r\nTransfer-Encoding: chunked\r\n\r\n"
    with scripted([READ, head + b"no size\r\n", CLOSE], [READ, ANSWER]) as server:
        (record,) = records_of(server, retries=1)
        assert (record.outcome, record.status, record.retries) == ("protocol", 503, 0)
