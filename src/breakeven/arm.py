"""One configuration under test: its server, its client, and what its run says of both."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any

import msgspec

from breakeven import __version__
from breakeven.engines.control import Pin
from breakeven.engines.identify import choose_model, identify, is_alive
from breakeven.engines.metrics import Scraper
from breakeven.engines.serve import parse_command
from breakeven.engines.start import Server
from breakeven.host import core_count, describe_host
from breakeven.levels import plan_levels
from breakeven.load.client import Client
from breakeven.load.probe import Probe, probe
from breakeven.load.prompts import load_prompts
from breakeven.load.target import Target
from breakeven.load.trace import TraceRequest, read_trace
from breakeven.measurer import Material, Measurer
from breakeven.options import BenchOptions
from breakeven.records import LevelPlan, Manifest, Turns
from breakeven.runs import RunWriter

__all__ = ["Arm", "load_material"]

#: What is sent where a trace says only how long prompts are: the probe and the warm-up are of this kind.
_TRACE_PROMPTS = "random:128"


def load_material(options: BenchOptions, say: Callable[[str], None]) -> Material:
    """The prompts and the trace that were asked for.

    Raises:
        UsageError: they can't be read or used.
    """
    trace = read_trace(options.trace) if options.trace else None
    source = options.prompts or (_TRACE_PROMPTS if trace else None)
    prompts = load_prompts(source, options.kinds, seed=options.seed)
    if prompts.is_random:
        say("warning: random text is unlike what models are trained on; acceptance under it says little")
    return Material(prompts, trace)


class Arm:
    """A server that was found and identified.

    Args:
        options: what was asked for.
        material: what will be sent.
        server: where it is.

    Raises:
        TargetError: what is there can't be measured, or not be pinned.
    """

    def __init__(self, options: BenchOptions, material: Material, server: Server) -> None:
        self.options, self.material, self.server = options, material, server
        self.identity = identify(server.url, options.request_headers)
        self.model = choose_model(self.identity, options.model)
        self.levels = plan_levels(options, material.trace)
        self.scraper = Scraper(self.identity, options.request_headers)
        self._pin = _checked_pin(options)
        self._target = Target(self.identity.base_url, options.request_headers)
        self._sampling = options.sampling(random_prompts=material.prompts.is_random)

    async def probe(self) -> Probe:
        """Sends a first small request, which finds the API that answers.

        Raises:
            TargetError: none does.
        """
        options = self.options
        self.found = await probe(
            self._target,
            self.model,
            self.material.prompts.prompts[0],
            self.identity.apis if options.api == "auto" else (options.api,),
            self.identity.engine,
            sampling=self._sampling,
            extra_body=options.extra_body,
            timeout_s=options.stall_timeout_s,
        )
        return self.found

    def describe(self) -> str:
        """What was found, in a line."""
        identity, counts = (
            self.identity,
            {"chunks": "in every chunk", "total": "at the end", "estimated": "not per chunk"},
        )
        name = " ".join(filter(None, [identity.engine, identity.version]))
        return (
            f"{name} at {identity.base_url}: model {self.model}, API {self.found.dialect.api}, "
            f"tokens counted {counts[self.found.record.tokens_from]}, "
            f"metrics {'on' if identity.metrics_url else f'off: {self.scraper.reason}'}"
        )

    def is_alive(self) -> bool:
        """Whether the server still answers. May take some seconds."""
        return not self.server.has_ended() and is_alive(self.identity.base_url, self.options.request_headers)

    @contextlib.asynccontextmanager
    async def measuring(
        self, writer: RunWriter, *, origin_ns: int, first_id: int = 0, room: int, ceiling: float | None
    ) -> AsyncIterator[Measurer]:
        """Measures this arm's levels into a run; the client is open as long as the context.

        Args:
            writer: where the run is written.
            origin_ns: the run's start on the client's clock.
            first_id: the number of the first request.
            room: requests that can run at once.
            ceiling: chunks a second that the client can take, None where that is not known.
        """
        options = self.options

        def make_client(on_record: Callable[[Any], None]) -> Client:
            return Client(
                self._target,
                self.found.dialect,
                self.model,
                on_record,
                sampling=self._sampling,
                extra_body=options.extra_body,
                timeout_s=options.timeout_s,
                stall_timeout_s=options.stall_timeout_s,
                keep_text=options.keep_text,
                origin_ns=origin_ns,
                first_id=first_id,
                retries=options.retries,
            )

        measurer = Measurer(
            options,
            self.material,
            writer,
            make_client,
            self.scraper,
            shared_cores=core_count() if self._target.is_loopback else None,
            max_in_flight=room,
            ceiling=ceiling,
            is_alive=self.is_alive,
            pin=self._pin,
        )
        with contextlib.closing(self.scraper):
            async with measurer:
                yield measurer

    def manifest(self, levels: list[LevelPlan], turns: Turns | None = None) -> Manifest:
        """What a run of this arm over these levels is."""
        options, identity = self.options, self.identity
        prompts, trace = self.material
        return Manifest(
            label=options.label or options.local or options.vllm or identity.engine,
            breakeven_version=__version__,
            target={
                "url": identity.base_url,
                "engine": identity.engine,
                "version": identity.version,
                "config": identity.config,
                "api": self.found.dialect.api,
                "counting": self.found.counting,
                "loopback": self._target.is_loopback,
            },
            model=self.model,
            flags=_flags(options),
            prompts={
                "source": prompts.source,
                "count": len(prompts.prompts),
                "sha256": prompts.sha256,
            }
            | ({"trace_sha256": _digest(trace)} if trace else {}),
            seed=options.seed,
            levels=levels,
            host=describe_host(),
            server_host=self.server.host(),
            turns=turns,
            started=datetime.now(UTC).isoformat(timespec="microseconds"),
        )


def _checked_pin(options: BenchOptions) -> Pin | None:
    if options.pin is None or options.control_url is None:
        return None
    pin = Pin(options.label or "", options.pin, options.control_url)
    pin.check()
    return pin


def _flags(options: BenchOptions) -> dict[str, Any]:
    """The options as the manifest may hold them: of headers only the names, no key."""
    flags: dict[str, Any] = msgspec.to_builtins(options, enc_hook=str)
    flags["headers"] = sorted(options.headers)
    flags["api_key"] = "set" if options.api_key else None
    flags["serve"] = parse_command(options.serve).shown() if options.serve else None
    return flags


def _digest(trace: list[TraceRequest]) -> str:
    return hashlib.sha256(msgspec.json.encode(trace)).hexdigest()
