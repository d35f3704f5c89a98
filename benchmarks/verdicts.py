"""How often the verdicts are right, by simulation.

    python benchmarks/verdicts.py [--repeats 2000] [--seed 1] [--only PART]

Simulated are log ratios of pairs of visits at each load, with independent noise around a known curve over log load, as
`decide.ratio.paired` makes them of ABBA blocks; for knees the log throughputs of visits, for quantiles latencies of
requests that resemble their neighbours. docs/statistics.md has the figures.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from breakeven.decide.breakeven import BreakEven, break_even
from breakeven.decide.knee import KNEE_SHARE, knee
from breakeven.decide.quantiles import paired_quantiles
from breakeven.decide.ratio import NoRatio, Ratio, log_mean, paired
from breakeven.decide.student import t_quantile
from breakeven.decide.verdict import DELTA, judge, longer

FloatArray = NDArray[np.float64]
#: The true log ratio over log load.
Curve = Callable[[FloatArray], FloatArray]

DOUBLING = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
PUBLISHED = (1.0, 2.0, 5.0, 10.0, 30.0, 70.0, 100.0, 250.0)
#: Per load, how much noisier its pairs are than `noise` says.
PROFILES: dict[str, Sequence[float]] = {
    "equal": [1.0] * 8,
    "grows x4": np.geomspace(0.5, 2.0, 8).tolist(),
    "one x3": [1.0] * 4 + [3.0] + [1.0] * 3,
}


def smooth(break_even_load: float, width: float = 1.0) -> Curve:
    """From +57 % to -26 %, most of it within a factor of exp(4 widths) of the load."""
    top, bottom = 0.45, -0.3
    shift = math.log(break_even_load) - width * math.log(top / -bottom)
    return lambda x: top + (bottom - top) / (1 + np.exp(-(x - shift) / width))


def kinked(break_even_load: float, width: float = 1.0) -> Curve:
    """The same in straight lines."""
    return lambda x: np.clip(0.3 / width * (math.log(break_even_load) - x), -0.3, 0.45)


def measured(
    curve: Curve, loads: Sequence[float], noise: Sequence[float], pairs: int, rng: np.random.Generator
) -> dict[float, Ratio | NoRatio]:
    """What is measured of a curve: at each load so many pairs with their noise (standard deviation of a log ratio)."""
    means = curve(np.log(loads))
    drawn = np.exp(means[:, None] + np.array(noise)[:, None] * rng.standard_normal((len(loads), pairs)))
    return {load: paired(np.ones(pairs).tolist(), row.tolist()) for load, row in zip(loads, drawn, strict=True)}


class Found(NamedTuple):
    """How break-evens came out: shares of all runs, and the median of high / low."""

    counted: float
    covered: float
    one_sided_right: float
    wrong_kind: float
    width: float


def judge_break_evens(results: Sequence[tuple[float, BreakEven]]) -> Found:
    """Against the true load of each run, whose true shape is `pays_below`."""
    counted = [(truth, found.crossings[0]) for truth, found in results if found.kind == "pays_below"]
    one_sided = [(truth, found) for truth, found in results if found.kind in ("pays_up_to", "costs_from")]
    covered = [(c.low or 0.0) <= truth <= (c.high or math.inf) for truth, c in counted]
    right = [(f.crossings[0].low or 0) <= truth <= (f.crossings[0].high or math.inf) for truth, f in one_sided]
    wrong = [f.kind not in ("pays_below", "pays_up_to", "costs_from", "cant_tell", "partly") for _, f in results]
    widths = [(c.high or math.inf) / (c.low or 1.0) for _, c in counted]
    return Found(
        len(counted) / len(results),
        float(np.mean(covered)) if covered else math.nan,
        float(np.mean(right)) if right else math.nan,
        float(np.mean(wrong)),
        float(np.median(widths)) if widths else math.nan,
    )


def simulate_break_evens(
    shape: Callable[[float], Curve],
    loads: Sequence[float],
    noise: Sequence[float],
    pairs: int,
    repeats: int,
    seed: int,
) -> Found:
    """Runs with break-evens drawn evenly over log load between the second and the last load but one."""
    rng, results = np.random.default_rng(seed), []
    for truth in np.exp(rng.uniform(math.log(loads[1]), math.log(loads[-2]), repeats)):
        results.append((float(truth), break_even(measured(shape(float(truth)), loads, noise, pairs, rng))))
    return judge_break_evens(results)


def print_break_evens(repeats: int, seed: int) -> None:
    """Coverage by shape, loads, noise and pairs."""
    print(
        "| curve | loads | noise % | profile | pairs | counted % | covered % | one-sided right % | wrong % | high/low |"
    )
    print("| --- | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    shapes = {"smooth": smooth, "kinked": kinked}
    grids = {"doubling": DOUBLING, "published": PUBLISHED}
    cases = [(0.03, "equal", 4), (0.03, "equal", 8), (0.03, "equal", 12), (0.03, "grows x4", 8), (0.03, "one x3", 8)]
    cases += [(0.01, "equal", 8), (0.1, "equal", 8)]
    rows = [(shape, grid, *case) for shape in shapes for grid in grids for case in cases]
    for shape, grid, noise, profile, pairs in rows:
        spread = [noise * factor for factor in PROFILES[profile]]
        f = simulate_break_evens(shapes[shape], grids[grid], spread, pairs, repeats, seed)
        print(
            f"| {shape} | {grid} | {100 * noise:g} | {profile} | {pairs} | {100 * f.counted:.0f} | "
            f"{100 * f.covered:.1f} | {100 * f.one_sided_right:.1f} | {100 * f.wrong_kind:.1f} | {f.width:.2f} |",
            flush=True,
        )


#: Loads at most a factor of sqrt 2 apart, as far as whole numbers go.
CLOSE = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 11.0, 16.0, 23.0, 32.0, 45.0, 64.0)
#: Curves without a break-even, with two, and with one or none inside the noise.
SHAPES: dict[str, tuple[Curve, Sequence[float]]] = {
    "+20 % to +8 %": (lambda x: 0.18 - 0.02 * x, DOUBLING),
    "-8 % to -18 %": (lambda x: -0.08 - 0.02 * x, DOUBLING),
    "hump, doubling loads": (lambda x: 0.2 - 0.12 * (x - math.log(8)) ** 2, DOUBLING),
    "hump, close loads": (lambda x: 0.2 - 0.12 * (x - math.log(8)) ** 2, CLOSE),
    "+1 % to -1 %": (lambda x: 0.01 - 0.004 * x, DOUBLING),
    "equal": (np.zeros_like, DOUBLING),
}


def print_kinds(repeats: int, seed: int) -> None:
    """What is said of curves of other shapes."""
    print("| curve | noise of a pair % | answers % |\n| --- | ---: | --- |")
    for name, (curve, loads) in SHAPES.items():
        for noise in (0.01, 0.03):
            rng = np.random.default_rng(seed)
            runs = (measured(curve, loads, [noise] * len(loads), 8, rng) for _ in range(repeats))
            kinds = Counter(break_even(run).kind for run in runs)
            shares = ", ".join(f"{kind} {100 * count / repeats:.1f}" for kind, count in kinds.most_common())
            print(f"| {name} | {100 * noise:g} | {shares} |", flush=True)


def false_claims(profile: str, pairs: int, repeats: int, seed: int, noise: float = 0.03) -> tuple[float, float]:
    """Two equal arms over eight loads: how often any difference is quoted, and would be without Holm."""
    rng, spread = np.random.default_rng(seed), [noise * factor for factor in PROFILES[profile]]
    quoted = alone = 0
    for _ in range(repeats):
        judged = judge(measured(np.zeros_like, DOUBLING, spread, pairs, rng)).values()
        quoted += any(j.verdict in ("faster", "slower") for j in judged)
        alone += any(j.alone in ("faster", "slower") for j in judged)
    return quoted / repeats, alone / repeats


def print_verdicts(repeats: int, seed: int) -> None:
    """False differences between equal arms, false sameness at the border, and the power at given precisions."""
    print("| equal arms, 8 loads | pairs | a difference quoted % | without Holm % |\n| --- | ---: | ---: | ---: |")
    for profile in PROFILES:
        for pairs in (3, 4, 8, 12):
            quoted, alone = false_claims(profile, pairs, repeats, seed)
            print(f"| {profile} | {pairs} | {100 * quoted:.1f} | {100 * alone:.1f} |", flush=True)
    print("\n| ratio | half width % | pairs | same % | faster % | slower % | undecided % |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for ratio, pairs in [(r, n) for r in (1.0, 1 + DELTA, 1 / (1 + DELTA)) for n in (4, 8, 12)]:
        for half in (0.005, 0.01, 0.02):
            print_one_load(ratio, half, pairs, repeats, seed)
    print("\n| loads | half width % | pairs | each of a true 5 % found % |\n| ---: | ---: | ---: | ---: |")
    for loads, half, pairs in [(n, h, p) for n in (1, 8) for h in (0.02, 0.025, 0.03) for p in (8, 12)]:
        share = power(DOUBLING[:loads], half, pairs, repeats, seed)
        print(f"| {loads} | {100 * half:g} | {pairs} | {100 * share:.1f} |", flush=True)


def noise_for(half_width: float, pairs: int) -> float:
    """The noise of a pair at which the 95 % interval of the ratio is so wide on average."""
    unit = paired([1.0] * pairs, np.exp(np.linspace(-1, 1, pairs)).tolist())
    assert isinstance(unit, Ratio)
    return half_width * math.sqrt(pairs) / t_quantile(0.975, unit.df)


def print_one_load(ratio: float, half: float, pairs: int, repeats: int, seed: int) -> None:
    """How often a load with a true ratio gets each verdict."""
    rng, noise = np.random.default_rng(seed), noise_for(half, pairs)
    curve: Curve = lambda x: np.full_like(x, math.log(ratio))  # noqa: E731
    verdicts = Counter(judge(measured(curve, (8.0,), [noise], pairs, rng))[8.0].verdict for _ in range(repeats))
    shares = " | ".join(f"{100 * verdicts[v] / repeats:.1f}" for v in ("same", "faster", "slower", "undecided"))
    print(f"| {ratio:.3f} | {100 * half:g} | {pairs} | {shares} |", flush=True)


def power(loads: Sequence[float], half: float, pairs: int, repeats: int, seed: int) -> float:
    """The share of loads, in claims over `loads` that are all 5 % faster, at which that is quoted."""
    rng, noise = np.random.default_rng(seed), noise_for(half, pairs)
    curve: Curve = lambda x: np.full_like(x, math.log(1.05))  # noqa: E731
    found = 0
    for _ in range(max(1, repeats // len(loads))):
        judged = judge(measured(curve, loads, [noise] * len(loads), pairs, rng))
        found += sum(j.verdict == "faster" for j in judged.values())
    return found / len(loads) / max(1, repeats // len(loads))


def print_longer(repeats: int, seed: int) -> None:
    """How often the predicted length decides a load that 8 pairs left open."""
    print("| true ratio | noise of a pair % | predicted to decide, of those left open % | decided after it % |")
    print("| ---: | ---: | ---: | ---: |")
    for ratio, noise in ((1.0, 0.03), (1.01, 0.03), (1.03, 0.04), (1.05, 0.08)):
        rng, left, told, decided = np.random.default_rng(seed), 0, 0, 0
        for _ in range(repeats):
            logs = math.log(ratio) + noise * rng.standard_normal(8)
            first = paired([1.0] * 8, np.exp(logs).tolist())
            assert isinstance(first, Ratio)
            if judge({1: first})[1].verdict != "undecided":
                continue
            left += 1
            more = longer(1.0, first).observations
            if more is None or more > 20000:
                continue
            told += 1
            logs = np.concatenate([logs, math.log(ratio) + noise * rng.standard_normal(more)])
            again = paired([1.0] * len(logs), np.exp(logs).tolist())
            decided += judge({1: again})[1].verdict != "undecided"
        print(f"| {ratio} | {100 * noise:g} | {100 * told / max(1, left):.0f} | {100 * decided / max(1, told):.0f} |")


def knee_coverage(
    loads: Sequence[float], half_load: float, noise: float, visits: int, repeats: int, seed: int
) -> tuple[Counter[str], float, float]:
    """Knees of an engine whose step takes a + b C: kinds, coverage of those found, median of high / low.

    Throughput is C / (a + b C), which reaches half of its limit at `half_load` = a / b. The truth is that curve's own.
    """
    rng, x = np.random.default_rng(seed), np.array(loads)
    means = np.log(x / (half_load + x))
    share = KNEE_SHARE * x[-1] / (half_load + x[-1])
    truth = half_load * share / (1 - share)
    kinds: Counter[str] = Counter()
    covered, widths = [], []
    for _ in range(repeats):
        drawn = np.exp(means[:, None] + noise * rng.standard_normal((len(x), visits)))
        found = knee({load: log_mean(row.tolist()) for load, row in zip(loads, drawn, strict=True)})
        kinds[found.kind] += 1
        if found.ci95:
            covered.append(found.ci95.low <= truth <= found.ci95.high)
            widths.append(found.ci95.high / found.ci95.low)
    return kinds, float(np.mean(covered)) if covered else math.nan, float(np.median(widths)) if widths else math.nan


def print_knees(repeats: int, seed: int) -> None:
    """Coverage by where the knee is, noise and visits."""
    print("| half of the limit at | noise % | visits | found % | at or above highest % | covered % | high/low |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for half_load in (1.0, 4.0, 30.0):
        for noise, visits in ((0.005, 8), (0.02, 4), (0.02, 8), (0.05, 8)):
            kinds, covered, width = knee_coverage(DOUBLING, half_load, noise, visits, repeats, seed)
            print(
                f"| {half_load:g} | {100 * noise:g} | {visits} | {100 * kinds['found'] / repeats:.0f} | "
                f"{100 * kinds['at_or_above_highest'] / repeats:.0f} | {100 * covered:.1f} | {width:.2f} |",
                flush=True,
            )


def quantile_coverage(p: float, pairs: int, requests: int, shared: float, repeats: int, seed: int) -> float:
    """How often the interval of a latency's quantile ratio (true value 1.1) holds it.

    A request's log latency has a standard deviation of 0.3, of which `shared` is common to all requests of a pair (the
    machine's state) and as much again to those of a visit.
    """
    rng, covered = np.random.default_rng(seed), 0
    for _ in range(repeats):
        machine = shared * rng.standard_normal((pairs, 1, 1))
        visit = shared * rng.standard_normal((pairs, 2, 1))
        own = math.sqrt(0.3**2 - 2 * shared**2) * rng.standard_normal((pairs, 2, requests))
        values = np.exp(machine + visit + own)
        found = paired_quantiles(list(values[:, 0]), list(1.1 * values[:, 1]), p)
        assert isinstance(found, Ratio)
        interval = found.interval()
        covered += interval.low <= 1.1 <= interval.high
    return covered / repeats


def print_quantiles(repeats: int, seed: int) -> None:
    """Coverage of ratios of p50 and p99 by pairs, requests a visit and how much they have in common."""
    print("| quantile | pairs | requests a visit | in common | covered % |\n| --- | ---: | ---: | ---: | ---: |")
    rows = [(p, n, r) for p in (0.5, 0.99) for n, r in ((4, 100), (8, 40), (8, 200), (12, 40))]
    for p, pairs, requests in rows:
        for shared in (0.0, 0.1):
            covered = quantile_coverage(p, pairs, requests, shared, repeats, seed)
            print(f"| p{100 * p:g} | {pairs} | {requests} | {shared} | {100 * covered:.1f} |", flush=True)


PARTS = {
    "break-even": print_break_evens,
    "kinds": print_kinds,
    "verdicts": print_verdicts,
    "longer": print_longer,
    "knee": print_knees,
    "quantiles": print_quantiles,
}


def main() -> None:
    """Prints all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=PARTS)
    args = parser.parse_args()
    for name, part in PARTS.items():
        if args.only in (None, name):
            started = time.perf_counter()
            print(f"## {name}\n")
            part(args.repeats, args.seed)
            print(f"\n{time.perf_counter() - started:.0f} s\n")


if __name__ == "__main__":
    main()
