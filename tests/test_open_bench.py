"""`breakeven bench` with open loops and traces, against a server whose record of what came when is known."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from breakeven.engines.null import NullServer, null_server
from tests.conftest import Run

#: Chunks of 1, 3 and 2 tokens each 5 ms: 20 tokens take 50 ms.
TIMETABLE = ("--step-us", "5000", "--tokens", "1,3,2")
TOKENS = 20
MS = 1_000_000


@pytest.fixture
def server() -> Iterator[NullServer]:
    with null_server(*TIMETABLE) as running:
        yield running


@pytest.fixture
def narrow() -> Iterator[NullServer]:
    """Two at once, about 40 a second."""
    with null_server(*TIMETABLE, "--max-batch", "2") as running:
        yield running


def bench(breakeven: Run, server: NullServer, *args: object) -> str:
    """Runs a benchmark into `out`; returns what it printed."""
    result = breakeven("bench", "--server-url", server.url, *args, "--warmup", "0", "--output", "out")
    assert result.returncode == 0, result.stderr
    return result.stdout


def levels_of(tmp_path: Path) -> list[dict[str, Any]]:
    levels: list[dict[str, Any]] = json.loads((tmp_path / "out" / "summary.json").read_text())["levels"]
    return levels


def records_of(tmp_path: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (tmp_path / "out" / "requests.jsonl").read_text().splitlines()]
    return sorted(records, key=lambda record: record["id"])


def failed_checks(level: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["detail"] for check in level["checks"] if not check["ok"]}


def late_ns(server: NullServer, records: list[dict[str, Any]]) -> list[int]:
    """How much later than it was due each request came, by the server's clock; the least late is taken for punctual."""
    came = sorted(row.arrival_ns for row in server.truth() if row.tokens == TOKENS or not row.finished)
    offsets = [at - record["due_ns"] for at, record in zip(came, records, strict=False)]
    return [offset - min(offsets) for offset in offsets]


def test_requests_come_when_they_are_due_and_the_numbers_are_the_truth(
    breakeven: Run, tmp_path: Path, server: NullServer
) -> None:
    table = bench(breakeven, server, "--rate", 20, 50, "--requests", 60, "--max-tokens", TOKENS)
    levels, records = levels_of(tmp_path), records_of(tmp_path)
    assert [level["name"] for level in levels] == ["20/s", "50/s"]
    assert [line.split()[0] for line in table.splitlines()[1:4]] == ["load", "20/s", "50/s"]
    for index, (level, rate) in enumerate(zip(levels, (20, 50), strict=True)):
        assert (level["requests"]["ok"], level["ended_by"]) == (60, "requests")
        found = level["open_loop"]
        # 60 gaps at random: the standard error of a rate is 13 %.
        assert found["offered_rate"] == pytest.approx(rate, rel=0.4)
        assert found["ended_rate"] == pytest.approx(found["offered_rate"], rel=0.3)
        window_s = level["output_throughput"]["window_s"]
        assert window_s == pytest.approx(60 / found["offered_rate"], rel=0.05)
        assert level["output_throughput"]["value"] == pytest.approx(found["offered_rate"] * TOKENS, rel=0.3)
        for name, part in (("ttft", "p50"), ("ttft", "p99"), ("e2e", "p50"), ("e2e", "max")):
            assert found[f"{name}_due_ms"][part] >= level[f"{name}_ms"][part]
        assert found["lateness_ms"]["min"] >= 0
        assert "backlog" not in failed_checks(level)
        assert {record["max_tokens"] for record in records if record["level"] == index} == {TOKENS}
    assert all(record["sent_ns"] >= record["due_ns"] for record in records)
    sent = [record for record in records if record["outcome"] == "ok" and record["level"] == 0]
    late = late_ns(server, sent)
    assert statistics.median(late) < 10 * MS  # a loaded machine lets both sides wait


def test_constant_arrivals_are_a_metronome(breakeven: Run, tmp_path: Path, server: NullServer) -> None:
    bench(
        breakeven, server, "--rate", 50, "--arrivals", "constant", "--requests", 50, "--max-tokens", TOKENS
    )  # fmt: skip
    (level,), records = levels_of(tmp_path), records_of(tmp_path)
    assert {b["due_ns"] - a["due_ns"] for a, b in pairwise(records)} == {20 * MS}
    assert level["load"] == {"mode": "open", "rate": 50.0, "arrivals": "constant", "max_tokens": TOKENS}
    assert level["open_loop"]["offered_rate"] == pytest.approx(50, rel=0.05)
    gaps = [b - a for a, b in pairwise(sorted(row.arrival_ns for row in server.truth() if row.tokens == TOKENS))]
    assert statistics.median(gaps) == pytest.approx(20 * MS, rel=0.1)


def test_a_trace_is_replayed_as_fast_as_asked(breakeven: Run, tmp_path: Path, server: NullServer) -> None:
    rows = [(1700000000000 + 250 * i, 30 + i, 1 + i % 7, [i // 4]) for i in range(40)]
    fields = ("timestamp", "input_length", "output_length", "hash_ids")
    lines = (json.dumps(dict(zip(fields, row, strict=True))) for row in rows)
    (tmp_path / "trace.jsonl").write_text("\n".join(lines))
    table = bench(breakeven, server, "--trace", "trace.jsonl", "--speed", 10)
    (level,), records = levels_of(tmp_path), records_of(tmp_path)
    assert "trace x10" in table
    assert (level["requests"]["ok"], level["ended_by"]) == (40, "trace")
    assert [record["output_tokens"] for record in records] == [row[2] for row in rows]
    assert [record["due_ns"] - records[0]["due_ns"] for record in records] == [25 * MS * i for i in range(40)]
    # The null server counts words: about one more for the message's role.
    assert [record["input_tokens"] for record in records] == pytest.approx([row[1] for row in rows], abs=8)
    assert level["open_loop"]["offered_rate"] == pytest.approx(40)
    assert level["output_tokens"] == sum(row[2] for row in rows)
    assert not {"steady", "backlog", "in_flight", "drift", "cut_short"} & set(failed_checks(level))


def test_requests_that_are_held_back_are_late_and_it_is_said(
    breakeven: Run, tmp_path: Path, server: NullServer
) -> None:
    """Two at once are about 40 a second: of 100 a second most wait, and their users wait with them."""
    table = bench(
        breakeven, server, "--rate", 100, "--requests", 60, "--max-in-flight", 2, "--max-tokens", TOKENS
    )  # fmt: skip
    (level,) = levels_of(tmp_path)
    assert level["in_flight"]["max"] == 2
    assert level["load"]["max_in_flight"] == 2
    failed = failed_checks(level)
    assert {"late", "backlog"} <= set(failed)
    assert "--max-in-flight held requests back" in table
    found = level["open_loop"]
    assert found["ended_rate"] < 60
    assert found["offered_rate"] > 80  # also what never got its turn
    assert found["ttft_due_ms"]["p50"] > level["ttft_ms"]["p50"] + 100


def test_a_rate_that_the_server_cannot_hold_is_said_to_be_so(
    breakeven: Run, tmp_path: Path, narrow: NullServer
) -> None:
    table = bench(
        breakeven, narrow, "--rate", 25, 100, "--arrivals", "constant", "--requests", 60, "--max-tokens", TOKENS
    )  # fmt: skip
    light, heavy = levels_of(tmp_path)
    assert "backlog" not in failed_checks(light)
    assert "backlog" in failed_checks(heavy)
    assert "the server can't hold this rate" in table
    assert "100/s: from " in table
    assert heavy["open_loop"]["offered_rate"] == pytest.approx(100, rel=0.1)
    assert heavy["open_loop"]["ended_rate"] < 60
    assert heavy["requests"]["ok"] == 60


def test_an_open_run_summarized_again_is_the_same_to_the_last_digit(
    breakeven: Run, tmp_path: Path, server: NullServer
) -> None:
    bench(breakeven, server, "--rate", 50, "--requests", 30, "--max-tokens", TOKENS)
    first = (tmp_path / "out" / "summary.json").read_bytes()
    (tmp_path / "out" / "summary.json").unlink()
    assert breakeven("summarize", "out").returncode == 0
    assert (tmp_path / "out" / "summary.json").read_bytes() == first


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("at_s,input_tokens,output_tokens\n0,1,1\n1,x,1\n", "--trace t: line 3: no time and numbers of tokens"),
        ("a,b\n1,2\n", "--trace t: its columns are a, b; known are TIMESTAMP"),
        ("", "--trace t: no request in it"),
    ],
)
def test_a_trace_that_is_none_is_one_line(
    breakeven: Run, tmp_path: Path, server: NullServer, text: str, said: str
) -> None:
    (tmp_path / "t").write_text(text)
    result = breakeven("bench", "--server-url", server.url, "--trace", "t")
    assert result.returncode == 2
    assert said in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
