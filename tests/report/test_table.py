"""What people read: tables that fit a screen, and forms that machines read back."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from breakeven.measure.checks import Check
from breakeven.measure.level import LevelSummary, summarize_level
from breakeven.measure.summary import Summary, summary_of
from breakeven.options import Format
from breakeven.records import EngineSample, Manifest
from breakeven.report.table import level_line, render
from tests.measure.handmade import S, level_record, request, steady_stream

LOADS = (1, 2, 5, 10, 30, 70, 100, 250)
SPEC = {"acceptance_length": 2.5, "acceptance_rate": 0.5, "per_position": [0.8, 0.5, 0.2, 0.0]}


def summarized(concurrency: int = 1, **plan: Any) -> LevelSummary:
    """A minute of one request at a time, told as a level of any concurrency."""
    sample = EngineSample(time_ns=S, running=1.0, waiting=0.0, kv_use=0.25)
    level = level_record(concurrency=concurrency, spec=SPEC, samples=[sample], counters={"preemptions": 0.0}, **plan)
    return summarize_level(level, steady_stream(), shared_cores=None)


def summary(levels: list[LevelSummary]) -> Summary:
    manifest = Manifest(
        label="on",
        breakeven_version="0.1.0",
        target={"engine": "vllm"},
        model="a-model",
        flags={},
        prompts={},
        seed=0,
        levels=[],
        host={"cores": 2},
        started="2026-01-01T00:00:00+00:00",
    )
    return summary_of(manifest, levels)


def with_failed(level: LevelSummary, *checks: tuple[str, str]) -> LevelSummary:
    return msgspec.structs.replace(level, checks=[Check(name, False, detail) for name, detail in checks])


def clean(level: LevelSummary) -> LevelSummary:
    return msgspec.structs.replace(level, checks=[Check("failures", True, "no request failed")])


def troubled() -> Summary:
    """Eight levels with all that can be wrong."""
    levels = []
    for load in LOADS:
        found = [("cache", f"{load} prompts were sent more than once"), ("clock", "wall time was stepped 1 times")]
        if load >= 30:
            found += [
                ("in_flight", f"{0.9 * load:.1f} of {load} on average"),
                ("client", f"the client took 97% of a core, its loop was {load / 3:.1f} ms late at p99"),
                ("shared_cpu", f"the client took {load / 5:.1f}% of the machine it shares"),
                ("drift", "-12.4% tokens from the window's first half to its second"),
                ("engine_in_flight", f"the engine counts 64.0 running and waiting, the client {load:.1f}"),
                ("failures", f"{load} http_error, 3 timeout of 900 requests; e.g. HTTP 503: try again\nlater"),
            ]
        levels.append(with_failed(summarized(load), *found))
    return summary(levels)


def numbers(value: Any) -> Iterator[float]:
    """All numbers in a JSON value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from numbers(each)
    elif isinstance(value, (int, float)):
        yield value


def test_table_puts_each_number_under_its_group_and_name() -> None:
    groups, names, row = render(summary([clean(summarized())]), "table").splitlines()
    assert " ".join(names.split()) == "C total a request mean p50 p99 p50 p99 p50 p99 accept ok failed"
    assert " ".join(row.split()) == "1 20.0 ±0.00 20.0 2.00 2.00 2.00 50.0 50.0 50.0 50.0 2.50 30 0"
    for group, first in (("tok/s", "total"), ("latency s", "mean"), ("TTFT ms", "p50"), ("TPOT ms", "p50")):
        at = groups.index(group)
        assert names[at:].lstrip().startswith(first)


def test_table_shows_lengths_and_runs_only_where_they_differ() -> None:
    one = render(summary([clean(summarized(1)), clean(summarized(2))]), "table").splitlines()[1].split()
    assert "max" not in one
    assert "run" not in one
    several = [clean(summarized(1, index=i, run=i, max_tokens=n)) for i, n in enumerate((128, 512))]
    assert render(summary(several), "table").splitlines()[1].split()[:3] == ["C", "max", "run"]


def opened(rate: float = 0.5, **plan: Any) -> LevelSummary:
    """A minute of one request every two seconds, each 40 ms late."""
    late = steady_stream()
    for record in late:
        record.due_ns -= 40_000_000
    level = level_record(**({"mode": "open", "rate": rate, "arrivals": "poisson"} | plan))
    return summarize_level(level, late, shared_cores=None)


def test_open_loops_are_named_by_their_rate_and_show_latencies_from_due() -> None:
    groups, names, row = render(summary([clean(opened())]), "table").splitlines()
    expected = "load total a request mean p50 p99 p50 p99 p50 p99 TTFT p99 E2E p99 in flight ok failed"
    assert " ".join(names.split()) == expected
    assert " ".join(row.split()) == "0.5/s 20.0 ±0.00 20.0 2.00 2.00 2.00 50.0 50.0 50.0 50.0 90.0 2040 1.00 30 0"
    assert names[groups.index("from due ms") :].startswith("TTFT p99")


def test_closed_loops_have_no_columns_of_open_ones() -> None:
    text = render(summary([clean(summarized(8))]), "table")
    assert not {"load", "from due ms", "in flight"} & set(text.splitlines()[0].split("  ") + text.split("  "))


def test_notes_name_open_levels_and_traces() -> None:
    levels = [
        with_failed(opened(0.5, index=0), ("late", "19.0 ms")),
        with_failed(opened(20.0, index=1), ("late", "50.0 ms")),
        with_failed(opened(mode="trace", speed=10.0, index=2), ("late", "70.0 ms")),
    ]
    notes = render(summary(levels), "table").split("\n\n")[-1]
    assert "0.5/s: 19.0 ms; 20/s: 50.0 ms; trace x10: 70.0 ms" in notes


def test_repeated_rates_show_their_spread() -> None:
    text = render(summary([clean(opened(index=i, run=i)) for i in range(3)]), "table")
    assert "0.5/s max-tokens=512: mean 20.0 tok/s" in text


def test_a_line_of_an_open_level_begins_with_its_rate() -> None:
    assert level_line(opened()).startswith("0.5/s max-tokens=512: 20.0 ±0.00 tok/s, TTFT p50 50.0 ms")


def test_csv_has_the_columns_of_every_kind_of_load() -> None:
    levels = [summarized(8), opened(arrivals="gamma:2", index=1), opened(mode="trace", speed=10.0, index=2)]
    closed, rate, trace = csv.DictReader(io.StringIO(render(summary(levels), "csv")))
    loads = [
        tuple(row[name] for name in ("mode", "concurrency", "rate", "arrivals", "speed"))
        for row in (closed, rate, trace)
    ]
    assert loads == [("closed", "8", "", "", ""), ("open", "", "0.5", "gamma:2", ""), ("trace", "", "", "", "10.0")]
    due = (
        "lateness_ms_p50",
        "lateness_ms_p99",
        "ttft_due_ms_p50",
        "ttft_due_ms_p99",
        "e2e_due_ms_p50",
        "e2e_due_ms_p99",
    )
    assert [closed[name] for name in due] == [""] * 6
    assert [float(rate[name]) for name in due] == [40, 40, 90, 90, 2040, 2040]


def test_json_has_an_open_loops_numbers() -> None:
    closed, level = json.loads(render(summary([summarized(8), opened(index=1)]), "json"))["levels"]
    assert closed["open_loop"] is None
    assert set(level["open_loop"]) == {"offered_rate", "ended_rate", "lateness_ms", "ttft_due_ms", "e2e_due_ms"}
    assert level["load"] == {"mode": "open", "rate": 0.5, "arrivals": "poisson", "max_tokens": 512}
    assert (level["name"], closed["name"]) == ("0.5/s", "C=8")


def test_failed_check_stands_in_its_row_and_is_explained_below() -> None:
    sound = msgspec.structs.replace(summarized(1), checks=[Check("in_flight", True, "1.0 of 1 on average")])
    levels = [sound, with_failed(summarized(10), ("in_flight", "9.1 of 10 on average"))]
    text = render(summary(levels), "table")
    table, notes = text.split("\n\n")
    assert table.splitlines()[1].endswith("notes")
    assert table.splitlines()[2].endswith(" 0")
    assert table.splitlines()[3].endswith("  a")
    assert notes.splitlines() == [
        "Notes:",
        "  a  in_flight: tok/s is that of a lower load",
        "     C=10: 9.1 of 10 on average",
    ]


def test_notes_name_the_level_by_all_that_tells_it_from_others() -> None:
    levels = [
        with_failed(summarized(4, index=i, run=i // 2, max_tokens=n), ("in_flight", f"{i} of 4"))
        for i, n in enumerate((128, 512, 128, 512))
    ]
    notes = render(summary(levels), "table").split("\n\n")[-1]
    assert "C=4 max=128 run 1: 0 of 4; C=4 max=512 run 1: 1 of 4; C=4 max=128 run 2: 2 of 4" in notes


def test_a_finding_that_all_levels_share_is_said_once() -> None:
    text = render(troubled(), "table")
    assert text.count("wall time was stepped") == 1
    assert "all levels: wall time was stepped 1 times" in text


def test_every_check_has_a_meaning() -> None:
    from breakeven.report.table import MEANING
    from tests.measure.test_checks import CLOSED, OPEN

    assert set(MEANING) == CLOSED | OPEN


def test_eight_troubled_levels_fit_a_screen() -> None:
    text = render(troubled(), "table")
    assert max(map(len, text.splitlines())) <= 120
    assert len(text.splitlines()) <= 50


def test_repeated_sweeps_show_their_spread() -> None:
    levels = [clean(summarized(1, index=i, run=i)) for i in range(3)]
    text = render(summary(levels), "table")
    assert "C=1 max-tokens=512: mean 20.0 tok/s, std 0.00, 20.0 to 20.0 over 3 runs" in text


def test_a_run_without_levels_says_so() -> None:
    assert render(summary([]), "table") == "nothing was measured\n"
    assert render(summary([]), "markdown") == "nothing was measured\n"
    assert render(summary([]), "csv").startswith("mode,concurrency,rate,arrivals,speed,max_tokens,")
    assert json.loads(render(summary([]), "json"))["levels"] == []


def test_markdown_rows_have_equal_cell_counts() -> None:
    text = render(troubled(), "markdown")
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(LOADS)
    assert len({line.count("|") for line in table}) == 1
    assert table[0].split("|")[4].strip() == "latency s mean"


def test_markdown_notes_are_a_list() -> None:
    notes = render(troubled(), "markdown").split("\n\n", 1)[1].splitlines()
    assert notes[:2] == ["Notes:", ""]
    assert all(line.startswith(("- ", "  ")) for line in notes[2:])
    assert sum(line.startswith("- ") for line in notes) == 8


def test_csv_parses_back_to_the_numbers() -> None:
    levels = [summarized(load) for load in LOADS]
    rows = list(csv.DictReader(io.StringIO(render(summary(levels), "csv"))))
    assert [int(row["concurrency"]) for row in rows] == list(LOADS)
    for row, level in zip(rows, levels, strict=True):
        assert float(row["output_throughput"]) == level.output_throughput.value
        assert float(row["ttft_ms_p99"]) == level.ttft_ms.p99
        assert row["ended_by"] == "duration"
        assert None not in row
        assert None not in row.values()


def test_csv_leaves_what_is_not_known_empty() -> None:
    nothing = summarize_level(level_record(None, None), [], shared_cores=None)
    (row,) = csv.DictReader(io.StringIO(render(summary([nothing]), "csv")))
    assert row["ttft_ms_mean"] == row["window_s"] == row["output_throughput_low"] == row["acceptance_length"] == ""
    assert row["ttft_ms_count"] == "0"


def test_json_has_the_schema_that_was_promised() -> None:
    level = json.loads(render(summary([summarized(10)]), "json"))["levels"][0]
    assert json.loads(render(summary([]), "json"))["schema"] == "breakeven.summary/1"
    assert level["load"] == {"mode": "closed", "concurrency": 10, "max_tokens": 512}
    assert level["requests"] == {"ok": 30, "failed": 0, "by_outcome": {"ok": 30}, "reconnects": 0, "retries": 0}
    assert level["output_tokens"] == 1200
    assert set(level["output_throughput"]) == {"value", "ci95", "whole_run", "window_s"}
    assert len(level["output_throughput"]["ci95"]) == 2
    for name in ("per_request_throughput", "ttft_ms", "tpot_ms", "itl_ms", "icl_ms", "e2e_ms"):
        assert list(level[name]) == ["count", "mean", "std", "min", "p50", "p90", "p95", "p99", "max"]
    assert set(level["in_flight"]) == {"mean", "max"}
    assert level["engine"] == {"running": 1.0, "waiting": 0.0, "kv_use": 0.25, "preemptions": 0.0}
    assert level["spec"] == {"acceptance_length": 2.5, "acceptance_rate": 0.5, "per_position": [0.8, 0.5, 0.2]}
    assert set(level["client"]) == {"cpu_us_per_chunk", "lag_ms", "saturated"}
    assert all(set(check) == {"name", "ok", "detail"} for check in level["checks"])
    assert level["ended_by"] == "duration"


def test_json_says_null_where_nothing_is_known() -> None:
    nothing = summarize_level(level_record(None, None), [], shared_cores=None)
    level = json.loads(render(summary([nothing]), "json"))["levels"][0]
    assert level["output_throughput"] == {"value": 0.0, "ci95": None, "whole_run": 0.0, "window_s": None}
    assert level["engine"] is None
    assert level["spec"] is None
    assert level["ttft_ms"]["mean"] is None


@pytest.mark.parametrize("form", ["table", "markdown", "csv", "json"])
def test_every_form_ends_in_a_newline(form: Format) -> None:
    assert render(troubled(), form).endswith("\n")
    assert not render(troubled(), form).endswith("\n\n")


def test_numbers_of_a_huge_range_print_short_and_finite() -> None:
    records = [
        request(0, [(0.0001, 1), (0.0002, 1)], sent_s=0.0),
        request(1, [(5e8, 10**12), (9e8, 10**12)], sent_s=0.001),
    ]
    level = summarize_level(level_record(0.0, 1e6), records, shared_cores=2)
    header = render(summary([clean(level)]), "table").splitlines()
    assert len(header[2]) <= 130
    assert all(math.isfinite(number) for number in numbers(json.loads(render(summary([level]), "json"))))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0.00"),
        (0.000012, "1.20e-05"),
        (0.0123, "0.0123"),
        (0.5, "0.50"),
        (9.876, "9.88"),
        (77.53, "77.5"),
        (340.93, "340.9"),
        (12345.6, "12346"),
        (1.5e9, "1.50e+09"),
        (-3.456, "-3.46"),
    ],
)
def test_numbers_have_about_three_figures(value: float | None, text: str) -> None:
    from breakeven.report.grid import number

    assert number(value) == text


def test_level_line_says_what_failed() -> None:
    level = with_failed(summarized(10), ("in_flight", "9.1 of 10 on average"))
    line = level_line(level)
    assert line.startswith("C=10 max-tokens=512: 20.0 ±0.00 tok/s, TTFT p50 50.0 ms, TPOT p50 50.0 ms, 30 ok;")
    assert line.endswith("ended by duration; see in_flight")
    assert "\n" not in level_line(summarize_level(level_record(None, None), [], shared_cores=None))
