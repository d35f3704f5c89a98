"""How often comparisons are right, on simulated engines whose truth is known.

    python benchmarks/comparisons.py [--runs 1000] [--seed 1] [--only WORD] [--so-far FILE]

Each run is one whole measurement: the load generator's loops in virtual time (`sim`), arms that take turns as
`alternation` has them, on one machine whose speed wanders with a memory, the levels' summaries, and `decide`'s answer.
Answers are short and steps long, so that a run costs little: what counts is how many steps a request has to wait for
and how long the noise's memory is against a window, not seconds. docs/statistics.md has the figures.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec import structs

from breakeven.alternation import LOOKS, TURNOVERS
from breakeven.clock import VirtualLoop
from breakeven.decide.breakeven import BreakEven, break_even
from breakeven.decide.ratio import NoRatio, Ratio, paired
from breakeven.decide.verdict import judge
from breakeven.levels import stop_rule
from breakeven.load.prompts import PromptSet, load_prompts
from breakeven.load.window import StopRule
from breakeven.measure.level import summarize_level
from breakeven.options import BenchOptions, CompareOptions
from breakeven.records import LevelPlan
from breakeven.sim.engine import Engine
from breakeven.sim.level import Conditions, run_level
from breakeven.sim.machine import Machine
from breakeven.sim.model import Acceptance, EngineModel, Noise, Prefill
from breakeven.sim.run import Arm, simulate
from breakeven.sim.steps import TableSteps
from breakeven.sim.truth import true_break_evens, true_throughput

#: The true log ratio at a load.
Gain = Callable[[float], float]
#: What one run showed, by name; a share is of the runs that have the name.
Outcome = Mapping[str, bool]

#: Tokens of an answer. A window holds one more or one less of the answers' first tokens, which come at once, by where
#: it begins, and that is the same in all turns of a load: where a ratio has to be right, answers are longer.
SHORT, LONGER = 16, 64
K = 3
#: Step times are there up to so many requests in flight.
_MOST = 256
DOUBLING = (1, 2, 4, 8, 16, 32, 64, 128)
#: Eight loads that cost little to simulate: between equal arms a load is as good as another.
LOW = (1, 2, 3, 4, 5, 6, 7, 8)
#: At most a factor of sqrt 2 apart, as far as whole numbers go: what a claim of two crossings needs.
CLOSE = (1, 2, 3, 4, 6, 8, 11, 16)
#: Pairs scatter by some 4 % at C=4: about as much of it is the machine's as the drafts' luck.
NOISE = Noise(sd=0.03, memory_s=1.0, jitter_sd=0.03)
QUIET = structs.replace(NOISE, sd=0.01)
#: Of each arm's turns, as many as `breakeven compare` takes by default.
PAIRS = 2 * {field.name: field.default for field in structs.fields(CompareOptions)}["cycles"]
#: From one turn to the next, about, ramp and drain included.
TURN_S = 6.5
TURN = StopRule(turnovers=TURNOVERS[0], turnovers_least_s=TURNOVERS[1])


class Drifting(Machine):
    """A machine that slows down by a share from one turn to the next, for 24 of them, and then recovers as slowly.

    All of the default's 16 turns lie on one such slope. Forever the same way, 5 % a turn would make it 23 times as slow
    within the turns of the last look.
    """

    _SLOPE_S = 24 * TURN_S

    def __init__(self, noise: Noise, seed: int, share: float) -> None:
        super().__init__(noise, seed)
        self._per_s = math.log1p(share) / TURN_S
        self._began_s = float(np.random.default_rng([seed, 8]).uniform(0, 8 * TURN_S))

    def slowness(self, at_ns: int) -> float:
        at_s = (self._began_s + at_ns / 1e9) % (2 * self._SLOPE_S)
        wandered_s = min(at_s, 2 * self._SLOPE_S - at_s) - self._SLOPE_S / 2
        return super().slowness(at_ns) * math.exp(self._per_s * wandered_s)


class Rates(NamedTuple):
    """Tokens a second of each turn, in pair order: reference and other."""

    reference: list[float]
    other: list[float]

    def ratio(self, pairs: int | None = None) -> Ratio | NoRatio:
        """As `alternation` and `decide.atload` have it, of the first pairs or of all."""
        return paired(self.reference[:pairs], self.other[:pairs])


class Pair(NamedTuple):
    """Two arms, the reference and the other, and the tokens of their answers."""

    reference: Arm
    other: Arm
    tokens: int

    def true_ratio(self, load: int) -> float:
        return _truth(self.other, load, self.tokens) / _truth(self.reference, load, self.tokens)


@cache
def prompts() -> PromptSet:
    return load_prompts(None)


def off_ms(load: float, tokens: int) -> float:
    """A step without drafts; answers take as long whatever their tokens."""
    return (80.0 + 0.5 * load) * SHORT / tokens


def pair_of(gain: Gain, noise: Noise = NOISE, tokens: int = SHORT) -> Pair:
    """Off and on, whose throughputs have this log ratio, but for what prompts cost."""
    off = [(c, 0, off_ms(c, tokens)) for c in range(1, _MOST + 1)]
    on = [(c, K, off_ms(c, tokens) * _tokens_a_step(tokens) * math.exp(-gain(c))) for c in range(1, _MOST + 1)]
    engine = _engine((*off, *on), noise)
    return Pair(Arm(engine, 0), Arm(engine, K), tokens)


@cache
def _tokens_a_step(tokens: int) -> float:
    """How many times the throughput is at K if steps are no longer for it."""
    engine = _engine(tuple((c, k, off_ms(c, tokens)) for c in (1, _MOST) for k in (0, K)), NOISE)
    return Pair(Arm(engine, 0), Arm(engine, K), tokens).true_ratio(1)


def _engine(points: tuple[tuple[float, int, float], ...], noise: Noise) -> EngineModel:
    return EngineModel(
        steps=TableSteps(points=points),
        prefill=Prefill(request_ms=0.5, chunk_tokens=None),
        noise=noise,
        acceptance=Acceptance(default=(0.7, 0.6, 0.5)),
    )


def _truth(arm: Arm, load: int, tokens: int) -> float:
    assert isinstance(arm.k, int)
    return true_throughput(arm.model, prompts(), concurrency=load, k=arm.k, max_tokens=tokens)


def take_turns(
    pair: Pair, load: int, seed: int, *, precision: float | None = None, machine: Machine | None = None
) -> Rates:
    """Measures two arms at a load, A B B A, for as many cycles as `breakeven compare` does by default.

    Args:
        pair: the arms.
        load: requests in flight.
        seed: of everything that is drawn.
        precision: if given, there are up to four times the cycles, and looks as `alternation` has them.
        machine: by default one with the reference's noise.
    """
    conditions = Conditions(prompts(), TURN, seed)
    machine = machine or Machine(pair.reference.model.noise, seed)
    looks = [PAIRS * look for look in LOOKS]
    rates = Rates([], [])

    async def run() -> None:
        numbers = count()
        for number in range(looks[-1] if precision else PAIRS):
            if precision and number in looks and _is_precise(rates.ratio(), precision):
                return
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                arm = (pair.reference, pair.other)[which]
                engine = Engine(arm.model, machine, arm.k, seed=[seed, which, number])
                plan = LevelPlan(index=number, run=number, concurrency=load, max_tokens=pair.tokens)
                level, requests = await run_level(engine, plan, conditions, numbers)
                rates[which].append(summarize_level(level, requests, shared_cores=None).output_throughput.value)

    loop = VirtualLoop()
    try:
        loop.run_until_complete(run())
    finally:
        loop.close()
    return rates


def _is_precise(ratio: Ratio | NoRatio, precision: float) -> bool:
    return isinstance(ratio, Ratio) and ratio.interval().log_half_width <= precision


def _covers(ratio: Ratio | NoRatio, truth: float) -> bool:
    assert isinstance(ratio, Ratio)
    interval = ratio.interval()
    return interval.low <= truth <= interval.high


def compare(pair: Pair, loads: Sequence[int], seed: int) -> dict[float, Ratio | NoRatio]:
    """The ratio at each load."""
    return {float(load): take_turns(pair, load, 1000 * seed + load).ratio() for load in loads}


# ---- the cases: one run each ----


def throughput(memory_s: float) -> Callable[[int], Outcome]:
    """A level by itself, with the window that `breakeven bench` gives it."""
    options = BenchOptions()
    engine = _engine(
        tuple((c, 0, off_ms(c, SHORT)) for c in (1, _MOST)), Noise(sd=0.1, memory_s=memory_s, jitter_sd=0.05)
    )
    truth = _truth(Arm(engine, 0), 4, SHORT)

    def run(seed: int) -> Outcome:
        plan = LevelPlan(index=0, run=0, concurrency=4, max_tokens=SHORT)
        conditions = Conditions(prompts(), stop_rule(options), seed, options.precision)
        (level,), requests = simulate(engine, [plan], 0, conditions)
        found = summarize_level(level, requests, shared_cores=None).output_throughput
        assert found.ci95 is not None
        return {
            "covered": found.ci95[0] <= truth <= found.ci95[1],
            "ended by precision": level.ended_by == "precision",
        }

    return run


def drifting(share: float, walk: float = 0.0, precision: float | None = 0.03) -> Callable[[int], Outcome]:
    """The ratio at a load while the machine slows by `share` from one turn to the next, or walks `walk`."""
    noise = structs.replace(NOISE, walk_per_hour=walk * math.sqrt(3600 / TURN_S))
    pair, load = pair_of(lambda load: 0.1, noise, LONGER), 4
    truth = pair.true_ratio(load)

    def run(seed: int) -> Outcome:
        rates = take_turns(pair, load, seed, precision=precision, machine=Drifting(noise, seed, share))
        ratio = rates.ratio(PAIRS)
        assert isinstance(ratio, Ratio)
        outcome = {"covered": _covers(ratio, truth)}
        if precision:
            outcome["covered at the looks"] = _covers(rates.ratio(), truth)
            outcome["precise at the first look"] = _is_precise(ratio, precision)
        return outcome

    return run


def one_break_even(loads: Sequence[int]) -> Callable[[int], Outcome]:
    """Speculation that pays below a load, drawn evenly on the log scale from the second to the last but one."""

    def run(seed: int) -> Outcome:
        middle = float(np.random.default_rng([seed, 7]).uniform(math.log(loads[1]), math.log(loads[-2])))
        # From +45 % to -30 %, on the log scale, with its zero there.
        pair = pair_of(lambda load: 0.075 - 0.375 * math.tanh((math.log(load) - middle) / 2 + math.atanh(0.2)))
        off, on = pair.reference.model, pair.other.model
        (truth,) = true_break_evens(off, on, prompts(), k=K, max_tokens=pair.tokens, most=2 * loads[-1])
        found = break_even(compare(pair, loads, seed))
        outcome = {"counted": found.kind == "pays_below"}
        if found.crossings:
            crossing = found.crossings[0]
            outcome["covered"] = (crossing.low or 0.0) <= truth <= (crossing.high or math.inf)
        return outcome

    return run


def equal_arms(loads: Sequence[int]) -> Callable[[int], Outcome]:
    """An arm against itself."""
    _, arm, tokens = pair_of(lambda load: 0.0)

    def run(seed: int) -> Outcome:
        judged = judge(compare(Pair(arm, arm, tokens), loads, seed)).values()
        return {
            "a difference quoted": any(each.verdict in ("faster", "slower") for each in judged),
            "without Holm": any(each.alone in ("faster", "slower") for each in judged),
        }

    return run


def five_percent(precision: float | None = None) -> Callable[[int], Outcome]:
    """An arm that is truly 5 % faster, at one load."""
    pair, load = pair_of(lambda load: math.log(1.05), NOISE, LONGER), 4

    def run(seed: int) -> Outcome:
        ratio = take_turns(pair, load, seed, precision=precision).ratio()
        assert isinstance(ratio, Ratio)
        return {
            "found": judge({load: ratio})[load].verdict == "faster",
            "half width <= 2.5 %": ratio.interval().log_half_width <= 0.025,
        }

    return run


def kinds(gain: Gain, loads: Sequence[int], noise: Noise) -> Callable[[int], Outcome]:
    """What is said of a curve."""

    def run(seed: int) -> Outcome:
        found: BreakEven = break_even(compare(pair_of(gain, noise), loads, seed))
        return {found.kind: True}

    return run


def hump(load: float) -> float:
    """Pays between 2.4 and 7.5 requests in flight, most at 4.2."""
    return 0.2 - 0.6 * (math.log(load) - math.log(4.2)) ** 2


class Case(NamedTuple):
    """What is simulated, what is asked of it, and how one run goes."""

    name: str
    asked: str
    run: Callable[[int], Outcome]


def cases() -> list[Case]:
    """All, the most important ones first."""
    spread = "93 to 97 % covered"
    return [
        Case("equal arms, eight loads", "quoted in at most 5 %", equal_arms(LOW)),
        Case("one break-even, loads 1 to 32", "at least 93 % covered", one_break_even(DOUBLING[:6])),
        Case("one break-even, loads 1 to 128", "at least 93 % covered", one_break_even(DOUBLING)),
        Case("ratio, no drift", spread, drifting(0.0)),
        Case("ratio, drift of 2 % a turn", spread, drifting(0.02)),
        Case("ratio, drift of 5 % a turn", spread, drifting(0.05)),
        Case("ratio, random walk of 3 % a turn", spread, drifting(0.0, walk=0.03)),
        Case("5 % faster, 8 pairs", "at least 90 % found", five_percent()),
        Case("5 % faster, `--precision 0.025`", "at least 90 % found", five_percent(0.025)),
        Case("throughput, memory 0.3 s", "92 to 97 % covered", throughput(0.3)),
        Case("throughput, memory 1 s", "92 to 97 % covered", throughput(1.0)),
        Case("+22 % falling to +14 %", "pays_everywhere", kinds(lambda c: 0.2 - 0.03 * math.log(c), CLOSE[:6], QUIET)),
        Case("-14 % falling to -19 %", "pays_nowhere", kinds(lambda c: -0.15 - 0.03 * math.log(c), CLOSE[:6], QUIET)),
        Case("hump, loads sqrt 2 apart", "pays_between", kinds(hump, CLOSE, QUIET)),
        Case("+1 % to -1 %", "no claim", kinds(lambda c: 0.01 - 0.01 * math.log(c), CLOSE[:6], QUIET)),
    ]


def table(found: Sequence[tuple[Case, Sequence[Outcome]]]) -> str:
    """Markdown: each share with the runs that it is of where those are not all."""
    lines = ["| simulated | asked for | runs | found |", "| --- | --- | ---: | --- |"]
    for case, outcomes in found:
        names = dict.fromkeys(name for outcome in outcomes for name in outcome)
        told = ", ".join(_share(name, outcomes, whole=case.run.__qualname__.startswith("kinds")) for name in names)
        lines.append(f"| {case.name} | {case.asked} | {len(outcomes)} | {told} |")
    return "\n".join(lines)


def _share(name: str, outcomes: Sequence[Outcome], *, whole: bool) -> str:
    having = [outcome[name] for outcome in outcomes if name in outcome]
    of = len(outcomes) if whole else len(having)
    return f"{name} {100 * sum(having) / of:.1f} %" + f" of {of}" * (of < len(outcomes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000, help="of each case (1000)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="cases whose names hold this word")
    parser.add_argument("--so-far", type=Path, help="a file that holds the table as far as it is, now and then")
    args = parser.parse_args()
    chosen = [(case, list[Outcome]()) for case in cases() if args.only in case.name]
    began_s = time.process_time()
    for first in range(0, args.runs, 25):
        for case, outcomes in chosen:
            seeds = range(first, min(first + 25, args.runs))
            outcomes += [case.run(1_000_000 * args.seed + seed) for seed in seeds]
            if args.so_far:
                args.so_far.write_text(f"{table(chosen)}\n\n{time.process_time() - began_s:.0f} s of CPU time\n")
    print(table(chosen))
    print(f"\nseed {args.seed}, {time.process_time() - began_s:.0f} s of CPU time")


if __name__ == "__main__":
    main()
