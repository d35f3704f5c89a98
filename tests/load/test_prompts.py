"""Prompts: the built-in set, users' files in three shapes, random words, and every bad input in one line."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from breakeven.errors import PromptsError
from breakeven.load.prompts import Prompt, PromptSet, load_prompts

HELLO = [{"role": "user", "content": "Hello"}]


def written(tmp_path: Path, *values: Any) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(value) + "\n" for value in values), "utf-8")
    return str(path)


def only(source: str) -> Prompt:
    (prompt,) = load_prompts(source).prompts
    return prompt


def refused(source: str | None, *kinds: str) -> str:
    with pytest.raises(PromptsError) as caught:
        load_prompts(source, kinds)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_built_in_set_is_large_diverse_and_named() -> None:
    prompts = load_prompts(None).prompts
    assert len(prompts) >= 120
    assert len({prompt.kind for prompt in prompts}) >= 8
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    assert len({prompt.as_text() for prompt in prompts}) == len(prompts)
    assert min(Counter(prompt.kind for prompt in prompts).values()) >= 12


def test_built_in_set_loads_in_a_moment() -> None:
    load_prompts(None)
    began = time.process_time()
    load_prompts(None)
    assert time.process_time() - began < 0.2


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_any_run_of_eight_of_the_built_in_set_holds_every_kind(seed: int) -> None:
    kinds = [prompt.kind for prompt in load_prompts(None, seed=seed).prompts]
    cycle = kinds + kinds[:7]
    assert all(len(set(cycle[i : i + 8])) == 8 for i in range(len(kinds)))


def test_order_follows_the_seed() -> None:
    orders = [[p.id for p in load_prompts(None, seed=seed).prompts] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])


def test_digest_tells_sets_apart_by_order_and_content() -> None:
    assert load_prompts(None, seed=1).sha256 == load_prompts(None, seed=1).sha256
    digests = {load_prompts(None, seed=1).sha256, load_prompts(None, seed=2).sha256, load_prompts("random:5").sha256}
    assert len(digests) == 3


def test_kinds_pick_and_keep_the_balance() -> None:
    picked = load_prompts(None, ["code", "chat"]).prompts
    assert {prompt.kind for prompt in picked} == {"code", "chat"}
    assert all({a.kind, b.kind} == {"code", "chat"} for a, b in zip(picked[::2], picked[1::2], strict=True))


@settings(deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(0, 99))
def test_kinds_of_any_sizes_are_spread_evenly(sizes: list[int], seed: int) -> None:
    """At each point of the order every kind has had its share, to within one prompt."""
    from breakeven.load.prompts import _balance

    prompts = [Prompt(id=f"{k}-{i}", kind=str(k), text="x") for k, size in enumerate(sizes) for i in range(size)]
    dealt = _balance(prompts, seed)
    assert sorted(p.id for p in dealt) == sorted(p.id for p in prompts)
    for kind, size in enumerate(sizes):
        seen = 0
        for position, prompt in enumerate(dealt, 1):
            seen += prompt.kind == str(kind)
            assert abs(seen - position * size / len(dealt)) <= 1 + len(sizes) / 2


def test_openai_messages(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    prompt = only(written(tmp_path, {"id": "a", "kind": "chat", "messages": messages, "extra": 1}))
    assert (prompt.id, prompt.kind) == ("a", "chat")
    assert prompt.as_messages() == messages
    assert prompt.as_text() == "System: Be brief.\n\nUser: Hello\n\nAssistant:"


def test_messages_in_parts(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    prompt = only(written(tmp_path, {"messages": [{"role": "user", "content": parts}]}))
    assert prompt.as_messages() == [{"role": "user", "content": parts}]
    assert prompt.as_text() == "User: What is it?\n\nAssistant:"
    tagged = prompt.tagged("7").as_messages()[0]["content"]
    assert tagged == [{"type": "text", "text": "[7]"}, *parts]


def test_plain_prompt(tmp_path: Path) -> None:
    prompt = only(written(tmp_path, {"prompt": "Once upon a time"}))
    assert (prompt.id, prompt.kind) == ("1", "custom")
    assert prompt.as_text() == "Once upon a time"
    assert prompt.as_messages() == [{"role": "user", "content": "Once upon a time"}]


def test_sharegpt_conversation_up_to_the_last_question(tmp_path: Path) -> None:
    turns = [
        {"from": "system", "value": "S"},
        {"from": "human", "value": "Q1"},
        {"from": "gpt", "value": "A1"},
        {"from": "human", "value": "Q2"},
        {"from": "gpt", "value": "A2"},
    ]
    prompt = only(written(tmp_path, {"id": "x_0", "conversations": turns}))
    assert [(m["role"], m["content"]) for m in prompt.as_messages()] == [
        ("system", "S"),
        ("user", "Q1"),
        ("assistant", "A1"),
        ("user", "Q2"),
    ]


def test_names_are_given_by_line_where_there_is_none(tmp_path: Path) -> None:
    source = written(tmp_path, {"prompt": "a", "id": None, "kind": None}, {"prompt": "b"}, {"prompt": "c", "id": 0})
    prompts = load_prompts(source).prompts
    assert {prompt.id for prompt in prompts} == {"1", "2", "0"}
    assert {prompt.kind for prompt in prompts} == {"custom"}


def test_blank_lines_windows_line_ends_and_a_byte_order_mark_are_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n   \n{"prompt": "b"}')
    assert sorted(prompt.as_text() for prompt in load_prompts(str(path)).prompts) == ["a", "b"]


def test_separators_inside_a_string_do_not_end_the_line(tmp_path: Path) -> None:
    """JSON allows U+2028, U+0085 and others as they are; str.splitlines() would cut there."""
    text = "one\u2028two\u2029three\x85four"
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": text}, ensure_ascii=False) + "\n", "utf-8")
    assert only(str(path)).as_text() == text


def test_tag_stands_before_everything_and_in_the_name() -> None:
    prompt = Prompt(id="a", messages=({"role": "system", "content": "S"}, {"role": "user", "content": "U"}))
    tagged = prompt.tagged("0-1")
    assert tagged.id == "a#0-1"
    assert [message["content"] for message in tagged.as_messages()] == ["[0-1] S", "U"]
    assert [message["content"] for message in prompt.as_messages()] == ["S", "U"]
    assert Prompt(id="b", text="T").tagged("2").as_text() == "[2] T"


@pytest.mark.parametrize("size", [1, 7, 512])
def test_random_prompts_have_the_length_asked_for_and_follow_the_seed(size: int) -> None:
    one = load_prompts(f"random:{size}", seed=3)
    assert {len(prompt.as_text().split()) for prompt in one.prompts} == {size}
    assert len(one.prompts) == len({prompt.id for prompt in one.prompts}) == 128
    assert one == load_prompts(f"random:{size}", seed=3)
    assert one != load_prompts(f"random:{size}", seed=4)
    assert one.is_random
    assert not load_prompts(None).is_random
    assert not PromptSet(source="file", prompts=()).is_random


@pytest.mark.parametrize("size", ["", "0", "-5", "1.5", "1e3", "abc", "²", "1000001", "99999999999999999999"])
def test_random_prompts_of_no_length_are_refused(size: str) -> None:
    assert f"--prompts random:{size}" in (text := refused(f"random:{size}"))
    assert "e.g. random:512" in text


def test_missing_file_is_refused(tmp_path: Path) -> None:
    text = refused(str(tmp_path / "none.jsonl"))
    assert text.startswith(f"--prompts {tmp_path}/none.jsonl: No such file")
    assert "random:N" in text


def test_directory_is_refused(tmp_path: Path) -> None:
    assert refused(str(tmp_path)).startswith(f"--prompts {tmp_path}: Is a directory; give")


def test_path_that_is_too_long_is_refused() -> None:
    assert "--prompts" in refused("x" * 5000)


@pytest.mark.parametrize("data", [b"\x89PNG\r\n\x1a\n\x00\xff\xfe", b"\xff\xfe{\x00}\x00", bytes(range(256))])
def test_binary_file_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "p.bin"
    path.write_bytes(data)
    assert "it is not UTF-8 text; give a JSON-lines file" in refused(str(path))


@pytest.mark.parametrize("data", [b"", b"\n\n  \n", b"\xef\xbb\xbf"])
def test_file_without_a_prompt_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(data)
    assert refused(str(path)) == f"--prompts {path}: no prompt in it; it needs one JSON object a line"


@pytest.mark.parametrize(
    "line", ["{", "nonsense", '{"prompt": "a"', '{"prompt": "a"} {"prompt": "b"}', "\x00\x00", '"\\ud800"', "{" * 50]
)
def test_line_that_is_no_json_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n\n{line}\n', "utf-8")
    text = refused(str(path))
    assert text.startswith(f"--prompts {path}: line 3: ")
    assert text.endswith("it needs a JSON object")


def test_nesting_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": ' + "[" * 100_000, "utf-8")
    assert "line 1" in refused(str(path))


@pytest.mark.parametrize("value", ["text", 5, None, True])
def test_line_that_is_no_object_is_refused(tmp_path: Path, value: Any) -> None:
    source = written(tmp_path, value)
    assert refused(source) == f"--prompts {source}: line 1: it needs a JSON object"


@pytest.mark.parametrize("indent", [None, 2])
def test_json_array_is_refused_with_the_command_that_mends_it(tmp_path: Path, indent: int | None) -> None:
    path = tmp_path / "ShareGPT.json"
    path.write_text(json.dumps([{"prompt": "a"}, {"prompt": "b"}], indent=indent), "utf-8")
    text = refused(str(path))
    assert f"--prompts {path}: a JSON array" in text
    assert "jq -c '.[]'" in text


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"text": "a"},
        {"prompt": ""},
        {"prompt": None},
        {"prompt": 5},
        {"prompt": ["a", "b"]},
        {"messages": []},
        {"messages": {}},
        {"messages": "Hello"},
        {"messages": ["Hello"]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"content": "Hello"}]},
        {"messages": [{"role": 1, "content": "Hello"}]},
        {"messages": [{"role": "user", "content": ""}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "content": {"text": "Hello"}}]},
        {"messages": [{"role": "user", "content": ["Hello"]}]},
        {"messages": [{"role": "user", "content": []}]},
        {"messages": [*HELLO, 5]},
        {"conversations": []},
        {"conversations": "Hello"},
        {"conversations": ["Hello"]},
        {"conversations": [{"from": "gpt", "value": "only an answer"}]},
        {"conversations": [{"from": "human"}]},
        {"conversations": [{"from": "human", "value": ""}]},
    ],
)
def test_object_of_another_shape_is_refused_with_the_shapes_there_are(tmp_path: Path, value: Any) -> None:
    text = refused(written(tmp_path, {"prompt": "fine"}, value))
    assert ": line 2: it needs `messages`" in text
    assert "`conversations`" in text


def test_unknown_kind_is_refused_with_the_kinds_there_are(tmp_path: Path) -> None:
    text = refused(None, "code", "poems", "jokes")
    assert text.startswith("--kind jokes poems: no such prompts; there are chat, code, ")
    assert refused(written(tmp_path, {"prompt": "a"}), "code").endswith("there are custom")
    assert refused("random:5", "code").endswith("there are random")
