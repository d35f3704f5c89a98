"""Whether an arm drafted what its schedule says, by the engine's own counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from breakeven.decide.schedule import Schedule
from breakeven.decide.turns import Turn

__all__ = ["Drafting", "drafting", "drafting_caveats"]

#: A mean draft length this far outside of what the schedule has for the batches that ran is another one: an engine
#: drafts a little less at the end of an answer, and the step after a switch still verifies the old drafts.
_SLACK, _SLACK_SHARE = 0.25, 0.1
#: Where nothing should be drafted, steps that draft all the same because the batch crossed a border unseen.
_STRAY = 0.1
#: Drafters that find no draft in some steps, or a shorter one.
_SPARING = ("ngram", "n-gram", "suffix", "lookup")


class Drafting(Struct, frozen=True, kw_only=True):
    """What an arm drafted at one load, over all its turns.

    Attributes:
        running: the engine's mean running requests, the client's where it tells none.
        per_draft: tokens a draft: K, as the engine used it in steps that drafted; 0 where none did, None where the
            engine counts no drafts.
        per_step: tokens drafted a step and request, steps without a draft included.
        expected: the same by the schedule, over the batches that ran; None without a schedule.
        k_low, k_high: the least and the largest K that the schedule has for these batches.
        agrees: whether what was drafted is what the schedule says; None where one of both is not known.
    """

    running: float | None
    per_draft: float | None
    per_step: float | None
    expected: float | None = None
    k_low: int | None = None
    k_high: int | None = None
    agrees: bool | None = None


def drafting(turns: Mapping[float, Sequence[Turn]], schedule: Schedule | None) -> dict[float, Drafting]:
    """What an arm drafted at each load, and what it should have.

    Args:
        turns: the arm's, by load.
        schedule: what it was started with; None where nobody says.
    """
    counts = any(turn.level.spec for own in turns.values() for turn in own)
    return {load: _at(own, schedule, counts=counts) for load, own in turns.items()}


def drafting_caveats(arm: str, found: Mapping[str, Drafting]) -> list[str]:
    """A line for each load at which the arm drafted something else than its schedule says; `found` is by load's name.

    Without counters it is one line, that nothing is proved.
    """
    known = {name: each for name, each in found.items() if each.expected is not None}
    if known and all(each.per_draft is None for each in known.values()):
        return [f"the engine of {arm} counts no drafts: that it followed the schedule is not shown"]
    return [
        f"{name}: {arm} drafted {_drafted(each)} with {each.running:.1f} requests running; its schedule says "
        f"{each.k_low if each.k_low == each.k_high else f'{each.k_low} to {each.k_high}'}: is it the server that the "
        "schedule was given to?"
        for name, each in known.items()
        if each.agrees is False
    ]


def _at(turns: Sequence[Turn], schedule: Schedule | None, *, counts: bool) -> Drafting:
    per_draft, per_step = _drafted_by(turns) if counts else (None, None)
    batches = _batches(turns)
    running = sum(batches) / len(batches) if batches else None
    if schedule is None or not batches:
        return Drafting(running=running, per_draft=per_draft, per_step=per_step)
    ks = [schedule.k_at(round(batch)) for batch in batches]
    # A batch of eight makes eight times as many steps of requests as one alone.
    expected = sum(k * batch for k, batch in zip(ks, batches, strict=True)) / sum(batches)
    return Drafting(
        running=running,
        per_draft=per_draft,
        per_step=per_step,
        expected=expected,
        k_low=min(ks),
        k_high=max(ks),
        agrees=_agrees(per_draft, per_step, ks, schedule.method or ""),
    )


def _drafted_by(turns: Sequence[Turn]) -> tuple[float | None, float | None]:
    """Tokens a draft, and tokens drafted a step and request."""
    specs: list[dict[str, Any]] = [turn.level.spec for turn in turns if turn.level.spec]
    if any(spec.get("draft_tokens") is None or spec.get("drafts") is None for spec in specs):
        return None, None
    drafts, tokens = (sum(float(spec[name]) for spec in specs) for name in ("drafts", "draft_tokens"))
    accepted = sum(float(spec.get("accepted") or 0.0) for spec in specs)
    # Each step of a request gives one token of the target's own beside the accepted ones.
    steps = sum(_output(turn) for turn in turns) - accepted
    return (tokens / drafts if drafts else 0.0), (tokens / steps if steps > 0 else None)


def _output(turn: Turn) -> float:
    """Tokens that the engine put out between the readings of its counters; by the client's count if it counts none."""
    window_s = turn.summary.output_throughput.window_s
    counted = turn.level.counters.get("generation_tokens")
    return turn.rate * (window_s or 0.0) if counted is None else counted


def _batches(turns: Sequence[Turn]) -> list[float]:
    """The running requests at each reading, or the client's in each turn where the engine tells none."""
    samples = [sample.running for turn in turns for sample in turn.level.samples if sample.running]
    return samples or [mean for turn in turns if (mean := turn.summary.in_flight["mean"])]


def _agrees(per_draft: float | None, per_step: float | None, ks: Sequence[int], method: str) -> bool | None:
    if per_draft is None:
        return None
    most, least = max(ks), min(ks)
    if not most:
        return not per_draft or (per_step is not None and per_step <= _STRAY)
    if per_draft > most + _slack(most):
        return False
    if any(word in method.lower() for word in _SPARING):
        return bool(per_draft) or not least
    if not per_draft:
        return not least
    shortest = min(k for k in ks if k)
    return per_draft >= shortest - _slack(shortest) and (per_step is None or per_step >= least - _slack(least) - _STRAY)


def _slack(k: int) -> float:
    return max(_SLACK, _SLACK_SHARE * k)


def _drafted(each: Drafting) -> str:
    return f"{each.per_draft:.1f} tokens a draft" if each.per_draft else "nothing"
