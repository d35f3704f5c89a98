"""How good tuned tables are, by simulation: what they lose to the best draft length at each load.

    python benchmarks/tuning.py [--curves 400] [--seed 1] [--turns 8] [--streams 0]

Each curve is an engine drawn at random: its step times (`sim.steps.RooflineSteps`, a third of them mixtures of experts)
and its drafter's acceptance. The truth is worked out; what is measured of it are turns with noise that is common to all
arms of a turn, and noise of their own. `--streams N` also tunes N engines on whole simulated request streams, through
the same loops, records and summaries as real servers. docs/statistics.md has the figures.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from breakeven.decide.choice import Choice, choose
from breakeven.decide.gain import Gain, gains_at, gains_over, tuned_rates
from breakeven.decide.profile import profile_of
from breakeven.decide.rates import LoadRates
from breakeven.decide.ratio import log_mean
from breakeven.decide.tuned import TunedArm, tune
from breakeven.decide.turns import ArmRun
from breakeven.decide.verdict import DELTA
from breakeven.load.prompts import load_prompts
from breakeven.load.window import StopRule
from breakeven.records import LevelPlan, Turns
from breakeven.runs import Run
from breakeven.sim.level import Conditions
from breakeven.sim.model import Acceptance, EngineModel, Noise
from breakeven.sim.run import Arm, manifest_of, simulate_turns
from breakeven.sim.steps import RooflineSteps
from breakeven.sim.truth import true_throughput

FloatArray = NDArray[np.float64]
LOADS = (1, 2, 4, 8, 16, 32, 64, 128)
KS = (0, 1, 2, 3, 5)
ARMS = tuple(f"k{k}" for k in KS)


def random_steps(rng: np.random.Generator) -> RooflineSteps:
    """An engine: weights that take 5 to 40 ms to read, arithmetic that binds from 8 to 256 tokens a step."""
    base_ms = float(rng.uniform(5, 40))
    knee_tokens = float(np.exp(rng.uniform(math.log(8), math.log(256))))
    is_mixture = rng.random() < 1 / 3
    return RooflineSteps(
        base_ms=base_ms * (0.4 if is_mixture else 1),
        request_ms=base_ms * float(rng.uniform(0.001, 0.02)),
        token_ms=base_ms / knee_tokens * float(rng.uniform(0.4, 1.2)),
        knee_tokens=knee_tokens,
        expert_ms=base_ms * float(rng.uniform(1, 3)) if is_mixture else 0.0,
        expert_share=float(rng.uniform(0.02, 0.1)) if is_mixture else 1.0,
        draft_ms=base_ms * float(rng.uniform(0.01, 0.12)),
        draft_request_ms=base_ms * float(rng.uniform(0, 0.002)),
    )


def random_acceptance(rng: np.random.Generator) -> FloatArray:
    """The probability that position i is accepted, given all before it: 0.4 to 0.9 at first, falling."""
    first, decay = rng.uniform(0.4, 0.9), rng.uniform(0.85, 1.0)
    return np.array([first * decay**i for i in range(max(KS))])


def true_logs(steps: RooflineSteps, acceptance: FloatArray) -> FloatArray:
    """Log tokens a second at each load (rows) and K (columns)."""
    tokens = {k: 1 + float(np.cumprod(acceptance[:k]).sum()) for k in KS}
    rates = [[load * tokens[k] / steps.step_ms(load, k) * 1e3 for k in KS] for load in LOADS]
    logs: FloatArray = np.log(np.array(rates))
    return logs


def crosses(logs: FloatArray) -> bool:
    """Whether the best K is not the same at all loads."""
    return len(set(np.argmax(logs, axis=1).tolist())) > 1


def measured(logs: FloatArray, sd: float, turns: int, rng: np.random.Generator) -> list[LoadRates]:
    """Turns with noise: `sd` is that of the log ratio of two arms in one turn; what they share is twice that."""
    found = []
    for load, row in zip(LOADS, logs, strict=True):
        shared = 2 * sd * rng.standard_normal((turns, 1))
        rates = np.exp(row + shared + sd / math.sqrt(2) * rng.standard_normal((turns, len(row))))
        by_arm = {arm: tuple(map(float, rates[:, i])) for i, arm in enumerate(ARMS)}
        means = {arm: log_mean(own) for arm, own in by_arm.items()}
        found.append(LoadRates(float(load), float(load), by_arm, means, "pairs", f"C={load}"))
    return found


def loss(choice: Choice, logs: FloatArray) -> float:
    """Share of throughput that the table loses to the best K at each load, the mean over loads."""
    chosen = [ARMS.index(choice.arm_at(level)) for level in range(len(LOADS))]
    return float(np.mean(1 - np.exp(logs[np.arange(len(LOADS)), chosen] - logs.max(axis=1))))


def naive_loss(levels: Sequence[LoadRates], logs: FloatArray) -> float:
    """The same for the highest measured throughput at each load, without a look at the noise."""
    chosen = [int(np.argmax([level.log(arm) or -math.inf for arm in ARMS])) for level in levels]
    return float(np.mean(1 - np.exp(logs[np.arange(len(LOADS)), chosen] - logs.max(axis=1))))


class Judged(NamedTuple):
    """What one curve showed, losses and gains in percent."""

    loss: float
    naive_loss: float
    ranges: int
    true_gain: float
    cross_fitted: float
    flattered: float
    covered: list[bool]
    profile_covered: bool


def judge(levels: Sequence[LoadRates], choice: Choice, logs: FloatArray) -> Judged:
    """The table against the truth, and what is said of its gain over the best single K."""
    chosen = [ARMS.index(choice.arm_at(i)) for i in range(len(LOADS))]
    on = ARMS[int(np.argmax(logs.sum(axis=0)))]
    truth = logs[np.arange(len(LOADS)), chosen] - logs[:, ARMS.index(on)]
    tuned = tuned_rates(levels, ARMS, DELTA)
    found = [level.gains[on] for level in gains_at(levels, ARMS, choice, tuned)]
    naive = [level.gains[on].ratio for level in gains_at(levels, ARMS, choice, None)]
    profile = profile_of("even", "trace", [(load, 1.0) for load in LOADS])
    over = next(gain for gain in gains_over(profile, levels, ARMS, choice, tuned) if gain.arm == on)
    whole = float(np.exp(logs[np.arange(len(LOADS)), chosen]).sum() / np.exp(logs[:, ARMS.index(on)]).sum())
    return Judged(
        100 * loss(choice, logs),
        100 * naive_loss(levels, logs),
        len(choice.segments),
        100 * float(truth.mean()),
        100 * float(np.mean([math.log(gain.ratio) for gain in found])),
        100 * float(np.mean(np.log(naive))),
        [_covers(gain, math.exp(own)) for gain, own in zip(found, truth, strict=True) if gain.ci95],
        _covers(over.gain, whole),
    )


def _covers(gain: Gain, truth: float) -> bool:
    return gain.is_same or (gain.ci95 is not None and gain.ci95.low <= truth <= gain.ci95.high)


def on_streams(number: int, seed: int, turns: int, seconds: float) -> None:
    """Tunes engines by whole simulated streams, and prints what each table loses."""
    rng = np.random.default_rng(seed)
    prompts = load_prompts(None, (), seed=0)
    for _ in range(number):
        steps, acceptance = random_steps(rng), random_acceptance(rng)
        while not crosses(true_logs(steps, acceptance)[:6]):
            steps, acceptance = random_steps(rng), random_acceptance(rng)
        model = EngineModel(
            steps=steps,
            acceptance=Acceptance(default=tuple(acceptance.tolist()), decay=1.0, prompt_sd=0.3),
            noise=Noise(sd=0.03, memory_s=1.0, jitter_sd=0.03),
        )
        loads = LOADS[:6]
        truth = np.array(
            [[true_throughput(model, prompts, concurrency=c, k=k, max_tokens=64) for k in KS] for c in loads]
        )
        known = Conditions(prompts, StopRule(duration_s=seconds), seed)
        found = tune(_streams(model, loads, turns, known), source="simulated")
        chosen = [0 if level.arm is None else ARMS.index(level.arm) for level in found.levels]
        lost = 1 - truth[np.arange(len(loads)), chosen] / truth.max(axis=1)
        table = [[each.lo, each.hi, each.k] for each in found.schedule.ranges] if found.schedule else found.why_not
        best = [KS[i] for i in truth.argmax(axis=1)]
        print(f"| {best} | {table} | {100 * lost.mean():.2f} % | {100 * lost.max():.2f} % |", flush=True)


def _streams(model: EngineModel, loads: Sequence[int], turns: int, known: Conditions) -> list[TunedArm]:
    arms = [Arm(model, k) for k in KS]
    order: list[tuple[int, LevelPlan]] = []
    for index, load in enumerate(loads):
        for turn in range(turns):
            plan = LevelPlan(index=index * turns + turn, run=turn, concurrency=load, max_tokens=64)
            order += [(arm, plan) for arm in (range(len(KS)) if turn % 2 == 0 else reversed(range(len(KS))))]
    runs = simulate_turns(arms, order, known)
    found = []
    for place, (k, name) in enumerate(zip(KS, ARMS, strict=True)):
        own = [run for run in runs if run.arm == place]
        manifest = manifest_of(name, arms[place], [run.level.plan for run in own], known, {}, version="1")
        manifest.turns = Turns(group="g", arm=name, how="pairs")
        records = [record for run in own for record in run.requests]
        run = ArmRun(name, name, Run(manifest, records, [run.level for run in own], None))
        found.append(TunedArm(k, 1, None, run))
    return found


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--curves", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--turns", type=int, nargs="+", default=[8])
    parser.add_argument("--noise", type=float, nargs="+", default=[0.03, 0.04, 0.05])
    parser.add_argument("--streams", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=10.0)
    flags = parser.parse_args()
    if flags.streams:
        print("| best K at each load | table | lost, mean | at most |\n| --- | --- | ---: | ---: |")
        on_streams(flags.streams, flags.seed, flags.turns[0], flags.seconds)
        return
    heads = ["noise", "pairs", "lost, mean", "p95", "most", "ranges", "best at each load loses"]
    heads += ["gain over the best K", "cross-fitted says", "on the same turns", "covered", "over a profile", "invented"]
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    for turns in flags.turns:
        for sd in flags.noise:
            began = time.monotonic()
            print(_row(flags.curves, flags.seed, turns, sd), f"{time.monotonic() - began:.0f} s", flush=True)


def _row(curves: int, seed: int, turns: int, sd: float) -> str:
    rng = np.random.default_rng(seed)
    found: list[Judged] = []
    invented = 0
    for _ in range(curves):
        logs = true_logs(random_steps(rng), random_acceptance(rng))
        while not crosses(logs):
            logs = true_logs(random_steps(rng), random_acceptance(rng))
        levels = measured(logs, sd, turns, rng)
        choice = choose(levels, ARMS)
        invented += choose(measured(np.zeros_like(logs), sd, turns, rng), ARMS).why_not is None
        if not choice.why_not:
            found.append(judge(levels, choice, logs))
    losses = [each.loss for each in found]
    covered = [own for each in found for own in each.covered]
    cells = [
        f"{100 * sd:g} %",
        str(turns),
        f"{np.mean(losses):.2f} %",
        f"{np.quantile(losses, 0.95):.2f} %",
        f"{max(losses):.2f} %",
        f"{np.mean([each.ranges for each in found]):.1f}",
        f"{np.mean([each.naive_loss for each in found]):.2f} %",
        *(f"{np.mean([getattr(each, name) for each in found]):.2f} %" for name in _GAINS),
        f"{100 * np.mean(covered):.1f} %",
        f"{100 * np.mean([each.profile_covered for each in found]):.1f} %",
        f"{100 * invented / curves:.1f} %",
    ]
    return f"| {' | '.join(cells)} |"


_GAINS = ("true_gain", "cross_fitted", "flattered")


if __name__ == "__main__":
    main()
