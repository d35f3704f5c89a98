"""The flags of everything that makes load, and the `BenchOptions` that they give.

Each flag's `dest` is the option's name and none has a default here: what is not given is not in the namespace, so that
the defaults stand in one place (`BenchOptions`) and it can be told whether somebody asked for something.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from breakeven.commands.values import (
    api_key,
    arrivals,
    count,
    extra_body,
    header,
    label,
    number,
    rate,
    seconds,
    share,
    temperature,
)
from breakeven.errors import UsageError

__all__ = [
    "add_access",
    "add_load",
    "add_output",
    "add_requests",
    "add_serve_timeout",
    "add_server",
    "flag",
    "given_options",
]

#: Flags that say something only beside one of others.
_NEEDS = {
    "arrivals": ("rate",),
    "speed": ("trace",),
    "max_in_flight": ("rate", "trace"),
    "serve_on": ("serve",),
    "serve_timeout_s": ("serve", "vllm", "arm"),
}
#: Flags that contradict each other, and why.
_EXCLUDES = {
    ("concurrency", "rate"): "a level is a closed loop or an open one",
    ("concurrency", "trace"): "a trace says itself when requests come",
    ("rate", "trace"): "a trace says itself when requests come",
    ("max_tokens", "trace"): "a trace says itself how long answers are",
    ("ramp", "trace"): "a trace has no ramp",
    ("precision", "duration_s"): "give one end of a level, or --max-seconds",
    ("precision", "requests"): "give one end of a level, or --max-seconds",
    ("precision", "rate"): "an open loop's throughput is its input; end it by --requests or --duration",
    ("precision", "trace"): "a trace has its own end",
}
_FLAGS = {"duration_s": "--duration", "ramp": "--no-ramp", "serve_timeout_s": "--serve-timeout"}


def add_server(parser: argparse.ArgumentParser) -> None:
    """Where the server is, or how it is started."""
    add = parser.add_argument_group("server").add_argument
    add("--server-url", metavar="URL", help="the server, e.g. http://localhost:8000; a path before /v1 is kept")
    add(
        "--local",
        nargs="?",
        const="none",
        metavar="SPECULATION",
        help="start the embedded engine (llama.cpp, SmolLM2-135M): none (default), ngram-simple, ngram-mod, …; "
        "with another model: @FILE.gguf, ngram-simple@FILE.gguf",
    )
    add(
        "--vllm",
        nargs="?",
        const="off",
        metavar="SPECULATION",
        help="start vLLM on this processor (make vllm): off (default), ngram:K, eagle3:K, eagle3:[[1,4,2],[5,64,0]]",
    )
    add("--serve", metavar="COMMAND", help="start this server on a free port, which it gets as {port}, and stop it")
    add("--serve-on", metavar="HOST", help="start it there, over ssh with a key; measured at HOST's own address")
    add_serve_timeout(add)
    add_access(add)


def add_serve_timeout(add: Callable[..., object]) -> None:
    """How long a server that is started may take, as a flag of a group."""
    add(
        "--serve-timeout",
        dest="serve_timeout_s",
        type=seconds,
        metavar="TIME",
        help="the longest it may take to answer (20m)",
    )


def add_access(add: Callable[..., object]) -> None:
    """How to speak to a server, as flags of a group."""
    add("--api", choices=("auto", "chat", "completions", "sglang"), help="default: what answers")
    add("--model", help="default: the first that the server lists")
    add(
        "--header", dest="headers", action="append", type=header, metavar="'NAME: VALUE'", help="sent with each request"
    )
    add("--api-key-env", metavar="VARIABLE", help="the variable that holds the key (default: OPENAI_API_KEY)")


def add_load(parser: argparse.ArgumentParser, *, of_turns: bool = False) -> None:
    """The levels, and when each ends; with `of_turns` without what a comparison's turns can't have."""
    add = parser.add_argument_group("load").add_argument
    add(
        "--concurrency",
        nargs="+",
        action="extend",
        type=count,
        metavar="C",
        help="closed loop: requests in flight (1 2 4 8 16 32)",
    )
    add(
        "--rate",
        nargs="+",
        action="extend",
        type=rate,
        metavar="R",
        help="open loop: requests a second, sent when due whether the server keeps up or not",
    )
    add("--arrivals", type=arrivals, metavar="KIND", help="gaps between them: poisson (default), constant, gamma:CV")
    add("--trace", metavar="FILE", help="send what a trace says when it says it (Azure, Mooncake, BurstGPT, at_s)")
    add("--speed", type=rate, metavar="X", help="so many times as fast (1)")
    add("--max-in-flight", type=count, metavar="N", help="requests due beyond N wait, and their wait is recorded")
    add(
        "--max-tokens",
        nargs="+",
        action="extend",
        type=count,
        metavar="N",
        help="crossed with the levels (512)",
    )
    add("--requests", type=count, metavar="N", help="a level ends after N requests sent in its window (open: 300)")
    add(
        "--duration",
        dest="duration_s",
        type=seconds,
        metavar="TIME",
        help="a level's window lasts so long, e.g. 90, 90s, 2m",
    )
    add("--max-seconds", type=seconds, metavar="TIME", help="the longest window (240 s where nothing else ends it)")
    add("--budget", dest="budget_s", type=seconds, metavar="TIME", help="the time for all levels together, e.g. 20m")
    add("--warmup", type=number, metavar="N", help="requests before each level that don't count (5)")
    if of_turns:
        return
    add(
        "--precision",
        type=share,
        metavar="SHARE",
        help="else it ends when the throughput's 95%% interval is within this share (0.05) at 45, 90, 180 … s",
    )
    add("--no-ramp", dest="ramp", action="store_false", help="start all at once, count every request, no window")
    add("--runs", type=count, metavar="R", help="repeat the sweep and report the spread (1)")


def add_requests(parser: argparse.ArgumentParser) -> None:
    """What is sent, and how long an answer may take."""
    add = parser.add_argument_group("requests").add_argument
    add("--prompts", metavar="FILE|random:N", help="JSON lines (messages, prompt, conversations), or random words")
    add("--kind", dest="kinds", nargs="+", action="extend", metavar="KIND", help="only prompts of these kinds")
    add("--unique", action="store_true", help="tag each prompt, so that no prefix cache knows it")
    add("--temperature", type=temperature, metavar="T", help="default: 0")
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="answers go on to max-tokens (default: only for random prompts; small models then loop)",
    )
    add("--extra-body", type=extra_body, metavar="JSON", help="fields added to each request")
    add("--seed", type=number, metavar="N", help="of the prompts' order, the ramp and the arrivals (0)")
    add("--timeout", dest="timeout_s", type=seconds, metavar="TIME", help="the longest a request may take (20m)")
    add(
        "--stall-timeout",
        dest="stall_timeout_s",
        type=seconds,
        metavar="TIME",
        help="the longest silence once it has begun to answer (2m)",
    )
    add(
        "--watchdog",
        dest="watchdog_s",
        type=seconds,
        metavar="TIME",
        help="a level ends when requests run and the server has sent nothing at all for so long (5m)",
    )
    add(
        "--retry",
        dest="retries",
        type=number,
        metavar="N",
        help="send again after 429 and 5xx, N times, when Retry-After says; the wait counts as latency (0)",
    )


def add_output(parser: argparse.ArgumentParser, *, of_turns: bool = False) -> None:
    """Where a run goes and what is printed; with `of_turns` without a label, since arms have names."""
    add = parser.add_argument_group("output").add_argument
    add("--output", type=Path, metavar="DIR", help="default: runs/<time>-<label>")
    if not of_turns:
        add("--label", metavar="NAME", type=label, help="the run's name")
    add("--format", choices=("table", "markdown", "csv", "json"), help="what is printed at the end (table)")
    add("--keep-text", action="store_true", help="write the answers into the records")
    add("--quiet", action="store_true", help="no live line")


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options that were asked for, as fields of `BenchOptions`.

    Raises:
        UsageError: two of them contradict each other, or one says nothing without another.
    """
    given = {name: _frozen(value) for name, value in vars(args).items() if name not in ("command", "run", "resume")}
    _check(given)
    given["headers"] = dict(given.get("headers", ()))
    given["api_key"] = api_key(given.pop("api_key_env", None))
    return given


def flag(name: str) -> str:
    """How an option is spelled on the command line."""
    return _FLAGS.get(name, "--" + name.replace("_", "-"))


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _check(given: Mapping[str, Any]) -> None:
    for name, others in _NEEDS.items():
        if name in given and not any(other in given for other in others):
            raise UsageError(f"{flag(name)} says nothing without {' or '.join(map(flag, others))}")
    for (one, other), why in _EXCLUDES.items():
        if one in given and other in given:
            raise UsageError(f"{flag(one)} and {flag(other)} contradict each other: {why}")
