"""Responses that no server should send, through everything between the socket and the record.

    python -m tests.load.fuzz --minutes 60 --seed 1      looks for faults, prints each with its reproducer
    python -m tests.load.fuzz --seed 1 --case 4711       one case again, with its traceback

A case is a response by the grammar, most often damaged, cut in several ways. Whatever comes: no exception, no lie in
the record, the same record however it was cut, and no more time than its length is worth.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, cast, get_args

import msgspec

from breakeven.load.connection import Connection
from breakeven.load.dialect import Dialect, dialect_for
from breakeven.load.flight import Flight
from breakeven.records import Outcome, RequestRecord
from tests.load.scripted import PLANNED

#: CPU time that a case may take: some milliseconds are usual.
LIMIT_S = 1.0
DIALECTS = [dialect_for("chat", {}), dialect_for("completions", {}), dialect_for("sglang", {})]


# ---- from reads to a record, without a socket ----


class _Gone(NamedTuple):
    """What a flight asks of a connection that is lost."""

    failure: str | None
    was_reset: bool


def flown(reads: Sequence[bytes], dialect: Dialect, ending: str) -> Flight:
    """The flight whose response came in these reads, a microsecond apart, and then ended: `kept`, `closed`, `reset`."""
    flight = Flight(1, PLANNED, dialect, due_ns=500)
    exchange = flight.exchange
    exchange.sent_ns = 1000
    for number, data in enumerate(reads, 2):
        exchange.reads.append((1000 * number, data))
        if not number % 5:
            exchange.advance()  # a look now and then, as a connection takes it
    failure = {"kept": None, "closed": "the server closed the connection", "reset": "reset"}[ending]
    if ending == "closed":
        exchange.close()
    exchange.advance()
    if not (exchange.complete or exchange.broken):
        flight.connection = cast(Connection, _Gone(failure, ending == "reset"))
        if ending == "kept":
            flight.fail("timeout", "silent")
    flight.end(1000 * (len(reads) + 2))
    return flight


def record_of(flight: Flight) -> RequestRecord:
    while not flight.parse(0):
        pass
    record = flight.record(0, str, keep_text=True)
    flight.exchange.release()
    return record


def said(record: RequestRecord) -> dict[str, Any]:
    """All that does not depend on when bytes came, nor on which came together."""
    fields = msgspec.structs.asdict(record)
    timed = ("headers_ns", "first_ns", "last_ns", "end_ns", "arrivals", "tokens_from")
    return {name: value for name, value in fields.items() if name not in timed}


def check(record: RequestRecord) -> None:
    """What is true of every record, whatever the server did."""
    afters, tokens = [after for after, _ in record.arrivals], [count for _, count in record.arrivals]
    assert record.outcome in get_args(Outcome)
    assert (record.outcome == "ok") == (record.error is None)
    assert record.error is None or 0 < len(record.error) <= 300
    assert afters == sorted(set(afters))
    assert not afters or afters[0] >= 0
    assert min(tokens, default=0) >= 0
    assert record.output_tokens >= 0
    assert len(afters) <= record.chunks
    assert bool(afters) == bool(record.chunks) == bool(record.text)
    if tokens and record.tokens_from != "chunks":
        assert sum(tokens) == record.output_tokens
    if record.outcome == "ok":
        assert record.status is not None
        assert 200 <= record.status < 300
        assert record.chunks
    if record.outcome == "http_error":
        assert record.status is not None
        assert not 200 <= record.status < 300
    moments = [record.sent_ns, record.headers_ns, record.first_ns, record.last_ns, record.end_ns]
    known = [moment for moment in moments if moment is not None]
    assert known == sorted(known)
    assert 0 <= record.repetition <= 1
    assert msgspec.json.decode(msgspec.json.encode(record), type=RequestRecord) == record


# ---- responses by the grammar ----


class Response(NamedTuple):
    """The body of a response, and what it says."""

    body: bytes
    outcome: Outcome
    text: str


TEXTS = ("a", " b", "é", "😀", "\n", '"', "\\", "\u2028", "</s>", " word" * 30, "[DONE]", "data: ", "\r", "\x7f")
NOISE = (b": ping", b":", b"id: 1", b"retry: 10", b"event: message", b"event:", b"unknown: x", b"data", b"data:")
#: Events that spoil an answer, and how.
SPOILERS: tuple[tuple[bytes, Outcome], ...] = (
    (b'data: {"error": {"message": "lost", "code": 500}}', "stream_error"),
    (b'data: {"error": "lost"}', "stream_error"),
    (b"event: error\ndata: lost", "stream_error"),
    (b'error: {"code": 500, "message": "lost"}', "stream_error"),
    (b"data: lost", "protocol"),
    (b'data: {"choices": [', "protocol"),
    (b'data: {"meta_info": 5, "choices": 5}', "protocol"),
    (b'data: {"meta_info": {"completion_tokens": -1}, "usage": {"completion_tokens": -1}}', "protocol"),
)


def response(rng: random.Random, dialect: Dialect) -> Response:
    """The body of a response to that API, in any of the forms that servers and proxies give it."""
    events, outcome, text = _answer(rng, dialect)
    body = b"".join(_put(rng, event) for event in events)
    if rng.random() < 0.1 and outcome != "protocol":  # half an event is none, and no garbage
        body = body.rstrip(b"\r\n")
    if rng.random() < 0.1:
        body = b"\xef\xbb\xbf" + body
    return Response(body, outcome, text)


def _answer(rng: random.Random, dialect: Dialect) -> tuple[list[bytes], Outcome, str]:
    counts, choices, finished = rng.choice(["usage", "timings", None]), rng.choice([1, 1, 1, 2]), rng.random() < 0.8
    texts = [(rng.randrange(choices), rng.choice(TEXTS)) for _ in range(rng.choice([0, 1, 3, 8, 40]))]
    tokens, so_far = [0] * choices, [""] * choices
    events: list[bytes] = []
    in_last = finished and choices == 1 and bool(texts) and rng.random() < 0.5
    for number, (index, text) in enumerate(texts, 1):
        tokens[index], so_far[index] = tokens[index] + rng.randint(1, 4), so_far[index] + text
        finish = "stop" if in_last and number == len(texts) else None
        events.append(_json(rng, _chunk(rng, dialect, index, text, so_far[index], tokens[index], counts, finish)))
    for index in range(choices if finished and not in_last else 0):
        events.append(_json(rng, _chunk(rng, dialect, index, "", so_far[index], tokens[index], counts, "length")))
    if dialect.api != "sglang" and rng.random() < 0.5:
        events.append(_json(rng, {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": sum(tokens)}}))
    done = rng.choice([0, 1, 1, 2])
    events += [rng.choice([b"data: [DONE]", b"data:[DONE]"])] * done
    outcome: Outcome = "truncated" if not (finished or done) else "ok" if texts else "empty"
    if rng.random() < 0.2:
        spoiler, outcome = rng.choice(SPOILERS)
        events.insert(rng.randint(0, len(events)), spoiler)
    return events, outcome, "".join(text for _, text in texts)


def _chunk(
    rng: random.Random,
    dialect: Dialect,
    index: int,
    text: str,
    so_far: str,
    count: int,
    counts: str | None,
    finish: str | None,
) -> dict[str, Any]:
    if dialect.api == "sglang":
        return {"text": so_far, "meta_info": {"completion_tokens": count, "finish_reason": finish}, "index": index}
    field = rng.choice(["content", "content", "reasoning", "reasoning_content"])
    output = {"text": text} if dialect.api == "completions" else {"delta": {field: text}}
    counted = {"usage": {"completion_tokens": count}, "timings": {"predicted_n": count}}
    chunk = {"id": "x", "choices": [{"index": index, **output, "finish_reason": finish}]}
    return {**chunk, counts: counted[counts]} if counts else chunk


def _json(rng: random.Random, value: Any) -> bytes:
    tight = rng.random() < 0.5
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5, separators=(",", ":") if tight else (", ", ": "))
    data = text.encode()
    if not tight and rng.random() < 0.2:
        data = data.replace(b', "', b',\ndata:  "', 1)
    return rng.choice([b"data: ", b"data: ", b"data:"]) + data


def _put(rng: random.Random, event: bytes) -> bytes:
    lines = event.split(b"\n")
    if rng.random() < 0.2 and not event.startswith(b"event"):
        lines.insert(0, rng.choice(NOISE[:-2]))
    if rng.random() < 0.1:
        lines = [rng.choice(NOISE), b"", *lines]
    end = rng.choice([b"\n", b"\n", b"\r\n", b"\r"])
    return b"".join(line + end for line in [*lines, b""])


def framed(rng: random.Random, body: bytes) -> tuple[bytes, str]:
    """A whole response around the body, and how its connection ends."""
    interim = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" * rng.choice([0, 0, 0, 1, 2])
    kind = rng.choice([b"text/event-stream", b"Text/Event-Stream; charset=utf-8"])
    framing = rng.choice(["chunked", "chunked", "length", "close"])
    version = b"1.0" if framing == "close" else b"1.1"
    head = interim + b"HTTP/%b 200 OK\r\ncontent-type: %b\r\n" % (version, kind)
    if framing == "close":
        return head + b"\r\n" + body, "closed"
    ending = rng.choice(["kept", "closed", "reset"])
    if framing == "length":
        return head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body), ending
    chunks = b"".join(_http_chunk(rng, part) for part in cut(body, _places(rng, body)) if part)
    last = rng.choice([b"0\r\n\r\n", b"000;x\r\n\r\n", b"0\r\nX-Sum: 1\r\nY:\r\n\r\n"])
    return head + b"Transfer-Encoding: Chunked\r\n\r\n" + chunks + last, ending


def _http_chunk(rng: random.Random, data: bytes) -> bytes:
    size = rng.choice([b"%x", b"%x", b"%X", b"00%x"]) % len(data)
    return size + rng.choice([b"", b"", b";a=b", b';q="x"']) + b"\r\n" + data + b"\r\n"


# ---- damage ----

WORDS = (
    *(b"\r\n", b"\r\n\r\n", b"\n\n", b"\r", b"0\r\n\r\n", b"data: ", b"event: error\n", b"[DONE]", b"data: [DONE]\n\n"),
    *(b"\xef\xbb\xbf", b"\xff", b"\xc3", b"\x00", b"\\ud83d", b"{", b"}", b"[", b"]", b'"', b",", b":", b"null", b"-1"),
    *(
        b"Content-Length: 5\r\n",
        b"Content-Encoding: gzip\r\n",
        b"Connection: close\r\n",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/",
    ),
    *(
        b'"error":',
        b'"choices":',
        b'"finish_reason":"abort"',
        b'"index":1,',
        b"1e999",
        b"99999999999999999999",
        b"[" * 2000,
    ),
    *(b"HTTP/1.1 101 Switching Protocols\r\n\r\n", b"HTTP/1.1 100 \r\n\r\n", b"ffffffffffffffffff\r\n", b"\r\nX: y"),
)


def damaged(rng: random.Random, data: bytes) -> bytes:
    """The same with one to five accidents."""
    for _ in range(rng.randint(1, 5)):
        a = rng.randrange(len(data) + 1)
        b = min(len(data), a + rng.choice([1, 1, 2, 8, 60, 1000]))
        accident = rng.randrange(7)
        if accident == 0 and a < len(data):
            data = data[:a] + bytes([rng.randrange(256)]) + data[a + 1 :]
        elif accident == 1:
            data = data[:a] + data[b:]
        elif accident == 2:
            data = data[:b] + data[a:b] + data[b:]
        elif accident == 3:
            data = data[:a]
        elif accident == 4:
            places = [n for n in range(a, b) if data[n : n + 1].isdigit()]
            data = (
                data[: places[0]] + rng.choice([b"0", b"9", b"-", b"99999"]) + data[places[0] + 1 :] if places else data
            )
        else:
            data = data[:a] + rng.choice(WORDS) + data[a:]
    return data


def cut(data: bytes, places: Iterable[int]) -> list[bytes]:
    """The data in parts."""
    return [data[a:b] for a, b in pairwise([0, *sorted(places), len(data)])]


def _places(rng: random.Random, data: bytes) -> list[int]:
    return [rng.randrange(len(data) + 1) for _ in range(rng.choice([0, 1, 5, 30]))]


# ---- cases ----


def run_case(rng: random.Random) -> RequestRecord:
    """One response, cut in several ways; raises where something is wrong."""
    dialect = rng.choice(DIALECTS)
    original = response(rng, dialect)
    damage = rng.choice(["none", "body", "body", "all", "all"])
    body = damaged(rng, original.body) if damage == "body" else original.body
    data, ending = framed(rng, body)
    if damage != "none" and rng.random() < 0.1:
        data = data.replace(
            b" 200 OK", rng.choice([b" 429 Busy", b" 503 Busy", b" 307 Moved", b" 204 None", b" 101 Up"])
        )
    if damage == "all":
        data, ending = damaged(rng, data), rng.choice(["kept", "closed", "reset"])
    began = time.process_time()
    record = check_cuttings(rng, data, dialect, ending)
    took_s = time.process_time() - began
    assert took_s < LIMIT_S, f"took {took_s:.1f} s for {len(data)} bytes"
    if damage == "none":
        assert (record.outcome, record.text) == (original.outcome, original.text)
    return record


def check_cuttings(rng: random.Random, data: bytes, dialect: Dialect, ending: str) -> RequestRecord:
    """The record of a response, after the same was seen to come of it in other parts."""
    whole = record_of(flown([data], dialect, ending))
    check(whole)
    cuttings = [_places(rng, data), _places(rng, data)]
    if rng.random() < 0.2:
        cuttings.append(list(range(len(data))))
    for places in cuttings:
        flight = flown([part for part in cut(data, places) if part], dialect, ending)
        is_short = len(flight.exchange.pieces) <= 16
        came_through = flight.came_through
        record = record_of(flight)
        check(record)
        assert said(record) == said(whole)
        assert not is_short or came_through == (record.outcome == "ok")
    return whole


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int, help="only this one")
    options = parser.parse_args()
    if options.case is not None:
        print(run_case(random.Random(f"{options.seed} {options.case}")))
        return 0
    until, outcomes, faults, number = time.monotonic() + 60 * options.minutes, Counter[str](), Counter[str](), 0
    while time.monotonic() < until:
        try:
            outcomes[run_case(random.Random(f"{options.seed} {number}")).outcome] += 1
        except Exception as error:  # noqa: BLE001  any is a find
            place = traceback.extract_tb(error.__traceback__)[-1]
            kind = f"{type(error).__name__} at {place.filename.rpartition('/')[2]}:{place.lineno}: {place.line}"
            faults[kind] += 1
            if faults[kind] <= 3:
                print(
                    f"{kind}\n  {str(error)[:300]}\n  python -m tests.load.fuzz --seed {options.seed} --case {number}"
                )
        number += 1
        if number % 20_000 == 0:
            print(f"{number} cases, {sum(faults.values())} with a fault, {dict(outcomes.most_common())}", flush=True)
    print(f"{number} cases of seed {options.seed}: {dict(outcomes.most_common())}")
    print(f"{sum(faults.values())} with a fault: {dict(faults.most_common())}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
