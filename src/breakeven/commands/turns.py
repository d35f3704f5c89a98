"""What the commands that measure arms by turns share: `compare`, `tune`, `verify`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Set
from typing import Any

from breakeven.commands.flags import add_access, add_load, add_output, add_requests, add_serve_timeout, flag
from breakeven.commands.values import count, share
from breakeven.errors import UsageError

__all__ = ["add_load_of_turns", "add_turns", "check_alone", "say_end", "take_turns"]

#: What belongs to the turns and not to the load: the flag's name in the namespace, and in `CompareOptions`.
_OWN = {
    "arm": "arms",
    "cycles": "cycles",
    "concurrently": "concurrently",
    "force": "force",
    "ratio_precision": "precision",
    "repeats": "repeats",
}


def add_turns(add: Callable[..., object], *, force: str, precision: str) -> None:
    """How arms take turns and how they are spoken to, as flags of a group.

    Args:
        add: the group's `add_argument`.
        force: the help of `--force`.
        precision: what `--precision` does after the first cycles.
    """
    add("--cycles", type=count, metavar="N", help="so many ABBA cycles at each load, two turns of each arm")
    add("--concurrently", action="store_true", help="load the arms at the same time: only on machines of their own")
    add("--force", action="store_true", help=force)
    add_serve_timeout(add)
    add_access(add)
    add("--repeats", type=count, metavar="R", help="sweeps of each arm, where arms are started by a command (3)")
    add(
        "--precision",
        dest="ratio_precision",
        type=share,
        metavar="SHARE",
        help=f"4 cycles (or N), then up to four times as many, until {precision}",
    )


def add_load_of_turns(parser: argparse.ArgumentParser) -> None:
    """What is sent in each turn, and where it goes."""
    add_load(parser, of_turns=True)
    add_requests(parser)
    add_output(parser, of_turns=True)


def take_turns(given: dict[str, Any]) -> dict[str, Any]:
    """Takes out of what was given the fields of `CompareOptions`, the load's apart; counted cycles are not extended."""
    own = {field: given.pop(name) for name, field in _OWN.items() if name in given}
    if "cycles" in own:
        own.setdefault("precision", None)
    return own


def check_alone(args: argparse.Namespace, allowed: Set[str]) -> None:
    """Checks that beside runs that exist only these were given; `force`, `format` and `quiet` always may be.

    Raises:
        UsageError: another one was.
    """
    if others := vars(args).keys() - {"command", "run", "force", "format", "quiet"} - allowed:
        raise UsageError(f"runs that exist are only read: leave {flag(min(others))} out, or leave the directories out")


def say_end(*, lost: str | None, why_not: str | None, answer: str, verb: str, is_answered: bool) -> None:
    """Says on stderr what ended measuring before its time: the arm whose server was gone, or why there is no answer."""
    if lost:
        rests = f"; the {answer} rests on what was measured" if is_answered else ""
        print(f"the server of {lost} is gone{rests}", file=sys.stderr)
    if why_not:
        print(f"ended too early to {verb} anything: {why_not}", file=sys.stderr)
