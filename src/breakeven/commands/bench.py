"""`breakeven bench`."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any

from breakeven.commands.flags import add_load, add_output, add_requests, add_server, flag, given_options
from breakeven.errors import UsageError

__all__ = ["add"]

_EPILOG = """examples:
  breakeven bench --server-url http://localhost:8000 --concurrency 1 2 5 10 30 70 100 250 --max-tokens 512
  breakeven bench --server-url http://localhost:8000 --rate 0.5 1 2 --arrivals poisson
  breakeven bench --serve "vllm serve MODEL --port {port}" --concurrency 1 8 64
  breakeven bench --local --concurrency 1 2 4 8          the embedded engine: started, measured, stopped
  breakeven bench --local ngram-simple --budget 5m
  breakeven bench --vllm eagle3:2 --concurrency 1 4 16   vLLM on this processor (make vllm)
  breakeven bench --resume runs/20261130-101500-bench    go on where a run was interrupted
"""
#: What may stand beside --resume: all else is the run's own.
_BESIDE_RESUME = {"server_url", "serve", "headers", "api_key_env", "format", "quiet"}


def add(commands: Any) -> None:
    """Adds the command to a parser's subcommands."""
    parser = commands.add_parser(
        "bench",
        help="measure a server at a list of loads",
        description="Measure a server at a list of loads, with intervals.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    parser.set_defaults(run=_run)
    add_server(parser)
    add_load(parser)
    add_requests(parser)
    add_output(parser)
    parser.add_argument("--resume", type=Path, metavar="DIR", help="go on with a run that was interrupted")


def _run(args: argparse.Namespace) -> int:
    from breakeven.benchmark import bench, resume
    from breakeven.options import BenchOptions
    from breakeven.report.table import render

    given, directory = given_options(args), getattr(args, "resume", None)
    if directory is not None:
        _check_resume(args)
        done = resume(directory, BenchOptions(**given))
    else:
        if sum(name in given for name in ("server_url", "local", "vllm", "serve")) != 1:
            raise UsageError("give one of --server-url URL, --serve COMMAND, --local and --vllm")
        done = bench(BenchOptions(**given))
    print(render(done.summary, given.get("format", "table")), end="", flush=True)
    with contextlib.suppress(OSError):  # a full or closed stderr is no reason to fail a run that is done
        print(f"records: {done.directory}", file=sys.stderr)
    return 128 + done.signal if done.signal else int(done.lost)


def _check_resume(args: argparse.Namespace) -> None:
    others = vars(args).keys() - _BESIDE_RESUME - {"command", "run", "resume"}
    if others:
        raise UsageError(f"--resume takes the run's own flags: leave {flag(min(others))} out")
