"""The null server's three API dialects: what a completion request asks for, and the bytes of its answer.
 `read_ask` turns a request into an `Ask`; `wire_for` gives the `Wire` that answers it: OpenAI's chat and text
completions as vLLM speaks them, or SGLang's native `/generate`. Whatever stays the same from chunk to chunk
is encoded once, as a template for `%`: with a thousand streams, JSON encoding would eat the time that the
steps leave.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

from breakeven.engines.null.http1 import LAST_CHUNK, HttpError, Request, event

__all__ = ["API_PATHS", "Ask", "GenerateWire", "OpenAiWire", "UsageCap", "Wire", "read_ask", "wire_for"]

Api = Literal["chat", "text", "generate"]
UsageCap = Literal["per-chunk", "final", "none"]
API_PATHS: Mapping[str, Api] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text",
    "/generate": "generate",
}
_DEFAULT_MAX_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Ask:
    """What one completion request wants.

    `usage` asks for token counts in a plain answer or at a stream's end, `each` for counts on every chunk.
    """

    api: Api
    stream: bool
    prompt_tokens: int
    max_tokens: int
    usage: bool
    each: bool


def read_ask(request: Request, model: str, cap: UsageCap) -> Ask:
    """Read a completion request.

    Raises HttpError: 400 for what is no such request, 404 for another model's name.
    """
    api = API_PATHS[request.path]
    body = _json_object(request.body)
    if body.get("model") not in (None, model):
        raise HttpError(HTTPStatus.NOT_FOUND, f"The model `{body['model']}` does not exist.", param="model")
    return _generate_ask(body, cap) if api == "generate" else _openai_ask(body, api, cap)


def _openai_ask(body: dict[str, Any], api: Api, cap: UsageCap) -> Ask:
    stream = body.get("stream") is True
    options = _object(body, "stream_options")
    usage = cap != "none" and (not stream or options.get("include_usage") is True)
    each = usage and cap == "per-chunk" and options.get("continuous_usage_stats") is True
    prompt = _prompt_tokens(body, "messages" if api == "chat" else "prompt")
    limit = _max_tokens(body, "max_completion_tokens", "max_tokens")
    return Ask(api, stream, prompt, limit, usage, each)


def _generate_ask(body: dict[str, Any], cap: UsageCap) -> Ask:
    prompt = _prompt_tokens(body, "text")
    limit = _max_tokens(_object(body, "sampling_params"), "max_new_tokens")
    return Ask("generate", body.get("stream") is True, prompt, limit, cap != "none", cap == "per-chunk")


def _json_object(data: bytes) -> dict[str, Any]:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise HttpError(HTTPStatus.BAD_REQUEST, "the request's body is no JSON") from None
    if not isinstance(body, dict):
        raise HttpError(HTTPStatus.BAD_REQUEST, "the request's body is no JSON object")
    return body


def _object(body: dict[str, Any], name: str) -> dict[str, Any]:
    value = body.get(name) or {}
    if not isinstance(value, dict):
        raise HttpError(HTTPStatus.BAD_REQUEST, f"{name} is no object", param=name)
    return value


def _max_tokens(body: dict[str, Any], *names: str) -> int:
    name, value = next(((n, body[n]) for n in names if body.get(n) is not None), ("", _DEFAULT_MAX_TOKENS))
    if type(value) is not int or value < 1:  # a bool is an int to isinstance
        raise HttpError(HTTPStatus.BAD_REQUEST, f"{name} must be a whole number above zero", param=name)
    return value


def _prompt_tokens(body: dict[str, Any], name: str) -> int:
    if not body.get(name):
        raise HttpError(HTTPStatus.BAD_REQUEST, f"{name} is missing or empty", param=name)
    return _count_words(body[name])


def _count_words(prompt: object) -> int:
    """A word is a token here, and so is a bare number (a token's id)."""
    if isinstance(prompt, str):
        return len(prompt.split())
    if isinstance(prompt, dict):
        return _count_words(prompt.get("content", prompt.get("text")))
    if isinstance(prompt, list):
        return sum(map(_count_words, prompt))
    return int(isinstance(prompt, int))


# Tokens all have the same width, so that any run of them is one slice; they follow no short cycle, so that a
# check for degenerate (repeating) output stays silent.
_WORDS = ("alpha", "bravo", "delta", "hotel", "march", "pearl", "river", "stone", "tiger", "vivid", "wheat")
_WIDTH = 6
_PERIOD = 4096
_OUTPUT = "".join(f" {word}" for word in random.Random(0).choices(_WORDS, k=_PERIOD)).encode() * 2


def _output(start: int, count: int) -> bytes:
    """The output's tokens [start, start + count)."""
    at = start % _PERIOD * _WIDTH
    text = _OUTPUT if count <= _PERIOD else _OUTPUT * (count // _PERIOD + 1)
    return text[at : at + count * _WIDTH]


# What stands in a template for what changes from chunk to chunk. No argument of a command line can hold these
# characters, so no model's name does.
_TEXT, _COUNT, _SUM = "\x00", "\x01", "\x02"


def _encode(data: dict[str, Any]) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode()


def _template(data: dict[str, Any]) -> bytes:
    text = _encode(data).replace(b"%", b"%%").replace(b"\\u0000", b"%b")
    return text.replace(b'"\\u0001"', b"%d").replace(b'"\\u0002"', b"%d")


class OpenAiWire:
    """The bytes of one answer to /v1/chat/completions or /v1/completions, with usage as vLLM gives it."""

    def __init__(self, ask: Ask, number: int, model: str, role: bool) -> None:
        self._ask = ask
        self._role = role and ask.api == "chat"
        self._chat = ask.api == "chat"
        self.ident = f"{'chatcmpl' if self._chat else 'cmpl'}-{number}"
        kind = "text_completion" if not self._chat else "chat.completion" + ".chunk" * ask.stream
        self._head = {"id": self.ident, "object": kind, "created": int(time.time()), "model": model}
        counts = self._counts(_COUNT, _SUM) if ask.each else None
        self._chunk = _template(self._data([self._choice({"content": _TEXT})], counts))

    def opening(self) -> bytes:
        """What a stream begins with before there is a token: the role-only event, or nothing."""
        if not self._role:
            return b""
        return self._event([self._choice({"role": "assistant", "content": ""})], total=0)

    def chunk(self, tokens: int, total: int) -> bytes:
        """The event that brings `tokens` more tokens, `total` with those before."""
        text = _output(total - tokens, tokens)
        counts = (total, self._ask.prompt_tokens + total) if self._ask.each else ()
        return event(self._chunk % (text, *counts))

    def closing(self, total: int) -> bytes:
        """What follows the last token: the finish event, the usage event, the end of the stream."""
        finish = self._event([self._choice({}, "length")], total)
        usage = event(_encode(self._data([], self._usage(total)))) if self._ask.usage else b""
        return finish + usage + event(b"[DONE]") + LAST_CHUNK

    def answer(self, total: int) -> bytes:
        """The JSON body of an answer that is no stream."""
        text = _output(0, total).decode()
        said = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": "length"}
        return _encode(self._data([choice], self._usage(total) if self._ask.usage else None))

    def _event(self, choices: list[dict[str, Any]], total: int) -> bytes:
        return event(_encode(self._data(choices, self._usage(total) if self._ask.each else None)))

    def _data(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        return {**self._head, "choices": choices, **({"usage": usage} if usage else {})}

    def _choice(self, delta: dict[str, str], finish: str | None = None) -> dict[str, Any]:
        said = {"delta": delta} if self._chat else {"text": delta.get("content", "")}
        return {"index": 0, **said, "logprobs": None, "finish_reason": finish}

    def _usage(self, total: int) -> dict[str, Any]:
        return self._counts(total, self._ask.prompt_tokens + total)

    def _counts(self, completion: int | str, both: int | str) -> dict[str, Any]:
        prompt = self._ask.prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": both}


class GenerateWire:
    """The bytes of one answer to SGLang's /generate: every event repeats the text so far."""

    def __init__(self, ask: Ask, number: int) -> None:
        self._ask = ask
        self.ident = f"generate-{number}"
        self._chunk = _template(self._data(_TEXT, _COUNT if ask.each else None))

    def opening(self) -> bytes:
        """Nothing: this API has no roles."""
        return b""

    def chunk(self, tokens: int, total: int) -> bytes:
        """The event after `tokens` more tokens, `total` with those before; the last one tells its reason."""
        if total == self._ask.max_tokens:
            return event(self.answer(total))
        counts = (total,) if self._ask.each else ()
        return event(self._chunk % (_output(0, total), *counts))

    def closing(self, total: int) -> bytes:
        """The end of the stream."""
        return event(b"[DONE]") + LAST_CHUNK

    def answer(self, total: int) -> bytes:
        """The whole answer as JSON: an answer that is no stream, and a stream's last event."""
        finish = {"type": "length", "length": total}
        return _encode(self._data(_output(0, total).decode(), total if self._ask.usage else None, finish))

    def _data(self, text: str, count: int | str | None, finish: object = None) -> dict[str, Any]:
        info: dict[str, Any] = {"id": self.ident, "finish_reason": finish}
        if count is not None:
            info |= {"prompt_tokens": self._ask.prompt_tokens, "completion_tokens": count}
        return {"text": text, "meta_info": info}


Wire = OpenAiWire | GenerateWire


def wire_for(ask: Ask, number: int, model: str, role: bool) -> Wire:
    """The wire that answers `ask`.

    `number` makes its id unique on this server; `role` opens a chat stream with a role-only event.
    """
    return GenerateWire(ask, number) if ask.api == "generate" else OpenAiWire(ask, number, model, role)
