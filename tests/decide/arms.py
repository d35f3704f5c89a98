"""Arms of a comparison: simulated ones whose truth is known, and small ones made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import structs

from breakeven.decide.comparison import ArmRun
from breakeven.records import LevelPlan, LevelRecord, Manifest, RequestRecord, Turns
from breakeven.runs import Run
from breakeven.sim.model import EngineModel
from breakeven.sim.run import Arm, manifest_of, simulate_turns
from tests.measure.handmade import S, level_record, request
from tests.sim.handy import conditions

#: By load, for each turn the milliseconds that a token takes.
Steps = Mapping[float, Sequence[float]]

#: 40 requests of 20 tokens each a turn, one at a time.
_TOKENS, _REQUESTS = 20, 40


def alternated(
    model: EngineModel,
    loads: Sequence[int],
    *,
    ks: tuple[int, int] = (0, 3),
    names: tuple[str, str] = ("off", "on"),
    cycles: int = 2,
    seconds: float = 8.0,
    seed: int = 0,
) -> list[ArmRun]:
    """Two arms of one simulated engine, ABBA at each load on one machine."""
    arms, numbers = [Arm(model, k) for k in ks], [0, 0]
    turns = []
    for load in loads:
        visits = [0, 0]
        for arm in [0, 1, 1, 0] * cycles:
            turns.append((arm, LevelPlan(index=numbers[arm], run=visits[arm], concurrency=load, max_tokens=64)))
            numbers[arm] += 1
            visits[arm] += 1
    known = conditions(seconds, seed)
    runs = simulate_turns(arms, turns, known)
    found = []
    for place, name in enumerate(names):
        own = [run for run in runs if run.arm == place]
        manifest = manifest_of(name, arms[place], [run.level.plan for run in own], known, {}, version="1")
        manifest.turns = Turns(group="g", arm=name, how="pairs")
        records = [record for run in own for record in run.requests]
        found.append(ArmRun(name, f"runs/{name}", Run(manifest, records, [run.level for run in own], None)))
    return found


def manifest(name: str, levels: Sequence[LevelPlan], **fields: Any) -> Manifest:
    """A run's manifest; `target` and `flags` are merged into what is there."""
    target = {"url": f"http://{name}:8000", "engine": "vllm", "version": "0.32.0", "config": {}, "api": "chat"}
    known: dict[str, Any] = {
        "label": name,
        "breakeven_version": "1",
        "target": target | {"loopback": False} | fields.pop("target", {}),
        "model": "m",
        "flags": {"temperature": 0.0, "ramp": True} | fields.pop("flags", {}),
        "prompts": {"source": "built-in", "count": 4, "sha256": "abc"},
        "seed": 0,
        "levels": list(levels),
        "host": {"cpu": "a cpu", "cores": 2},
        "started": "2026-01-01T00:00:00+00:00",
    }
    return Manifest(**(known | fields))


def made(
    name: str, steps: Steps, *, how: Literal["pairs", "sweeps"] | None = "pairs", rate: bool = False, **fields: Any
) -> ArmRun:
    """An arm whose requests decode a token a step, one request after the other; rate 1000 / step tokens a second.

    Args:
        name: the arm's.
        steps: the turns by load.
        how: how it took turns; None for a run of its own.
        rate: whether loads are requests a second.
        fields: of the manifest; `each` is a function of a record that changes it, `level` fields of the levels.
    """
    each, level = fields.pop("each", lambda record: record), fields.pop("level", {})
    levels: list[LevelRecord] = []
    requests: list[RequestRecord] = []
    for load, turns in steps.items():
        for number, step_ms in enumerate(turns):
            plan = {"mode": "open", "rate": load, "arrivals": "poisson"} if rate else {"concurrency": int(load)}
            end_s = _REQUESTS * _TOKENS * step_ms / 1e3
            index = len(levels)
            levels.append(level_record(0.0, end_s, index=index, run=number, ended_ns=round(end_s * S), **plan, **level))
            requests += [each(record) for record in _stream(index, step_ms, first=len(requests))]
    plans = [each_level.plan for each_level in levels]
    turns_of = Turns(group="g", arm=name, how=how) if how else None
    return ArmRun(name, f"runs/{name}", Run(manifest(name, plans, turns=turns_of, **fields), requests, levels, None))


def _stream(level: int, step_ms: float, first: int) -> list[RequestRecord]:
    arrivals = [((i + 1) * step_ms, 1) for i in range(_TOKENS)]
    return [
        request(
            first + i,
            arrivals,
            sent_s=i * _TOKENS * step_ms / 1e3,
            level=level,
            prompt=f"p{i}",
            kind=("chat", "code")[i % 2],
        )
        for i in range(_REQUESTS)
    ]


def failing(record: RequestRecord) -> RequestRecord:
    """The same request, refused."""
    return structs.replace(
        record, arrivals=[], first_ns=None, last_ns=None, output_tokens=0, chunks=0, outcome="http_error", status=500
    )
