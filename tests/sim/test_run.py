"""Runs of several levels and arms: one machine under all of them, and directories that other commands read."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from breakeven.errors import RunError
from breakeven.measure.arrivals import ArrivalTable
from breakeven.measure.summary import summarize
from breakeven.measure.throughput import batch_rates
from breakeven.runs import Run, read_run
from breakeven.sim.model import EngineModel, Noise
from breakeven.sim.run import Arm, LevelRun, manifest_of, simulate, simulate_pair, write_run
from tests.sim.handy import CROSSING, FLAT, conditions, level


def throughput(run: LevelRun) -> float:
    assert run.level.opened_ns is not None
    assert run.level.closed_ns is not None
    return float(batch_rates(ArrivalTable.of(run.requests), run.level.opened_ns, run.level.closed_ns).mean())


def log_ratios(model: EngineModel, seed: int, cycles: int = 4) -> list[float]:
    """Log ratios of an A/A comparison: one a cycle."""
    runs = simulate_pair((Arm(model, 0), Arm(model, 0)), level(4), cycles, conditions(6.0, seed))
    rates = [(run.arm, math.log(throughput(run))) for run in runs]
    return [
        np.mean([x for arm, x in rates[i : i + 4] if arm]) - np.mean([x for arm, x in rates[i : i + 4] if not arm])
        for i in range(0, 4 * cycles, 4)
    ]


def test_levels_follow_each_other_in_time() -> None:
    levels, requests = simulate(CROSSING, [level(2), level(4, index=1)], 3, conditions(10.0))
    assert levels[0].ended_ns <= levels[1].started_ns
    assert {r.level for r in requests} == {0, 1}
    assert all((r.sent_ns or 0) >= levels[r.level].started_ns for r in requests)


def test_arms_take_turns_and_never_run_together() -> None:
    runs = simulate_pair((Arm(CROSSING, 0), Arm(CROSSING, 3)), level(4), 2, conditions(5.0))
    assert [run.arm for run in runs] == [0, 1, 1, 0] * 2
    assert [run.level.plan.index for run in runs] == list(range(8))
    assert all(a.level.ended_ns <= b.level.started_ns for a, b in pairwise(runs))
    assert [run.level.spec is None for run in runs] == [True, False, False, True] * 2
    assert throughput(runs[1]) > throughput(runs[0])


def test_arms_share_the_machines_drift_so_that_pairs_cancel_it() -> None:
    drifting = replace(FLAT, noise=Noise(drift_per_hour=9.0))
    runs = simulate_pair((Arm(drifting, 0), Arm(drifting, 0)), level(4), 4, conditions(10.0))
    rates = [throughput(run) for run in runs]
    assert rates[-1] < 0.9 * rates[0]
    assert max(map(abs, log_ratios(drifting, 1))) < 0.01


def test_pairs_of_equal_arms_differ_by_chance_alone() -> None:
    noisy = replace(FLAT, noise=Noise(sd=0.1, memory_s=0.5))
    ratios = [each for seed in range(3) for each in log_ratios(noisy, seed)]
    assert abs(np.mean(ratios)) < 4 * np.std(ratios) / math.sqrt(len(ratios))
    assert 0.001 < np.std(ratios) < 0.1


def test_a_run_on_disk_is_summarised_like_one_in_memory(tmp_path: Path) -> None:
    plans = [level(2), level(8, index=1)]
    levels, requests = simulate(CROSSING, plans, 3, conditions(60.0))
    manifest = manifest_of("k3", Arm(CROSSING, 3), plans, conditions(), {"k": 3}, version="1")
    write_run(tmp_path / "run", manifest, levels, requests)
    read = read_run(tmp_path / "run")
    assert read.damaged is None
    assert read.manifest.ended is not None
    assert summarize(read) == summarize(Run(manifest, requests, levels, None))
    assert read.manifest.target["engine"] == "simulated"
    assert read.manifest.target["config"]["k"] == 3
    with pytest.raises(RunError, match="holds another run"):
        write_run(tmp_path / "run", manifest, levels, requests)
