"""The table from batch size to draft length, as `schedule.json` keeps it.

An engine's process reads it too, so that nothing but the standard library is imported here. The file may be edited by
hand: whatever in it can't be used is named in one line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from breakeven.errors import UsageError

__all__ = ["MOST_K", "SCHEDULE_SCHEMA", "Border", "Level", "Limit", "Range", "Rate", "Schedule", "read_schedule"]

#: Version of the layout of schedule.json. History: 1, the first.
SCHEDULE_SCHEMA = "breakeven.schedule/1"
#: No engine drafts more in a row; a larger number is a slip of the hand.
MOST_K = 64

T = TypeVar("T")


@dataclass(frozen=True)
class Range:
    """Batches from `lo` to `hi`, both inclusive, draft `k` tokens."""

    lo: int
    hi: int
    k: int


@dataclass(frozen=True)
class Border:
    """The dead band between two ranges: the lower one is left at `up` requests or more, the upper at `down` or fewer.

    Between them the two draft lengths are within a percent of each other, or one request apart, so that a batch that
    wobbles around the border need not make the engine switch at each step.
    """

    down: int
    up: int


@dataclass(frozen=True)
class Rate:
    """Output tokens a second with the 95 % interval, None where there is none."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Level:
    """What was measured at one load: `batch` requests ran in the engine on average, `k` is what the table has there."""

    load: float
    batch: float
    k: int
    rates: dict[int, Rate]


@dataclass(frozen=True)
class Limit:
    """The batch beyond which throughput grows no more (the knee of the best arms), for the engine's largest batch.

    `kind` is that of `decide.knee.Knee`; `batch` None if nothing is known.
    """

    kind: str
    batch: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Which draft length belongs to which batch, for one model on one engine.

    Attributes:
        engine, engine_version, model: what was measured, as the server tells it; None where it doesn't.
        method: the drafter (`eagle3`, `ngram`), None where nobody tells.
        speculation: the speculative configuration of the arm with the largest K, by the engine's own names.
        ranges: contiguous, the first from 1; batches beyond the last one's end draft what it drafts.
        borders: one between every two neighbours; none in a file without them, then borders have no dead band.
        arms: by K the name of the arm that it was measured in.
        batch_from: whether batches are the engine's own count of running requests or the client's concurrency.
        measured_to: the largest batch that was measured; what the table says beyond it is extrapolated.
        levels: what was measured.
        limit: the knee.
        source: the directory of the runs.
        created: when, in ISO 8601.
    """

    model: str
    ranges: tuple[Range, ...]
    schema: str = SCHEDULE_SCHEMA
    engine: str | None = None
    engine_version: str | None = None
    method: str | None = None
    speculation: dict[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    borders: tuple[Border, ...] = ()
    arms: dict[int, str] = field(default_factory=dict)
    batch_from: str = "running"
    measured_to: float | None = None
    levels: tuple[Level, ...] = ()
    limit: Limit | None = None
    source: str = ""
    created: str = ""

    @property
    def max_k(self) -> int:
        """The largest draft length in the table."""
        return max(each.k for each in self.ranges)

    def k_at(self, batch: int) -> int:
        """The draft length for a batch, by the table alone."""
        return self.ranges[self.range_at(batch)].k

    def range_at(self, batch: int, before: int | None = None) -> int:
        """The index of the range for a batch.

        Args:
            batch: requests that decode, 0 or more.
            before: the range that is in use; it is left where the dead band ends. None: as the table says.
        """
        if before is None or not self.borders:
            return next((i for i, each in enumerate(self.ranges) if batch <= each.hi), len(self.ranges) - 1)
        at = before
        while at < len(self.borders) and batch >= self.borders[at].up:
            at += 1
        while at > 0 and batch <= self.borders[at - 1].down:
            at -= 1
        return at

    def check_model(self, model: str, where: str = "the schedule") -> None:
        """Raises `UsageError` where the schedule is for another model."""
        if model != self.model:
            raise UsageError(f"{where} is for the model {self.model}, not {model}: make one for it (breakeven tune)")

    def to_json(self) -> str:
        """The file's text."""
        text = asdict(self) | {"ranges": [[each.lo, each.hi, each.k] for each in self.ranges]}
        # Ranges as the engines write them, one a line: this is the part that people edit.
        rows = ",\n    ".join(json.dumps(row) for row in text.pop("ranges"))
        rest = json.dumps(text, indent=2)
        return rest[:2] + f'  "ranges": [\n    {rows}\n  ],\n' + rest[2:] + "\n"


def read_schedule(path: Path) -> Schedule:
    """The schedule of a file.

    Raises:
        UsageError: it can't be read, is no schedule, or something in it can't be used.
    """
    try:
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict) or found.get("schema") != SCHEDULE_SCHEMA:
        schema = found.get("schema") if isinstance(found, dict) else None
        raise UsageError(f"{path} is no schedule: its schema is {schema!r}, not {SCHEDULE_SCHEMA!r}")
    try:
        return _schedule(found)
    except (ValueError, TypeError, KeyError) as error:
        why = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"{path}: {why}") from None


def _schedule(found: Mapping[str, Any]) -> Schedule:
    model = found["model"]
    if not isinstance(model, str) or not model:
        raise ValueError("model must be a name")
    ranges = _ranges(found["ranges"])
    limit = found.get("limit")
    return Schedule(
        model=model,
        ranges=ranges,
        engine=_text(found, "engine"),
        engine_version=_text(found, "engine_version"),
        method=_text(found, "method"),
        speculation=dict(found.get("speculation") or {}),
        max_tokens=found.get("max_tokens"),
        borders=_borders(found.get("borders") or [], ranges),
        arms={int(k): str(name) for k, name in dict(found.get("arms") or {}).items()},
        batch_from=_text(found, "batch_from") or "running",
        measured_to=_number_or_none(found.get("measured_to"), "measured_to"),
        levels=_each(found.get("levels") or [], "levels", _level),
        limit=None if limit is None else Limit(**limit),
        source=_text(found, "source") or "",
        created=_text(found, "created") or "",
    )


def _ranges(found: Any) -> tuple[Range, ...]:
    ranges = _each(found, "ranges", _range)
    if not ranges:
        raise ValueError("ranges is empty: give at least [1, N, K]")
    wanted = 1
    for each in ranges:
        shown = f"[{each.lo}, {each.hi}, {each.k}]"
        if each.lo != wanted:
            raise ValueError(f"the range {shown} must begin at {wanted}: ranges have no gaps and begin at 1")
        if each.hi < each.lo:
            raise ValueError(f"the range {shown} ends before it begins")
        if not 0 <= each.k <= MOST_K:
            raise ValueError(f"the range {shown} has a K that is not from 0 to {MOST_K}")
        wanted = each.hi + 1
    return ranges


def _range(found: Any) -> Range:
    if not isinstance(found, list) or len(found) != 3 or not all(_is_whole(value) for value in found):
        raise ValueError(f"{json.dumps(found)} is not [first batch, last batch, K] in whole numbers")
    return Range(*found)


def _borders(found: Any, ranges: tuple[Range, ...]) -> tuple[Border, ...]:
    borders = _each(found, "borders", _border)
    if borders and len(borders) != len(ranges) - 1:
        raise ValueError(f"borders has {len(borders)} for {len(ranges)} ranges: give {len(ranges) - 1}, or none")
    for border, upper in zip(borders, ranges[1:], strict=False):
        if not border.down < upper.lo <= border.up:
            raise ValueError(
                f"the border at {upper.lo} needs down below it and up at or above it, not {border.down} and {border.up}"
            )
    return borders


def _border(found: Any) -> Border:
    if not isinstance(found, dict) or not all(_is_whole(found.get(name)) for name in ("down", "up")):
        raise ValueError(f"{json.dumps(found)} needs down and up in whole numbers")
    return Border(found["down"], found["up"])


def _level(found: Any) -> Level:
    if not isinstance(found, dict):
        raise ValueError(f"{json.dumps(found)} needs load, batch, k and rates")
    if not all(isinstance(rate, dict) for rate in dict(found["rates"]).values()):
        raise ValueError(f"the rates {json.dumps(found['rates'])} need a value each, with low and high where known")
    rates = {
        int(k): Rate(*(_number_or_none(rate.get(name), name) for name in ("value", "low", "high")))  # type: ignore[arg-type]
        for k, rate in dict(found["rates"]).items()
    }
    if not all(rate.value for rate in rates.values()) or not _is_whole(found["k"]):
        raise ValueError(f"the level {found['load']} needs a K and tokens a second above 0")
    return Level(_number(found["load"], "load"), _number(found["batch"], "batch"), found["k"], rates)


def _each(found: Any, name: str, read: Callable[[Any], T]) -> tuple[T, ...]:
    if not isinstance(found, list):
        raise ValueError(f"{name} must be a list")
    return tuple(read(each) for each in found)


def _text(found: Mapping[str, Any], name: str) -> str | None:
    value = found.get(name)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name} must be a text")
    return value


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be a number from 0, not {json.dumps(value)}")
    return float(value)


def _number_or_none(value: Any, name: str) -> float | None:
    return None if value is None else _number(value, name)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
