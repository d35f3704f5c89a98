"""What `breakeven bench` was asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from msgspec import Struct, field

__all__ = ["BenchOptions", "Format"]

Format = Literal["table", "markdown", "csv", "json"]


class BenchOptions(Struct, frozen=True, kw_only=True):
    """One field per flag of `breakeven bench`; `breakeven bench --help` says what each means.

    Exactly one of `server_url` and `local` is set. `headers` and `api_key` are secrets and go into no file.
    """

    server_url: str | None = None
    local: str | None = None
    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
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
    seed: int = 0
    prompts: str | None = None
    kinds: tuple[str, ...] = ()
    unique: bool = False
    keep_text: bool = False
    output: Path | None = None
    label: str | None = None
    format: Format = "table"
    quiet: bool = False
