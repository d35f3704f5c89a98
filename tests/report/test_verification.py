"""A verification, printed."""

from __future__ import annotations

import csv
import io
import json

import pytest

from breakeven.decide.schedule import Range, Schedule
from breakeven.decide.verify import Verification, verify
from breakeven.report.verification import render_verification
from tests.decide.arms import made
from tests.decide.test_verify import BEST, OFF, ON

SPEC = {"drafts": 800.0, "draft_tokens": 1600.0, "accepted": 1000.0, "acceptance_length": 2.25}
LEVEL = {"spec": SPEC | {"acceptance_rate": 0.6, "per_position": []}, "counters": {"generation_tokens": 2000.0}}


@pytest.fixture(scope="module")
def found() -> Verification:
    arms = [made("off", OFF), made("on", ON), made("tuned", BEST, level=LEVEL)]
    return verify(arms, schedule=Schedule(model="m", ranges=(Range(1, 64, 2),)))


def test_the_verdict_stands_under_the_tables_as_one_sentence(found: Verification) -> None:
    text = render_verification(found, "table")
    assert found.holding.sentence + "." in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 120
    assert f"**{found.holding.sentence}.**" in render_verification(found, "markdown").splitlines()


def test_each_load_names_its_best_arm_and_what_was_drafted(found: Verification) -> None:
    rows = [line.split("|") for line in render_verification(found, "markdown").splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in row[1:-1]] for row in rows]
    heads, first, eight, mean = cells[0], cells[2], cells[3], cells[4]
    assert [row[heads.index("best static arm")] for row in (first, eight, mean)] == ["on", "off", "geometric mean"]
    assert first[heads.index("drafted a draft") :] == ["2.00", "1.60", "2.00"]
    assert first[heads.index("tuned/best within 3 %")] == "yes"


def test_no_columns_are_shown_for_what_nobody_counts() -> None:
    text = render_verification(verify([made("off", OFF), made("on", ON), made("tuned", BEST)]), "table")
    assert "drafted" not in text


def test_csv_has_a_row_for_each_static_arm_and_the_best(found: Verification) -> None:
    rows = list(csv.DictReader(io.StringIO(render_verification(found, "csv"))))
    assert [(row["load"], row["against"]) for row in rows] == [
        ("1", "off"), ("1", "on"), ("1", "best"), ("8", "off"), ("8", "on"), ("8", "best"),
    ]  # fmt: skip
    assert rows[2]["verdict"] == "holds"
    assert float(rows[0]["ratio"]) == pytest.approx(20.05 / 15.05, rel=0.01)


def test_json_is_what_is_written_down(found: Verification) -> None:
    told = json.loads(render_verification(found, "json"))
    assert told["schema"] == "breakeven.verification/1"
    assert told["holding"]["outcome"] == "holds"
    assert told["loads"][0]["envelope"]["best"] == ["on"]
