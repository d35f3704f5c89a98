"""Records made by hand, so that every number that should come out of them is known beforehand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from breakeven.records import ClientCost, LevelPlan, LevelRecord, RequestRecord

MS = 1_000_000
S = 1_000_000_000

QUIET = ClientCost(cpu_s=1.0, wall_s=60.0, chunks=1000, lag_ms={"p50": 0.1, "p99": 0.5, "max": 2.0})


def request(
    number: int = 0,
    arrivals: Iterable[tuple[float, int]] = (),
    *,
    sent_s: float = 0.0,
    end_s: float | None = None,
    **fields: Any,
) -> RequestRecord:
    """A request that ended well; `arrivals` are (ms after sent, tokens), and it ends with the last one."""
    sent_ns = round(sent_s * S)
    stamped = [(round(at_ms * MS), tokens) for at_ms, tokens in arrivals]
    last_ns = sent_ns + (stamped[-1][0] if stamped else 0)
    known: dict[str, Any] = {
        "id": number,
        "level": 0,
        "phase": "measured",
        "prompt": f"prompt-{number}",
        "kind": "chat",
        "max_tokens": 512,
        "due_ns": sent_ns,
        "sent_ns": sent_ns,
        "end_ns": last_ns if end_s is None else round(end_s * S),
        "arrivals": stamped,
        "output_tokens": sum(tokens for _, tokens in stamped),
        "tokens_from": "chunks",
        "chunks": len(stamped),
        "outcome": "ok",
        "finish_reason": "length",
    }
    if stamped:
        known |= {"first_ns": sent_ns + stamped[0][0], "last_ns": last_ns}
    return RequestRecord(**(known | fields))


def level_record(opened_s: float | None = 0.0, closed_s: float | None = 60.0, **fields: Any) -> LevelRecord:
    """A level of C=1 whose client was idle, with a window from 0 to 60 s; `fields` are the plan's and the record's."""
    plan = {"index": 0, "run": 0, "concurrency": 1, "max_tokens": 512}
    asked = {name: fields.pop(name) for name in LevelPlan.__struct_fields__ if name in fields}
    known: dict[str, Any] = {
        "plan": LevelPlan(**(plan | asked)),
        "started_ns": 0,
        "opened_ns": None if opened_s is None else round(opened_s * S),
        "closed_ns": None if closed_s is None else round(closed_s * S),
        "ended_ns": 70 * S,
        "ended_by": "duration",
        "client": QUIET,
    }
    return LevelRecord(**(known | fields))


def steady_stream(
    *, concurrency: int = 1, seconds: float = 60.0, e2e_s: float = 2.0, step_ms: float = 50.0, **fields: Any
) -> list[RequestRecord]:
    """Slots that decode one token a step without a pause, back to back, over a time."""
    steps = round(e2e_s * 1e3 / step_ms)
    arrivals = [((i + 1) * step_ms, 1) for i in range(steps)]
    return [
        request(slot * 10_000 + i, arrivals, sent_s=i * e2e_s, **fields)
        for slot in range(concurrency)
        for i in range(round(seconds / e2e_s))
    ]
