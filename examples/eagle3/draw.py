"""The picture and the table by kind in docs/eagle3.md, from a comparison. Needs breakeven and matplotlib.

Usage: draw.py COMPARISON PICTURE.svg

The first arm is the reference. A kind's ratio is of decode rates: tokens after the first arrival, over the time from
first to last, of its requests in each turn; the mean over pairs of turns with its 95 % interval.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from breakeven.decide.breakeven import break_even
from breakeven.decide.ratio import Ratio, paired
from breakeven.decide.turns import decoding
from breakeven.decide.words import break_even_sentence
from breakeven.runs import read_run

#: By kind and load: of each turn, in order.
Rates = dict[tuple[str, float], list[float]]


def rates(run: Path) -> Rates:
    """Decode rates of one arm."""
    found = read_run(run)
    records: dict[tuple[str, int], list[Any]] = defaultdict(list)
    for record in found.requests:
        if record.phase == "measured" and record.outcome == "ok":
            records[record.kind, record.level].append(record)
    rates: Rates = defaultdict(list)
    for level in found.levels:
        for kind in {record.kind for record in found.requests}:
            own = decoding(records[kind, level.plan.index])
            rates[kind, level.plan.concurrency].append(own.tokens.sum() / own.ns.sum() if len(own.ns) else 0.0)
    return rates


def ratios(base: Rates, own: Rates, kind: str) -> dict[float, Ratio]:
    """A kind's ratio at each load where both arms answered it."""
    found = {}
    for load in sorted(load for name, load in own if name == kind):
        both = [pair for pair in zip(base[kind, load], own[kind, load], strict=True) if all(pair)]
        ratio = paired([a for a, _ in both], [b for _, b in both])
        if isinstance(ratio, Ratio):
            found[load] = ratio
    return found


def shown(ratio: Ratio | None) -> str:
    """With its interval."""
    return f"{ratio.value:.2f} ({ratio.interval().low:.2f} to {ratio.interval().high:.2f})" if ratio else "-"


def main() -> None:
    """Draws, and prints the table."""
    directory, picture = map(Path, sys.argv[1:])
    comparison = json.loads((directory / "comparison.json").read_text())
    reference, *others = (arm["name"] for arm in comparison["arms"])
    base = rates(directory / reference)
    loads = [load["load"] for load in comparison["loads"]]
    figure, panels = plt.subplots(1, 1 + len(others), figsize=(4 * (1 + len(others)), 3.4), sharey=True)
    for arm, name in enumerate(others):
        found = [load["versus"][arm]["throughput"] for load in comparison["loads"]]
        values = np.array([[each["value"], each["ci95"]["low"], each["ci95"]["high"]] for each in found])
        errors = np.abs(values[:, 1:] - values[:, :1]).T
        panels[0].errorbar(loads, values[:, 0], yerr=errors, marker="o", capsize=3, label=name)
        own = rates(directory / name)
        kinds = sorted({kind for kind, _ in own})
        print(f"| {name}, C | " + " | ".join(f"{load:g}" for load in loads) + " | |")
        print("| --- |" + " --- |" * (len(loads) + 1))
        for kind in kinds:
            here = ratios(base, own, kind)
            sentence = break_even_sentence(break_even(here), reference=reference, other=name)
            print(f"| {kind} | " + " | ".join(shown(here.get(load)) for load in loads) + f" | {sentence} |")
            panels[1 + arm].plot(list(here), [each.value for each in here.values()], marker="o", label=kind)
        panels[1 + arm].set_title(f"{name}, decode rate by kind")
    panels[0].set_title(f"tokens a second over {reference}, 95 %")
    for panel in panels:
        panel.axhline(1, color="grey", linewidth=1)
        panel.set_xscale("log", base=2)
        panel.set_xticks(loads, [f"{load:g}" for load in loads])
        panel.set_xlabel("requests in flight")
        panel.legend(fontsize="small", frameon=False)
    figure.tight_layout()
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    main()
