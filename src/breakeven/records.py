"""The records that everything else reads: one per request, one per level, one per run.

Times in records are nanoseconds since the run's start (`Manifest.started` is the wall time of that moment), except
arrivals, which are nanoseconds after the request's first byte was written.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, field

__all__ = [
    "ClientCost",
    "EngineSample",
    "LevelPlan",
    "LevelRecord",
    "Manifest",
    "Outcome",
    "Phase",
    "RequestRecord",
    "Turns",
]

Phase = Literal["warmup", "ramp", "measured", "drain"]
Outcome = Literal[
    "ok", "http_error", "stream_error", "truncated", "empty", "timeout", "connection", "protocol", "cancelled"
]
TokensFrom = Literal["chunks", "total", "estimated"]

#: Version of the layout of manifest.json, requests.jsonl and levels.jsonl. History: 1, the first.
RUN_SCHEMA = "breakeven.run/1"


class RequestRecord(Struct, kw_only=True):
    """One request as it happened.

    `arrivals` holds `[ns after sent, tokens]` for each read that brought output; chunks that one read brings are one
    arrival. `tokens_from` says where the tokens per arrival come from: `chunks` (the server counts in every chunk),
    `total` (the server's total, and one token a chunk explains it) or `estimated` (the total spread by length of
    text, or a guess). `total_known` is false where the server gave no count at all and `output_tokens` is a guess
    too. `repetition` is the share of the text that one repeating passage at its end fills.
    """

    id: int
    level: int
    phase: Phase
    prompt: str
    kind: str
    max_tokens: int
    due_ns: int
    sent_ns: int | None = None
    headers_ns: int | None = None
    first_ns: int | None = None
    last_ns: int | None = None
    end_ns: int | None = None
    arrivals: list[tuple[int, int]] = field(default_factory=list)
    input_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    tokens_from: TokensFrom = "estimated"
    total_known: bool = True
    chunks: int = 0
    outcome: Outcome = "cancelled"
    status: int | None = None
    error: str | None = None
    finish_reason: str | None = None
    reconnects: int = 0
    retries: int = 0
    repetition: float = 0.0
    text: str | None = None


class LevelPlan(Struct, frozen=True, kw_only=True):
    """One level of the sweep, each request of at most `max_tokens` tokens.

    A `closed` level keeps `concurrency` requests in flight. An `open` one sends `rate` requests a second whose gaps
    are distributed as `arrivals` says (`poisson`, `constant`, `gamma:CV`). A `trace` level sends what a file says, when
    it says it, `speed` times as fast; `max_tokens` is then the longest of its answers. Open and trace levels never have
    more than `max_in_flight` requests running.
    """

    index: int
    run: int
    max_tokens: int
    mode: Literal["closed", "open", "trace"] = "closed"
    concurrency: int = 0
    rate: float = 0.0
    arrivals: str = ""
    speed: float = 1.0
    max_in_flight: int | None = None

    @property
    def load(self) -> dict[str, Any]:
        """What the level asks of the server: the same in two runs if they can be compared."""
        if self.mode == "closed":
            return {"mode": "closed", "concurrency": self.concurrency, "max_tokens": self.max_tokens}
        kind = {"rate": self.rate, "arrivals": self.arrivals} if self.mode == "open" else {"speed": self.speed}
        bound = {} if self.max_in_flight is None else {"max_in_flight": self.max_in_flight}
        return {"mode": self.mode, **kind, **bound, "max_tokens": self.max_tokens}

    @property
    def name(self) -> str:
        """The load in a few characters: `C=8`, `2/s`, `trace x1`."""
        names = {"closed": f"C={self.concurrency}", "open": f"{self.rate:g}/s", "trace": f"trace x{self.speed:g}"}
        return names[self.mode]


class EngineSample(Struct, frozen=True, kw_only=True):
    """The engine's gauges at one moment; None where the engine has no such gauge."""

    time_ns: int
    running: float | None = None
    waiting: float | None = None
    kv_use: float | None = None


class ClientCost(Struct, frozen=True, kw_only=True):
    """What the load generator itself cost over a level: ramp, window and drain, parsing included."""

    cpu_s: float
    wall_s: float
    chunks: int
    lag_ms: dict[str, float]
    clock_steps: int = 0
    ceiling_chunks_per_s: float | None = None


class LevelRecord(Struct, kw_only=True):
    """What is known of a level beyond its requests. A level without a window has `opened_ns` None.

    `counters` are the differences of the engine's counters over the window, `spec` what it tells of speculation
    there: `acceptance_length`, `acceptance_rate`, `per_position`, `drafts`, `draft_tokens`, `accepted`. `pin_broken` is
    why the arm's pin did not hold; None where it did, or where nothing was pinned.
    """

    plan: LevelPlan
    started_ns: int
    opened_ns: int | None = None
    closed_ns: int | None = None
    ended_ns: int
    ended_by: str
    ramp_limited: bool = False
    client: ClientCost
    samples: list[EngineSample] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)
    spec: dict[str, Any] | None = None
    pin_broken: str | None = None


class Turns(Struct, frozen=True, kw_only=True):
    """How a run took turns with other arms. Runs of the same `group` were measured alternately.

    `pairs`: at each load the arms' turns followed each other, in ABBA order. `sweeps`: whole sweeps did. Turn r of a
    load is the level with `run` r in each arm.
    """

    group: str
    arm: str
    how: Literal["pairs", "sweeps"]


class Manifest(Struct, kw_only=True):
    """What a run is: enough to repeat it and to refuse comparing it with an unlike one. Holds no secrets.

    `resumed` has the wall time of each `--resume`. `server_host` is the machine of a server that breakeven started
    itself; None where the server was there before. `turns` is None where nothing was compared.
    """

    schema: str = RUN_SCHEMA
    label: str
    breakeven_version: str
    target: dict[str, Any]
    model: str
    flags: dict[str, Any]
    prompts: dict[str, Any]
    seed: int
    levels: list[LevelPlan]
    host: dict[str, Any]
    started: str
    ended: str | None = None
    interrupted: bool = False
    resumed: list[str] = field(default_factory=list)
    server_host: dict[str, Any] | None = None
    turns: Turns | None = None
