"""`breakeven bench`: find or start the server, probe it, run the levels, write and print what came out."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import resource
import signal
import sys
import time
from collections.abc import Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import uvloop

from breakeven import __version__
from breakeven.doctor.ceiling import SPARE_DESCRIPTORS, quick_ceiling
from breakeven.engines.identify import choose_model, identify, is_alive
from breakeven.engines.metrics import Scraper
from breakeven.engines.serve import parse_command
from breakeven.engines.start import Server, start
from breakeven.errors import RunError, UsageError
from breakeven.host import core_count, describe_host
from breakeven.levels import Plan, duration, plan_levels, planned_seconds
from breakeven.load.client import Client
from breakeven.load.probe import Probe, probe
from breakeven.load.prompts import PromptSet, load_prompts
from breakeven.load.target import Target
from breakeven.load.trace import TraceRequest, read_trace
from breakeven.measure.summary import Summary, summarize, summary_of
from breakeven.options import BenchOptions
from breakeven.records import LevelPlan, Manifest
from breakeven.report.live import Live
from breakeven.runs import SUMMARY, Run, RunWriter, check_vacant, finished_levels, read_run, write_json
from breakeven.sweep import Sweep

__all__ = ["Bench", "bench", "resume", "summarize_run"]

#: Where the system sets no limit. Linux's own highest (fs.nr_open) is no lower.
_MOST_DESCRIPTORS = 1 << 20
#: What is sent where a trace says only how long prompts are: the probe and the warm-up are of this kind.
_TRACE_PROMPTS = "random:128"
#: What ends a run early: Ctrl-C, a scheduler, a terminal that is gone.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Bench(NamedTuple):
    """A run that is over: its numbers, where it is, and what ended it early.

    `signal` is the number of the signal that interrupted it, 0 if none did; `lost` whether the server was gone.
    """

    summary: Summary
    directory: Path
    signal: int
    lost: bool


def bench(options: BenchOptions) -> Bench:
    """Runs a benchmark.

    Raises:
        UsageError: something that was asked for can't be done; nothing has been measured.
    """
    live = Live(sys.stderr, quiet=options.quiet)
    trace = read_trace(options.trace) if options.trace else None
    prompts = load_prompts(options.prompts or _default_prompts(options), options.kinds, seed=options.seed)
    if prompts.is_random:
        live.say("warning: random text is unlike what models are trained on; acceptance under it says little")
    if options.output is not None:
        check_vacant(options.output)
    return _run(options, prompts, trace, live, None)


def resume(directory: Path, given: BenchOptions) -> Bench:
    """Goes on with a run that was interrupted, at the level it was in; levels that are finished stay as they are.

    Args:
        directory: the run.
        given: of these options `server_url`, `serve`, `headers`, `api_key`, `format` and `quiet` are used; all others
            are the run's.

    Raises:
        UsageError: the run is complete, another process writes to it, or what answers is not what was measured.
    """
    run = read_run(directory)
    if len(finished_levels(run)) == len(run.manifest.levels):
        raise RunError(f"--resume {directory}: all {len(run.manifest.levels)} levels of this run are finished")
    options = _options_of(directory, run.manifest, given)
    live = Live(sys.stderr, quiet=options.quiet)
    trace = read_trace(options.trace) if options.trace else None
    prompts = load_prompts(options.prompts or _default_prompts(options), options.kinds, seed=options.seed)
    return _run(options, prompts, trace, live, run)


def summarize_run(directory: Path) -> Summary:
    """Makes a run's summary.json from its records, and returns it.

    Raises:
        RunError: there is no run to read, or its directory can't be written.
    """
    summary = summarize(read_run(directory))
    write_json(directory / SUMMARY, summary)
    return summary


def _run(
    options: BenchOptions, prompts: PromptSet, trace: list[TraceRequest] | None, live: Live, before: Run | None
) -> Bench:
    room = _provide_descriptors(options)
    with start(options, live.say) as server:
        job = _Job(options, prompts, trace, live, server, room, before)
        number = uvloop.run(job.run())
    live.clear()
    return Bench(job.summary, job.directory, number, job.lost)


def _default_prompts(options: BenchOptions) -> str | None:
    return _TRACE_PROMPTS if options.trace else None


class _Job:
    """One bench from the first look at the server to the last record. `before` is the run that it goes on with."""

    def __init__(
        self,
        options: BenchOptions,
        prompts: PromptSet,
        trace: list[TraceRequest] | None,
        live: Live,
        server: Server,
        room: int,
        before: Run | None,
    ) -> None:
        self._options, self._prompts, self._trace, self._live = options, prompts, trace, live
        self._server, self._room, self._before = server, room, before
        self._headers = options.request_headers
        self._identity = identify(server.url, self._headers)
        self._model = choose_model(self._identity, options.model)
        self._target = Target(self._identity.base_url, self._headers)
        self._scraper = Scraper(self._identity, self._headers)
        self._levels = plan_levels(options, trace)
        self.summary: Summary
        self.directory: Path
        self.lost = False

    async def run(self) -> int:
        """Measures; returns the number of the signal that ended it early, else 0."""
        options, before = self._options, self._before
        apis = self._identity.apis if options.api == "auto" else (options.api,)
        sampling = options.sampling(random_prompts=self._prompts.is_random)
        found = await probe(
            self._target,
            self._model,
            self._prompts.prompts[0],
            apis,
            self._identity.engine,
            sampling=sampling,
            extra_body=options.extra_body,
        )
        plan = planned_seconds(options, *found.seconds_per_request, self._trace)
        manifest = self._manifest(found)
        if before is not None:
            _check_same(before.manifest, manifest)
            manifest = before.manifest
        self.directory = options.output or _new_directory(options)
        self._announce(found, plan)
        ceiling = await asyncio.to_thread(quick_ceiling, self._room)
        if isinstance(ceiling, str):
            self._live.say(f"note: how much this client can take is not known: {ceiling}")
        with self._writer(manifest) as writer:
            sweep = Sweep(
                options,
                self._prompts,
                self._trace,
                writer,
                self._live,
                shared_cores=core_count() if self._target.is_loopback else None,
                planned_s=plan.least_s,
                max_in_flight=self._room,
                ceiling=None if isinstance(ceiling, str) else ceiling.chunks_per_s,
                is_alive=self._is_alive,
            )
            client = Client(
                self._target,
                found.dialect,
                self._model,
                sweep.record,
                sampling=sampling,
                extra_body=options.extra_body,
                timeout_s=options.timeout_s,
                stall_timeout_s=options.stall_timeout_s,
                keep_text=options.keep_text,
                origin_ns=_origin_ns(manifest),
                first_id=max((record.id + 1 for record in before.requests), default=0) if before else 0,
                retries=options.retries,
            )
            with contextlib.closing(self._scraper):
                async with client:
                    stopped_by = await _until_signal(sweep.run(client, self._left(), self._scraper))
            self.lost = sweep.lost
            self._server.save_log(self.directory / "server.log")
            writer.finish(interrupted=bool(stopped_by) or sweep.lost)
        self.summary = summary_of(manifest, sweep.summaries) if before is None else summarize(read_run(self.directory))
        write_json(self.directory / SUMMARY, self.summary)
        self._say_lost()
        return stopped_by

    def _writer(self, manifest: Manifest) -> RunWriter:
        if self._before is None:
            return RunWriter.create(self.directory, manifest)
        return RunWriter.reopen(self.directory, manifest, finished_levels(self._before))

    def _left(self) -> list[LevelPlan]:
        """The levels to measure."""
        done = finished_levels(self._before) if self._before else set()
        return [level for level in self._levels if level.index not in done]

    def _is_alive(self) -> bool:
        return not self._server.has_ended() and is_alive(self._identity.base_url, self._headers)

    def _say_lost(self) -> None:
        if not self.lost:
            return
        tail = self._server.log_tail()
        self._live.say(
            f"the server at {self._identity.base_url} is gone; what was measured stays, and once it is back: "
            f"breakeven bench --resume {self.directory}" + (f"; its log ends: {tail}" if tail else "")
        )

    def _announce(self, found: Probe, plan: Plan) -> None:
        identity, options = self._identity, self._options
        name = " ".join(filter(None, [identity.engine, identity.version]))
        counts = {"chunks": "in every chunk", "total": "at the end", "estimated": "not per chunk"}
        self._live.say(
            f"{name} at {identity.base_url}: model {self._model}, API {found.dialect.api}, "
            f"tokens counted {counts[found.record.tokens_from]}, "
            f"metrics {'on' if identity.metrics_url else f'off: {self._scraper.reason}'}"
        )
        if found.record.outcome == "empty":
            self._live.say("warning: a first request was answered without any output")
        if options.budget_s is not None and plan.around_s > options.budget_s:
            self._live.say(
                f"warning: warm-up, ramp and drain alone take about {duration(plan.around_s)}: within --budget "
                f"{duration(options.budget_s)} some levels will have no window; raise it, or lower --max-tokens"
            )
        span = duration(plan.least_s)
        if round(plan.most_s) > round(plan.least_s):
            span += f" to {duration(plan.most_s)}"
        levels = len(self._levels)
        self._live.say(f"plan: {levels} level{'s' * (levels > 1)}, about {span}, into {self.directory}")
        if self._before is not None:
            self._announce_resumed(self._before)

    def _announce_resumed(self, before: Run) -> None:
        left = self._left()
        cut = sum(record.level in {level.index for level in left} for record in before.requests)
        kept = f"; its {cut} requests of before are kept beside, in requests.cut.jsonl, and not used" if cut else ""
        self._live.say(
            f"resumed: {len(self._levels) - len(left)} of {len(self._levels)} levels are finished; "
            f"going on at level {left[0].index + 1}, {left[0].name}{kept}"
        )

    def _manifest(self, found: Probe) -> Manifest:
        options, identity = self._options, self._identity
        return Manifest(
            label=options.label or options.local or identity.engine,
            breakeven_version=__version__,
            target={
                "url": identity.base_url,
                "engine": identity.engine,
                "version": identity.version,
                "config": identity.config,
                "api": found.dialect.api,
                "counting": found.counting,
                "loopback": self._target.is_loopback,
            },
            model=self._model,
            flags=_flags(options),
            prompts={
                "source": self._prompts.source,
                "count": len(self._prompts.prompts),
                "sha256": self._prompts.sha256,
            }
            | ({"trace_sha256": _digest(self._trace)} if self._trace else {}),
            seed=options.seed,
            levels=self._levels,
            host=describe_host(),
            server_host=self._server.host(),
            started=datetime.now(UTC).isoformat(timespec="microseconds"),
        )


async def _until_signal(work: Coroutine[Any, Any, None]) -> int:
    """Awaits the work; SIGINT, SIGTERM or SIGHUP ends it early and in order. Returns the signal's number, else 0.

    A second signal changes nothing, then and after: what is done is being written down, and the program will end.
    """
    task, loop, received = asyncio.ensure_future(work), asyncio.get_running_loop(), 0

    def stop(number: int) -> None:
        nonlocal received
        if not received:
            received = number
            task.cancel()

    for number in _SIGNALS:
        loop.add_signal_handler(number, stop, number)
    try:
        await task
    except asyncio.CancelledError:
        if not received:
            raise
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
            if received:
                signal.signal(number, signal.SIG_IGN)
    return received


def _flags(options: BenchOptions) -> dict[str, Any]:
    """The options as the manifest may hold them: of headers only the names, no key."""
    flags: dict[str, Any] = msgspec.to_builtins(options, enc_hook=str)
    flags["headers"] = sorted(options.headers)
    flags["api_key"] = "set" if options.api_key else None
    flags["serve"] = parse_command(options.serve).shown() if options.serve else None
    return flags


def _options_of(directory: Path, manifest: Manifest, given: BenchOptions) -> BenchOptions:
    """The options of a run, secrets and the like from those given now."""
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


def _check_same(before: Manifest, now: Manifest) -> None:
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
            raise RunError(f"--resume: the {name} was {then} and is now {today}: begin a new run")


def _origin_ns(manifest: Manifest) -> int:
    """The run's start on this process's clock, so that the times of a resumed run go on where they were."""
    since_s = time.time() - datetime.fromisoformat(manifest.started).timestamp()
    return time.perf_counter_ns() - round(since_s * 1e9)


def _digest(trace: list[TraceRequest]) -> str:
    return hashlib.sha256(msgspec.json.encode(trace)).hexdigest()


def _new_directory(options: BenchOptions) -> Path:
    """Makes `runs/<time>-<label>`, with a number behind it where another run began in the same second."""
    label = options.label or ("local" if options.local is not None else "serve" if options.serve else "bench")
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


def _provide_descriptors(options: BenchOptions) -> int:
    """Raises the soft limit on open files as far as this run needs it; returns how many requests can be in flight.

    Raises:
        UsageError: the hard limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else hard
    is_closed = not options.rate and options.trace is None
    in_flight = max(options.concurrency) if is_closed else options.max_in_flight
    wanted = most if in_flight is None else in_flight + SPARE_DESCRIPTORS
    if wanted > most:
        flag = "--concurrency" if is_closed else "--max-in-flight"
        raise UsageError(
            f"{flag} {in_flight} needs {wanted} open files and the limit is {hard}: raise it (ulimit -Hn) "
            f"or stay at {hard - SPARE_DESCRIPTORS}"
        )
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted - SPARE_DESCRIPTORS
