"""Policies under a load that varies: a table, and a drawing of which K each used when."""

from __future__ import annotations

import csv
import io
import string

import msgspec

from breakeven.options import Format
from breakeven.report.grid import Head, aligned, number, piped
from breakeven.sim.contest import Contest, Entry

__all__ = ["render_contest"]

_HEADS = (
    Head("", "policy", left=True),
    Head("", "tokens"),
    Head("", "tok/s"),
    Head("", "/best static"),
    Head("", "regret %"),
    Head("", "switches"),
    Head("", "probing %"),
)
_BARS = "▁▂▃▄▅▆▇█"
_DIGITS = string.digits + string.ascii_lowercase


def render_contest(contest: Contest, form: Format) -> str:
    """The contest in the given form, ending in a newline; table and Markdown have the drawing under them."""
    if form == "json":
        return msgspec.json.format(msgspec.json.encode(contest), indent=2).decode() + "\n"
    if form == "csv":
        return _csv(contest)
    rows = [_cells(entry) for entry in contest.entries]
    lines = aligned(_HEADS, rows)[1:] if form == "table" else piped(_HEADS, rows)
    drawing = _drawing(contest)
    if form == "markdown":
        drawing = ["```", *drawing, "```"]
    return "\n".join([*lines, "", *drawing, "", *_notes(contest)]) + "\n"


def _cells(entry: Entry) -> list[str]:
    return [
        entry.name,
        str(entry.tokens),
        number(entry.tokens_per_s),
        f"{entry.of_best_static:.3f}",
        f"{100 * entry.regret:.1f}",
        str(entry.switches),
        f"{100 * entry.probe_share:.2f}",
    ]


def _notes(contest: Contest) -> list[str]:
    faults = [f"{entry.name}: {entry.faults}" for entry in contest.entries if entry.faults]
    return [
        f"{contest.profile}, {contest.seconds:g} s: the best K kept all the time is {contest.best_static}; regret is "
        "against whoever knows the model.",
        *(f"faults of {text}" for text in faults),
    ]


def _drawing(contest: Contest) -> list[str]:
    """The load as bars, and under it each policy's K, a digit (10 and more: a letter) a part of the time."""
    low, high = min(contest.loads), max(contest.loads)
    bars = "".join(_BARS[round((load - low) / (high - low or 1) * (len(_BARS) - 1))] for load in contest.loads)
    title = f"load {low:.0f} to {high:.0f}"
    width = max(len(title), *(len(entry.name) + 2 for entry in contest.entries))
    rows = [
        f"{f'{entry.name} K'.ljust(width)}  " + "".join(_DIGITS[min(k, len(_DIGITS) - 1)] for k in entry.ks)
        for entry in contest.entries
    ]
    return [f"{title.ljust(width)}  {bars}", *rows]


def _csv(contest: Contest) -> str:
    out = io.StringIO()
    names = ("name", "tokens", "tokens_per_s", "of_best_static", "regret", "switches", "probe_share")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([getattr(entry, name) for name in names] for entry in contest.entries)
    return out.getvalue()
