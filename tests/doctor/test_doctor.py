"""`breakeven doctor` as a whole."""

from __future__ import annotations

import json

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
