"""Loads that swing and prompts that change, on real servers: what does each arm make of the same work?

    python benchmarks/swinging.py --arm off=vllm: --arm on=vllm:eagle3:2 --arm auto=vllm:eagle3:auto@0,1,2,3 \\
        --phase 1x4 4x8 16x32 32x64 8x16 2x6 --blocks 6

A phase `16x32:chat+maths` has 32 requests of these kinds, 16 in flight. The work is the same for every arm (the same
prompts, each answered with `--max-tokens`, whatever the model would have ended with), so that tokens a second compare
by the time it takes, and what differs is the arm and the machine. In each block the arms do a phase one after the
other, in an order that turns, and then the next phase. The last arm is held against each of the others, phase by phase
and over all phases. A block before the first warms up and is in no figure; a policy learns in it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from statistics import median
from typing import Any, NamedTuple

from breakeven.decide.ratio import Ratio, paired
from breakeven.engines.http import Client
from breakeven.engines.identify import choose_model, identify
from breakeven.engines.process import ServerProcess
from breakeven.engines.vllm import start_vllm
from breakeven.load.prompts import Prompt, load_prompts

START_LIMIT_S, ANSWER_LIMIT_S = 600.0, 600.0


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


def rate_of(server: ServerProcess, model: str, in_flight: int, prompts: Sequence[Prompt], max_tokens: int) -> float:
    """Asks all, so many at a time; tokens a second."""
    began_s = time.monotonic()
    with ThreadPoolExecutor(in_flight) as pool:
        tokens = sum(pool.map(lambda prompt: answer(server, model, prompt, max_tokens), prompts))
    return tokens / (time.monotonic() - began_s)


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


def name_of(phase: Phase) -> str:
    """As it was written."""
    return f"{phase.in_flight}x{phase.requests}" + (f":{'+'.join(phase.kinds)}" if phase.kinds else "")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arm", action="append", required=True, metavar="NAME=vllm:…")
    parser.add_argument("--phase", nargs="+", type=read_phase, required=True, metavar="CxN:KINDS")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    specs = {name: spec.removeprefix("vllm:") for name, _, spec in (arm.partition("=") for arm in args.arm)}
    most = max(phase.in_flight for phase in args.phase)
    rates: dict[str, list[list[float]]] = {name: [] for name in specs}
    with start_vllm(specs, requests=most, start_timeout_s=START_LIMIT_S, say=say) as servers:
        models = {name: choose_model(identify(server.url, {}), None) for name, server in servers.items()}
        for number in range(args.blocks + 1):
            done: dict[str, list[float]] = {name: [] for name in specs}
            for turn, (phase, prompts) in enumerate(zip(args.phase, work(args.phase, seed=number), strict=True)):
                for name in list(specs) if (number + turn) % 2 else reversed(specs):
                    server = servers[name]
                    done[name].append(rate_of(server, models[name], phase.in_flight, prompts, args.max_tokens))
                say(f"block {number}, {name_of(phase)}: " + ", ".join(f"{n} {own[-1]:.1f}" for n, own in done.items()))
            if number:
                for name, own in done.items():
                    rates[name].append(own)
                report(rates, args.phase)


def say(text: str) -> None:
    """How it goes."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
