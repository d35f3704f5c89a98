"""The picture and the table by kind in docs/eagle3.md, from a comparison. Needs breakeven and matplotlib.

Usage: draw.py COMPARISON [COMPARISON …] PICTURE.svg

Of a load that several comparisons of the same arms have, the last one counts. The first arm is the reference. A kind's
ratio is of decode rates: tokens after the first arrival, over the time from first to last, of its requests in a turn;
the mean over pairs of turns with its 95 % interval. It crosses 1 on a straight line of its logarithm over that of the
load.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from breakeven.decide.ratio import Ratio, paired
from breakeven.decide.turns import decoding
from breakeven.runs import read_run

#: By kind and load: of each turn, in order.
Rates = dict[tuple[str, float], list[float]]


def rates(directories: Sequence[Path], arm: str) -> Rates:
    """Decode rates of one arm; of a load that several directories have, those of the last."""
    found: Rates = {}
    for directory in directories:
        new = rates_of(directory / arm)
        loads = {load for _, load in new}
        found = {key: own for key, own in found.items() if key[1] not in loads} | new
    return found


def rates_of(run: Path) -> Rates:
    """Those of one run."""
    found = read_run(run)
    records: dict[tuple[str, int], list[Any]] = defaultdict(list)
    for record in found.requests:
        if record.phase == "measured" and record.outcome == "ok":
            records[record.kind, record.level].append(record)
    by_turn: Rates = defaultdict(list)
    for level in found.levels:
        for kind in {record.kind for record in found.requests}:
            own = decoding(records[kind, level.plan.index])
            by_turn[kind, level.plan.concurrency].append(own.tokens.sum() / own.ns.sum() if len(own.ns) else 0.0)
    return by_turn


def ratios(base: Rates, own: Rates, kind: str) -> dict[float, Ratio]:
    """A kind's ratio at each load where both arms answered it."""
    found = {}
    for load in sorted({load for name, load in base.keys() & own.keys() if name == kind}):
        both = [pair for pair in zip(base[kind, load], own[kind, load], strict=True) if all(pair)]
        ratio = paired([a for a, _ in both], [b for _, b in both])
        if isinstance(ratio, Ratio):
            found[load] = ratio
    return found


def shown(ratio: Ratio | None) -> str:
    """With its interval."""
    return f"{ratio.value:.2f} ({ratio.interval().low:.2f} to {ratio.interval().high:.2f})" if ratio else "-"


def crossing(found: dict[float, Ratio]) -> str:
    """The load at which a kind's ratio falls to 1, in words where that lies outside the loads."""
    for (below, a), (above, b) in pairwise(sorted(found.items())):
        if a.log > 0 >= b.log:
            share = a.log / (a.log - b.log)
            return f"{below ** (1 - share) * above**share:.1f}"
    return f"below {min(found):g}" if found[min(found)].log <= 0 else f"above {max(found):g}"


def main() -> None:
    """Draws, and prints the table."""
    *directories, picture = map(Path, sys.argv[1:])
    comparisons = [json.loads((each / "comparison.json").read_text()) for each in directories]
    reference, *others = (arm["name"] for arm in comparisons[0]["arms"])
    base = rates(directories, reference)
    measured = {load["load"]: load["versus"] for comparison in comparisons for load in comparison["loads"]}
    loads = sorted(measured)
    figure, panels = plt.subplots(1, 1 + len(others), figsize=(4 * (1 + len(others)), 3.4), sharey=True)
    for arm, name in enumerate(others):
        found = [measured[load][arm]["throughput"] for load in loads]
        values = np.array([[each["value"], each["ci95"]["low"], each["ci95"]["high"]] for each in found])
        errors = np.abs(values[:, 1:] - values[:, :1]).T
        panels[0].errorbar(loads, values[:, 0], yerr=errors, marker="o", capsize=3, label=name)
        own = rates(directories, name)
        kinds = sorted({kind for kind, _ in own})
        print(f"| {name}, C | " + " | ".join(f"{load:g}" for load in loads) + " | crosses 1 at |")
        print("| --- |" + " --- |" * (len(loads) + 1))
        for kind in kinds:
            here = ratios(base, own, kind)
            print(f"| {kind} | " + " | ".join(shown(here.get(load)) for load in loads) + f" | {crossing(here)} |")
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
