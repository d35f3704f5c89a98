"""Going on with a run: the options that it had, whether what answers now is what was measured then, and its clock."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path

import msgspec

from breakeven.errors import RunError, UsageError
from breakeven.options import BenchOptions
from breakeven.records import Manifest

__all__ = ["check_same", "options_of", "origin_ns"]


def options_of(directory: Path, manifest: Manifest, given: BenchOptions) -> BenchOptions:
    """The options of a run, secrets and the like from those given now."""
    if manifest.turns is not None:
        raise RunError(
            f"--resume {directory}: an arm of a comparison, which took turns with others: breakeven compare says what "
            "was measured; to measure more begin a new comparison"
        )
    flags = dict(manifest.flags)
    wanted = set(flags.pop("headers", ()))
    if missing := sorted(wanted - set(given.headers)):
        raise UsageError(f"--resume {directory}: that run sent --header {missing[0]!r}: give it again")
    if flags.pop("api_key", None) and given.api_key is None:
        raise UsageError(f"--resume {directory}: that run had a key: set OPENAI_API_KEY, or name another --api-key-env")
    if "***" in (flags["serve"] or "") and given.serve is None:
        raise UsageError(f"--resume {directory}: that run's command held a secret: give --serve again")
    try:
        options = msgspec.convert(flags, BenchOptions, dec_hook=lambda kind, value: kind(value))
    except msgspec.ValidationError as error:
        raise RunError(f"--resume {directory}: its flags can't be used: {error}") from None
    is_url = given.server_url is not None and options.server_url is not None
    return msgspec.structs.replace(
        options,
        server_url=given.server_url if is_url else options.server_url,
        serve=given.serve or options.serve,
        headers=given.headers,
        api_key=given.api_key,
        output=directory,
        format=given.format,
        quiet=given.quiet,
    )


def check_same(before: Manifest, now: Manifest) -> None:
    """Raises `RunError` where a run can't go on with what answers now."""
    pairs = {
        "engine": (before.target.get("engine"), now.target.get("engine")),
        "engine version": (before.target.get("version"), now.target.get("version")),
        "model": (before.model, now.model),
        "API": (before.target.get("api"), now.target.get("api")),
        "prompts": (before.prompts, now.prompts),
        "plan": (before.levels, now.levels),
        "processor": (before.host.get("cpu"), now.host.get("cpu")),
    }
    for name, (then, today) in pairs.items():
        if then != today:
            what = f"was {then} and is now {today}" if isinstance(then, str) else "is not what it was"
            raise RunError(f"--resume: the {name} {what}: begin a new run")


def origin_ns(manifest: Manifest) -> int:
    """The run's start on this process's clock, so that the times of a resumed run go on where they were."""
    since_s = time.time() - datetime.fromisoformat(manifest.started).timestamp()
    return time.perf_counter_ns() - round(since_s * 1e9)
