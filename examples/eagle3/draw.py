"""The picture and the table by kind in docs/eagle3.md, from a comparison. Needs breakeven and matplotlib.

Usage: draw.py COMPARISON PICTURE.svg

The first arm is the reference. A kind's ratio is of decode rates: tokens after the first arrival, over the time from
first to last, of all its requests at a load.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from breakeven.decide.turns import decoding
from breakeven.runs import read_run

Rates = dict[tuple[str, float], float]


def rates(run: Path) -> Rates:
    """Decode rate of one arm by kind and load."""
    found = read_run(run)
    loads = {level.plan.index: level.plan.concurrency for level in found.levels}
    records: dict[tuple[str, float], list[Any]] = defaultdict(list)
    for record in found.requests:
        if record.phase == "measured" and record.outcome == "ok":
            records[record.kind, loads[record.level]].append(record)
    sums = {key: decoding(own) for key, own in records.items()}
    return {key: own.tokens.sum() / own.ns.sum() for key, own in sums.items()}


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
        print(f"| {name}, C | " + " | ".join(kinds) + " |\n| ---: |" + " ---: |" * len(kinds))
        for load in loads:
            shown = [own[kind, load] / base[kind, load] if (kind, load) in own else np.nan for kind in kinds]
            print(f"| {load:g} | " + " | ".join(f"{value:.2f}" for value in shown) + " |")
        for kind in kinds:
            here = [load for load in loads if (kind, load) in own and (kind, load) in base]
            ratios = [own[kind, load] / base[kind, load] for load in here]
            panels[1 + arm].plot(here, ratios, marker="o", label=kind)
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
