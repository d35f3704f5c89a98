"""`breakeven compare`."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from breakeven.commands.flags import (
    add_access,
    add_load,
    add_output,
    add_requests,
    add_serve_timeout,
    flag,
    given_options,
)
from breakeven.commands.values import arm, count, share
from breakeven.errors import UsageError

if TYPE_CHECKING:
    from breakeven.options import Format

__all__ = ["add"]

_EPILOG = """arms:
  NAME=http://HOST:PORT              a server that is up
  NAME=local: or local:ngram-simple  the embedded engine
  NAME=serve:COMMAND                 a server to start, on the port that it gets as {port}

examples:
  breakeven compare --arm off=http://localhost:8000 --arm on=http://localhost:8001 --concurrency 1 2 5 10 30 70 100
  breakeven compare --arm off="serve:vllm serve M --port {port}" \\
                    --arm on="serve:vllm serve M --port {port} --speculative-config '{…}'"
  breakeven compare --arm off=local: --arm on=local:ngram-simple --concurrency 1 2 4 8
  breakeven compare runs/off runs/on                    runs that exist; or the directory of a comparison
"""
#: What belongs to the comparison and not to the load.
_OWN = {
    "arm": "arms",
    "cycles": "cycles",
    "concurrently": "concurrently",
    "force": "force",
    "ratio_precision": "precision",
    "repeats": "repeats",
}


def add(commands: Any) -> None:
    """Adds the command to a parser's subcommands."""
    parser = commands.add_parser(
        "compare",
        help="where an arm pays against another: ratios, verdicts, break-even",
        description="Measure arms by turns, or read runs that exist, and say where the second pays against the first, "
        "and how sure that is.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    parser.set_defaults(run=_run)
    parser.add_argument(
        "directories", nargs="*", type=Path, default=[], metavar="DIR", help="runs, the reference first"
    )
    add = parser.add_argument_group("arms").add_argument
    add("--arm", action="append", type=arm, metavar="NAME=WHERE", help="an arm; the first is the reference")
    add("--cycles", type=count, metavar="N", help="so many ABBA cycles at each load, two turns of each arm")
    add("--concurrently", action="store_true", help="load the arms at the same time: only on machines of their own")
    add("--slo", metavar="LIMITS", help="the largest load that holds them, e.g. ttft_p99:2000,tpot_p50:50 (ms)")
    add("--force", action="store_true", help="compare runs that are unlike")
    add_serve_timeout(add)
    add_access(add)
    add("--repeats", type=count, metavar="R", help="sweeps of each arm, where arms are started by a command (3)")
    add(
        "--precision",
        dest="ratio_precision",
        type=share,
        metavar="SHARE",
        help="4 cycles (or N), then up to four times as many, until the ratio's 95%% interval is within this (0.025)",
    )
    add_load(parser, of_turns=True)
    add_requests(parser)
    add_output(parser, of_turns=True)


def _run(args: argparse.Namespace) -> int:
    from breakeven.report.comparison import render_comparison

    directories: list[Path] = args.directories
    form: Format = getattr(args, "format", "table")
    if directories:
        from breakeven.versus import compare_directories

        _check_alone(args)
        comparison = compare_directories(directories, getattr(args, "slo", None), force=getattr(args, "force", False))
        print(render_comparison(comparison, form), end="", flush=True)
        return 0
    return _measure(args, form)


def _measure(args: argparse.Namespace, form: Format) -> int:
    from breakeven.options import BenchOptions, CompareOptions
    from breakeven.report.comparison import render_comparison
    from breakeven.versus import measure_and_compare

    given = given_options(args)
    own = {field: given.pop(name) for name, field in _OWN.items() if name in given}
    del given["directories"]
    if "cycles" in own:
        own.setdefault("precision", None)
    slo = given.pop("slo", None)
    if "arms" not in own:
        raise UsageError("give two arms (--arm off=URL --arm on=URL), or the directories of two runs")
    given.setdefault("keep_text", given.get("temperature", 0.0) == 0.0)
    done = measure_and_compare(CompareOptions(bench=BenchOptions(**given), **own), slo)
    if done.comparison is not None:
        print(render_comparison(done.comparison, form), end="", flush=True)
    with contextlib.suppress(OSError):  # a full or closed stderr is no reason to fail a comparison that is done
        if done.lost:
            rests = "; the comparison rests on what was measured" if done.comparison is not None else ""
            print(f"the server of {done.lost} is gone{rests}", file=sys.stderr)
        if done.why_not:
            print(f"ended too early to compare anything: {done.why_not}", file=sys.stderr)
        print(f"records: {done.directory}", file=sys.stderr)
    return 128 + done.signal if done.signal else int(done.lost is not None)


def _check_alone(args: argparse.Namespace) -> None:
    others = vars(args).keys() - {"command", "run", "directories", "slo", "force", "format", "quiet"}
    if others:
        raise UsageError(f"runs that exist are only read: leave {flag(min(others))} out, or leave the directories out")
