"""The sweep that this project started from, run against a server with its step times: does the table come out?

    python benchmarks/published_table.py

Kimi-K2.5 INT4 with EAGLE-3 under SGLang on 8 GPUs gave these output throughputs with 512 tokens. A step of B requests
is taken to last B x (tokens a step) / throughput, between the table's points linearly; steps bring 1, 3, 2 tokens, so
that 512 take 257 of them. Time is scaled so that a step of each level takes 10 ms, a request 2.6 s, and a window of
33 s has an interval. The server has no noise, so that the interval is that of the client alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from breakeven.engines.null import null_server

#: Concurrency and total tokens a second, as published.
TABLE = {1: 77.5, 2: 125.1, 5: 183.2, 10: 239.6, 30: 299.5, 70: 337.7, 100: 338.8, 250: 340.9}
TOKENS_A_STEP = 512 / 257
SCALED_STEP_S = 0.01


def step_s(concurrency: int) -> float:
    return concurrency * TOKENS_A_STEP / TABLE[concurrency]


def measure(concurrency: int, scale: float) -> dict[str, Any]:
    steps = ",".join(f"{c}:{step_s(c) * 1e6:.0f}" for c in TABLE)
    with (
        null_server("--step-table", steps, "--tokens", "1,3,2", "--time-scale", str(scale)) as server,
        tempfile.TemporaryDirectory() as directory,
    ):
        out = Path(directory) / "run"
        command = [sys.executable, "-m", "breakeven", "bench", "--server-url", server.url, "--max-tokens", "512"]
        command += ["--concurrency", str(concurrency), "--duration", "33s", "--warmup", "1", "--output", str(out)]
        subprocess.run(command, check=True, capture_output=True)
        level: dict[str, Any] = json.loads((out / "summary.json").read_text())["levels"][0]
        return level


def main() -> None:
    print("| C | published tok/s | measured | 95 % | off | in flight |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for concurrency, published in TABLE.items():
        scale = SCALED_STEP_S / step_s(concurrency)
        level = measure(concurrency, scale)
        value = level["output_throughput"]["value"] * scale
        low, high = (edge * scale for edge in level["output_throughput"]["ci95"])
        in_flight = level["in_flight"]["mean"]
        row = (
            str(concurrency),
            str(published),
            f"{value:.1f}",
            f"{low:.1f} to {high:.1f}",
            f"{value / published - 1:+.2%}",
        )
        print(f"| {' | '.join(row)} | {in_flight:.1f} |", flush=True)


if __name__ == "__main__":
    main()
