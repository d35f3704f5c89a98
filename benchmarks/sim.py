"""How fast the simulator is, in request-steps a second (one request through one step): `python benchmarks/sim.py`.

Simulated are minutes of a closed loop, with K fixed and with K asked of a function at each step. CPU time, the best of
some repetitions; asked for are 100,000. The loops are the load generator's own, on asyncio in virtual time, which costs
some 10 µs a step and is why few requests in flight make fewer request-steps a second, not fewer steps.
"""

from __future__ import annotations

import argparse
import time

from breakeven.load.prompts import load_prompts
from breakeven.load.window import StopRule
from breakeven.records import LevelPlan
from breakeven.sim.engine import ChooseK
from breakeven.sim.level import Conditions
from breakeven.sim.model import EngineModel, Noise
from breakeven.sim.run import simulate

MODEL = EngineModel(noise=Noise(sd=0.1, memory_s=1.0, jitter_sd=0.05))


def speed(concurrency: int, k: int | ChooseK, most_k: int, seconds: float) -> tuple[float, float]:
    """Request-steps a second of CPU time, and virtual seconds a second, of one level."""
    level = LevelPlan(index=0, run=0, concurrency=concurrency, max_tokens=256)
    conditions = Conditions(load_prompts(None), StopRule(duration_s=seconds))
    began_s = time.process_time()
    (record,), requests = simulate(MODEL, [level], k, conditions, most_k=most_k)
    took_s = time.process_time() - began_s
    return sum(request.chunks for request in requests) / took_s, record.ended_ns / 1e9 / took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="virtual seconds of each level (120)")
    parser.add_argument("--repeat", type=int, default=5, help="of which the best is shown (5)")
    args = parser.parse_args()
    print("| K | C | request-steps/s | virtual s a CPU s |\n| --- | ---: | ---: | ---: |")
    kinds: dict[str, int | ChooseK] = {"0": 0, "3": 3, "3, asked at each step": lambda seen: 3}
    for name, k in kinds.items():
        for concurrency in (1, 4, 16, 64, 256):
            steps, virtual = max(speed(concurrency, k, int(name[0]), args.seconds) for _ in range(args.repeat))
            print(f"| {name} | {concurrency} | {steps:,.0f} | {virtual:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
