"""`breakeven doctor` as a whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from breakeven.doctor import doctor
from breakeven.engines.null import null_server
from breakeven.errors import TargetError
from breakeven.options import BenchOptions
from breakeven.report.diagnosis import render_diagnosis


def test_machine_and_server_are_told_in_one_diagnosis() -> None:
    with null_server("--step-us", "5000") as server:
        diagnosis = doctor(BenchOptions(server_url=server.url), seconds=0.2)
    found = {finding.name: finding for finding in diagnosis.findings}
    assert {"1 stream", "100 streams", "1000 streams", "unpaced", "clock", "descriptors", "headroom"} <= found.keys()
    assert found["100 streams"].numbers["ceiling"].chunks_per_s > 0
    assert found["headroom"].numbers["ceiling_per_s"] == found["100 streams"].numbers["ceiling"].chunks_per_s
    told = json.loads(render_diagnosis(diagnosis, "json"))["findings"]
    assert [finding["name"] for finding in told] == [finding.name for finding in diagnosis.findings]
    assert all(finding.name in render_diagnosis(diagnosis, "table") for finding in diagnosis.findings)


def test_a_server_that_is_not_there_is_told_at_once() -> None:
    with pytest.raises(TargetError):
        doctor(BenchOptions(server_url="http://127.0.0.1:1"))


def test_the_time_that_a_trace_takes_is_told(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("at_s,input_tokens,output_tokens\n0,10,5\n600,10,5\n")
    with null_server("--step-us", "5000") as server:
        diagnosis = doctor(BenchOptions(server_url=server.url, trace=str(trace)), seconds=0.1)
    (plan,) = [found for found in diagnosis.findings if found.name == "plan"]
    assert "takes about 10 min" in plan.finding
    assert "headroom" not in {finding.name for finding in diagnosis.findings}
