"""A summary as a table for the terminal, Markdown, CSV or JSON."""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Callable, Sequence

import msgspec

from breakeven.measure.level import LevelSummary
from breakeven.measure.stats import Distribution
from breakeven.measure.summary import Summary
from breakeven.options import Format

__all__ = ["level_line", "render"]

_NONE = "-"


def render(summary: Summary, form: Format) -> str:
    """The summary in the given form, ending in a newline.

    Table and Markdown carry the findings of failed checks under the table; CSV has plain numbers, one level a row.
    """
    if form == "json":
        return msgspec.json.format(msgspec.json.encode(summary), indent=2).decode() + "\n"
    if form == "csv":
        return _csv(summary)
    header, rows = _cells(summary.levels)
    lines = _markdown(header, rows) if form == "markdown" else _aligned(header, rows)
    blocks = ["\n".join(lines), *_spread(summary), *_notes(summary.levels)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def level_line(level: LevelSummary) -> str:
    """One level in one line, for the moment when it ends."""
    requests = level.requests
    failed = f", {requests['failed']} failed" if requests["failed"] else ""
    return (
        f"C={level.load['concurrency']} max-tokens={level.load['max_tokens']}: {_throughput(level)} tok/s, "
        f"TTFT p50 {_number(level.ttft_ms.p50)} ms, TPOT p50 {_number(level.tpot_ms.p50)} ms, "
        f"{requests['ok']} ok{failed}; ended by {level.ended_by}"
    )


def _cells(levels: Sequence[LevelSummary]) -> tuple[list[str], list[list[str]]]:
    columns: list[tuple[str, Callable[[LevelSummary], str]]] = [
        ("C", lambda level: str(level.load["concurrency"])),
        ("max", lambda level: str(level.load["max_tokens"])),
        ("run", lambda level: str(level.run + 1)),
        ("tok/s", _throughput),
        ("tok/s/req", lambda level: _number(level.per_request_throughput.mean)),
        ("latency s mean", lambda level: _seconds(level.e2e_ms.mean)),
        ("p50", lambda level: _seconds(level.e2e_ms.p50)),
        ("p99", lambda level: _seconds(level.e2e_ms.p99)),
        ("TTFT ms p50", lambda level: _number(level.ttft_ms.p50)),
        ("p99", lambda level: _number(level.ttft_ms.p99)),
        ("TPOT ms p50", lambda level: _number(level.tpot_ms.p50)),
        ("p99", lambda level: _number(level.tpot_ms.p99)),
        ("accept", lambda level: _number((level.spec or {}).get("acceptance_length"))),
        ("ok", lambda level: str(level.requests["ok"])),
        ("failed", lambda level: str(level.requests["failed"])),
        ("notes", lambda level: " ".join(check.name for check in level.checks if not check.ok)),
    ]
    if len({level.load["max_tokens"] for level in levels}) < 2:
        columns = [column for column in columns if column[0] != "max"]
    if len({level.run for level in levels}) < 2:
        columns = [column for column in columns if column[0] != "run"]
    if all(level.spec is None for level in levels):
        columns = [column for column in columns if column[0] != "accept"]
    return [name for name, _ in columns], [[cell(level) for _, cell in columns] for level in levels]


def _aligned(header: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    last = len(header) - 1

    def line(cells: list[str]) -> str:
        padded = [c.ljust(w) if i == last else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "  ".join(padded).rstrip()

    return [line(header), *map(line, rows)]


def _markdown(header: list[str], rows: list[list[str]]) -> list[str]:
    rule = ["---:"] * (len(header) - 1) + ["---"]
    return [f"| {' | '.join(cells)} |" for cells in (header, rule, *rows)]


def _spread(summary: Summary) -> list[str]:
    if not summary.spread:
        return []
    lines = ["Between runs:"]
    for spread in summary.spread:
        value, load = spread.output_throughput, spread.load
        lines.append(
            f"  C={load['concurrency']} max-tokens={load['max_tokens']}: mean {_number(value.mean)} tok/s, "
            f"std {_number(value.std)}, {_number(value.min)} to {_number(value.max)} over {value.count} runs"
        )
    return ["\n".join(lines)]


def _notes(levels: Sequence[LevelSummary]) -> list[str]:
    """Each failed check once, with what was found at which load."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for level in levels:
        for check in level.checks:
            if not check.ok:
                found[check.name].append(f"C={level.load['concurrency']}: {check.detail}")
    return (
        ["\n".join(["Notes:", *(f"  {name}: {'; '.join(details)}" for name, details in found.items())])]
        if found
        else []
    )


def _csv(summary: Summary) -> str:
    rows = [_flat(level) for level in summary.levels]
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _flat(level: LevelSummary) -> dict[str, object]:
    throughput = level.output_throughput
    low, high = throughput.ci95 or (None, None)
    row: dict[str, object] = {
        **level.load,
        "run": level.run,
        "ok": level.requests["ok"],
        "failed": level.requests["failed"],
        "output_tokens": level.output_tokens,
        "output_throughput": throughput.value,
        "output_throughput_low": low,
        "output_throughput_high": high,
        "window_s": throughput.window_s,
        "in_flight": level.in_flight["mean"],
        "acceptance_length": (level.spec or {}).get("acceptance_length"),
    }
    for name in ("per_request_throughput", "e2e_ms", "ttft_ms", "tpot_ms", "itl_ms", "icl_ms"):
        values: Distribution = getattr(level, name)
        row |= {f"{name}_{part}": value for part, value in msgspec.structs.asdict(values).items()}
    row["ended_by"] = level.ended_by
    row["failed_checks"] = " ".join(check.name for check in level.checks if not check.ok)
    return row


def _throughput(level: LevelSummary) -> str:
    throughput = level.output_throughput
    if throughput.ci95 is None:
        return _number(throughput.value)
    low, high = throughput.ci95
    return f"{_number(throughput.value)} ±{_number((high - low) / 2)}"


def _seconds(milliseconds: float | None) -> str:
    return _NONE if milliseconds is None else f"{milliseconds / 1e3:.2f}"


def _number(value: float | None) -> str:
    """Three or four figures: more would be noise."""
    if value is None:
        return _NONE
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
