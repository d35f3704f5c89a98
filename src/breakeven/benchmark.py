"""`breakeven bench`: find or start the server, probe it, run the levels, write and print what came out."""

from __future__ import annotations

import asyncio
import itertools
import resource
import sys
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import uvloop

from breakeven.arm import Arm, load_material
from breakeven.doctor.ceiling import SPARE_DESCRIPTORS, quick_ceiling
from breakeven.engines.start import start
from breakeven.errors import RunError, UsageError
from breakeven.interrupts import until_signal
from breakeven.levels import Plan, duration, planned_seconds
from breakeven.measure.summary import Summary, summarize, summary_of
from breakeven.options import BenchOptions
from breakeven.records import LevelPlan, Manifest
from breakeven.report.live import Live
from breakeven.resuming import check_same, options_of, origin_ns
from breakeven.runs import SERVER_LOG, SUMMARY, Run, RunWriter, check_vacant, finished_levels, read_run, write_json
from breakeven.sweep import Sweep

__all__ = ["Bench", "bench", "client_ceiling", "new_directory", "provide_descriptors", "resume", "summarize_run"]

#: Where the system sets no limit. Linux's own highest (fs.nr_open) is no lower.
_MOST_DESCRIPTORS = 1 << 20


class Bench(NamedTuple):
    """A run that is over: its numbers, where it is, and what ended it early.

    `signal` is the number of the signal that interrupted it, 0 if none did; `lost` whether the server was gone.
    """

    summary: Summary
    directory: Path
    signal: int
    lost: bool


class _Before(NamedTuple):
    """The run that is gone on with, and its writer, which holds the lock."""

    run: Run
    writer: RunWriter


def bench(options: BenchOptions) -> Bench:
    """Runs a benchmark.

    Raises:
        UsageError: something that was asked for can't be done; nothing has been measured.
    """
    if options.output is not None:
        check_vacant(options.output)
    return _run(options, None)


def resume(directory: Path, given: BenchOptions) -> Bench:
    """Goes on with a run that was interrupted, at the level it was in; levels that are finished stay as they are.

    Args:
        directory: the run.
        given: of these options `server_url`, `serve`, `headers`, `api_key`, `format` and `quiet` are used; all others
            are the run's.

    Raises:
        UsageError: the run is complete, another process writes to it, or what answers is not what was measured.
    """
    with RunWriter.reopen(directory) as writer:
        run = read_run(directory)
        options = options_of(directory, run.manifest, given)
        if len(finished_levels(run)) == len(run.manifest.levels):
            raise RunError(
                f"--resume {directory}: all {len(run.manifest.levels)} levels of this run are finished; "
                f"breakeven summarize {directory} makes its summary again"
            )
        return _run(options, _Before(run, writer))


def summarize_run(directory: Path) -> Summary:
    """Makes a run's summary.json from its records, and returns it.

    Raises:
        RunError: there is no run to read, or its directory can't be written.
    """
    summary = summarize(read_run(directory))
    write_json(directory / SUMMARY, summary)
    return summary


def _run(options: BenchOptions, before: _Before | None) -> Bench:
    live = Live(sys.stderr, quiet=options.quiet)
    material = load_material(options, live.say)
    room = provide_descriptors(options)
    with start(options, live.say) as server:
        job = _Job(Arm(options, material, server), live, room, before)
        number = uvloop.run(job.run())
    live.clear()
    return Bench(job.summary, job.directory, number, job.lost)


class _Job:
    """One bench from the first request to the last record. `before` is the run that it goes on with."""

    def __init__(self, arm: Arm, live: Live, room: int, before: _Before | None) -> None:
        self._arm, self._live, self._room, self._before = arm, live, room, before
        self._options = arm.options
        self.summary: Summary
        self.directory: Path
        self.lost = False

    async def run(self) -> int:
        """Measures; returns the number of the signal that ended it early, else 0."""
        options, before, arm = self._options, self._before, self._arm
        found = await arm.probe()
        plan = planned_seconds(options, *found.seconds_per_request, arm.material.trace)
        manifest = arm.manifest(arm.levels)
        if before is not None:
            check_same(before.run.manifest, manifest)
            manifest = before.run.manifest
        self.directory = options.output or new_directory(options.label or _kind(options))
        self._announce(plan)
        ceiling = await client_ceiling(self._live, self._room)
        first_id = max((record.id + 1 for record in before.run.requests), default=0) if before else 0
        with self._writer(manifest) as writer:
            sweep = Sweep(options, len(arm.levels), self._live, planned_s=plan.least_s)
            async with arm.measuring(
                writer, origin_ns=origin_ns(manifest), first_id=first_id, room=self._room, ceiling=ceiling
            ) as measurer:
                stopped_by = await until_signal(sweep.run(measurer, self._left()))
            self.lost = measurer.lost
            writer.finish(interrupted=bool(stopped_by) or self.lost)
            summaries = measurer.summaries
            self.summary = summary_of(manifest, summaries) if before is None else summarize(read_run(self.directory))
        try:
            write_json(self.directory / SUMMARY, self.summary)
            arm.server.save_log(self.directory / SERVER_LOG)
        except RunError as error:  # all records are written, and the numbers can still be shown
            self._live.say(f"note: {error}")
        self._say_lost()
        return stopped_by

    def _writer(self, manifest: Manifest) -> RunWriter:
        if self._before is None:
            return RunWriter.create(self.directory, manifest)
        self._before.writer.go_on(manifest, finished_levels(self._before.run))
        return self._before.writer

    def _left(self) -> list[LevelPlan]:
        """The levels to measure."""
        done = finished_levels(self._before.run) if self._before else set()
        return [level for level in self._arm.levels if level.index not in done]

    def _say_lost(self) -> None:
        if not self.lost:
            return
        tail = self._arm.server.log_tail()
        self._live.say(
            f"the server at {self._arm.identity.base_url} is gone; what was measured stays, and once it is back: "
            f"breakeven bench --resume {self.directory}" + (f"; its log ends: {tail}" if tail else "")
        )

    def _announce(self, plan: Plan) -> None:
        options = self._options
        self._live.say(self._arm.describe())
        if self._arm.found.record.outcome == "empty":
            self._live.say("warning: a first request was answered without any output")
        if options.budget_s is not None and plan.around_s > options.budget_s:
            self._live.say(
                f"warning: warm-up, ramp and drain alone take about {duration(plan.around_s)}: within --budget "
                f"{duration(options.budget_s)} some levels will have no window; raise it, or lower --max-tokens"
            )
        span = duration(plan.least_s)
        if round(plan.most_s) > round(plan.least_s):
            span += f" to {duration(plan.most_s)}"
        levels = len(self._arm.levels)
        self._live.say(f"plan: {levels} level{'s' * (levels > 1)}, about {span}, into {self.directory}")
        if self._before is not None:
            self._announce_resumed(self._before.run)

    def _announce_resumed(self, before: Run) -> None:
        left = self._left()
        cut = sum(record.level in {level.index for level in left} for record in before.requests)
        kept = f"; its {cut} requests of before are kept beside, in requests.cut.jsonl, and not used" if cut else ""
        self._live.say(
            f"resumed: {len(self._arm.levels) - len(left)} of {len(self._arm.levels)} levels are finished; "
            f"going on at level {left[0].index + 1}, {left[0].name}{kept}"
        )


async def client_ceiling(live: Live, room: int) -> float | None:
    """Chunks a second that this client can take; says why where that can't be found."""
    ceiling = await asyncio.to_thread(quick_ceiling, room)
    if isinstance(ceiling, str):
        live.say(f"note: how much this client can take is not known: {ceiling}")
        return None
    return ceiling.chunks_per_s


def _kind(options: BenchOptions) -> str:
    started = {"local": options.local, "vllm": options.vllm, "serve": options.serve}
    return next((kind for kind, asked in started.items() if asked is not None), "bench")


def new_directory(label: str) -> Path:
    """Makes `runs/<time>-<label>`, with a number behind it where another run began in the same second."""
    name = f"{datetime.now():%Y%m%d-%H%M%S}-{label}"
    for number in itertools.count(2):
        directory = Path("runs") / name
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            name = f"{name.removesuffix(f'-{number - 1}')}-{number}"
        except OSError as error:
            raise RunError(f"{directory} can't be made: {error.strerror}; name another with --output") from None
        else:
            break
    return directory


def provide_descriptors(options: BenchOptions) -> int:
    """Raises the soft limit on open files as far as this run needs it; returns how many requests can be in flight.

    Raises:
        UsageError: the hard limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else hard
    if most <= SPARE_DESCRIPTORS:
        raise UsageError(f"{most} open files are too few: raise the limit (ulimit -Hn) above {SPARE_DESCRIPTORS}")
    is_closed = not options.rate and options.trace is None
    in_flight = max(options.concurrency) if is_closed else options.max_in_flight
    wanted = most if in_flight is None else in_flight + SPARE_DESCRIPTORS
    if wanted > most:
        flag = "--concurrency" if is_closed else "--max-in-flight"
        raise UsageError(
            f"{flag} {in_flight} needs {wanted} open files and the limit is {hard}: raise it (as root: ulimit -Hn "
            f"{wanted}; docker run --ulimit nofile={wanted}) or stay at {hard - SPARE_DESCRIPTORS}"
        )
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted - SPARE_DESCRIPTORS
