"""A model from measured runs: what a server would do at loads and for prompts that nobody has tried on it.

Runs that differ in K give the step times of each. Of every level:

    step time     gaps between arrivals of one request are steps; their lengths are, by least squares over all levels, a
                  line through one point a level in the decoding requests (B) and so much for prompts read meanwhile
    B             requests between their first token and their last, at the middle of a gap
    prompts       whose first token comes at a gap's end were read in it
    K             drafted tokens per draft, by the engine's counters
    acceptance    tokens of later arrivals, by prompt kind
    noise         autocovariances of the gaps' logarithms along a request, by the form of AR(1) and white noise

It takes an arrival for a step, so that it needs tokens counted by chunk and a client that read them one by one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import NormalDist, fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from breakeven.errors import UsageError
from breakeven.records import LevelRecord, RequestRecord
from breakeven.runs import Run
from breakeven.sim.model import Acceptance, EngineModel, Lengths, Noise, Prefill
from breakeven.sim.steps import TableSteps

__all__ = ["fit"]

FloatArray = NDArray[np.float64]

#: Gaps of a level below which its step time is a guess.
_FEWEST_GAPS = 30
#: A first token this part of a step before another's arrival still belongs to the step of that arrival.
_SLACK = 0.25
_LONGEST_LAG = 4
_SHORTEST_MS = 0.01


class _Gaps(NamedTuple):
    """The gaps of one level, in ms, and what else was going on in each: columns of equal length.

    `firsts` counts first tokens of other requests that came in it, `read` their input tokens, `batch` who decoded.
    `of` numbers the request that a gap belongs to.
    """

    k: int
    ms: FloatArray
    firsts: FloatArray
    read: FloatArray
    batch: FloatArray
    of: NDArray[np.int64]


def fit(runs: Sequence[Run]) -> EngineModel:
    """The model that these runs of one server suggest.

    Args:
        runs: of one engine and model; those with different K teach it the step times of each.

    Raises:
        UsageError: no level has enough gaps between arrivals to tell a step time from.
    """
    levels = [(level, _well(run.of_level(level.plan.index))) for run in runs for level in run.levels]
    gaps = [found for level, records in levels if (found := _gaps(level, records)) is not None]
    if not gaps:
        raise UsageError(f"--from: no level of these runs has {_FEWEST_GAPS} arrivals whose tokens the server counted")
    records = [record for _, each in levels for record in each]
    costs = _costs(gaps, records)
    drafting = [(_drafted(level), each) for level, each in levels if _drafted(level)]
    return EngineModel(
        name=runs[0].manifest.model,
        steps=TableSteps(points=costs.points),
        prefill=Prefill(request_ms=costs.request_ms, token_ms=costs.token_ms),
        max_batch=_max_batch([level for level, _ in levels]),
        noise=_noise(gaps, costs),
        acceptance=_acceptance(drafting) if drafting else Acceptance(),
        lengths=_lengths(records),
    )


def _well(records: Iterable[RequestRecord]) -> list[RequestRecord]:
    return [
        r for r in records if r.outcome == "ok" and r.phase != "warmup" and r.arrivals and r.tokens_from == "chunks"
    ]


def _drafted(level: LevelRecord) -> int:
    """K of a level: drafted tokens per draft; 0 where nothing was drafted."""
    spec = level.spec or {}
    drafts, tokens = spec.get("drafts"), spec.get("draft_tokens")
    if drafts and tokens:
        return round(float(tokens) / float(drafts))
    return len(spec.get("per_position") or ())


def _gaps(level: LevelRecord, records: Sequence[RequestRecord]) -> _Gaps | None:
    stamps = [np.array([at_ns for at_ns, _ in r.arrivals]) + (r.sent_ns or 0) for r in records if r.phase == "measured"]
    rows = [(a, b, i) for i, each in enumerate(stamps) for a, b in pairwise(each.tolist())]
    # What is sent after the window's end may be cancelled, and its record doesn't say what its prompt cost.
    rows = [row for row in rows if level.closed_ns is None or row[1] <= level.closed_ns]
    if len(rows) < _FEWEST_GAPS:
        return None
    before, after, of = np.array(rows, dtype=np.int64).T
    slack = _SLACK * float(np.median(after - before))
    started = sorted((r.first_ns or 0, r.input_tokens or 0) for r in records)
    firsts, lasts = np.array([at for at, _ in started]), np.sort([r.last_ns or 0 for r in records])
    read = np.concatenate([[0], np.cumsum([tokens for _, tokens in started])])
    low, high = np.searchsorted(firsts, before + slack), np.searchsorted(firsts, after + slack)
    middle, others = (before + after) / 2, np.float64(level.plan.concurrency != 1)
    return _Gaps(
        k=_drafted(level),
        ms=(after - before) / 1e6,
        firsts=others * (high - low),
        read=others * (read[high] - read[low]),
        batch=(np.searchsorted(firsts, middle) - np.searchsorted(lasts, middle)).astype(np.float64),
        of=of,
    )


class _Costs(NamedTuple):
    """Step times at points (B, K, ms), and what a prompt adds: ms each, and ms per input token."""

    points: tuple[tuple[float, int, float], ...]
    request_ms: float
    token_ms: float

    def expect_ms(self, gaps: _Gaps) -> FloatArray:
        """How long these gaps should have been."""
        line = [(batch, ms) for batch, k, ms in self.points if k == gaps.k]
        steps = np.interp(gaps.batch, [batch for batch, _ in line], [ms for _, ms in line])
        return np.maximum(_SHORTEST_MS, steps + self.request_ms * gaps.firsts + self.token_ms * gaps.read)


def _costs(gaps: Sequence[_Gaps], records: Sequence[RequestRecord]) -> _Costs:
    """The costs that leave the least squares; no prompt's are below 0.

    Within a closed level B falls with each prompt that is read, so that the slope in B must come from other levels.
    Rows are weighed, since noise is a share of a step's length, and each step is there B times.
    """
    nodes = sorted({(g.k, float(np.median(g.batch))) for g in gaps})
    weights = np.concatenate(
        [np.full(len(g.ms), 1 / (g.ms.mean() * math.sqrt(max(1.0, g.batch.mean())))) for g in gaps]
    )
    columns = np.concatenate([_columns(g, nodes) for g in gaps]) * weights[:, None]
    ms = np.concatenate([g.ms for g in gaps]) * weights
    found = np.linalg.lstsq(columns, ms, rcond=None)[0]
    if min(found[:2]) < 0:
        columns[:, 0] = 0.0
        found = np.linalg.lstsq(columns, ms, rcond=None)[0]
    points = tuple((batch, k, max(_SHORTEST_MS, float(ms))) for (k, batch), ms in zip(nodes, found[2:], strict=True))
    if not any(g.firsts.any() for g in gaps):
        return _Costs(points, *_first_tokens(records))
    return _Costs(points, max(0.0, float(found[0])), max(0.0, float(found[1])))


def _columns(gaps: _Gaps, nodes: Sequence[tuple[int, float]]) -> FloatArray:
    """Prompts read, their tokens, and for each node (K, B) how much of a gap is the step at that node."""
    own = [batch for k, batch in nodes if k == gaps.k]
    hats = [np.interp(gaps.batch, own, [float(b == batch) for b in own]) * (k == gaps.k) for k, batch in nodes]
    return np.stack([gaps.firsts, gaps.read, *hats], axis=1)


def _first_tokens(records: Sequence[RequestRecord]) -> tuple[float, float]:
    """What a prompt costs where nobody came while others decoded: one at a time, all of the time to first token."""
    columns = np.array([[1.0, r.input_tokens or 0.0] for r in records])
    ms = np.array([((r.first_ns or 0) - (r.sent_ns or 0)) / 1e6 for r in records])
    request_ms, token_ms = np.linalg.lstsq(columns, ms, rcond=None)[0]
    if request_ms < 0 or token_ms < 0:
        return max(0.0, float(ms.mean())), 0.0
    return float(request_ms), float(token_ms)


def _max_batch(levels: Sequence[LevelRecord]) -> int:
    """The most that ran while others waited; where nobody ever did, what a model has by default, or more."""
    samples = [sample for level in levels for sample in level.samples if sample.running]
    full = [sample.running for sample in samples if sample.waiting and sample.running]
    if full:
        return round(max(full))
    return max(EngineModel().max_batch, *(level.plan.concurrency for level in levels))


def _noise(gaps: Sequence[_Gaps], costs: _Costs) -> Noise:
    """Slow noise and jitter from how the logarithms of a request's gaps resemble those one and some steps later."""
    logs = [_centred(np.log(np.maximum(g.ms, _SHORTEST_MS) / costs.expect_ms(g))) for g in gaps]
    variance, near, far = (_autocovariance(gaps, logs, lag) for lag in (0, 1, _LONGEST_LAG))
    if near <= 0.02 * variance or far <= 0:
        return Noise(jitter_sd=math.sqrt(variance))
    memory = min(0.999, (far / near) ** (1 / (_LONGEST_LAG - 1)))
    slow = min(near / memory, variance)
    step_s = fmean(float(g.ms.mean()) for g in gaps) / 1e3
    memory_s = min(1e5, max(1e-3, -step_s / math.log(memory)))
    return Noise(sd=math.sqrt(slow), memory_s=memory_s, jitter_sd=math.sqrt(variance - slow))


def _centred(values: FloatArray) -> FloatArray:
    centred: FloatArray = values - values.mean()
    return centred


def _autocovariance(gaps: Sequence[_Gaps], logs: Sequence[FloatArray], lag: int) -> float:
    """The covariance of gaps of the same request that are `lag` apart, over all levels."""
    total, pairs = 0.0, 0
    for level, values in zip(gaps, logs, strict=True):
        early, late = values[: len(values) - lag], values[lag:]
        same = level.of[: len(values) - lag] == level.of[lag:]
        total, pairs = total + float(early[same] @ late[same]), pairs + int(same.sum())
    return total / max(pairs, 1)


def _acceptance(drafting: Sequence[tuple[int, list[RequestRecord]]]) -> Acceptance:
    """Acceptance by position and kind, as far as the longest drafts went, and how much it varies between requests."""
    k = max(each for each, _ in drafting)
    reached: defaultdict[str, FloatArray] = defaultdict(lambda: np.zeros(k + 1))
    tried: defaultdict[str, FloatArray] = defaultdict(lambda: np.zeros(k + 1))
    rates: list[tuple[str, int, int]] = []
    for drafted, records in drafting:
        for record in records:
            later = np.array([tokens for _, tokens in record.arrivals[1:-1]])  # the last one is cut
            for position in range(1, drafted + 1):
                reached[record.kind][position] += np.sum(later > position)
                tried[record.kind][position] += np.sum(later >= position)
            rates.append((record.kind, int(np.sum(later > 1)), len(later)))
    kinds = {kind: _positions(reached[kind], tried[kind]) for kind in reached}
    overall = _positions(sum(reached.values(), np.zeros(k + 1)), sum(tried.values(), np.zeros(k + 1)))
    decay = overall[-1] / overall[-2] if k > 1 and overall[-2] else 1.0
    return Acceptance(default=overall, kinds=kinds, decay=min(1.0, max(decay, 0.1)), prompt_sd=_spread(rates, kinds))


def _positions(reached: FloatArray, tried: FloatArray) -> tuple[float, ...]:
    return tuple(float(r / t) if t else 0.0 for r, t in zip(reached[1:], tried[1:], strict=True))


def _spread(rates: Sequence[tuple[str, int, int]], kinds: dict[str, tuple[float, ...]]) -> float:
    """The standard deviation between requests of the log odds of the first position, beyond what chance gives."""
    beyond = [
        ((won / n - p) ** 2 - p * (1 - p) / n) / (p * (1 - p)) ** 2
        for kind, won, n in rates
        for p in kinds[kind][:1]
        if n >= 8 and 0.02 < p < 0.98
    ]
    return min(5.0, math.sqrt(max(0.0, fmean(beyond)))) if beyond else 0.0


def _lengths(records: Sequence[RequestRecord]) -> Lengths | None:
    """Lognormal lengths through two quantiles that no max-tokens cut; None where hardly an answer ended by itself."""
    whole = [r for r in records if r.phase == "measured" and r.finish_reason is not None]
    stopped = sum(r.finish_reason != "length" for r in whole)
    if stopped < max(10, 0.05 * len(whole)):
        return None
    upper = min(0.5, 0.8 * stopped / len(whole))
    tokens = np.array([r.output_tokens for r in whole])
    high, low = (float(np.log(np.quantile(tokens, q))) for q in (upper, upper / 3))
    z_high, z_low = NormalDist().inv_cdf(upper), NormalDist().inv_cdf(upper / 3)
    sd = max(0.0, (high - low) / (z_high - z_low))
    return Lengths(median_tokens=max(1.0, math.exp(high - sd * z_high)), prompt_sd=min(sd, 3.0))
