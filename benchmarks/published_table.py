"""The sweep that this project started from, run against a server with its step times: does the table come out?

    python benchmarks/published_table.py [--time-scale 0.015]

Kimi-K2.5 INT4 with EAGLE-3 under SGLang on 8 GPUs gave these output throughputs with 512 tokens. A step of B requests
is taken to last B x (tokens a step) / throughput, between the table's points linearly; tokens a step are 1, 3, 2. Time
is scaled, so that minutes become seconds. `off` is in multiples of the interval's half width: within ±1 for about
19 of 20 levels.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from breakeven.engines.null import null_server

#: Concurrency and total tokens a second, as published.
TABLE = {1: 77.5, 2: 125.1, 5: 183.2, 10: 239.6, 30: 299.5, 70: 337.7, 100: 338.8, 250: 340.9}
TOKENS_A_STEP = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time-scale", type=float, default=0.015)
    parser.add_argument("--duration", default="45s")
    args = parser.parse_args()
    steps = ",".join(f"{c}:{c * TOKENS_A_STEP / rate * 1e6:.0f}" for c, rate in TABLE.items())
    with (
        null_server("--step-table", steps, "--tokens", "1,3,2", "--time-scale", str(args.time_scale)) as server,
        tempfile.TemporaryDirectory() as directory,
    ):
        out = Path(directory) / "run"
        command = [sys.executable, "-m", "breakeven", "bench", "--server-url", server.url, "--max-tokens", "512"]
        command += ["--concurrency", *map(str, TABLE), "--duration", args.duration, "--output", str(out)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        levels = json.loads((out / "summary.json").read_text())["levels"]
    print("| C | published tok/s | measured | 95 % | off | in flight |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for level, published in zip(levels, TABLE.values(), strict=True):
        value = level["output_throughput"]["value"] * args.time_scale
        low, high = (edge * args.time_scale for edge in level["output_throughput"]["ci95"] or (value, value))
        half = (high - low) / 2
        off = f"{(value - published) / half:+.1f}" if half else "-"
        in_flight = level["in_flight"]["mean"]
        concurrency = level["load"]["concurrency"]
        print(f"| {concurrency} | {published} | {value:.1f} | {low:.1f} to {high:.1f} | {off} | {in_flight:.1f} |")


if __name__ == "__main__":
    main()
