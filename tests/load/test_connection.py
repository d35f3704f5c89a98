"""Connections over real sockets: framing, reuse, losses, large bodies, TLS, IPv6 and the kernel's stamps."""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from breakeven.clock import KernelClock
from breakeven.load.connection import Connection, Endpoint
from breakeven.load.exchange import Exchange
from breakeven.load.later import Later
from tests.load.conftest import Authority
from tests.load.scripted import (
    ANSWER,
    CLOSE,
    HEAD,
    LAST,
    PLANNED,
    READ,
    READ_HEAD,
    RESET,
    Scripted,
    answer,
    chunk,
    client_of,
    record_of,
    records_of,
    run,
    scripted,
    token,
)

REQUEST = b'POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n""'


def converse(
    server: Scripted, talk: Callable[[Connection], Awaitable[Any]], *, tls: tuple[ssl.SSLContext, str] | None = None
) -> Any:
    """Opens a connection to the server, talks, closes."""

    async def open_and_talk() -> Any:
        place = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        later = Later(asyncio.get_running_loop())
        connection = await Connection.open(Endpoint((socket.AF_INET, place), tls), KernelClock(), later)
        try:
            return await talk(connection)
        finally:
            connection.close()

    return run(open_and_talk())


async def ask(connection: Connection, request: bytes = REQUEST) -> Exchange:
    exchange = Exchange()
    await connection.exchange(request, exchange, time.perf_counter_ns)
    return exchange


def body(exchange: Exchange) -> bytes:
    return b"".join(data for _, data in exchange.pieces)


# ---- the end of a response, however it is cut ----

ENDINGS = [b"0\r\n\r\n", b"0;ext=1\r\nX-Sum: 12\r\nX-B:\r\n\r\n", b"000\r\nX: \r\n\r\n"]


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_last_chunk_is_seen_wherever_it_is_cut(ending: bytes) -> None:
    """Every place, one after the other on one connection; the second part comes in a read of its own."""
    head, rest = HEAD + chunk(b"hello"), chunk(b"world") + ending
    answers = [(head, rest[:place], rest[place:]) for place in range(len(rest))]
    script = [step for a in answers for step in (READ, a[0], 0.005, a[1], 0.005, a[2])]

    async def ask_all(connection: Connection) -> list[Exchange]:
        return [await ask(connection) for _ in answers]

    with scripted(script) as server:
        for exchange in converse(server, ask_all):
            assert (exchange.complete, exchange.keep_alive, body(exchange)) == (True, True, b"helloworld")
        assert len(server.accepted_ns) == 1


def test_interim_responses_are_no_answer() -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
    record = record_of(interim[:40], 0.01, interim[40:], 0.03, ANSWER)
    assert (record.outcome, record.status, record.output_tokens) == ("ok", 200, 3)
    assert record.headers_ns is not None
    assert record.sent_ns is not None
    assert record.headers_ns - record.sent_ns > 30e6


# ---- reuse ----


def test_one_connection_carries_consecutive_requests() -> None:
    with scripted([READ, ANSWER] * 5) as server:
        records = records_of(server, 5, pause_s=0.01)
        assert [record.outcome for record in records] == ["ok"] * 5
        assert [request.connection for request in server.requests] == [0] * 5


def test_a_connection_that_the_server_will_close_is_not_used_again() -> None:
    closing = ANSWER.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
    with scripted([READ, closing]) as server:
        records = records_of(server, 2)
        assert [record.outcome for record in records] == ["ok"] * 2
        assert [request.connection for request in server.requests] == [0, 1]


@pytest.mark.parametrize("ending", [CLOSE, RESET])
def test_after_an_idle_connection_was_closed_the_next_request_takes_a_new_one(ending: Any) -> None:
    with scripted([READ, ANSWER, 0.02, ending], [READ, ANSWER]) as server:
        records = records_of(server, 2, pause_s=0.1)
        assert [(record.outcome, record.reconnects) for record in records] == [("ok", 0)] * 2
        assert [request.connection for request in server.requests] == [0, 1]


SECOND = answer(408, b"too late", "text/plain")


@pytest.mark.parametrize("pause_s", [0.0, 0.02])
def test_an_answer_that_nobody_asked_for_ends_the_connection(pause_s: float) -> None:
    """Together with the response before it, or while the connection is idle."""
    script = [READ, ANSWER, pause_s, SECOND] if pause_s else [READ, ANSWER + SECOND]
    with scripted(script, [READ, ANSWER]) as server:
        records = records_of(server, 2, pause_s=0.1)
        assert [(record.outcome, record.output_tokens, record.reconnects) for record in records] == [("ok", 3, 0)] * 2
        assert [request.connection for request in server.requests] == [0, 1]


def test_an_end_with_more_bytes_behind_it_is_found_when_the_stream_falls_silent() -> None:
    """Nothing in the read looks like an end, and nothing follows it."""
    record = record_of(ANSWER[:100], 0.02, ANSWER[100:] + b"HTTP/1.1 408 Re", stall_timeout_s=0.4)
    assert (record.outcome, record.output_tokens) == ("ok", 3)
    assert record.end_ns is not None
    assert record.sent_ns is not None
    assert record.end_ns - record.sent_ns < 0.3e9, "the end is when it came, not when it was found"


# ---- losses ----


def race(server: Scripted, **options: Any) -> list[Any]:
    """Two requests; the server closes the connection after the first while the client does not look."""
    records: list[Any] = []

    async def send_twice() -> None:
        async with client_of(server, records, **options) as client:
            await client.send(PLANNED)
            await client.settled()
            time.sleep(0.1)
            await client.send(PLANNED)
            await client.settled()
            records.append(client.origin_ns)

    run(send_twice())
    return records


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "TLS"])
@pytest.mark.parametrize("ending", [CLOSE, RESET])
def test_a_request_that_crosses_the_closing_of_its_connection_is_sent_again(
    ending: Any, secure: bool, authority: Authority
) -> None:
    """Once, on a new connection; it is timed from the first try."""
    tls = authority.server if secure else None
    with scripted([READ, ANSWER, 0.03, ending], [READ, 0.05, ANSWER], tls=tls) as server:
        first, second, origin_ns = race(server)
        assert (first.outcome, first.reconnects) == ("ok", 0)
        assert (second.outcome, second.reconnects) == ("ok", 1)
        assert second.sent_ns + origin_ns < server.accepted_ns[1]
        assert second.first_ns - second.sent_ns > 50e6
        assert [request.connection for request in server.requests] == [0, 1]


def test_it_is_not_sent_a_third_time() -> None:
    with scripted([READ, ANSWER, 0.03, CLOSE], [READ, CLOSE]) as server:
        _, second, _ = race(server)
        assert (second.outcome, second.reconnects) == ("connection", 1)
        assert len(server.accepted_ns) == 2


@pytest.mark.parametrize("begun", [b"H", b"HTTP/1.1 100 Continue\r\n\r\n"])
def test_a_request_whose_answer_has_begun_is_not_sent_again(begun: bytes) -> None:
    with scripted([READ, ANSWER, READ, begun, CLOSE], [READ, ANSWER]) as server:
        _, second = records_of(server, 2)
        assert (second.outcome, second.reconnects) == ("connection", 0)
        assert len(server.accepted_ns) == 1


def test_a_reset_that_comes_together_with_data() -> None:
    """libuv says nothing of the reset then, and stops looking at the socket."""

    async def fly() -> None:
        async with client_of(server, records) as client:
            task = asyncio.create_task(client.send(PLANNED))
            while not server.sent_ns:
                await asyncio.sleep(0.005)
            time.sleep(0.1)
            began = time.perf_counter()
            await task
            assert time.perf_counter() - began < 0.8
            await client.settled()

    records: list[Any] = []
    with scripted([READ, HEAD, 0.05, chunk(token("a", 1)), RESET]) as server:
        run(fly())
    assert (records[0].outcome, records[0].output_tokens) == ("connection", 1)


# ---- large requests ----

LARGE: dict[str, Any] = {"sampling": {"padding": "x" * (6 << 20)}}


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "TLS"])
def test_a_large_request_reaches_a_slow_reader_whole(secure: bool, authority: Authority) -> None:
    tls = authority.server if secure else None
    with scripted([0.2, READ, ANSWER], tls=tls, receive_buffer=1 << 16) as server:
        (record,) = records_of(server, **LARGE)
        assert record.outcome == "ok"
        assert server.requests[0].body["padding"] == LARGE["sampling"]["padding"]


def test_a_refusal_before_the_body_was_read_is_an_answer() -> None:
    """The server answers and closes with half the body unread, which resets the connection."""
    refusal = answer(413, b'{"detail": "too large"}', "application/json", "Connection: close")
    with scripted([READ_HEAD, refusal, 0.05, CLOSE], receive_buffer=1 << 16) as server:
        (record,) = records_of(server, **LARGE)
        assert (record.outcome, record.error) == ("http_error", "HTTP 413: too large")


def test_a_connection_with_half_a_request_in_it_is_not_used_again() -> None:
    refusal = answer(413, b'{"detail": "too large"}')
    with scripted([READ_HEAD, refusal, 0.5], [READ_HEAD, refusal, 0.5], receive_buffer=1 << 16) as server:
        records = records_of(server, 2, **LARGE)
        assert [record.error for record in records] == ["HTTP 413: too large"] * 2
        assert len(server.accepted_ns) == 2


# ---- TLS ----


def test_tls_over_a_whole_run_of_requests(authority: Authority) -> None:
    with scripted([READ, ANSWER] * 3, tls=authority.server) as server:
        records = records_of(server, 3)
        assert [(record.outcome, record.text) for record in records] == [("ok", "one two three")] * 3
        assert [request.connection for request in server.requests] == [0] * 3


def test_session_tickets_on_an_idle_connection_are_no_answer(authority: Authority) -> None:
    """TLS 1.3 servers send them behind the handshake, when the client reads nothing."""

    async def connect_first(connection: Connection) -> Exchange:
        await asyncio.sleep(0.05)
        assert connection.usable
        return await ask(connection)

    context = ssl.create_default_context(cafile=authority.ca_file)
    with scripted([READ, ANSWER], tls=authority.server) as server:
        exchange = converse(server, connect_first, tls=(context, "127.0.0.1"))
        assert exchange.complete
        assert exchange.keep_alive


def test_garbage_on_an_idle_tls_connection_ends_it(authority: Authority) -> None:
    async def wait(connection: Connection) -> None:
        await ask(connection)
        await asyncio.sleep(0.1)
        assert not connection.usable
        assert connection.failure is not None
        assert connection.failure.startswith("TLS: ")

    context = ssl.create_default_context(cafile=authority.ca_file)
    script = [READ, ANSWER, 0.03, lambda peer: peer.send_raw(b"this is no TLS record")]
    with scripted(script, tls=authority.server) as server:
        converse(server, wait, tls=(context, "127.0.0.1"))


def test_garbage_in_a_tls_stream(authority: Authority) -> None:
    script = [READ, HEAD, chunk(token("a", 1)), 0.03, lambda peer: peer.send_raw(b"this is no TLS record")]
    with scripted(script, tls=authority.server) as server:
        (record,) = records_of(server)
        assert (record.outcome, record.output_tokens) == ("protocol", 1)
        assert record.error is not None
        assert record.error.startswith("TLS: ")


def test_data_that_comes_together_with_a_tls_fault_counts(authority: Authority) -> None:
    async def look_late(connection: Connection) -> Exchange:
        task = asyncio.create_task(ask(connection))
        while not server.sent_ns:
            await asyncio.sleep(0.005)
        time.sleep(0.1)
        return await task

    context = ssl.create_default_context(cafile=authority.ca_file)
    script = [READ, HEAD, 0.05, chunk(b"hello"), lambda peer: peer.send_raw(b"this is no TLS record"), 0.05, CLOSE]
    with scripted(script, tls=authority.server) as server:
        exchange = converse(server, look_late, tls=(context, "127.0.0.1"))
        assert body(exchange) == b"hello"
        assert not exchange.complete


def test_a_certificate_of_another_authority(authority: Authority, stranger: Authority) -> None:
    with scripted([READ, ANSWER], tls=stranger.server) as server:
        (record,) = records_of(server)
        assert record.outcome == "connection"
        assert record.error is not None
        assert "certificate verify failed" in record.error
        assert not server.requests


def test_a_certificate_for_another_name(authority: Authority) -> None:
    context = ssl.create_default_context(cafile=authority.ca_file)
    with scripted([READ, ANSWER], tls=authority.server) as server, pytest.raises(ssl.SSLCertVerificationError):
        converse(server, ask, tls=(context, "example.org"))


@pytest.mark.parametrize(
    "script", [[CLOSE], [b"\x16\x03\x03\x00", 0.02, CLOSE], [0.02, RESET], [b"hello, I am plain\n"]]
)
def test_a_handshake_that_is_cut(script: Any, authority: Authority) -> None:
    context = ssl.create_default_context(cafile=authority.ca_file)
    with scripted(script) as server, pytest.raises(OSError, match=r"handshake|reset|SSL"):
        converse(server, ask, tls=(context, "127.0.0.1"))


# ---- IPv6 ----


def has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as sock:
        try:
            sock.bind(("::1", 0))
        except OSError:
            return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")
@pytest.mark.parametrize("secure", [False, True], ids=["plain", "TLS"])
def test_ipv6(secure: bool, authority: Authority) -> None:
    with scripted([READ, ANSWER], tls=authority.server if secure else None, host="::1") as server:
        (record,) = records_of(server)
        assert record.outcome == "ok"
        assert server.requests[0].headers["host"] == server.url.partition("//")[2]


# ---- stamps ----


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux stamps what TCP receives")
@pytest.mark.parametrize("secure", [False, True], ids=["plain", "TLS"])
def test_a_client_that_is_late_to_read_stamps_when_the_bytes_came(secure: bool, authority: Authority) -> None:
    async def look_late(connection: Connection) -> int:
        task = asyncio.create_task(ask(connection))
        while len(server.sent_ns) < 1:
            await asyncio.sleep(0.002)
        time.sleep(0.15)  # the loop is blocked; meanwhile a chunk comes
        woke_ns = time.perf_counter_ns()
        exchange = await task
        stamps = [stamp for stamp, data in exchange.pieces if data == b"late"]
        assert woke_ns - stamps[0] > 30e6
        return stamps[0] - server.sent_ns[1]

    context = ssl.create_default_context(cafile=authority.ca_file)
    errors_ns = []
    for _ in range(3):  # the machine may be busy for a moment
        script = [READ, HEAD, 0.07, chunk(b"late"), 0.2, LAST]
        with scripted(script, tls=authority.server if secure else None) as server:
            errors_ns.append(converse(server, look_late, tls=(context, "127.0.0.1") if secure else None))
        if 0 <= errors_ns[-1] < 5e6:
            return
    pytest.fail(f"stamps are off by {errors_ns} ns")


@pytest.mark.parametrize("off_s", [-3600, -0.005, 0, 0.005, 3600])
def test_stamps_are_between_sent_and_now_whatever_the_wall_clock_does(off_s: float) -> None:
    async def step_then_ask(connection: Connection) -> tuple[Exchange, int]:
        connection._clock._offset_ns += int(off_s * 1e9)
        exchange = await ask(connection)
        return exchange, time.perf_counter_ns()

    script = [READ, HEAD, *[step for n in range(20) for step in (chunk(b"%d" % n), 0.001)], LAST]
    with scripted(script) as server:
        exchange, now_ns = converse(server, step_then_ask)
        stamps = [stamp for stamp, _ in exchange.pieces]
        assert exchange.sent_ns <= stamps[0]
        assert stamps == sorted(stamps)
        assert stamps[-1] <= exchange.end_ns <= now_ns


def test_abandoning_ends_a_running_exchange() -> None:
    async def give_up(connection: Connection) -> Exchange:
        task = asyncio.create_task(ask(connection))
        await asyncio.sleep(0.03)
        connection.abandon()
        connection.abandon()
        assert not connection.usable
        return await task

    with scripted([READ, HEAD, chunk(b"hello")]) as server:
        exchange = converse(server, give_up)
        assert not exchange.complete
