"""A server that answers each request with the fault that its prompt names, and what the request's record must say.

The catalogue holds what servers and proxies do to a stream: errors, ends, silences, bodies that are none and broken
framing. What only looks like a fault is in `corners.py`.
"""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from typing import Any, NamedTuple

from breakeven.load.dialect import Dialect, dialect_for
from breakeven.load.plan import PlannedRequest
from breakeven.load.prompts import Prompt
from breakeven.records import Outcome, TokensFrom
from tests.load.scripted import (
    CHAT,
    CLOSE,
    DONE,
    HEAD,
    LEVEL,
    RESET,
    Peer,
    Script,
    Step,
    answer,
    chunk,
    event,
    stream,
    token,
    usage,
)

SGLANG = dialect_for("sglang", {})


class Fault(NamedTuple):
    """What the server sends after it has read a request, and what the record says then.

    `arrivals` is exact up to one; further ones are sent with pauses between, which a late reader reads as one. `error`
    is a part of the record's. `kept` wants the request on a connection that has carried one.
    """

    script: Script
    outcome: Outcome
    output_tokens: int = 0
    arrivals: int = 0
    status: int | None = 200
    tokens_from: TokensFrom = "estimated"
    error: str | None = None
    text: str | None = None
    reconnects: int = 0
    kept: bool = False
    is_sglang: bool = False


def planned(name: str) -> PlannedRequest:
    """The request that gets this fault."""
    return PlannedRequest(LEVEL, "measured", Prompt(id=name, kind="chat", text=name), 64)


def misbehaving(catalogue: Mapping[str, Fault]) -> Step:
    """The step of a fault server: answers requests until the connection is gone."""

    def answer_all(peer: Peer) -> None:
        while peer.is_open:
            body = peer.read().body
            name = body["text"] if "text" in body else body["messages"][0]["content"]
            peer.do(catalogue[name].script)

    return answer_all


def dialect_of(fault: Fault) -> Dialect:
    """The API in which the fault is put."""
    return SGLANG if fault.is_sglang else CHAT


# ---- what it says ----

A, B, C = token("a", 1), token(" b", 3), token(" c", 4, finish="stop")
WHOLE = (A, B, C, usage(4), DONE)
#: One whole answer of four tokens, in one read.
OK: dict[str, Any] = {"output_tokens": 4, "arrivals": 1, "tokens_from": "chunks", "text": "a b c"}
#: What has come of it before most faults.
BEGUN: dict[str, Any] = {"output_tokens": 1, "arrivals": 1, "tokens_from": "chunks", "text": "a"}
PAUSE = 0.02
EVENT_STREAM = b"Content-Type: text/event-stream\r\n"
OLD_HEAD = b"HTTP/1.0 200 OK\r\n" + EVENT_STREAM + b"\r\n"


def sized(data: bytes, size: int, *headers: bytes) -> bytes:
    """A response that announces its length."""
    lines = [b"HTTP/1.1 200 OK", EVENT_STREAM.rstrip(), b"Content-Length: %d" % size, *headers]
    return b"\r\n".join([*lines, b"", data])


def choice(index: int, text: str, count: int, finish: str | None = None) -> bytes:
    one = {"index": index, "delta": {"content": text}, "finish_reason": finish}
    return event({"choices": [one], "usage": {"completion_tokens": count}})


def sglang(text: str, count: int, finish: Any = None, **more: Any) -> bytes:
    return event({"text": text, "meta_info": {"completion_tokens": count, "finish_reason": finish}, **more})


def for_ever(data: bytes) -> Step:
    def send(peer: Peer) -> None:
        while not peer.server.stopping.wait(PAUSE):
            peer.send(data)

    return send


def hang_up_once(peer: Peer) -> None:
    """Closes without a word where the connection has carried a request before."""
    earlier = [request for request in peer.server.requests if request.connection == peer.number]
    if len(earlier) > 1:
        peer.close()
    else:
        peer.send(stream(*WHOLE))


def cut_at(data: bytes, mark: bytes, after: int) -> tuple[bytes, bytes]:
    place = data.index(mark) + after
    return data[:place], data[place:]


NO_JSON = "an event that is no chunk"

ERRORS: dict[str, Fault] = {
    "error event in mid-stream": Fault(
        [stream(A, event({"error": {"message": "out of memory", "code": 500}}), DONE)],
        "stream_error",
        error="out of memory",
        **BEGUN,
    ),
    "error event alone": Fault([stream(event({"error": {"message": "busy"}}))], "stream_error", error="busy"),
    "error event after the finish": Fault(
        [stream(*WHOLE[:-1], event({"error": "late"}), DONE)], "stream_error", error="late", **OK
    ),
    "error as a text": Fault([stream(A, event({"error": "no room"}))], "stream_error", error="no room", **BEGUN),
    "event: error with plain text": Fault(
        [stream(A, b"event: error\ndata: gone\n\n", DONE)], "stream_error", error="gone", **BEGUN
    ),
    "event: error with JSON": Fault(
        [stream(A, b'event: error\r\ndata: {"message": "gone"}\r\n\r\n')], "stream_error", error="gone", **BEGUN
    ),
    "error with its message at the top (vLLM before 0.10)": Fault(
        [stream(event({"object": "error", "message": "too long", "code": 400}), DONE)],
        "stream_error",
        error="too long",
    ),
    "error as a field of its own (llama.cpp before 2025)": Fault(
        [stream(A, b'error: {"code": 500, "message": "slot lost"}\n\n')], "stream_error", error="slot lost", **BEGUN
    ),
    "finish reason abort": Fault(
        [stream(A, token("", 1, finish="abort"), DONE)], "stream_error", error="gave the answer up (abort)", **BEGUN
    ),
    "SGLang error": Fault(
        [stream(sglang("a", 1), event({"error": {"message": "queue full"}}), DONE)],
        "stream_error",
        error="queue full",
        is_sglang=True,
        **BEGUN,
    ),
    "SGLang abort": Fault(
        [stream(sglang("a", 1, {"type": "abort", "message": "shutting down", "status_code": 503}), DONE)],
        "stream_error",
        error="shutting down",
        is_sglang=True,
        **BEGUN,
    ),
}

ENDS: dict[str, Fault] = {
    "no finish, no [DONE]": Fault([stream(A)], "truncated", error="without a finish reason", **BEGUN),
    "no event at all": Fault([stream()], "truncated", error="without a finish reason"),
    "length 0": Fault([sized(b"", 0)], "truncated", error="without a finish reason"),
    "closed in mid-stream": Fault([HEAD + chunk(A), PAUSE, CLOSE], "truncated", error="the server closed", **BEGUN),
    "closed in mid-event": Fault(
        [HEAD + chunk(A) + chunk(B)[:-30], PAUSE, CLOSE], "truncated", error="the server closed", **BEGUN
    ),
    "closed before its length": Fault([sized(A, 999), PAUSE, CLOSE], "truncated", error="the server closed", **BEGUN),
    "closed with one of two choices unfinished": Fault(
        [HEAD + chunk(choice(0, "a", 1, "stop")) + chunk(choice(1, "b", 1)), PAUSE, CLOSE],
        "truncated",
        error="the server closed",
        output_tokens=2,
        arrivals=1,
        tokens_from="chunks",
    ),
    "closed after [DONE] without the last chunk": Fault([HEAD + b"".join(map(chunk, WHOLE)), PAUSE, CLOSE], "ok", **OK),
    "reset in mid-stream": Fault([HEAD + chunk(A), PAUSE, RESET], "connection", error="reset", **BEGUN),
    "closed without an answer": Fault([CLOSE], "connection", status=None, error="the server closed"),
    "reset without an answer": Fault([PAUSE, RESET], "connection", status=None, error="reset"),
    "closed in the head": Fault([HEAD[:40], PAUSE, CLOSE], "connection", status=None, error="the server closed"),
    "closed after an interim response": Fault(
        [b"HTTP/1.1 100 Continue\r\n\r\n", PAUSE, CLOSE], "connection", status=100, error="the server closed"
    ),
    "kept-alive connection that was gone": Fault([hang_up_once], "ok", kept=True, reconnects=1, **OK),
    "HTTP/1.0, ended by closing": Fault([OLD_HEAD + b"".join(WHOLE), PAUSE, CLOSE], "ok", **OK),
    "HTTP/1.0, ended by closing too early": Fault(
        [OLD_HEAD + A, PAUSE, CLOSE], "truncated", error="without a finish reason", **BEGUN
    ),
    "HTTP/1.0, reset": Fault([OLD_HEAD + A, PAUSE, RESET], "connection", error="reset", **BEGUN),
    "[DONE] alone": Fault([stream(DONE)], "empty", error="no chunk carried output"),
    "no token": Fault(
        [stream(token("", 0), token(None, 1, finish="length"), usage(1), DONE)],
        "empty",
        error="no chunk carried output",
        output_tokens=1,
        tokens_from="total",
    ),
    "only comments": Fault([stream(b": ping\n\n", b": ping\n\n")], "truncated", error="without a finish reason"),
}

SILENCES: dict[str, Fault] = {
    "silent after the head": Fault([HEAD], "timeout", error="--stall-timeout"),
    "silent in mid-stream": Fault([HEAD + chunk(A)], "timeout", error="--stall-timeout", **BEGUN),
    "silent in mid-letter": Fault(
        [HEAD + chunk(A), cut_at(chunk(token("é", 2)), "é".encode(), 1)[0]], "timeout", error="--stall", **BEGUN
    ),
    "silent in the head": Fault([HEAD[:30]], "timeout", status=None, error="--stall-timeout"),
    "no answer at all": Fault([], "timeout", status=None, error="--timeout"),
    "interim responses for ever": Fault(
        [for_ever(b"HTTP/1.1 102 Processing\r\n\r\n")], "timeout", status=102, error="--timeout"
    ),
    "a stream that never ends": Fault(
        [HEAD + chunk(A), for_ever(chunk(token("", 1)))], "timeout", error="--timeout", **BEGUN
    ),
    "comments for ever": Fault(
        [HEAD + chunk(A), for_ever(chunk(b": ping\n\n"))], "timeout", error="--timeout", **BEGUN
    ),
}

NO_STREAMS: dict[str, Fault] = {
    "HTML": Fault([answer(200, b"<h1>Welcome to nginx!</h1>", "text/html")], "protocol", error="with text/html"),
    "a whole completion": Fault([answer(200, b'{"choices": []}')], "protocol", error="with application/json"),
    "no content type": Fault([b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"], "protocol", error="with nothing"),
    "a type that only names the stream": Fault(
        [answer(200, b"x", "text/plain; was=text/event-stream")], "protocol", error="with text/plain"
    ),
    "204": Fault([b"HTTP/1.1 204 No Content\r\n\r\n"], "protocol", status=204, error="with nothing"),
    "gzip": Fault(
        [answer(200, gzip.compress(b"".join(WHOLE)), "text/event-stream", "Content-Encoding: gzip")],
        "protocol",
        error="Content-Encoding: gzip",
    ),
    "gzip in name only": Fault(
        [stream(*WHOLE).replace(b"\r\n", b"\r\nContent-Encoding: gzip\r\n", 1)],
        "protocol",
        error="Content-Encoding: gzip",
    ),
    "a refusal in gzip": Fault(
        [answer(500, gzip.compress(b"busy"), "text/plain", "Content-Encoding: gzip")],
        "http_error",
        status=500,
        error="HTTP 500: a text in gzip",
    ),
    "a redirect": Fault(
        [answer(307, b"", "text/html", "Location: https://elsewhere/v1")],
        "http_error",
        status=307,
        error="HTTP 307: redirected to https://elsewhere/v1",
    ),
    "304": Fault([b"HTTP/1.1 304 Not Modified\r\n\r\n"], "http_error", status=304, error="HTTP 304: no text"),
    "429": Fault(
        [answer(429, b'{"error": {"message": "slow down"}}', "application/json", "Retry-After: 0")],
        "http_error",
        status=429,
        error="HTTP 429: slow down",
    ),
    "502 of a proxy": Fault(
        [answer(502, b"<html><h1>502\n Bad Gateway</h1></html>", "text/html")],
        "http_error",
        status=502,
        error="HTTP 502: <html><h1>502 Bad Gateway</h1></html>",
    ),
    "503, closed before its length": Fault(
        [b"HTTP/1.1 503 Busy\r\nContent-Length: 99\r\n\r\nbusy", PAUSE, CLOSE],
        "http_error",
        status=503,
        error="HTTP 503: busy",
    ),
    "500 as an event stream": Fault(
        [answer(500, b'data: {"error": "lost"}\n\n', "text/event-stream")], "http_error", status=500, error="lost"
    ),
}

BROKEN: dict[str, Fault] = {
    "a chunk's size that is none": Fault(
        [HEAD + chunk(A), PAUSE, b"not a size\r\n", PAUSE, CLOSE], "protocol", error="no HTTP", **BEGUN
    ),
    "a chunk longer than its size": Fault([HEAD + chunk(A) + b"2\r\nlonger\r\n"], "protocol", error="no HTTP", **BEGUN),
    "a chunk's size beyond all numbers": Fault([HEAD + chunk(A) + b"f" * 40], "protocol", error="no HTTP", **BEGUN),
    "length and chunks together": Fault(
        [HEAD.replace(b"\r\n\r\n", b"\r\nContent-Length: 5\r\n\r\n") + chunk(A)],
        "protocol",
        status=None,
        error="no HTTP",
    ),
    "two lengths": Fault([sized(A, 5, b"Content-Length: 6")], "protocol", status=None, error="no HTTP"),
    "SSH": Fault([b"SSH-2.0-OpenSSH_9.6\r\n"], "protocol", status=None, error="no HTTP"),
    "a TLS alert": Fault([b"\x15\x03\x03\x00\x02\x02\x46"], "protocol", status=None, error="no HTTP"),
    "HTTP/2": Fault([b"\x00\x00\x12\x04\x00\x00\x00\x00\x00" + bytes(18)], "protocol", status=None, error="no HTTP"),
    "events without HTTP": Fault([A], "protocol", status=None, error="no HTTP"),
    "switched protocols": Fault(
        [b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n\x81"],
        "protocol",
        status=101,
        error="switched protocols",
    ),
    "an event that is no JSON": Fault([stream(A, b"data: hello\n\n", DONE)], "protocol", error=NO_JSON, **BEGUN),
    "an event that is no object": Fault([stream(A, b"data: [1]\n\n", DONE)], "protocol", error=NO_JSON, **BEGUN),
    "an event of two values": Fault([stream(A, b"data: {},{}\n\n", DONE)], "protocol", error=NO_JSON, **BEGUN),
    "an event cut in its JSON": Fault([stream(A, B[:30] + b"\n\n", DONE)], "protocol", error=NO_JSON, **BEGUN),
    "half a letter in an event": Fault(
        [stream(A, token("é", 2).replace("é".encode(), b"\xc3"), DONE)], "protocol", error=NO_JSON, **BEGUN
    ),
    "half a surrogate pair in an event": Fault(
        [stream(A, token("X", 2).replace(b"X", b"\\ud83d"), DONE)], "protocol", error=NO_JSON, **BEGUN
    ),
}

FAULTS: dict[str, Fault] = {**ERRORS, **ENDS, **SILENCES, **NO_STREAMS, **BROKEN}
