"""A diagnosis as people read it, and as machines do."""

from __future__ import annotations

import json

import pytest

from breakeven.report.diagnosis import Diagnosis, State, on_machine, on_server, render_diagnosis

LONG = "sysctl -w net.ipv4.ip_local_port_range='1024 65535' and then a good many words more " * 3


def test_findings_stand_under_where_they_are_with_their_mends() -> None:
    findings = [on_server("api", "ok", "chat"), on_machine("ports", "problem", "too few", "more of them", ports=7)]
    assert render_diagnosis(Diagnosis(findings=findings), "table") == (
        "This machine\n"
        "  problem  ports  too few\n"
        "                  > more of them\n"
        "\n"
        "The server\n"
        "  ok       api    chat\n"
        "\n"
        "1 problem\n"
    )


def test_no_line_is_wider_than_a_screen() -> None:
    table = render_diagnosis(Diagnosis(findings=[on_machine("long", "note", LONG, LONG)]), "table")
    assert max(map(len, table.splitlines())) <= 110


def test_json_has_the_numbers() -> None:
    diagnosis = Diagnosis(findings=[on_machine("ports", "ok", "enough", ports=28_232)])
    (finding,) = json.loads(render_diagnosis(diagnosis, "json"))["findings"]
    words = {"area": "machine", "name": "ports", "state": "ok", "finding": "enough", "mend": None}
    assert finding == words | {"numbers": {"ports": 28_232}}


@pytest.mark.parametrize(
    ("states", "verdict"),
    [
        ((), "all is well"),
        (("ok", "ok"), "all is well"),
        (("note", "ok", "note", "unknown"), "2 notes, 1 unknown"),
        (("problem", "note", "unknown", "unknown"), "1 problem, 1 note, 2 unknown"),
    ],
)
def test_the_last_line_counts_what_is_not_well(states: tuple[State, ...], verdict: str) -> None:
    diagnosis = Diagnosis(findings=[on_machine(f"{i}", state, "…") for i, state in enumerate(states)])
    assert render_diagnosis(diagnosis, "table").splitlines()[-1] == verdict
    assert diagnosis.has_problems is ("problem" in states)
