"""Small engines and loads, so that every number that should come out of them is known beforehand."""

from __future__ import annotations

from breakeven.load.prompts import Prompt, PromptSet
from breakeven.load.window import StopRule
from breakeven.records import LevelPlan
from breakeven.sim.level import Conditions
from breakeven.sim.model import Acceptance, EngineModel, Prefill
from breakeven.sim.steps import RooflineSteps, TableSteps

S = 1_000_000_000
MS = 1_000_000

KINDS = ("chat", "code", "maths", "json")
#: 64 prompts of 25 tokens each, four kinds in turn.
PROMPTS = PromptSet(
    source="test", prompts=tuple(Prompt(id=f"p{i}", kind=KINDS[i % 4], text="x" * 100) for i in range(64))
)

#: Steps of 20 ms whoever decodes, 5 ms more with a draft; prompts cost nothing; half of all drafts are right.
FLAT = EngineModel(
    steps=RooflineSteps(base_ms=20.0, draft_ms=5.0),
    prefill=Prefill(chunk_tokens=None),
    acceptance=Acceptance(default=(0.5,), decay=1.0),
)
#: Steps of a table: 20 ms + 1 ms a request without drafts, 24 ms + 4 ms a request with three.
CROSSING = EngineModel(
    steps=TableSteps(points=((1, 0, 21.0), (64, 0, 84.0), (1, 3, 28.0), (64, 3, 280.0))),
    prefill=Prefill(request_ms=1.0, token_ms=0.02),
    acceptance=Acceptance(default=(0.7, 0.6, 0.5)),
)


def level(concurrency: int = 1, max_tokens: int = 64, **fields: object) -> LevelPlan:
    """A closed level."""
    known: dict[str, object] = {"index": 0, "run": 0, "concurrency": concurrency, "max_tokens": max_tokens}
    return LevelPlan(**(known | fields))


def conditions(seconds: float = 30.0, seed: int = 0, **fields: object) -> Conditions:
    """Windows of some seconds."""
    return Conditions(PROMPTS, StopRule(duration_s=seconds), seed, **fields)
