"""Server-sent events out of bytes, however they were cut."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from breakeven.load.sse import Event, EventParser

BOM = b"\xef\xbb\xbf"
#: What streams are made of, and what makes them hard to cut.
ATOMS = (
    *(
        b"data: ",
        b"data:",
        b"data",
        b"event: error",
        b"event:",
        b"id: 1",
        b"retry: 5",
        b": comment",
        b":",
        b"unknown: x",
    ),
    *(b"\n", b"\n", b"\r", b"\r\n", b"\n\n", b"\r\n\r\n", b"\r\r", b" ", b"{", b"}", b'data: {"a":1}\n\n', b"[DONE]"),
    *(BOM, BOM[:1], BOM[:2], "né€😀".encode(), b"x"),
)
streams = st.lists(st.sampled_from(ATOMS), max_size=30).map(b"".join)


def parse(pieces: Iterable[bytes]) -> list[Event]:
    parser = EventParser()
    return [*(event for piece in pieces for event in parser.feed(piece)), *parser.close()]


def by_the_book(stream: bytes) -> list[Event]:
    """The standard's algorithm over the whole stream, line by line; the end of the stream ends the last event."""
    events, kind, data = [], b"", None
    for line in [*re.split(rb"\r\n|\n|\r", stream.removeprefix(BOM)), b""]:
        if not line:
            if data is not None:
                events.append((kind or b"message", b"\n".join(data)))
            kind, data = b"", None
            continue
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            data = [*(data or []), value]
        elif name == b"event":
            kind = value
    return events


def cut(stream: bytes, places: Iterable[int]) -> list[bytes]:
    return [stream[a:b] for a, b in pairwise([0, *sorted(place % (len(stream) + 1) for place in places), len(stream)])]


@given(streams)
@example(BOM + b"data: 1\n\n")
@example(b"data: 1\r\n\r\ndata: 2\r\rdata: 3\n\n")
@example(b"data\n\ndata\ndata\n\ndata:")
def test_events_are_those_of_the_standard(stream: bytes) -> None:
    assert parse([stream]) == by_the_book(stream)


@given(streams, st.lists(st.integers(0, 500)))
def test_any_cutting_gives_the_same_events(stream: bytes, places: list[int]) -> None:
    assert parse(cut(stream, places)) == parse([stream])


@given(streams)
def test_single_bytes_give_the_same_events(stream: bytes) -> None:
    assert parse(cut(stream, range(len(stream)))) == parse([stream])


@given(st.lists(st.one_of(streams, st.just(b'data: {"a":1}\n\n'), st.just(b'data: {"\r":1}\n\n')), max_size=6))
def test_skimming_gives_what_feeding_gives_or_nothing(pieces: list[bytes]) -> None:
    """Whatever came before: the parser's state is the same after either."""
    skimmer, feeder = EventParser(), EventParser()
    for piece in pieces:
        skimmed, fed = skimmer.skim([piece]), feeder.feed(piece)
        if skimmed is None:
            assert skimmer.feed(piece) == fed
        else:
            assert [(b"message", skimmed)] == fed
    assert skimmer.close() == feeder.close()


def test_skimming_joins_the_data_by_commas() -> None:
    assert EventParser().skim([b'data: {"a":1}\n\n', b"data: {}\n\n"]) == b'{"a":1},{}'


@pytest.mark.parametrize(
    "piece",
    [
        b"data: [DONE]\n\n",
        b'data:{"a":1}\n\n',
        b'data: {"a":1}\r\n\r\n',
        b'data: {"a":1}\n',
        b'data: {"a":\n\n1}\n\n',
        b'data: {"a":\r1}\n\n',
        b"data: {}\n\ndata: {}\n\n",
        b'event: error\ndata: {"a":1}\n\n',
    ],
)
def test_what_is_not_one_event_of_an_object_is_not_skimmed(piece: bytes) -> None:
    assert EventParser().skim([b"data: {}\n\n", piece]) is None


def test_one_space_after_the_colon_is_none_of_the_data() -> None:
    assert parse([b"data:a\n\ndata: b\n\ndata:  c\n\ndata:\td\n\n"]) == [
        (b"message", data) for data in (b"a", b"b", b" c", b"\td")
    ]


def test_several_data_lines_are_joined_by_line_feeds() -> None:
    assert parse([b"data: a\r\ndata:\r\ndata: b\r\n\r\n"]) == [(b"message", b"a\n\nb")]


def test_comments_ids_and_retries_are_no_events() -> None:
    assert parse([b": ping\n\nid: 1\n\nretry: 10\n\n:\n: \n\nid: 2\ndata: x\n\n"]) == [(b"message", b"x")]


def test_event_types_last_for_one_event() -> None:
    assert parse([b"event: error\ndata: a\n\ndata: b\n\nevent: ping\n\ndata: c\n\nevent:\ndata: d\n\n"]) == [
        (b"error", b"a"),
        (b"message", b"b"),
        (b"message", b"c"),
        (b"message", b"d"),
    ]


def test_a_field_named_error_is_an_event_of_that_type() -> None:
    """It is none of the standard's; llama.cpp put its errors so."""
    assert parse([b'error: {"code":500}\n\nerrors: x\n\ndata: a\n\n']) == [
        (b"error", b'{"code":500}'),
        (b"message", b"a"),
    ]


def test_only_the_first_byte_order_mark_is_dropped() -> None:
    assert parse([BOM + b"data: a\n\n" + BOM + b"data: b\n\ndata: " + BOM + b"\n\n"]) == [
        (b"message", b"a"),
        (b"message", BOM),
    ]


def test_a_byte_order_mark_behind_skimmed_events_is_not_the_first() -> None:
    parser = EventParser()
    assert parser.skim([b"data: {}\n\n"])
    assert parser.feed(BOM + b"data: a\n\n") == []


def test_an_event_is_out_as_soon_as_its_last_byte_is_in() -> None:
    """At the CR of an empty line, not at the LF that may follow it."""
    parser = EventParser()
    assert parser.feed(b"data: a\r\n\r") == [(b"message", b"a")]
    assert parser.feed(b"\ndata: b\n") == []
    assert parser.feed(b"\n") == [(b"message", b"b")]


def test_many_events_in_one_read() -> None:
    assert parse([b"".join(b"data: %d\n\n" % i for i in range(1000))]) == [(b"message", b"%d" % i) for i in range(1000)]


@pytest.mark.parametrize("line", [1 << 30, 64], ids=["one line", "short lines"])
def test_a_large_event_in_small_reads_takes_linear_time(line: int) -> None:
    """Eight megabytes take hundredths of a second of CPU; copied again with each read they would take many seconds."""
    size = 8 << 20
    text = b"".join(b"data: %b\n" % (b"x" * min(line, size)) for _ in range(max(1, size // line))) + b"\n"
    pieces = cut(text, range(0, len(text), 1400))
    parser, began = EventParser(), time.process_time()
    events = [event for piece in pieces for event in parser.feed(piece)]
    assert time.process_time() - began < 1
    assert len(events) == 1
