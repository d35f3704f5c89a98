"""Whole runs on a simulated engine: levels one after the other, or two arms by turns, on one machine."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import structs

from breakeven.clock import VirtualLoop
from breakeven.records import LevelPlan, LevelRecord, Manifest, RequestRecord
from breakeven.runs import RunWriter
from breakeven.sim.engine import ChooseK, Engine
from breakeven.sim.level import Conditions, run_level
from breakeven.sim.machine import Machine
from breakeven.sim.model import EngineModel

__all__ = ["Arm", "LevelRun", "manifest_of", "simulate", "simulate_pair", "simulate_turns", "uncollected", "write_run"]


class Arm(NamedTuple):
    """An engine under test: its model, and the K that it drafts, or who chooses it, then of at most `most_k`."""

    model: EngineModel
    k: int | ChooseK
    most_k: int | None = None


class LevelRun(NamedTuple):
    """One level as it ran: the number of its arm, its record and those of its requests."""

    arm: int
    level: LevelRecord
    requests: list[RequestRecord]


def simulate(
    model: EngineModel,
    levels: Sequence[LevelPlan],
    k: int | ChooseK,
    conditions: Conditions,
    *,
    machine: Machine | None = None,
    most_k: int | None = None,
) -> tuple[list[LevelRecord], list[RequestRecord]]:
    """Runs the levels of one run in their order.

    Args:
        model: the engine.
        levels: closed or open.
        k: the tokens to draft, or who says so before each step.
        conditions: what is sent, and when a level ends.
        machine: what it runs on; by default one with the model's noise, by the conditions' seed.
        most_k: the longest draft where `k` is a function.

    Returns:
        The records of levels and requests, as a run on disk holds them.
    """
    arm = Arm(model, k, most_k)
    runs = simulate_turns([arm], [(0, level) for level in levels], conditions, machine=machine)
    return [run.level for run in runs], [record for run in runs for record in run.requests]


def simulate_pair(
    arms: tuple[Arm, Arm], level: LevelPlan, cycles: int, conditions: Conditions, *, machine: Machine | None = None
) -> list[LevelRun]:
    """Runs one level on two arms by turns, A B B A, `cycles` times; each turn's plan has its number as `index`.

    Each turn is a level of its own with ramp, window and drain: the ramp is what a switch makes one discard. Both arms
    see the same machine at its moods of the moment.
    """
    order = [arm for _ in range(cycles) for arm in (0, 1, 1, 0)]
    turns = [(arm, structs.replace(level, index=index)) for index, arm in enumerate(order)]
    return simulate_turns(arms, turns, conditions, machine=machine)


def simulate_turns(
    arms: Sequence[Arm],
    turns: Iterable[tuple[int, LevelPlan]],
    conditions: Conditions,
    *,
    machine: Machine | None = None,
) -> list[LevelRun]:
    """Runs levels one after the other, each on the arm of the given number, all on one machine.

    Args:
        arms: the engines.
        turns: number of the arm and level, in order.
        conditions: how each is run.
        machine: by default one with the first arm's noise, by the conditions' seed.

    Raises:
        UsageError: an engine can't draft as many tokens as it is to.
    """
    loop = VirtualLoop()
    machine = machine or Machine(arms[0].model.noise, conditions.seed)

    async def run_all() -> list[LevelRun]:
        numbers, runs = count(), []
        for turn, (number, plan) in enumerate(turns):
            model, k, most_k = arms[number]
            engine = Engine(model, machine, k, seed=[conditions.seed, number, turn], most_k=most_k)
            runs.append(LevelRun(number, *await run_level(engine, plan, conditions, numbers)))
        return runs

    try:
        with uncollected():
            return loop.run_until_complete(run_all())
    finally:
        loop.close()


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection, which would look through millions of arrivals again and again: a fifth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def manifest_of(
    label: str, arm: Arm, levels: Sequence[LevelPlan], conditions: Conditions, flags: dict[str, Any], *, version: str
) -> Manifest:
    """A simulated run's manifest: the engine is `simulated`, its configuration the model, its host no machine.

    `version` is breakeven's, and thereby the engine's.
    """
    prompts = conditions.prompts
    return Manifest(
        label=label,
        breakeven_version=version,
        target={
            "url": "simulated:",
            "engine": "simulated",
            "version": version,
            "config": {"k": arm.k if isinstance(arm.k, int) else "by policy", "model": msgspec.to_builtins(arm.model)},
            "api": "simulated",
            "counting": {},
            "loopback": False,
        },
        model=arm.model.name,
        flags=flags,
        prompts={"source": prompts.source, "count": len(prompts.prompts), "sha256": prompts.sha256},
        seed=conditions.seed,
        levels=list(levels),
        host={"cpu": "simulated", "cores": 0},
        started=datetime.now(UTC).isoformat(timespec="milliseconds"),
    )


def write_run(
    directory: Path, manifest: Manifest, levels: Iterable[LevelRecord], requests: Iterable[RequestRecord]
) -> None:
    """Writes a run as `breakeven bench` leaves it, but for summary.json.

    Raises:
        RunError: the directory holds something, or can't be written.
    """
    with RunWriter.create(directory, manifest) as writer:
        for request in requests:
            writer.add_request(request)
        for level in levels:
            writer.add_level(level)
        writer.finish(interrupted=False)
