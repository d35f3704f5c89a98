"""vLLM for real, on this machine's processor: started, measured, ended. `make vllm` installs it.

Few servers are started, since each takes a minute: some tests share a pair that is up together.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from breakeven.engines.process import ServerProcess
from breakeven.engines.vllm import start_vllm
from breakeven.engines.vllm_parts import find_head, find_installation
from breakeven.errors import EngineError
from breakeven.records import LevelRecord, RequestRecord
from breakeven.runs import read_run
from tests.conftest import Run
from tests.engines.processes import descendants, is_alive, within

START_LIMIT_S = 600.0
"""On a busy machine; alone a server takes a minute."""

K = 4
TABLE = f"ngram:[[1,1,{K}],[2,64,0]]"
"""Speculation for a request alone, none in company."""


def _absent() -> str:
    """Why vLLM can't be run here."""
    with contextlib.suppress(EngineError):
        find_installation()
        return ""
    return "vLLM is not installed (make vllm)"


def _headless() -> str:
    try:
        find_head(find_installation().model)
    except EngineError as error:
        return str(error)
    return ""


pytestmark = pytest.mark.skipif(bool(_absent()), reason=_absent())
needs_head = pytest.mark.skipif(bool(_headless()), reason=_headless())


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, ServerProcess]]:
    """One that drafts always, one that drafts by its table."""
    specs = {"always": f"ngram:{K}", "by table": TABLE}
    with start_vllm(specs, requests=4, start_timeout_s=START_LIMIT_S, say=lambda _: None) as started:
        yield started


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """What makes a breakeven that runs elsewhere find the same vLLM."""
    found = find_installation()
    names = {"BREAKEVEN_VLLM_PYTHON": found.python, "BREAKEVEN_VLLM_MODEL": found.model.folder}
    with contextlib.suppress(EngineError):
        names["BREAKEVEN_EAGLE3_HEAD"] = find_head(found.model)
    return {name: str(path) for name, path in names.items()}


def level_of(directory: Path, concurrency: int) -> tuple[LevelRecord, list[RequestRecord]]:
    """A level of a run, and its requests."""
    run = read_run(directory)
    level = next(level for level in run.levels if level.plan.concurrency == concurrency)
    return level, run.of_level(level.plan.index)


def test_vllms_counters_agree_with_the_clients_own_tokens_per_chunk(
    servers: dict[str, ServerProcess], breakeven: Run, tmp_path: Path
) -> None:
    """Within 1 %, over every token of a level: without ramp and window both count from the first request to the last.

    A chunk is what one step brought a request: a token, and the draft tokens that were accepted. Steps without a draft
    count on both sides. What the last step accepted beyond max-tokens, vLLM counts and nobody is sent: it makes a last
    chunk of up to K + 1 tokens.
    """
    bench = ["bench", "--server-url", servers["always"].url, "--concurrency", 1, 2, "--requests", 4, "--kind", "chat"]
    bench += ["code", "--max-tokens", 160, "--no-ramp", "--warmup", 0, "--output", tmp_path / "run"]
    done = breakeven(*bench, timeout_s=500)
    assert done.returncode == 0, done.stderr
    for concurrency in (1, 2):
        level, records = level_of(tmp_path / "run", concurrency)
        assert {(record.outcome, record.tokens_from) for record in records} == {("ok", "chunks")}
        tokens, chunks = (sum(getattr(record, name) for record in records) for name in ("output_tokens", "chunks"))
        cut = sum(max(0, K + 1 - record.arrivals[-1][1]) for record in records if record.finish_reason == "length")
        assert level.spec is not None
        assert level.counters["generation_tokens"] == tokens
        steps = tokens - level.spec["accepted"]
        assert level.spec["accepted"] > 0.1 * tokens
        assert 0.99 * tokens / chunks < tokens / steps < 1.01 * tokens / (chunks - cut)


def test_vllms_table_is_at_work(servers: dict[str, ServerProcess], breakeven: Run, tmp_path: Path) -> None:
    """Requests alone are speculated for, two together are not."""
    bench = ["bench", "--server-url", servers["by table"].url, "--concurrency", 1, 2, "--requests", 2, "--kind", "chat"]
    bench += ["--max-tokens", 64, "--no-ramp", "--warmup", 0, "--ignore-eos", "--output", tmp_path / "run"]
    done = breakeven(*bench, timeout_s=500)
    assert done.returncode == 0, done.stderr
    levels = [level_of(tmp_path / "run", concurrency)[0] for concurrency in (1, 2)]
    alone, together = (level.spec["drafts"] if level.spec else 0 for level in levels)
    assert alone > 5 * together


def test_stopping_leaves_no_process(servers: dict[str, ServerProcess]) -> None:
    """A server is three processes: the API's, the engine's core, its worker. Nothing uses these two from here on."""
    for server in servers.values():
        processes = descendants(server.pid)
        assert len(processes) >= 3
        server.stop()
        assert within(30, lambda: not any(map(is_alive, processes)))  # noqa: B023 # called in this turn


def test_nothing_is_left_of_a_server_whose_breakeven_is_killed_outright(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """While it starts, with all its processes there."""
    command = [sys.executable, "-m", "breakeven", "bench", "--vllm", "--concurrency", "1"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=os.environ | environment | {"TMPDIR": str(tmp_path)}, stderr=subprocess.DEVNULL
    ) as process:
        # The guard, the API's process, the engine's core, its worker.
        assert within(START_LIMIT_S, lambda: len(descendants(process.pid)) >= 4)
        processes = descendants(process.pid)
        process.kill()
    assert within(30, lambda: not any(map(is_alive, processes)))


@needs_head
def test_eagle_3_is_faster_for_one_request_and_slower_for_sixteen(
    environment: dict[str, str], breakeven: Run, tmp_path: Path
) -> None:
    # Short prompts: reading long ones takes both arms most of the time, and hides what drafting does.
    compare = ["compare", "--arm", "off=vllm:", "--arm", "on=vllm:eagle3:2", "--concurrency", 1, 16]
    compare += ["--kind", "chat", "maths", "--max-tokens", 48, "--duration", "12s", "--cycles", 1, "--warmup", 1]
    compare += ["--output", tmp_path / "runs"]
    done = breakeven(*compare, env=environment, timeout_s=START_LIMIT_S + 400)
    assert done.returncode == 0, done.stderr
    comparison = json.loads((tmp_path / "runs" / "comparison.json").read_text())
    alone, sixteen = (load["versus"][0]["throughput"]["value"] for load in comparison["loads"])
    assert alone > 1.0
    assert sixteen < 0.95
    level, _ = level_of(tmp_path / "runs" / "on", 1)
    assert level.spec is not None
    assert level.spec["acceptance_length"] > 1.4
