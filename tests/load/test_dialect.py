"""API dialects: request bodies, where they go, and the words of a refusal."""

from __future__ import annotations

import msgspec
import pytest

from breakeven.load.dialect import COUNTING, Meaning, dialect_for, error_text
from breakeven.load.prompts import Prompt

TALK = Prompt(id="p", messages=({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}))
TEXT = Prompt(id="p", text="Once upon a time")


def test_chat_takes_messages() -> None:
    dialect = dialect_for("chat", {})
    assert dialect.path == "/v1/chat/completions"
    assert dialect.body(TALK, "m", 9, {"temperature": 0.5}) == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}],
        "max_tokens": 9,
        "stream": True,
        "temperature": 0.5,
    }
    assert dialect.body(TEXT, "m", 9, {})["messages"] == [{"role": "user", "content": "Once upon a time"}]


def test_completions_take_a_text() -> None:
    dialect = dialect_for("completions", {})
    assert dialect.path == "/v1/completions"
    assert dialect.body(TEXT, "m", 9, {"ignore_eos": True}) == {
        "model": "m",
        "prompt": "Once upon a time",
        "max_tokens": 9,
        "stream": True,
        "ignore_eos": True,
    }


def test_sglang_takes_a_text_and_its_own_sampling_parameters() -> None:
    """No model's name, and none of OpenAI's fields for counting: it counts anyway."""
    dialect = dialect_for("sglang", COUNTING["continuous"])
    assert (dialect.path, dialect.counting) == ("/generate", {})
    assert dialect.body(TEXT, "m", 9, {"temperature": 0, "ignore_eos": True}) == {
        "text": "Once upon a time",
        "sampling_params": {"max_new_tokens": 9, "temperature": 0, "ignore_eos": True},
        "stream": True,
    }


def test_the_fields_that_make_engines_count() -> None:
    assert COUNTING["continuous"] == {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    assert COUNTING["total"] == {"stream_options": {"include_usage": True}}
    assert COUNTING["llama.cpp"] == {"stream_options": {"include_usage": True}, "timings_per_token": True}
    assert COUNTING["none"] == {}


def test_many_events_are_decoded_at_once() -> None:
    decode = dialect_for("chat", {}).decode
    assert decode(b'{"choices":[{"delta":{"content":"a"}}]},{"choices":[]},{}') == [
        Meaning("a"),
        Meaning(),
        Meaning(),
    ]


def test_what_is_set_beyond_text_and_count_makes_an_event_rare() -> None:
    """The fast way of noting an event looks at text and count only."""
    decode = dialect_for("chat", {}).decode
    often = decode(b'{"choices":[{"index":0,"delta":{"content":"a"}}],"usage":{"completion_tokens":1}}')
    rare = decode(
        b'{"choices":[{"delta":{}}],"usage":{"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":0}}},'
        b'{"choices":[{"index":1,"delta":{"content":"a"}}]},'
        b'{"choices":[{"delta":{"content":"a"},"finish_reason":"stop"}]},'
        b'{"choices":[],"usage":{"completion_tokens":1}},'
        b'{"error":"no"}'
    )
    assert not any(meaning.is_rare for meaning in often)
    assert all(meaning.is_rare for meaning in rare)


def test_several_choices_in_one_event_are_one() -> None:
    """Their texts one after the other, a usage that counts them all, finished when all of them are."""
    decode = dialect_for("chat", {}).decode
    a, b = '{"index":0,"delta":{"content":"a"}', '{"index":1,"delta":{"content":"b"}'
    (usual, finished, half) = decode(
        f'{{"choices":[{a}}},{b}}}],"usage":{{"completion_tokens":2}}}},'
        f'{{"choices":[{a},"finish_reason":"stop"}},{b},"finish_reason":"length"}}]}},'
        f'{{"choices":[{a},"finish_reason":"stop"}},{b}}}]}}'.encode()
    )
    assert (usual.text, usual.output_tokens, usual.is_total) == ("ab", 2, True)
    assert (finished.finish_reason, finished.choice) == ("stop", 0)
    assert half.finish_reason is None


@pytest.mark.parametrize("finish", [b'"stop"', b'{"type":"stop","matched":2}'])
def test_sglang_gives_its_reason_as_a_word_or_as_an_object(finish: bytes) -> None:
    (meaning,) = dialect_for("sglang", {}).decode(b'{"text":"a","meta_info":{"finish_reason":%b}}' % finish)
    assert meaning.finish_reason == "stop"


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        dialect_for("chat", {}).decode(b"{},{")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error": {"message": "no such model", "type": "NotFound"}}', "no such model"),
        (b'{"object": "error", "message": "no such model", "code": 404}', "no such model"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"detail": [{"loc": ["body"], "msg": "wrong"}]}', '[{"loc":["body"],"msg":"wrong"}]'),
        (b'{"error": "no such model"}', "no such model"),
        (b'{"error": {"code": 3}}', '{"code":3}'),
        (b'{"error": null}', "null"),
        (b"<html>\n <h1>502\n Bad Gateway</h1></html>", "<html> <h1>502 Bad Gateway</h1></html>"),
        (b'"busy"', "busy"),
        (b"17", "17"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"", "no text"),
        (b'{"error": {"message": " "}}', "no text"),
    ],
)
def test_a_refusal_in_the_servers_words_on_one_line(body: bytes, text: str) -> None:
    assert error_text(body) == text
