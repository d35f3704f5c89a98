"""`breakeven tune` as a whole: measure or read the arms, choose a draft length for each load, write the table.

The arms take turns as in a comparison (`versus`), and their directory can be compared too.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct, structs

from breakeven.decide.atload import draft_length
from breakeven.decide.comparison import compare
from breakeven.decide.drafter import k_of
from breakeven.decide.export import Engine, Exported, check_shapes, export, export_for
from breakeven.decide.likeness import speculation_of
from breakeven.decide.profile import Profile, profile_of, read_profile
from breakeven.decide.schedule import MOST_K, read_schedule
from breakeven.decide.tuned import Tuned, TunedArm, tune
from breakeven.decide.turns import ArmRun, turns_of
from breakeven.engines.identify import identify
from breakeven.engines.watch import watch_in_flight
from breakeven.errors import RunError, UsageError
from breakeven.options import BenchOptions, CompareOptions
from breakeven.report.live import Live
from breakeven.runs import check_vacant
from breakeven.variants import Variant, expand, k_said
from breakeven.versus import arm_options, measure_arms, read_arms

__all__ = ["Outcome", "TuneOptions", "export_file", "measure_and_tune", "tune_directories"]

#: What is written beside the runs.
SCHEDULE, FLAGS = "schedule.json", "flags.txt"


class TuneOptions(Struct, frozen=True, kw_only=True):
    """What `breakeven tune` was asked for; `breakeven tune --help` says what each field means."""

    ks: tuple[int, ...] = ()
    vary: dict[str, tuple[int, ...]] | None = None
    export: Engine | None = None
    profile: str | None = None
    profile_for_s: float = 300.0
    write: Path | None = None
    force: bool = False


class Outcome(NamedTuple):
    """What came of it.

    Attributes:
        tuned: None where measuring ended too early; then `why_not` says so.
        exported: None without a table, or where the engine can't take it; then `refused` says why.
        written: the files that were written.
        directory: of the runs that were measured; None where they existed.
        signal, lost: as in `versus.Compared`.
    """

    tuned: Tuned | None
    exported: Exported | None
    refused: str | None
    written: tuple[Path, ...]
    directory: Path | None = None
    signal: int = 0
    lost: str | None = None
    why_not: str | None = None


def measure_and_tune(options: CompareOptions, ask: TuneOptions) -> Outcome:
    """Measures an arm for each draft length by turns, and tunes.

    Raises:
        UsageError: something that was asked for can't be done; all that can be known before is told before.
    """
    bench = options.bench
    live = Live(sys.stderr, quiet=bench.quiet)
    variants, left_out = expand(options.arms, ask.ks, ask.vary)
    options = structs.replace(options, arms=tuple((each.name, each.where) for each in variants))
    arms = arm_options(options)
    if ask.export is not None and all(each.k is not None for each in variants):
        _check_export(ask.export, variants)
    if bench.output is not None:
        check_vacant(bench.output)
    variants = [_known(each, arms[each.name]) for each in variants]
    _check_distinct(variants)
    _check_export(ask.export or "json", variants)
    profile = _profile(ask, live)
    for text in left_out:
        live.say(f"note: {text}")
    first = min(variants, key=lambda each: (each.topk, each.k)).name
    ordered = {first: arms[first], **arms}
    measured = measure_arms(options, ordered, command="tune")
    shapes = {each.name: each for each in variants}
    found = [_tuned_arm(run, shapes[run.name]) for run in measured.arms]
    try:
        outcome = _tune(found, measured.directory, ask, profile, left_out, measured.directory)
    except UsageError as error:
        if not measured.signal and measured.lost is None:
            raise
        outcome = Outcome(None, None, None, (), why_not=str(error))
    return outcome._replace(directory=measured.directory, signal=measured.signal, lost=measured.lost)


def tune_directories(directories: Sequence[Path], ask: TuneOptions) -> Outcome:
    """Tunes from runs that exist; one directory of a comparison stands for its arms.

    Raises:
        UsageError: they can't be read or compared, or nobody tells what an arm drafts.
    """
    runs = read_arms(directories)
    if ask.vary:
        raise UsageError("--vary makes arms to measure: leave it out where runs exist")
    if ask.ks and len(ask.ks) != len(runs):
        raise UsageError(f"--k gives {len(ask.ks)} draft lengths for {len(runs)} arms: give one for each, in order")
    ks: Sequence[int | None] = ask.ks or [None] * len(runs)
    arms = [_read_arm(run, k) for run, k in zip(runs, ks, strict=True)]
    if ask.export is not None:
        _check_export(ask.export, [Variant(arm.name, "", arm.k, arm.topk) for arm in arms])
    profile = _profile(ask, Live(sys.stderr, quiet=False))
    place = directories[0] if len(directories) == 1 else None
    return _tune(arms, directories[0], ask, profile, [], place)


def export_file(path: Path, engine: Engine | None, model: str | None) -> Exported:
    """The flags of a schedule that exists.

    Raises:
        UsageError: it can't be read, is for another model, or the engine would refuse it.
    """
    schedule = read_schedule(path)
    if model is not None:
        schedule.check_model(model, str(path))
    return export(schedule, engine or export_for(schedule.engine))


# ---- what an arm drafts ----


def _known(variant: Variant, own: BenchOptions) -> Variant:
    """The variant with its K: what was said, held against what the server tells, if it is up already."""
    told = None
    if own.pin in ("auto", "deep"):
        raise UsageError(f"--arm {variant.name}: pin:{own.pin} is no K that a table has; it needs arms of one K each")
    if own.server_url is not None and own.pin is None:
        told = k_of(identify(own.server_url, own.request_headers).config)
    if variant.k is None and told is None:
        raise UsageError(
            f"nobody tells how many tokens --arm {variant.name} drafts: give --k, one for each arm in order, or call "
            "it off or k3"
        )
    if told is not None and variant.k not in (None, told):
        raise UsageError(f"--arm {variant.name} is to draft {variant.k} tokens, and its server says {told}")
    return variant if variant.k is not None else variant._replace(k=told)


def _check_distinct(variants: Sequence[Variant]) -> None:
    if len(variants) < 2:
        raise UsageError("a table needs two draft lengths or more, as in --k 0 1 2 3")
    seen: dict[tuple[int | None, int, int | None], str] = {}
    for each in variants:
        if each.k is not None and not 0 <= each.k <= MOST_K:
            raise UsageError(f"--arm {each.name}: {each.k} draft tokens are not from 0 to {MOST_K}")
        shape = (each.k, each.topk, each.draft_tokens if each.topk > 1 else None)
        if shape in seen:
            raise UsageError(f"--arm {seen[shape]} and --arm {each.name} draft the same: give one arm for each")
        seen[shape] = each.name


def _check_export(engine: Engine, variants: Sequence[Variant]) -> None:
    ks = [each.k for each in variants if each.topk == 1 and each.k is not None]
    check_shapes(engine, ks, [each.topk for each in variants if each.topk > 1])


def _tuned_arm(run: ArmRun, variant: Variant) -> TunedArm:
    return TunedArm(variant.k or 0, variant.topk, variant.draft_tokens, run)


def _read_arm(run: ArmRun, k: int | None) -> TunedArm:
    manifest = run.run.manifest
    config: Mapping[str, Any] = manifest.target.get("config") or {}
    said, told = _said(run), None if manifest.flags.get("pin") else k_of(config)
    topk = config.get("speculative_eagle_topk")
    own = next((found for found in (k, said, told) if found is not None), None)
    if own is None:
        own = _counted(run)
    if own is None:
        raise UsageError(f"nobody tells how many tokens {run.name} drafts: give --k, one for each arm in order")
    for other, who in ((said, "it was called or started to draft"), (told, "its server said")):
        if other is not None and other != own:
            raise UsageError(f"{run.name} is to draft {own} tokens, and {who} {other}: correct --k or the name")
    tokens = config.get("speculative_num_draft_tokens")
    return TunedArm(own, topk if isinstance(topk, int) else 1, tokens if isinstance(tokens, int) else None, run)


def _said(run: ArmRun) -> int | None:
    """What its name says, its pin, or that with which breakeven started it: `vllm:eagle3:2` drafts 2."""
    flags = run.run.manifest.flags
    started = [f"{kind}:{flags[kind]}" for kind in ("pin", "vllm", "local") if flags.get(kind) is not None]
    return k_said(run.name, started[0] if started else "")


def _counted(run: ArmRun) -> int | None:
    """What the engine's counters show that it drafted at most."""
    plans = {level.plan.max_tokens for level in run.run.levels}
    turns = [turn for tokens in plans for own in turns_of(run.run, tokens).values() for turn in own]
    return draft_length(speculation_of(run.run.manifest), turns)


# ---- the load profile ----


def _profile(ask: TuneOptions, live: Live) -> Profile | None:
    if ask.profile is None:
        return None
    if not ask.profile.startswith(("http://", "https://")):
        return read_profile(Path(ask.profile))
    samples = watch_in_flight(ask.profile, ask.profile_for_s, live.say)
    weighted = [(before[1], after[0] - before[0]) for before, after in pairwise(samples)]
    return profile_of(ask.profile, "watched", weighted)


# ---- tuning and writing ----


def _tune(
    arms: Sequence[TunedArm],
    source: Path,
    ask: TuneOptions,
    profile: Profile | None,
    left_out: Sequence[str],
    place: Path | None,
) -> Outcome:
    comparison = compare([arm.run for arm in arms], force=ask.force)
    if comparison.mode != "closed":
        raise UsageError("a table needs requests in flight: measure with --concurrency, not at a rate or from a trace")
    tuned = tune(arms, source=str(source), profile=profile, warnings=[*left_out, *comparison.warnings])
    if tuned.schedule is None:
        return Outcome(tuned, None, None, ())
    exported, refused = None, None
    try:
        exported = export(tuned.schedule, ask.export or export_for(tuned.schedule.engine))
    except UsageError as error:
        refused = str(error)
    target = ask.write or (place / SCHEDULE if place is not None else None)
    written = () if target is None else _write(target, tuned.schedule.to_json(), exported)
    return Outcome(tuned, exported, refused, written)


def _write(target: Path, schedule: str, exported: Exported | None) -> tuple[Path, ...]:
    """The schedule, and beside it the flags to paste and the files that they name."""
    files = {target: schedule}
    if exported is not None and exported.engine != "json":
        files |= {target.with_name(FLAGS): exported.flags + "\n"}
        files |= {target.with_name(name): text for name, text in exported.files.items()}
    for path, text in files.items():
        try:
            path.write_text(text, "utf-8")
        except OSError as error:
            raise RunError(f"{path} can't be written: {error.strerror}; name another with --write") from None
    return tuple(files)
