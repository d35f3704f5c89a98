"""A comparison as tables for the terminal, Markdown, CSV or JSON; under the tables the answer, in words."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from breakeven.decide.acceptance import NeededAcceptance
from breakeven.decide.atload import METRICS, ArmAtLoad, Compared, LoadComparison, Versus
from breakeven.decide.comparison import ArmSummary, Comparison
from breakeven.decide.lossless import Difference
from breakeven.decide.quantiles import P99_REQUESTS
from breakeven.decide.ratio import ROUNDING
from breakeven.decide.slo import SloLoad
from breakeven.decide.turns import How
from breakeven.decide.verdict import Verdict
from breakeven.decide.words import knee_words
from breakeven.options import Format
from breakeven.report.checks import failed_checks
from breakeven.report.comparison_csv import csv_of
from breakeven.report.grid import NONE, Head, aligned, block, number, piped

__all__ = ["render_comparison"]

_WIDTH = 110
#: Longer names of arms are shortened in the tables, so that two arms fit 120 columns.
_NAME = 7
_MOST_DIFFERENCES = 8
_MARKS: dict[Verdict, str] = {"faster": "+", "slower": "-", "same": "=", "undecided": "?"}
_HOW: dict[How, str] = {
    "pairs": "over pairs of turns at each load",
    "sweeps": "over sweeps that took turns",
    "batches": "between runs of their own",
}
_UNITS = {"closed": " requests in flight", "open": " requests a second", "trace": " times its speed"}


class _Row(NamedTuple):
    """A load of the table of one arm and the reference."""

    level: LoadComparison
    mine: ArmAtLoad
    its: ArmAtLoad
    versus: Versus


_Column = tuple[Head, Callable[[_Row], str]]


def render_comparison(comparison: Comparison, form: Format) -> str:
    """The comparison in the given form, ending in a newline. CSV has one row for each load and arm."""
    if form == "json":
        return msgspec.json.format(msgspec.json.encode(comparison), indent=2).decode() + "\n"
    if form == "csv":
        return csv_of(comparison)
    tables = [text for place in range(1, len(comparison.arms)) for text in _tables(comparison, place, form)]
    answers = [_answer(versus.sentence, form) for versus in comparison.versus]
    listed = [block(title, items, form) for title, items in _lists(comparison).items() if items]
    return "\n\n".join([*tables, _legend(comparison), *answers, *listed]) + "\n"


def _tables(comparison: Comparison, place: int, form: Format) -> Iterator[str]:
    """Throughput and latencies of one arm beside the reference."""
    rows = [_Row(level, level.arms[0], level.arms[place], level.versus[place - 1]) for level in comparison.loads]
    names = _short(comparison.arms[0].name), _short(comparison.arms[place].name)
    is_closed = comparison.mode == "closed"
    load: _Column = (
        Head("", "C" if is_closed else "load"),
        lambda row: f"{row.level.load:g}" if is_closed else row.level.name,
    )
    for columns in (_throughput_columns(rows, *names), _latency_columns(*names)):
        heads, cells = zip(load, *columns, strict=True)
        lay = piped if form == "markdown" else aligned
        yield "\n".join(lay(heads, [[cell(row) for cell in cells] for row in rows]))


def _throughput_columns(rows: Sequence[_Row], reference: str, other: str) -> list[_Column]:
    ratio = f"{other}/{reference}"
    columns: list[_Column] = [
        *_both("tok/s", reference, other, _rate),
        (Head(ratio, "ratio"), lambda row: _ratio(row.versus.throughput)),
        (Head(ratio, "95 %"), lambda row: _interval(row.versus.throughput)),
        (Head(ratio, "verdict", left=True), lambda row: _verdict(row.versus.throughput)),
    ]
    accept = _both("accept", reference, other, lambda arm: number(arm.acceptance_length))
    columns += [column for column in accept if any(column[1](row) != NONE for row in rows)]
    if any(row.versus.needed for row in rows):
        columns += [
            (Head("tokens a step", "has"), lambda row: number(row.versus.needed.have if row.versus.needed else None)),
            (Head("tokens a step", "needs"), lambda row: _needs(row.versus.needed)),
        ]
    columns += _both("ok", reference, other, lambda arm: str(arm.ok))
    if any(row.mine.failed or row.its.failed for row in rows):
        columns += _both("failed", reference, other, lambda arm: str(arm.failed))
    return columns


def _latency_columns(reference: str, other: str) -> list[_Column]:
    return [
        column
        for metric in METRICS
        if metric != "throughput"
        for name, statistic in [metric.split("_")]
        for column in (
            *_both(
                f"{name.upper()} {statistic} ms",
                reference,
                other,
                _quantile(name, statistic),
            ),
            (Head(f"{name.upper()} {statistic} ms", "ratio"), _marked(metric)),
        )
    ]


def _both(group: str, reference: str, other: str, cell: Callable[[ArmAtLoad], str]) -> list[_Column]:
    """A column for each of the two arms."""
    return [
        (Head(group, reference), lambda row: cell(row.mine)),
        (Head(group, other), lambda row: cell(row.its)),
    ]


def _quantile(name: str, statistic: str) -> Callable[[ArmAtLoad], str]:
    return lambda arm: number(getattr(getattr(arm, f"{name}_ms"), statistic))


def _rate(arm: ArmAtLoad) -> str:
    half = 0.0 if arm.ci95 is None else (arm.ci95.high - arm.ci95.low) / 2
    shown = f" ±{number(half)}" if half > ROUNDING * arm.throughput else ""
    return f"{number(arm.throughput)}{shown}"


def _ratio(compared: Compared) -> str:
    return NONE if compared.value is None else f"{compared.value:.3f}"


def _interval(compared: Compared) -> str:
    return NONE if compared.ci95 is None else f"{compared.ci95.low:.3f} to {compared.ci95.high:.3f}"


def _verdict(compared: Compared) -> str:
    return NONE if compared.why_not else compared.verdict


def _marked(metric: str) -> Callable[[_Row], str]:
    """A ratio with its verdict as a sign."""

    def cell(row: _Row) -> str:
        compared: Compared = getattr(row.versus, metric)
        if compared.value is None:
            return f"{NONE}  "
        return f"{compared.value:.2f} {' ' if compared.why_not else _MARKS[compared.verdict]}"

    return cell


def _needs(needed: NeededAcceptance | None) -> str:
    if needed is None:
        return NONE
    beyond = f" of {needed.most}" if needed.verdict == "out_of_reach" else ""
    return f"{number(needed.needed)}{beyond}"


def _legend(comparison: Comparison) -> str:
    ways = " and ".join(dict.fromkeys(_HOW[versus.how] for versus in comparison.versus))
    return textwrap.fill(
        f"Ratios with 95 % intervals, {ways}. Latencies: + better, - worse, = the same within "
        f"{100 * comparison.delta:g} %, ? undecided; without a sign there is no interval.",
        _WIDTH,
    )


def _answer(sentence: str, form: Format) -> str:
    return f"**{sentence}.**" if form == "markdown" else textwrap.fill(f"{sentence}.", _WIDTH)


def _lists(comparison: Comparison) -> dict[str, list[str]]:
    """What stands under the answer, by title; empty lists are left out."""
    reference = comparison.arms[0].name
    checks = failed_checks((level.name, level.arms) for level in comparison.loads)
    return {
        "By kind of prompts (decode rate):": [kind.sentence for versus in comparison.versus for kind in versus.kinds],
        "Latencies:": [
            f"{name}: {answer.sentence}"
            for versus in comparison.versus
            for name, answer in (("TPOT p50", versus.tpot), ("TTFT p50", versus.ttft))
        ],
        "Knee (95 % of the highest throughput):": [
            f"{arm.name}: {knee_words(arm.knee)}" for arm in comparison.arms if arm.knee
        ],
        f"Largest load that holds {', '.join(comparison.slos)}:": [
            f"{arm.name}: {_slo(arm.slo, _UNITS[comparison.mode])}" for arm in comparison.arms if arm.slo
        ],
        "Texts:": _texts(comparison),
        f"Configuration, beside {reference}:": [
            f"{arm.name}: {_differences(arm)}" for arm in comparison.arms if arm.differences
        ],
        "Notes:": [*comparison.warnings, *_no_verdicts(comparison), *checks],
    }


def _slo(found: SloLoad, unit: str) -> str:
    broken = "; ".join(
        f"{each.slo} is {NONE if each.value_ms is None else number(each.value_ms)} at {each.load:g}"
        for each in found.violations
    )
    rumours = "".join(
        f"; {slo.metric}_p99 rests on fewer than {P99_REQUESTS} requests at {', '.join(f'{load:g}' for load in loads)}"
        for slo, loads in found.rumours
    )
    if found.load is None:
        return f"not even the lowest load: {broken or 'nothing was measured'}{rumours}"
    if not found.violations:
        return f"{found.load:g}{unit} or more, the highest measured{rumours}"
    interval = f", 95 %: {found.ci95.low:.3g} to {found.ci95.high:.3g}" if found.ci95 else ""
    return f"{found.load:.3g}{unit} ({broken}){interval}{rumours}"


def _texts(comparison: Comparison) -> list[str]:
    found, reference = comparison.losslessness, comparison.arms[0].name
    if found.why_not:
        return [f"not compared: {found.why_not}"]
    lines = [f"{name} against {reference}: {_share(share)}" for name, share in found.between.items()]
    lines += [f"{name} against itself, in two passes: {_share(share)}" for name, share in found.within.items()]
    return [
        *lines,
        "batching changes the order of sums, and near ties (bf16) then pick another token: what differs between two "
        "passes of one arm is the yardstick for what differs between arms",
    ]


def _share(found: Difference) -> str:
    if found.share is None or found.ci95 is None:
        return "no answer to the same prompt at the same load"
    return (
        f"{found.differ} of {found.prompts} answers differ, {100 * found.share:.0f} % "
        f"(95 %: {100 * found.ci95.low:.0f} to {100 * found.ci95.high:.0f})"
    )


def _differences(arm: ArmSummary) -> str:
    shown = [
        f"{each.name} {_shown(each.other)} (there {_shown(each.reference)})"
        for each in arm.differences[:_MOST_DIFFERENCES]
    ]
    more = len(arm.differences) - len(shown)
    return "; ".join(shown) + (f"; and {more} more, in the JSON" if more else "")


def _shown(value: object) -> str:
    if value is None or value == "":
        return "none"
    return textwrap.shorten(str(value), _WIDTH, placeholder=" …")


def _no_verdicts(comparison: Comparison) -> list[str]:
    """Why ratios have no interval: each reason once, with its loads."""
    reasons: defaultdict[tuple[str, str, str], list[str]] = defaultdict(list)
    for level in comparison.loads:
        for versus in level.versus:
            for metric in METRICS:
                compared: Compared = getattr(versus, metric)
                if compared.why_not:
                    # Each load has another number of requests: what they have in common is the limit.
                    is_p99 = compared.why_not.reason == "few_requests" and metric.endswith("p99")
                    detail = f"a p99 needs {P99_REQUESTS} requests in each arm" if is_p99 else compared.why_not.detail
                    reasons[versus.arm, metric, detail].append(level.name)
    return [f"no verdict on {what}: {detail}" for what, detail in _joined(reasons, len(comparison.versus) > 1)]


def _joined(reasons: Mapping[tuple[str, str, str], Sequence[str]], many: bool) -> Iterator[tuple[str, str]]:
    """Metrics that lack an interval for the same reason at the same loads stand together."""
    together: defaultdict[tuple[str, str, tuple[str, ...]], list[str]] = defaultdict(list)
    for (arm, metric, detail), loads in reasons.items():
        together[arm, detail, tuple(loads)].append(
            metric.replace("_", " ").replace("tpot", "TPOT").replace("ttft", "TTFT")
        )
    for (arm, detail, loads), metrics in together.items():
        yield f"{', '.join(metrics)}{f' of {arm}' if many else ''} at {', '.join(loads)}", detail


def _short(name: str) -> str:
    """Names often differ at their ends: those stay."""
    return name if len(name) <= _NAME else f"{name[:3]}…{name[-3:]}"
