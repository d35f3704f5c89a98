"""One small request before the first level: which API answers, and which of our fields it takes.

What would fail a thousand times later fails here once, with the flag that mends it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from breakeven.errors import TargetError
from breakeven.load.client import Client
from breakeven.load.dialect import COUNTING, Api, Dialect, dialect_for
from breakeven.load.plan import PlannedRequest
from breakeven.load.prompts import Prompt
from breakeven.load.target import Target
from breakeven.records import LevelPlan, RequestRecord

__all__ = ["Probe", "probe"]

#: Enough tokens for more than one chunk, so that counts per chunk show.
_TOKENS = 16
_TIMEOUT_S = 120.0
#: What is tried, in order, where an engine's fields for counting are not known.
_UNKNOWN_ENGINE = ("continuous", "total", "none")
_COUNTING = {
    "vllm": ("continuous",),
    "sglang": ("continuous",),
    "llama.cpp": ("llama.cpp",),
    "tgi": ("total", "none"),
}


class Probe:
    """What the probe found: the dialect that works, the name of its way of counting, and the record of its answer."""

    def __init__(self, dialect: Dialect, counting: str, record: RequestRecord) -> None:
        self.dialect, self.counting, self.record = dialect, counting, record

    @property
    def seconds_per_request(self) -> tuple[float, float]:
        """Time to the first token and per later token, in seconds: a first idea of how long a request takes alone."""
        arrivals = self.record.arrivals
        if not arrivals:
            return 1.0, 0.05
        (first, first_tokens), (last, _) = arrivals[0], arrivals[-1]
        later = self.record.output_tokens - first_tokens
        return first / 1e9, (last - first) / 1e9 / later if later > 0 else 0.05


async def probe(
    target: Target,
    model: str,
    prompt: Prompt,
    apis: Sequence[Api],
    engine: str,
    *,
    sampling: Mapping[str, Any],
    extra_body: Mapping[str, Any],
    timeout_s: float = _TIMEOUT_S,
) -> Probe:
    """Tries the APIs in order, each with the fields that make the engine count, until one answers well.

    An answer may take `timeout_s` seconds.

    Raises:
        TargetError: none does. The text is the server's own reason, and the flag to look at.
    """
    refused: RequestRecord | None = None
    for api in apis:
        for counting in _COUNTING.get(engine, _UNKNOWN_ENGINE):
            dialect = dialect_for(api, COUNTING[counting])
            record = await _ask(target, model, prompt, dialect, sampling, extra_body, timeout_s)
            if record.outcome in ("ok", "empty"):
                return Probe(dialect, counting, record)
            # The last refusal of an API that exists: it had the fewest fields of ours in it, so it is not about them.
            refused = record if refused is None or record.status != 404 else refused
            if record.status not in (400, 404, 422):
                raise _refusal(target, record)
            if record.status == 404:
                break
    assert refused is not None, "no API to try"
    raise _refusal(target, refused)


async def _ask(
    target: Target,
    model: str,
    prompt: Prompt,
    dialect: Dialect,
    sampling: Mapping[str, Any],
    extra_body: Mapping[str, Any],
    timeout_s: float,
) -> RequestRecord:
    records: list[RequestRecord] = []
    client = Client(
        target,
        dialect,
        model,
        records.append,
        sampling=sampling,
        extra_body=extra_body,
        timeout_s=timeout_s,
        stall_timeout_s=timeout_s,
    )
    level = LevelPlan(index=-1, run=0, concurrency=1, max_tokens=_TOKENS)
    async with client:
        await client.send(PlannedRequest(level, "warmup", prompt, _TOKENS))
        await client.settled()
    return records[0]


def _refusal(target: Target, record: RequestRecord) -> TargetError:
    said = record.error or record.outcome
    where = target.base_url
    if record.status in (401, 403):
        mend = "set the key's environment variable and name it with --api-key-env, or give --header"
    elif record.status == 404:
        mend = "check --server-url, --api and --model"
    elif record.status in (400, 413, 422):
        mend = "check --extra-body, --max-tokens, --prompts and --model"
    elif "certificate verify failed" in said:
        mend = "use the host name it was issued for, or name the file of its CA in SSL_CERT_FILE"
    elif record.outcome == "timeout":
        mend = "is the engine stuck, or busy with others? --stall-timeout gives it longer"
    elif record.outcome in ("protocol", "truncated"):
        mend = "does this server stream (text/event-stream)? try another --api"
    else:
        mend = "look at the server's log"
    return TargetError(f"{where} refused a first request: {said}; {mend}")
