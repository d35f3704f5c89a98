"""`breakeven bench` as a whole, against a server whose timetable and record are known."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import trustme

from breakeven.engines.null import NullServer, TruthRow, null_server
from tests.conftest import Run
from tests.nulls import serving

STEP_MS = 20.0
#: 20 ms steps, chunks of 1, 3 and 2 tokens: 10 ms a token on average.
TIMETABLE = ("--step-us", "20000", "--tokens", "1,3,2", "--prefill-us", "20000")

server = serving(*TIMETABLE)
quick = serving("--step-us", "2000", "--tokens", "1,3,2")


def summary_of(directory: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((directory / "summary.json").read_text())
    return summary


def records_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "requests.jsonl").read_text().splitlines()]


def true_throughput(rows: list[TruthRow]) -> float:
    tokens = sum(row.tokens for row in rows)
    return tokens / ((max(row.last_ns for row in rows) - min(row.arrival_ns for row in rows)) / 1e9)


@pytest.mark.parametrize("usage", ["per-chunk", "final"])
@pytest.mark.parametrize("concurrency", [1, 100])
def test_the_numbers_are_the_truth(breakeven: Run, tmp_path: Path, concurrency: int, usage: str) -> None:
    with null_server(*TIMETABLE, "--usage", usage) as server:
        count = max(2, 2 * concurrency)
        result = breakeven(
            "bench", "--server-url", server.url, "--concurrency", concurrency, "--requests", count,
            "--max-tokens", "60", "--no-ramp", "--warmup", "0", "--output", "out",
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        truth = [row for row in server.truth() if row.tokens == 60]  # the probe asked for fewer
    level = summary_of(tmp_path / "out")["levels"][0]
    expected = {"ok": count, "failed": 0, "by_outcome": {"ok": count}, "reconnects": 0, "retries": 0}
    assert level["requests"] == expected
    assert level["output_tokens"] == sum(row.tokens for row in truth) == 60 * count
    assert level["output_throughput"]["value"] == pytest.approx(true_throughput(truth), rel=0.005)
    assert level["output_throughput"]["ci95"] is None
    if concurrency == 1:
        true_ttft_ms = statistics.median((row.first_ns - row.arrival_ns) / 1e6 for row in truth)
        assert level["ttft_ms"]["p50"] == pytest.approx(true_ttft_ms, abs=1.0)
    # Both sides read one clock: what the client took for the arrival of a first chunk differs from when the server had
    # sent it by one and the same offset, the run's start. A request's way into a busy server is not in this.
    stamped = sorted(record["first_ns"] for record in records_of(tmp_path / "out"))
    late_ns = sorted(ours - theirs for ours, theirs in zip(stamped, sorted(r.first_ns for r in truth), strict=True))
    assert late_ns[int(0.95 * count)] - late_ns[0] < 1e6
    true_tpot_ms = statistics.mean((row.last_ns - row.first_ns) / 1e6 / 59 for row in truth)
    assert level["tpot_ms"]["mean"] == pytest.approx(true_tpot_ms, rel=0.01)
    steps = statistics.mean((row.last_ns - row.first_ns) / 1e6 / (row.chunks - 1) for row in truth)
    assert level["icl_ms"]["mean"] == pytest.approx(steps, rel=0.02)
    assert level["itl_ms"]["mean"] == pytest.approx(level["tpot_ms"]["mean"], rel=0.02)
    failed = {check["name"] for check in level["checks"] if not check["ok"]}
    assert ("token_times" in failed) == (usage == "final")
    assert "steady" in failed


def test_a_ramped_level_keeps_its_concurrency_and_counts_its_window(
    breakeven: Run, tmp_path: Path, quick: NullServer
) -> None:
    result = breakeven(
        "bench", "--server-url", quick.url, "--concurrency", "8", "--duration", "3", "--max-tokens", "60",
        "--warmup", "3", "--output", "out",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    level = summary_of(tmp_path / "out")["levels"][0]
    assert level["in_flight"]["mean"] == pytest.approx(8, abs=0.2)
    assert level["in_flight"]["max"] == 8
    assert level["output_throughput"]["window_s"] == pytest.approx(3, abs=0.2)
    low, high = level["output_throughput"]["ci95"]
    assert low < level["output_throughput"]["value"] < high
    assert level["ended_by"] == "duration"
    assert level["engine"]["running"] == pytest.approx(8, abs=1.5)
    assert level["spec"]["acceptance_length"] == pytest.approx(2.0, abs=0.05)
    assert level["spec"]["per_position"] == pytest.approx([2 / 3, 1 / 3], abs=0.05)
    phases = [record["phase"] for record in records_of(tmp_path / "out")]
    assert phases.count("warmup") == 3
    assert level["requests"]["ok"] == phases.count("measured")


def test_250_in_flight_are_250(breakeven: Run, tmp_path: Path, server: NullServer) -> None:
    breakeven(
        "bench", "--server-url", server.url, "--concurrency", "250", "--duration", "4", "--max-tokens", "80",
        "--warmup", "0", "--output", "out",
    )  # fmt: skip
    level = summary_of(tmp_path / "out")["levels"][0]
    assert level["in_flight"]["mean"] > 0.98 * 250
    assert level["in_flight"]["max"] == 250


#: Of the sweep that the project started from: concurrency and output throughput of Kimi-K2.5 with EAGLE-3.
PUBLISHED = {2: 125.1, 30: 299.5}


def test_a_published_table_comes_out_of_a_server_with_its_step_times(breakeven: Run, tmp_path: Path) -> None:
    """With two tokens a step, a step of C requests lasts 2 C / throughput; here in a tenth of the time."""
    steps = ",".join(f"{c}:{2 * c / rate * 1e6:.0f}" for c, rate in PUBLISHED.items())
    with null_server("--step-table", steps, "--tokens", "1,3,2", "--time-scale", "0.1") as server:
        breakeven(
            "bench", "--server-url", server.url, "--concurrency", *PUBLISHED, "--duration", "4", "--max-tokens", "256",
            "--warmup", "0", "--output", "out",
        )  # fmt: skip
    levels = summary_of(tmp_path / "out")["levels"]
    measured = [level["output_throughput"]["value"] * 0.1 for level in levels]
    assert measured == pytest.approx(list(PUBLISHED.values()), rel=0.03)


def test_exactly_so_many_requests_are_measured(breakeven: Run, tmp_path: Path, quick: NullServer) -> None:
    breakeven(
        "bench", "--server-url", quick.url, "--concurrency", "1", "4", "--requests", "7", "--max-tokens", "12", "24",
        "--runs", "2", "--warmup", "0", "--output", "out",
    )  # fmt: skip
    summary = summary_of(tmp_path / "out")
    loads = [(level["run"], level["load"]["max_tokens"], level["load"]["concurrency"]) for level in summary["levels"]]
    assert loads == [(run, n, c) for run in (0, 1) for n in (12, 24) for c in (1, 4)]
    assert all(level["requests"]["ok"] == 7 for level in summary["levels"])
    assert [spread["output_throughput"]["count"] for spread in summary["spread"]] == [2] * 4


def test_measured_requests_are_the_same_at_every_level(breakeven: Run, tmp_path: Path, quick: NullServer) -> None:
    breakeven(
        "bench", "--server-url", quick.url, "--concurrency", "1", "5", "--requests", "8", "--max-tokens", "6",
        "--output", "out",
    )  # fmt: skip
    records = [record for record in records_of(tmp_path / "out") if record["phase"] == "measured"]
    by_level = [
        [record["prompt"] for record in sorted(records, key=lambda r: r["id"]) if record["level"] == level]
        for level in (0, 1)
    ]
    assert by_level[0] == by_level[1]
    assert len({prompt.rpartition("-")[0] for prompt in by_level[0]}) == 8


@pytest.mark.parametrize("api", ["chat", "completions", "sglang"])
def test_every_api_counts_every_token(breakeven: Run, tmp_path: Path, quick: NullServer, api: str) -> None:
    result = breakeven(
        "bench", "--server-url", quick.url, "--api", api, "--concurrency", "2", "--requests", "4",
        "--max-tokens", "31", "--no-ramp", "--warmup", "0", "--output", "out",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    for record in records_of(tmp_path / "out"):
        assert record["outcome"] == "ok"
        assert record["tokens_from"] == "chunks"
        assert record["output_tokens"] == sum(tokens for _, tokens in record["arrivals"]) == 31


def test_a_summary_made_again_is_the_same_to_the_last_digit(breakeven: Run, tmp_path: Path, quick: NullServer) -> None:
    breakeven(
        "bench", "--server-url", quick.url, "--concurrency", "3", "--duration", "2", "--max-tokens", "20",
        "--output", "out",
    )  # fmt: skip
    first = (tmp_path / "out" / "summary.json").read_bytes()
    (tmp_path / "out" / "summary.json").unlink()
    assert breakeven("summarize", "out").returncode == 0
    assert (tmp_path / "out" / "summary.json").read_bytes() == first


@pytest.mark.parametrize("form", ["table", "markdown", "csv", "json"])
def test_every_format_is_printed_and_nothing_else(breakeven: Run, quick: NullServer, form: str) -> None:
    result = breakeven(
        "bench", "--server-url", quick.url, "--concurrency", "1", "2", "--requests", "2", "--max-tokens", "6",
        "--format", form, "--quiet",
    )  # fmt: skip
    if form == "json":
        assert json.loads(result.stdout)["schema"] == "breakeven.summary/1"
    elif form == "csv":
        assert [row["concurrency"] for row in csv.DictReader(io.StringIO(result.stdout))] == ["1", "2"]
    else:
        assert "tok/s" in result.stdout.splitlines()[0]


@pytest.mark.parametrize(("signal_number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_keeps_what_is_done(
    tmp_path: Path, quick: NullServer, signal_number: int, code: int
) -> None:
    process = start_long_run(tmp_path, quick)
    wait_for_records(tmp_path / "out", 20)
    process.send_signal(signal_number)
    stdout, stderr = process.communicate(timeout=20)
    assert process.returncode == code, stderr
    assert "Traceback" not in stderr
    level = summary_of(tmp_path / "out")["levels"][0]
    assert level["ended_by"] == "interrupted"
    assert level["requests"]["ok"] > 0
    assert level["requests"]["failed"] == 0
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["interrupted"] is True
    assert "tok/s" in stdout


def test_a_second_interrupt_loses_nothing(breakeven: Run, tmp_path: Path, quick: NullServer) -> None:
    process = start_long_run(tmp_path, quick)
    wait_for_records(tmp_path / "out", 20)
    process.send_signal(signal.SIGINT)
    time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    first = (tmp_path / "out" / "summary.json").read_bytes()
    assert breakeven("summarize", "out").returncode == 0
    assert (tmp_path / "out" / "summary.json").read_bytes() == first


def test_a_killed_run_can_be_summarized(breakeven: Run, tmp_path: Path, quick: NullServer) -> None:
    process = start_long_run(tmp_path, quick)
    wait_for_records(tmp_path / "out", 20)
    process.kill()
    process.communicate()
    with (tmp_path / "out" / "requests.jsonl").open("ab") as records:
        records.write(b'{"id":99999,"lev')  # as a kill in the middle of a write leaves it
    result = breakeven("summarize", "out")
    assert result.returncode == 0
    assert "cut" in result.stderr
    level = summary_of(tmp_path / "out")["levels"][0]
    assert level["ended_by"] == "killed"
    assert level["requests"]["ok"] > 0


def start_long_run(tmp_path: Path, server: NullServer) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "breakeven", "bench", "--server-url", server.url, "--concurrency", "4"]
    command += ["--duration", "60", "--max-tokens", "20", "--output", "out"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True)


def wait_for_records(directory: Path, count: int) -> None:
    until = time.monotonic() + 20
    while not (directory / "requests.jsonl").exists() or len(records_of_lines(directory)) < count:
        assert time.monotonic() < until
        time.sleep(0.05)


def records_of_lines(directory: Path) -> list[bytes]:
    return (directory / "requests.jsonl").read_bytes().splitlines()


def test_ipv6_and_https(breakeven: Run, tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = tmp_path / "server.pem"
    authority.issue_cert("localhost", "::1").private_key_and_cert_chain_pem.write_to_path(str(certificate))
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    try:
        with null_server("--host", "::1", "--step-us", "2000", "--tls-cert", str(certificate)) as server:
            args = ("bench", "--server-url", server.url, "--concurrency", "2", "--requests", "4", "--max-tokens", "8")
            result = breakeven(*args, "--output", "out", env={"SSL_CERT_FILE": str(tmp_path / "ca.pem")})
            untrusted = breakeven(*args, "--output", "out2")
    except OSError:
        pytest.skip("no IPv6 here")
    assert result.returncode == 0, result.stderr
    assert summary_of(tmp_path / "out")["levels"][0]["requests"]["ok"] == 4
    assert untrusted.returncode == 2
    assert "certificate" in untrusted.stderr


def test_random_prompts_warn_and_ignore_the_end(breakeven: Run, quick: NullServer, tmp_path: Path) -> None:
    result = breakeven(
        "bench", "--server-url", quick.url, "--prompts", "random:40", "--concurrency", "1", "--requests", "2",
        "--max-tokens", "4", "--output", "out",
    )  # fmt: skip
    assert "random text" in result.stderr
    records = records_of(tmp_path / "out")
    assert all(35 <= record["input_tokens"] <= 50 for record in records)


def test_a_budget_holds_all_levels(breakeven: Run, quick: NullServer) -> None:
    began = time.monotonic()
    result = breakeven(
        "bench", "--server-url", quick.url, "--concurrency", "1", "2", "4", "--budget", "6s", "--max-tokens", "20",
        "--warmup", "1", "--format", "json",
    )  # fmt: skip
    took = time.monotonic() - began
    assert [level["ended_by"] for level in json.loads(result.stdout)["levels"]] == ["budget"] * 3
    assert 5 < took < 9


def test_the_embedded_engine_is_started_measured_and_stopped(breakeven: Run, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    result = breakeven(
        "bench", "--local", "ngram-simple", "--concurrency", "1", "2", "--requests", "3", "--max-tokens", "16",
        "--kind", "chat", "--warmup", "1", "--output", "out",
        timeout_s=300,  # its threads wait for each other in a loop, which a busy machine makes very slow
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    summary = summary_of(tmp_path / "out")
    assert summary["engine"] == "llama.cpp"
    for level in summary["levels"]:
        assert level["requests"]["ok"] == 3
        assert level["engine"]["running"] is not None
    assert all(record["tokens_from"] == "chunks" for record in records_of(tmp_path / "out"))
    port = re.search(r"127\.0\.0\.1:(\d+)", result.stderr)
    assert port is not None
    assert not running_engines(port[1])


def running_engines(port: str) -> list[str]:
    """Command lines of embedded engines that still serve a port."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and entry.name != str(os.getpid()):
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if "breakeven.engines.llamacpp_server" in line and f"--port {port}" in line:
                found.append(line)
    return found
