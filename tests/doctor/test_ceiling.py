"""The client's ceiling, measured against a real null server."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
import uvloop

from breakeven.doctor.ceiling import Ceiling, measure_ceiling, quick_ceiling
from breakeven.measure.checks import BUSY_CORE


def test_the_ceiling_is_what_fills_a_core_at_the_cost_of_a_chunk() -> None:
    ceiling = measure_ceiling(10, 0.4, pace_per_s=2000)
    assert ceiling.streams == 10
    assert ceiling.chunks_per_s == pytest.approx(BUSY_CORE * 1e6 / ceiling.cpu_us_per_chunk)
    # No client reads and parses a chunk in a microsecond; one that took 5 ms would see a tenth of these.
    assert 1 < ceiling.cpu_us_per_chunk < 5000


def test_no_more_comes_than_the_null_server_was_to_send() -> None:
    paced = measure_ceiling(10, 0.4, pace_per_s=1000)
    assert paced.offered_per_s == 1000
    assert 0 < paced.reads_per_s <= paced.received_per_s <= 1200
    unpaced = measure_ceiling(10, 0.4, pace_per_s=None)
    assert unpaced.offered_per_s is None
    assert unpaced.received_per_s > 2 * paced.received_per_s


def test_the_short_version_has_no_more_streams_than_it_may() -> None:
    ceiling = quick_ceiling(3)
    assert isinstance(ceiling, Ceiling), ceiling
    assert ceiling.streams == 3


def test_the_short_version_runs_in_a_thread_beside_an_event_loop() -> None:
    async def beside() -> Ceiling | str:
        return await asyncio.to_thread(quick_ceiling, 3)

    assert isinstance(uvloop.run(beside()), Ceiling)


def test_the_short_version_says_why_there_is_no_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert "/nowhere/python" in str(quick_ceiling(100))


def limited(descriptors: int, call: str) -> str:
    """What a call gives in a process that may open only so many files."""
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({descriptors}, {descriptors}))\n"
        f"from breakeven.doctor.ceiling import *\ntry: print({call})\nexcept Exception as e: print(repr(e))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return result.stdout


def test_the_short_version_keeps_within_the_limit_on_open_files() -> None:
    assert "Ceiling(streams=6," in limited(70, "quick_ceiling(100)")
    assert "Too many open files" in limited(10, "quick_ceiling(100)")


def test_streams_that_find_no_descriptor_are_not_passed_over() -> None:
    found = limited(40, "measure_ceiling(100, 0.2)")
    assert found.startswith("EngineError")
    assert "Too many open files" in found
