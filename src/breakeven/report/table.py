"""A summary as a table for the terminal, Markdown, CSV or JSON."""

from __future__ import annotations

import csv
import io
import operator
import string
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from breakeven.measure.level import LevelSummary
from breakeven.measure.stats import Distribution
from breakeven.measure.summary import RunSpread, Summary
from breakeven.options import Format
from breakeven.report.grid import NONE, Head, aligned, block, number, piped

__all__ = ["MEANING", "level_line", "render"]

MEANING = {
    "cut_short": "requests that were still running are not in the latencies: those lean to short answers",
    "failures": "they are in no latency, and what is refused at once lightens the load of the rest",
    "in_flight": "tok/s is that of a lower load",
    "late": "the load was not what it says: the client was behind, or --max-in-flight held requests back",
    "backlog": "the server can't hold this rate: waiting grows without end, and so do latencies",
    "engine_in_flight": "somebody else uses the server, or a proxy before it queues",
    "steady": "tok/s holds the start and the end, where the server is not full: too low",
    "drift": "the server's state changed within the window: tok/s is no steady number",
    "client": "the client was too busy to refill slots in time: the load and tok/s are too low",
    "shared_cpu": "the client takes time from the server beside it: tok/s is too low",
    "token_total": "every number of tokens is a guess, about four characters each, and all tok/s with it",
    "token_times": "ITL, TPOT and the window's edges rest on a guess",
    "token_counts": "one of the server's two counts is wrong, and tok/s with it",
    "degenerate": "a repeating text flatters speculation",
    "first_arrival": "hidden reasoning, or a proxy that buffers: TTFT and TPOT are not what a user sees",
    "cache": "what a prefix cache knows costs less to read: TTFT is too low; --unique defeats it",
    "preemptions": "work was thrown away and done twice: the server's memory is too small for this load",
    "clock": "arrivals around the step may be stamped wrong",
}
"""Per check, what its failure does to the numbers, and the mend where there is one."""


class _Column(NamedTuple):
    group: str
    name: str
    cell: Callable[[LevelSummary], str]
    left: bool = False


def render(summary: Summary, form: Format) -> str:
    """The summary in the given form, ending in a newline.

    Table and Markdown carry the findings of failed checks under the table; CSV has plain numbers, one level a row.
    """
    if form == "json":
        return msgspec.json.format(msgspec.json.encode(summary), indent=2).decode() + "\n"
    if form == "csv":
        return _csv(summary)
    if not summary.levels:
        return "nothing was measured\n"
    # A failed check stands in its level's row as a letter, and in words under the table.
    failed = dict.fromkeys(check.name for level in summary.levels for check in level.checks if not check.ok)
    keys = dict(zip(failed, string.ascii_letters, strict=False))
    columns = _columns(summary.levels, keys)
    heads = [Head(column.group, column.name, column.left) for column in columns]
    rows = [[column.cell(level) for column in columns] for level in summary.levels]
    lines = (piped if form == "markdown" else aligned)(heads, rows)
    listed = [("Between runs:", _spread(summary.spread)), ("Notes:", _notes(summary.levels, keys))]
    blocks = ["\n".join(lines), *(block(title, items, form) for title, items in listed if items)]
    return "\n\n".join(blocks) + "\n"


def level_line(level: LevelSummary) -> str:
    """One level in one line, for the moment when it ends."""
    requests = level.requests
    failed = f", {requests['failed']} failed" if requests["failed"] else ""
    notes = " ".join(check.name for check in level.checks if not check.ok)
    return (
        f"{level.name} max-tokens={level.load['max_tokens']}: {_throughput(level)} tok/s, "
        f"TTFT p50 {number(level.ttft_ms.p50)} ms, TPOT p50 {number(level.tpot_ms.p50)} ms, "
        f"{requests['ok']} ok{failed}; ended by {level.ended_by}{notes and f'; see {notes}'}"
    )


def _columns(levels: Sequence[LevelSummary], keys: Mapping[str, str]) -> list[_Column]:
    """The columns that say something about these levels; a failed check stands in `notes` as its letter."""

    def notes(level: LevelSummary) -> str:
        return " ".join(key for name, key in keys.items() if any(c.name == name and not c.ok for c in level.checks))

    columns = [
        _Column("", "C", lambda level: str(level.load["concurrency"])),
        _Column("", "load", lambda level: level.name),
        _Column("", "max", lambda level: str(level.load["max_tokens"])),
        _Column("", "run", lambda level: str(level.run + 1)),
        _Column("tok/s", "total", _throughput),
        _Column("tok/s", "a request", lambda level: number(level.per_request_throughput.mean)),
        _Column("latency s", "mean", lambda level: _seconds(level.e2e_ms.mean)),
        _Column("latency s", "p50", lambda level: _seconds(level.e2e_ms.p50)),
        _Column("latency s", "p99", lambda level: _seconds(level.e2e_ms.p99)),
        _Column("TTFT ms", "p50", lambda level: number(level.ttft_ms.p50)),
        _Column("TTFT ms", "p99", lambda level: number(level.ttft_ms.p99)),
        _Column("TPOT ms", "p50", lambda level: number(level.tpot_ms.p50)),
        _Column("TPOT ms", "p99", lambda level: number(level.tpot_ms.p99)),
        _Column("from due ms", "TTFT p99", lambda level: _from_due(level, "ttft_due_ms")),
        _Column("from due ms", "E2E p99", lambda level: _from_due(level, "e2e_due_ms")),
        _Column("", "in flight", lambda level: number(level.in_flight["mean"])),
        _Column("", "accept", lambda level: number((level.spec or {}).get("acceptance_length"))),
        _Column("", "ok", lambda level: str(level.requests["ok"])),
        _Column("", "failed", lambda level: str(level.requests["failed"])),
        _Column("", "notes", notes, left=True),
    ]
    is_closed = all(level.load["mode"] == "closed" for level in levels)
    silent = {
        "C": not is_closed,
        **dict.fromkeys(("load", "TTFT p99", "E2E p99", "in flight"), is_closed),
        "max": len({level.load["max_tokens"] for level in levels}) < 2,
        "run": len({level.run for level in levels}) < 2,
        "accept": all(level.spec is None for level in levels),
        "notes": not keys,
    }
    return [column for column in columns if not silent.get(column.name)]


def _spread(spreads: Sequence[RunSpread]) -> list[str]:
    return [
        f"{spread.name} max-tokens={spread.load['max_tokens']}: "
        f"mean {number(value.mean)} tok/s, std {number(value.std)}, "
        f"{number(value.min)} to {number(value.max)} over {value.count} runs"
        for spread in spreads
        for value in [spread.output_throughput]
    ]


def _notes(levels: Sequence[LevelSummary], keys: Mapping[str, str]) -> list[str]:
    """Each failed check once: what it taints, and under it what was found at which load; equal findings together."""
    names = _names(levels)
    items = []
    for check_name, key in keys.items():
        found: defaultdict[str, list[str]] = defaultdict(list)
        for level, name in zip(levels, names, strict=True):
            for check in level.checks:
                if check.name == check_name and not check.ok:
                    found[" ".join(check.detail.split())].append(name)
        everywhere = {detail: len(where) == len(levels) > 1 for detail, where in found.items()}
        findings = (
            f"{'all levels' if everywhere[detail] else ', '.join(where)}: {detail}" for detail, where in found.items()
        )
        items.append(f"{key}  {check_name}: {MEANING[check_name]}\n{'; '.join(findings)}")
    return items


def _names(levels: Sequence[LevelSummary]) -> list[str]:
    """What tells each level from the others, in a few characters."""
    lengths, runs = ({level.load["max_tokens"] for level in levels}, {level.run for level in levels})
    return [
        level.name
        + (f" max={level.load['max_tokens']}" if len(lengths) > 1 else "")
        + (f" run {level.run + 1}" if len(runs) > 1 else "")
        for level in levels
    ]


def _csv(summary: Summary) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_CSV)
    writer.writerows([cell(level) for cell in _CSV.values()] for level in summary.levels)
    return out.getvalue()


def _throughput(level: LevelSummary) -> str:
    throughput = level.output_throughput
    if throughput.ci95 is None:
        return number(throughput.value)
    low, high = throughput.ci95
    return f"{number(throughput.value)} ±{number((high - low) / 2)}"


def _from_due(level: LevelSummary, name: str) -> str:
    return NONE if level.open_loop is None else number(getattr(level.open_loop, name).p99)


def _seconds(milliseconds: float | None) -> str:
    return number(None if milliseconds is None else milliseconds / 1e3)


def _open_part(name: str, part: str) -> Callable[[LevelSummary], object]:
    path = operator.attrgetter(f"{name}.{part}")
    return lambda level: None if level.open_loop is None else path(level.open_loop)


_CSV: dict[str, Callable[[LevelSummary], object]] = {
    "mode": lambda level: level.load["mode"],
    "concurrency": lambda level: level.load.get("concurrency"),
    "rate": lambda level: level.load.get("rate"),
    "arrivals": lambda level: level.load.get("arrivals"),
    "speed": lambda level: level.load.get("speed"),
    "max_tokens": lambda level: level.load["max_tokens"],
    "run": lambda level: level.run,
    "ok": lambda level: level.requests["ok"],
    "failed": lambda level: level.requests["failed"],
    "output_tokens": lambda level: level.output_tokens,
    "output_throughput": lambda level: level.output_throughput.value,
    "output_throughput_low": lambda level: (level.output_throughput.ci95 or (None, None))[0],
    "output_throughput_high": lambda level: (level.output_throughput.ci95 or (None, None))[1],
    "window_s": lambda level: level.output_throughput.window_s,
    "in_flight": lambda level: level.in_flight["mean"],
    "acceptance_length": lambda level: (level.spec or {}).get("acceptance_length"),
    **{
        f"{name}_{part}": operator.attrgetter(f"{name}.{part}")
        for name in ("per_request_throughput", "e2e_ms", "ttft_ms", "tpot_ms", "itl_ms", "icl_ms")
        for part in Distribution.__struct_fields__
    },
    **{
        f"{name}_{part}": _open_part(name, part)
        for name in ("lateness_ms", "ttft_due_ms", "e2e_due_ms")
        for part in ("p50", "p99")
    },
    "ended_by": lambda level: level.ended_by,
    "failed_checks": lambda level: " ".join(check.name for check in level.checks if not check.ok),
}
