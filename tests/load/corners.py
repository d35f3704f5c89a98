"""What only looks like a fault: corners of HTTP, of event streams and of the APIs. See `faults.py`."""

from __future__ import annotations

import json

from tests.load.faults import OK, PAUSE, WHOLE, A, B, C, Fault, choice, cut_at, sglang, sized
from tests.load.scripted import ANSWER, CLOSE, DONE, HEAD, LAST, Peer, Step, chunk, event, stream, token, usage


def body(data: bytes) -> bytes:
    """A whole response around bytes of an event stream."""
    return HEAD + chunk(data) + LAST


def single_bytes(data: bytes) -> Step:
    def send(peer: Peer) -> None:
        for value in data:
            peer.send(bytes([value]))

    return send


LETTERS = stream(token("né€😀", 1, finish="stop"), DONE)
ESCAPED = stream(
    b"data: %b\n\n" % json.dumps({"choices": [{"delta": {"content": "é😀"}, "finish_reason": "stop"}]}).encode()
)

CORNERS: dict[str, Fault] = {
    "ordinary": Fault([stream(*WHOLE)], "ok", **OK),
    "several reads": Fault(
        [HEAD, chunk(A), 2 * PAUSE, chunk(B), 2 * PAUSE, stream(C, DONE)[len(HEAD) :]], "ok", **OK | {"arrivals": 3}
    ),
    "CRLF": Fault([stream(*(part.replace(b"\n", b"\r\n") for part in WHOLE))], "ok", **OK),
    "CR": Fault([stream(*(part.replace(b"\n", b"\r") for part in WHOLE))], "ok", **OK),
    "all line ends": Fault([stream(A.replace(b"\n", b"\r"), B.replace(b"\n", b"\r\n"), C, DONE)], "ok", **OK),
    "comments, ids, retries and unknown fields": Fault(
        [stream(b": ping\n\nid: 7\nretry: 10\n\n", b"id: 8\nx: y\n" + A, B, b":\n\n", b"event: message\n" + C, DONE)],
        "ok",
        **OK,
    ),
    "data without a space": Fault([stream(*(part.replace(b"data: ", b"data:") for part in WHOLE))], "ok", **OK),
    "several data lines": Fault(
        [stream(*(part.replace(b", ", b",\ndata: ") if b"{" in part else part for part in WHOLE))], "ok", **OK
    ),
    "a byte order mark": Fault([stream(b"\xef\xbb\xbf" + A, B, C, DONE)], "ok", **OK),
    "no empty line at the end": Fault([stream(A, B, C.rstrip())], "ok", **OK),
    "single bytes": Fault([single_bytes(stream(*WHOLE))], "ok", **OK | {"arrivals": 3}),
    "many events in one chunk": Fault([body(b"".join(WHOLE))], "ok", **OK),
    "a megabyte event": Fault(
        [stream(token("x" * (1 << 20), 9, finish="length"), DONE)],
        "ok",
        9,
        1,
        tokens_from="chunks",
        text="x" * (1 << 20),
    ),
    "a letter in two reads": Fault(
        [*(step for part in cut_at(LETTERS, "😀".encode(), 2) for step in (part, PAUSE))],
        "ok",
        1,
        1,
        tokens_from="chunks",
        text="né€😀",
    ),
    "an escape in two reads": Fault(
        [*(step for part in cut_at(ESCAPED, b"\\u00e9", 3) for step in (part, PAUSE))], "ok", 1, 1, text="é😀"
    ),
    "a surrogate pair in two reads": Fault(
        [*(step for part in cut_at(ESCAPED, b"\\ude00", 0) for step in (part, PAUSE))], "ok", 1, 1, text="é😀"
    ),
    "interim responses": Fault(
        [b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n", PAUSE, stream(*WHOLE)],
        "ok",
        **OK,
    ),
    "chunk extensions and trailers": Fault(
        [HEAD + chunk(b"".join(WHOLE)).replace(b"\r\n", b';a=b;c="d"\r\n', 1) + b"000;e\r\nX-Sum: 1\r\n\r\n"],
        "ok",
        **OK,
    ),
    "a known length": Fault([sized(b"".join(WHOLE), len(b"".join(WHOLE)))], "ok", **OK),
    "a type with its charset": Fault(
        [stream(*WHOLE).replace(b"text/event-stream", b"Text/Event-Stream; charset=utf-8")], "ok", **OK
    ),
    "identity as its encoding": Fault(
        [stream(*WHOLE).replace(b"\r\n", b"\r\nContent-Encoding: identity\r\n", 1)], "ok", **OK
    ),
    "[DONE] without a space": Fault([stream(A, B, token(" c", 4), b"data:[DONE]\n\n")], "ok", **OK),
    "[DONE] twice": Fault([stream(*WHOLE, DONE)], "ok", **OK),
    "choices null": Fault([stream(A, event({"choices": None, "usage": None}), B, C, DONE)], "ok", **OK),
    "empty chunks between": Fault(
        [stream(event({"choices": [{"delta": {"role": "assistant"}}]}), A, token("", 1), B, C, DONE)], "ok", **OK
    ),
    "reasoning": Fault(
        [
            stream(
                event({"choices": [{"delta": {"reasoning_content": "a"}}]}),
                event({"choices": [{"delta": {"reasoning": " b"}}]}),
                token(" c", finish="stop"),
                usage(3),
            )
        ],
        "ok",
        3,
        1,
        tokens_from="total",
        text="a b c",
    ),
    "tool calls": Fault(
        [
            stream(
                event({"choices": [{"delta": {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}}]}),
                token(None, finish="tool_calls"),
                usage(1),
            )
        ],
        "ok",
        1,
        1,
        tokens_from="total",
        text="f{}",
    ),
    "two choices": Fault(
        [stream(choice(0, "a", 1), choice(1, "A", 2), choice(0, "b", 2, "stop"), choice(1, "B", 4, "stop"), usage(6))],
        "ok",
        6,
        1,
        tokens_from="chunks",
        text="aAbB",
    ),
    "two choices in one event": Fault(
        [
            stream(
                event(
                    {
                        "choices": [{"index": n, "delta": {"content": "a"}, "finish_reason": "stop"} for n in range(2)],
                        "usage": {"completion_tokens": 5},
                    }
                )
            )
        ],
        "ok",
        5,
        1,
        tokens_from="chunks",
        text="aa",
    ),
    "a total alone": Fault(
        [stream(token("a"), token("b", finish="stop"), usage(2), DONE)], "ok", 2, 1, tokens_from="total", text="ab"
    ),
    "no count at all": Fault([stream(token("x" * 40), DONE)], "ok", 10, 1, text="x" * 40),
    "usage that contradicts the chunks": Fault(
        [stream(A, B, C, usage(40), DONE)], "ok", 40, 1, tokens_from="chunks", text="a b c"
    ),
    "SGLang": Fault(
        [stream(sglang("a", 1), sglang("a b", 3), sglang("a b c", 4, {"type": "stop"}), DONE)],
        "ok",
        is_sglang=True,
        **OK,
    ),
    "SGLang, two choices": Fault(
        [
            stream(
                *(sglang("a", 1, index=0), sglang("b", 2, index=1), sglang("ac", 2, "stop", index=0)),
                *(sglang("bd", 4, "stop", index=1), DONE),
            )
        ],
        "ok",
        6,
        1,
        tokens_from="chunks",
        text="abcd",
        is_sglang=True,
    ),
    "bytes behind the end": Fault([ANSWER + b"HTTP/1.1 408 Re", PAUSE, CLOSE], "ok", 3, 1, tokens_from="chunks"),
}
