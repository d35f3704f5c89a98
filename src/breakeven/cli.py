"""The command line: parse, call, print. Heavy imports wait until a command needs them."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from breakeven import __version__
from breakeven.errors import UsageError

__all__ = ["main"]

_EPILOG = """examples:
  breakeven bench --server-url http://localhost:8000 --concurrency 1 2 5 10 30 70 100 250 --max-tokens 512
  breakeven bench --local --concurrency 1 2 4 8          the embedded engine: started, measured, stopped
  breakeven bench --local ngram-simple --budget 5m
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line. Exit codes: 0; 2 for what can't be done as asked; 128 + signal if interrupted."""
    # No number here is worth a thread pool: it would double the time numpy takes to load, and contend with the loop.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    _mend_streams()
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except UsageError as error:
        print(f"breakeven {args.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output is gone; nothing is left to tell it, and Python must not try again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _mend_streams() -> None:
    """Output must not fail for a closed stream, whose number another file would get, or a letter that it can't show."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", closefd=False))
        if isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="replace")


class _Parser(argparse.ArgumentParser):
    """Errors in one line, without the usage that pushes them off the screen."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="breakeven", description="Find the load at which speculative decoding stops paying.")
    parser.add_argument("--version", action="version", version=f"breakeven {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_bench(commands)
    _add_summarize(commands)
    return parser


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="measure a server at a list of loads",
        description="Measure a server at a list of loads, with intervals.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench.set_defaults(run=_bench)
    add = bench.add_argument_group("server").add_argument
    add(
        "--server-url",
        metavar="URL",
        help="the server, e.g. http://localhost:8000; a path before /v1 is kept",
    )
    add(
        "--local",
        nargs="?",
        const="none",
        metavar="SPECULATION",
        help="start the embedded engine (llama.cpp, SmolLM2-135M): none (default), ngram-simple, ngram-mod, …",
    )
    add(
        "--api",
        choices=("auto", "chat", "completions", "sglang"),
        default="auto",
        help="default: what answers",
    )
    add("--model", help="default: the first that the server lists")
    add(
        "--header",
        action="append",
        type=_header,
        default=[],
        metavar="'NAME: VALUE'",
        help="sent with each request",
    )
    add("--api-key-env", metavar="VARIABLE", help="the variable that holds the key (default: OPENAI_API_KEY)")

    add = bench.add_argument_group("load").add_argument
    add(
        "--concurrency",
        nargs="+",
        type=_count,
        default=[1, 2, 4, 8, 16, 32],
        metavar="C",
        help="requests in flight",
    )
    add(
        "--max-tokens",
        nargs="+",
        type=_count,
        default=[512],
        metavar="N",
        help="crossed with the levels (512)",
    )
    add("--requests", type=_count, metavar="N", help="a level ends after N requests sent in its window")
    add("--duration", type=_seconds, metavar="TIME", help="a level's window lasts so long, e.g. 90, 90s, 2m")
    add(
        "--precision",
        type=_share,
        default=0.05,
        metavar="SHARE",
        help="else it ends when the throughput's 95%% interval is within this share (0.05) at 45, 90, 180 … s",
    )
    add(
        "--max-seconds",
        type=_seconds,
        metavar="TIME",
        help="the longest window (240 s where precision ends it)",
    )
    add("--budget", type=_seconds, metavar="TIME", help="the time for all levels together, e.g. 20m")
    add(
        "--warmup",
        type=_number,
        default=5,
        metavar="N",
        help="requests before each level that don't count (5)",
    )
    add(
        "--no-ramp",
        dest="ramp",
        action="store_false",
        help="start all at once, count every request, no window",
    )
    add("--runs", type=_count, default=1, metavar="R", help="repeat the sweep and report the spread (1)")

    add = bench.add_argument_group("requests").add_argument
    add(
        "--prompts",
        metavar="FILE|random:N",
        help="JSON lines (messages, prompt, conversations), or random words",
    )
    add("--kind", nargs="+", default=[], metavar="KIND", help="only prompts of these kinds")
    add("--unique", action="store_true", help="tag each prompt, so that no prefix cache knows it")
    add("--temperature", type=_temperature, default=0.0, metavar="T", help="default: 0")
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="answers go on to max-tokens (default: only for random prompts; small models then loop)",
    )
    add("--extra-body", type=_extra_body, default={}, metavar="JSON", help="fields added to each request")
    add("--seed", type=_number, default=0, metavar="N", help="of the prompts' order and the ramp (0)")
    add(
        "--timeout",
        type=_seconds,
        default=1200.0,
        metavar="TIME",
        help="the longest a request may take (20m)",
    )
    add(
        "--stall-timeout",
        type=_seconds,
        default=120.0,
        metavar="TIME",
        help="the longest silence once it has begun to answer (2m)",
    )

    add = bench.add_argument_group("output").add_argument
    add("--output", type=Path, metavar="DIR", help="default: runs/<time>-<label>")
    add("--label", metavar="NAME", type=_label, help="the run's name")
    add(
        "--format",
        choices=("table", "markdown", "csv", "json"),
        default="table",
        help="what is printed at the end",
    )
    add("--keep-text", action="store_true", help="write the answers into the records")
    add("--quiet", action="store_true", help="no live line")


def _add_summarize(commands: Any) -> None:
    summarize = commands.add_parser("summarize", help="make a run's summary again from its records")
    summarize.set_defaults(run=_summarize)
    summarize.add_argument("directory", type=Path, metavar="DIR", help="a run's directory")
    summarize.add_argument("--format", choices=("table", "markdown", "csv", "json"), default="table")


def _bench(args: argparse.Namespace) -> int:
    if (args.server_url is None) == (args.local is None):
        raise UsageError("give either --server-url URL or --local")
    from breakeven.benchmark import bench
    from breakeven.options import BenchOptions
    from breakeven.report.table import render

    options = BenchOptions(
        server_url=args.server_url,
        local=args.local,
        concurrency=tuple(args.concurrency),
        max_tokens=tuple(args.max_tokens),
        requests=args.requests,
        duration_s=args.duration,
        precision=args.precision,
        max_seconds=args.max_seconds,
        budget_s=args.budget,
        warmup=args.warmup,
        ramp=args.ramp,
        runs=args.runs,
        api=args.api,
        model=args.model,
        temperature=args.temperature,
        ignore_eos=args.ignore_eos,
        extra_body=args.extra_body,
        headers=dict(args.header),
        api_key=_api_key(args.api_key_env),
        timeout_s=args.timeout,
        stall_timeout_s=args.stall_timeout,
        seed=args.seed,
        prompts=args.prompts,
        kinds=tuple(args.kind),
        unique=args.unique,
        keep_text=args.keep_text,
        output=args.output,
        label=args.label,
        format=args.format,
        quiet=args.quiet,
    )
    summary, directory, interrupted = bench(options)
    print(render(summary, args.format), end="", flush=True)
    with contextlib.suppress(OSError):  # a full or closed stderr is no reason to fail a run that is done
        print(f"records: {directory}", file=sys.stderr)
    return 128 + interrupted if interrupted else 0


def _summarize(args: argparse.Namespace) -> int:
    from breakeven.measure.summary import summarize
    from breakeven.report.table import render
    from breakeven.runs import SUMMARY, read_run, write_json

    summary = summarize(read_run(args.directory))
    if summary.damaged:
        print(f"breakeven summarize: note: {args.directory}: {summary.damaged}; used up to it", file=sys.stderr)
    print(render(summary, args.format), end="", flush=True)
    write_json(args.directory / SUMMARY, summary)  # last: the numbers are shown even where they can't be kept
    return 0


def _api_key(variable: str | None) -> str | None:
    key = os.environ.get(variable or "OPENAI_API_KEY")
    if variable is not None and not key:
        raise UsageError(f"--api-key-env {variable}: this variable is not set")
    return key


def _checked(convert: Callable[[str], Any], is_good: Callable[[Any], bool], wanted: str) -> Callable[[str], Any]:
    """An argparse type: converts, checks, and says what was wanted."""

    def parse(text: str) -> Any:
        try:
            value = convert(text)
        except ValueError:
            value = None
        if value is None or not is_good(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return value

    return parse


def _to_seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h)?", text.strip())
    if match is None:
        raise ValueError(text)
    return float(match[1]) * {None: 1, "s": 1, "m": 60, "min": 60, "h": 3600}[match[2]]


def _to_json(text: str) -> Any:
    import json

    return json.loads(text)


def _to_header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name) or re.search(r"[\r\n\0]", value):
        raise ValueError(text)
    return name, value.strip()


_count = _checked(int, lambda value: 1 <= value <= 10**7, "a whole number from 1")
_number = _checked(int, lambda value: 0 <= value <= 10**9, "a whole number from 0")
_seconds = _checked(_to_seconds, lambda value: value > 0, "a time above 0, such as 90, 90s, 20m or 1h")
_share = _checked(float, lambda value: 0 < value < 1, "a share between 0 and 1, such as 0.05")
_temperature = _checked(float, lambda value: 0 <= value <= 10, "a temperature from 0 to 10")
_json_object = _checked(_to_json, lambda value: isinstance(value, dict), "a JSON object, such as '{\"top_p\": 0.9}'")
#: Fields of a request that are not for --extra-body, and why.
_OURS = {
    "max_tokens": "use --max-tokens",
    "model": "use --model",
    "prompt": "use --prompts",
    "messages": "use --prompts",
}
_OURS |= {"text": "use --prompts", "temperature": "use --temperature", "ignore_eos": "use --ignore-eos"}
_OURS |= {"stream": "breakeven always streams"}


def _extra_body(text: str) -> dict[str, Any]:
    fields: dict[str, Any] = _json_object(text)
    for name, why in _OURS.items():
        if name in fields:
            raise argparse.ArgumentTypeError(f"{name} can't be set here: {why}")
    return fields


_label = _checked(str, lambda value: bool(re.fullmatch(r"[\w.=+-]+", value)), "a name of letters, digits and .=+-_")


def _header(text: str) -> tuple[str, str]:
    # The value may be a secret, so that the text is not quoted back.
    try:
        return _to_header(text)
    except ValueError:
        raise argparse.ArgumentTypeError("needs the form 'Name: value'") from None
