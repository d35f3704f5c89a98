"""Which engine answers, and what its API and its counters give."""

from __future__ import annotations

from breakeven.engines.identify import Identity
from breakeven.engines.metrics import Scrape, spec_between, why_no_spec
from breakeven.load.probe import Probe
from breakeven.report.diagnosis import Finding, on_server

__all__ = ["api_finding", "engine_finding", "metrics_finding", "speculation_finding"]

_COUNTED = {
    "chunks": "in every chunk",
    "total": "at the end, and a chunk is a token",
    "estimated": "not per chunk",
}


def engine_finding(identity: Identity, model: str) -> Finding:
    """Engine, version and model."""
    name = " ".join(filter(None, [identity.engine, identity.version]))
    others = len(identity.models) - 1
    found = f"{name} at {identity.base_url}: model {model}{f' (and {others} more: --model)' if others > 0 else ''}"
    known = identity.engine != "other"
    mend = None if known else "its counters are read only if named as vLLM's, SGLang's, llama.cpp's or TGI's"
    numbers = {"engine": identity.engine, "version": identity.version, "model": model, "config": identity.config}
    return on_server("engine", "ok" if known else "note", found, mend, **numbers)


def api_finding(found: Probe) -> Finding:
    """Which API answers, and how it counts tokens."""
    tokens_from = found.record.tokens_from
    text = f"{found.dialect.api} answers at {found.dialect.path}; tokens are counted {_COUNTED[tokens_from]}"
    numbers = {"api": found.dialect.api, "counting": found.counting, "tokens_from": tokens_from}
    if found.record.outcome == "empty":
        mend = "a first request brought no output: look at the model's chat template, or try another --api"
        return on_server("api", "problem", f"{text}; but no token came", mend, **numbers)
    guessed = tokens_from == "estimated"
    mend = "TPOT, ITL and the window's edges will rest on length of text: try another --api, or the engine's own URL"
    return on_server("api", "note" if guessed else "ok", text, mend if guessed else None, **numbers)


def metrics_finding(reason: str | None) -> Finding:
    """Whether the engine's counters can be read; `reason` is `Scraper.reason`."""
    if reason is None:
        return on_server("metrics", "ok", "the engine's counters can be read", metrics=True)
    why, _, mend = reason.partition(": ")
    found = f"{why}; acceptance and the engine's own queue stay unknown"
    elsewhere = "is it a proxy that hides them, or vLLM with --disable-log-stats?"
    return on_server("metrics", "note", found, mend or elsewhere, metrics=False)


def speculation_finding(
    identity: Identity, first: Scrape | None, last: Scrape | None, no_metrics: str | None
) -> tuple[bool, Finding]:
    """Whether the server speculates as far as it tells; by its configuration, else by counters around one request."""
    stats = spec_between(first, last) if first and last else None
    configured = _configured(identity)
    numbers = {"configured": configured, "acceptance_length": stats.acceptance_length if stats else None}
    if stats is not None:
        found = f"on: {stats.acceptance_length:.2f} tokens per verify pass around one request"
        return True, on_server("speculation", "ok", found, **numbers)
    why = why_no_spec(first, last) if first and last else no_metrics
    if configured is not None:
        found = f"{'on' if configured else 'off'}, says its configuration{f'; but {why}' if configured and why else ''}"
        return configured, on_server("speculation", "note" if configured else "ok", found, **numbers)
    return False, on_server("speculation", "unknown", why or "the server doesn't tell", **numbers)


def _configured(identity: Identity) -> bool | None:
    """What the server's own configuration says, as `engines.identify` keeps it; None where it says nothing."""
    config = identity.config
    for name in ("speculative_config", "speculative_algorithm", "speculative"):
        if name in config:
            return bool(config[name])
    return False if identity.engine == "sglang" and config else None  # SGLang names an algorithm only if it has one
