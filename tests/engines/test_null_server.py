"""The null server, over real sockets: its APIs, its timetable and its record of both."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import trustme

from breakeven.engines.null import NullServer, null_server
from breakeven.engines.null.steps import StepTable
from breakeven.errors import EngineError

CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
PER_CHUNK = {"include_usage": True, "continuous_usage_stats": True}
COMMAND = [sys.executable, "-m", "breakeven.engines.null"]


@pytest.fixture(scope="module")
def server() -> Iterator[NullServer]:
    with null_server("--step-us", "1000", "--tokens", "1,3,2") as running:
        yield running


def connect(server: NullServer) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)


def call(
    server: NullServer, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, bytes]:
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    with closing(connect(server)) as connection:
        connection.request(method, path, data, headers or {})
        response = connection.getresponse()
        return response.status, response.read()


def chat(max_tokens: int, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "one two three"}], "max_tokens": max_tokens, **more}


def wire(body: dict[str, Any], path: str = CHAT, headers: str = "") -> bytes:
    """A request as bytes, for a raw socket."""
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nhost: x\r\n{headers}content-length: {len(data)}\r\n\r\n".encode() + data


def events(stream: bytes) -> list[Any]:
    """The events before [DONE], which must be the last."""
    parts = [part.removeprefix(b"data: ") for part in stream.split(b"\n\n")]
    assert parts[-2:] == [b"[DONE]", b""]
    return [json.loads(part) for part in parts[:-2]]


def stream(server: NullServer, body: dict[str, Any], path: str = CHAT) -> list[Any]:
    status, data = call(server, "POST", path, {**body, "stream": True})
    assert status == 200
    return events(data)


def open_stream(server: NullServer, body: dict[str, Any], path: str = CHAT) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    sock.sendall(wire({**body, "stream": True}, path))
    return sock


def read_until(sock: socket.socket, end: bytes) -> bytes:
    data = b""
    while not data.endswith(end):
        more = sock.recv(1 << 16)
        assert more, f"closed before {end!r}: {data!r}"
        data += more
    return data


def metrics(server: NullServer) -> dict[str, float]:
    lines = call(server, "GET", "/metrics")[1].decode().splitlines()
    samples = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name.replace('engine="0",model_name="null"', ""): float(value) for name, value in samples}


# ---- the APIs ----


def test_chat_stream_cycles_the_tokens_and_caps_the_last_chunk(server: NullServer) -> None:
    *tokens, finish = stream(server, chat(9))
    words = [len(event["choices"][0]["delta"]["content"].split()) for event in tokens]
    assert words == [1, 3, 2, 1, 2]
    assert finish["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    assert {event["choices"][0]["finish_reason"] for event in tokens} == {None}
    assert {event["object"] for event in tokens} == {"chat.completion.chunk"}


def test_completions_stream_has_text(server: NullServer) -> None:
    *tokens, finish = stream(server, {"prompt": "one two", "max_tokens": 4}, TEXT)
    assert [len(event["choices"][0]["text"].split()) for event in tokens] == [1, 3]
    assert finish["choices"][0]["text"] == ""
    assert finish["object"] == "text_completion"


def test_per_chunk_usage_is_cumulative_and_on_every_event(server: NullServer) -> None:
    got = stream(server, chat(6, stream_options=PER_CHUNK))
    assert [event["usage"]["completion_tokens"] for event in got] == [1, 4, 6, 6, 6]
    assert got[1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert got[-1]["choices"] == []


def test_final_usage_is_on_the_last_event_only(server: NullServer) -> None:
    *others, last = stream(server, chat(6, stream_options={"include_usage": True}))
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
    assert all("usage" not in event for event in others)


def test_no_usage_in_a_stream_that_does_not_ask(server: NullServer) -> None:
    assert all("usage" not in event and event["choices"] for event in stream(server, chat(6)))


@pytest.mark.parametrize(("path", "prompt"), [(CHAT, chat(8)), (TEXT, {"prompt": [1, 2, 3], "max_tokens": 8})])
def test_plain_answer_has_text_and_usage(server: NullServer, path: str, prompt: dict[str, Any]) -> None:
    answer = json.loads(call(server, "POST", path, prompt)[1])
    choice = answer["choices"][0]
    assert len((choice.get("text") or choice["message"]["content"]).split()) == 8
    assert choice["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}


def test_max_tokens_default_and_newer_name(server: NullServer) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    for extra, want in ({}, 128), ({"max_completion_tokens": 5, "max_tokens": 9}, 5):
        assert json.loads(call(server, "POST", CHAT, body | extra)[1])["usage"]["completion_tokens"] == want


def test_generate_stream_is_cumulative(server: NullServer) -> None:
    got = stream(server, {"text": "one two", "sampling_params": {"max_new_tokens": 6}}, GENERATE)
    infos = [event["meta_info"] for event in got]
    assert [len(event["text"].split()) for event in got] == [1, 4, 6]
    assert [info["completion_tokens"] for info in infos] == [1, 4, 6]
    assert [info["finish_reason"] for info in infos] == [None, None, {"type": "length", "length": 6}]
    assert {info["prompt_tokens"] for info in infos} == {2}
    assert all(later["text"].startswith(earlier["text"]) for earlier, later in pairwise(got))


def test_generate_plain(server: NullServer) -> None:
    body = {"text": "one two", "sampling_params": {"max_new_tokens": 6}}
    answer = json.loads(call(server, "POST", GENERATE, body)[1])
    assert len(answer["text"].split()) == answer["meta_info"]["completion_tokens"] == 6


def test_long_output_keeps_its_length(server: NullServer) -> None:
    body = {"prompt": "x", "max_tokens": 10_000, "stream": False}
    with null_server("--step-us", "1", "--tokens", "5000") as quick:
        answer = json.loads(call(quick, "POST", TEXT, body)[1])
        assert [len(e["choices"][0]["text"].split()) for e in stream(quick, body, TEXT)] == [5000, 5000, 0]
    assert len(answer["choices"][0]["text"].split()) == 10_000


def test_usage_caps() -> None:
    body = {"text": "x", "sampling_params": {"max_new_tokens": 2}}
    with null_server("--usage", "final") as server:
        counted = ["usage" in event for event in stream(server, chat(2, stream_options=PER_CHUNK))]
        assert counted == [False, False, False, True]
        infos = [event["meta_info"] for event in stream(server, body, GENERATE)]
        assert ["completion_tokens" in info for info in infos] == [False, True]
    with null_server("--usage", "none") as server:
        plain = json.loads(call(server, "POST", CHAT, chat(2))[1])
        got = [plain, *stream(server, chat(2, stream_options=PER_CHUNK))]
        assert all("usage" not in event for event in got)
        assert all("completion_tokens" not in event["meta_info"] for event in stream(server, body, GENERATE))


def test_role_chunk_comes_at_admission_a_step_before_the_first_token() -> None:
    body = chat(1, stream_options=PER_CHUNK)
    flags = ("--role-chunk", "--step-us", "200000")
    with null_server(*flags) as server, closing(open_stream(server, body)) as sock:
        head = read_until(sock, b"\n\n\r\n")
        assert b'"delta":{"role":"assistant","content":""}' in head
        assert b'"completion_tokens":0' in head
        assert b'"completion_tokens":1' in read_until(sock, b"0\r\n\r\n")


def test_small_routes(server: NullServer) -> None:
    assert json.loads(call(server, "GET", "/v1/models")[1])["data"][0]["id"] == "null"
    assert call(server, "GET", "/health") == (200, b"")
    assert json.loads(call(server, "GET", "/version?x=1")[1])["version"]


# ---- errors ----


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", CHAT, chat(1, model="other"), 404),
        ("GET", "/nowhere", None, 404),
        ("POST", CHAT, b"{", 400),
        ("POST", CHAT, b"[1]", 400),
        ("POST", CHAT, b"[" * 100_000, 400),
        ("POST", CHAT, {"max_tokens": 1}, 400),
        ("POST", CHAT, chat(0), 400),
        ("POST", CHAT, chat(1, stream_options=3), 400),
        ("GET", CHAT, None, 405),
        ("POST", "/health", None, 405),
    ],
)
def test_refusals_are_openai_errors(server: NullServer, method: str, path: str, body: object, status: int) -> None:
    got, data = call(server, method, path, body)
    error = json.loads(data)["error"]
    assert (got, error["code"]) == (status, status)
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\ncontent-length: x\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n", b"411"),
        (b"GET / HTTP/1.0\r\n\r\n", b"505"),
        (b"GET /" + b"x" * 70_000, b"431"),
    ],
)
def test_what_cannot_be_framed_is_refused_and_hung_up(server: NullServer, request_bytes: bytes, status: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        sock.sendall(request_bytes)
        assert sock.makefile("rb").read().split(b" ")[1] == status


def test_api_key_is_demanded_on_the_api_only() -> None:
    with null_server("--api-key", "sesame") as server:
        for headers in {}, {"Authorization": "Bearer wrong"}, {"Authorization": "sesame"}:
            status, data = call(server, "POST", CHAT, chat(1), headers)
            assert status == 401
            assert json.loads(data)["error"]["code"] == 401
        good = {"Authorization": "Bearer sesame"}
        assert call(server, "POST", CHAT, chat(1), good)[0] == call(server, "GET", "/v1/models", None, good)[0] == 200
        assert call(server, "GET", "/metrics")[0] == call(server, "GET", "/health")[0] == 200


# ---- connections ----


def test_keep_alive_serves_streams_and_plain_answers_on_one_connection(server: NullServer) -> None:
    with closing(connect(server)) as connection:
        for streamed in True, False, True:
            connection.request("POST", CHAT, json.dumps(chat(4, stream=streamed)))
            sock = connection.sock
            data = connection.getresponse().read()
            assert connection.sock is sock is not None
            assert data.endswith(b"[DONE]\n\n") == streamed


def test_pipelined_requests_are_answered_in_order(server: NullServer) -> None:
    get = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
    last = b"GET /version HTTP/1.1\r\nconnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        sock.sendall(get + wire(chat(4, stream=True)) + wire(chat(3)) + last)
        data = sock.makefile("rb").read()
    marks = [data.index(b"null-"), data.index(b"[DONE]"), data.index(b'"message"'), data.rindex(b"null-")]
    assert marks == sorted(marks)
    assert data.count(b"HTTP/1.1 200 OK") == 4


def test_a_request_may_come_byte_by_byte(server: NullServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in wire(chat(3, stream=True)):
            sock.sendall(bytes([byte]))
        read_until(sock, b"0\r\n\r\n")


def test_connection_close_ends_a_stream_after_its_last_byte(server: NullServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        sock.sendall(wire(chat(9, stream=True), headers="connection: close\r\n"))
        assert sock.makefile("rb").read().endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_a_client_that_does_not_read_holds_nobody_up_and_loses_nothing() -> None:
    body = {"text": "x", "sampling_params": {"max_new_tokens": 1500}}  # 7 MB: more than the sockets hold
    with null_server("--step-us", "100") as server, closing(open_stream(server, body, GENERATE)) as slow:
        time.sleep(0.1)
        assert len(stream(server, chat(5))) == 6
        data = read_until(slow, b"0\r\n\r\n")
        assert data.count(b"data: {") == 1500


def test_a_client_that_leaves_is_recorded_as_unfinished(server: NullServer) -> None:
    server.reset()
    with closing(open_stream(server, chat(100_000))) as sock:
        sock.recv(10)
    give_up = time.monotonic() + 5
    while not (rows := server.truth()) and time.monotonic() < give_up:
        time.sleep(0.01)
    assert not rows[0].finished
    assert metrics(server)["vllm:num_requests_running{}"] == 0


def test_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    with null_server("--host", "::1") as server:
        assert server.url == f"http://[::1]:{server.port}"
        assert server.truth() == []


def test_tls(tmp_path: Path) -> None:
    authority, pem = trustme.CA(), tmp_path / "server.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(pem)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    with null_server("--tls-cert", str(pem), "--step-us", "1000") as server:
        silent = socket.create_connection(("127.0.0.1", server.port))  # no handshake: holds nobody up
        connection = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=10, context=context)
        with closing(connection), closing(silent):
            connection.request("POST", CHAT, json.dumps(chat(3, stream=True)))
            assert len(events(connection.getresponse().read())) == 4
        assert [row.tokens for row in server.truth()] == [3]


# ---- the timetable and the record ----


def test_truth_tells_times_on_the_clients_clock(server: NullServer) -> None:
    server.reset()
    sent_ns = time.perf_counter_ns()
    got = stream(server, chat(9))
    end_ns = time.perf_counter_ns()
    (row,) = server.truth()
    assert sent_ns < row.arrival_ns < row.first_ns < row.last_ns < end_ns
    assert row[4:] == (9, 5, True)
    assert row.id == got[0]["id"]


def test_reset_forgets_requests_and_steps(server: NullServer) -> None:
    stream(server, chat(2))
    assert server.truth()
    assert server.steps()
    server.reset()
    assert server.truth() == []
    assert server.steps() == []


def test_prefill_and_steps_keep_the_timetable() -> None:
    with null_server("--step-us", "20000", "--per-request-us", "5000", "--prefill-us", "20000") as server:
        stream(server, chat(12))
        (row,), steps, slips = server.truth(), server.steps(), metrics(server)["null:step_slips_total{}"]
    first_due = steps[0].due_ns - row.arrival_ns
    assert first_due == 45_000_000 or slips  # the prefill, then a step of one request
    assert row.first_ns > steps[0].due_ns
    assert median(b.due_ns - a.due_ns for a, b in pairwise(steps)) == 25_000_000
    assert 11 * 0.025 * 0.9 < (row.last_ns - row.first_ns) / 1e9 < 11 * 0.025 * 2


def test_steps_lengthen_with_the_batch() -> None:
    table = "1:2000,2:3000,10:11000"
    with null_server("--step-table", table, "--prefill-us", "100000") as server:
        socks = [open_stream(server, chat(20)) for _ in range(6)]
        for sock in socks:
            read_until(sock, b"0\r\n\r\n")
            sock.close()
        full = [step for step in server.steps() if step.batch == 6]
    assert median(b.due_ns - a.due_ns for a, b in pairwise(full)) == 7_000_000


def test_max_batch_queues_in_order_and_the_gauges_tell() -> None:
    with null_server("--max-batch", "1", "--step-us", "10000") as server:
        socks = [open_stream(server, chat(20)) for _ in range(3)]
        read_until(socks[0], b"\n\n\r\n")
        gauges = metrics(server)
        for _ in range(20):  # the first may decode before the last was read
            if gauges["vllm:num_requests_waiting{}"] < 2:
                gauges = metrics(server)
        assert (gauges["vllm:num_requests_running{}"], gauges["vllm:num_requests_waiting{}"]) == (1, 2)
        assert 0 < gauges["vllm:kv_cache_usage_perc{}"] < 1
        for sock in socks:
            read_until(sock, b"0\r\n\r\n")
            sock.close()
        rows = server.truth()
    assert [row.tokens for row in rows] == [20, 20, 20]
    assert all(a.last_ns < b.first_ns and a.arrival_ns < b.arrival_ns for a, b in pairwise(rows))


def test_time_scale_multiplies_every_duration() -> None:
    flags = ("--step-us", "200000", "--prefill-us", "1000000", "--time-scale", "0.1")
    with null_server(*flags) as server:
        stream(server, chat(6))
        (row,), steps, slips = server.truth(), server.steps(), metrics(server)["null:step_slips_total{}"]
    assert steps[0].due_ns - row.arrival_ns == 120_000_000 or slips
    assert median(b.due_ns - a.due_ns for a, b in pairwise(steps)) == 20_000_000


def test_a_stall_longer_than_a_step_restarts_the_schedule() -> None:
    with null_server("--step-us", "10000") as server, closing(open_stream(server, chat(20))) as sock:
        read_until(sock, b"\n\n\r\n")
        os.kill(server.pid, signal.SIGSTOP)
        time.sleep(0.1)
        os.kill(server.pid, signal.SIGCONT)
        read_until(sock, b"0\r\n\r\n")
        assert metrics(server)["null:step_slips_total{}"] >= 1
        assert max(b.due_ns - a.due_ns for a, b in pairwise(server.steps())) > 80_000_000


def test_speculation_counters_follow_the_chunks() -> None:
    with null_server("--tokens", "1,3,2", "--step-us", "1000") as server:
        stream(server, chat(9))  # chunks of 1, 3, 2, 1, 2
        got = metrics(server)
    spec = "vllm:spec_decode_num_"
    assert got[spec + "drafts_total{}"] == 5
    assert got[spec + "draft_tokens_total{}"] == 10
    assert got[spec + "accepted_tokens_total{}"] == 4
    assert got[spec + 'accepted_tokens_per_pos_total{,position="0"}'] == 3
    assert got[spec + 'accepted_tokens_per_pos_total{,position="1"}'] == 1
    assert got["vllm:num_preemptions_total{}"] == 0


def test_no_speculation_counters_without_speculation() -> None:
    with null_server() as server:
        assert not any("spec_decode" in name for name in metrics(server))


@pytest.mark.parametrize(("batch", "step_us"), [(1, 12_900), (2, 15_900), (6, 28_450), (10, 41_000), (14, 53_550)])
def test_step_table_is_linear_between_and_beyond_its_points(batch: int, step_us: float) -> None:
    assert StepTable([(1, 12_900), (2, 15_900), (10, 41_000)]).step_us(batch) == pytest.approx(step_us)


def test_step_table_of_one_point_and_of_a_falling_line() -> None:
    assert StepTable([(4, 500)]).step_us(100) == 500
    assert StepTable([(1, 100), (2, 50)]).step_us(10) == 1


# ---- starting and stopping ----


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_at_once_with_code_0(number: signal.Signals) -> None:
    with subprocess.Popen([*COMMAND, "--step-us", "1000"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        hello = json.loads(process.stdout.readline())
        server = NullServer(**hello, pid=process.pid)
        with closing(open_stream(server, chat(100_000))) as sock:
            sock.recv(10)
            process.send_signal(number)
            assert process.wait(2) == 0


def test_end_of_stdin_ends_it_with_code_0() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([*COMMAND, "--exit-on-stdin-eof"], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        process.stdin.close()
        assert process.wait(2) == 0


def test_the_helper_stops_the_server_even_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), null_server() as server:
        _ = 1 // 0
    with pytest.raises(ConnectionRefusedError):
        connect(server).connect()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--step-table", "2:10,1:20"), "must rise"),
        (("--step-table", "1:10", "--step-us", "5"), "not allowed with"),
        (("--step-table", "1:10", "--per-request-us", "5"), "leave --per-request-us out"),
        (("--tokens", "1,0"), "1 or above"),
        (("--tls-cert", "/nowhere.pem"), "--tls-cert"),
        (("--host", "192.0.2.1"), "can't listen"),
    ],
)
def test_bad_flags_fail_the_start_with_a_reason(flags: tuple[str, ...], said: str) -> None:
    with pytest.raises(EngineError, match=said), null_server(*flags):
        pass


def test_who_finds_no_descriptor_waits_until_another_leaves() -> None:
    limited = ["sh", "-c", 'ulimit -n 40; exec "$@"', "sh", *COMMAND]
    with subprocess.Popen(limited, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        server = NullServer(**json.loads(process.stdout.readline()), pid=process.pid)
        crowd = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(60)]
        before_s = cpu_seconds(process.pid)
        time.sleep(0.5)
        assert process.poll() is None
        assert cpu_seconds(process.pid) - before_s < 0.2  # it does not spin
        for connection in crowd:
            connection.close()
        assert call(server, "GET", "/health")[0] == 200
        process.terminate()


def cpu_seconds(pid: int) -> float:
    ticks = Path(f"/proc/{pid}/stat").read_text().split()[13:15]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
