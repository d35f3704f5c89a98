"""What is known of arms at one load: each arm's numbers, and the ratios of two."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, Literal

import numpy as np
from msgspec import Struct, structs

from breakeven.decide.acceptance import NeededAcceptance, needed_acceptance
from breakeven.decide.quantiles import paired_quantiles, unpaired_quantiles
from breakeven.decide.ratio import NoRatio, Ratio, paired, unpaired
from breakeven.decide.turns import (
    How,
    Turn,
    geometric_mean,
    mean_rate,
    pairs,
    rate_interval,
)
from breakeven.decide.verdict import Judgement, Verdict
from breakeven.measure.latency import latencies
from breakeven.measure.stats import BATCHES, Distribution, FloatArray, Interval

__all__ = [
    "METRICS",
    "ArmAtLoad",
    "Compared",
    "LoadComparison",
    "Metric",
    "Versus",
    "arm_at_load",
    "draft_length",
    "needed",
    "ratios",
    "value_of",
]

Metric = Literal["throughput", "tpot_p50", "tpot_p99", "ttft_p50", "ttft_p99"]
METRICS: tuple[Metric, ...] = ("throughput", "tpot_p50", "tpot_p99", "ttft_p50", "ttft_p99")

#: vLLM 0.32 (`SpeculativeConfig`), SGLang 0.5.23 (`ServerArgs`; its draft tokens are those of a tree), `sim.run`.
_K_NAMES = ("num_speculative_tokens", "speculative_num_steps", "k")
_QUANTILES = {"p50": 0.5, "p99": 0.99}
#: More tokens an arrival than this, without speculation, are several steps that one read brought: then arrivals don't
#: tell how many tokens a step gave.
_ONE_TOKEN = 1.1


class ArmAtLoad(Struct, frozen=True, kw_only=True):
    """One arm at one load, over all its turns there.

    Attributes:
        turns: how many visits.
        throughput: output tokens a second, the geometric mean over turns; `ci95` its interval, None where it has none.
        ttft_ms, tpot_ms, itl_ms, e2e_ms: of all measured requests that ended well.
        acceptance_length: tokens per draft verified, from the counters of all turns where the engine has them, else the
            turns' mean; None where it tells nothing.
        tokens_per_step: tokens per arrival after the first, which are those of a decode step where each step is sent
            at once; None without a decode time.
        ok, failed: measured requests.
        running: the engine's mean running requests, where it tells them.
        failed_checks: in how many turns each check failed.
        repeating: the share of answers that end in a loop.
    """

    arm: str
    turns: int
    throughput: float
    ci95: Interval | None
    ttft_ms: Distribution
    tpot_ms: Distribution
    itl_ms: Distribution
    e2e_ms: Distribution
    acceptance_length: float | None
    tokens_per_step: float | None
    ok: int
    failed: int
    running: float | None
    failed_checks: dict[str, int]
    repeating: float | None


class Compared(Struct, frozen=True, kw_only=True):
    """Other arm over reference in one number, with its verdict.

    Attributes:
        value: the ratio; there too where it has no interval, if both arms have the number. None otherwise.
        ci95, n: its interval, and the observations that it rests on.
        verdict: within its claim, which is this metric over all loads; `alone`: if it were the only one.
        p_holm: of no difference, within the claim.
        why_not: why there is no interval and no verdict.
    """

    value: float | None
    ci95: Interval | None = None
    n: int | None = None
    verdict: Verdict = "undecided"
    alone: Verdict = "undecided"
    p_holm: float | None = None
    why_not: NoRatio | None = None

    @classmethod
    def of(cls, ratio: Ratio | NoRatio, judged: Judgement, value: float | None) -> Compared:
        """`value` is what stands there where the ratio has no interval."""
        if isinstance(ratio, NoRatio):
            return cls(value=value, why_not=ratio)
        return cls(
            value=ratio.value,
            ci95=ratio.interval(),
            n=ratio.n,
            verdict=judged.verdict,
            alone=judged.alone,
            p_holm=judged.p_holm,
        )


class Versus(Struct, frozen=True, kw_only=True):
    """An arm against the reference at one load. `needed` is None where tokens per step or K are not known."""

    arm: str
    throughput: Compared
    tpot_p50: Compared
    tpot_p99: Compared
    ttft_p50: Compared
    ttft_p99: Compared
    needed: NeededAcceptance | None


class LoadComparison(Struct, frozen=True, kw_only=True):
    """All arms at one load: `arms` in their order, the reference first; `versus` the others against it."""

    load: float
    name: str
    arms: tuple[ArmAtLoad, ...]
    versus: tuple[Versus, ...]


def arm_at_load(arm: str, turns: Sequence[Turn]) -> ArmAtLoad:
    """An arm's numbers at a load."""
    well = [record for turn in turns for record in turn.well]
    numbers = latencies(well)
    tokens, steps = (sum(float(part.sum()) for part in parts) for parts in _tokens_and_steps(turns))
    failed = Counter(check.name for turn in turns for check in turn.summary.checks if not check.ok)
    engines = [turn.summary.engine for turn in turns if turn.summary.engine]
    running = [value for engine in engines if (value := engine.get("running")) is not None]
    return ArmAtLoad(
        arm=arm,
        turns=len(turns),
        throughput=geometric_mean([turn.rate for turn in turns]),
        ci95=rate_interval(turns),
        ttft_ms=numbers.ttft_ms,
        tpot_ms=numbers.tpot_ms,
        itl_ms=numbers.itl_ms,
        e2e_ms=numbers.e2e_ms,
        acceptance_length=_acceptance_length([turn.level.spec for turn in turns if turn.level.spec]),
        tokens_per_step=tokens / steps if steps else None,
        ok=len(well),
        failed=sum(turn.summary.requests["failed"] for turn in turns),
        running=fmean(running) if running else None,
        failed_checks=dict(sorted(failed.items())),
        repeating=sum(record.repetition > 0.5 for record in well) / len(well) if well else None,
    )


def ratios(
    reference: tuple[str, Sequence[Turn]], other: tuple[str, Sequence[Turn]], how: How
) -> dict[Metric, Ratio | NoRatio]:
    """Other over reference in each metric at one load.

    Args:
        reference, other: an arm's name and its turns there.
        how: whether turns of the same number are pairs.
    """
    (whose, mine), (others, its) = reference, other
    if how == "batches":
        spans = [turn.seconds for turn in (*mine, *its)]
        each_s = sum(spans) / (BATCHES if len(spans) == 2 else min(len(mine), len(its)))
        rate = unpaired(mean_rate(mine, whose), mean_rate(its, others), method=how, each_s=each_s)
        return _with_latencies(rate, lambda name: _unpaired_latency(mine, its, name))
    both = pairs(mine, its)
    if not both:
        return dict.fromkeys(METRICS, NoRatio("too_few", "no turn was finished in both arms"))
    each_s = fmean(a.seconds + b.seconds for a, b in both)
    rate = paired(
        [a.rate for a, _ in both], [b.rate for _, b in both], method=how, each_s=each_s, names=(whose, others)
    )
    return _with_latencies(rate, lambda name: _paired_latency(both, name, how, each_s))


def needed(reference: ArmAtLoad, other: ArmAtLoad, tpot: Ratio | NoRatio, k: int | None) -> NeededAcceptance | None:
    """The tokens per step at which `other` would break even with a reference that does not speculate.

    Args:
        reference, other: at the same load.
        tpot: the ratio of their TPOT's median.
        k: tokens that the other arm drafts at most; None where nobody knows.
    """
    plain, drafting = reference.tokens_per_step, other.tokens_per_step
    if k is None or plain is None or drafting is None or reference.acceptance_length is not None:
        return None
    tokens = drafting if plain <= _ONE_TOKEN else other.acceptance_length
    medians = reference.tpot_ms.p50, other.tpot_ms.p50
    if tokens is None or not medians[0] or not medians[1]:
        return None
    if isinstance(tpot, Ratio):
        return needed_acceptance(tokens, k, tpot_ratio=tpot)
    return needed_acceptance(tokens, k, tpot_ms=(medians[0], medians[1]))


def _with_latencies(
    rate: Ratio | NoRatio, latency: Callable[[Metric], Ratio | NoRatio]
) -> dict[Metric, Ratio | NoRatio]:
    return {metric: rate if metric == "throughput" else latency(metric) for metric in METRICS}


def _tokens_and_steps(turns: Sequence[Turn]) -> tuple[list[FloatArray], list[FloatArray]]:
    return [turn.decodes.tokens for turn in turns], [turn.decodes.arrivals for turn in turns]


def _acceptance_length(specs: Sequence[dict[str, Any]]) -> float | None:
    counted = [spec for spec in specs if spec.get("drafts") and spec.get("accepted") is not None]
    if counted:
        accepted, drafts = (sum(float(spec[name]) for spec in counted) for name in ("accepted", "drafts"))
        return 1 + accepted / drafts
    told = [float(spec["acceptance_length"]) for spec in specs if spec.get("acceptance_length")]
    return fmean(told) if told else None


def _latencies_ms(turn: Turn, metric: str) -> FloatArray:
    if metric == "ttft":
        return np.array([record.arrivals[0][0] for record in turn.well if record.arrivals], dtype=np.float64) / 1e6
    tpot_ms: FloatArray = turn.decodes.ns / turn.decodes.tokens / 1e6
    return tpot_ms


def _paired_latency(both: Sequence[tuple[Turn, Turn]], name: Metric, how: How, each_s: float) -> Ratio | NoRatio:
    metric, statistic = name.split("_")
    arms = [[_latencies_ms(turn, metric) for turn in own] for own in zip(*both, strict=True)]
    if missing := _missing([turn for pair in both for turn in pair], arms[0] + arms[1]):
        return missing
    found = paired_quantiles(arms[0], arms[1], _QUANTILES[statistic], each_s=each_s)
    return structs.replace(found, method=how) if isinstance(found, Ratio) else found


def _unpaired_latency(reference: Sequence[Turn], other: Sequence[Turn], name: Metric) -> Ratio | NoRatio:
    metric, statistic = name.split("_")
    mine, its = (np.concatenate([_latencies_ms(turn, metric) for turn in own]) for own in (reference, other))
    return _missing([*reference, *other], [mine, its]) or unpaired_quantiles(mine, its, _QUANTILES[statistic])


def _missing(turns: Sequence[Turn], values: Sequence[FloatArray]) -> NoRatio | None:
    """Requests that ended well and yet have no TPOT: their output came in one piece."""
    if any(turn.well for turn in turns) and not any(map(len, values)):
        return NoRatio("few_requests", "no answer came in more than one arrival: it has no TPOT")
    return None


def draft_length(speculation: Mapping[str, Any], turns: Sequence[Turn]) -> int | None:
    """Tokens that an arm drafts at most along one path: as its pin or configuration tells, else as its counters show.

    The counters have as many positions as the configuration allows (vLLM), or more (llama.cpp): never fewer.
    """
    if "pinned_k" in speculation:
        return int(speculation["pinned_k"]) or None
    for name, value in speculation.items():
        if name.rpartition(".")[2] in _K_NAMES and isinstance(value, int) and value > 0:
            return value
    specs = [turn.level.spec for turn in turns if turn.level.spec]
    positions = max((len(spec.get("per_position") or ()) for spec in specs), default=0)
    means = [spec["draft_tokens"] / spec["drafts"] for spec in specs if spec.get("drafts") and spec.get("draft_tokens")]
    return max(positions, math.ceil(max(means, default=0.0))) or None


def value_of(metric: Metric, reference: ArmAtLoad, other: ArmAtLoad) -> float | None:
    """The ratio as it stands, without its noise."""
    if metric == "throughput":
        mine, its = reference.throughput, other.throughput
    else:
        name, statistic = metric.split("_")
        mine, its = (getattr(getattr(arm, f"{name}_ms"), statistic) for arm in (reference, other))
    return its / mine if mine and its and math.isfinite(its / mine) else None
