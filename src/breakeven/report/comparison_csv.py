"""A comparison as CSV: one row for each load and arm, plain numbers, empty where there is none."""

from __future__ import annotations

import csv
import io
from typing import Any

from breakeven.decide.atload import METRICS, ArmAtLoad, Compared, LoadComparison, Versus
from breakeven.decide.comparison import Comparison

__all__ = ["csv_of"]


def csv_of(comparison: Comparison) -> str:
    """The rows; those of the reference have no ratios."""
    rows = [
        {"mode": comparison.mode, "load": f"{level.load:g}", "max_tokens": comparison.max_tokens}
        | _arm(arm)
        | _versus(level, arm)
        for level in comparison.loads
        for arm in level.arms
    ]
    out = io.StringIO()
    names = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _arm(arm: ArmAtLoad) -> dict[str, Any]:
    return {
        "arm": arm.arm,
        "turns": arm.turns,
        "ok": arm.ok,
        "failed": arm.failed,
        "output_throughput": arm.throughput,
        "output_throughput_low": arm.ci95.low if arm.ci95 else None,
        "output_throughput_high": arm.ci95.high if arm.ci95 else None,
        **{
            f"{name}_{statistic}": getattr(getattr(arm, name), statistic)
            for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
            for statistic in ("p50", "p99")
        },
        "acceptance_length": arm.acceptance_length,
        "tokens_per_step": arm.tokens_per_step,
        "repeating": arm.repeating,
        "failed_checks": " ".join(arm.failed_checks),
    }


def _versus(level: LoadComparison, arm: ArmAtLoad) -> dict[str, Any]:
    own = next((versus for versus in level.versus if versus.arm == arm.arm), None)
    cells: dict[str, Any] = {}
    for metric in METRICS:
        cells |= _compared(metric, None if own is None else getattr(own, metric))
    return cells | _needed(own)


def _compared(metric: str, compared: Compared | None) -> dict[str, Any]:
    ci95 = compared.ci95 if compared else None
    return {
        f"{metric}_ratio": compared.value if compared else None,
        f"{metric}_ratio_low": ci95.low if ci95 else None,
        f"{metric}_ratio_high": ci95.high if ci95 else None,
        f"{metric}_verdict": compared.verdict if compared and not compared.why_not else None,
        f"{metric}_why_not": compared.why_not.reason if compared and compared.why_not else None,
    }


def _needed(own: Versus | None) -> dict[str, Any]:
    needed = own.needed if own else None
    return {
        "needed_tokens_per_step": needed.needed if needed else None,
        "needed_verdict": needed.verdict if needed else None,
    }
