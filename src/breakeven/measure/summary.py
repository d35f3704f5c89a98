"""From a run to summary.json: its levels in numbers, and the spread between repeated sweeps."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
from msgspec import Struct

from breakeven.measure.level import LevelSummary, summarize_level
from breakeven.measure.stats import Distribution, distribution
from breakeven.records import Manifest
from breakeven.runs import Run

__all__ = ["SUMMARY_SCHEMA", "RunSpread", "Summary", "summarize", "summary_of"]

#: Version of the layout of summary.json. History: 1, the first.
SUMMARY_SCHEMA = "breakeven.summary/1"


class RunSpread(Struct, frozen=True, kw_only=True):
    """One load over repeated sweeps: the distribution of its throughputs, in tokens a second."""

    load: dict[str, Any]
    name: str
    output_throughput: Distribution


class Summary(Struct, frozen=True, kw_only=True):
    """A run in numbers. `spread` is empty for a single sweep."""

    schema: str = SUMMARY_SCHEMA
    label: str
    model: str
    engine: str
    levels: list[LevelSummary]
    spread: list[RunSpread]
    damaged: str | None = None


def summarize(run: Run) -> Summary:
    """The numbers of a run, from its records alone: the same again to the last digit."""
    manifest = run.manifest
    shared_cores = int(manifest.host.get("cores", 1)) if manifest.target.get("loopback") else None
    levels = [
        summarize_level(level, run.of_level(level.plan.index), shared_cores=shared_cores)
        for level in sorted(run.levels, key=lambda level: level.plan.index)
    ]
    return summary_of(manifest, levels, damaged=run.damaged)


def summary_of(manifest: Manifest, levels: list[LevelSummary], *, damaged: str | None = None) -> Summary:
    """The summary of a run whose levels are summarised already."""
    return Summary(
        label=manifest.label,
        model=manifest.model,
        engine=str(manifest.target.get("engine")),
        levels=levels,
        spread=_spread(levels),
        damaged=damaged,
    )


def _spread(levels: list[LevelSummary]) -> list[RunSpread]:
    by_load: defaultdict[tuple[Any, ...], list[LevelSummary]] = defaultdict(list)
    for level in levels:
        by_load[tuple(level.load.values())].append(level)
    return [
        RunSpread(
            load=repeats[0].load,
            name=repeats[0].name,
            output_throughput=distribution(np.array([level.output_throughput.value for level in repeats])),
        )
        for repeats in by_load.values()
        if len(repeats) > 1
    ]
