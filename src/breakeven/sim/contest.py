"""`breakeven simulate --profile`: policies on the same simulated engine, under the same load that varies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from breakeven.decide.modes import policy_of
from breakeven.decide.observed import Observation
from breakeven.decide.policy import Policy
from breakeven.decide.schedule import Range, Schedule
from breakeven.errors import UsageError
from breakeven.load.prompts import PromptSet
from breakeven.load.window import StopRule
from breakeven.measure.summary import summarize
from breakeven.runs import SUMMARY, Run, check_vacant, write_json
from breakeven.sim.engine import ChooseK
from breakeven.sim.level import Conditions
from breakeven.sim.loads import path_of
from breakeven.sim.mixes import Mix, Phase, read_mix
from breakeven.sim.model import EngineModel
from breakeven.sim.ride import Ride, ride
from breakeven.sim.run import Arm, manifest_of, uncollected, write_run
from breakeven.sim.truth import true_acceptance_length

__all__ = ["Contest", "ContestOptions", "Entry", "hold_contest", "table_of"]

_TICK_S = 0.25
#: Columns of the drawing.
_BINS = 96


class ContestOptions(Struct, frozen=True, kw_only=True):
    """What is compared: `policies` by name, on a load.

    `off` has no drafter, `on` the largest K, `table` the best one for this model; the others are those of
    `decide.modes`.
    """

    profile: str
    policies: tuple[str, ...] = ("off", "on", "table", "auto")
    mix: str | None = None
    ks: tuple[int, ...] = (0, 3)
    duration_s: float = 600.0
    max_tokens: int = 256
    seed: int = 0
    output: Path | None = None


class Entry(Struct, frozen=True, kw_only=True):
    """One policy's outcome.

    `of_best_static`: its tokens over those of the best K kept all the time. `regret`: 1 less its tokens over those of
    whoever knows the model and the mix and may switch at each step. `ks`: the K used most in each part of the time.
    """

    name: str
    tokens: int
    tokens_per_s: float
    of_best_static: float
    regret: float
    switches: int
    probe_share: float
    faults: dict[str, int]
    ks: tuple[int, ...]


class Contest(Struct, frozen=True, kw_only=True):
    """All policies under one load; `loads` are the mean requests in flight in each part of the time."""

    profile: str
    seconds: float
    best_static: int
    loads: tuple[float, ...]
    entries: tuple[Entry, ...]


def hold_contest(options: ContestOptions, model: EngineModel, prompts: PromptSet, *, version: str) -> Contest:
    """Runs each policy, each static K, and the one that knows everything; writes the policies' runs to `output`.

    Raises:
        UsageError: a policy, a profile, a mix or a K can't be used, or a directory is taken.
    """
    ks = tuple(sorted(set(options.ks)))
    for k in ks:
        model.check_k(k)
    if len(ks) < 2:
        raise UsageError(f"--k {' '.join(map(str, options.ks))}: a policy needs two or more K to choose from")
    phases = read_mix(options.mix) if options.mix else (Phase((), 300.0),)
    if len(phases) > 1 and not model.acceptance.kinds:
        raise UsageError("--mix: this model accepts drafts of all kinds of prompts alike; give it acceptance.kinds")
    mix = Mix(prompts, phases)
    path = path_of(options.profile, options.duration_s, _TICK_S)
    table = table_of(model, prompts, ks, options.max_tokens, int(path.max()))
    policies = {name: _policy(name, ks, table) for name in options.policies}
    if options.output is not None:
        _check_places(options.output, options.policies)

    def run(choose: ChooseK, *, drafter: bool = True) -> Ride:
        with uncollected():
            return ride(
                model,
                path,
                _TICK_S,
                Mix(prompts, phases),
                choose,
                most_k=ks[-1],
                max_tokens=options.max_tokens,
                drafter=drafter,
                seed=options.seed,
            )

    statics = {k: run(_always(k), drafter=k > 0).tokens for k in ks}
    best_static = max(statics, key=statics.__getitem__)
    knowing = run(_knowing(model, mix, ks, options.max_tokens)).tokens
    entries = []
    for name, policy in policies.items():
        found = run(policy.choose, drafter=name != "off")
        entries.append(_entry(name, policy, found, options, statics[best_static], knowing))
        if options.output is not None:
            _write(options, model, prompts, name, found, version)
    loads = tuple(float(part.mean()) for part in np.array_split(path, min(_BINS, len(path))))
    return Contest(
        profile=options.profile,
        seconds=options.duration_s,
        best_static=best_static,
        loads=loads,
        entries=tuple(entries),
    )


def table_of(model: EngineModel, prompts: PromptSet, ks: Sequence[int], max_tokens: int, most: int) -> Schedule:
    """The best K at each batch in the long run, for this model and these prompts: what `tune` is to find."""
    tokens = _tokens_a_step(model, prompts, ks, max_tokens)
    ranges: list[Range] = []
    for batch in range(1, most + 1):
        k = _best(model, tokens, batch)
        if ranges and ranges[-1].k == k:
            ranges[-1] = Range(ranges[-1].lo, batch, k)
        else:
            ranges.append(Range(batch, batch, k))
    return Schedule(model=model.name, ranges=tuple(ranges))


def _best(model: EngineModel, tokens: dict[int, float], batch: int) -> int:
    return max(tokens, key=lambda k: tokens[k] / model.step_ms(batch, k, drafter=True))


def _tokens_a_step(model: EngineModel, prompts: PromptSet, ks: Sequence[int], max_tokens: int) -> dict[int, float]:
    return {k: true_acceptance_length(model, prompts, k=k, max_tokens=max_tokens) for k in ks}


def _always(k: int) -> ChooseK:
    return lambda seen: k


def _knowing(model: EngineModel, mix: Mix, ks: Sequence[int], max_tokens: int) -> ChooseK:
    """The best K at each step, by the model itself: a simulated engine switches for nothing, so that greed is best."""
    tokens = [
        _tokens_a_step(model, PromptSet(source="mix", prompts=mix.prompts_of(i)), ks, max_tokens)
        for i in range(len(mix.phases))
    ]
    known: dict[tuple[int, int], int] = {}

    def choose(seen: Observation) -> int:
        at = mix.phase_at(seen.now_ns / 1e9), seen.decoding
        if at not in known:
            known[at] = _best(model, tokens[at[0]], at[1])
        return known[at]

    return choose


def _policy(name: str, ks: Sequence[int], table: Schedule) -> Policy:
    """The policy of a name.

    Raises:
        UsageError: there is none of this name.
    """
    if name == "off" and 0 in ks:
        return Policy(ks, mode=0)
    if name == "on":
        return Policy(ks, mode=max(ks))
    if name == "table":
        return Policy(ks, schedule=table, mode="table")
    if name.partition(":")[0] not in ("auto", "table", "fixed"):
        raise UsageError(f"--policy {name}: give off (with K=0), on, table, table:FILE, auto, auto:FILE or fixed:K")
    return policy_of(name, ks)


def _entry(name: str, policy: Policy, found: Ride, options: ContestOptions, best_static: int, knowing: int) -> Entry:
    parts = np.array_split(found.k_seconds, min(_BINS, len(found.k_seconds)))
    return Entry(
        name=name,
        tokens=found.tokens,
        tokens_per_s=found.tokens / options.duration_s,
        of_best_static=found.tokens / best_static,
        regret=1 - found.tokens / knowing,
        switches=found.switches,
        probe_share=policy.probe_share,
        faults=dict(policy.faults),
        ks=tuple(int(part.sum(axis=0).argmax()) for part in parts),
    )


def _check_places(output: Path, names: Sequence[str]) -> None:
    """Each policy has a directory of its own, which is free.

    Raises:
        UsageError: it is not, or two policies would share one.
    """
    places: dict[str, str] = {}
    for name in names:
        check_vacant(output / _directory(name))
        other = places.setdefault(_directory(name), name)
        if other != name:
            raise UsageError(f"--policy {other} and {name} would both be written to {_directory(name)}: rename a file")


def _directory(name: str) -> str:
    kind, _, rest = name.partition(":")
    return name.replace(":", "") if kind == "fixed" else f"{kind}-{Path(rest).stem}" if rest else name


def _write(
    options: ContestOptions, model: EngineModel, prompts: PromptSet, name: str, found: Ride, version: str
) -> None:
    assert options.output is not None
    directory = options.output / _directory(name)
    conditions = Conditions(prompts, StopRule(duration_s=options.duration_s), seed=options.seed)
    flags = msgspec.to_builtins(options, enc_hook=str)
    manifest = manifest_of(_directory(name), Arm(model, 0), [found.level.plan], conditions, flags, version=version)
    manifest.target["config"]["k"] = name  # whoever chose it, not a number
    write_run(directory, manifest, [found.level], found.requests)
    write_json(directory / SUMMARY, summarize(Run(manifest, found.requests, [found.level], None)))
