"""Traces as they are published, and as people break them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from breakeven.errors import UsageError
from breakeven.load.trace import TraceRequest, read_trace

#: The forms of published traces, a few lines each.
AZURE_2023 = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:46.6805900,879,55
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:01+00:00,2399,6
2024-05-10 00:00:01.0171+00:00,76,15
"""
MOONCAKE = """{"timestamp": 27482, "input_length": 1200, "output_length": 52, "hash_ids": [46, 47, 2353]}
{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46, 47, 2366, 2367]}
{"timestamp": 30535, "input_length": 5, "output_length": 1, "hash_ids": []}
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45.5,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,0,417,API log
118,GPT-4,417,276,693,Conversation log
"""
OWN = """at_s,input_tokens,output_tokens
0.0,10,20
0.25,30,40
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace"


def read(path: Path, text: str | bytes) -> list[TraceRequest]:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_trace(str(path))


def error(path: Path, text: str | bytes) -> str:
    """The one line that is said of a trace, less the file's name."""
    with pytest.raises(UsageError) as caught:
        read(path, text)
    said = str(caught.value)
    assert said.startswith(f"--trace {path}: ")
    assert len(said.splitlines()) == 1
    assert len(said) < 700
    return said.removeprefix(f"--trace {path}: ")


def test_azure_2023(trace: Path) -> None:
    found = read(trace, AZURE_2023)
    assert [(r.input_tokens, r.output_tokens) for r in found] == [(374, 44), (396, 109), (879, 55)]
    assert [r.at_s for r in found] == pytest.approx([0, 4.314579, 60], abs=1e-5)


def test_azure_2024(trace: Path) -> None:
    found = read(trace, AZURE_2024)
    assert [(r.input_tokens, r.output_tokens) for r in found] == [(2162, 5), (2399, 6), (76, 15)]
    assert [r.at_s for r in found] == pytest.approx([0, 0.99007, 1.00717], abs=1e-5)


@pytest.fixture
def new_york(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "EST5EDT,M3.2.0,M11.1.0")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("new_york")
def test_dates_without_a_zone_are_utc(trace: Path) -> None:
    """In New York there was no half past two on this day."""
    header, *_ = AZURE_2023.splitlines()
    rows = [f"2023-03-12 {hour:02}:30:00,1,1" for hour in (1, 2, 3)]
    assert [r.at_s for r in read(trace, "\n".join([header, *rows]))] == [0, 3600, 7200]


def test_mooncake(trace: Path) -> None:
    assert read(trace, MOONCAKE) == [
        TraceRequest(0, 1200, 52, (46, 47, 2353)),
        TraceRequest(pytest.approx(3.053), 6472, 26, (46, 47, 2366, 2367)),
        TraceRequest(pytest.approx(3.053), 5, 1, ()),
    ]


def test_burstgpt_without_the_requests_that_got_no_answer(trace: Path) -> None:
    assert read(trace, BURSTGPT) == [
        TraceRequest(0, 472, 18),
        TraceRequest(40.5, 1087, 230),
        TraceRequest(113, 417, 276),
    ]


@pytest.mark.parametrize(
    "text",
    [
        OWN,
        '{"at_s": 7, "input_tokens": 10, "output_tokens": 20}\n{"at_s": 7.25, "input_tokens": 30, "output_tokens": 40}',
    ],
)
def test_a_form_of_our_own(trace: Path, text: str) -> None:
    assert read(trace, text) == [TraceRequest(0, 10, 20), TraceRequest(0.25, 30, 40)]


def test_requests_are_sorted_and_the_first_comes_at_0(trace: Path) -> None:
    rows = ["at_s,input_tokens,output_tokens", "30,3,1", "-10,1,1", "10,2,1", "10,5,1"]
    assert [(r.at_s, r.input_tokens) for r in read(trace, "\n".join(rows))] == [(0, 1), (20, 2), (20, 5), (40, 3)]


def test_columns_may_stand_in_any_order_among_others(trace: Path) -> None:
    text = 'model,output_tokens,"note, long", at_s ,input_tokens\n"a\nb",2,,1.5,1\n'
    assert read(trace, text) == [TraceRequest(0, 1, 2)]


@pytest.mark.parametrize("text", [AZURE_2023, AZURE_2024, MOONCAKE, BURSTGPT, OWN])
def test_marks_ends_of_lines_and_blank_lines_change_nothing(trace: Path, text: str) -> None:
    plain = read(trace, text)
    assert read(trace, b"\xef\xbb\xbf" + text.encode()) == plain
    assert read(trace, text.replace("\n", "\r\n")) == plain
    assert read(trace, text.replace("\n", "\n\n")) == plain
    assert read(trace, text.removesuffix("\n")) == plain
    assert read(trace, "\n" + text) == plain


def test_a_prompt_of_no_token_has_one(trace: Path) -> None:
    assert read(trace, "at_s,input_tokens,output_tokens\n0,0,5") == [TraceRequest(0, 1, 5)]


@pytest.mark.parametrize("text", ["", "\n\n", "at_s,input_tokens,output_tokens\n", OWN.splitlines()[0] + "\n1,5,0\n"])
def test_nothing_to_send(trace: Path, text: str) -> None:
    assert error(trace, text) == "no request in it that has output"


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^--trace .*none: No such file or directory; give CSV or JSON lines$"):
        read_trace(str(tmp_path / "none"))
    with pytest.raises(UsageError, match=r"^--trace .*: Is a directory; give CSV or JSON lines$"):
        read_trace(str(tmp_path))


@pytest.mark.parametrize("data", [OWN.encode("utf-16"), b"at_s\xff,input_tokens,output_tokens\n", bytes(range(256))])
def test_a_file_that_is_no_text(trace: Path, data: bytes) -> None:
    assert error(trace, data) == "it is not UTF-8 text; give CSV or JSON lines"


@pytest.mark.parametrize(
    ("text", "there"),
    [
        ("TIMESTAMP,ContextTokens\n1,2\n", "TIMESTAMP, ContextTokens"),
        ("TIMESTAMP;ContextTokens;GeneratedTokens\n1;2;3\n", "TIMESTAMP;ContextTokens;GeneratedTokens"),
        ('"a\n\tb",c\n1,2\n', "a b, c"),
        ('{"timestamp": 1, "input_length": 5}', "timestamp, input_length"),
        ("{}", "none"),
        ("<html>\n<body>\n", "<html>"),
    ],
)
def test_columns_that_are_not_known(trace: Path, text: str, there: str) -> None:
    said = error(trace, text)
    assert said.startswith(f"its columns are {there}; known are TIMESTAMP, ContextTokens, GeneratedTokens; timestamp")


def test_a_json_array_is_told_how_to_become_lines(trace: Path) -> None:
    said = error(trace, json.dumps([{"at_s": 0, "input_tokens": 1, "output_tokens": 1}], indent=1))
    assert said == f"a JSON array; it needs one JSON object a line: jq -c '.[]' {trace}"


@pytest.mark.parametrize("value", ["", "x", "nan", "-nan", "inf", "-inf", "1e12", "1e999", "None"])
def test_times_that_are_none(trace: Path, value: str) -> None:
    said = error(trace, f"{OWN}\n\n{value},1,1\n")
    assert said == "line 6: no time and numbers of tokens in at_s, input_tokens and output_tokens"


@pytest.mark.parametrize("value", ["", "x", "nan", "-1", "inf", "10000001", "1e300", "1,5"])
@pytest.mark.parametrize("column", [1, 2])
def test_numbers_of_tokens_that_are_none(trace: Path, column: int, value: str) -> None:
    cells = ["1", "1", "1"]
    cells[column] = f'"{value}"'
    assert error(trace, OWN + ",".join(cells)).startswith("line 4: no time and numbers of tokens in at_s")


@pytest.mark.parametrize("value", ["", "yesterday", "2023-13-01 00:00:00", "18:15:46", "1700000000"])
def test_dates_that_are_none(trace: Path, value: str) -> None:
    said = error(trace, f"{AZURE_2023}{value},5,5\n")
    assert said == "line 5: no time and numbers of tokens in TIMESTAMP, ContextTokens and GeneratedTokens"


@pytest.mark.parametrize(("row", "cells"), [("1,2", 2), ("1,2,3,4", 4), ("1,2,3,", 4), ("  ", 1)])
def test_rows_with_too_few_or_too_many_cells(trace: Path, row: str, cells: int) -> None:
    assert error(trace, f"{OWN}{row}\n5,5,5\n") == f"line 4: no CSV: {cells} cells under 3 names"


@pytest.mark.parametrize("row", ['"1,2,3', '1,"2,3\n4,5,6\n7,8,9', '"1"x,2,3'])
def test_quotes_that_are_left_open(trace: Path, row: str) -> None:
    assert error(trace, f"{OWN}{row}").startswith("line ")


def test_a_huge_cell(trace: Path) -> None:
    assert error(trace, f"{OWN}{'1' * 200_000},1,1\n").startswith("line 4: no CSV: field larger")


@pytest.mark.parametrize(
    "line",
    ["{", "[1]", "5", '"x"', "null", "not json", '{"timestamp": 1e999}', '{"a":' * 5000],
)
def test_lines_that_are_no_json_object(trace: Path, line: str) -> None:
    said = error(trace, f"{MOONCAKE}\n{line}\n")
    assert said.startswith("line 5: ")
    assert said.endswith("; it needs a JSON object")


@pytest.mark.parametrize(
    "change",
    [
        {"timestamp": None},
        {"timestamp": [1]},
        {"timestamp": "soon"},
        {"timestamp": 10**400},
        {"input_length": None},
        {"input_length": -1},
        {"input_length": {}},
        {"output_length": "many"},
        {"output_length": 10**400},
    ],
)
def test_json_values_that_are_none(trace: Path, change: dict[str, object]) -> None:
    row = {"timestamp": 1, "input_length": 5, "output_length": 5} | change
    said = error(trace, MOONCAKE + json.dumps(row))
    assert said == "line 4: no time and numbers of tokens in timestamp, input_length and output_length"


def test_json_objects_that_lack_a_value(trace: Path) -> None:
    assert error(trace, MOONCAKE + '{"timestamp": 1, "input_length": 5}').startswith("line 4: no time")


@pytest.mark.parametrize("blocks", ['"12"', "12", "[1.5]", '["a"]', "[[1]]", '{"1": 2}', "[null]"])
def test_blocks_that_are_no_numbers(trace: Path, blocks: str) -> None:
    row = f'{{"timestamp": 1, "input_length": 5, "output_length": 5, "hash_ids": {blocks}}}'
    assert error(trace, MOONCAKE + row) == "line 4: hash_ids is no list of whole numbers"


def test_a_trace_of_a_hundred_thousand_requests(trace: Path) -> None:
    rows = "".join(f"{i / 100},{i % 4000},{i % 500 + 1}\n" for i in range(100_000))
    found = read(trace, OWN.splitlines()[0] + "\n" + rows)
    assert len(found) == 100_000
    assert found[-1].at_s == pytest.approx(999.99)
