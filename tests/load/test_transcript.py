"""From the bytes of a response to arrivals in tokens: every engine's way of counting, and texts that loop."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from breakeven.load.dialect import Dialect, dialect_for
from breakeven.load.transcript import Transcript, repetition
from tests.load.scripted import CHAT, DONE, event, token, usage

COMPLETIONS = dialect_for("completions", {})
SGLANG = dialect_for("sglang", {})


def read(pieces: Iterable[bytes], dialect: Dialect = CHAT, *, stamps: Sequence[int] | None = None) -> Transcript:
    """The transcript of pieces that came 1, 2, 3 … ns after the start, or at the given times."""
    transcript, pieces = Transcript(dialect), list(pieces)
    assert transcript.advance(list(zip(stamps or range(1, len(pieces) + 1), pieces, strict=True)), 1 << 62)
    transcript.close(len(pieces) + 1)
    return transcript


def tokens(transcript: Transcript) -> list[int]:
    return [count for _, count in transcript.counted().arrivals]


def delta(**fields: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": fields}]})


def plain(*texts: str) -> list[bytes]:
    return [token(text) for text in texts]


# ---- where the counts come from ----


def test_usage_in_every_chunk_counts_each_chunk() -> None:
    """vLLM with continuous_usage_stats: a role-only chunk first, usage alone last."""
    role = event(
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "usage": {"completion_tokens": 0}}
    )
    found = read([role, token("a", 1), token(" b c d", 4), token(" e f", 6, finish="length"), usage(6), DONE])
    assert found.counted() == ([(2, 1), (3, 3), (4, 2)], 6, "chunks")
    assert (found.text, found.chunks, found.characters) == ("a b c d e f", 3, 11)
    assert (found.finish_reason, found.input_tokens, found.done) == ("length", 7, True)


def test_llama_cpp_counts_in_timings() -> None:
    """Counts on content chunks alone: none on the first (content null) nor on the finishing one."""
    first = event({"choices": [{"finish_reason": None, "index": 0, "delta": {"role": "assistant", "content": None}}]})
    finish = event({"choices": [{"finish_reason": "stop", "index": 0, "delta": {}}]})
    total = usage(3, prompt_tokens=40, prompt_tokens_details={"cached_tokens": 39})
    last = total[:-3] + b', "timings": {"predicted_n": 3}}\n\n'
    content = [token(text, timings={"predicted_n": n + 1}) for n, text in enumerate(["a", " b", " c"])]
    found = read([first, *content, finish, last, DONE])
    assert found.counted() == ([(2, 1), (3, 1), (4, 1)], 3, "chunks")
    assert (found.input_tokens, found.cached_tokens, found.finish_reason) == (40, 39, "stop")


def sglang(text: str, count: int | None, finish: Any = None) -> bytes:
    return event({"text": text, "meta_info": {"prompt_tokens": 5, "completion_tokens": count, "finish_reason": finish}})


def test_sglang_sends_all_text_so_far() -> None:
    finish = {"type": "length", "length": 6}
    found = read([sglang("ab", 1), sglang("ab cd", 4), sglang("ab cd ef", 6, finish), DONE], SGLANG)
    assert found.counted() == ([(1, 1), (2, 3), (3, 2)], 6, "chunks")
    assert (found.text, found.finish_reason, found.input_tokens) == ("ab cd ef", "length", 5)


def test_sglang_sends_only_what_is_new_where_told_to() -> None:
    """Once that is clear, a chunk that repeats the whole text is new too."""
    found = read([sglang("ab", 1), sglang(" cd", 3), sglang("ab cd", 5), sglang(" cd", 6, {"type": "stop"})], SGLANG)
    assert found.counted() == ([(1, 1), (2, 2), (3, 2), (4, 1)], 6, "chunks")
    assert found.text == "ab cdab cd cd"


def test_sglang_cuts_back_the_text_at_a_stop_string() -> None:
    found = read([sglang("ab", 1), sglang("ab cd", 3), sglang("ab", 4, {"type": "stop"})], SGLANG)
    assert found.counted() == ([(1, 1), (2, 3)], 4, "chunks")
    assert found.text == "ab cd"


def test_all_text_so_far_takes_no_quadratic_joining() -> None:
    texts = ["x" * n for n in range(1, 6001)]
    pieces = [sglang(text, len(text)) for text in texts]
    began = time.process_time()
    assert read(pieces, SGLANG).text == texts[-1]
    assert time.process_time() - began < 0.5


def test_a_total_alone_is_one_token_a_chunk_where_that_explains_it() -> None:
    assert read([*plain("a", "b", "c"), usage(3)]).counted() == ([(1, 1), (2, 1), (3, 1)], 3, "total")


def test_the_end_of_sequence_may_be_one_token_more_than_chunks() -> None:
    assert read([*plain("a", "b", "c"), usage(4)]).counted() == ([(1, 1), (2, 1), (3, 2)], 4, "total")


def test_a_total_in_the_finishing_chunk_is_a_total_too() -> None:
    found = read([*plain("a", "b"), token(" c", 3, finish="stop"), DONE])
    assert found.counted() == ([(1, 1), (2, 1), (3, 1)], 3, "total")


def test_a_total_of_several_tokens_a_chunk_is_spread_by_length() -> None:
    found = read([*plain("a", "x" * 10, "y" * 9), usage(40)])
    assert found.counted() == ([(1, 2), (2, 20), (3, 18)], 40, "estimated")


def test_no_count_at_all_is_estimated_from_the_length() -> None:
    """Four characters a token, and never fewer tokens than chunks."""
    assert read(plain("x" * 20, "y" * 20)).counted() == ([(1, 5), (2, 5)], 10, "estimated")
    assert read(plain("a", "b", "c")).counted() == ([(1, 1), (2, 1), (3, 1)], 3, "estimated")


def test_a_known_rate_replaces_four_characters_a_token() -> None:
    found = read(plain("x" * 20, "y" * 20))
    assert found.counted(0.5).output_tokens == 20
    assert found.tokens_so_far(0.5) == 20


def test_no_output_is_no_tokens() -> None:
    assert read([DONE]).counted() == ([], 0, "estimated")
    assert read([usage(0), DONE]).counted() == ([], 0, "total")


@given(st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=30), st.integers(0, 300))
def test_an_estimate_sums_to_the_total_and_starts_with_a_token(texts: list[str], total: int) -> None:
    counted = read([*plain(*texts), usage(total)]).counted()
    found = [count for _, count in counted.arrivals]
    assert sum(found) == total == counted.output_tokens
    assert min(found) >= 0
    assert found[0] >= min(1, total)


def test_counts_that_contradict_the_total_are_left_to_the_check() -> None:
    counted = read([token("a", 1), token("b", 2), usage(9)]).counted()
    assert (sum(count for _, count in counted.arrivals), counted.output_tokens) == (2, 9)
    counted = read([token("a", 5), token("b", 3), token("c", 6)]).counted()
    assert (sum(count for _, count in counted.arrivals), counted.output_tokens) == (8, 6)


def test_tokens_without_text_join_the_next_arrival() -> None:
    assert tokens(read([token("a", 1), token("", 3), token("b", 4)])) == [1, 3]


@pytest.mark.parametrize("finish", [token("", 4, finish="stop"), token(None, 4, finish="stop")])
def test_the_end_of_sequence_joins_the_last_arrival(finish: bytes) -> None:
    assert read([token("a", 1), token(" b", 3), finish, usage(4)]).counted() == ([(1, 1), (2, 3)], 4, "chunks")


def test_the_end_of_sequence_may_be_counted_in_the_total_alone() -> None:
    """llama.cpp's chat: timings end with the last text, the usage holds one token more."""
    content = [token(text, timings={"predicted_n": n + 1}) for n, text in enumerate(["a", " b"])]
    found = read([*content, token(None, finish="stop"), usage(3), DONE])
    assert found.counted() == ([(1, 1), (2, 2)], 3, "chunks")


def test_chunks_with_one_stamp_are_one_arrival() -> None:
    found = read([token("a", 1), token(" b", 3), token(" c", 4), token(" d", 5)], stamps=[10, 10, 10, 20])
    assert found.counted() == ([(10, 4), (20, 1)], 5, "chunks")
    assert found.chunks == 4


def test_several_chunks_in_one_piece_are_one_arrival() -> None:
    found = read([token("a", 1) + token(" b", 3), token(" c", 4)])
    assert found.counted() == ([(1, 3), (2, 1)], 4, "chunks")
    assert found.chunks == 3


def test_choices_are_counted_apart_and_summed() -> None:
    """n = 2: each chunk's usage is that of its own choice, the last one's that of both."""

    def of(index: int, text: str, count: int, finish: str | None = None) -> bytes:
        choice = {"index": index, "delta": {"content": text}, "finish_reason": finish}
        return event({"choices": [choice], "usage": {"completion_tokens": count}})

    events = [of(0, "a", 1), of(1, "A", 2), of(0, "b", 3), of(1, "", 3, "stop"), of(0, "c", 4, "length"), usage(7)]
    assert read(events).counted() == ([(1, 1), (2, 2), (3, 3), (5, 1)], 7, "chunks")


def test_an_answer_is_finished_when_each_choice_is_or_done_was_said() -> None:
    def of(index: int, finish: str | None = None) -> bytes:
        return event({"choices": [{"index": index, "delta": {"content": "a"}, "finish_reason": finish}]})

    assert not read([of(0)]).finished
    assert read([of(0), of(0, "stop")]).finished
    assert not read([of(0), of(1), of(0, "stop")]).finished
    assert not read([of(0), of(1), of(1, "length")]).finished
    assert read([of(0), of(1), of(0, "stop"), of(1, "length")]).finished
    assert read([of(0), of(1), DONE]).finished


def test_sglang_sends_all_text_so_far_of_each_choice() -> None:
    def of(index: int, text: str, count: int, finish: str | None = None) -> bytes:
        meta = {"id": f"r{index}", "completion_tokens": count, "finish_reason": finish}
        return event({"text": text, "index": index, "meta_info": meta})

    found = read(
        [of(0, "a", 1), of(1, "a", 1), of(1, "a b", 3), of(0, "a c", 2, "stop"), of(1, "a b", 4, "stop")], SGLANG
    )
    assert found.counted() == ([(1, 1), (2, 1), (3, 2), (4, 2)], 6, "chunks")
    assert (found.text, found.finished) == ("aa b c", True)


def test_a_running_response_counts_as_far_as_it_came() -> None:
    transcript = Transcript(CHAT)
    pieces = [(1, token("a", 1)), (2, token(" b", 3) + b"data: {")]
    assert transcript.advance(pieces, 1 << 62)
    assert transcript.tokens_so_far(9.0) == 3
    assert transcript.counted() == ([(1, 1), (2, 2)], 3, "chunks")


def test_parsing_stops_when_its_time_is_over() -> None:
    transcript, pieces = Transcript(CHAT), [(n, token("x", n)) for n in range(1, 501)]
    assert not transcript.advance(pieces, 0)
    assert 0 < len(pieces) < 500
    while not transcript.advance(pieces, 0):
        pass
    assert transcript.counted().output_tokens == 500


# ---- what is output ----


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"content": "a"}, "a"),
        ({"reasoning": "a"}, "a"),
        ({"reasoning_content": "a"}, "a"),
        ({"reasoning_content": "a", "reasoning": "a"}, "a"),
        ({"reasoning": "a", "content": "b"}, "ab"),
        ({"refusal": "no"}, "no"),
        ({"content": None, "tool_calls": [{"index": 0, "id": "1", "function": {"name": "f", "arguments": ""}}]}, "f"),
        ({"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}, {"function": None}, {}]}, '{"a"'),
    ],
)
def test_output_in_any_field_is_output(fields: dict[str, Any], text: str) -> None:
    found = read([delta(**fields)])
    assert (found.text, found.chunks) == (text, 1)


@pytest.mark.parametrize(
    "value",
    [
        {"choices": [{"index": 0, "delta": {"role": "assistant"}}]},
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": None, "tool_calls": []}}]},
        {"choices": [{"index": 0, "delta": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": ""}]},
        {"choices": []},
        {"choices": None, "usage": None, "timings": None, "error": None},
        {},
    ],
)
def test_role_only_and_empty_chunks_are_no_output(value: Any) -> None:
    found = read([event(value), token("a", 1)])
    assert found.counted() == ([(2, 1)], 1, "chunks")
    assert (found.error, found.garbage, found.finish_reason) == (None, None, None)


def test_completions_have_text_instead_of_a_delta() -> None:
    events = [event({"choices": [{"index": 0, "text": text, "finish_reason": None}]}) for text in ("a", "", "b")]
    found = read([*events, usage(2), DONE], COMPLETIONS)
    assert (found.text, tokens(found)) == ("ab", [1, 1])


def test_the_reason_to_finish_may_come_with_the_last_content() -> None:
    found = read([token("a", 1), token("b", 2, finish="length"), DONE])
    assert (found.finish_reason, tokens(found)) == ("length", [1, 1])


def test_empty_data_and_pings_are_signs_of_life() -> None:
    found = read([b": ping\n\n", b"data:\n\n", b'event: ping\ndata: {"type": "ping"}\n\n', token("a", 1), DONE])
    assert (found.counted().output_tokens, found.garbage, found.error) == (1, None, None)


@pytest.mark.parametrize("ending", [DONE * 2, b"data: [DONE] \n\n", b"data:[DONE]\r\n\r\n", b"data: [DONE]"])
def test_done_in_all_its_forms(ending: bytes) -> None:
    found = read([token("a", 1), ending])
    assert (found.done, found.garbage, found.counted().output_tokens) == (True, None, 1)


def test_an_event_without_its_empty_line_still_counts() -> None:
    found = read([token("a", 1), token("b", 2, finish="stop").rstrip()])
    assert (found.text, found.finish_reason) == ("ab", "stop")


def test_the_beginning_of_an_event_is_no_garbage() -> None:
    found = read([token("a", 1), token("b", 2)[:30]])
    assert (found.text, found.garbage) == ("a", None)


# ---- errors and garbage ----


@pytest.mark.parametrize(
    ("piece", "error"),
    [
        (b'event: error\ndata: {"message": "out of\\nmemory"}\n\n', "out of memory"),
        (b"event: error\ndata: gone\n\n", "gone"),
        (b"event: error\ndata:\n\n", "no text"),
        (event({"error": {"message": "too long", "type": "BadRequest", "code": 400}}), "too long"),
        (event({"error": "too long"}), "too long"),
        (event({"error": ""}), "no text"),
        (event({"object": "error", "error": {"code": 500}}), '{"code":500}'),
        (event({"object": "error", "message": "too long", "type": "BadRequestError", "code": 400}), "too long"),
        (b'error: {"code":500,"message":"slot lost","type":"server_error"}\n\n', "slot lost"),
        (token("", finish="abort"), "the engine gave the answer up (abort)"),
        (token(None, 1, finish="error"), "the engine gave the answer up (error)"),
    ],
)
def test_an_error_inside_a_good_response(piece: bytes, error: str) -> None:
    found = read([token("a", 1), piece, event({"error": "the second"}), DONE])
    assert (found.error, found.text) == (error, "a")


def test_of_two_errors_in_one_read_the_first_is_told() -> None:
    named, plain = b"event: error\ndata: named\n\n", event({"error": "plain"})
    assert read([named + plain]).error == "named"
    assert read([plain + named]).error == "plain"


def test_sglang_reports_errors_the_same_way() -> None:
    assert read([event({"error": {"message": "aborted"}})], SGLANG).error == "aborted"
    assert read([sglang("a", 1, {"type": "abort", "message": "no memory"})], SGLANG).error == "no memory"
    assert read([sglang("a", 1, {"type": "abort", "message": ""})], SGLANG).error is not None
    assert read([sglang("a", 1, {"type": "stop", "message": "matched"})], SGLANG).error is None


@pytest.mark.parametrize(
    "value", [{"message": None}, {"message": "hi", "choices": []}, {"error": None, "message": None}]
)
def test_a_message_that_is_none_is_no_error(value: Any) -> None:
    assert read([event(value), token("a", 1)]).error is None


@pytest.mark.parametrize(
    "data",
    [
        b"hello",
        b"{",
        b'{"choices": {}}',
        b'{"choices": [{"delta": {"content": 5}}]}',
        b'{"choices": [{"delta": {"content": "\xff"}}]}',
        b'{"usage": {"completion_tokens": -1}}',
        b'{"usage": {"completion_tokens": 1e300}}',
        b'{"usage": {"completion_tokens": 123456789012345678901234567890}}',
        b'{"timings": {"predicted_n": "3"}}',
        b'{"x": ' + b"[" * 100_000,
        b'{"error": ' + b"[" * 100_000,
        b"{},{}",
        b"[]",
    ],
)
def test_an_event_that_is_no_chunk_is_garbage_and_the_others_count(data: bytes) -> None:
    """However they are cut: alone, together with others, in the middle."""
    events = [token("a", 1), b"data: " + data + b"\n\n", token("b", 2)]
    for pieces in (events, [b"".join(events)], [b"".join(events)[:80], b"".join(events)[80:]]):
        found = read(pieces)
        assert found.garbage is not None
        assert (found.text, found.counted().output_tokens) == ("ab", 2)


@pytest.mark.parametrize("data", [b"\xff\xfe", b"", b"  ", b'{"error": "\xff"}', b"[" * 100_000])
def test_any_bytes_can_be_an_error(data: bytes) -> None:
    error = read([b"event: error\ndata: " + data + b"\n\n"]).error
    assert error


# ---- the cutting does not matter ----

TEXTS = st.text(alphabet='ab \n"\\é€😀', max_size=6)


@st.composite
def responses(draw: st.DrawFn) -> list[bytes]:
    """The events of a response: counts in all, some or no chunks, and all that may be between."""
    count, events = 0, []
    for _ in range(draw(st.integers(0, 8))):
        count += draw(st.integers(0, 4))
        counted = draw(st.sampled_from([count, None]))
        events.append(
            draw(
                st.sampled_from(
                    [
                        token(draw(TEXTS), counted),
                        delta(reasoning=draw(TEXTS)),
                        token(draw(TEXTS), timings={"predicted_n": count}),
                        b": ping\r\n\r\n",
                        b"data:\n\n",
                        b'data: {"choices": [],\ndata: "usage": null}\n\n',
                        token("x", count).replace(b": ", b":\r "),
                        b"data: {}\n\ndata: {}\r\n\r\n",
                        event(
                            {"choices": [{"index": 1, "delta": {"content": "n"}}], "usage": {"completion_tokens": 1}}
                        ),
                        *([b"data: no JSON\n\n", b"event: error\ndata: gone\n\n"] if draw(st.booleans()) else []),
                    ]
                )
            )
        )
    ending = [token("", count, finish="stop"), usage(count), DONE, b"data: [DONE]", token("cut", count)[:40]]
    return [*events, *draw(st.lists(st.sampled_from(ending), max_size=4))]


def said(transcript: Transcript) -> tuple[Any, ...]:
    """All but the times."""
    return (
        transcript.text,
        transcript.chunks,
        transcript.counted().output_tokens,
        transcript.finish_reason,
        transcript.input_tokens,
        transcript.done,
        transcript.error,
        transcript.garbage,
    )


@given(responses(), st.lists(st.integers(0, 2000), max_size=20))
@example([b'data: {"choices":\n\n[]}\n\n'], [])
def test_any_cutting_of_a_response_says_the_same(events: list[bytes], places: list[int]) -> None:
    whole = b"".join(events)
    places = sorted(place % (len(whole) + 1) for place in places)
    pieces = [whole[a:b] for a, b in pairwise([0, *places, len(whole)])]
    expected = said(read([whole]))
    assert said(read(pieces)) == expected
    assert said(read(events)) == expected, "an event a piece"
    assert said(read([whole[i : i + 1] for i in range(len(whole))])) == expected, "single bytes"


@given(responses())
def test_arrivals_are_in_order_and_hold_all_text(events: list[bytes]) -> None:
    arrivals = read(events).counted().arrivals
    stamps = [stamp for stamp, _ in arrivals]
    assert stamps == sorted(set(stamps))
    assert all(count >= 0 for _, count in arrivals)


# ---- loops ----


def longest_loop(text: str) -> float:
    """By trying every passage: the most that one fills, of those that repeat the last 24 characters."""
    best = 0
    for period in range(1, len(text) // 3 + 1):
        same = 0
        while same < len(text) - period and text[-1 - same] == text[-1 - same - period]:
            same += 1
        if same >= 24 and same + period >= 3 * period:
            best = max(best, same + period)
    return best / len(text) if text else 0.0


@pytest.mark.parametrize("text", ["", "a", "ab" * 5, "a" * 24, "no", "\n"])
def test_short_texts_have_no_loop(text: str) -> None:
    assert repetition(text) == 0.0


def test_normal_text_has_no_loop() -> None:
    words = [f"{n * 7919 % 1009:x}" for n in range(800)]
    assert repetition(" ".join(words)) == 0.0
    assert repetition("It was the best of times, it was the worst of times, it was the age of wisdom. " * 2) == 0.0


def test_a_text_of_one_letter_is_all_loop() -> None:
    assert repetition("a" * 500) == 1.0
    assert repetition("a" * 5000) == 1.0


def test_a_loop_is_measured_against_the_whole_text() -> None:
    start = " ".join(str(n * n) for n in range(300))[:1000]
    assert repetition(start + "the cat sat on the mat. " * 125) == pytest.approx(0.75, abs=0.01)


def test_a_long_text_that_loops_is_found() -> None:
    """Longer than what is searched for the passage."""
    assert repetition("the cat sat on the mat. " * 1000) == 1.0


def test_a_loop_that_ends_inside_a_run_of_dashes_is_the_whole_loop() -> None:
    """The dashes alone repeat too, with a shorter passage: the longer loop counts."""
    line = "| name | value |\n" + "-" * 40 + "\n"
    assert repetition(line * 20 + line[:-8]) == 1.0


@given(st.text("ab", min_size=1, max_size=4), st.integers(1, 60), st.text("ab", max_size=40), st.text("ab", max_size=3))
@example("a", 50, "b", "")
@example("aab" * 9 + "b", 8, "b", "aab" * 8)
def test_loops_are_those_that_trying_every_passage_finds(passage: str, times: int, start: str, end: str) -> None:
    text = start + (passage * times + end) * 4
    assert repetition(text) == pytest.approx(longest_loop(text))


@given(st.lists(st.sampled_from(["a" * 30, "b", "ab" * 15, "abc"]), max_size=40).map("".join))
def test_loops_within_loops_are_found_too(text: str) -> None:
    assert repetition(text) == pytest.approx(longest_loop(text))
