"""`breakeven doctor`."""

from __future__ import annotations

import argparse
from typing import Any

from breakeven.commands.flags import add_access, add_load, add_requests, given_options

__all__ = ["add"]


def add(commands: Any) -> None:
    """Adds the command to a parser's subcommands."""
    parser = commands.add_parser(
        "doctor",
        help="what this machine can measure, and what answers at a URL",
        description="What this machine can measure and what to change; with a URL, what was found there and how long a "
        "bench with the same flags will take. Exit code 1 if something is a problem.",
        argument_default=argparse.SUPPRESS,
    )
    parser.set_defaults(run=_run)
    add = parser.add_argument_group("server").add_argument
    add("--server-url", metavar="URL", help="the server, e.g. http://localhost:8000")
    add_access(add)
    add_load(parser)
    add_requests(parser)
    parser.add_argument("--format", choices=("table", "json"), help="what is printed (table)")


def _run(args: argparse.Namespace) -> int:
    from breakeven.doctor import doctor
    from breakeven.options import BenchOptions
    from breakeven.report.diagnosis import render_diagnosis

    given = given_options(args)
    form = given.pop("format", "table")
    diagnosis = doctor(BenchOptions(**given))
    print(render_diagnosis(diagnosis, form), end="", flush=True)
    return int(diagnosis.has_problems)
