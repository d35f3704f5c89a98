"""Speculation counters and load gauges from an engine's Prometheus page.

Pages reach 200 kB and are read once a second beside an event loop that must not wait. So nothing but the
wanted samples is looked at: one search with a compiled pattern, not a parse of every line.

Every counter counts everybody's traffic since the server's start: take differences, and say so when others
use the server. vLLM counts at each step; llama.cpp and SGLang count a request's output tokens and drafts when
it ends, so a difference is that of the requests that ended in between.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping
from itertools import count, takewhile, zip_longest
from statistics import fmean
from typing import Any, NamedTuple

import msgspec

from breakeven.engines.http import Client
from breakeven.engines.identify import Identity
from breakeven.errors import TargetError

__all__ = ["Scrape", "Scraper", "SpecStats", "parse_metrics", "spec_between", "why_no_spec"]


class Scrape(msgspec.Struct, frozen=True):
    """One reading. What the engine doesn't show is None, and `accepted_per_pos` empty.

    `time_ns` is `perf_counter_ns` when the page had arrived; `kv_use` is between 0 and 1, the mean over ranks.
    `acceptance_length` stands only where there are no counters for it: SGLang's gauge, an average over the
    verify passes of the engine's last 40 decode steps (`--decode-log-interval`), and here over ranks.
    """

    time_ns: int
    running: float | None = None
    waiting: float | None = None
    kv_use: float | None = None
    preemptions: float | None = None
    drafts: float | None = None
    draft_tokens: float | None = None
    accepted: float | None = None
    accepted_per_pos: tuple[float, ...] = ()
    generation_tokens: float | None = None
    prompt_tokens: float | None = None
    acceptance_length: float | None = None


class SpecStats(msgspec.Struct, frozen=True):
    """Speculation between two scrapes; None for what the engine doesn't count.

    `acceptance_length` = 1 + accepted / drafts (tokens per verify pass); `acceptance_rate` = accepted /
    draft_tokens; `per_position[i]` = accepted at position i / drafts.
    """

    acceptance_length: float
    acceptance_rate: float | None
    per_position: tuple[float, ...]
    drafts: float | None
    draft_tokens: float | None
    accepted: float | None


def _spec_decode(prefix: str) -> dict[str, tuple[str, ...]]:
    # vLLM 0.32, v1/spec_decode/metrics.py; prometheus_client adds _total, exporters of other kinds don't.
    # llama.cpp's server (xllamacpp 2026.10, read from its page) has the same names.
    stems = {"drafts": "drafts", "draft_tokens": "draft_tokens", "accepted": "accepted_tokens"}
    stems["accepted_per_pos"] = "accepted_tokens_per_pos"
    return {to: _total(f"{prefix}:spec_decode_num_{stem}") for to, stem in stems.items()}


def _total(name: str) -> tuple[str, ...]:
    return f"{name}_total", name


# Per engine and field, the names under which releases have shown it, the preferred one first.
_NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    # vLLM 0.32, v1/metrics/loggers.py; gpu_cache_usage_perc is what older releases say.
    "vllm": _spec_decode("vllm")
    | {
        "running": ("vllm:num_requests_running",),
        "waiting": ("vllm:num_requests_waiting",),
        "kv_use": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        "preemptions": _total("vllm:num_preemptions"),
        "generation_tokens": _total("vllm:generation_tokens"),
        "prompt_tokens": _total("vllm:prompt_tokens"),
    },
    # SGLang 0.5.23, srt/observability/metrics_collector.py; 0.5.19 said num_retracted_reqs_total (the same
    # without _total is a gauge that is set back). A verify call is one request's verify pass.
    "sglang": {
        "running": ("sglang:num_running_reqs",),
        "waiting": ("sglang:num_queue_reqs",),
        "kv_use": ("sglang:token_usage",),
        "preemptions": ("sglang:num_retracted_requests_total", "sglang:num_retracted_reqs_total"),
        "drafts": ("sglang:spec_verify_calls_total",),
        "generation_tokens": _total("sglang:generation_tokens"),
        "prompt_tokens": _total("sglang:prompt_tokens"),
        "acceptance_length": ("sglang:spec_accept_length",),
    },
    # kv_cache_usage_ratio until the unified cache of 2025. Prompt tokens exclude the cached ones.
    "llama.cpp": _spec_decode("llamacpp")
    | {
        "running": ("llamacpp:requests_processing",),
        "waiting": ("llamacpp:requests_deferred",),
        "kv_use": ("llamacpp:kv_cache_usage_ratio",),
        "generation_tokens": _total("llamacpp:tokens_predicted"),
        "prompt_tokens": _total("llamacpp:prompt_tokens"),
    },
    # TGI 3, docs/source/reference/metrics.md. For each step of a request, backends/v3/src/backend.rs puts the
    # tokens beyond the first into tgi_request_skipped_tokens: its count is that of the passes (prefills among
    # them), its sum the accepted tokens.
    "tgi": {
        "running": ("tgi_batch_current_size",),
        "waiting": ("tgi_queue_size",),
        "drafts": ("tgi_request_skipped_tokens_count",),
        "accepted": ("tgi_request_skipped_tokens_sum",),
        "generation_tokens": ("tgi_request_generated_tokens_sum",),
        "prompt_tokens": ("tgi_request_input_length_sum",),
    },
}
_PREFIXES = {b"\nvllm:": "vllm", b"\nsglang:": "sglang", b"\nllamacpp:": "llama.cpp", b"\ntgi_": "tgi"}

_MEANS = frozenset({"kv_use", "acceptance_length"})
_COUNTERS = ("drafts", "draft_tokens", "accepted", "generation_tokens", "prompt_tokens", "preemptions")

# Ranks that run the same batch: SGLang shows every pipeline stage, and every tensor-parallel rank under
# --enable-metrics-for-all-schedulers. Data-parallel ranks (dp_rank, vLLM's engine) run batches of their own.
_REPLICAS = frozenset({b"tp_rank", b"pp_rank", b"moe_ep_rank"})

# A sample (prometheus.io/docs/instrumenting/exposition_formats): name, labels with escapes, value. The line feed
# before it is literal, which lets the search skip from line to line, several times faster than `^`.
_SAMPLE = rb'\n(%b)(?:\{((?:[^"}\n]|"(?:[^"\\\n]|\\.)*")*)\})?[ \t]+([^\s]+)'
_LABEL = re.compile(rb'(\w+)="((?:[^"\\]|\\.)*)"')


class _Sample(NamedTuple):
    labels: dict[bytes, bytes]
    value: float


def _pattern(names: Mapping[str, tuple[str, ...]]) -> re.Pattern[bytes]:
    every = sorted({name.encode() for each in names.values() for name in each})
    return re.compile(_SAMPLE % b"|".join(map(re.escape, every)))


_PATTERNS = {engine: _pattern(names) for engine, names in _NAMES.items()}


def parse_metrics(engine: str, text: bytes, time_ns: int | None = None) -> Scrape:
    """The wanted samples of a Prometheus page, summed over their label sets (ratios: averaged).

    `engine` is `Identity.engine`; for "other" the names on the page decide, since gateways pass on what their
    engine shows. `time_ns` is when the page arrived, by default now. What can't be read is left out.
    """
    page = b"\n" + text
    if engine not in _NAMES:
        engine = next((named for prefix, named in _PREFIXES.items() if prefix in page), "vllm")
    time_ns = time.perf_counter_ns() if time_ns is None else time_ns
    samples = _samples(_PATTERNS[engine], page)
    values: dict[str, Any] = {}
    for to, names in _NAMES[engine].items():
        shown = next((samples[name] for name in names if name in samples), [])
        values[to] = _positions(shown) if to == "accepted_per_pos" else _folded(to, shown)
    return Scrape(time_ns, **values)


def _samples(pattern: re.Pattern[bytes], page: bytes) -> dict[str, list[_Sample]]:
    """The samples by name; those whose value is no finite number are left out."""
    found: dict[str, list[_Sample]] = {}
    for name, labels, text in pattern.findall(page):
        try:
            value = float(text)
        except ValueError:
            continue
        if math.isfinite(value):
            found.setdefault(name.decode(), []).append(_Sample(dict(_LABEL.findall(labels)), value))
    return found


def _folded(to: str, samples: list[_Sample]) -> float | None:
    """One number for all batches of the engine: the mean of ratios, the sum of all else."""
    values = [sample.value for sample in _batches(samples)]
    if to == "acceptance_length":
        values = [value for value in values if value > 0]  # 0 on a rank that hasn't speculated yet
    if not values:
        return None
    return fmean(values) if to in _MEANS else math.fsum(values)


def _positions(samples: list[_Sample]) -> tuple[float, ...]:
    """The counts at draft positions 0, 1, …, summed over batches, as far as they follow without a gap."""
    at: dict[bytes, float] = {}
    for labels, value in _batches(samples):
        position = labels.get(b"position", b"")
        at[position] = at.get(position, 0.0) + value
    positions = takewhile(at.__contains__, (b"%d" % index for index in count()))
    return tuple(at[position] for position in positions)


def _batches(samples: list[_Sample]) -> Iterable[_Sample]:
    """One sample per batch: of ranks that run the same batch, the largest.

    With priority scheduling SGLang shows a queue's total under priority="" and its parts beside it
    (`_log_gauge_queue_count`); then the total alone counts.
    """
    if any(labels.get(b"priority") == b"" for labels, _ in samples):
        samples = [sample for sample in samples if not sample.labels.get(b"priority")]
    largest: dict[frozenset[tuple[bytes, bytes]], _Sample] = {}
    for sample in samples:
        batch = frozenset(item for item in sample.labels.items() if item[0] not in _REPLICAS)
        largest[batch] = max(largest.get(batch, sample), sample, key=lambda each: each.value)
    return largest.values()


def spec_between(first: Scrape, last: Scrape) -> SpecStats | None:
    """Speculation between two scrapes of one server; None where `why_no_spec` has a reason.

    Where the engine has no counter of accepted tokens, the length is its own gauge at the last scrape. TGI's
    is a little low: its passes include each request's prefill.
    """
    if why_no_spec(first, last) is not None:
        return None
    drafts, draft_tokens, accepted = (_grown(first, last, name) for name in _COUNTERS[:3])
    length = last.acceptance_length or 0.0
    per_position: tuple[float, ...] = ()
    if drafts and accepted is not None:
        length = 1 + accepted / drafts
        per_position = tuple(each / drafts for each in _grown_positions(first, last))
    rate = accepted / draft_tokens if draft_tokens and accepted is not None else None
    return SpecStats(length, rate, per_position, drafts, draft_tokens, accepted)


def why_no_spec(first: Scrape, last: Scrape) -> str | None:
    """Why there is nothing to say of speculation between two scrapes; None if there is."""
    growth = {name: _grown(first, last, name) for name in _COUNTERS}
    back = [name for name, grown in growth.items() if (grown or 0) < 0]
    if back or min(_grown_positions(first, last), default=0) < 0:
        return f"{', '.join(back) or 'accepted_per_pos'} went backwards: the server was restarted"
    if growth["drafts"] is None and last.acceptance_length is None:
        return "the engine shows no speculation: it is off, or not counted"
    if growth["drafts"] == 0:
        return "no draft was verified"
    if growth["accepted"] is None and last.acceptance_length is None:
        return "the engine doesn't count accepted tokens"
    if growth["accepted"] == 0 and growth["draft_tokens"] is None:
        return "no draft token was accepted, and the engine doesn't count drafts: speculation may be off"
    return None


def _grown(first: Scrape, last: Scrape, name: str) -> float | None:
    """A counter's growth; one that wasn't there at first started at 0, one that is gone lost its count."""
    before: float | None = getattr(first, name)
    after: float | None = getattr(last, name)
    return None if before is None and after is None else (after or 0.0) - (before or 0.0)


def _grown_positions(first: Scrape, last: Scrape) -> list[float]:
    pairs = zip_longest(first.accepted_per_pos, last.accepted_per_pos, fillvalue=0.0)
    return [after - before for before, after in pairs]


class Scraper:
    """Reads one server's counters again and again over a kept-alive connection; for one thread at a time.

    `reason` says why the last `scrape` gave None, and is None after one that worked.
    """

    def __init__(self, identity: Identity, headers: Mapping[str, str], timeout_s: float = 2.0) -> None:
        self._engine = identity.engine
        self._client = Client(identity.metrics_url, headers, timeout_s) if identity.metrics_url else None
        self.reason = None if self._client else _switched_off(identity.engine)

    def scrape(self) -> Scrape | None:
        """The counters now, or None for any fault of the server: a run goes on without them."""
        if self._client is None:
            return None
        try:
            answer = self._client.get("")
        except TargetError as error:
            self.reason = str(error)
            return None
        arrived_ns = time.perf_counter_ns()
        self.reason = None if answer.status == 200 else f"/metrics answered with status {answer.status}"
        return None if self.reason else parse_metrics(self._engine, answer.body, arrived_ns)

    def close(self) -> None:
        """Drop the connection."""
        if self._client is not None:
            self._client.close()


def _switched_off(engine: str) -> str:
    # SGLang 0.5.23 and llama.cpp show nothing unless asked to.
    flag = {"sglang": "--enable-metrics", "llama.cpp": "--metrics"}.get(engine)
    return "the server shows no /metrics" + (f": start it with {flag}" if flag else "")
