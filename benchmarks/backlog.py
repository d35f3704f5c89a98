"""How often a growing backlog is found, by simulation, where there is one and where there is none.

    python benchmarks/backlog.py [--windows 1000]

Simulated is an open loop on three kinds of server that hold 8 answers of 1 s a second at most (the first: any number),
at loads on both sides of what they hold. Windows are of 300 requests and open as the load generator opens them: when
all that was sent before the first answer has ended. docs/statistics.md has the figures.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
from bisect import bisect
from collections.abc import Callable
from itertools import islice

from breakeven.load.pace import due_times
from breakeven.measure.open_loop import backlog
from breakeven.records import RequestRecord

__all__ = ["SLOTS", "Server", "queue", "queue_of_any", "share_that_grows", "shared", "unlimited"]

SLOTS = 8
REQUESTS = 300
S = 1_000_000_000

#: When requests end that are due at some times, in seconds.
Server = Callable[[list[float], random.Random], list[float]]


def unlimited(due: list[float], rng: random.Random) -> list[float]:
    """M/G/inf: answers that do not disturb each other, about as long as the window."""
    return [at + 30 * rng.lognormvariate(-0.125, 0.5) for at in due]


def queue(due: list[float], rng: random.Random) -> list[float]:
    """M/D/8: first come, first served, 1 s each."""
    return _served(due, [1.0] * len(due))


def queue_of_any(due: list[float], rng: random.Random) -> list[float]:
    """M/M/8: first come, first served, exponential times of 1 s in the mean."""
    return _served(due, [rng.expovariate(1.0) for _ in due])


def shared(due: list[float], rng: random.Random) -> list[float]:
    """Processor sharing, as a batch that all join at once: beyond 8 each is the slower, the more there are."""
    ends = [0.0] * len(due)
    running: list[tuple[float, int]] = []  # how much is done for each by now when it ends, and its number
    now = done = 0.0
    coming = iter([*enumerate(due), (-1, math.inf)])
    number, at = next(coming)
    while running or number >= 0:
        speed = min(1.0, SLOTS / len(running)) if running else 0.0
        next_end = now + (running[0][0] - done) / speed if running else math.inf
        if at <= next_end:
            done, now = done + (at - now) * speed, at
            heapq.heappush(running, (done + rng.uniform(0.3, 1.7), number))
            number, at = next(coming)
        else:
            now, (done, ended) = next_end, heapq.heappop(running)
            ends[ended] = now
    return ends


def share_that_grows(server: Server, rho: float, arrivals: str = "poisson", *, windows: int) -> float:
    """How many of some windows are found to grow, at `rho` of what the server holds."""
    return sum(_grows(server, rho, arrivals, seed) for seed in range(windows)) / windows


def _grows(server: Server, rho: float, arrivals: str, seed: int) -> bool:
    due = list(islice(due_times(rho * SLOTS, arrivals, seed=seed), 2500))
    end = server(due, random.Random(seed))
    first_end = min(end)
    opened = max(e for d, e in zip(due, end, strict=True) if d < first_end)
    first = bisect(due, opened)
    window = (round(opened * S), round(due[first + REQUESTS] * S))
    records = [_record(i, round(due[i] * S), round(end[i] * S)) for i in range(first + REQUESTS + 1)]
    return backlog(records, window, rho * SLOTS).grows


def _record(number: int, due_ns: int, end_ns: int) -> RequestRecord:
    return RequestRecord(
        id=number,
        level=0,
        phase="measured",
        prompt="",
        kind="",
        max_tokens=1,
        due_ns=due_ns,
        sent_ns=due_ns,
        end_ns=end_ns,
        outcome="ok",
    )


def _served(due: list[float], takes: list[float]) -> list[float]:
    free, ends = [0.0] * SLOTS, []
    for at, seconds in zip(due, takes, strict=True):
        ends.append(max(at, heapq.heappop(free)) + seconds)
        heapq.heappush(free, ends[-1])
    return ends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=1000, help="per cell (1000)")
    windows = parser.parse_args().windows
    loads = (0.5, 0.8, 0.9, 0.95, 1.05, 1.1, 1.3)
    print("| arrivals | server |", " | ".join(f"{rho:g}" for rho in loads), "|")
    print("| --- | --- |", " | ".join("---:" for _ in loads), "|")
    for arrivals in ("poisson", "constant", "gamma:2"):
        for server in (unlimited, queue, queue_of_any, shared):
            possible = [rho for rho in loads if rho < 1 or server is not unlimited]
            shares = [share_that_grows(server, rho, arrivals, windows=windows) for rho in possible]
            cells = [*(f"{100 * share:.1f}" for share in shares), *"-" * (len(loads) - len(shares))]
            print(f"| {arrivals} | {server.__name__} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
