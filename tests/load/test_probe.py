"""The probe: which API answers, which of our fields it takes, and what a refusal says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from breakeven.errors import TargetError
from breakeven.load.dialect import Api
from breakeven.load.probe import Probe, probe
from breakeven.load.prompts import Prompt
from breakeven.load.target import Target
from tests.load.conftest import Authority
from tests.load.scripted import (
    ANSWER,
    CLOSE,
    DONE,
    HEAD,
    READ,
    RESET,
    Request,
    Scripted,
    answer,
    chunk,
    each,
    event,
    run,
    scripted,
    stream,
    token,
    usage,
)

KEY = "sk-secret-0123456789"
CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"


def ask(
    server: Scripted,
    *,
    apis: Sequence[Api] = ("chat", "completions"),
    engine: str = "other",
    **options: Any,
) -> Probe:
    target = Target(server.url, {"Authorization": f"Bearer {KEY}"})
    options = {"sampling": {"temperature": 0}, "extra_body": {}} | options
    found = run(probe(target, "m", Prompt(id="p", text="Hello."), apis, engine, **options))
    assert isinstance(found, Probe)
    return found


def probed(answers: Callable[[Request], bytes], **options: Any) -> tuple[Probe, list[Request]]:
    with scripted([each(answers)]) as server:
        return ask(server, **options), server.requests


def refused(*script: Any, **options: Any) -> str:
    """What the probe says of a server with this script: one line, and never the key."""
    with scripted(script) as server:
        with pytest.raises(TargetError) as caught:
            ask(server, **options)
        text = str(caught.value)
    assert "\n" not in text
    assert KEY not in text
    assert server.url in text
    return text


def test_chat_is_taken_where_it_answers() -> None:
    found, requests = probed(lambda _: ANSWER)
    assert (found.dialect.api, found.counting, found.record.output_tokens) == ("chat", "continuous", 3)
    assert [request.path for request in requests] == [CHAT]
    assert requests[0].body["max_tokens"] == 16


def test_completions_are_taken_where_chat_is_not_found() -> None:
    events = [event({"choices": [{"index": 0, "text": "a", "finish_reason": "length"}]}), usage(1), DONE]
    found, requests = probed(
        lambda request: answer(404, b'{"detail": "Not Found"}') if request.path == CHAT else stream(*events)
    )
    assert (found.dialect.api, found.counting) == ("completions", "continuous")
    assert [request.path for request in requests] == [CHAT, TEXT]


def test_completions_are_taken_where_chat_has_no_template() -> None:
    def answers(request: Request) -> bytes:
        return answer(400, b'{"message": "no chat template"}') if request.path == CHAT else ANSWER

    found, requests = probed(answers, engine="vllm")
    assert found.dialect.api == "completions"
    assert [request.path for request in requests] == [CHAT, TEXT]


@pytest.mark.parametrize("status", [400, 422])
def test_fields_that_a_strict_server_refuses_are_left_out(status: int) -> None:
    def answers(request: Request) -> bytes:
        options = request.body.get("stream_options", {})
        return answer(status, b'{"detail": "extra fields"}') if "continuous_usage_stats" in options else ANSWER

    found, requests = probed(answers)
    assert (found.dialect.api, found.counting) == ("chat", "total")
    assert [request.body.get("stream_options") for request in requests] == [
        {"include_usage": True, "continuous_usage_stats": True},
        {"include_usage": True},
    ]


def test_a_server_that_takes_none_of_our_fields_gets_none() -> None:
    def answers(request: Request) -> bytes:
        return answer(422, b"{}") if "stream_options" in request.body else stream(token("a", finish="stop"), DONE)

    found, _ = probed(answers)
    assert (found.counting, found.record.tokens_from) == ("none", "estimated")


def test_known_engines_get_their_own_fields() -> None:
    _, requests = probed(lambda _: ANSWER, engine="llama.cpp")
    assert requests[0].body["timings_per_token"] is True
    reply = stream(
        event({"text": "a", "meta_info": {"completion_tokens": 1, "finish_reason": {"type": "length"}}}), DONE
    )
    found, requests = probed(lambda _: reply, engine="sglang", apis=("sglang",))
    assert requests[0].path == GENERATE
    assert (found.dialect.api, found.record.tokens_from) == ("sglang", "chunks")


def test_extra_fields_go_with_the_probe() -> None:
    _, requests = probed(lambda _: ANSWER, extra_body={"top_k": 3})
    assert requests[0].body["top_k"] == 3


def test_an_answer_without_output_is_an_answer() -> None:
    found, _ = probed(lambda _: stream(token("", 1, finish="stop"), DONE))
    assert found.record.outcome == "empty"
    assert found.seconds_per_request == (1.0, 0.05)


def test_the_answer_gives_a_first_idea_of_time() -> None:
    with scripted(
        [READ, 0.05, HEAD, chunk(token("a", 1)), 0.1, chunk(token(" b c", 3, finish="stop")), b"0\r\n\r\n"]
    ) as s:
        first_s, later_s = ask(s).seconds_per_request
    assert first_s == pytest.approx(0.05, abs=0.03)
    assert later_s == pytest.approx(0.05, abs=0.02)


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key(status: int) -> None:
    said = refused(READ, answer(status, b'{"error": {"message": "Incorrect API key provided: %b"}}' % KEY.encode()))
    assert f"HTTP {status}: Incorrect API key provided: ***" in said
    assert "--api-key-env" in said


def test_a_model_that_is_not_there() -> None:
    said = refused(each(lambda _: answer(404, b'{"message": "The model `m` does not exist."}')))
    assert "The model `m` does not exist." in said
    assert "--model" in said


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_request_that_is_never_right(status: int) -> None:
    said = refused(each(lambda _: answer(status, b'{"detail": "max_tokens is too large"}')))
    assert "max_tokens is too large" in said
    assert "--max-tokens" in said


def test_the_reason_given_is_not_about_fields_that_we_left_out() -> None:
    """The last refusal of an API that exists counts, not a 404 after it."""

    def answers(request: Request) -> bytes:
        if request.path != CHAT:
            return answer(404, b'{"detail": "Not Found"}')
        why = "unknown field" if "stream_options" in request.body else "no such model"
        return answer(400, b'{"detail": "%b"}' % why.encode())

    with scripted([each(answers)]) as server, pytest.raises(TargetError, match="no such model"):
        ask(server)


@pytest.mark.parametrize("kind", ["text/html", "application/json"])
def test_a_server_that_does_not_stream(kind: str) -> None:
    said = refused(READ, answer(200, b"{}", kind))
    assert f"answered with {kind}" in said
    assert "try another --api" in said


def test_a_server_that_never_answers() -> None:
    said = refused(READ, timeout_s=0.2)
    assert "no end within 0.2 s" in said
    assert "stuck, or busy" in said
    assert "--stall-timeout" in said


def test_a_stream_with_an_error_in_it() -> None:
    said = refused(READ, stream(event({"error": {"message": f"out of memory for {KEY}"}})))
    assert "out of memory for ***" in said
    assert "the server's log" in said


@pytest.mark.parametrize("ending", [CLOSE, RESET])
def test_a_server_that_hangs_up(ending: Any) -> None:
    assert "the server's log" in refused(READ, 0.02, ending)


def test_a_server_that_speaks_no_http() -> None:
    assert "no HTTP" in refused(READ, b"SSH-2.0-OpenSSH_9.6\r\n")


def test_a_certificate_that_is_not_trusted(authority: Authority, stranger: Authority) -> None:
    with scripted([READ, ANSWER], tls=stranger.server) as server:
        with pytest.raises(TargetError, match="certificate verify failed") as caught:
            ask(server)
        assert "SSL_CERT_FILE" in str(caught.value)


def test_nobody_there() -> None:
    with scripted([READ]) as server:
        server.stop_listening()
        with pytest.raises(TargetError, match=r"nothing listens at .*: Connection refused"):
            ask(server)
