"""API dialects: how a request is put, and what one event of the answer means.

Three are spoken: OpenAI chat completions, OpenAI completions, and SGLang's native `/generate`. The engines' additions
that give token counts per chunk ride on them: `stream_options.continuous_usage_stats` (vLLM, SGLang) and
`timings_per_token` (llama.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Raw, Struct

from breakeven.load.prompts import Prompt

__all__ = ["COUNTING", "UNDECODABLE", "Api", "Dialect", "Meaning", "dialect_for", "error_text"]

Api = Literal["chat", "completions", "sglang"]

#: What decoding raises on bytes that are no JSON, no UTF-8, of an impossible shape, or nested without end.
UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
#: Tokens of a response. A count outside this is a fault that would only show later, in the arithmetic.
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class Meaning(Struct, frozen=True, gc=False):
    """What one event says. Counts are cumulative over the response; None where the event has none.

    `text` is the output that this event adds (reasoning and tool calls included), empty if it adds none; with
    `is_whole` it may instead be all output of `choice` so far. With several choices (`n` > 1) `output_tokens` counts
    those of `choice` alone, unless it `is_total`, and `finish_reason` is that of `choice`. `is_rare` says that another
    field than `text` and `output_tokens` is set.
    """

    text: str = ""
    output_tokens: int | None = None
    choice: int = 0
    is_total: bool = False
    is_whole: bool = False
    is_rare: bool = False
    input_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None


class Dialect(NamedTuple):
    """One API: where it is, how a request body looks, what an event means.

    `body` takes the prompt, the model's name, max-tokens and the sampling parameters (temperature, `ignore_eos`).
    `decode` takes the data of many events at once, joined by commas, which costs a third of one call each; it raises
    one of `UNDECODABLE` if it can't make sense of one of them.
    """

    api: Api
    path: str
    body: Callable[[Prompt, str, int, Mapping[str, Any]], dict[str, Any]]
    decode: Callable[[bytes], list[Meaning]]
    counting: Mapping[str, Any]


#: Where an event has no such field; some servers send null instead. (`Raw | None` would take nothing but null.)
_NO_ERROR = Raw()


class _Details(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: _Count | None = None
    prompt_tokens_details: _Details | None = None


class _Timings(Struct):
    predicted_n: _Count | None = None


class _Function(Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(Struct):
    function: _Function | None = None


class _Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(Struct):
    index: int = 0
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _OpenAiEvent(Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    timings: _Timings | None = None
    error: Raw = _NO_ERROR
    message: Raw = _NO_ERROR  # vLLM's older shape of an error: {"object": "error", "message": …}


class _MetaInfo(Struct):
    prompt_tokens: int | None = None
    completion_tokens: _Count | None = None
    cached_tokens: int | None = None
    finish_reason: dict[str, Any] | str | None = None


class _SglangEvent(Struct):
    index: int = 0
    text: str | None = None
    meta_info: _MetaInfo | None = None
    error: Raw = _NO_ERROR


_decode_openai = msgspec.json.Decoder(list[_OpenAiEvent]).decode
_decode_sglang = msgspec.json.Decoder(list[_SglangEvent]).decode


def _openai_meanings(events: bytes) -> list[Meaning]:
    return [_openai_meaning(event) for event in _decode_openai(b"[%b]" % events)]


def _openai_meaning(event: _OpenAiEvent) -> Meaning:
    choices = event.choices or ()
    if (not choices or event.error is not _NO_ERROR) and (error := _error_in(event)):
        return Meaning(error=error, is_rare=True)
    if len(choices) == 1:
        choice = choices[0]
        text, finish, index = _choice_text(choice), choice.finish_reason or None, choice.index
    else:
        text, finish, index = _joint(choices)
    usage, timings = event.usage, event.timings
    if usage is not None:
        details, is_total = usage.prompt_tokens_details, len(choices) != 1
        cached = details.cached_tokens if details else None
        count = usage.completion_tokens
        is_rare = is_total or index > 0 or cached is not None or finish is not None
        return Meaning(text, count, index, is_total, False, is_rare, usage.prompt_tokens, cached, finish)
    count = timings.predicted_n if timings is not None else None
    return Meaning(text, count, index, False, False, index > 0 or finish is not None, None, None, finish)


def _error_in(event: _OpenAiEvent) -> str | None:
    for value in (event.error, event.message if event.choices is None else _NO_ERROR):
        if value is not _NO_ERROR and (body := bytes(value)) != b"null":
            return error_text(body)
    return None


def _joint(choices: Sequence[_Choice]) -> tuple[str, str | None, int]:
    """Several choices in one event, taken as one: a usage beside them can only count them all."""
    reasons = [choice.finish_reason for choice in choices]
    return "".join(map(_choice_text, choices)), (reasons[0] or None) if all(reasons) and reasons else None, 0


def _choice_text(choice: _Choice) -> str:
    delta = choice.delta
    if delta is None:
        return choice.text or ""
    text = (delta.reasoning_content or delta.reasoning or "") + (delta.content or "")
    if delta.refusal or delta.tool_calls:
        calls = [call.function for call in delta.tool_calls or () if call.function]
        text += (delta.refusal or "") + "".join((call.name or "") + (call.arguments or "") for call in calls)
    return text


def _sglang_meanings(events: bytes) -> list[Meaning]:
    return [_sglang_meaning(event) for event in _decode_sglang(b"[%b]" % events)]


def _sglang_meaning(event: _SglangEvent) -> Meaning:
    if event.error is not _NO_ERROR and (error := bytes(event.error)) != b"null":
        return Meaning(error=error_text(error), is_rare=True)
    meta = event.meta_info or _MetaInfo()
    finish, count, cached = meta.finish_reason, meta.completion_tokens, meta.cached_tokens
    why = None
    if isinstance(finish, dict):
        reason: str | None = str(finish.get("type"))
        if reason == "abort" and finish.get("message"):
            why = str(finish["message"])
    else:
        reason = finish
    return Meaning(event.text or "", count, event.index, False, True, True, meta.prompt_tokens, cached, reason, why)


def error_text(body: bytes) -> str:
    """The message out of an error body as the engines send it, else all of the body, on one line; never empty.

    OpenAI's shape is `{"error": {"message": …}}`; vLLM's older one has `message` at the top, FastAPI's `detail`.
    """
    try:
        value = msgspec.json.decode(body)
    except UNDECODABLE:
        value = body.decode("utf-8", "replace")
    for name in ("error", "message", "detail"):
        if isinstance(value, dict) and name in value:
            value = value[name]
    if isinstance(value, dict) and "message" in value:
        value = value["message"]
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return " ".join(text.split()) or "no text"


def _chat_body(prompt: Prompt, model: str, max_tokens: int, sampling: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model": model,
        "messages": prompt.as_messages(),
        "max_tokens": max_tokens,
        "stream": True,
        **sampling,
    }


def _completions_body(prompt: Prompt, model: str, max_tokens: int, sampling: Mapping[str, Any]) -> dict[str, Any]:
    return {"model": model, "prompt": prompt.as_text(), "max_tokens": max_tokens, "stream": True, **sampling}


def _sglang_body(prompt: Prompt, _: str, max_tokens: int, sampling: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "text": prompt.as_text(),
        "sampling_params": {"max_new_tokens": max_tokens, **sampling},
        "stream": True,
    }


_TOTAL = {"stream_options": {"include_usage": True}}
_CONTINUOUS = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}

#: The request fields that make engines count, by name. Strict servers refuse fields that they don't know, so the
#: probe tries an unknown engine with `continuous`, then `total`, then nothing.
COUNTING: Mapping[str, Mapping[str, Any]] = {
    "llama.cpp": {**_TOTAL, "timings_per_token": True},
    "total": _TOTAL,
    "none": {},
    "continuous": _CONTINUOUS,
}


def dialect_for(api: Api, counting: Mapping[str, Any]) -> Dialect:
    """The dialect of an API, with the request fields that make this engine count its tokens."""
    if api == "chat":
        return Dialect(api, "/v1/chat/completions", _chat_body, _openai_meanings, counting)
    if api == "completions":
        return Dialect(api, "/v1/completions", _completions_body, _openai_meanings, counting)
    return Dialect(api, "/generate", _sglang_body, _sglang_meanings, {})
