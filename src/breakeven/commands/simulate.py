"""`breakeven simulate`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from breakeven import __version__
from breakeven.commands.values import arrivals, count, number, rate, seconds, share
from breakeven.errors import UsageError

__all__ = ["add"]


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of names, each once, such as off,on,auto")
    return names


def add(commands: Any) -> None:
    """Adds the command to a parser's subcommands."""
    parser = commands.add_parser(
        "simulate",
        help="the same measurement on a simulated engine, in virtual time",
        description="Measure a simulated engine in virtual time: a run for each K, as bench would have written it, and "
        "where the break-even of that engine truly is. With --profile, policies that choose K compete under a load "
        "that varies.",
        argument_default=argparse.SUPPRESS,
    )
    parser.set_defaults(run=_run)
    add = parser.add_argument_group("engine").add_argument
    add("--model", type=Path, metavar="FILE", help="a JSON file of step times, acceptance and noise")
    add("--from", dest="from_runs", nargs="+", type=Path, metavar="RUN", help="fit them to runs of a real engine")
    add("--k", dest="ks", nargs="+", type=number, metavar="K", help="draft tokens a step, a run for each (0 3)")
    add = parser.add_argument_group("load").add_argument
    add("--concurrency", nargs="+", type=count, metavar="C", help="closed loop: requests in flight (1 2 4 … 64)")
    add("--rate", nargs="+", type=rate, metavar="R", help="open loop: requests a second")
    add("--arrivals", type=arrivals, metavar="KIND", help="poisson (default), constant, gamma:CV")
    add("--profile", metavar="KIND:…", help="a load that varies: constant:8, ramp:1:64, step, day, burst, trace:FILE")
    add("--policy", dest="policies", type=_names, metavar="NAME,…", help="who compete there (off,on,table,auto)")
    add("--mix", metavar="KINDS:S,…", help="kinds of prompts by turns there: code+json:120,chat:120")
    add("--max-tokens", type=count, metavar="N", help="the longest answer (512; with --profile 256)")
    add("--duration", dest="duration_s", type=seconds, metavar="TIME", help="a level's window lasts so long")
    add("--precision", type=share, metavar="SHARE", help="else it ends when the interval is within this share (0.05)")
    add("--prompts", metavar="FILE|random:N", help="their kinds have an acceptance each")
    add("--kind", dest="kinds", nargs="+", metavar="KIND", help="only prompts of these kinds")
    add("--seed", type=number, metavar="N", help="of everything random (0)")
    add = parser.add_argument_group("output").add_argument
    add("--output", type=Path, metavar="DIR", help="write the runs to DIR/k0, DIR/k3, … for breakeven compare")
    add("--format", choices=("table", "markdown", "csv", "json"), help="what is printed (table)")


def _run(args: argparse.Namespace) -> int:
    from breakeven.report.table import render
    from breakeven.sim.command import SimulateOptions, simulate_command

    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(args).items()
        if name not in ("command", "run")
    }
    form = given.pop("format", "table")
    if "profile" in given:
        return _contest(given, form)
    for name, flag in (("policies", "--policy"), ("mix", "--mix")):
        if name in given:
            raise UsageError(f"{flag} needs a load that varies: --profile ramp:1:64")
    if "concurrency" in given and "rate" in given:
        raise UsageError("--concurrency and --rate contradict each other: a level is a closed loop or an open one")
    done = simulate_command(SimulateOptions(**given), version=__version__)
    if form == "json":
        print(_json({f"k{run.k}": render(run.summary, "json") for run in done.runs}), flush=True)
    elif form == "csv":
        print(_csv({run.k: render(run.summary, "csv") for run in done.runs}), end="", flush=True)
    else:
        for run in done.runs:
            print(f"K = {run.k}\n\n{render(run.summary, form)}", flush=True)
    for truth in done.truths:
        print(truth, file=sys.stdout if form in ("table", "markdown") else sys.stderr)
    return 0


def _contest(given: dict[str, Any], form: Any) -> int:
    from breakeven.report.contest import render_contest
    from breakeven.sim.command import SimulateOptions, contest_command
    from breakeven.sim.contest import ContestOptions

    for name in ("concurrency", "rate", "arrivals", "precision"):
        if name in given:
            raise UsageError(f"--profile and --{name} contradict each other: the profile is the load")
    own = {name: given.pop(name) for name in ("profile", "policies", "mix") if name in given}
    shared = {name: given[name] for name in ("ks", "duration_s", "max_tokens", "seed", "output") if name in given}
    contest = contest_command(SimulateOptions(**given), ContestOptions(**own, **shared), version=__version__)
    print(render_contest(contest, form), end="", flush=True)
    return 0


def _json(by_name: dict[str, str]) -> str:
    """One document of several."""
    return "{\n" + ",\n".join(f'"{name}": {text.rstrip()}' for name, text in by_name.items()) + "\n}"


def _csv(by_k: dict[int, str]) -> str:
    """One table of several, whose first column says which."""
    rows = [(k, *text.splitlines()) for k, text in by_k.items()]
    return "".join([f"k,{rows[0][1]}\n", *(f"{k},{line}\n" for k, _, *lines in rows for line in lines)])
