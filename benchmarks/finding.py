"""How soon `--find` has the break-even that a grid finds, and how often it is right.

    python benchmarks/finding.py --so-far FILE [--runs 1000] [--seed 1]

Simulated are turns of two arms around a known curve: log throughputs with noise of their own, on a machine whose speed
wanders, and how long a turn takes. Curves are those of the simulated engine's step times and of two plain shapes,
scaled so that their break-even lies where it was drawn, evenly on the log scale. Each run measures one curve three
times: by a grid of doubling loads with the turns that `breakeven compare` gives them by default, by a search that is
asked for the width that the grid had, and by a search that is asked for 10 %. FILE gets a line a run and is gone on
with. docs/statistics.md has the figures.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import Struct, structs
from numpy.typing import NDArray

from breakeven.alternation import TURNOVERS
from breakeven.decide import band
from breakeven.decide.blocks import Pace, Search, Stop
from breakeven.decide.breakeven import BreakEven, break_even
from breakeven.decide.find import next_for_break_even
from breakeven.decide.ratio import NoRatio, Ratio, paired
from breakeven.decide.student import t_quantile
from breakeven.options import CompareOptions
from breakeven.sim.steps import RooflineSteps

#: The log of other over reference at a load.
Gain = Callable[[float], float]
FloatArray = NDArray[np.float64]

GRID = (1, 2, 4, 8, 16, 32, 64, 128)
#: Of each arm, as many as `breakeven compare` makes by default.
TURNS = 2 * {field.name: field.default for field in structs.fields(CompareOptions)}["cycles"]
LOWEST, HIGHEST = 1.5, 100.0
TOKENS = 512
WARM_UP = 5


class World(NamedTuple):
    """What is measured: the arms' steps (ms for a token of a request), the truth, and what disturbs.

    `noise` is the standard deviation of a pair's log ratio at C = 10 and grows with a power of the load; the machine's
    speed goes up and down by `swing` (of its logarithm) in `period_s`.
    """

    reference_ms: Gain
    gain: Gain
    truth: float
    noise: float
    growth: float
    swing: float
    period_s: float
    phase: float

    def latency_s(self, load: float, arm: int) -> float:
        return self.reference_ms(load) * math.exp(-arm * self.gain(load)) * TOKENS / 1e3

    def turn_s(self, load: float, arm: int) -> float:
        """Ramp, window and drain, with requests of one length."""
        latency_s = self.latency_s(load, arm)
        return 2 * latency_s + max(TURNOVERS[1], TURNOVERS[0] * latency_s)


class Bench:
    """Takes turns at loads, as `alternation` does, and keeps the time."""

    def __init__(self, world: World, rng: np.random.Generator) -> None:
        self._world, self._rng = world, rng
        self.now_s = 0.0
        self._rates: dict[int, tuple[list[float], list[float]]] = {}
        self._took_s: dict[int, float] = {}

    def measure(self, load: int, turns: int) -> None:
        rates, began_s = self._rates.setdefault(load, ([], [])), self.now_s
        for _ in range(turns):
            first = len(rates[0]) == 0
            for arm in (0, 1) if len(rates[0]) % 2 == 0 else (1, 0):
                if first:
                    self.now_s += math.ceil(WARM_UP / load) * self._world.latency_s(load, arm)
                rates[arm].append(self._turn(load, arm))
        self._took_s[load] = self._took_s.get(load, 0.0) + self.now_s - began_s

    def _turn(self, load: int, arm: int) -> float:
        world = self._world
        turn_s = world.turn_s(load, arm)
        swing = world.swing * math.sin(2 * math.pi * (self.now_s + turn_s / 2) / world.period_s + world.phase)
        self.now_s += turn_s
        noise = world.noise * (load / 10) ** world.growth / math.sqrt(2)
        return load / world.latency_s(load, arm) * math.exp(swing + noise * self._rng.standard_normal())

    def seen(self) -> dict[int, Ratio | NoRatio]:
        return {load: paired(*rates) for load, rates in sorted(self._rates.items())}

    def pace(self) -> Pace:
        return Pace({load: took_s / len(self._rates[load][0]) for load, took_s in self._took_s.items()})

    @property
    def turns(self) -> int:
        return sum(len(reference) for reference, _ in self._rates.values())

    def answer(self) -> BreakEven:
        return break_even({float(load): ratio for load, ratio in self.seen().items()})


def draw(rng: np.random.Generator) -> World:
    """A curve of one of three families, and what disturbs."""
    wanted = math.exp(rng.uniform(math.log(LOWEST), math.log(HIGHEST)))
    family = rng.integers(3)
    if family == 0:
        reference_ms, gain = engine(wanted, rng)
    else:
        steps = roofline(rng)
        reference_ms = lambda load: steps.step_ms(load, 0)  # type: ignore[arg-type]  # noqa: E731
        shape = smooth if family == 1 else kinked
        gain = shape(wanted, rng.uniform(0.1, 0.6), rng.uniform(0.1, 0.4), rng.uniform(0.5, 1.5))
    return World(
        reference_ms=reference_ms,
        gain=gain,
        truth=crossing(gain),
        noise=rng.uniform(0.02, 0.06),
        growth=rng.uniform(-0.15, 0.15),
        swing=rng.uniform(0.0, 0.1),
        period_s=rng.uniform(1800, 7200),
        phase=rng.uniform(0, 2 * math.pi),
    )


def crossing(gain: Gain) -> float:
    """Where the gain is 0: as `sim.truth` has it, on straight lines between whole loads."""
    after = next(load for load in range(2, 1000) if gain(load) < 0)
    before, last = gain(after - 1), gain(after)
    return (after - 1) * math.exp(math.log(after / (after - 1)) * before / (before - last))


def roofline(rng: np.random.Generator) -> RooflineSteps:
    base_ms = rng.uniform(10, 40)
    return RooflineSteps(
        base_ms=base_ms,
        request_ms=base_ms * rng.uniform(0, 0.02),
        token_ms=base_ms * rng.uniform(0.005, 0.04),
        knee_tokens=rng.uniform(4, 64),
        draft_ms=base_ms * rng.uniform(0.02, 0.1),
        draft_request_ms=base_ms * rng.uniform(0, 0.001),
    )


def engine(truth: float, rng: np.random.Generator) -> tuple[Gain, Gain]:
    """An engine's step times, its loads stretched so that drafts stop paying at `truth`."""
    while True:
        steps, k, accepted = roofline(rng), int(rng.choice([1, 2, 3, 5])), rng.uniform(0.4, 0.9)
        tokens = sum(accepted**i for i in range(k + 1))

        def gain(load: float, steps: RooflineSteps = steps, k: int = k, tokens: float = tokens) -> float:
            return math.log(tokens * steps.step_ms(load, 0) / steps.step_ms(load, k))  # type: ignore[arg-type]

        if gain(0.5) > 0.02 and gain(5000) < -0.02:
            break
    low, high = 0.5, 5000.0
    while high / low > 1.0001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gain(middle) > 0 else (low, middle)
    stretch = low / truth
    return (
        lambda load: steps.step_ms(load * stretch, 0),
        lambda load: gain(load * stretch),
    )


def smooth(truth: float, top: float, bottom: float, width: float) -> Gain:
    """From a gain to a loss, most of the way within a factor of exp(4 widths)."""
    shift = math.log(truth) - width * math.log(top / bottom)
    return lambda load: top - (top + bottom) / (1 + math.exp(-(math.log(load) - shift) / width))


def kinked(truth: float, top: float, bottom: float, width: float) -> Gain:
    """The same in three straight lines."""
    slope = (top + bottom) / (4 * width)
    return lambda load: min(top, max(-bottom, slope * (math.log(truth) - math.log(load))))


class Outcome(Struct, frozen=True):
    """One run of one way to measure: how long it took, the half width of the crossing's interval on log load (None
    without one), whether it holds the truth, whether the search says that it has what was asked for."""

    seconds: float
    half: float | None
    covers: bool | None
    reached: bool
    turns: int
    looks: int
    kind: str


class Run(Struct, frozen=True):
    seed: int
    truth: float
    grid: Outcome
    matched: Outcome | None
    own: Outcome


def by_grid(world: World, rng: np.random.Generator) -> Outcome:
    bench = Bench(world, rng)
    for load in GRID:
        bench.measure(load, TURNS)
    return outcome(bench, world.truth, reached=True, looks=1)


def by_search(world: World, search: Search, rng: np.random.Generator) -> Outcome:
    bench, looks = Bench(world, rng), 0
    while True:
        chosen = next_for_break_even(bench.seen(), search, bench.pace())
        if isinstance(chosen, Stop):
            return outcome(bench, world.truth, reached=chosen.reached, looks=looks)
        bench.measure(chosen.load, chosen.turns)
        looks += 1


def outcome(bench: Bench, truth: float, *, reached: bool, looks: int) -> Outcome:
    found = bench.answer()
    two_sided = [(each.low, each.high) for each in found.crossings if each.low and each.high]
    low, high = two_sided[0] if len(two_sided) == 1 else (None, None)
    # What is said with one end only is judged too: the truth has to lie beyond it.
    ends = [(each.low or 0.0, each.high or math.inf) for each in found.crossings]
    return Outcome(
        seconds=bench.now_s,
        half=math.log(high / low) / 2 if low and high else None,
        covers=any(below <= truth <= above for below, above in ends) if ends else None,
        reached=reached,
        turns=bench.turns,
        looks=looks,
        kind=found.kind,
    )


def run(seed: int) -> Run:
    world = draw(np.random.default_rng([seed, 0]))
    grid = by_grid(world, np.random.default_rng([seed, 1]))
    matched = None
    if grid.half is not None:
        matched = by_search(world, Search(precision=grid.half), np.random.default_rng([seed, 2]))
    return Run(seed, world.truth, grid, matched, by_search(world, Search(), np.random.default_rng([seed, 3])))


def table(runs: Sequence[Run]) -> str:
    """The figures in Markdown."""
    ways = {
        "grid": [(one, one.grid) for one in runs],
        "search for the grid's width": [(one, one.matched) for one in runs if one.matched],
        "search for 10 %": [(one, one.own) for one in runs],
    }
    lines = [
        "| way | runs | interval, % of runs | covered % | half width %, median | seconds, median | share of the grid's,"
        " median (quartiles) | within half, % | turns | looks |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, found in ways.items():
        given = [each for _, each in found if each.covers is not None]
        halves = [each.half for _, each in found if each.half is not None]
        shares = [each.seconds / one.grid.seconds for one, each in found]
        quartiles = " to ".join(f"{value:.2f}" for value in np.quantile(shares, (0.25, 0.75)))
        lines.append(
            f"| {name} | {len(found)} | {100 * len(halves) / len(found):.1f} | "
            f"{100 * sum(bool(each.covers) for each in given) / max(1, len(given)):.1f} | {100 * median(halves):.1f} | "
            f"{median(each.seconds for _, each in found):.0f} | {median(shares):.2f} ({quartiles}) | "
            f"{100 * sum(share <= 0.5 for share in shares) / len(shares):.0f} | "
            f"{median(each.turns for _, each in found):g} | {median(each.looks for _, each in found):g} |"
        )
    return "\n".join(lines)


def in_less_time() -> None:
    """Quantiles at a tenth of a degree of freedom, and weights, are kept: they would be nine tenths of the time."""
    weights: dict[tuple[bytes, bytes, int], FloatArray] = {}
    exact = band.interpolation

    def interpolation(x: FloatArray, at: FloatArray, reach: int) -> FloatArray:
        key = x.tobytes(), at.tobytes(), reach
        if key not in weights:
            weights[key] = exact(x, at, reach)
        return weights[key]

    rounded = cache(lambda p, df: t_quantile(p, round(df, 1)))
    for name, faster in (("t_quantile", rounded), ("interpolation", interpolation)):
        setattr(band, name, faster)


def main() -> None:
    in_less_time()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--so-far", type=Path, required=True, help="one line a run; runs that it has are not made again"
    )
    args = parser.parse_args()
    decoder = msgspec.json.Decoder(Run)
    done = [decoder.decode(line) for line in args.so_far.read_bytes().splitlines()] if args.so_far.exists() else []
    made = {one.seed for one in done}
    with args.so_far.open("ab") as file:
        for seed in range(1_000_000 * args.seed, 1_000_000 * args.seed + args.runs):
            if seed not in made:
                done.append(run(seed))
                file.write(msgspec.json.encode(done[-1]) + b"\n")
                file.flush()
    print(table(done))


if __name__ == "__main__":
    main()
