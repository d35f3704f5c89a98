"""HTTP framing, parsed after the fact from stamped reads."""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakeven.load.exchange import Exchange

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
#: Extensions, leading zeros, trailers: a body of "hello world".
CHUNKED = HEAD + b'5;a=b;c="d"\r\nhello\r\n006\r\n world\r\n0;last\r\nContent-Type: text/html\r\nX-Sum: 1\r\n\r\n'


def read(*reads: bytes) -> Exchange:
    """The exchange of reads that came 1, 2, 3 … ns after the start."""
    exchange = Exchange()
    exchange.reads = list(enumerate(reads, 1))
    exchange.advance()
    return exchange


def body(exchange: Exchange) -> bytes:
    return b"".join(data for _, data in exchange.pieces)


def cut(data: bytes, places: Iterable[int]) -> list[bytes]:
    return [data[a:b] for a, b in pairwise([0, *sorted(place % (len(data) + 1) for place in places), len(data)])]


def test_a_chunked_response_with_extensions_and_trailers() -> None:
    exchange = read(CHUNKED)
    assert (exchange.status, body(exchange)) == (200, b"hello world")
    assert (exchange.complete, exchange.keep_alive, exchange.broken) == (True, True, None)


def test_trailers_replace_no_header() -> None:
    assert read(CHUNKED).headers == {b"content-type": b"text/event-stream", b"transfer-encoding": b"chunked"}


@given(st.lists(st.integers(0, 300), max_size=12))
def test_any_cutting_gives_the_same_response(places: list[int]) -> None:
    pieces = [piece for piece in cut(CHUNKED, places) if piece]
    exchange = read(*pieces)
    assert (exchange.complete, body(exchange), exchange.end_ns) == (True, b"hello world", len(pieces))


def test_single_bytes_are_stamped_one_by_one() -> None:
    exchange = read(*cut(CHUNKED, range(len(CHUNKED))))
    first = CHUNKED.index(b"hello") + 2  # the empty read first, and counted from 1
    assert exchange.headers_ns == len(HEAD) + 1
    assert exchange.pieces[0] == (first, b"h")
    assert exchange.end_ns == exchange.last_read_ns == len(CHUNKED) + 1


def test_pieces_carry_the_stamp_of_their_read() -> None:
    exchange = read(HEAD, b"1\r\na\r\n1\r\nb\r\n", b"1\r\nc\r\n", b"0\r\n\r\n")
    assert exchange.pieces == [(2, b"a"), (2, b"b"), (3, b"c")]
    assert (exchange.headers_ns, exchange.end_ns) == (1, 4)


def test_stamps_never_go_back() -> None:
    """They would if the wall clock, which the kernel stamps by, were set back between two reads."""
    exchange = Exchange()
    exchange.reads = [(50, HEAD + b"1\r\na\r\n"), (30, b"1\r\nb\r\n"), (60, b"0\r\n\r\n")]
    exchange.advance()
    assert exchange.pieces == [(50, b"a"), (50, b"b")]
    assert exchange.end_ns == 60


def test_a_body_of_known_length() -> None:
    exchange = read(b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nno", b"pe")
    assert (exchange.status, body(exchange), exchange.complete, exchange.chunked) == (404, b"nope", True, False)


def test_a_body_that_ends_with_the_connection() -> None:
    exchange = read(b"HTTP/1.0 200 OK\r\n\r\nhel", b"lo")
    assert not exchange.complete
    exchange.close()
    assert (exchange.complete, body(exchange), exchange.end_ns, exchange.keep_alive) == (True, b"hello", 2, False)


@pytest.mark.parametrize("head", [HEAD + b"5\r\nhe", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhe", HEAD[:20], b""])
def test_a_cut_response_is_not_complete(head: bytes) -> None:
    exchange = read(head)
    exchange.close()
    assert not exchange.complete


@pytest.mark.parametrize("status", ["100 Continue", "102 Processing", "103 Early Hints\r\nLink: </x>"])
def test_interim_responses_are_skipped(status: str) -> None:
    exchange = read(f"HTTP/1.1 {status}\r\n\r\n".encode(), CHUNKED)
    assert (exchange.status, exchange.headers_ns, body(exchange)) == (200, 2, b"hello world")
    assert b"link" not in exchange.headers


def test_an_interim_response_alone_is_an_answer_begun_but_no_answer() -> None:
    exchange = read(b"HTTP/1.1 100 Continue\r\n\r\n")
    exchange.close()
    assert (exchange.begun, exchange.complete, exchange.headers_ns) == (True, False, None)


def test_header_names_are_lower_case_and_values_may_be_empty() -> None:
    exchange = read(b"HTTP/1.1 204 No Content\r\nX-EMPTY:\r\nServer: a b \r\n\r\n")
    assert exchange.headers[b"x-empty"] == b""
    assert exchange.headers[b"server"].strip() == b"a b"
    assert exchange.complete


@pytest.mark.parametrize(
    ("head", "kept"),
    [
        (b"HTTP/1.1 200 OK\r\n", True),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n", False),
        (b"HTTP/1.0 200 OK\r\n", False),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n", True),
        (b"HTTP/1.1 200 OK\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n", True),
    ],
)
def test_whether_the_connection_stays(head: bytes, kept: bool) -> None:
    exchange = read(head + b"Content-Length: 2\r\n\r\nok")
    assert (exchange.complete, exchange.keep_alive) == (True, kept)


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b'data: {"choices": []}\n\n',
        b"\x15\x03\x01\x00\x02\x02\x46",
        b"<html>",
        b"HTTP/1.1 two hundred\r\n\r\n",
        HEAD + b"zz\r\nhello\r\n",
        HEAD + b"5\r\nhello world\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n\x81\x01a",
    ],
)
def test_what_is_no_http_breaks_the_exchange(data: bytes) -> None:
    exchange = read(data, b"more")
    assert exchange.broken is not None
    assert exchange.broken.startswith("no HTTP: ")
    exchange.close()
    assert not exchange.complete


SECOND = b"HTTP/1.1 408 Request Timeout\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\nno"


@pytest.mark.parametrize("rest", [SECOND, SECOND[:9], b"garbage"])
@pytest.mark.parametrize("cut_at", [0, 1])
@pytest.mark.parametrize(
    "first", [CHUNKED, b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 11\r\n\r\nhello world"]
)
def test_what_follows_the_response_spoils_the_connection_and_not_the_response(
    first: bytes, cut_at: int, rest: bytes
) -> None:
    """In the same read, with its first byte, or in a read of its own."""
    data = first + rest
    exchange = read(data[: len(first) + cut_at], data[len(first) + cut_at :]) if cut_at else read(data)
    assert (exchange.status, body(exchange), exchange.broken) == (200, b"hello world", None)
    assert (exchange.complete, exchange.keep_alive, exchange.end_ns) == (True, False, 1)
    assert exchange.headers.get(b"content-type") != b"text/plain"


def test_reads_are_decrypted_late() -> None:
    exchange = Exchange()
    exchange.decrypt = lambda data: data[::-1]
    exchange.reads = [(1, HEAD[::-1]), (2, b""), (3, (b"1\r\na\r\n" + b"0\r\n\r\n")[::-1])]
    exchange.advance()
    assert (exchange.complete, exchange.pieces) == (True, [(3, b"a")])


def test_what_is_no_tls_breaks_the_exchange() -> None:
    incoming = ssl.MemoryBIO()
    tls = ssl.create_default_context().wrap_bio(incoming, ssl.MemoryBIO(), server_hostname="x")

    def decrypt(data: bytes) -> bytes:
        incoming.write(data)
        return tls.read()

    exchange = Exchange()
    exchange.decrypt = decrypt
    exchange.reads = [(1, b"hello, I speak no TLS")]
    exchange.advance()
    assert exchange.broken == "TLS: WRONG_VERSION_NUMBER"
