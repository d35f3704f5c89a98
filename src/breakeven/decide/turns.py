"""An arm's levels at one load, how they pair with another arm's, and what a comparison reads from them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from breakeven.decide.ratio import LogMean, NoRatio, log_mean, window_mean
from breakeven.decide.student import t_quantile
from breakeven.measure.arrivals import ArrivalTable
from breakeven.measure.level import LevelSummary
from breakeven.measure.stats import FloatArray, Interval
from breakeven.measure.summary import summarize
from breakeven.records import LevelPlan, LevelRecord, Manifest, RequestRecord
from breakeven.runs import Run, finished_levels

__all__ = [
    "ArmRun",
    "Decoding",
    "How",
    "Turn",
    "blocks_of",
    "decoding",
    "geometric_mean",
    "how_measured",
    "load_of",
    "mean_rate",
    "pairs",
    "rate_interval",
    "turns_of",
    "whole",
]

#: How two arms were measured: by turns at each load, by turns of whole sweeps, or each in a run of its own.
How = Literal["pairs", "sweeps", "batches"]


class ArmRun(NamedTuple):
    """One arm of a comparison: its name, where its run is, and the run."""

    name: str
    directory: str
    run: Run


class Decoding(NamedTuple):
    """Per request with a decode time: tokens after its first arrival, the time they took, in how many arrivals."""

    tokens: FloatArray
    ns: FloatArray
    arrivals: FloatArray


class Turn(NamedTuple):
    """One visit of an arm to a load: a level of its run.

    `records` are all its requests after warm-up in the order of sending, `well` the measured ones that ended well, and
    `decodes` is of those.
    """

    level: LevelRecord
    summary: LevelSummary
    records: list[RequestRecord]
    well: list[RequestRecord]
    decodes: Decoding
    is_finished: bool

    @property
    def rate(self) -> float:
        """Output tokens a second, as `LevelSummary.rate` has it."""
        return self.summary.rate

    @property
    def seconds(self) -> float:
        """From its first request to its last, ramp and drain included."""
        return (self.level.ended_ns - self.level.started_ns) / 1e9


def load_of(plan: LevelPlan) -> float:
    """The load as one number: requests in flight, requests a second, or the speed of a trace."""
    return {"closed": float(plan.concurrency), "open": plan.rate, "trace": plan.speed}[plan.mode]


def turns_of(run: Run, max_tokens: int) -> dict[float, list[Turn]]:
    """A run's levels of one answer length by load, in the order in which they ran."""
    records: defaultdict[int, list[RequestRecord]] = defaultdict(list)
    for record in run.requests:
        if record.phase != "warmup":
            records[record.level].append(record)
    finished = finished_levels(run)
    found: defaultdict[float, list[Turn]] = defaultdict(list)
    levels = sorted(run.levels, key=lambda level: level.plan.index)
    for level, summary in zip(levels, summarize(run).levels, strict=True):
        if level.plan.max_tokens == max_tokens:
            own = sorted(records[level.plan.index], key=lambda record: (record.sent_ns or record.due_ns, record.id))
            well = [record for record in own if record.phase == "measured" and record.outcome == "ok"]
            turn = Turn(level, summary, own, well, decoding(well), level.plan.index in finished)
            found[load_of(level.plan)].append(turn)
    return found


def whole(turns: Sequence[Turn]) -> list[Turn]:
    """Without those that were cut short, unless there are no others."""
    return [turn for turn in turns if turn.is_finished] or list(turns)


def how_measured(reference: Manifest, other: Manifest) -> How:
    """Whether two arms took turns, and how."""
    mine, its = reference.turns, other.turns
    if mine is None or its is None or mine.group != its.group:
        return "batches"
    return its.how


def pairs(reference: Sequence[Turn], other: Sequence[Turn]) -> list[tuple[Turn, Turn]]:
    """Turns of the same number in both arms, in their order; one that was cut short leaves its partner alone."""
    partners: Mapping[int, Turn] = {turn.level.plan.run: turn for turn in other if turn.is_finished}
    return [
        (turn, partners[turn.level.plan.run])
        for turn in reference
        if turn.is_finished and turn.level.plan.run in partners
    ]


def blocks_of(turns: Mapping[str, Sequence[Turn]]) -> list[dict[str, Turn]]:
    """Turns of the same number, by arm and in their order, where every arm has finished its own."""
    by_arm = {arm: {turn.level.plan.run: turn for turn in own if turn.is_finished} for arm, own in turns.items()}
    common = set.intersection(*map(set, by_arm.values()))
    return [{arm: own[number] for arm, own in by_arm.items()} for number in sorted(common)]


def mean_rate(turns: Sequence[Turn], whose: str) -> LogMean | NoRatio:
    """An arm's mean log throughput at a load: over its turns, or from the batches of its only one."""
    if len(turns) == 1:
        throughput = turns[0].summary.output_throughput
        found = window_mean(turns[0].rate, throughput.ci95)
    else:
        found = log_mean([turn.rate for turn in turns])
    return NoRatio(found.reason, f"{whose}: {found.detail}") if isinstance(found, NoRatio) else found


def geometric_mean(rates: Sequence[float]) -> float:
    """0 where one of them is."""
    return math.exp(float(np.log(rates).mean())) if rates and min(rates) > 0 else 0.0


def rate_interval(turns: Sequence[Turn]) -> Interval | None:
    """The 95 % interval of an arm's throughput at a load, where it has one."""
    if len(turns) == 1:
        ci95 = turns[0].summary.output_throughput.ci95
        return None if ci95 is None else Interval(*ci95)
    mean = mean_rate(turns, "")
    if isinstance(mean, NoRatio):
        return None
    half = t_quantile(0.975, mean.df) * mean.se
    return Interval(math.exp(mean.log - half), math.exp(mean.log + half))


def decoding(records: Sequence[RequestRecord]) -> Decoding:
    """What TPOT and decode rate are made of; requests whose output came in one arrival have none."""
    table = ArrivalTable.of(records)
    output = np.array([record.output_tokens for record in records if record.arrivals], dtype=np.int64)
    tokens = output - table.tokens[table.first]
    ns = table.at_ns[table.last] - table.at_ns[table.first]
    # An arrival that adds no token (text that waits for the rest of a character) is no step that brought any.
    filled = np.concatenate([[0], np.cumsum(table.tokens > 0)])
    arrivals = filled[table.last + 1] - filled[table.first + 1]
    kept = (tokens > 0) & (ns > 0)
    return Decoding(tokens[kept].astype(np.float64), ns[kept].astype(np.float64), arrivals[kept].astype(np.float64))
