"""What a policy sees when a step begins, whatever engine or simulator shows it."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["DEEP", "Observation", "Step"]

#: The K of a step that drafts nothing and lets the drafter's KV cache fall behind; after one of K = 0 it is in step.
DEEP = -1


class Step(NamedTuple):
    """A step that is over. `accepted` is per draft position; a step with `prefill_tokens` is no decode-only one.

    `k` is what the step was told. Engines verify first and draft then, so that what is accepted was drafted by the step
    before.
    """

    begun_ns: int
    step_ns: int
    decoding: int
    k: int
    drafts: int
    accepted: tuple[int, ...]
    prefill_tokens: int


class Observation(NamedTuple):
    """What is known when a step begins that decodes `decoding` requests. `last` is None before the first step ended."""

    now_ns: int
    decoding: int
    waiting: int
    kv_use: float
    last: Step | None
