"""Loads that swing and prompts that change, on real servers: what does each arm make of the same work?

    python benchmarks/swinging.py --arm off=vllm: --arm on=vllm:eagle3:2 --arm auto=vllm:eagle3:auto@0,1,2,3 \\
        --phase 1x4 16x48 1x4 --blocks 6

A phase `16x48:chat+maths` has 48 requests of these kinds, 16 in flight. The work of all phases is the same for every
arm, so that tokens a second compare by the time it takes. In each block every arm does it once, in an order that turns.
The last arm is held against each of the others. A block before the first warms up and is in no figure; a policy learns
in it.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from breakeven.decide.ratio import Ratio, paired
from breakeven.engines.process import ServerProcess
from breakeven.engines.vllm import start_vllm
from breakeven.load.prompts import Prompt, load_prompts

START_LIMIT_S, ANSWER_LIMIT_S = 600.0, 600.0


class Phase(NamedTuple):
    """So many requests, of which so many are in flight."""

    in_flight: int
    requests: int
    kinds: tuple[str, ...]


class Block(NamedTuple):
    """The work done once: seconds of each phase, and tokens in all."""

    seconds: list[float]
    tokens: int


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
    """Asks once; how many tokens came."""
    place = urlsplit(server.url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=ANSWER_LIMIT_S)
    messages = prompt.messages or [{"role": "user", "content": prompt.text}]
    body = {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        read: dict[str, Any] = json.loads(connection.getresponse().read())
        return int(read["usage"]["completion_tokens"])
    finally:
        connection.close()


def live(phases: Sequence[Phase], prompts: Sequence[Sequence[Prompt]], ask: Callable[[Prompt], int]) -> Block:
    """Does the work of all phases, one after the other."""
    seconds, tokens = [], 0
    for phase, own in zip(phases, prompts, strict=True):
        began_s = time.monotonic()
        with ThreadPoolExecutor(phase.in_flight) as pool:
            tokens += sum(pool.map(ask, own))
        seconds.append(time.monotonic() - began_s)
    return Block(seconds, tokens)


def model_of(server: ServerProcess) -> str:
    """The name by which it wants to be asked."""
    place = urlsplit(server.url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=30)
    connection.request("GET", "/v1/models")
    return str(json.loads(connection.getresponse().read())["data"][0]["id"])


def shown(ratio: object) -> str:
    """With its interval."""
    if not isinstance(ratio, Ratio):
        return "-"
    return f"{ratio.value:.3f} ({ratio.interval().low:.3f} to {ratio.interval().high:.3f})"


def report(blocks: dict[str, list[Block]], phases: Sequence[Phase]) -> None:
    """Tokens a second of each arm, and the last arm against the others: over all, and phase by phase."""
    *others, last = blocks
    print("| arm | tok/s, each block | " + f"{last} / arm, all phases | " + " | ".join(map(name_of, phases)) + " |")
    print("| --- | --- | --- |" + " --- |" * len(phases))
    for name, own in blocks.items():
        rates = " ".join(f"{each.tokens / sum(each.seconds):.1f}" for each in own)
        cells = [""] * (1 + len(phases))
        if name in others:
            whole = paired([1 / sum(b.seconds) for b in own], [1 / sum(b.seconds) for b in blocks[last]])
            parts = [
                paired([1 / b.seconds[i] for b in own], [1 / b.seconds[i] for b in blocks[last]])
                for i in range(len(phases))
            ]
            cells = [shown(each) for each in (whole, *parts)]
        print(f"| {name} | {rates} | " + " | ".join(cells) + " |")


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
    blocks: dict[str, list[Block]] = {name: [] for name in specs}
    with start_vllm(specs, requests=most, start_timeout_s=START_LIMIT_S, say=say) as servers:
        models = {name: model_of(server) for name, server in servers.items()}
        for number in range(args.blocks + 1):
            prompts = work(args.phase, seed=number)
            for name in list(specs) if number % 2 else reversed(list(specs)):
                server, model = servers[name], models[name]
                done = live(args.phase, prompts, lambda p, s=server, m=model: answer(s, m, p, args.max_tokens))  # type: ignore[misc]
                say(f"block {number} {name}: {done.tokens} tokens, {', '.join(f'{s:.1f}' for s in done.seconds)} s")
                blocks[name] += [done] if number else []
    report(blocks, args.phase)


def say(text: str) -> None:
    """How it goes."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
