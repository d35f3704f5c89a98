"""`breakeven flags`."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from breakeven.commands.values import checked, count
from breakeven.engines.speculation import MOST_K, Speculation
from breakeven.errors import UsageError

if TYPE_CHECKING:
    from breakeven.decide.schedule import Range, Schedule

__all__ = ["add"]

_EPILOG = """examples:
  breakeven flags vllm --k 0 2 4 --method ngram --model M
  breakeven flags vllm --policy auto:schedule.json                K, model, drafter: those of the schedule
  breakeven flags vllm --policy fixed:2 --k 0 2 4 --method eagle3 --draft-model HEAD
  breakeven flags vllm --policy auto:schedule.json --host 0.0.0.0 --key-from-environment
"""
#: Stands where nobody names the model.
_MODEL = "MODEL"

_k = checked(int, lambda value: 0 <= value <= MOST_K, f"a number of draft tokens from 0 to {MOST_K}")
# What `act.settings.read_control` takes.
_port = checked(int, lambda value: 1 <= value <= 65535, "a port from 1 to 65535")
_objective = checked(float, lambda value: 0.001 <= value <= 1e6, "a time in milliseconds, such as 50")
_text = checked(str, lambda value: bool(value) and not re.search(r"[\0\r\n]", value), "a text of one line")


def add(commands: Any) -> None:
    """Adds the command to a parser's subcommands."""
    parser = commands.add_parser(
        "flags",
        help="the command that starts a server whose draft length breakeven chooses",
        description="Print the command, variables in front, that starts a stock vLLM whose draft length breakeven "
        "chooses at each step. Nothing is started.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=_run)
    parser.add_argument("engine", choices=("vllm",), help="whose command")
    add = parser.add_argument_group("draft length").add_argument
    add(
        "--policy",
        type=_text,
        default="auto",
        metavar="NAME",
        help="who decides: auto (default), auto:schedule.json, table:schedule.json, fixed:K",
    )
    add("--k", dest="ks", nargs="+", action="extend", type=_k, default=[], metavar="K", help="what may be used: 0 2 4")
    add("--objective-ms", type=_objective, metavar="MS", help="the time per output token that is promised")
    add("--deep", action="store_true", help="K = 0 may leave the drafter alone, an experiment (docs/vllm.md)")
    add("--state", type=_text, metavar="FILE", help="keeps what was learned from one start to the next")
    add = parser.add_argument_group("server").add_argument
    add("--model", type=_text, help="default: that of the schedule")
    add("--method", type=_text, help="the drafter: ngram, eagle3, mtp, … (default: that of the schedule)")
    add("--draft-model", type=_text, metavar="PATH", help="its model, where it has one")
    add("--max-num-seqs", type=count, metavar="N", help="requests that it holds (default: the schedule's knee)")
    add = parser.add_argument_group("control page").add_argument
    add("--host", type=_text, help="where it listens (127.0.0.1)")
    add("--port", type=_port, metavar="N", help="its port (9310)")
    add("--key-from-environment", action="store_true", help="pins need the key that BREAKEVEN_KEY holds at the start")


def _run(args: argparse.Namespace) -> int:
    from breakeven.act.deep import METHODS as DEEP_METHODS
    from breakeven.decide.declared import TABLE_TO, declared, drafter

    schedule = _schedule(args)
    ks = _ks(args, schedule)
    variables = _variables(args)
    held = args.max_num_seqs or _knee(schedule, len(ks))
    settings = drafter(schedule, args.method, args.draft_model)
    if args.deep and (settings["method"] not in DEEP_METHODS or min(ks)):
        raise UsageError(f"--deep is for {', '.join(DEEP_METHODS)}, beside --k 0")
    table = declared(ks, held or TABLE_TO, schedule)
    model = args.model or (schedule.model if schedule else _MODEL)
    words = ["vllm", "serve", model, "--scheduler-cls", "breakeven.act.vllm.scheduler"]
    words += ["--max-num-seqs", str(held)] if held else []
    print(*variables, shlex.join(words), f"  --speculative-config {shlex.quote(_config(settings, table))}", sep=" \\\n")
    with contextlib.suppress(OSError):  # a full or closed stderr is no reason to fail
        for note in _notes(args, schedule, model, settings["method"], None if held else table):
            print(f"note: {note}", file=sys.stderr)
    return 0


def _schedule(args: argparse.Namespace) -> Schedule | None:
    """The policy's schedule; the policy itself is read as the engine's process will read it."""
    from breakeven.decide.modes import policy_of
    from breakeven.decide.schedule import read_schedule

    policy_of(args.policy, args.ks or range(MOST_K + 1), objective_ms=args.objective_ms)
    kind, _, path = args.policy.partition(":")
    if kind == "fixed" or not path:
        return None
    schedule = read_schedule(Path(path))
    if args.model:
        schedule.check_model(args.model, path)
    return schedule


def _ks(args: argparse.Namespace, schedule: Schedule | None) -> list[int]:
    """The K that may be used: those asked for and those of the schedule's table; if none is asked for, `auto` may use
    whatever was measured.
    """
    if schedule is None and not args.ks:
        raise UsageError("--k is missing: give what may be used, such as --k 0 2 4, or --policy auto:schedule.json")
    ks = {*args.ks, *(each.k for each in (schedule.ranges if schedule else ()))}
    if schedule and not args.ks and args.policy.startswith("auto"):
        ks |= schedule.arms.keys()
    if len(ks) < 2:
        whose = "--k" if args.ks else f"{args.policy.partition(':')[2]} has only K ="
        raise UsageError(f"{whose} {min(ks)}: with one K there is nothing to choose: give two or more, such as --k 0 2")
    if max(ks) > MOST_K:
        raise UsageError(f"--policy {args.policy}: its schedule has K = {max(ks)}, and {MOST_K} is the most for vLLM")
    return sorted(ks)


def _knee(schedule: Schedule | None, least: int) -> int | None:
    """The batch beyond which throughput grows no more; vLLM wants a batch size for each K."""
    limit = schedule.limit if schedule else None
    if limit is None or limit.kind != "found" or limit.batch is None:
        return None
    return max(math.ceil(limit.batch), least)


def _variables(args: argparse.Namespace) -> list[str]:
    """The engine's process reads them; a key's value is the shell's to fill in."""
    from breakeven.act.settings import read_control

    said = {"POLICY": args.policy, "HOST": args.host, "PORT": args.port, "STATE": args.state}
    said["OBJECTIVE_MS"] = None if args.objective_ms is None else f"{args.objective_ms:g}"
    said["DEEP"] = 1 if args.deep else None
    given = {f"BREAKEVEN_{name}": str(value) for name, value in said.items() if value is not None}
    key = {"BREAKEVEN_KEY": "…"} if args.key_from_environment else {}
    try:
        read_control(given | key)
    except UsageError:  # everything else was checked
        raise UsageError(
            f"--host {args.host}: others than this machine may pin K there: give --key-from-environment too, or "
            "listen on 127.0.0.1"
        ) from None
    return [f"{name}={shlex.quote(value)}" for name, value in given.items()] + [f'{name}="${name}"' for name in key]


def _config(settings: dict[str, Any], table: tuple[Range, ...]) -> str:
    most = max(each.k for each in table)
    config = (Speculation("ngram", most).config() or {}) if settings["method"] == "ngram" else {}
    config |= settings | {"num_speculative_tokens": most}
    config["num_speculative_tokens_per_batch_size"] = [[each.lo, each.hi, each.k] for each in table]
    return json.dumps(config, separators=(",", ":"), ensure_ascii=False)


def _notes(
    args: argparse.Namespace, schedule: Schedule | None, model: str, method: str, table: tuple[Range, ...] | None
) -> list[str]:
    """What the command needs to work; `table` where vLLM isn't told how many requests to hold."""
    from breakeven.decide.declared import SMALLEST_DEFAULT

    notes = ["vLLM's environment needs breakeven too: pip install --no-deps breakeven"]
    notes.append("data parallelism must be 1: a server a rank, each with its policy, behind a router")
    if model == _MODEL:
        notes.append(f"put the model where {_MODEL} stands")
    if args.key_from_environment:
        notes.append("BREAKEVEN_KEY must be set where this is pasted")
    if method == "ngram":  # numba, which looks for them, else tells torch's OpenMP that there is one thread
        notes.append("on processors, n-grams want NUMBA_THREADING_LAYER=workqueue set where this is pasted")
    if schedule and args.method and schedule.method and args.method != schedule.method.lower():
        notes.append(f"the schedule was measured with {schedule.method}, not {args.method}")
    far = {each.k for each in table or ()} - {each.k for each in table or () if each.lo <= SMALLEST_DEFAULT}
    if far:
        notes.append(
            f"K = {', '.join(map(str, sorted(far)))} stands only beyond {SMALLEST_DEFAULT} requests, the fewest that "
            "vLLM holds if not told: give --max-num-seqs"
        )
    return notes
