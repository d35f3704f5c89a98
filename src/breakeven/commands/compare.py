"""`breakeven compare`."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from breakeven.commands.flags import flag, given_options
from breakeven.commands.turns import add_load_of_turns, add_turns, check_alone, say_end, take_turns
from breakeven.commands.values import arm, between
from breakeven.errors import UsageError

if TYPE_CHECKING:
    from breakeven.options import FindOptions, Format

__all__ = ["add"]

_EPILOG = """arms:
  NAME=http://HOST:PORT              a server that is up
  NAME=pin:K@URL or pin:auto@URL     an arm inside a vLLM server that breakeven acts in, which others share: K draft
                                     tokens in its turns, or the server's policy; URL#PORT if its control page isn't
                                     at 9310; the page's key, if it has one, in BREAKEVEN_CONTROL_KEY
  NAME=local: or local:ngram-simple  the embedded engine
  NAME=vllm: or vllm:eagle3:2        vLLM on this processor (make vllm): vllm:ngram:K, vllm:eagle3:K, or with its own
                                     table from batch sizes to K, vllm:eagle3:[[1,4,2],[5,64,0]],
                                     or with breakeven's policy among some K, vllm:eagle3:auto@0,1,2
  NAME=serve:COMMAND                 a server to start, on the port that it gets as {port}

examples:
  breakeven compare --arm off=http://localhost:8000 --arm on=http://localhost:8001 --concurrency 1 2 5 10 30 70 100
  breakeven compare --arm off="serve:vllm serve M --port {port}" \\
                    --arm on="serve:vllm serve M --port {port} --speculative-config '{…}'"
  breakeven compare --arm off=pin:0@http://localhost:8000 --arm on=pin:4@http://localhost:8000 --concurrency 1 8 64
  breakeven compare --arm off=local: --arm on=local:ngram-simple --concurrency 1 2 4 8
  breakeven compare --arm off=vllm: --arm on=vllm:eagle3:2 --concurrency 1 2 4 8 16
  breakeven compare --arm off=http://localhost:8000 --arm on=http://localhost:8001 --find break-even --max-seconds 1h
  breakeven compare runs/off runs/on                    runs that exist; or the directory of a comparison
"""
#: What a search chooses itself, or has no use for.
_NOT_WITH_FIND = {
    "concurrency": "the search chooses the loads; say between which with --between",
    "rate": "it looks for requests in flight",
    "trace": "it looks for requests in flight",
    "cycles": "the search chooses how many turns each load gets",
    "repeats": "it needs arms that are up together",
}
#: The latter where an engine on this machine is started, which takes memory for each request that it may hold.
_BETWEEN, _BETWEEN_LOCAL = (1, 256), (1, 32)


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
    add("--slo", metavar="LIMITS", help="the largest load that holds them, e.g. ttft_p99:2000,tpot_p50:50 (ms)")
    add_turns(
        add,
        force="compare runs that are unlike",
        precision="the ratio's 95%% interval is within this (0.025)",
    )
    add = parser.add_argument_group("search").add_argument
    add(
        "--find",
        choices=("break-even", "knee", "slo"),
        help="no grid: loads and turns are chosen until its 95%% interval is within --precision of the load (0.1), or "
        "until --max-seconds or --budget, which are then the time of the whole search",
    )
    add(
        "--between",
        type=between,
        metavar="LOW:HIGH",
        help="the loads to look between (1:256; with local: or vllm: arms 1:32)",
    )
    add_load_of_turns(parser)


def _run(args: argparse.Namespace) -> int:
    from breakeven.report.comparison import render_comparison

    directories: list[Path] = args.directories
    form: Format = getattr(args, "format", "table")
    if directories:
        from breakeven.versus import compare_directories

        check_alone(args, {"directories", "slo"})
        comparison = compare_directories(directories, getattr(args, "slo", None), force=getattr(args, "force", False))
        print(render_comparison(comparison, form), end="", flush=True)
        return 0
    return _measure(args, form)


def _measure(args: argparse.Namespace, form: Format) -> int:
    from breakeven.options import BenchOptions, CompareOptions
    from breakeven.report.comparison import render_comparison
    from breakeven.versus import measure_and_compare

    given = given_options(args)
    own = take_turns(given)
    del given["directories"]
    slo = given.pop("slo", None)
    if "between" in given and "find" not in given:
        raise UsageError("--between says nothing without --find")
    if "arms" not in own:
        raise UsageError("give two arms (--arm off=URL --arm on=URL), or the directories of two runs")
    if "find" in given:
        own["find"] = _find(given, own, slo)
    given.setdefault("keep_text", given.get("temperature", 0.0) == 0.0)
    done = measure_and_compare(CompareOptions(bench=BenchOptions(**given), **own), slo)
    if done.comparison is not None:
        print(render_comparison(done.comparison, form), end="", flush=True)
    with contextlib.suppress(OSError):  # a full or closed stderr is no reason to fail a comparison that is done
        is_answered = done.comparison is not None
        say_end(lost=done.lost, why_not=done.why_not, answer="comparison", verb="compare", is_answered=is_answered)
        print(f"records: {done.directory}", file=sys.stderr)
    return 128 + done.signal if done.signal else int(done.lost is not None)


def _find(given: dict[str, Any], own: dict[str, Any], slo: str | None) -> FindOptions:
    """What to look for; takes it out of what was given, and puts the ends of the range where the loads go."""
    from breakeven.options import FindOptions

    for name, why in _NOT_WITH_FIND.items():
        if name in given or name in own:
            raise UsageError(f"--find and {flag(name)} contradict each other: {why}")
    what, limits = given.pop("find"), [given.pop("max_seconds", None), given.get("budget_s")]
    if what == "slo" and slo is None:
        raise UsageError("--find slo needs limits to hold: --slo ttft_p99:2000,tpot_p50:50")
    is_local = any(where.startswith(("local", "vllm")) for _, where in own.get("arms", ()))
    ends = given.pop("between", _BETWEEN_LOCAL if is_local else _BETWEEN)
    given["concurrency"] = ends
    precision = own.pop("precision", None) or 0.1
    own["precision"] = None
    return FindOptions(
        what=what,
        between=ends,
        precision=precision,
        max_seconds=min((limit for limit in limits if limit is not None), default=None),
        slo=slo,
    )
