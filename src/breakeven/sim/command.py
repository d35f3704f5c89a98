"""`breakeven simulate`: a run for each K on a simulated engine, as bench would have written it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from breakeven.errors import UsageError
from breakeven.load.prompts import PromptSet, load_prompts
from breakeven.load.window import StopRule
from breakeven.measure.summary import Summary, summarize
from breakeven.records import LevelPlan
from breakeven.runs import SUMMARY, Run, check_vacant, read_run, write_json
from breakeven.sim.contest import Contest, ContestOptions, hold_contest
from breakeven.sim.fit import fit
from breakeven.sim.level import Conditions
from breakeven.sim.model import EngineModel, read_model
from breakeven.sim.run import Arm, manifest_of, simulate, write_run
from breakeven.sim.steps import TableSteps
from breakeven.sim.truth import true_break_evens

__all__ = ["SimulateOptions", "SimulatedRun", "Simulation", "contest_command", "simulate_command"]

#: The longest window where precision ends it, as bench has it; that of an open loop, whose precision says nothing.
_MAX_SECONDS = 240.0
_OPEN_SECONDS = 120.0
_DEFAULT_KS = (0, 3)


class SimulateOptions(Struct, frozen=True, kw_only=True):
    """One field per flag of `breakeven simulate`.

    `model` is a JSON file of an `EngineModel`, `from_runs` are runs to fit one to; with neither it is the default
    model. The load is `concurrency` unless `rate` (requests a second) is set. `ks` empty: 0 and 3, or all that the
    model's table has. Without `duration_s` a closed level ends by `precision`. Without `output` nothing is written.
    """

    model: Path | None = None
    from_runs: tuple[Path, ...] = ()
    ks: tuple[int, ...] = ()
    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    rate: tuple[float, ...] = ()
    arrivals: str = "poisson"
    max_tokens: int = 512
    duration_s: float | None = None
    precision: float = 0.05
    seed: int = 0
    prompts: str | None = None
    kinds: tuple[str, ...] = ()
    output: Path | None = None


class SimulatedRun(NamedTuple):
    """One arm: its K, its numbers, and its directory if it has one."""

    k: int
    summary: Summary
    directory: Path | None


class Simulation(NamedTuple):
    """What `breakeven simulate` gives: the model, a run for each K, and in words where its break-evens truly are."""

    model: EngineModel
    runs: list[SimulatedRun]
    truths: list[str]


def simulate_command(options: SimulateOptions, *, version: str) -> Simulation:
    """Simulates all that was asked for; with `output`, run directories `k0`, `k3`, … are in it afterwards.

    `version` is breakeven's, for the manifests.

    Raises:
        UsageError: a model, a run, prompts or a K can't be used, or a directory is taken; nothing has been written.
    """
    model, prompts = _model(options), load_prompts(options.prompts, options.kinds, seed=options.seed)
    ks = _ks(options, model)
    if len(set(ks)) < len(ks):
        raise UsageError(f"--k {' '.join(map(str, ks))}: each K once")
    for k in ks:
        model.check_k(k)
        if options.output is not None:
            check_vacant(options.output / f"k{k}")
    conditions = Conditions(prompts, _stop_rule(options), seed=options.seed, precision=options.precision)
    runs = [_run(options, model, k, conditions, version) for k in ks]
    return Simulation(model, runs, [] if options.rate else _truths(options, model, ks, prompts))


def contest_command(options: SimulateOptions, contest: ContestOptions, *, version: str) -> Contest:
    """Holds a contest of policies on the model that was asked for, with its prompts.

    Raises:
        UsageError: something that was asked for can't be.
    """
    model, prompts = _model(options), load_prompts(options.prompts, options.kinds, seed=options.seed)
    contest = msgspec.structs.replace(contest, ks=_ks(options, model))
    return hold_contest(contest, model, prompts, version=version)


def _ks(options: SimulateOptions, model: EngineModel) -> tuple[int, ...]:
    return options.ks or (tuple(model.steps.ks) if isinstance(model.steps, TableSteps) else _DEFAULT_KS)


def _model(options: SimulateOptions) -> EngineModel:
    if options.model is not None and options.from_runs:
        raise UsageError("give either --model FILE or --from RUN…")
    if options.from_runs:
        return fit([read_run(directory) for directory in options.from_runs])
    return read_model(options.model) if options.model is not None else EngineModel()


def _stop_rule(options: SimulateOptions) -> StopRule:
    if options.duration_s is None and not options.rate:
        return StopRule(precise=True, max_seconds=_MAX_SECONDS)
    return StopRule(duration_s=options.duration_s or _OPEN_SECONDS)


def _levels(options: SimulateOptions) -> list[LevelPlan]:
    if options.rate:
        return [
            LevelPlan(index=i, run=0, max_tokens=options.max_tokens, mode="open", rate=rate, arrivals=options.arrivals)
            for i, rate in enumerate(options.rate)
        ]
    return [
        LevelPlan(index=i, run=0, max_tokens=options.max_tokens, concurrency=c)
        for i, c in enumerate(options.concurrency)
    ]


def _run(options: SimulateOptions, model: EngineModel, k: int, conditions: Conditions, version: str) -> SimulatedRun:
    plans = _levels(options)
    levels, requests = simulate(model, plans, k, conditions)
    flags = msgspec.to_builtins(options, enc_hook=str)
    manifest = manifest_of(f"k{k}", Arm(model, k), plans, conditions, flags, version=version)
    summary = summarize(Run(manifest, requests, levels, None))
    directory = None if options.output is None else options.output / f"k{k}"
    if directory is not None:
        write_run(directory, manifest, levels, requests)
        write_json(directory / SUMMARY, summary)
    return SimulatedRun(k, summary, directory)


def _truths(options: SimulateOptions, model: EngineModel, ks: tuple[int, ...], prompts: PromptSet) -> list[str]:
    """What the model itself says of each K against none, if step times for none are there."""
    if model.steps.why_not(0) is not None:
        return []
    truths = []
    for k in ks:
        if k:
            loads = true_break_evens(model, model, prompts, k=k, max_tokens=options.max_tokens)
            crossings = ", ".join(f"{load:.1f}" for load in loads)
            truths.append(
                f"K={k} against K=0 in this model: " + (f"break-even at {crossings}" if loads else "no break-even")
            )
    return truths
