"""`breakeven summarize`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

__all__ = ["add"]


def add(commands: Any) -> None:
    summarize = commands.add_parser("summarize", help="make a run's summary again from its records")
    summarize.set_defaults(run=_run)
    summarize.add_argument("directory", type=Path, metavar="DIR", help="a run's directory")
    summarize.add_argument("--format", choices=("table", "markdown", "csv", "json"), default="table")


def _run(args: argparse.Namespace) -> int:
    from breakeven.measure.summary import summarize
    from breakeven.report.table import render
    from breakeven.runs import SUMMARY, read_run, write_json

    summary = summarize(read_run(args.directory))
    if summary.damaged:
        print(f"breakeven summarize: note: {args.directory}: {summary.damaged}; used up to it", file=sys.stderr)
    print(render(summary, args.format), end="", flush=True)
    write_json(args.directory / SUMMARY, summary)  # last: the numbers are shown even where they can't be kept
    return 0
