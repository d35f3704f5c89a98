"""`breakeven bench`: find the server, probe it, run the levels, write and print what came out."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import resource
import signal
import sys
from collections.abc import Coroutine, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from breakeven import __version__
from breakeven.engines.identify import choose_model, identify
from breakeven.engines.metrics import Scraper
from breakeven.errors import RunError, UsageError
from breakeven.host import core_count, describe_host
from breakeven.load.client import Client
from breakeven.load.probe import Probe, probe
from breakeven.load.prompts import PromptSet, load_prompts
from breakeven.load.target import Target
from breakeven.measure.summary import Summary, summarize, summary_of
from breakeven.options import BenchOptions
from breakeven.records import Manifest
from breakeven.report.live import Live
from breakeven.runs import SUMMARY, RunWriter, check_vacant, read_run, write_json
from breakeven.sweep import Plan, Sweep, duration, plan_levels, planned_seconds

__all__ = ["bench", "summarize_run"]

#: Descriptors that the program needs beside one per request in flight.
_SPARE_DESCRIPTORS = 64
#: What ends a run early: Ctrl-C, a scheduler, a terminal that is gone.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def bench(options: BenchOptions) -> tuple[Summary, Path, int]:
    """Runs a benchmark; returns its summary, its directory and the signal that interrupted it (0 if none did).

    Raises:
        UsageError: something that was asked for can't be done; nothing has been measured.
    """
    live = Live(sys.stderr, quiet=options.quiet)
    prompts = load_prompts(options.prompts, options.kinds, seed=options.seed)
    if prompts.is_random:
        live.say("warning: random text is unlike what models are trained on; acceptance under it says little")
    if options.output is not None:
        check_vacant(options.output)
    _provide_descriptors(max(options.concurrency))
    with _server(options) as url:
        job = _Job(options, prompts, live, url)
        interrupted = uvloop.run(job.run())
    live.clear()
    return job.summary, job.directory, interrupted


def summarize_run(directory: Path) -> Summary:
    """Makes a run's summary.json from its records, and returns it.

    Raises:
        RunError: there is no run to read, or its directory can't be written.
    """
    summary = summarize(read_run(directory))
    write_json(directory / SUMMARY, summary)
    return summary


@contextlib.contextmanager
def _server(options: BenchOptions) -> Iterator[str]:
    """The URL to measure; the embedded engine lives as long as the context."""
    if options.local is None:
        assert options.server_url is not None
        yield options.server_url
        return
    from breakeven.engines.llamacpp import start_local

    with start_local(options.local, slots=max(options.concurrency)) as server:
        yield server.url


class _Job:
    """One bench from the first look at the server to the last record."""

    def __init__(self, options: BenchOptions, prompts: PromptSet, live: Live, url: str) -> None:
        self._options, self._prompts, self._live = options, prompts, live
        self._headers = _headers(options)
        self._identity = identify(url, self._headers)
        self._model = choose_model(self._identity, options.model)
        self._target = Target(self._identity.base_url, self._headers)
        self.summary: Summary
        self.directory: Path

    async def run(self) -> int:
        """Measures; returns the number of the signal that ended it early, else 0."""
        options = self._options
        apis = self._identity.apis if options.api == "auto" else (options.api,)
        sampling = _sampling(options, self._prompts)
        found = await probe(
            self._target,
            self._model,
            self._prompts.prompts[0],
            apis,
            self._identity.engine,
            sampling=sampling,
            extra_body=options.extra_body,
        )
        self.directory = self._options.output or _new_directory(self._options)
        plan = planned_seconds(options, *found.seconds_per_request)
        self._announce(found, plan)
        manifest = self._manifest(found)
        with RunWriter(self.directory, manifest) as writer:
            shared_cores = core_count() if self._target.is_loopback else None
            sweep = Sweep(options, self._prompts, writer, self._live, shared_cores, plan.least_s)
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
            )
            scraper = Scraper(self._identity, self._headers)
            async with client:
                stopped_by = await _until_signal(sweep.run(client, plan_levels(options), scraper))
            writer.finish(interrupted=bool(stopped_by))
        self.summary = summary_of(manifest, sweep.summaries)
        write_json(self.directory / SUMMARY, self.summary)
        return stopped_by

    def _announce(self, found: Probe, plan: Plan) -> None:
        identity, options = self._identity, self._options
        name = " ".join(filter(None, [identity.engine, identity.version]))
        counts = {"chunks": "in every chunk", "total": "at the end", "estimated": "not per chunk"}
        self._live.say(
            f"{name} at {identity.base_url}: model {self._model}, API {found.dialect.api}, "
            f"tokens counted {counts[found.record.tokens_from]}, "
            f"metrics {'on' if identity.metrics_url else 'off'}"
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
        levels = len(plan_levels(options))
        self._live.say(f"plan: {levels} level{'s' * (levels > 1)}, about {span}, into {self.directory}")

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
            },
            seed=options.seed,
            levels=plan_levels(options),
            host=describe_host(),
            started=datetime.now(UTC).isoformat(timespec="milliseconds"),
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


def _headers(options: BenchOptions) -> dict[str, str]:
    if options.api_key is None or "authorization" in {name.lower() for name in options.headers}:
        return dict(options.headers)
    return {"Authorization": f"Bearer {options.api_key}"} | options.headers


def _sampling(options: BenchOptions, prompts: PromptSet) -> dict[str, Any]:
    ignore_eos = prompts.is_random if options.ignore_eos is None else options.ignore_eos
    return {"temperature": options.temperature} | ({"ignore_eos": True} if ignore_eos else {})


def _flags(options: BenchOptions) -> dict[str, Any]:
    """The options as the manifest may hold them: of headers only the names, no key."""
    flags: dict[str, Any] = msgspec.to_builtins(options, enc_hook=str)
    flags["headers"] = sorted(options.headers)
    flags["api_key"] = "set" if options.api_key else None
    return flags


def _new_directory(options: BenchOptions) -> Path:
    """Makes `runs/<time>-<label>`, with a number behind it where another run began in the same second."""
    label = options.label or ("local" if options.local is not None else "bench")
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


def _provide_descriptors(concurrency: int) -> None:
    """Raises the soft limit on open files as far as this level needs it.

    Raises:
        UsageError: the hard limit is lower.
    """
    wanted = concurrency + _SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and wanted > hard:
        raise UsageError(
            f"--concurrency {concurrency} needs {wanted} open files and the limit is {hard}: raise it (ulimit -Hn) "
            f"or stay at {hard - _SPARE_DESCRIPTORS}"
        )
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
