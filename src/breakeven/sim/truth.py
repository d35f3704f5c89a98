"""What a model's throughput is in the long run: the truth that measurements of it are judged by.

Worked out, not simulated. A closed loop has C slots; a request takes its slot for m steps of prefill and n of
decoding, where n follows from Wald's equation: the tokens to be decoded and the overshoot of the last step, over the
mean tokens a step, the overshoot being that of a renewal process far from its start, E[G(G - 1)] / 2E[G] (W. Feller,
*An Introduction to Probability Theory and Its Applications* II, XI.4). Where prompts have steps of their own, all C
slots decode in each other step, and the result is exact up to that limit. Where they ride along, the slots that read
are taken as independent, which is exact where step times are linear in the batch, elsewhere good to a few tenths of a
percent while prompts fit a step; longer ones are taken not to wait for each other (`tests/sim/test_truth.py`). Noise
changes nothing, by its normalisation (`sim.machine`); drift is left out.
"""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import NormalDist, fmean
from typing import NamedTuple

from breakeven.load.prompts import PromptSet
from breakeven.sim.answers import Nature, nature_of, survival
from breakeven.sim.model import EngineModel

__all__ = ["true_acceptance_length", "true_break_evens", "true_throughput"]

#: Points at which the effects of a request of its own are averaged: the middles of equal parts of probability.
_POINTS = tuple(NormalDist().inv_cdf((i + 0.5) / 32) for i in range(32))


def true_throughput(
    model: EngineModel, prompts: PromptSet, *, concurrency: int, k: int, max_tokens: int, drafter: bool | None = None
) -> float:
    """Output tokens a second of a closed loop in the long run.

    Args:
        model: the engine.
        prompts: what is sent, in turn.
        concurrency: requests in flight; those beyond the model's `max_batch` wait and change nothing.
        k: tokens drafted at each step.
        max_tokens: where answers are cut.
        drafter: whether one is loaded; by default if k > 0.

    Raises:
        UsageError: the model has no step times for this K.
    """
    model.check_k(k)
    request = _mean_request(model, prompts, k, max_tokens)
    return _throughput(model, request, concurrency, k, drafter=k > 0 if drafter is None else drafter)


def true_acceptance_length(model: EngineModel, prompts: PromptSet, *, k: int, max_tokens: int) -> float:
    """Tokens per verify pass in the long run, over all steps: requests whose drafts fail have more of them."""
    request = _mean_request(model, prompts, k, max_tokens)
    return request.verified / request.decode_steps if request.decode_steps else 1.0


def true_break_evens(
    off: EngineModel, on: EngineModel, prompts: PromptSet, *, k: int, max_tokens: int, most: int = 512
) -> list[float]:
    """The loads at which `on`, drafting `k` tokens, begins or ceases to beat `off`, which drafts none.

    Ascending; empty if nowhere. Whole loads up to `most` are worked out; between them the log of the ratio is taken for
    a straight line on log load.
    """
    on.check_k(k)
    plain, drafting = _mean_request(off, prompts, 0, max_tokens), _mean_request(on, prompts, k, max_tokens)
    logs = [
        math.log(_throughput(on, drafting, c, k, drafter=True) / _throughput(off, plain, c, 0, drafter=False))
        for c in range(1, most + 1)
    ]
    return [
        c * ((c + 1) / c) ** (before / (before - after))
        for c, (before, after) in enumerate(pairwise(logs), 1)
        if before * after < 0
    ]


class _Request(NamedTuple):
    """The mean request: output tokens, steps of decoding and of prefill, tokens of its verify passes, prefill cost."""

    tokens: float
    decode_steps: float
    prefill_steps: float
    verified: float
    prefill_ms: float


def _mean_request(model: EngineModel, prompts: PromptSet, k: int, max_tokens: int) -> _Request:
    requests = [_request(model, prompt.kind, nature_of(model, prompt), k, max_tokens) for prompt in prompts.prompts]
    return _Request(*(fmean(values) for values in zip(*requests, strict=True)))


def _request(model: EngineModel, kind: str, nature: Nature, k: int, max_tokens: int) -> _Request:
    """The mean request of one prompt."""
    tokens = _mean_tokens(model, nature, max_tokens)
    steps, verified = _decoding(model, kind, nature, k, tokens - 1)
    prefill = model.prefill
    chunks = math.ceil(nature.input_tokens / prefill.chunk_tokens) if prefill.chunk_tokens else 1
    return _Request(tokens, steps, chunks, verified, prefill.request_ms + prefill.token_ms * nature.input_tokens)


def _mean_tokens(model: EngineModel, nature: Nature, max_tokens: int) -> float:
    lengths = model.lengths
    if lengths is None:
        return max_tokens
    median = lengths.median_tokens * math.exp(lengths.prompt_sd * nature.length)
    return fmean(min(max_tokens, max(1, round(median * math.exp(lengths.request_sd * x)))) for x in _POINTS)


def _decoding(model: EngineModel, kind: str, nature: Nature, k: int, tokens: float) -> tuple[float, float]:
    """Steps in which so many tokens are decoded, and the tokens of their verify passes, the last one's whole."""
    if not tokens:
        return 0.0, 0.0
    acceptance = model.acceptance
    found = []
    for own in _POINTS if acceptance.request_sd else (0.0,):
        survived = survival(model, kind, k, acceptance.prompt_sd * nature.acceptance + acceptance.request_sd * own)
        # P(G > j) for j = 0, 1, ..., k is 1 and then the survival; E[G] its sum, E[G(G - 1)] / 2 that of j P(G > j).
        mean = 1 + sum(survived)
        overshoot = sum(j * p for j, p in enumerate(survived, 1)) / mean
        found.append(((tokens + overshoot) / mean, tokens + overshoot))
    return fmean(steps for steps, _ in found), fmean(verified for _, verified in found)


def _throughput(model: EngineModel, request: _Request, concurrency: int, k: int, *, drafter: bool) -> float:
    slots = min(concurrency, model.max_batch)
    if model.prefill.chunk_tokens is None:
        slot_steps, step_ms = request.decode_steps, model.step_ms(slots, k, drafter=drafter)
    else:
        slot_steps = request.decode_steps + request.prefill_steps
        step_ms = _mean_step_ms(model, slots, k, request.decode_steps / slot_steps, drafter=drafter)
    return request.tokens / (slot_steps / slots * step_ms + request.prefill_ms) * 1e3


def _mean_step_ms(model: EngineModel, slots: int, k: int, share: float, *, drafter: bool) -> float:
    """The mean length of steps in which each slot decodes with probability `share`, else reads its prompt."""
    if not share:
        return 0.0
    total = 0.0
    for batch in range(1, slots + 1):
        log_p = _log_binomial(slots, batch) + batch * math.log(share) + (slots - batch) * math.log1p(-share)
        if log_p > -30:
            total += math.exp(log_p) * model.step_ms(batch, k, drafter=drafter)
    return total


def _log_binomial(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
