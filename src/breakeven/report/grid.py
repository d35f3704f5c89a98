"""Rows of text as an aligned table or as Markdown, and lists under it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from breakeven.options import Format

__all__ = ["NONE", "Head", "aligned", "block", "number", "piped"]

NONE = "-"
"""What stands where there is no number."""

#: Width of what stands under the table on a terminal.
_WIDTH = 110


class Head(NamedTuple):
    """A column's head; neighbours of one group share a line above."""

    group: str
    name: str
    left: bool = False


def aligned(heads: Sequence[Head], rows: Sequence[Sequence[str]]) -> list[str]:
    """Two lines of header, the groups above; each column as wide as its widest cell."""
    cells = [[head.name for head in heads], *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for group, members in groupby(range(len(heads)), lambda place: heads[place].group):
        own = list(members)  # a group's name may be wider than its columns
        widths[own[-1]] += max(0, len(group) - sum(widths[place] + 2 for place in own) + 2)
    groups, end = "", 0
    for before, head, width in zip(["", *(h.group for h in heads)], heads, widths, strict=False):
        if head.group and head.group != before:
            groups = groups.ljust(end) + head.group
        end += width + 2

    def line(row: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if head.left else cell.rjust(width)
            for cell, width, head in zip(row, widths, heads, strict=True)
        )
        return "  ".join(padded).rstrip()

    return [groups, *map(line, cells)]


def piped(heads: Sequence[Head], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table in Markdown."""
    header = [f"{head.group} {head.name}".strip() for head in heads]
    rule = ["---" if head.left else "---:" for head in heads]
    lines = [[cell.replace("|", "\\|") for cell in row] for row in (header, rule, *rows)]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def block(title: str, items: Sequence[str], form: Format) -> str:
    """A list under the table; items may have several lines."""
    if form == "markdown":
        return "\n".join([title, "", *("- " + item.replace("\n", "\n  ") for item in items)])
    wrapped = [
        textwrap.fill(
            line,
            _WIDTH,
            initial_indent="     " if number else "  ",
            subsequent_indent="     ",
            break_on_hyphens=False,  # names of arms and flags have them
        )
        for item in items
        for number, line in enumerate(item.splitlines())
    ]
    return "\n".join([title, *wrapped])


def number(value: float | None) -> str:
    """Three or four figures: more would be noise."""
    if value is None:
        return NONE
    size = abs(value)
    if size >= 1e7 or 0 < size < 1e-3:
        return f"{value:.2e}"
    digits = 0 if size >= 1000 else 1 if size >= 10 else 2 if size >= 0.1 or not size else 4
    return f"{value:.{digits}f}"
