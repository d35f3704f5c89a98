"""A verification as tables for the terminal, Markdown, CSV or JSON; under the tables the verdict."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from breakeven.decide.atload import ArmAtLoad, Compared
from breakeven.decide.holding import AtLevel, LevelState
from breakeven.decide.turns import How
from breakeven.decide.verify import Verification, VerifiedLoad
from breakeven.measure.stats import Interval
from breakeven.options import Format
from breakeven.report.checks import failed_checks
from breakeven.report.grid import NONE, Head, aligned, block, number, piped

__all__ = ["render_verification"]

_WIDTH = 110
_HOW: dict[How, str] = {"pairs": "over turns at each load", "sweeps": "over sweeps that took turns", "batches": ""}
_STATES: dict[LevelState, str] = {
    "holds": "yes",
    "loses": "no",
    "close": "can't tell",
    "open": "too wide",
    "unknown": NONE,
}

_Column = tuple[Head, Callable[[VerifiedLoad], str]]


def render_verification(found: Verification, form: Format) -> str:
    """The verification in the given form, ending in a newline.

    CSV has at each load one row for each static arm and one for the best of them (`best`).
    """
    if form == "json":
        return msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n"
    if form == "csv":
        return _csv(found)
    lay = piped if form == "markdown" else aligned
    tables = ["\n".join(lay(*table)) for table in (_envelope_table(found), _static_table(found))]
    verdict = f"{found.holding.sentence[0].upper()}{found.holding.sentence[1:]}."
    if found.holding.sentence.startswith(found.tuned):  # a name stays as it is
        verdict = f"{found.holding.sentence}."
    answer = f"**{verdict}**" if form == "markdown" else textwrap.fill(verdict, _WIDTH)
    notes = [*found.warnings, *_no_ratios(found), *failed_checks((load.name, load.arms) for load in found.loads)]
    listed = [block("Notes:", notes, form)] if notes else []
    return "\n\n".join([*tables, textwrap.fill(_legend(found), _WIDTH), answer, *listed]) + "\n"


def _envelope_table(found: Verification) -> tuple[Sequence[Head], Sequence[Sequence[str]]]:
    within = f"within {100 * found.holding.margin:g} %"
    against = f"{found.tuned}/best"
    columns: list[_Column] = [
        (Head("", "C"), lambda load: f"{load.load:g}"),
        (Head("tok/s", found.tuned), lambda load: _rate(load.arms[-1])),
        (Head("best", "static arm", left=True), lambda load: " or ".join(load.envelope.best) or NONE),
        (Head(against, "ratio"), lambda load: _ratio(load.envelope)),
        (Head(against, "95 %"), lambda load: _interval(load.envelope.ci95)),
        (Head(against, within, left=True), lambda load: _STATES[load.envelope.state]),
    ]
    drafted: list[_Column] = [
        (Head("drafted", "a draft"), lambda load: number(load.drafting.per_draft)),
        (Head("drafted", "a step"), lambda load: number(load.drafting.per_step)),
        (Head("drafted", "by schedule"), lambda load: number(load.drafting.expected)),
    ]
    columns += [column for column in drafted if any(column[1](load) != NONE for load in found.loads)]
    heads, cells = zip(*columns, strict=True)
    rows = [[cell(load) for cell in cells] for load in found.loads]
    mean = found.holding.mean
    if mean is not None and len(rows) > 1:
        end = ["all", "", "geometric mean", f"{mean:.3f}", _interval(found.holding.mean_ci95)]
        rows.append([*end, *[""] * (len(heads) - len(end))])
    return heads, rows


def _static_table(found: Verification) -> tuple[Sequence[Head], Sequence[Sequence[str]]]:
    """A row for each load and static arm: many arms would not fit side by side."""
    heads = [
        Head("", "C"),
        Head("", "static arm", left=True),
        Head("", "tok/s"),
        Head(f"{found.tuned}/static arm", "ratio"),
        Head(f"{found.tuned}/static arm", "95 %"),
        Head(f"{found.tuned}/static arm", "verdict", left=True),
    ]
    rows = []
    for load, arm, compared in _each_static(found):
        verdict = NONE if compared.why_not else compared.verdict
        rows.append([f"{load.load:g}", arm.arm, _rate(arm), _ratio(compared), _interval(compared.ci95), verdict])
    return heads, rows


def _each_static(found: Verification) -> Iterator[tuple[VerifiedLoad, ArmAtLoad, Compared]]:
    for load in found.loads:
        for arm in load.arms[:-1]:
            yield load, arm, load.static[arm.arm]


def _legend(found: Verification) -> str:
    return (
        f"Ratios with 95 % intervals, {_HOW[found.how]}. The best static arm is chosen on one half of the turns and "
        f"compared on the other, both ways. Within {100 * found.holding.margin:g} %: whether the ratio is surely above "
        f"{1 - found.holding.margin:g}, surely below it (Holm over the loads), or neither."
    )


def _no_ratios(found: Verification) -> list[str]:
    texts = [
        f"no ratio of {found.tuned} to {arm.arm} at {load.name}: {compared.why_not.detail}"
        for load, arm, compared in _each_static(found)
        if compared.why_not
    ]
    return list(dict.fromkeys(texts))


def _rate(arm: ArmAtLoad) -> str:
    half = 0.0 if arm.ci95 is None else (arm.ci95.high - arm.ci95.low) / 2
    return f"{number(arm.throughput)}{f' ±{number(half)}' if half else ''}"


def _ratio(compared: Compared | AtLevel) -> str:
    return NONE if compared.value is None else f"{compared.value:.3f}"


def _interval(inside: Interval | None) -> str:
    return NONE if inside is None else f"{inside.low:.3f} to {inside.high:.3f}"


def _csv(found: Verification) -> str:
    rows = [row for load in found.loads for row in (*_static_cells(load), _best_cells(load))]
    out = io.StringIO()
    writer = csv.DictWriter(out, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _static_cells(load: VerifiedLoad) -> Iterator[dict[str, Any]]:
    for arm in load.arms[:-1]:
        compared = load.static[arm.arm]
        verdict = None if compared.why_not else compared.verdict
        yield _cells(load, arm.arm, arm, compared, verdict)


def _best_cells(load: VerifiedLoad) -> dict[str, Any]:
    return _cells(load, "best", None, load.envelope, load.envelope.state)


def _cells(
    load: VerifiedLoad, against: str, arm: ArmAtLoad | None, ratio: Compared | AtLevel, verdict: str | None
) -> dict[str, Any]:
    tuned, drafted = load.arms[-1], load.drafting
    return {
        "load": f"{load.load:g}",
        "against": against,
        "best": " ".join(load.envelope.best),
        "output_throughput": arm.throughput if arm else None,
        "tuned_output_throughput": tuned.throughput,
        "ratio": ratio.value,
        "ratio_low": ratio.ci95.low if ratio.ci95 else None,
        "ratio_high": ratio.ci95.high if ratio.ci95 else None,
        "verdict": verdict,
        "p_holm": ratio.p_holm,
        "n": ratio.n,
        "why_not": ratio.why_not.reason if ratio.why_not else None,
        "drafted_per_draft": drafted.per_draft,
        "drafted_per_step": drafted.per_step,
        "scheduled_per_step": drafted.expected,
        "agrees": drafted.agrees,
    }
