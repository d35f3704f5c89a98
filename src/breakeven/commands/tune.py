"""`breakeven tune`."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from breakeven.commands.flags import flag, given_options
from breakeven.commands.turns import add_load_of_turns, add_turns, check_alone, say_end, take_turns
from breakeven.commands.values import checked, number, seconds
from breakeven.errors import UsageError

if TYPE_CHECKING:
    from breakeven.options import Format
    from breakeven.report.schedule import Price
    from breakeven.tuning import Outcome

__all__ = ["add"]

_EPILOG = """arms, one for each number of draft tokens K, K=0 being off:
  --arm 'k{k}=vllm:eagle3:{k}' --k 0 1 2 3 5        a template: {k} in its place, and in its name
  --arm 'k{k}=pin:{k}@URL' --k 0 2 4                inside one vLLM server that breakeven acts in (see compare)
  --arm off=URL --arm k2=URL --arm k4=URL           by hand: an arm called off or k2 says its K, or --k does, in the
                                                    order of the arms, else the server's own configuration
  --arm 'serve:… --speculative-num-steps {steps} --speculative-eagle-topk {topk} …' --vary steps=1,2 topk=1,4
                                                    shapes: all combinations that the engine can draft

examples:
  breakeven tune --arm 'k{k}=vllm:eagle3:{k}' --k 0 1 2 3 5 --concurrency 1 2 4 8 16 32
  breakeven tune --arm off="serve:vllm serve M --port {port}" \\
                 --arm "k{k}=serve:vllm serve M --port {port} --speculative-config '{…: {k}}'" --k 1 2 3
  breakeven tune runs/20261130-101500-tune --export sglang        measured already: another form, another profile
  breakeven tune runs/… --profile day.csv --gpu-hour-price 2.5 --gpus 8
  breakeven tune runs/… --profile http://prod:8000/metrics --profile-for 10m
  breakeven tune schedule.json --export tensorrt-llm              a table that exists, as an engine takes it
"""
#: What belongs to the tuning.
_TUNED = ("ks", "vary", "export", "profile", "profile_for_s", "write")


def _to_arm(text: str) -> tuple[str, str]:
    name, equals, where = text.partition("=")
    if not equals or not where or not re.fullmatch(r"[\w.+{}-]+", name):
        raise ValueError(text)
    return name, where


def _to_vary(text: str) -> tuple[str, tuple[int, ...]]:
    name, equals, values = text.partition("=")
    found = tuple(int(value) for value in values.split(","))
    if name not in ("steps", "topk", "draft-tokens") or not equals or len(set(found)) < len(found):
        raise ValueError(text)
    return name, found


_arm = checked(_to_arm, bool, "an arm: NAME=http://…, NAME=pin:{k}@…, NAME=vllm:…, NAME=local:… or NAME=serve:…")
_k = checked(int, lambda value: 0 <= value <= 64, "a number of draft tokens from 0 to 64")
_vary = checked(_to_vary, lambda found: min(found[1]) >= 0, "steps=1,2 or topk=1,4 or draft-tokens=4,16")
_price = checked(float, lambda value: 0 < value < 1e6, "a price above 0")


def add(commands: Any) -> None:
    """Adds the command to a parser's subcommands."""
    parser = commands.add_parser(
        "tune",
        help="which draft length belongs to which load, as flags to paste",
        description="Measure arms that draft different numbers of tokens by turns, or read runs that exist; say which "
        "number belongs to which load, and write that as schedule.json and as the engine's flags.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    parser.set_defaults(run=_run)
    parser.add_argument(
        "paths", nargs="*", type=Path, default=[], metavar="PATH", help="runs that exist, or a schedule.json"
    )
    add = parser.add_argument_group("arms").add_argument
    add("--arm", action="append", type=_arm, metavar="NAME=WHERE", help="an arm, or a template for several")
    add("--k", dest="ks", nargs="+", action="extend", type=_k, metavar="K", help="draft tokens: 0 1 2 3 5")
    add("--vary", nargs="+", action="extend", type=_vary, metavar="NAME=N,N", help="steps=…, topk=…, draft-tokens=…")
    add_turns(
        add,
        force="use runs that are unlike",
        precision="each ratio's 95%% interval is within this (0.025)",
    )
    _add_answer(parser)
    add_load_of_turns(parser)


def _add_answer(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("answer").add_argument
    add("--export", choices=("vllm", "sglang", "tensorrt-llm", "json"), help="whose flags (those of the engine found)")
    add("--write", type=Path, metavar="FILE", help="where the table goes (schedule.json beside the runs)")
    add(
        "--profile",
        metavar="LOAD",
        help="work out the gain over a load: a CSV file (hour,requests_in_flight or seconds,in_flight), or the URL of "
        "a metrics page to watch",
    )
    add("--profile-for", dest="profile_for_s", type=seconds, metavar="TIME", help="watch it so long (5m)")
    add("--gpu-hour-price", type=_price, metavar="PRICE", help="what a GPU costs an hour: gives the cost of tokens")
    add("--gpus", type=number, metavar="N", help="GPUs of the server (1)")


def _run(args: argparse.Namespace) -> int:
    from breakeven.report.schedule import render_tuned

    paths: list[Path] = args.paths
    form: Format = getattr(args, "format", "table")
    price = _asked_price(args)
    if len(paths) == 1 and paths[0].is_file():
        return _export(args, paths[0])
    done = _read(args, paths) if paths else _measure(args)
    if done.tuned is not None:
        print(render_tuned(done.tuned, done.exported, form, price), end="", flush=True)
    with contextlib.suppress(OSError):  # a full or closed stderr is no reason to fail a table that is done
        _say(done)
    if done.signal:
        return 128 + done.signal
    return int(done.lost is not None or done.tuned is None or done.tuned.schedule is None or done.refused is not None)


def _say(done: Outcome) -> None:
    is_answered = done.tuned is not None
    say_end(lost=done.lost, why_not=done.why_not, answer="table", verb="tune", is_answered=is_answered)
    if done.refused:
        print(f"no flags: {done.refused}", file=sys.stderr)
    if done.written:
        print(f"written: {', '.join(map(str, done.written))}", file=sys.stderr)
    elif done.tuned is not None and done.tuned.schedule is not None:
        print("the table is not kept: name a file with --write", file=sys.stderr)
    if done.directory is not None:
        print(f"records: {done.directory}", file=sys.stderr)


def _asked_price(args: argparse.Namespace) -> Price | None:
    from breakeven.report.schedule import Price

    given = vars(args)
    if "gpu_hour_price" not in given:
        if "gpus" in given:
            raise UsageError("--gpus says nothing without --gpu-hour-price")
        return None
    if given.get("gpus") == 0:
        raise UsageError("--gpus 0: a server has one at least")
    return Price(given["gpu_hour_price"], given.get("gpus", 1))


def _tune_options(args: argparse.Namespace) -> Any:
    from breakeven.tuning import TuneOptions

    given = {name: value for name, value in vars(args).items() if name in _TUNED}
    if "profile_for_s" in given and not str(given.get("profile", "")).startswith("http"):
        raise UsageError("--profile-for says nothing without --profile http://…")
    if "vary" in given:
        names = [name for name, _ in given["vary"]]
        for name in names:
            if names.count(name) > 1:
                raise UsageError(f"--vary {name} is given twice: give all values at once, {name}=1,2")
        given["vary"] = dict(given["vary"])
    given["ks"] = tuple(given.get("ks", ()))
    return TuneOptions(**given, force=getattr(args, "force", False))


def _measure(args: argparse.Namespace) -> Outcome:
    from breakeven.options import BenchOptions, CompareOptions
    from breakeven.tuning import measure_and_tune

    ask = _tune_options(args)
    given = given_options(args)
    for name in (*_TUNED, "paths", "gpu_hour_price", "gpus"):
        given.pop(name, None)
    own = take_turns(given)
    if "arms" not in own:
        raise UsageError("give arms (--arm 'k{k}=URL{k}' --k 0 1 2 3), the directories of runs, or a schedule.json")
    for name in ("rate", "trace"):
        if name in given:
            raise UsageError(f"--{name}: a table goes by requests in flight; use --concurrency")
    return measure_and_tune(CompareOptions(bench=BenchOptions(**given), **own), ask)


def _read(args: argparse.Namespace, paths: list[Path]) -> Outcome:
    from breakeven.tuning import tune_directories

    check_alone(args, {"paths", "gpu_hour_price", "gpus", *_TUNED})
    return tune_directories(paths, _tune_options(args))


def _export(args: argparse.Namespace, path: Path) -> int:
    from breakeven.tuning import export_file

    if others := vars(args).keys() - {"command", "run", "paths", "export", "model"}:
        raise UsageError(f"{path} is only shown as an engine takes it: leave {flag(min(others))} out")
    found = export_file(path, getattr(args, "export", None), getattr(args, "model", None))
    print(found.flags.rstrip("\n"))
    for name, text in found.files.items():
        print(f"\n{name}:\n{text.rstrip()}")
    with contextlib.suppress(OSError):
        for note in found.notes:
            print(f"note: {note}", file=sys.stderr)
    return 0
