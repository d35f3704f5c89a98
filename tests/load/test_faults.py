"""Every fault of a server is a record with its outcome, and the client goes on."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest

from breakeven.load.dialect import Dialect
from breakeven.records import RequestRecord
from tests.load.corners import CORNERS
from tests.load.faults import FAULTS, SGLANG, SILENCES, Fault, dialect_of, misbehaving, planned
from tests.load.scripted import CHAT, client_of, run, scripted

ALL = {**FAULTS, **CORNERS}


@pytest.mark.parametrize("name", ALL)
def test_a_fault_is_a_record_and_the_client_goes_on(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    fault = ALL[name]
    ordinary = "SGLang" if fault.is_sglang else "ordinary"
    names = [*([ordinary] if fault.kept else []), name, ordinary]
    limits: dict[str, Any] = {"timeout_s": 0.6, "stall_timeout_s": 0.3} if name in SILENCES else {}
    records: list[RequestRecord] = []

    async def send_all() -> None:
        async with client_of(server, records, dialect=dialect_of(fault), **limits) as client:
            came_through = [await client.send(planned(each)) for each in names]
            await client.settled()
            assert came_through == [record.outcome == "ok" for record in records]
            assert client.in_flight == 0

    began = time.monotonic()
    with scripted([misbehaving(ALL)]) as server:
        run(send_all())
    assert time.monotonic() - began < 5
    assert [record.prompt for record in records] == names
    check(records[-2], fault)
    check(records[-1], ALL[ordinary])
    assert records[-2].reconnects == fault.reconnects
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("dialect", [CHAT, SGLANG], ids=["chat", "sglang"])
def test_all_faults_at_once_are_told_apart(dialect: Dialect) -> None:
    """Three of each, in a seeded order, over one client: connections that die take no other request with them."""
    names = [name for name, fault in ALL.items() if dialect_of(fault) is dialect] * 3
    random.Random(7).shuffle(names)
    records: list[RequestRecord] = []

    async def send_all() -> None:
        async with client_of(server, records, dialect=dialect, timeout_s=3, stall_timeout_s=1.5) as client:
            await asyncio.gather(*(client.send(planned(name)) for name in names))
            await client.settled()
            assert client.in_flight == 0
            assert 0 < client.heard_ns <= time.perf_counter_ns()

    with scripted([misbehaving(ALL)]) as server:
        run(send_all())
    assert sorted(record.prompt for record in records) == sorted(names)
    assert sorted(record.id for record in records) == list(range(len(names)))
    for record in records:
        check(record, ALL[record.prompt])


def check(record: RequestRecord, fault: Fault) -> None:
    """The record says what the catalogue says."""
    found = (record.outcome, record.status, record.output_tokens, record.tokens_from)
    assert found == (fault.outcome, fault.status, fault.output_tokens, fault.tokens_from), record
    assert (record.error is None) == (fault.error is None), record
    assert fault.error is None or fault.error in (record.error or ""), record
    assert fault.text is None or record.text == fault.text, record
    assert min(1, fault.arrivals) <= len(record.arrivals) <= fault.arrivals, record
    check_times(record)


def check_times(record: RequestRecord) -> None:
    """Nothing came before the request was sent, and all came in order."""
    afters = [after for after, _ in record.arrivals]
    assert afters == sorted(set(afters))
    moments = [record.due_ns, record.sent_ns, record.headers_ns, record.first_ns, record.last_ns, record.end_ns]
    known = [moment for moment in moments if moment is not None]
    assert known == sorted(known)
    assert record.end_ns is not None
    if afters:
        assert record.sent_ns is not None
        assert (record.first_ns, record.last_ns) == (record.sent_ns + afters[0], record.sent_ns + afters[-1])


def test_a_usage_that_contradicts_the_chunks_leaves_both_in_the_record() -> None:
    """The check of token counts compares them."""
    with scripted([misbehaving(ALL)]) as server:
        records: list[RequestRecord] = []

        async def send() -> None:
            async with client_of(server, records) as client:
                await client.send(planned("usage that contradicts the chunks"))
                await client.settled()

        run(send())
    assert (sum(tokens for _, tokens in records[0].arrivals), records[0].output_tokens) == (4, 40)
