"""What a simulated engine is: its step times, prefill and noise, and how well its drafter guesses. Kept as JSON."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
from msgspec import Struct, field

from breakeven.errors import UsageError
from breakeven.sim.steps import RooflineSteps, StepTimes

__all__ = ["Acceptance", "EngineModel", "Lengths", "Noise", "Prefill", "read_model"]


#: Eleven days; virtual time is kept in whole nanoseconds, which infinity has not.
_LONGEST_MS = 10**9


class Prefill(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What reading a prompt costs: `request_ms` + `token_ms` per input token.

    With `chunk_tokens` it rides along with decoding, at most so many prompt tokens a step (chunked prefill); without,
    prompts get steps of their own in which nobody decodes.
    """

    request_ms: float = 0.0
    token_ms: float = 0.0
    chunk_tokens: int | None = 2048

    def __post_init__(self) -> None:
        """Raises ValueError for a cost below zero or a chunk of nothing."""
        if not (0 <= self.request_ms <= _LONGEST_MS and 0 <= self.token_ms <= _LONGEST_MS):
            raise ValueError(f"prefill: request_ms and token_ms must be from 0 to {_LONGEST_MS}")
        if self.chunk_tokens is not None and self.chunk_tokens < 1:
            raise ValueError("prefill: chunk_tokens must be 1 or more, or null")


class Noise(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the machine's speed varies. All standard deviations are of the logarithm of the step time.

    `sd` with `memory_s`: slow noise with an autocorrelation of exp(-t / memory_s), which over steps of constant length
    is AR(1). `jitter_sd`: each step's own. `drift_per_hour`: steps grow by this share in an hour. `walk_per_hour`: a
    random walk that has wandered so far, in standard deviations, after an hour.
    """

    sd: float = 0.0
    memory_s: float = 1.0
    jitter_sd: float = 0.0
    drift_per_hour: float = 0.0
    walk_per_hour: float = 0.0

    def __post_init__(self) -> None:
        """Raises ValueError for deviations below zero, no memory, or a drift to below nothing."""
        if not (0 <= self.sd <= 2 and 0 <= self.jitter_sd <= 2 and 0 <= self.walk_per_hour <= 2):
            raise ValueError("noise: sd, jitter_sd and walk_per_hour must be from 0 to 2")
        if not 1e-3 <= self.memory_s <= 1e5:
            raise ValueError("noise: memory_s must be from 0.001 to 100000 seconds")
        if not -1 < self.drift_per_hour <= 10:
            raise ValueError("noise: drift_per_hour must be above -1 and at most 10")


class Acceptance(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far drafts are right: the probability that position i is accepted, given all before it were.

    `default`, and by prompt kind `kinds`, list the first positions; each position beyond is the one before it times
    `decay`. The log odds of all of a request's positions are shifted by a normal effect of its prompt (`prompt_sd`: the
    same in every run and arm) and one of its own (`request_sd`).
    """

    default: tuple[float, ...] = (0.7,)
    kinds: dict[str, tuple[float, ...]] = field(default_factory=dict)
    decay: float = 0.9
    prompt_sd: float = 0.0
    request_sd: float = 0.0

    def __post_init__(self) -> None:
        """Raises ValueError for what is no probability."""
        for positions in (self.default, *self.kinds.values()):
            if not positions or not all(0 <= p <= 1 for p in positions):
                raise ValueError("acceptance: each list needs one or more probabilities between 0 and 1")
        if not (0 < self.decay <= 1 and 0 <= self.prompt_sd <= 5 and 0 <= self.request_sd <= 5):
            raise ValueError("acceptance: decay must be above 0 and at most 1, prompt_sd and request_sd from 0 to 5")

    def positions(self, kind: str, k: int) -> list[float]:
        """The probabilities of positions 1 to k for a kind of prompts, before the effects of prompt and request."""
        listed = list(self.kinds.get(kind, self.default))
        while len(listed) < k:
            listed.append(listed[-1] * self.decay)
        return listed[:k]


class Lengths(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many tokens an answer has if nothing cuts it: lognormal, part of it the prompt's (the same in every arm)."""

    median_tokens: float
    prompt_sd: float = 0.0
    request_sd: float = 0.0

    def __post_init__(self) -> None:
        """Raises ValueError for answers without a token."""
        if not 1 <= self.median_tokens <= 1e7:
            raise ValueError("lengths: median_tokens must be from 1 to 10000000")
        if not (0 <= self.prompt_sd <= 3 and 0 <= self.request_sd <= 3):
            raise ValueError("lengths: prompt_sd and request_sd must be from 0 to 3")


def _typical() -> StepTimes:
    # Made up: 25 ms of weights to read, and as much again for the arithmetic of some 60 tokens.
    return RooflineSteps(
        base_ms=25.0, request_ms=0.3, token_ms=0.6, knee_tokens=16.0, draft_ms=1.5, draft_request_ms=0.02
    )


class EngineModel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A simulated engine.

    At most `max_batch` requests run, further ones wait. `residual_ms` is what a step costs more at K=0 while a drafter
    is loaded. `lengths` None: every answer goes on to its max-tokens. `kv_tokens` is what the KV cache holds; it is
    shown, and turns nobody away. `nature` draws the prompts' own lengths and acceptance: the same number, the same
    prompts. The default is a mid-sized dense model whose speculation pays below some twenty requests.
    """

    name: str = "simulated"
    steps: StepTimes = field(default_factory=_typical)
    residual_ms: float = 0.0
    prefill: Prefill = Prefill(request_ms=1.0, token_ms=0.02)
    max_batch: int = 256
    kv_tokens: int = 1 << 20
    noise: Noise = Noise()
    acceptance: Acceptance = Acceptance()
    lengths: Lengths | None = None
    nature: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError for an engine that runs nobody."""
        if self.max_batch < 1 or self.kv_tokens < 1 or not 0 <= self.residual_ms < math.inf:
            raise ValueError("max_batch and kv_tokens must be 1 or more, residual_ms 0 or more")

    def step_ms(self, batch: int, k: int, *, drafter: bool) -> float:
        """A step's length without prefill and noise, in ms; 0 where nobody decodes. `drafter`: is one loaded?"""
        if not batch:
            return 0.0
        return self.steps.step_ms(batch, k) + (self.residual_ms if drafter and not k else 0.0)

    def check_k(self, k: int, flag: str = "--k") -> None:
        """Raises `UsageError`, which names `flag`, where this engine can't draft `k` tokens."""
        why = f"{k} is not from 0 to 64" if not 0 <= k <= 64 else self.steps.why_not(k)
        if why is not None:
            raise UsageError(f"{flag} {k}: {why}")


def read_model(path: Path) -> EngineModel:
    """The model of a JSON file; fields that it doesn't name have their defaults.

    Raises:
        UsageError: the file can't be read, is no JSON, or a field is unknown or out of range.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=EngineModel)
    except OSError as error:
        raise UsageError(f"--model {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise UsageError(f"--model {path}: {error}") from None
