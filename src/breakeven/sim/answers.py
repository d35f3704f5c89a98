"""What a prompt gets for an answer: how long it is, and how far each draft along it would be right."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from breakeven.load.plan import PlannedRequest
from breakeven.load.prompts import Prompt
from breakeven.sim.model import EngineModel

__all__ = ["Answer", "Answers", "Nature", "nature_of", "survival"]

#: Of English text in today's vocabularies, about.
_CHARACTERS_PER_TOKEN = 4


class Nature(NamedTuple):
    """What is a prompt's own, in every run: its tokens, and its standard normal effects on length and acceptance."""

    input_tokens: int
    length: float
    acceptance: float


class Answer(NamedTuple):
    """One answer: its tokens, whether max-tokens cut it, and the source of its drafts' luck.

    `draw_runs(n)` draws for n steps how many tokens of a draft would be accepted, were it as long as can be: a shorter
    draft has the minimum of that and its own length, so that K doesn't change a request's luck.
    """

    input_tokens: int
    tokens: int
    is_cut: bool
    draw_runs: Callable[[int], list[int]]


def nature_of(model: EngineModel, prompt: Prompt) -> Nature:
    """A prompt's nature, a function of the model's `nature` and the prompt's id (without its tag)."""
    name = prompt.id.partition("#")[0]
    rng = random.Random(f"nature {model.nature} {name}")
    return Nature(max(1, len(prompt.as_text()) // _CHARACTERS_PER_TOKEN), rng.gauss(0, 1), rng.gauss(0, 1))


def survival(model: EngineModel, kind: str, k: int, effect: float) -> list[float]:
    """The probability that all of the first i draft tokens are accepted, for i from 1 to k.

    `effect` is added to the log odds of each position.
    """
    product, survived = 1.0, []
    for p in model.acceptance.positions(kind, k):
        product *= p if p in (0.0, 1.0) else 1 / (1 + math.exp(-math.log(p / (1 - p)) - effect))
        survived.append(product)
    return survived


class Answers:
    """Draws answers; `k` is the longest draft that there can be."""

    def __init__(self, model: EngineModel, k: int, rng: np.random.Generator) -> None:
        self._model, self._k, self._rng = model, k, rng
        self._natures: dict[str, Nature] = {}

    def draw(self, planned: PlannedRequest) -> Answer:
        """An answer to a request."""
        nature = self._natures.get(planned.prompt.id)
        if nature is None:
            nature = self._natures[planned.prompt.id] = nature_of(self._model, planned.prompt)
        tokens = self._length(nature)
        is_cut = tokens >= planned.max_tokens
        return Answer(nature.input_tokens, min(tokens, planned.max_tokens), is_cut, self._runs(planned, nature))

    def _length(self, nature: Nature) -> int:
        lengths = self._model.lengths
        if lengths is None:
            return 1 << 62
        own = lengths.request_sd * self._rng.standard_normal() if lengths.request_sd else 0.0
        return max(1, round(lengths.median_tokens * math.exp(lengths.prompt_sd * nature.length + own)))

    def _runs(self, planned: PlannedRequest, nature: Nature) -> Callable[[int], list[int]]:
        if not self._k:
            return _no_runs
        acceptance = self._model.acceptance
        own = acceptance.request_sd * self._rng.standard_normal() if acceptance.request_sd else 0.0
        survived = survival(self._model, planned.prompt.kind, self._k, acceptance.prompt_sd * nature.acceptance + own)
        below, rng = -np.array(survived), self._rng

        def draw(steps: int) -> list[int]:
            # Of a uniform u, the number of survival probabilities above it.
            runs: list[int] = np.searchsorted(below, -rng.random(steps)).tolist()
            return runs

        return draw


def _no_runs(steps: int) -> list[int]:
    return [0] * steps
