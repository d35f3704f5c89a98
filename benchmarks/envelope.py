"""How often the interval of tuned / envelope holds the true ratio, and how far off the estimate is, by simulation.

    python benchmarks/envelope.py [--repeats 2000] [--seed 1]

Simulated are blocks of turns: in each, every arm's log throughput is its true one plus independent noise of a turn.
The tuned arm is as fast as the best static arm, which leads the others by the gaps of a case: the true ratio is 1.
docs/statistics.md has the figures.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec import structs

from breakeven.decide.envelope import EnvelopeRatio, envelope_ratio, over_levels
from breakeven.decide.holding import holding
from breakeven.decide.ratio import NoRatio

#: How far, in percent, each static arm lies below the best.
CASES: dict[str, tuple[float, ...]] = {
    "two, equal": (0, 0),
    "two, 1 % apart": (0, 1),
    "two, 2 % apart": (0, 2),
    "two, 5 % apart": (0, 5),
    "five, equal": (0, 0, 0, 0, 0),
    "five, one leads by 1 %": (0, 1, 1, 1, 1),
    "five, one leads by 2 %": (0, 2, 2, 2, 2),
    "five, one leads by 3 %": (0, 3, 3, 3, 3),
    "five, spread over 4 %": (0, 0.5, 1, 2, 4),
    "five, spread over 40 %": (0, 10, 20, 30, 40),
}
BLOCKS, NOISES = (4, 8, 16), (0.03, 0.05)
LEVELS = 6


class Found(NamedTuple):
    """In percent: how many intervals hold the truth, and lie wholly above it; the estimate's bias; half the width."""

    covered: float
    above: float
    bias: float
    half: float


def measured(below: Sequence[float], blocks: int, noise: float, rng: np.random.Generator) -> EnvelopeRatio:
    """One level."""
    rates = np.exp(noise * rng.standard_normal((len(below) + 1, blocks)) - np.array([0, *below])[:, None] / 100)
    ratio = envelope_ratio(rates[0].tolist(), {str(arm): own.tolist() for arm, own in enumerate(rates[1:])})
    assert isinstance(ratio, EnvelopeRatio)
    return ratio


def judged(ratios: Sequence[EnvelopeRatio]) -> Found:
    """Against the truth, which is 1."""
    inside = [ratio.interval() for ratio in ratios]
    shares = (
        np.mean([each.low <= 1 <= each.high for each in inside]),
        np.mean([each.low > 1 for each in inside]),
        np.mean([ratio.log for ratio in ratios]),
        np.mean([ratio.half_width for ratio in ratios]),
    )
    return Found(*(100 * float(share) for share in shares))


def print_levels(repeats: int, seed: int) -> None:
    """Each level alone, by case, noise and blocks."""
    heads = [f"{100 * noise:g} %, {blocks} turns" for noise in NOISES for blocks in BLOCKS]
    print(f"| static arms | {' | '.join(heads)} |\n| --- |{' --- |' * len(heads)}")
    for case, below in CASES.items():
        rng, cells = np.random.default_rng(seed), []
        for noise in NOISES:
            for blocks in BLOCKS:
                found = judged([measured(below, blocks, noise, rng) for _ in range(repeats)])
                cells.append(f"{found.covered:.1f} · {found.bias:+.2f} · {found.half:.1f}")
        print(f"| {case} | {' | '.join(cells)} |", flush=True)


def print_means(repeats: int, seed: int) -> None:
    """The geometric mean over levels, all of one case or each of another."""
    cases = {case: [below] * LEVELS for case, below in CASES.items()}
    cases["a tie at one of six levels"] = [CASES["two, equal"]] + [CASES["five, spread over 40 %"]] * (LEVELS - 1)
    cases["each level another"] = list(CASES.values())[1 : LEVELS + 1]
    print("| six levels of | noise % | turns | covered % | wholly above % | bias % | half width % |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for case, levels in cases.items():
        for noise, blocks in ((0.03, 8), (0.03, 16), (0.05, 8)):
            rng = np.random.default_rng(seed)
            runs = [over_levels([measured(below, blocks, noise, rng) for below in levels]) for _ in range(repeats)]
            found = judged(runs)
            print(
                f"| {case} | {100 * noise:g} | {blocks} | {found.covered:.1f} | {found.above:.1f} | "
                f"{found.bias:+.2f} | {found.half:.1f} |",
                flush=True,
            )


#: By how much, in percent, the tuned arm lies below the best static one at each level.
LOSSES: dict[str, Sequence[float]] = {
    "as fast as the best": [0] * LEVELS,
    "2 % faster": [-2] * LEVELS,
    "3 % slower everywhere": [3] * LEVELS,
    "5 % slower everywhere": [5] * LEVELS,
    "3 % slower at one level": [0, 0, 0, 0, 3, 0],
    "8 % slower at one level": [0, 0, 0, 0, 8, 0],
}


def outcomes(losses: Sequence[float], below: Sequence[float], blocks: int, repeats: int, seed: int) -> Counter[str]:
    """Verdicts on `repeats` verifications of six levels, noise 2 % a turn, margin 3 %."""
    rng, found = np.random.default_rng(seed), Counter[str]()
    names = {float(level): f"C={level}" for level in range(LEVELS)}
    for _ in range(repeats):
        ratios: dict[float, EnvelopeRatio | NoRatio] = {
            float(level): structs.replace(ratio, log=ratio.log - loss / 100)
            for level, loss in enumerate(losses)
            for ratio in (measured(below, blocks, 0.02, rng),)
        }
        found[holding(ratios, names, arm="tuned", margin=0.03).outcome] += 1
    return found


def print_verdicts(repeats: int, seed: int) -> None:
    """How often each verdict comes, by what is true."""
    print("| the tuned arm is | static arms | turns | holds % | loses % | undecided % |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for what, losses in LOSSES.items():
        for case in ("two, equal", "five, spread over 4 %", "five, spread over 40 %"):
            for blocks in (16, 32):
                found = outcomes(losses, CASES[case], blocks, repeats // 4, seed)
                shares = [100 * found[outcome] / (repeats // 4) for outcome in ("holds", "loses", "undecided")]
                print(f"| {what} | {case} | {blocks} | {' | '.join(f'{share:.1f}' for share in shares)} |", flush=True)


def main() -> None:
    """Prints all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    for part in (print_levels, print_means, print_verdicts):
        started = time.perf_counter()
        part(args.repeats, args.seed)
        print(f"\n{time.perf_counter() - started:.0f} s\n")


if __name__ == "__main__":
    main()
