"""`breakeven compare`: several arms measured by turns, each into a run of its own, and what came out.

Arms that are up together take turns within a level, in ABBA order: whatever drifts meets both alike. Arms that
breakeven starts with a command (`serve:`) are taken not to fit on the machine together: there whole sweeps take turns.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct, structs

from breakeven.alternation import Alternation
from breakeven.arm import load_material
from breakeven.benchmark import new_directory, provide_descriptors
from breakeven.decide.comparison import Comparison, compare
from breakeven.decide.slo import parse_slos
from breakeven.decide.turns import ArmRun
from breakeven.engines.control import place_of
from breakeven.errors import RunError, UsageError
from breakeven.measure.summary import summarize
from breakeven.options import BenchOptions, CompareOptions
from breakeven.records import Manifest
from breakeven.report.live import Live
from breakeven.runs import MANIFEST, SUMMARY, check_vacant, make_directory, read_run, write_json

__all__ = [
    "COMPARISON",
    "VERIFICATION",
    "Compared",
    "Measured",
    "arm_options",
    "compare_directories",
    "measure_and_compare",
    "measure_arms",
    "read_arms",
]

#: What points to the arms of a comparison, and what came out of it.
ARMS, COMPARISON, VERIFICATION = "arms.json", "comparison.json", "verification.json"
#: Version of the layout of arms.json. History: 1, the first.
ARMS_SCHEMA = "breakeven.arms/1"


class Compared(NamedTuple):
    """A comparison that is over. `signal` is the number of the signal that ended it early, `lost` names the arm whose
    server was gone; if either came too early to compare anything, `comparison` is None and `why_not` says why."""

    comparison: Comparison | None
    directory: Path
    signal: int
    lost: str | None
    why_not: str | None = None


class Measured(NamedTuple):
    """Arms that took their turns, as far as they came; `signal` and `lost` as in `Compared`."""

    arms: list[ArmRun]
    directory: Path
    signal: int
    lost: str | None


class _Pointer(Struct, frozen=True):
    name: str
    directory: str


class _Pointers(Struct, frozen=True, kw_only=True):
    """The file that says which runs belong together; directories are relative to it."""

    schema: str = ARMS_SCHEMA
    arms: list[_Pointer]


def arm_options(options: CompareOptions) -> dict[str, BenchOptions]:
    """Each arm's own options, by its name.

    Raises:
        UsageError: an arm can't be understood, or two have one name or one server.
    """
    found: dict[str, BenchOptions] = {}
    for name, where in options.arms:
        if name in found:
            raise UsageError(f"--arm {name}: two arms have this name")
        if name in (ARMS, COMPARISON, VERIFICATION) or not name.strip("."):
            raise UsageError(f"--arm {name}: an arm's directory is named for it, and this name is taken; give another")
        found[name] = structs.replace(options.bench, label=name, **_place(name, where))
    if len(found) < 2:
        raise UsageError("a comparison needs two arms or more: --arm off=URL --arm on=URL")
    for (name, own), (other, its) in combinations(found.items(), 2):
        _check_apart(options, name, own, other, its)
    return found


def _check_apart(options: CompareOptions, name: str, own: BenchOptions, other: str, its: BenchOptions) -> None:
    """Two arms are two servers, or one with two pins."""
    if (own.serve or its.serve) and (own.pin or its.pin):
        raise UsageError(
            f"--arm {name} and --arm {other}: a server that is up and one that serve:… starts would share the machine; "
            "start both yourself and give their URLs"
        )
    if own.server_url is None or its.server_url is None or _server_of(own.server_url) != _server_of(its.server_url):
        return
    server = _server_of(own.server_url)
    if (own.pin is None) != (its.pin is None):
        plain = name if own.pin is None else other
        raise UsageError(f"--arm {name} and --arm {other} are the same server: write --arm {plain}=pin:auto@{server}")
    if own.pin == its.pin and not options.force:
        pinned = "" if own.pin is None else f" and the same pin, {own.pin}"
        raise UsageError(f"--arm {name} and --arm {other} are the same server, {server}{pinned}: give each its own")
    if own.pin is not None and options.concurrently:
        raise UsageError(f"--concurrently: --arm {name} and --arm {other} are one server, which has one pin at a time")


def _server_of(url: str) -> str:
    """The URL in the one of its spellings by which two are compared; as it is where it is none."""
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return url
    host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname
    return f"{parts.scheme}://{host}:{port}{parts.path.rstrip('/').removesuffix('/v1')}"


def _check_loads(options: BenchOptions) -> None:
    """Turns of a load are told apart by their number, so that each load may be there once."""
    for flag, loads in (("--concurrency", options.concurrency), ("--rate", options.rate)):
        for load in loads:
            if loads.count(load) > 1:
                raise UsageError(f"{flag} {load:g} is given twice: give each load once, and more turns with --cycles")


def _place(name: str, where: str) -> Mapping[str, str]:
    kind, _, rest = where.partition(":")
    if kind in ("http", "https"):
        return {"server_url": where}
    if kind == "pin":
        return place_of(name, rest)._asdict()
    if kind == "serve" and rest:
        return {"serve": rest}
    if kind == "local":
        return {"local": rest or "none"}
    if kind == "vllm":
        return {"vllm": rest or "off"}
    raise UsageError(f"--arm {name}={where[:40]}: give http://…, pin:4@http://…, serve:COMMAND, local:… or vllm:…")


def compare_directories(directories: Sequence[Path], slos: str | None = None, *, force: bool = False) -> Comparison:
    """Compares runs that exist; one directory of a comparison stands for its arms.

    Raises:
        UsageError: they can't be read, or not be compared.
    """
    return compare(read_arms(directories), slos=() if slos is None else parse_slos(slos), force=force)


def read_arms(directories: Sequence[Path]) -> list[ArmRun]:
    """The arms of runs that exist, two or more; one directory of a comparison stands for its arms.

    Raises:
        UsageError: they can't be read, or there are too few.
    """
    places = [place for directory in directories for place in _arms_in(directory)]
    if len(places) < 2:
        raise UsageError(_too_few(directories[0], [name for name, _ in places]))
    _check_once([directory for _, directory in places])
    names = _names([directory for _, directory in places], [name for name, _ in places])
    return [
        ArmRun(name, str(directory), read_run(directory)) for name, (_, directory) in zip(names, places, strict=True)
    ]


def _arms_in(directory: Path) -> list[tuple[str | None, Path]]:
    path = directory / ARMS
    if not path.exists():
        return [(None, directory)]
    try:
        pointers = msgspec.json.decode(path.read_bytes(), type=_Pointers)
    except (OSError, msgspec.DecodeError) as error:
        raise RunError(f"{path} can't be used: {error}") from None
    if pointers.schema != ARMS_SCHEMA:
        raise RunError(f"{path} is of schema {pointers.schema}; this breakeven reads {ARMS_SCHEMA}")
    # An arm without a manifest was not reached before the comparison was ended.
    places = [(arm.name, directory / arm.directory) for arm in pointers.arms]
    return [(name, place) for name, place in places if (place / MANIFEST).exists()]


def _too_few(directory: Path, names: Sequence[str | None]) -> str:
    if not (directory / ARMS).exists():
        return f"{directory} is a single run: give two or more, the reference first"
    measured = f"only {names[0]}" if names else "none"
    return f"{directory} is a comparison that was ended early: of its arms {measured} was measured; measure it again"


def _check_once(directories: Sequence[Path]) -> None:
    """A run differs from itself in nothing, not in its noise either: that would look like a sure result."""
    seen: dict[Path, Path] = {}
    for directory in directories:
        first = seen.setdefault(directory.resolve(), directory)
        if first is not directory:
            raise UsageError(f"{first} and {directory} are the same run: give each run once")


def _names(directories: Sequence[Path], given: Sequence[str | None]) -> list[str]:
    """A name for each arm: the given one, else its directory's; the path where two are the same."""
    names = [name or directory.resolve().name for name, directory in zip(given, directories, strict=True)]
    return [
        str(directory) if names.count(name) > 1 else name for name, directory in zip(names, directories, strict=True)
    ]


def measure_and_compare(options: CompareOptions, slos: str | None = None) -> Compared:
    """Measures all arms by turns, then compares them.

    Raises:
        UsageError: something that was asked for can't be done, or the arms are too unlike to be compared.
    """
    limits = () if slos is None else parse_slos(slos)
    measured = measure_arms(options, arm_options(options))
    directory, signal, lost = measured.directory, measured.signal, measured.lost
    try:
        comparison = compare(measured.arms, slos=limits, force=options.force)
    except UsageError as error:
        if not signal and lost is None:
            raise
        return Compared(None, directory, signal, lost, str(error))
    write_json(directory / COMPARISON, comparison)
    return Compared(comparison, directory, signal, lost)


def measure_arms(
    options: CompareOptions,
    arms: Mapping[str, BenchOptions],
    *,
    command: str = "compare",
    first: str | None = None,
    check: Callable[[str, Manifest], None] = lambda name, manifest: None,
) -> Measured:
    """Measures all arms by turns, each into a run of its own below one directory.

    Args:
        options: what was asked for.
        arms: each arm's options, by its name, as `arm_options` gives them.
        command: what the directory is named for, where none was given.
        first: the arm that the others are held against while measuring, where that isn't the first.
        check: called with each arm's name and manifest before it is measured; raises where it can't be used.

    Raises:
        UsageError: something that was asked for can't be done.
    """
    bench = options.bench
    _check_loads(bench)
    if bench.output is not None:
        check_vacant(bench.output)
    live = Live(sys.stderr, quiet=bench.quiet)
    material = load_material(bench, live.say)
    room = provide_descriptors(bench)

    def make_place() -> Path:
        place = bench.output or new_directory(command)
        make_directory(place)
        write_json(place / ARMS, _Pointers(arms=[_Pointer(name, name) for name in arms]))
        return place

    ordered = arms if first is None else {first: arms[first], **arms}
    alternation = Alternation(options, ordered, material, live, room, make_place, check)
    number = alternation.run()
    live.clear()
    directory = alternation.directory
    names = [name for name in arms if (directory / name / MANIFEST).exists()]
    runs = [ArmRun(name, str(directory / name), read_run(directory / name)) for name in names]
    for run in runs:
        write_json(directory / run.name / SUMMARY, summarize(run.run))
    return Measured(runs, directory, number, alternation.lost)
