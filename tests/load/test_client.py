"""The client: one record for each request, whatever the server does; and what is known while streams run."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import pytest

from breakeven.load.connection import Connection
from breakeven.load.dialect import dialect_for
from breakeven.load.later import Later
from breakeven.load.plan import PlannedRequest
from breakeven.records import RequestRecord
from tests.load.conftest import Authority
from tests.load.scripted import (
    ANSWER,
    CLOSE,
    DONE,
    HEAD,
    LAST,
    LEVEL,
    PLANNED,
    READ,
    answer,
    chunk,
    client_of,
    event,
    record_of,
    records_of,
    run,
    scripted,
    stream,
    token,
    usage,
)

KEY = "sk-secret-0123456789"
BEARER = {"Authorization": f"Bearer {KEY}"}


# ---- what is sent ----


def body_of(**options: Any) -> Any:
    with scripted([READ, ANSWER]) as server:
        records_of(server, **options)
        return server.requests[0].body


def test_a_request_asks_for_a_counted_stream() -> None:
    assert body_of() == {
        "model": "m",
        "messages": [{"role": "user", "content": "Say hello."}],
        "max_tokens": 64,
        "stream": True,
        "temperature": 0,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }


def test_extra_fields_are_merged_one_level_deep() -> None:
    body = body_of(extra_body={"stream_options": {"continuous_usage_stats": False, "x": 1}, "top_k": 5, "model": "n"})
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": False, "x": 1}
    assert (body["top_k"], body["model"]) == (5, "n")


def test_extra_sampling_parameters_reach_sglang() -> None:
    body = body_of(dialect=dialect_for("sglang", {}), extra_body={"sampling_params": {"top_k": 1}})
    assert body["sampling_params"] == {"max_new_tokens": 64, "temperature": 0, "top_k": 1}


def test_headers_are_ours_and_theirs() -> None:
    with scripted([READ, ANSWER]) as server:
        records_of(server, headers={**BEARER, "X-Team": "a b"})
        assert server.requests[0].path == "/v1/chat/completions"
        assert server.requests[0].headers == {
            "host": server.url.removeprefix("http://"),
            "accept": "text/event-stream",
            "accept-encoding": "identity",
            "content-type": "application/json",
            "content-length": server.requests[0].headers["content-length"],
            "authorization": f"Bearer {KEY}",
            "x-team": "a b",
        }


def test_a_header_of_theirs_replaces_ours() -> None:
    with scripted([READ, ANSWER]) as server:
        records_of(server, headers={"host": "model.internal", "ACCEPT": "*/*"})
        headers = server.requests[0].headers
        assert (headers["host"], headers["accept"]) == ("model.internal", "*/*")


@pytest.mark.parametrize(("base", "path"), [("", ""), ("/", ""), ("/proxy", "/proxy"), ("/a/b/", "/a/b")])
def test_a_servers_root_may_have_a_path(base: str, path: str) -> None:
    with scripted([READ, ANSWER]) as server:
        server.url += base
        records_of(server)
        assert server.requests[0].path == f"{path}/v1/chat/completions"


def test_the_first_address_that_answers_is_taken() -> None:
    """`localhost` is ::1 first on many machines, where nothing may listen."""
    with scripted([READ, ANSWER]) as server:
        server.url = server.url.replace("127.0.0.1", "localhost")
        assert records_of(server)[0].outcome == "ok"


# ---- the record of a good answer ----


def test_every_field_of_a_record() -> None:
    step_s = 0.05
    script = [
        *(READ, step_s, HEAD, step_s, chunk(token("", 0))),
        *(step_s, chunk(token("one", 1)), step_s, chunk(token(" two", 2)) + chunk(token(" three four", 4))),
        *(step_s, chunk(token("", 5, finish="stop")), chunk(usage(5, prompt_tokens_details={"cached_tokens": 3}))),
        *(chunk(DONE), step_s, LAST),
    ]
    records: list[RequestRecord] = []

    async def send() -> None:
        async with client_of(server, records) as client:
            client.origin_ns -= 10**9
            assert await client.send(PLANNED) is True
            await client.settled()
            sent_ns.extend(stamp - client.origin_ns for stamp in server.sent_ns)
            assert client.chunks == 3

    sent_ns: list[int] = []
    with scripted(script) as server:
        run(send())
    (record,) = records
    assert (record.id, record.level, record.phase, record.prompt, record.kind) == (0, 4, "measured", "greeting", "chat")
    assert (record.max_tokens, record.input_tokens, record.cached_tokens) == (64, 7, 3)
    assert (record.output_tokens, record.tokens_from, record.chunks) == (5, "chunks", 3)
    assert (record.outcome, record.status, record.error, record.finish_reason) == ("ok", 200, None, "stop")
    assert (record.reconnects, record.repetition, record.text) == (0, 0.0, "one two three four")
    assert [count for _, count in record.arrivals] == [1, 4]
    assert 10**9 < record.due_ns <= record.sent_ns < sent_ns[0]  # type: ignore[operator]
    # Each stamp is that of the server's sending, give or take what a busy machine takes to deliver.
    head, _, first, last, _, _, _, end = sent_ns
    for stamp, sent in [
        (record.headers_ns, head),
        (record.first_ns, first),
        (record.last_ns, last),
        (record.end_ns, end),
    ]:
        assert stamp is not None
        assert -1e6 < stamp - sent < 30e6
    assert record.sent_ns is not None
    assert [record.sent_ns + after for after, _ in record.arrivals] == [record.first_ns, record.last_ns]


def test_text_is_kept_only_where_asked_for() -> None:
    assert record_of(ANSWER, keep_text=False).text is None


def test_records_come_in_the_order_in_which_responses_end_and_are_numbered_as_sent() -> None:
    async def send_both() -> None:
        async with client_of(server, records) as client:
            slow = asyncio.create_task(client.send(PLANNED))
            while not server.requests:
                await asyncio.sleep(0.005)
            await asyncio.gather(slow, client.send(PLANNED))
            await client.settled()
            assert client.in_flight == 0

    records: list[RequestRecord] = []
    with scripted([READ, 0.15, ANSWER], [READ, ANSWER]) as server:
        run(send_both())
    assert [record.id for record in records] == [1, 0]


def test_connections_are_opened_ahead_and_used() -> None:
    async def send_three() -> None:
        async with client_of(server, records) as client:
            await client.connect(3)
            await client.connect(2)
            assert len(client._idle) == 3
            await asyncio.gather(*(client.send(PLANNED) for _ in range(3)))
            assert len(client._idle) == 3
            await client.settled()

    records: list[RequestRecord] = []
    with scripted([READ, 0.05, ANSWER]) as server:
        run(send_three())
        assert sorted(request.connection for request in server.requests) == [0, 1, 2]
    assert [record.outcome for record in records] == ["ok"] * 3


# ---- the record of a bad one ----


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500, 503])
@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        (f'{{"error": {{"message": "no {KEY} here"}}}}', "application/json", "no *** here"),
        (f"<html><h1>No\n {KEY}</h1></html>", "text/html", "<html><h1>No ***</h1></html>"),
        ("", "text/plain", "no text"),
    ],
)
def test_a_refusal_is_recorded_in_the_servers_words_without_the_key(
    status: int, body: str, kind: str, words: str
) -> None:
    record = record_of(answer(status, body.encode(), kind), headers=BEARER)
    assert (record.outcome, record.status, record.error) == ("http_error", status, f"HTTP {status}: {words}")
    assert (record.output_tokens, record.arrivals, record.first_ns, record.last_ns) == (0, [], None, None)
    assert record.headers_ns is not None
    assert record.end_ns is not None


@pytest.mark.parametrize("before", range(270, 300, 3))
def test_no_part_of_the_key_stays_where_long_words_are_cut(before: int) -> None:
    record = record_of(answer(500, (before * "x" + KEY + "y" * 50).encode(), "text/plain"), headers=BEARER)
    assert record.error is not None
    assert len(record.error) <= 300
    assert KEY[:4] not in record.error


def test_an_error_inside_a_stream_is_recorded_without_the_key() -> None:
    record = record_of(stream(token("a", 1), event({"error": {"message": f"lost {KEY}"}})), headers=BEARER)
    assert (record.outcome, record.error) == ("stream_error", "lost ***")


def test_no_answer_in_time() -> None:
    record = record_of(timeout_s=0.3)
    assert (record.outcome, record.error) == ("timeout", "no end within 0.3 s (--timeout)")
    assert record.status is None
    check_ended(record, after_s=0.3)


def test_a_stream_that_takes_too_long() -> None:
    """Though it never falls silent."""
    drip = [step for n in range(1, 60) for step in (chunk(token("x", n)), 0.02)]
    record = record_of(HEAD, *drip, timeout_s=0.4, stall_timeout_s=0.2)
    assert (record.outcome, record.error) == ("timeout", "no end within 0.4 s (--timeout)")
    assert record.output_tokens > 5
    check_ended(record, after_s=0.4)


def test_a_stream_that_falls_silent() -> None:
    record = record_of(HEAD, chunk(token("a", 1)), 0.1, chunk(token("b", 2)), stall_timeout_s=0.3)
    assert (record.outcome, record.error) == ("timeout", "silent for 0.3 s (--stall-timeout)")
    assert record.output_tokens == 2
    check_ended(record, after_s=0.4)


def test_a_silent_stream_is_looked_at_once_a_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand that are looked at four times a second cost a third of what the client costs."""
    looks: list[Connection] = []
    check = Connection.check

    def counted(connection: Connection) -> bool:
        looks.append(connection)
        return check(connection)

    monkeypatch.setattr(Connection, "check", counted)
    rest = (chunk(token("b", 2, finish="stop")), chunk(DONE), LAST)
    assert record_of(HEAD, chunk(token("a", 1)), 1.3, *rest).outcome == "ok"
    assert len(looks) == 1


def test_waiting_for_the_first_byte_is_no_silence() -> None:
    """A request may stand in the server's queue for long."""
    assert record_of(0.5, ANSWER, stall_timeout_s=0.1).outcome == "ok"


def check_ended(record: RequestRecord, *, after_s: float) -> None:
    assert record.end_ns is not None
    assert record.sent_ns is not None
    assert after_s <= (record.end_ns - record.sent_ns) / 1e9 < after_s + 0.5


def test_the_connection_of_a_request_that_timed_out_is_not_used_again() -> None:
    with scripted([READ, HEAD, chunk(token("a", 1))], [READ, ANSWER]) as server:
        records = records_of(server, 2, stall_timeout_s=0.2)
        assert [record.outcome for record in records] == ["timeout", "ok"]
        assert [request.connection for request in server.requests] == [0, 1]


def test_a_cancelled_request_has_a_record_of_what_came() -> None:
    async def cancel() -> None:
        async with client_of(server, records) as client:
            task = asyncio.create_task(client.send(PLANNED))
            while client.tokens_so_far() < 2:
                await client.caught_up()
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await client.settled()
            assert (client.in_flight, client.tokens_so_far()) == (0, 2)
            assert await client.send(PLANNED)
            await client.settled()

    records: list[RequestRecord] = []
    with scripted([READ, HEAD, chunk(token("a", 1)), chunk(token("b", 2))], [READ, ANSWER]) as server:
        run(cancel())
        assert [request.connection for request in server.requests] == [0, 1]
    first, second = records
    assert (first.outcome, first.output_tokens, first.text) == ("cancelled", 2, "ab")
    assert first.error == "the level ended before the response did"
    assert (first.status, first.end_ns is not None) == (200, True)
    assert second.outcome == "ok"


def test_a_request_cancelled_before_it_was_sent_has_a_record_too() -> None:
    async def cancel() -> None:
        async with client_of(server, records) as client:
            task = asyncio.create_task(client.send(PLANNED))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await client.settled()

    records: list[RequestRecord] = []
    with scripted([READ, ANSWER]) as server:
        run(cancel())
    assert (records[0].outcome, records[0].sent_ns, records[0].arrivals) == ("cancelled", None, [])


def test_a_server_that_is_gone() -> None:
    """It was there when the run began."""

    async def send_to_nobody() -> None:
        async with client_of(server, records) as client:
            server.stop_listening()
            await client.connect(2)
            assert await client.send(PLANNED) is False
            await client.settled()

    records: list[RequestRecord] = []
    with scripted([READ, ANSWER]) as server:
        run(send_to_nobody())
    (record,) = records
    assert (record.outcome, record.error) == ("connection", "Connection refused")
    assert (record.sent_ns, record.status, record.reconnects) == (None, None, 0)


LONG = [token(f" {n}", n) for n in range(1, 41)]


@pytest.mark.parametrize(
    ("response", "came_through"),
    [
        (ANSWER, True),
        (stream(token("a", 1), DONE).removesuffix(LAST), True),
        (stream(*LONG, DONE), True),
        (stream(*LONG, event({"error": "late"})), True),
        (stream(*LONG, DONE).removesuffix(LAST), True),
        (stream(*LONG).removesuffix(LAST), False),
        (stream(), False),
        (stream(DONE), False),
        (stream(event({"error": "busy"}), DONE), False),
        (stream(b"event: error\ndata: busy\n\n"), False),
        (stream(token("a", 1)), False),
        (answer(500, b"no"), False),
        (answer(200, b"{}"), False),
    ],
)
def test_whether_a_whole_answer_came_is_told_at_once(response: bytes, came_through: bool) -> None:
    """Without the end of a long one: who answers nothing but errors answers in short, and must not be hammered."""

    async def send() -> bool:
        async with client_of(server, records) as client:
            told = await client.send(PLANNED)
            assert not records
            await client.settled()
            return told

    records: list[RequestRecord] = []
    with scripted([READ, response, 0.02, CLOSE]) as server:
        assert run(send()) is came_through
    assert len(records) == 1


def test_when_the_server_was_last_heard() -> None:
    async def listen() -> None:
        async with client_of(server, []) as client:
            task = asyncio.create_task(client.send(PLANNED))
            while not server.requests:
                await asyncio.sleep(0.005)
            assert client.heard_ns == 0
            let_go.set()
            while not client.heard_ns:
                await asyncio.sleep(0.005)
            first_ns = client.heard_ns
            assert server.sent_ns[0] - 1e6 < first_ns < time.perf_counter_ns()
            await task
            assert client.in_flight == 0
            assert client.heard_ns >= first_ns + 40e6

    let_go = threading.Event()
    with scripted([READ, lambda _: let_go.wait(5), ANSWER[:200], 0.05, ANSWER[200:]]) as server:
        run(listen())


# ---- while streams run ----


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "TLS"])
def test_running_requests_count_as_far_as_they_came(secure: bool, authority: Authority) -> None:
    """Three tokens came, the rest is held back until the client has looked."""

    async def look() -> None:
        async with client_of(server, records) as client:
            task = asyncio.create_task(client.send(PLANNED))
            deadline = time.monotonic() + 5
            while client.tokens_so_far() < 3 and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
                await client.caught_up()
            assert client.tokens_so_far() == 3
            assert client.in_flight == 1
            ((sent_ns, arrivals),) = client.partial(LEVEL.index)
            assert client.partial(LEVEL.index + 1) == []
            looked_on.set()
            assert await task
            await client.settled()
            assert client.partial(LEVEL.index) == []
            assert client.tokens_so_far() == 6
            (record,) = records
            assert record.sent_ns == sent_ns
            assert record.arrivals[: len(arrivals)] == arrivals
            assert [count for _, count in record.arrivals] == [1, 2, 3]

    looked_on, records = threading.Event(), list[RequestRecord]()
    script = [
        *(READ, HEAD, chunk(token("a", 1)), 0.02, chunk(token(" b c", 3))),
        *(lambda _: looked_on.wait(5), chunk(token(" d e f", 6, finish="stop")), chunk(DONE), LAST),
    ]
    with scripted(script, tls=authority.server if secure else None) as server:
        run(look())


def test_running_requests_without_counts_are_estimated_by_what_others_took() -> None:
    """Ten characters a token in the first answer; the second shows thirty characters so far."""

    async def look() -> None:
        async with client_of(server, []) as client:
            await client.send(PLANNED)
            await client.settled()
            task = asyncio.create_task(client.send(PLANNED))
            while not client.partial(LEVEL.index) or not client.partial(LEVEL.index)[0][1]:
                await asyncio.sleep(0.01)
                await client.caught_up()
            assert client.tokens_so_far() == 2 + 3
            looked_on.set()
            await task

    looked_on = threading.Event()
    first = stream(token("x" * 20, finish="stop"), usage(2), DONE)
    script = [READ, first, READ, HEAD, chunk(token("y" * 30)), lambda _: looked_on.wait(5), chunk(DONE), LAST]
    with scripted(script) as server:
        run(look())


def test_parsing_does_not_hold_up_the_sockets() -> None:
    """A thousand chunks in one read are parsed in slices; another request's chunks are stamped on time meanwhile."""

    async def send_both() -> None:
        async with client_of(server, records) as client:
            await asyncio.gather(client.send(PLANNED), client.send(PLANNED))
            lag = asyncio.create_task(worst_lag())
            await client.settled()
            lags_s.append(await lag)

    async def worst_lag() -> float:
        worst = 0.0
        for _ in range(50):
            began = time.thread_time()  # CPU: what others do on this machine is no fault of ours
            await asyncio.sleep(0)
            worst = max(worst, time.thread_time() - began)
        return worst

    lags_s: list[float] = []
    records: list[RequestRecord] = []
    many = stream(*(token(f" {n}", n) for n in range(1, 5001)), DONE)
    with scripted([READ, many]) as server:
        run(send_both())
    assert [record.output_tokens for record in records] == [5000, 5000]
    assert lags_s[0] < 0.05


def test_a_record_holds_no_key_anywhere() -> None:
    record = record_of(answer(401, json.dumps({"detail": f"Bearer {KEY} is unknown"}).encode()), headers=BEARER)
    assert KEY not in repr(record)


def test_phases_and_levels_are_those_of_the_plan() -> None:
    async def send() -> None:
        async with client_of(server, records) as client:
            await client.send(PlannedRequest(LEVEL, "ramp", PLANNED.prompt, 5))
            await client.settled()

    records: list[RequestRecord] = []
    with scripted([READ, ANSWER]) as server:
        run(send())
        assert server.requests[0].body["max_tokens"] == 5
    assert (records[0].phase, records[0].max_tokens) == ("ramp", 5)


# ---- work that can wait ----


def test_a_job_that_fails_is_reported_and_the_others_go_on() -> None:
    async def queue_three() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: reported.append(type(context["exception"])))
        later = Later(loop)
        later.add(lambda _: done.append("first") or True)  # type: ignore[func-returns-value]
        later.add(lambda _: bool(1 // 0))
        later.add(lambda _: done.append("last") or True)  # type: ignore[func-returns-value]
        await later.drained()
        await later.drained()

    done: list[str] = []
    reported: list[type] = []
    run(queue_three())
    assert (done, reported) == (["first", "last"], [ZeroDivisionError])


def test_urgent_jobs_go_first_and_unfinished_ones_stay_in_front() -> None:
    async def queue_some() -> None:
        later = Later(asyncio.get_running_loop())
        rounds = iter([False, False, True])
        later.add(lambda _: done.append("slow") or next(rounds))  # type: ignore[func-returns-value]
        later.add(lambda _: done.append("next") or True)  # type: ignore[func-returns-value]
        later.add(lambda _: done.append("urgent") or True, urgent=True)  # type: ignore[func-returns-value]
        await later.drained()

    done: list[str] = []
    run(queue_some())
    assert done == ["urgent", "slow", "slow", "slow", "next"]
