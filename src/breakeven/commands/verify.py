"""`breakeven verify`."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from breakeven.commands.flags import given_options
from breakeven.commands.turns import add_load_of_turns, add_turns, check_alone, say_end, take_turns
from breakeven.commands.values import arm, share
from breakeven.errors import UsageError

if TYPE_CHECKING:
    from breakeven.decide.verify import Verification
    from breakeven.options import Format
    from breakeven.verifying import Verified

__all__ = ["add"]

_EPILOG = """examples:
  breakeven verify --arm off=http://localhost:8000 --arm on=http://localhost:8001 --arm tuned=http://localhost:8002 \\
                   --schedule schedule.json --concurrency 1 2 4 8 16 32
  breakeven verify --arm off=pin:0@URL --arm on=pin:4@URL --arm tuned=pin:auto@URL      inside one server
  breakeven verify --arm off=vllm: --arm on=vllm:eagle3:2 --arm 'tuned=vllm:eagle3:[[1,4,2],[5,64,0]]'
  breakeven verify runs/20261130-101500-verify --margin 0.02          runs that took turns, read again

Where an arm is (NAME=WHERE): as for breakeven compare.
Exit code: 0 where the tuned arm holds the envelope, 1 where it loses or the data can't tell.
"""
_PROOF = ("tuned", "margin", "schedule")
#: Ratios to each static arm are measured finer than the margin, since that to the best of them is a little wider.
_OF_MARGIN = 0.8


def add(commands: Any) -> None:
    """Adds the command to a parser's subcommands."""
    parser = commands.add_parser(
        "verify",
        help="whether a tuned arm holds what the best static arm reaches at each load",
        description="Measure static arms and a tuned one by turns, or read runs that took turns, and say whether the "
        "tuned arm holds the envelope of the others, and whether it drafted what its schedule says.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    parser.set_defaults(run=_run)
    parser.add_argument("directories", nargs="*", type=Path, default=[], metavar="DIR", help="runs that took turns")
    add = parser.add_argument_group("arms").add_argument
    add("--arm", action="append", type=arm, metavar="NAME=WHERE", help="an arm: two static ones or more, and the tuned")
    add("--tuned", metavar="NAME", help="the arm to prove (default: the last)")
    add("--margin", type=share, metavar="SHARE", help="so far below the best static arm still holds (0.03)")
    add("--schedule", type=Path, metavar="FILE", help="the schedule.json that the tuned arm was started with")
    add_turns(
        add,
        force="go on with arms that are unlike",
        precision="the 95%% interval of each ratio to the tuned arm is within this (0.8 of the margin)",
    )
    add_load_of_turns(parser)


def _run(args: argparse.Namespace) -> int:
    proof = {name: getattr(args, name) for name in _PROOF if hasattr(args, name)}
    form: Format = getattr(args, "format", "table")
    if args.directories:
        from breakeven.verifying import verify_directories

        check_alone(args, {"directories", *_PROOF})
        return _print(verify_directories(args.directories, force=getattr(args, "force", False), **proof), form)
    done = _measure(args, proof)
    code = 1 if done.verification is None else _print(done.verification, form)
    with contextlib.suppress(OSError):  # a full or closed stderr is no reason to fail a measurement that is done
        _say_end(done)
    return 128 + done.measured.signal if done.measured.signal else max(code, int(done.measured.lost is not None))


def _measure(args: argparse.Namespace, proof: dict[str, Any]) -> Verified:
    from breakeven.decide.verify import MARGIN
    from breakeven.options import BenchOptions, CompareOptions
    from breakeven.verifying import measure_and_verify

    given = given_options(args)
    own = take_turns(given)
    for name in ("directories", *_PROOF):
        given.pop(name, None)
    if "arms" not in own:
        raise UsageError(
            "give the arms (--arm off=URL --arm on=URL --arm tuned=URL), or the directory of a comparison of them"
        )
    own.setdefault("precision", _OF_MARGIN * proof.get("margin", MARGIN))
    given.setdefault("keep_text", given.get("temperature", 0.0) == 0.0)
    return measure_and_verify(CompareOptions(bench=BenchOptions(**given), **own), **proof)


def _print(found: Verification, form: Format) -> int:
    from breakeven.report.verification import render_verification

    print(render_verification(found, form), end="", flush=True)
    return int(found.holding.outcome != "holds")


def _say_end(done: Verified) -> None:
    is_answered = done.verification is not None
    say_end(lost=done.measured.lost, why_not=done.why_not, answer="verdict", verb="verify", is_answered=is_answered)
    print(f"records: {done.measured.directory}", file=sys.stderr)
