"""How long a server has how many requests in flight: the load that a table is judged by."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from breakeven.errors import UsageError

__all__ = ["Profile", "profile_of", "read_profile"]

_IN_FLIGHT = ("in_flight", "requests_in_flight")
_WANTED = "its first line must be 'hour,requests_in_flight' or 'seconds,in_flight'"


class Profile(Struct, frozen=True, kw_only=True):
    """Shares of time by requests in flight.

    Attributes:
        source: where it is from.
        kind: hours of a day, a trace, or watched on a server.
        loads: requests in flight, rising; below 1 they are means over time: in so much of it there was one.
        shares: of the time, their sum is 1.
    """

    source: str
    kind: str
    loads: tuple[float, ...]
    shares: tuple[float, ...]

    @property
    def idle(self) -> float:
        """The share of time without a request."""
        return sum(share * max(0.0, 1 - load) for load, share in zip(self.loads, self.shares, strict=True))

    @property
    def mean(self) -> float:
        """Mean requests in flight."""
        return sum(share * load for load, share in zip(self.loads, self.shares, strict=True))


class _Row(NamedTuple):
    line: int
    at: float
    in_flight: float


def profile_of(source: str, kind: str, weighted: Iterable[tuple[float, float]]) -> Profile:
    """A profile from requests in flight and the time for which they were: one entry for each load."""
    total: dict[float, float] = {}
    for load, weight in weighted:
        total[load] = total.get(load, 0.0) + weight
    whole = math.fsum(total.values())
    loads = tuple(sorted(total))
    return Profile(source=source, kind=kind, loads=loads, shares=tuple(total[load] / whole for load in loads))


def read_profile(path: Path) -> Profile:
    """The profile of a CSV file.

    With the columns `hour,requests_in_flight` each row is an hour of the day, all of the same weight. With
    `seconds,in_flight` it is a trace: what a row says holds until the next row's time, and the last row only says when
    the trace ends.

    Raises:
        UsageError: the file can't be read, is no such CSV, or a value is missing, negative or out of order; the text
            names the line.
    """
    try:
        text = path.read_text("utf-8-sig")
    except OSError as error:
        raise UsageError(f"--profile {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--profile {path} is no text: {_WANTED}") from None
    name = f"--profile {path}"
    try:
        lines = list(csv.reader(text.splitlines()))
    except csv.Error as error:
        raise UsageError(f"{name} is no CSV: {error}") from None
    if not any(lines):
        raise UsageError(f"{name} is empty: {_WANTED}")
    head = [cell.strip().lower() for cell in lines[0]]
    if len(head) != 2 or head[0] not in ("hour", "seconds") or head[1] not in _IN_FLIGHT:
        raise UsageError(f"{name}: {_WANTED}, not {','.join(lines[0])[:60]!r}")
    rows = [_row(name, number, head, cells) for number, cells in enumerate(lines[1:], 2) if cells]
    if not rows:
        raise UsageError(f"{name} has no rows under its first line")
    weighted = _hours(name, rows) if head[0] == "hour" else _steps(name, rows)
    return profile_of(str(path), "hours" if head[0] == "hour" else "trace", weighted)


def _row(name: str, line: int, head: Sequence[str], cells: Sequence[str]) -> _Row:
    if len(cells) != 2:
        raise UsageError(f"{name}: line {line} has {len(cells)} values, not {head[0]} and {head[1]}")
    at, in_flight = (_value(name, line, column, cell) for column, cell in zip(head, cells, strict=True))
    return _Row(line, at, in_flight)


def _value(name: str, line: int, column: str, cell: str) -> float:
    if not cell.strip():
        raise UsageError(f"{name}: line {line}: {column} is missing")
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise UsageError(f"{name}: line {line}: {column} is {cell.strip()[:40]!r}, not a number from 0")
    return value


def _hours(name: str, rows: Sequence[_Row]) -> list[tuple[float, float]]:
    seen: dict[float, int] = {}
    for row in rows:
        if not (row.at < 24 and row.at == int(row.at)):
            raise UsageError(f"{name}: line {row.line}: hour is {row.at:g}, not one of 0 to 23")
        if row.at in seen:
            raise UsageError(f"{name}: line {row.line}: hour {row.at:g} is there already, in line {seen[row.at]}")
        seen[row.at] = row.line
    return [(row.in_flight, 1.0) for row in rows]


def _steps(name: str, rows: Sequence[_Row]) -> list[tuple[float, float]]:
    if len(rows) < 2:
        raise UsageError(f"{name} has one row: a trace needs two, the last one says when it ends")
    found = []
    for row, following in pairwise(rows):
        if following.at <= row.at:
            raise UsageError(f"{name}: line {following.line}: seconds must rise, {following.at:g} is after {row.at:g}")
        found.append((row.in_flight, following.at - row.at))
    return found
