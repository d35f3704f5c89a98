"""Many streams at once: is every request there, is every token, and what does a stream cost?

    python benchmarks/streams.py [--concurrency 1000 5000 10000]

`breakeven bench` against the null server, whose steps are so long that the chunks of all streams together stay within
what two shared cores can do. Each request that the server had is looked for in the records, and each token. Memory is
the peak of the client's resident set, read from /proc while it runs: less that of a run with one stream, by streams;
with --growth by ended requests, whose records stay until their level is summarised, from runs that differ in length
alone. docs/benchmarks.md has the figures.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from breakeven.engines.null import TruthRow, null_server
from breakeven.records import RequestRecord
from breakeven.runs import Run, read_run

__all__ = ["Load", "Measured", "check", "measure"]

#: Tokens of the probe with which a bench begins.
PROBE_TOKENS = 16
#: Seconds of a step for 10,000 streams; fewer streams have shorter ones, down to half a second.
STEP_S = 2.0
#: How often the client's memory is looked at.
LOOK_S = 0.05


class Load(NamedTuple):
    """What is asked for: requests inside the window at each level, tokens of each, seconds between two chunks."""

    levels: Sequence[int]
    requests: int
    tokens: int
    step_s: float


class Measured(NamedTuple):
    """What came out. `faults` says in words what was lost; memory is in KiB, times in seconds."""

    levels: list[dict[str, Any]]
    ended: int
    faults: list[str]
    peak_kib: int
    filled_s: float


def measure(load: Load) -> Measured:
    """One run of `breakeven bench` on a null server of its own."""
    with null_server("--step-us", f"{load.step_s * 1e6:.0f}") as server, tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "run"
        command = [sys.executable, "-m", "breakeven", "bench", "--server-url", server.url, "--warmup", "0"]
        command += ["--concurrency", *map(str, load.levels), "--requests", str(load.requests)]
        command += ["--max-tokens", str(load.tokens), "--output", str(out)]
        peak_kib = _peak_kib(command)
        run = read_run(out)
        levels: list[dict[str, Any]] = json.loads((out / "summary.json").read_text())["levels"]
        return Measured(levels, len(run.requests), check(run, server.truth(), load), peak_kib, _filled_s(run))


def check(run: Run, truth: Sequence[TruthRow], load: Load) -> list[str]:
    """What is wrong with a run beside the server's own record of it, in words. It alone has used the server."""
    well = [record for record in run.requests if record.outcome == "ok"]
    cut = [record for record in run.requests if record.outcome == "cancelled" and record.phase == "drain"]
    numbers = Counter(record.id for record in run.requests)
    unseen = Counter(row.tokens for row in truth if row.finished)
    unseen.subtract([PROBE_TOKENS, *(record.output_tokens for record in well)])
    faults = {
        "numbers that no request has, or more than one": sum(numbers[i] != 1 for i in range(len(numbers))),
        # of those that we cancelled at the end it may not have seen the last
        "requests that the server had and we have not": max(0, len(truth) - 1 - len(run.requests)),
        "failed": len(run.requests) - len(well) - len(cut),
        "answers with other tokens than were asked for": sum(not _is_exact(record) for record in well),
        "answers that the server did not give": -sum(count for count in unseen.values() if count < 0),
        # one that ended while we cancelled it is whole to the server
        "answers that went unseen": max(0, sum(unseen.values()) - len(cut)),
    }
    return [f"{count} {what}" for what, count in faults.items() if count]


def _is_exact(record: RequestRecord) -> bool:
    return record.max_tokens == record.output_tokens == sum(tokens for _, tokens in record.arrivals) == record.chunks


def _filled_s(run: Run) -> float:
    """Between the first request and the one that filled the last level."""
    level = run.levels[-1].plan
    sent_ns = sorted(record.sent_ns for record in run.of_level(level.index) if record.sent_ns is not None)
    return (sent_ns[level.concurrency - 1] - sent_ns[0]) / 1e9


def _peak_kib(command: list[str]) -> int:
    """Runs a command; returns the most memory it had. What children inherit at the start (ru_maxrss) is not in it."""
    peak_kib = 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak_kib = next((int(row.split()[1]) for row in status.splitlines() if row.startswith("VmHWM")), peak_kib)
            time.sleep(LOOK_S)
        if process.returncode:
            assert process.stderr is not None
            raise SystemExit(process.stderr.read())
    return peak_kib


def print_streams(counts: Sequence[int], tokens: int) -> None:
    """A row for each number of streams."""
    base_kib = measure(Load([1], 8, tokens, 0.05)).peak_kib
    print(f"One stream: {base_kib / 1024:.1f} MiB.\n")
    print(
        "| streams | step s | all sent after s | requests | failed or lost | in flight: mean | most | chunks/s | "
        "CPU µs a chunk | lag p99 ms | peak MiB | KiB a stream |\n| " + "---: | " * 12
    )
    for count in counts:
        load = Load([count], count, tokens, max(0.5, STEP_S * count / 10_000))
        found = measure(load)
        [level] = found.levels
        client = level["client"]
        row = [
            f"{count:,}",
            f"{load.step_s:g}",
            f"{found.filled_s:.1f}",
            f"{found.ended:,}",
            "; ".join(found.faults) or "0",
            f"{level['in_flight']['mean']:,.0f}",
            f"{level['in_flight']['max']:,.0f}",
            f"{level['output_throughput']['value'] or 0:,.0f}",
            f"{client['cpu_us_per_chunk']:.0f}",
            f"{client['lag_ms']['p99']:.0f}",
            f"{found.peak_kib / 1024:.0f}",
            f"{(found.peak_kib - base_kib) / count:.1f}",
        ]
        print(f"| {' | '.join(row)} |", flush=True)


def print_growth(streams: int, step_s: float) -> None:
    """What a run's length costs: more requests in a level, longer ones, and more levels."""
    print("| levels | tokens | requests | failed or lost | peak MiB | KiB a further request |\n| " + "---: | " * 6)
    for tokens in (8, 32):
        before: Measured | None = None
        for requests, levels in ((1_000, 1), (8_000, 1), (8_000, 3)):
            load = Load([streams + i for i in range(levels)], requests * 8 // tokens, tokens, step_s)
            found = measure(load)
            further = "-"
            if before is not None:
                further = f"{(found.peak_kib - before.peak_kib) / (found.ended - before.ended):.2f}"
            row = [str(levels), str(tokens), f"{found.ended:,}", "; ".join(found.faults) or "0"]
            print(f"| {' | '.join(row)} | {found.peak_kib / 1024:.0f} | {further} |", flush=True)
            before = found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1000, 5000, 10_000], help="streams")
    parser.add_argument("--tokens", type=int, default=8, help="of a request, each a chunk (8)")
    parser.add_argument("--growth", action="store_true", help="what a run's length costs, with 500 streams, instead")
    args = parser.parse_args()
    if args.growth:
        print_growth(500, 0.1)
    else:
        print_streams(args.concurrency, args.tokens)


if __name__ == "__main__":
    main()
