"""How much the policy leaves on the table, and what a decision costs.

    python benchmarks/policies.py [--worlds 200] [--minutes 30] [--tuning] [--slower 1] [--deep] [--jobs 2]
    python benchmarks/policies.py --cost

Worlds are drawn by `sim.worlds`; the policy lives through each, step by step (`sim.stepwise`). Regret is one less its
tokens over those of a clairvoyant who pays the same for switches (`sim.clairvoyant`, dynamic programming). Seeds to
tune by (--tuning) are others than those to judge by. docs/policy.md has the figures.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import Pool
from typing import NamedTuple

import numpy as np

from breakeven.decide.observed import Observation
from breakeven.decide.policy import Policy
from breakeven.sim.clairvoyant import best_tokens, static_tokens
from breakeven.sim.stepwise import live
from breakeven.sim.worlds import TICK_S, World, random_world

JUDGING, TUNING = 500_000, 1_000


class Verdict(NamedTuple):
    """One world: regrets of the policy, of each way to stand still and of a table, and what the policy did."""

    seed: int
    kinds: tuple[str, ...]
    regret: float
    off: float
    on: float
    best_static: float
    table: float
    probes: float
    probe_steps: float
    switches_per_min: float
    shallow: float  # the regret of one that may not leave the drafter alone

    @property
    def above_worse(self) -> float:
        """The policy's tokens over those of the worse of always-off and always-on, less one."""
        return (1 - self.regret) / (1 - max(self.off, self.on)) - 1


def judge(seed: int, minutes: float, slower: float, deep: bool) -> Verdict:
    """Lets a new policy live through a world, knowing nothing."""
    world = slowed(random_world(seed, minutes=minutes, deep=deep), slower)
    best, static = best_tokens(world), static_tokens(world)

    def regret_of(policy: Policy) -> float:
        life = live(world, policy.choose, seed=seed)
        return 1 - life.tokens / life.seconds * world.seconds / best

    ks = [k for k in world.ks if k >= 0]
    policy = Policy(ks, deep=deep)
    regret = regret_of(policy)
    return Verdict(
        seed=seed,
        kinds=tuple(world.name.split(", ")),
        regret=regret,
        off=1 - static[world.ks[0]] / best,
        on=1 - static[world.ks[-1]] / best,
        best_static=1 - max(static.values()) / best,
        table=1 - table_tokens(world) / best,
        probes=policy.probe_share,
        probe_steps=policy.probe_steps / policy.steps,
        switches_per_min=policy.switches / minutes,
        shallow=regret_of(Policy(ks)) if deep else regret,
    )


def slowed(world: World, factor: float) -> World:
    """The same load, on an engine that takes so many times as long for everything."""
    return replace(
        world,
        slowness=world.slowness * factor,
        prompt_ms=world.prompt_ms * factor,
        switching=replace(world.switching, switch_ms=world.switching.switch_ms * factor),
    )


def table_tokens(world: World) -> float:
    """Of the best table from batch to K there is for the mean mix of prompts, whose switches cost nothing."""
    tokens = {k: 1 + float(world.survival[:, : max(k, 0)].sum(axis=1).mean()) for k in world.ks}
    best = {
        int(batch): max(world.ks, key=lambda k: tokens[k] / world.step_ms(int(batch), k))
        for batch in np.unique(world.batches)
    }
    rates = {k: world.tokens_per_s(k) for k in world.ks}
    return float(sum(rates[best[int(batch)]][tick] for tick, batch in enumerate(world.batches)) * TICK_S)


def print_regrets(verdicts: Sequence[Verdict]) -> None:
    """All worlds, then by each kind of step times, load and mix."""
    print(
        "| worlds | n | regret % mean | median | p95 | max | best static | table | always off | always on "
        "| least above the worse % | probes % | probing steps % | switches/min | drafter kept in step |"
    )
    print("| --- " + "| ---: " * 14 + "|")
    print_row("all", verdicts)
    for part in range(3):
        for kind in sorted({verdict.kinds[part] for verdict in verdicts}):
            print_row(kind, [verdict for verdict in verdicts if verdict.kinds[part] == kind])
    print("\nThe worst:")
    for verdict in sorted(verdicts, key=lambda verdict: -verdict.regret)[:8]:
        print(f"    {100 * verdict.regret:.1f} %  seed {verdict.seed}: {', '.join(verdict.kinds)}")


def print_row(name: str, verdicts: Sequence[Verdict]) -> None:
    regrets = np.array([verdict.regret for verdict in verdicts]) * 100

    def mean(of: Callable[[Verdict], float]) -> float:
        return float(np.mean([of(verdict) for verdict in verdicts]))

    cells = [regrets.mean(), np.median(regrets), np.quantile(regrets, 0.95), regrets.max()]
    cells += [100 * mean(of) for of in (lambda v: v.best_static, lambda v: v.table, lambda v: v.off, lambda v: v.on)]
    cells += [100 * min(verdict.above_worse for verdict in verdicts)]
    cells += [100 * mean(lambda v: v.probes), 100 * mean(lambda v: v.probe_steps), mean(lambda v: v.switches_per_min)]
    cells += [100 * mean(lambda v: v.shallow)]
    print(f"| {name} | {len(verdicts)} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |", flush=True)


def print_cost(repeats: int = 5) -> None:
    """Microseconds that a choice takes, over two minutes of some worlds; of some runs the quickest."""
    print("| K | steps | median µs | p90 | p99 | mean |\n| --- | ---: | ---: | ---: | ---: | ---: |")
    for seed in (TUNING, TUNING + 6, TUNING + 20):
        world = random_world(seed, minutes=2)
        runs = [timed(world) for _ in range(repeats)]
        us = min(runs, key=lambda run: float(np.median(run))) / 1e3
        cells = [np.median(us), np.quantile(us, 0.9), np.quantile(us, 0.99), us.mean()]
        print(f"| {' '.join(map(str, world.ks))} | {len(us)} | " + " | ".join(f"{cell:.1f}" for cell in cells) + " |")


def timed(world: World) -> np.ndarray:
    """The nanoseconds of each choice."""
    policy, took_ns = Policy(world.ks), list[int]()

    def choose(seen: Observation) -> int:
        began_ns = time.perf_counter_ns()
        k = policy.choose(seen)
        took_ns.append(time.perf_counter_ns() - began_ns)
        return k

    live(world, choose)
    return np.array(took_ns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=200, help="how many (200)")
    parser.add_argument("--minutes", type=float, default=30.0, help="simulated minutes of each (30)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    parser.add_argument("--tuning", action="store_true", help="the seeds to tune by, not those to judge by")
    parser.add_argument("--slower", type=float, default=1.0, help="engines so many times as slow (1)")
    parser.add_argument("--deep", action="store_true", help="drafters that can be left alone, against one that may not")
    parser.add_argument("--cost", action="store_true", help="what a choice costs instead")
    args = parser.parse_args()
    if args.cost:
        print_cost()
        return
    first = TUNING if args.tuning else JUDGING
    with Pool(args.jobs) as pool:
        seeds = range(first, first + args.worlds)
        verdicts = pool.starmap(judge, [(seed, args.minutes, args.slower, args.deep) for seed in seeds], chunksize=1)
    print_regrets(verdicts)


if __name__ == "__main__":
    main()
