"""What is found at a URL: what answers there, the way to it, how one request goes, and the time that a bench takes."""

from __future__ import annotations

import asyncio
import re
import socket
import statistics
import time
from collections.abc import Mapping
from typing import NamedTuple

import uvloop

from breakeven.clock import KernelClock
from breakeven.doctor.engine import api_finding, engine_finding, metrics_finding, speculation_finding
from breakeven.doctor.streaming import streaming
from breakeven.engines.identify import Identity, choose_model, identify
from breakeven.engines.metrics import Scraper
from breakeven.errors import TargetError
from breakeven.host import core_count
from breakeven.levels import duration, plan_levels, planned_seconds
from breakeven.load.client import Client
from breakeven.load.connection import Connection, Endpoint, words
from breakeven.load.flight import Flight
from breakeven.load.later import Later
from breakeven.load.plan import PlannedRequest
from breakeven.load.probe import Probe, probe
from breakeven.load.prompts import Prompt, PromptSet, load_prompts
from breakeven.load.target import Target
from breakeven.load.trace import read_trace
from breakeven.measure.checks import NEAR_CEILING
from breakeven.options import BenchOptions
from breakeven.records import LevelPlan, RequestRecord
from breakeven.report.diagnosis import Finding, on_server

__all__ = ["Examined", "examine_server", "headroom"]

#: Tokens of the request that is looked at: enough events to see whether they come one by one.
_TOKENS = 64
_TIMEOUT_S = 120.0
_CONNECTS = 5
#: A way to the server this long, and this share of the time to the first token, is worth knowing.
_FAR_MS, _FAR_SHARE = 2.0, 0.1
#: Fields of an answer that only a proxy adds, and servers that are in front of an engine, never one.
_PROXY_FIELDS = ("via", "cf-ray", "x-amz-cf-id", "x-cache", "x-envoy-upstream-service-time", "x-kong-proxy-latency")
_PROXIES = re.compile(
    r"apache|awselb|caddy|cloudflare|envoy|gws|haproxy|kong|litespeed|nginx|openresty|traefik|varnish", re.IGNORECASE
)


class _Seen(NamedTuple):
    """One streamed request on a connection of its own, and whether that took another one."""

    probe: Probe
    record: RequestRecord
    fields: Mapping[str, str]
    connect_ms: float
    kept_alive: bool
    why_not: str


class Examined(NamedTuple):
    """What was found, and the record of the streamed request that was looked at."""

    findings: list[Finding]
    record: RequestRecord


def examine_server(options: BenchOptions) -> Examined:
    """Asks the server at `options.server_url` what it is and sends it three small requests.

    Not for use inside an event loop.

    Raises:
        TargetError: the server can't be reached or refuses; the text names flag and mend.
        PromptsError: the prompts can't be used.
    """
    assert options.server_url is not None
    headers = options.request_headers
    prompts = load_prompts(options.prompts, options.kinds, seed=options.seed)
    identity = identify(options.server_url, headers)
    model = choose_model(identity, options.model)
    target, scraper = Target(identity.base_url, headers), Scraper(identity, headers)
    first = scraper.scrape()
    seen = uvloop.run(_look(options, identity, target, model, prompts))
    last = scraper.scrape()
    scraper.close()
    is_speculating, speculation = speculation_finding(identity, first, last, scraper.reason)
    findings = [
        engine_finding(identity, model),
        api_finding(seen.probe),
        metrics_finding(scraper.reason),
        speculation,
        _proxy(seen.fields, target),
        streaming(seen.record, is_speculating=is_speculating),
        *_speed(seen.record),
        _way(target, seen),
        _keep_alive(seen),
        _plan(options, seen.probe),
    ]
    return Examined(findings, seen.record)


def headroom(options: BenchOptions, record: RequestRecord, ceiling_per_s: float) -> list[Finding]:
    """The most that the load asked for can bring, were every stream as fast as one alone, against the ceiling.

    Of a trace nothing is said: its file tells when requests come, not how they overlap.
    """
    if options.trace or len(record.arrivals) < 2 or not record.output_tokens:
        return []
    if options.rate:
        most = max(options.rate) * max(options.max_tokens) * record.chunks / record.output_tokens
        load = f"{max(options.rate):g} requests/s"
    else:
        seconds = (record.arrivals[-1][0] - record.arrivals[0][0]) / 1e9
        most = max(options.concurrency) * (record.chunks - 1) / seconds
        load = f"C={max(options.concurrency)}"
    near = most > NEAR_CEILING * ceiling_per_s
    found = f"at {load} at most {most:,.0f} chunks/s, were each stream as fast as one alone, of {ceiling_per_s:,.0f}"
    mend = "levels that come above half of it will be marked: make the load from a faster machine" if near else None
    return [on_server("headroom", "note" if near else "ok", found, mend, most_per_s=most, ceiling_per_s=ceiling_per_s)]


async def _look(options: BenchOptions, identity: Identity, target: Target, model: str, prompts: PromptSet) -> _Seen:
    apis = identity.apis if options.api == "auto" else (options.api,)
    sampling = options.sampling(random_prompts=prompts.is_random)
    extra = options.extra_body
    first, second = prompts.prompts[0], prompts.prompts[1 % len(prompts.prompts)]
    found = await probe(target, model, first, apis, identity.engine, sampling=sampling, extra_body=extra)
    encode = Client(
        target,
        found.dialect,
        model,
        lambda record: None,
        sampling=sampling,
        extra_body=extra,
        timeout_s=_TIMEOUT_S,
        stall_timeout_s=_TIMEOUT_S,
    ).encode
    endpoint = await target.resolve()
    connect_ms = statistics.median([await _connect_ms(endpoint) for _ in range(_CONNECTS)])
    long, short = _planned(second, _TOKENS), _planned(first, 1)
    connection = await _open(endpoint, target)
    try:
        flight = await _fly(connection, Flight(0, long, found.dialect, due_ns=0), encode(long))
        kept_alive, why_not = connection.usable, connection.failure or "it says so"
        if kept_alive:
            again = await _fly(connection, Flight(1, short, found.dialect, due_ns=0), encode(short))
            kept_alive, why_not = again.exchange.complete, connection.failure or "the second answer did not end"
    finally:
        connection.close()
    record = flight.record(0, target.scrub, keep_text=False)
    fields = {name.decode("latin-1"): value.decode("latin-1") for name, value in flight.exchange.headers.items()}
    return _Seen(found, record, fields, connect_ms, kept_alive, why_not)


def _planned(prompt: Prompt, tokens: int) -> PlannedRequest:
    return PlannedRequest(LevelPlan(index=-1, run=0, concurrency=1, max_tokens=tokens), "warmup", prompt, tokens)


async def _open(endpoint: Endpoint, target: Target) -> Connection:
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            return await Connection.open(endpoint, KernelClock(), Later(asyncio.get_running_loop()))
    except OSError as error:
        raise TargetError(f"{target.base_url}: no further connection: {words(error) or 'timed out'}") from None


async def _fly(connection: Connection, flight: Flight, request: bytes) -> Flight:
    flight.connection = connection
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            await connection.exchange(request, flight.exchange, time.perf_counter_ns)
    except TimeoutError:
        flight.fail("timeout", f"no end within {_TIMEOUT_S:g} s")
    flight.end(time.perf_counter_ns())
    while not flight.parse(1 << 62):
        pass
    return flight


async def _connect_ms(endpoint: Endpoint) -> float:
    """One round trip: what the kernel takes to connect, without TLS. Infinite where it can't."""
    began_ns = time.perf_counter_ns()
    with socket.socket(endpoint.family, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await asyncio.get_running_loop().sock_connect(sock, endpoint.sockaddr)  # type: ignore[arg-type]
        except OSError:
            return float("inf")
        return (time.perf_counter_ns() - began_ns) / 1e6


def _proxy(fields: Mapping[str, str], target: Target) -> Finding:
    signs = {name: fields[name] for name in _PROXY_FIELDS if name in fields}
    if _PROXIES.search(fields.get("server", "")):
        signs["server"] = fields["server"]
    asks = fields.get("x-accel-buffering", "").lower() == "no"
    ending = "; the answer asks proxies not to buffer it (X-Accel-Buffering: no)" if asks else ""
    numbers = {"fields": sorted(signs), "asks_not_to_buffer": asks}
    if not signs:
        return on_server("proxy", "ok", f"no field of its answer names a proxy{ending}", **numbers)
    shown = ", ".join(f"{name}: {_shown(target.scrub(value))}" for name, value in signs.items())
    mend = "what you measure is the proxy too: give the engine's own URL where you can reach it"
    return on_server("proxy", "note", f"a proxy stands before the server ({shown}){ending}", mend, **numbers)


def _shown(value: str) -> str:
    """A field's value as a terminal may see it."""
    return "".join(letter for letter in value if letter.isprintable())[:60]


def _speed(record: RequestRecord) -> list[Finding]:
    if record.outcome != "ok" or record.sent_ns is None:
        return []
    ttft_ms = record.arrivals[0][0] / 1e6
    later = record.output_tokens - record.arrivals[0][1]
    tpot_ms = (record.arrivals[-1][0] - record.arrivals[0][0]) / 1e6 / later if later > 0 else None
    found = f"one request alone: {record.output_tokens} tokens, TTFT {ttft_ms:.1f} ms"
    found += f", TPOT {tpot_ms:.2f} ms ({1e3 / tpot_ms:.1f} tok/s)" if tpot_ms else ""
    return [on_server("speed", "ok", found, ttft_ms=ttft_ms, tpot_ms=tpot_ms, tokens=record.output_tokens)]


def _way(target: Target, seen: _Seen) -> Finding:
    if target.is_loopback:
        found = f"on this machine, {seen.connect_ms:.2f} ms to connect: client and server share {core_count()} cores"
        apart = "from about 5 % of the cores on the client takes from the server; another machine, or taskset -c, helps"
        return on_server("way", "note", found, apart, connect_ms=seen.connect_ms, loopback=True)
    arrivals = seen.record.arrivals
    ttft_ms = arrivals[0][0] / 1e6 if arrivals else 0.0
    far = seen.connect_ms > max(_FAR_MS, _FAR_SHARE * ttft_ms)
    mend = "every TTFT holds a round trip: measure from a machine nearer to the server" if far else None
    found = f"{seen.connect_ms:.2f} ms to connect, one round trip (median of {_CONNECTS})"
    return on_server("way", "note" if far else "ok", found, mend, connect_ms=seen.connect_ms, loopback=False)


def _keep_alive(seen: _Seen) -> Finding:
    if seen.kept_alive:
        return on_server("keep-alive", "ok", "a second request went over the same connection", kept_alive=True)
    found = f"the connection does not outlive an answer ({seen.why_not}): each request pays for a new one"
    mend = "llama.cpp does so by itself; else turn on keep-alive, in a proxy too (nginx: proxy_http_version 1.1)"
    return on_server("keep-alive", "note", found, mend, kept_alive=False)


def _plan(options: BenchOptions, found: Probe) -> Finding:
    trace = read_trace(options.trace) if options.trace else None
    plan, levels = planned_seconds(options, *found.seconds_per_request, trace), len(plan_levels(options, trace))
    span = duration(plan.least_s)
    if round(plan.most_s) > round(plan.least_s):
        span += f" to {duration(plan.most_s)}"
    text = f"a bench with these flags takes about {span}: {levels} level{'s' * (levels > 1)}"
    return on_server("plan", "ok", text, least_s=plan.least_s, most_s=plan.most_s, levels=levels)
