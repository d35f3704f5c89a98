"""From reads to records: however the bytes were cut the record is the same, and no bytes are too strange for one.

The longer search for what breaks this is `tests/load/fuzz.py`.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from breakeven.load.dialect import Dialect
from tests.load.fuzz import DIALECTS, WORDS, check, check_cuttings, damaged, flown, framed, record_of, response
from tests.load.scripted import CHAT, DONE, HEAD, LAST, chunk, token

randoms = st.randoms(use_true_random=False)
dialects = st.sampled_from(DIALECTS)
endings = st.sampled_from(["kept", "closed", "reset"])
garbage = st.one_of(st.binary(max_size=300), st.lists(st.sampled_from(WORDS), max_size=20).map(b"".join))


@settings(deadline=None)
@given(randoms, dialects)
def test_any_cutting_of_a_response_gives_the_same_record(rng: random.Random, dialect: Dialect) -> None:
    """In all framings, line ends and ways of counting; and the record says what the response said."""
    original = response(rng, dialect)
    data, ending = framed(rng, original.body)
    record = check_cuttings(rng, data, dialect, ending)
    assert (record.outcome, record.text) == (original.outcome, original.text)


@settings(deadline=None)
@given(randoms, dialects, endings)
def test_any_cutting_of_a_damaged_response_gives_the_same_record(
    rng: random.Random, dialect: Dialect, ending: str
) -> None:
    data, _ = framed(rng, damaged(rng, response(rng, dialect).body))
    check_cuttings(rng, damaged(rng, data), dialect, ending)


@settings(deadline=None)
@given(randoms, garbage, st.sampled_from([b"", b"HTTP/1.1 200 OK\r\n", HEAD]), dialects, endings)
def test_any_bytes_are_a_record(rng: random.Random, data: bytes, head: bytes, dialect: Dialect, ending: str) -> None:
    check_cuttings(rng, head + data, dialect, ending)
    if head == HEAD:
        check_cuttings(rng, head + chunk(data) + LAST, dialect, ending)


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), min_size=6, max_size=6))
def test_arrivals_are_in_order_whatever_the_stamps(stamps: list[int]) -> None:
    """A wall clock that is set back between two reads moves no arrival before another."""
    flight = flown([], CHAT, "closed")
    reads = [HEAD, *(chunk(token("x", count)) for count in range(1, 5)), chunk(DONE) + LAST]
    flight.exchange.sent_ns = 1
    flight.exchange.reads = list(zip(stamps, reads, strict=True))
    flight.exchange.advance()
    flight.exchange.end_ns = max(stamps)
    record = record_of(flight)
    check(record)
    assert (record.outcome, record.output_tokens) == ("ok", 4)


@pytest.mark.parametrize(
    ("written", "letter"),
    [("é", "é"), ("€", "€"), ("😀", "😀"), (r"\u00e9", "é"), (r"\ud83d\ude00", "😀")],
)
def test_letters_may_be_cut_anywhere(written: str, letter: str) -> None:
    data = HEAD + chunk(token("X", 1, finish="stop").replace(b"X", written.encode())) + LAST
    start = data.index(written.encode())
    for place in range(start, start + len(written.encode()) + 1):
        record = record_of(flown([data[:place], data[place:]], CHAT, "kept"))
        assert (record.outcome, record.text) == ("ok", letter)


def test_bytes_behind_the_end_bring_nothing_later_than_the_end() -> None:
    """Nor does an event that lacks its empty line, which counts when all is over."""
    body = token("a", 1, finish="stop").rstrip()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(body)
    record = record_of(flown([head + body, b"\n"], CHAT, "kept"))
    assert (record.outcome, record.last_ns) == ("ok", record.end_ns)
