"""What people read of a comparison: tables that fit a screen, and under them the answer."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest
from msgspec import structs

from breakeven.decide.comparison import Comparison, compare
from breakeven.decide.slo import parse_slos
from breakeven.options import Format
from breakeven.records import RequestRecord
from breakeven.report.comparison import render_comparison
from breakeven.report.grid import Head, aligned, piped
from tests.decide.arms import failing, made

NOISE = (1.0, 1.004, 0.997, 1.001)
#: Milliseconds a token, by load: the other arm pays below 4 and costs above.
OFF = {1: 20.0, 2: 22.0, 4: 26.0, 8: 34.0}
ON = {1: 12.0, 2: 16.0, 4: 25.9, 8: 42.0}


def turns(steps: dict[int, float], shift: int) -> dict[float, list[float]]:
    """Four turns a load, whose noise is in another order in each arm."""
    return {load: [step * NOISE[(i + shift) % 4] for i in range(4)] for load, step in steps.items()}


def two(names: tuple[str, str] = ("off", "on"), **fields: Any) -> Comparison:
    arms = [made(names[0], turns(OFF, 0)), made(names[1], turns(ON, 1), **fields)]
    return compare(arms, slos=parse_slos("tpot_p50:30,ttft_p99:100"))


@pytest.fixture(scope="module")
def text() -> str:
    return render_comparison(two(target={"config": {"speculative_num_steps": 3}}), "table")


def test_the_answer_stands_alone_under_the_tables(text: str) -> None:
    lines = text.splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith("Speculation pays below "))
    assert lines[place - 1] == ""
    assert lines[place].startswith("Speculation pays below 4.0 requests in flight (95 %: ")
    assert all("requests in flight" not in line for line in lines[:place])


def test_every_line_fits_the_screen(text: str) -> None:
    assert max(map(len, text.splitlines())) <= 120
    long = render_comparison(two(("without-speculation", "ngram-simple-with-4"), each=failing_now_and_then), "table")
    assert max(map(len, long.splitlines())) <= 120
    assert "ngr…h-4/wit…ion" in long


def failing_now_and_then(record: RequestRecord) -> RequestRecord:
    return failing(record) if record.id % 10 == 0 else structs.replace(record, repetition=0.9)


def test_each_ratio_stands_under_its_arms(text: str) -> None:
    groups, names, first = (line for line in text.splitlines()[:3])
    assert groups.split() == ["tok/s", "on/off", "tokens", "a", "step", "ok"]
    assert names.split()[:5] == ["C", "off", "on", "ratio", "95"]
    assert groups.index("on/off") <= names.index("ratio")
    assert first.split()[0] == "1"
    assert "1.667" in first
    assert "faster" in first


def test_latencies_have_their_verdicts_as_signs(text: str) -> None:
    table = text.split("\n\n")[1].splitlines()
    assert table[0].split() == ["TPOT", "p50", "ms", "TPOT", "p99", "ms", "TTFT", "p50", "ms", "TTFT", "p99", "ms"]
    assert "0.60 +" in table[2]
    assert "1.24 -" in table[-1]
    assert "+ better, - worse" in text


def test_lists_under_the_answer_say_the_rest(text: str) -> None:
    for line in (
        "  TPOT p50: speculation pays below 4.0 requests in flight",
        "Knee (95 % of the highest throughput):",
        "Largest load that holds tpot_p50:30, ttft_p99:100:",
        "  not compared: no texts were kept: --keep-text keeps them",
        "  on: speculative_num_steps 3 (there none)",
        "  no verdict on TPOT p99, TTFT p99 at C=1, C=2, C=4, C=8: a p99 needs 300 requests in each arm",
    ):
        assert line in text
    assert "tpot_p50:30 is 34.0 at 8" in text
    where = "off at C=2, C=4, C=8 (4 of 4 turns); on at C=2, C=4, C=8 (4 of 4 turns)"
    assert f"in_flight: tok/s is that of a lower load\n     {where}" in text


def test_nothing_is_said_of_kinds_where_none_differs(text: str) -> None:
    assert "By kind" not in text


def test_kinds_have_their_answers_under_the_common_one() -> None:
    def quicker_code(record: RequestRecord) -> RequestRecord:
        if record.kind != "code":
            return record
        share = 0.5 + 0.001 * (record.level % 3)
        sooner = [(round(at * share), tokens) for at, tokens in record.arrivals]
        return structs.replace(record, arrivals=sooner)

    lines = render_comparison(two(each=quicker_code), "table").splitlines()
    place = lines.index("By kind of prompts (decode rate):")
    assert lines[place + 1].startswith("  for chat: speculation pays below")
    assert lines[place + 2].startswith("  for code: speculation pays at every load")


def test_texts_are_told_with_their_yardstick() -> None:
    def spoken(record: RequestRecord) -> RequestRecord:
        return structs.replace(record, text=record.prompt)

    def other(record: RequestRecord) -> RequestRecord:
        return structs.replace(record, text=record.prompt if record.prompt != "p3" else "else")

    arms = [made("off", turns(OFF, 0), each=spoken), made("on", turns(ON, 1), each=other)]
    text = render_comparison(compare(arms), "table")
    assert "  on against off: 4 of 160 answers differ, 2 % (95 %: 1 to 6)" in text
    assert "  off against itself, in two passes: 0 of 160 answers differ, 0 % (95 %: 0 to 2)" in text
    assert "is the yardstick for what differs between arms" in text


def test_three_arms_have_a_block_each() -> None:
    arms = [made("off", turns(OFF, 0)), made("k3", turns(ON, 1)), made("k5", turns(ON, 2))]
    text = render_comparison(compare(arms), "table")
    assert text.count("k3/off") == text.count("k5/off") == 1
    assert max(map(len, text.splitlines())) <= 120
    assert "\nk3 against off pays below" in text
    assert "\nk5 against off pays below" in text


def test_open_loops_are_told_in_requests_a_second() -> None:
    rates = {0.5: [20.0, 20.1, 19.9, 20.05], 2.0: [20.0, 20.1, 19.9, 20.05]}
    other = {0.5: [15.0, 15.1, 15.0, 14.9], 2.0: [25.0, 25.1, 25.0, 24.9]}
    found = compare([made("off", rates, rate=True), made("on", other, rate=True)], slos=parse_slos("tpot_p50:22"))
    text = render_comparison(found, "table")
    assert "0.5/s" in text
    assert "No break-even of throughput in an open loop" in text
    assert "in flight (95" not in text
    assert "on: 1.32 requests a second (tpot_p50:22 is 25.0 at 2)" in text
    assert "Knee" not in text


def test_markdown_tables_have_a_rule_and_equal_cells() -> None:
    lines = render_comparison(two(), "markdown").splitlines()
    tables = [line for line in lines if line.startswith("|")]
    assert len({line.count("|") for line in tables[:6]}) == 1
    assert set(tables[1]) <= set("|-: ")
    assert any(line.startswith("**Speculation pays below") and line.endswith(".**") for line in lines)
    assert any(line.startswith("- TPOT p50: ") for line in lines)


def test_csv_has_a_row_for_each_load_and_arm() -> None:
    rows = list(csv.DictReader(io.StringIO(render_comparison(two(), "csv"))))
    assert [(row["load"], row["arm"]) for row in rows[:3]] == [("1", "off"), ("1", "on"), ("2", "off")]
    assert len(rows) == 8
    assert rows[0]["throughput_ratio"] == ""
    assert float(rows[1]["throughput_ratio"]) == pytest.approx(20 / 12, rel=0.01)
    assert float(rows[1]["throughput_ratio_low"]) < float(rows[1]["throughput_ratio"])
    assert (rows[1]["throughput_verdict"], rows[1]["tpot_p99_why_not"]) == ("faster", "few_requests")


def test_json_is_the_comparison() -> None:
    found = json.loads(render_comparison(two(), "json"))
    assert found["schema"] == "breakeven.comparison/1"
    assert found["arms"][1]["directory"] == "runs/on"
    assert found["loads"][0]["versus"][0]["throughput"]["verdict"] == "faster"


@pytest.mark.parametrize("form", ["table", "markdown", "csv", "json"])
def test_every_form_ends_in_one_newline_and_bears_what_is_missing(form: Format) -> None:
    def all_at_eight(record: RequestRecord) -> RequestRecord:
        return failing(record) if record.level >= 12 else record

    text = render_comparison(two(each=all_at_eight), form)
    assert text.endswith("\n")
    assert not text.endswith("\n\n")
    assert "nan" not in text.lower()


def test_a_groups_name_is_never_narrower_than_its_columns() -> None:
    groups, names, row = aligned([Head("a long group", "x"), Head("next", "y")], [["1", "2"]])
    assert groups == "a long group  next"
    assert names.index("x") == row.index("1") == 11
    assert piped([Head("", "a|b")], [["c|d"]])[2] == "| c\\|d |"
