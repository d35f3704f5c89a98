"""What `breakeven bench` was asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from msgspec import Struct, field

__all__ = ["BenchOptions", "CompareOptions", "FindOptions", "Format"]

Format = Literal["table", "markdown", "csv", "json"]


class BenchOptions(Struct, frozen=True, kw_only=True):
    """One field per flag of `breakeven bench`; `breakeven bench --help` says what each means.

    Exactly one of `server_url`, `local`, `vllm` and `serve` is set. An arm inside a server that others share has `pin`,
    the K that it pins or `auto`, and `control_url`, where. The load is `concurrency` unless `rate` or `trace` is set.
    `headers` and `api_key` are secrets and go into no file.
    """

    server_url: str | None = None
    local: str | None = None
    vllm: str | None = None
    serve: str | None = None
    serve_on: str | None = None
    pin: str | None = None
    control_url: str | None = None
    serve_timeout_s: float = 1200.0
    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    rate: tuple[float, ...] = ()
    arrivals: str = "poisson"
    trace: str | None = None
    speed: float = 1.0
    max_in_flight: int | None = None
    max_tokens: tuple[int, ...] = (512,)
    requests: int | None = None
    duration_s: float | None = None
    precision: float = 0.05
    max_seconds: float | None = None
    budget_s: float | None = None
    warmup: int = 5
    ramp: bool = True
    runs: int = 1
    api: Literal["auto", "chat", "completions", "sglang"] = "auto"
    model: str | None = None
    temperature: float = 0.0
    ignore_eos: bool | None = None
    extra_body: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    api_key: str | None = None
    timeout_s: float = 1200.0
    stall_timeout_s: float = 120.0
    watchdog_s: float = 300.0
    retries: int = 0
    seed: int = 0
    prompts: str | None = None
    kinds: tuple[str, ...] = ()
    unique: bool = False
    keep_text: bool = False
    output: Path | None = None
    label: str | None = None
    format: Format = "table"
    quiet: bool = False

    @property
    def request_headers(self) -> dict[str, str]:
        """What goes with each request: `headers`, and the key where they carry no other authorization."""
        if self.api_key is None or "authorization" in {name.lower() for name in self.headers}:
            return dict(self.headers)
        return {"Authorization": f"Bearer {self.api_key}"} | self.headers

    def sampling(self, *, random_prompts: bool) -> dict[str, Any]:
        """The sampling parameters of each request. Answers to random words would end anywhere: they go on."""
        ignore_eos = random_prompts if self.ignore_eos is None else self.ignore_eos
        return {"temperature": self.temperature} | ({"ignore_eos": True} if ignore_eos else {})


class FindOptions(Struct, frozen=True, kw_only=True):
    """What `breakeven compare --find` looks for, between which loads, how narrow, for how long at most.

    `precision` is half the interval of the load, on the log scale; `slo` has the limits that `slo` looks for.
    """

    what: Literal["break-even", "knee", "slo"]
    between: tuple[int, int] = (1, 256)
    precision: float = 0.1
    max_seconds: float | None = None
    slo: str | None = None


class CompareOptions(Struct, frozen=True, kw_only=True):
    """What `breakeven compare` was asked to measure; `breakeven compare --help` says what each field means.

    `bench` holds load and requests, the same for all arms; `arms` has each arm's name and where its server is.
    `precision` None: `cycles` and no more. With `find` loads and turns are chosen as it goes, and `cycles`, `precision`
    and `repeats` say nothing.
    """

    bench: BenchOptions
    arms: tuple[tuple[str, str], ...]
    cycles: int = 4
    precision: float | None = 0.025
    repeats: int = 3
    concurrently: bool = False
    force: bool = False
    find: FindOptions | None = None
