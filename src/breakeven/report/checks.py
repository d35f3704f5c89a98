"""Checks that failed in arms of a comparison, in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from breakeven.decide.atload import ArmAtLoad
from breakeven.report.table import MEANING

__all__ = ["failed_checks"]


def failed_checks(loads: Iterable[tuple[str, Sequence[ArmAtLoad]]]) -> list[str]:
    """Each check once, with its meaning, the arms and the loads; `loads` has names and arms."""
    found: defaultdict[str, defaultdict[tuple[str, str], list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, arms in loads:
        for arm in arms:
            for check, turns in arm.failed_checks.items():
                if check != "degenerate":  # which has its own warning
                    of = f" ({turns} of {arm.turns} turns)" if arm.turns > 1 else ""
                    found[check][arm.arm, of].append(name)
    return [
        f"{check}: {MEANING[check]}\n"
        + "; ".join(f"{arm} at {', '.join(loads)}{of}" for (arm, of), loads in where.items())
        for check, where in found.items()
    ]
