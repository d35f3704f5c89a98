"""Loads that swing and prompts that change, on real servers: what does each arm make of the same work?

    python benchmarks/swinging.py --arm off=vllm: --arm on=vllm:eagle3:2 --arm auto=vllm:eagle3:auto@0,1,2,3 \\
        --phase 1x4 4x8 16x32 32x64 8x16 2x6 --blocks 6

A phase `16x32:chat+maths` has 32 requests of these kinds, 16 in flight. The work is the same for every arm (the same
prompts, each answered with `--max-tokens`, whatever the model would have ended with), so that tokens a second compare
by the time it takes, and what differs is the arm and the machine. In each phase the arms step by turns of less than a
second (`turns.py`), until each is through; its time is that of its turns. The last arm is held against each of the
others, phase by phase and over all, and against the best other arm of each phase (`decide.envelope`), with Holm's
correction over the phases; the geometric mean over them is against those that were the fastest in the same figures, to
the last arm's disadvantage. Before the first block the last arm does one alone, which is in no figure: a policy learns
in it. What arms make of loads that stay, `levels.py` measures.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import cycle, islice
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, NamedTuple

from turns import Turns

from breakeven.decide.envelope import envelope_ratio
from breakeven.decide.holding import holding
from breakeven.decide.ratio import Ratio, paired
from breakeven.engines.http import Client
from breakeven.engines.identify import choose_model, identify
from breakeven.engines.process import ServerProcess
from breakeven.engines.vllm import start_vllm
from breakeven.load.prompts import Prompt, load_prompts

START_LIMIT_S, ANSWER_LIMIT_S = 600.0, 600.0
_MARGIN = 0.03


class Phase(NamedTuple):
    """So many requests, of which so many are in flight."""

    in_flight: int
    requests: int
    kinds: tuple[str, ...]


def read_phase(text: str) -> Phase:
    """Reads `16x48:chat+maths`; without kinds it has all."""
    size, _, kinds = text.partition(":")
    in_flight, _, requests = size.partition("x")
    return Phase(int(in_flight), int(requests), tuple(kinds.split("+")) if kinds else ())


def work(phases: Sequence[Phase], seed: int) -> list[list[Prompt]]:
    """The prompts of each phase; later phases of the same kinds go on where the one before ended."""
    endless: dict[tuple[str, ...], Iterator[Prompt]] = {}
    found = []
    for phase in phases:
        if phase.kinds not in endless:
            endless[phase.kinds] = cycle(load_prompts(None, phase.kinds, seed=seed).prompts)
        found.append(list(islice(endless[phase.kinds], phase.requests)))
    return found


def answer(server: ServerProcess, model: str, prompt: Prompt, max_tokens: int) -> int:
    """Asks once; how many tokens came. Raises TargetError, TypeError or KeyError where no answer comes."""
    body = {"model": model, "messages": prompt.as_messages(), "max_tokens": max_tokens, "temperature": 0}
    with Client(server.url, {}, ANSWER_LIMIT_S) as client:
        read: Any = client.post("/v1/chat/completions", json.dumps(body | {"ignore_eos": True}).encode()).json()
    return int(read["usage"]["completion_tokens"])


def rates_of(
    servers: Mapping[str, ServerProcess], turns: Turns, first: int, phase: Phase, prompts: Sequence[Prompt], most: int
) -> dict[str, float]:
    """Asks each server all prompts, so many at a time; tokens a second of its own time."""
    with ExitStack() as stack:
        asked: dict[str, list[Future[int]]] = {name: [] for name in servers}
        for name, server in servers.items():
            model = choose_model(identify(server.url, {}), None)
            pool = stack.enter_context(ThreadPoolExecutor(phase.in_flight))
            asked[name] = [pool.submit(answer, server, model, prompt, most) for prompt in prompts]
        try:
            took_s = turns.run(first, lambda name: all(each.done() for each in asked.get(name, ())))
        except BaseException:
            turns.free()  # else the pools wait for answers that get no turn
            raise
        return {name: sum(each.result() for each in own) / took_s[name] for name, own in asked.items()}


def whole(rates: Sequence[float], phases: Sequence[Phase]) -> float:
    """Tokens a second over all phases of a block, whose answers are of one length."""
    return sum(p.requests for p in phases) / sum(p.requests / r for p, r in zip(phases, rates, strict=True))


def compared(base: Sequence[float], other: Sequence[float]) -> str:
    """The ratio of rates, with its interval."""
    ratio = paired(base, other)
    if not isinstance(ratio, Ratio):
        return "-"
    return f"{ratio.value:.3f} ({ratio.interval().low:.3f} to {ratio.interval().high:.3f})"


def report(rates: dict[str, list[list[float]]], phases: Sequence[Phase]) -> None:
    """The median tokens a second of each arm, and the last arm against the others; `rates` by arm, block and phase."""
    *others, last = rates
    print("| phase | " + " | ".join(rates) + " | " + " | ".join(f"{last} / {other}" for other in others) + " |")
    print("| --- |" + " --- |" * (len(rates) + len(others)))
    for i, phase in enumerate([*map(name_of, phases), "all"]):
        own = {n: [b[i] if i < len(phases) else whole(b, phases) for b in blocks] for n, blocks in rates.items()}
        medians = [f"{median(each):.1f}" for each in own.values()]
        print(f"| {phase} | " + " | ".join(medians + [compared(own[each], own[last]) for each in others]) + " |")
    if not others:
        return
    best = {
        float(i): envelope_ratio([b[i] for b in rates[last]], {n: [b[i] for b in rates[n]] for n in others}, name=last)
        for i in range(len(phases))
    }
    names = {float(i): name_of(phase) for i, phase in enumerate(phases)}
    found = holding(best, names, arm=last, margin=_MARGIN, unit=("block", 1))
    print("\n| phase | best other arm | ratio (95 %) | half-width | p, Holm | |\n| --- | --- | --- | --- | --- | --- |")
    for level in found.levels:
        if level.value and level.ci95 and level.half_width:
            inside = f"{level.value:.3f} ({level.ci95.low:.3f} to {level.ci95.high:.3f})"
            cells = [level.name, " or ".join(level.best), inside, f"{level.half_width:.3f}", f"{level.p_holm:.2f}"]
            print("| " + " | ".join([*cells, level.state]) + " |")
    fastest = [max(others, key=lambda n: geometric_mean([b[i] for b in rates[n]])) for i in range(len(phases))]
    base = [geometric_mean([rates[n][j][i] for i, n in enumerate(fastest)]) for j in range(len(rates[last]))]
    mean = compared(base, [geometric_mean(block[: len(phases)]) for block in rates[last]])
    print(
        f"\ngeometric mean over the phases, against the fastest other arm of each: {mean}\n\n{found.sentence}\n",
        flush=True,
    )


def name_of(phase: Phase) -> str:
    """As it was written."""
    return f"{phase.in_flight}x{phase.requests}" + (f":{'+'.join(phase.kinds)}" if phase.kinds else "")


def tell(number: int, phase: Phase, found: Mapping[str, float]) -> None:
    """How a phase of a block went."""
    say(f"block {number}, {name_of(phase)}: " + ", ".join(f"{name} {rate:.1f}" for name, rate in found.items()))


def options(doc: str | None) -> argparse.ArgumentParser:
    """What `started` and the measurements have to be told."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arm", action="append", required=True, metavar="NAME=vllm:…")
    parser.add_argument("--phase", nargs="+", type=read_phase, required=True, metavar="CxN:KINDS")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--flags", default="", help="vLLM's own, for all arms")
    parser.add_argument("--turn", type=float, default=0.02, metavar="SECONDS", help="and the rest of a step (0.02)")
    return parser


@contextmanager
def started(args: argparse.Namespace) -> Iterator[tuple[dict[str, ServerProcess], Turns]]:
    """The servers of the arms, and who gives them turns."""
    specs = {name: spec.removeprefix("vllm:") for name, _, spec in (arm.partition("=") for arm in args.arm)}
    turns = Turns(list(specs), args.turn)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    starting = start_vllm(
        specs,
        requests=max(phase.in_flight for phase in args.phase),
        start_timeout_s=START_LIMIT_S,
        say=say,
        flags={name: [*shlex.split(args.flags), *turns.flags(name)] for name in specs},
    )
    with ExitStack() as stack:
        stack.callback(turns.free)  # where a server doesn't start
        servers = stack.enter_context(starting)
        stack.callback(turns.free)  # before they are to end
        yield servers, turns


def main() -> None:
    """Measures and prints."""
    args = options(__doc__).parse_args()
    with started(args) as (servers, turns):
        rates: dict[str, list[list[float]]] = {name: [] for name in servers}
        for number in range(args.blocks + 1):
            ours = servers if number else {last: servers[last] for last in list(servers)[-1:]}
            done: dict[str, list[float]] = {name: [] for name in ours}
            for phase, prompts in zip(args.phase, work(args.phase, seed=number), strict=True):
                found = rates_of(ours, turns, number, phase, prompts, args.max_tokens)
                tell(number, phase, found)
                for name, rate in found.items():
                    done[name].append(rate)
            if number:
                for name, own in done.items():
                    rates[name].append(own)
                report(rates, args.phase)


def say(text: str) -> None:
    """How it goes."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
