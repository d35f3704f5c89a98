"""Runs of several arms become one comparison: per load the ratios with their verdicts, and the answer in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct, structs

from breakeven.decide.atload import (
    METRICS,
    ArmAtLoad,
    Compared,
    LoadComparison,
    Metric,
    Versus,
    arm_at_load,
    draft_length,
    needed,
    ratios,
    value_of,
)
from breakeven.decide.breakeven import BreakEven, break_even
from breakeven.decide.bykind import KindAnswer, by_kind
from breakeven.decide.caveats import batch_caveats, looping_caveats, measuring_caveats
from breakeven.decide.knee import Knee, knee
from breakeven.decide.likeness import (
    ConfigDifference,
    check_alike,
    check_servers,
    common_loads,
    config_differences,
    lengths_compared,
    speculation_of,
)
from breakeven.decide.ratio import NoRatio, Ratio
from breakeven.decide.slo import LoadLatencies, Slo, SloLoad, largest_load
from breakeven.decide.texts import Losslessness, Repeating, losslessness, repeating
from breakeven.decide.turns import ArmRun, How, Turn, how_measured, mean_rate, pairs, turns_of, whole
from breakeven.decide.verdict import DELTA, judge
from breakeven.decide.words import break_even_sentence
from breakeven.errors import RunError, UsageError
from breakeven.measure.level import LevelSummary
from breakeven.measure.stats import Distribution

__all__ = [
    "COMPARISON_SCHEMA",
    "Answer",
    "ArmRun",
    "ArmSummary",
    "ArmVersus",
    "Comparison",
    "compare",
]

#: Version of the layout of comparison.json. History: 1, the first.
COMPARISON_SCHEMA = "breakeven.comparison/1"


class ArmSummary(Struct, frozen=True, kw_only=True):
    """One arm as a whole.

    Attributes:
        speculation: what the server's configuration tells of it, by the engine's own names.
        knee: None in open loops.
        slo: the largest load that holds all limits; None where none were given.
        differences: of engine, version and configuration against the reference; empty for the reference itself.
    """

    name: str
    directory: str
    engine: str | None
    version: str | None
    speculation: dict[str, Any]
    knee: Knee | None
    slo: SloLoad | None
    differences: tuple[ConfigDifference, ...]


class Answer(Struct, frozen=True, kw_only=True):
    """Where an arm pays in one metric, and that in words, to stand behind a colon."""

    sentence: str
    break_even: BreakEven


class ArmVersus(Struct, frozen=True, kw_only=True):
    """An arm against the reference over all loads.

    Attributes:
        throughput: None in open loops, whose output equals their input in both arms below saturation.
        sentence: the answer to quote, or why there is none.
        tpot, ttft: by the medians.
        kinds: the kinds of prompts for which the answer is another one.
        kinds_why_not: why kinds could not be looked at.
    """

    arm: str
    how: How
    sentence: str
    throughput: BreakEven | None
    tpot: Answer
    ttft: Answer
    kinds: tuple[KindAnswer, ...]
    kinds_why_not: str | None = None


class Comparison(Struct, frozen=True, kw_only=True):
    """Arms against the first of them, at the loads that all have.

    Attributes:
        how: as the arms were measured; `batches` where any was not alternated with the reference.
        mode: what a load is: requests in flight (`closed`), requests a second (`open`), the speed of a trace.
        max_tokens: of each request, the reference's.
        delta: below which arms are called the same.
        slos: the limits, as they were given.
        losslessness, repeating: information on texts.
        warnings: what to know before quoting anything.
    """

    schema: str = COMPARISON_SCHEMA
    model: str
    how: How
    mode: Literal["closed", "open", "trace"]
    max_tokens: int
    delta: float
    slos: tuple[str, ...]
    arms: tuple[ArmSummary, ...]
    loads: tuple[LoadComparison, ...]
    versus: tuple[ArmVersus, ...]
    losslessness: Losslessness
    repeating: tuple[Repeating, ...]
    warnings: tuple[str, ...]


Turns = Mapping[float, Sequence[Turn]]
Ratios = Mapping[float, Mapping[Metric, Ratio | NoRatio]]


def compare(
    arms: Sequence[ArmRun], *, slos: Sequence[Slo] = (), delta: float = DELTA, force: bool = False
) -> Comparison:
    """Compares runs.

    Args:
        arms: two or more, the first is the reference. Those whose manifests share `turns.group` were alternated: their
            turns of the same number are pairs.
        slos: limits that latencies have to hold.
        delta: arms closer than this are called the same.
        force: compare runs that are unlike.

    Raises:
        UsageError: the runs can't be compared; its line names what is in the way.
    """
    _check_arms(arms)
    manifests = {arm.name: arm.run.manifest for arm in arms}
    warnings = check_alike(manifests, force) + check_servers(manifests, force)
    # What was measured, not what was planned: a run may have been interrupted.
    plans = {arm.name: [level.plan for level in arm.run.levels] for arm in arms}
    lengths = lengths_compared(plans)
    loads = common_loads(plans, lengths)
    every = {arm.name: turns_of(arm.run, lengths[arm.name]) for arm in arms}
    turns = {name: {load: whole(visits) for load, visits in own.items()} for name, own in every.items()}
    shared = {name: {load: own[load] for load in loads} for name, own in turns.items()}
    reference, *others = arms
    how = {other.name: how_measured(reference.run.manifest, other.run.manifest) for other in others}
    found = _ratios(reference.name, shared, how)
    at_load = {load: {name: arm_at_load(name, own[load]) for name, own in shared.items()} for load in loads}
    mode = reference.run.levels[0].plan.mode
    temperature = float(reference.run.manifest.flags.get("temperature", 0.0))
    looping = tuple(each for name, own in shared.items() for each in repeating(name, own))
    return Comparison(
        model=reference.run.manifest.model,
        how=next((own for own in how.values() if own == "batches"), next(iter(how.values()))),
        mode=mode,
        max_tokens=lengths[reference.name],
        delta=delta,
        slos=tuple(map(str, slos)),
        arms=tuple(_arm(arm, reference, turns[arm.name], slos) for arm in arms),
        loads=_loads(loads, shared, at_load, found, delta, _speculations(others)),
        versus=tuple(
            _versus(name, reference.name, how[name], shared, found[name], delta, closed=mode == "closed")
            for name in how
        ),
        losslessness=losslessness(shared, temperature),
        repeating=looping,
        warnings=tuple(
            warnings + measuring_caveats(arms, every, how) + batch_caveats(shared, at_load) + looping_caveats(looping)
        ),
    )


def _check_arms(arms: Sequence[ArmRun]) -> None:
    if len(arms) < 2:
        raise UsageError("a comparison needs two arms or more: the first is the reference")
    for name, count in Counter(arm.name for arm in arms).items():
        if count > 1:
            raise UsageError(f"{count} arms are called {name}: give each a name of its own (--arm NAME=…)")
    for arm in arms:
        if not arm.run.requests or not arm.run.levels:
            raise RunError(f"{arm.directory} ({arm.name}) has no records: measure it again, or name another run")


def _ratios(reference: str, turns: Mapping[str, Turns], how: Mapping[str, How]) -> dict[str, Ratios]:
    """By arm and load the ratios against the reference, if there is any."""
    found: dict[str, Ratios] = {
        name: {
            load: ratios((reference, mine), (name, turns[name][load]), own) for load, mine in turns[reference].items()
        }
        for name, own in how.items()
    }
    _check_any(found)
    return found


def _check_any(found: Mapping[str, Ratios]) -> None:
    """Where an arm failed everywhere there is nothing to say; whatever else is missing is told level by level."""
    reasons = [by_metric["throughput"] for own in found.values() for by_metric in own.values()]
    failed = [why.detail for why in reasons if isinstance(why, NoRatio) and why.reason in ("arm_failed", "some_failed")]
    if len(failed) == len(reasons):
        raise UsageError(f"nothing to compare: at every load {'; '.join(dict.fromkeys(failed))}")


def _speculations(others: Sequence[ArmRun]) -> dict[str, dict[str, Any]]:
    return {arm.name: speculation_of(arm.run.manifest) for arm in others}


def _arm(arm: ArmRun, reference: ArmRun, turns: Turns, slos: Sequence[Slo]) -> ArmSummary:
    manifest = arm.run.manifest
    is_closed = arm.run.levels[0].plan.mode == "closed"
    target = {name: manifest.target.get(name) for name in ("engine", "version")}
    latencies = [_load_latencies(arm.name, load, own) for load, own in turns.items()] if slos else []
    return ArmSummary(
        name=arm.name,
        directory=arm.directory,
        engine=None if target["engine"] is None else str(target["engine"]),
        version=None if target["version"] is None else str(target["version"]),
        speculation=speculation_of(manifest),
        knee=knee({load: mean_rate(own, arm.name) for load, own in turns.items()}) if is_closed else None,
        slo=largest_load(slos, latencies) if slos else None,
        differences=config_differences(reference.run.manifest, manifest),
    )


def _load_latencies(name: str, load: float, turns: Sequence[Turn]) -> LoadLatencies:
    at = arm_at_load(name, turns)
    return LoadLatencies(load, at.ok, _by_metric(at), tuple(_by_metric(turn.summary) for turn in turns))


def _by_metric(at: ArmAtLoad | LevelSummary) -> dict[str, Distribution]:
    return {"ttft": at.ttft_ms, "tpot": at.tpot_ms, "itl": at.itl_ms, "e2e": at.e2e_ms}


def _loads(
    loads: Sequence[float],
    turns: Mapping[str, Turns],
    at_load: Mapping[float, Mapping[str, ArmAtLoad]],
    found: Mapping[str, Ratios],
    delta: float,
    speculations: Mapping[str, Mapping[str, Any]],
) -> tuple[LoadComparison, ...]:
    reference = next(iter(turns))
    # One claim each: a metric of an arm over all loads.
    judged = {
        (name, metric): judge({load: own[load][metric] for load in loads}, delta)
        for name, own in found.items()
        for metric in METRICS
    }

    def versus(name: str, load: float) -> Versus:
        mine, its = at_load[load][reference], at_load[load][name]
        compared = {
            metric: Compared.of(found[name][load][metric], judged[name, metric][load], value_of(metric, mine, its))
            for metric in METRICS
        }
        k = draft_length(speculations[name], turns[name][load])
        return Versus(arm=name, **compared, needed=needed(mine, its, found[name][load]["tpot_p50"], k))

    return tuple(
        LoadComparison(
            load=load,
            name=turns[reference][load][0].level.plan.name,
            arms=tuple(at_load[load].values()),
            versus=tuple(versus(name, load) for name in found),
        )
        for load in loads
    )


def _versus(
    name: str, reference: str, how: How, turns: Mapping[str, Turns], found: Ratios, delta: float, *, closed: bool
) -> ArmVersus:
    def answer(metric: Metric) -> Answer:
        where = break_even({load: by_metric[metric] for load, by_metric in found.items()}, delta)
        return Answer(sentence=_within(say(where), name), break_even=where)

    def say(where: BreakEven) -> str:
        return break_even_sentence(where, reference=reference, other=name, is_rate=not closed)

    alternated = {load: pairs(turns[reference][load], turns[name][load]) for load in found} if how != "batches" else {}
    throughput = (
        break_even({load: by_metric["throughput"] for load, by_metric in found.items()}, delta) if closed else None
    )
    return ArmVersus(
        arm=name,
        how=how,
        sentence=say(throughput) if throughput else _NO_BREAK_EVEN,
        throughput=throughput,
        tpot=answer("tpot_p50"),
        ttft=answer("ttft_p50"),
        kinds=tuple(
            structs.replace(kind, sentence=f"for {kind.kind}: {_within(say(kind.break_even), name)}")
            for kind in by_kind(alternated, how, delta)
        ),
        kinds_why_not="kinds are told apart where arms take turns" if how == "batches" else None,
    )


def _within(sentence: str, name: str) -> str:
    """A sentence behind a colon; the arm's name stays as it is."""
    return sentence if sentence.startswith(name) else sentence[0].lower() + sentence[1:]


_NO_BREAK_EVEN = (
    "No break-even of throughput in an open loop: below saturation the output equals the input in both arms; "
    "TPOT and TTFT stand instead"
)
