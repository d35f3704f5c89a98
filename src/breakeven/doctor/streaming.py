"""Whether an answer comes as the server makes it, or is held back on its way."""

from __future__ import annotations

from collections.abc import Sequence

from breakeven.records import RequestRecord
from breakeven.report.diagnosis import Finding, State, on_server

__all__ = ["streaming"]

#: Events of one stream that are nearer to each other came by one write: no engine steps 2,000 times a second.
_ONE_WRITE_NS = 500_000
#: Fewer events tell nothing.
_ENOUGH_EVENTS = 8
#: An engine sends an event a step, so that a write holds one; the client alone may find two in a read, or three.
_HELD_BACK = 4
#: Tokens an event from which the server itself is coarse; speculation rarely gets so far.
_COARSE = 8

_UNBUFFER = (
    "TTFT and TPOT would be the proxy's: turn its buffering off (nginx: proxy_buffering off; or answer with "
    "X-Accel-Buffering: no), or give the engine's own URL"
)


def streaming(record: RequestRecord, *, is_speculating: bool) -> Finding:
    """Judges one streamed answer by how its events lie in time.

    Arrivals within half a millisecond are one burst, as a proxy makes them when its buffer is full. An answer whose
    bursts hold four events or more on average was held back. Where the server speculates, accepted drafts look the same
    (llama.cpp sends an event for each of their tokens): only an answer in one burst is then a problem.
    """
    if record.outcome != "ok":
        found = f"a request of {record.max_tokens} tokens failed: {record.outcome}, {record.error}"
        return on_server("streaming", "problem", found)
    bursts = _bursts(record.arrivals)
    events, tokens = record.chunks, record.output_tokens
    state, words, mend = _judge(events, tokens, len(bursts), is_speculating=is_speculating)
    span_ms = (record.arrivals[-1][0] - record.arrivals[0][0]) / 1e6
    shape = f"{events} events in {len(bursts)} burst{'s' * (len(bursts) > 1)} over {span_ms:,.0f} ms"
    shape += f", {bursts[0] / max(1, sum(bursts)):.0%} of the tokens in the first"
    numbers = {"events": events, "bursts": len(bursts), "span_ms": span_ms, "first_tokens": bursts[0], "tokens": tokens}
    return on_server("streaming", state, f"{words}: {shape}", mend, **numbers)


def _judge(events: int, tokens: int, bursts: int, *, is_speculating: bool) -> tuple[State, str, str | None]:
    if tokens >= max(_COARSE * events, _ENOUGH_EVENTS):
        words = f"the server puts {tokens / events:.0f} tokens into an event"
        return "note", words, "vLLM and SGLang: --stream-interval 1"
    if events < _ENOUGH_EVENTS:
        return "unknown", "the answer is too short to tell", None
    if bursts == 1:
        return "problem", "the answer comes all at once, not as it is made", _UNBUFFER
    if events < _HELD_BACK * bursts:
        return "ok", "tokens come as they are made", None
    if is_speculating:
        return "note", "tokens come in bursts, of accepted drafts or from a proxy", "compare with speculation off"
    return "problem", "the answer is held back and comes in bursts", _UNBUFFER


def _bursts(arrivals: Sequence[tuple[int, int]]) -> list[int]:
    """The tokens of each burst."""
    bursts: list[int] = []
    before_ns = None
    for after_ns, tokens in arrivals:
        if before_ns is not None and after_ns - before_ns <= _ONE_WRITE_NS:
            bursts[-1] += tokens
        else:
            bursts.append(tokens)
        before_ns = after_ns
    return bursts
