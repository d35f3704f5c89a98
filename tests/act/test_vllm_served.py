"""The policy inside a real vLLM on this machine's processor: pins, `auto`, faults, and a kill in mid-run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from breakeven.act.governor import Governor
from breakeven.decide.observed import DEEP
from breakeven.decide.policy import Policy
from breakeven.engines.control import Pin
from breakeven.engines.http import Client
from breakeven.engines.process import ServerProcess
from breakeven.engines.vllm import start_vllm
from breakeven.engines.vllm_parts import check_control, find_installation
from breakeven.errors import EngineError
from breakeven.load.prompts import load_prompts
from breakeven.runs import read_run
from tests.conftest import Run
from tests.engines.processes import descendants, is_alive, within

START_LIMIT_S = 600.0
CHAT = ("--kind", "chat", "--max-tokens", 48, "--warmup", 0, "--ignore-eos")


def _absent() -> str:
    """Why the policy can't be run inside vLLM here."""
    with contextlib.suppress(EngineError):
        check_control(find_installation())
        return ""
    return "vLLM is not installed, or breakeven not beside it (make vllm)"


pytestmark = pytest.mark.skipif(bool(_absent()), reason=_absent())


class Governed(NamedTuple):
    """A server that breakeven acts in, and its control page."""

    server: ServerProcess
    page: str

    def state(self) -> dict[str, Any]:
        """What the page tells."""
        with urllib.request.urlopen(f"{self.page}/state", timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
        return found


@contextlib.contextmanager
def governed(*specs: str) -> Iterator[list[Governed]]:
    """Servers as `vllm:` arms start them, all at the same time."""
    said: list[str] = []
    named = {spec: spec for spec in specs}
    with start_vllm(named, requests=4, start_timeout_s=START_LIMIT_S, say=said.append) as started:
        pages = re.findall(r"its control page on (\d+)", " ".join(said))
        yield [Governed(s, f"http://127.0.0.1:{page}") for s, page in zip(started.values(), pages, strict=True)]


@pytest.fixture(scope="module")
def auto() -> Iterator[Governed]:
    """One that chooses among two K of EAGLE-3, and may leave the drafter alone."""
    with governed("eagle3:auto@deep,0,2") as (server,):
        yield server


def bench(breakeven: Run, server: Governed, place: Path, *more: object) -> Any:
    """A run against it."""
    done = breakeven("bench", "--server-url", server.server.url, *CHAT, *more, "--output", place, timeout_s=500)
    assert done.returncode == 0, done.stderr
    return read_run(place)


def test_auto_learns_from_every_step_and_serves_all(auto: Governed, breakeven: Run, tmp_path: Path) -> None:
    before = auto.state()
    run = bench(breakeven, auto, tmp_path / "run", "--concurrency", 1, 4, "--requests", 8)
    assert {record.outcome for record in measured(run)} == {"ok"}
    state = auto.state()
    assert state["faults"] == {}
    assert state["fallback_steps"] <= before["fallback_steps"] + 64  # at the start nothing was seen yet
    steps = state["steps"] - before["steps"]
    # Each request has up to 48 tokens, up to 4 requests share a step, and a step brings each up to 3.
    assert 16 * 48 / 4 / 3 <= steps <= 48 * len(run.requests)
    assert [each["k"] for each in state["estimates"]] == [DEEP, 0, 2]
    assert all(1 < each["tokens_per_s"] < 5000 for each in state["estimates"])
    assert state["policy_us_median"] < 1000
    with urllib.request.urlopen(f"{auto.page}/metrics", timeout=30) as answer:
        assert f"breakeven:steps_total {state['steps']}" in answer.read().decode()


def test_pinned_arms_of_one_server_draft_what_they_are_pinned_to(
    auto: Governed, breakeven: Run, tmp_path: Path
) -> None:
    port, ks = auto.page.rpartition(":")[2], ("deep", 0, 2)
    arms = [word for k in ks for word in ("--arm", f"k{k}=pin:{k}@{auto.server.url}#{port}")]
    compare = ["compare", *arms, "--concurrency", 2, "--requests", 4, "--cycles", 1, *CHAT, "--output", tmp_path / "c"]
    done = breakeven(*compare, timeout_s=500)
    assert done.returncode == 0, done.stderr
    turns = {k: read_run(tmp_path / "c" / f"k{k}").levels for k in ks}
    assert len(turns["deep"]) == len(turns[0]) == len(turns[2]) >= 2
    assert [level.spec for k in ("deep", 0) for level in turns[k]] == [None] * 2 * len(turns[0])
    # Each draft is one of two tokens, unless its request is nearly at its end.
    assert all(level.spec and 1.5 < level.spec["draft_tokens"] / level.spec["drafts"] <= 2 for level in turns[2])
    assert [level.pin_broken for levels in turns.values() for level in levels] == [None] * 3 * len(turns[0])
    state = auto.state()
    assert state["pinned"] is None
    assert state["pins"] >= 6
    assert any("leaves the drafter alone" in line for line in auto.server.log_tail(10_000) if "(Worker" in line)


FAULTS = """
import random
try:
    import breakeven.act.vllm as act
    from breakeven.decide.policy import Policy
except ImportError:
    pass
else:
    dice = random.Random(1)
    choose, step = Policy._choose, act._step
    def faulty_choose(self, seen):
        if dice.random() < 0.2:
            raise RuntimeError("a policy that raises")
        odd = dice.choice([{}, {"kv_use": float("nan")}, {"now_ns": seen.now_ns - 10**12}, {"now_ns": float("nan")},
                           {"decoding": None}, {"decoding": -3}, {"last": None}, {"waiting": None}])
        return choose(self, seen._replace(**odd))
    def faulty_step(*args):
        if dice.random() < 0.2:
            raise KeyError("a signal that is missing")
        odd = dice.choice([{}, {"step_ns": float("nan")}, {"step_ns": -5}, {"decoding": 0.5}, {"k": 99},
                           {"accepted": (float("nan"),)}, {"accepted": (9, 9)}, {"prefill_tokens": -1}])
        return step(*args)._replace(**odd)
    Policy._choose, act._step = faulty_choose, faulty_step
"""


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Governed, Path]]:
    """One whose policy raises and whose signals lie, and the file with what it learns."""
    place = tmp_path_factory.mktemp("broken")
    (place / "sitecustomize.py").write_text(FAULTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("BREAKEVEN_STATE", str(place / "learned.json"))
        with governed("ngram:auto@deep,0,2,4") as (server,):
            yield server, place / "learned.json"


def test_a_policy_that_raises_and_signals_that_lie_reach_no_request(
    auto: Governed, broken: tuple[Governed, Path], breakeven: Run, tmp_path: Path
) -> None:
    """The answers are those of the server whose policy is well, but for near ties, which a batch can turn."""
    asked = ("--concurrency", 2, "--requests", 8, "--keep-text", "--seed", 3)
    run = bench(breakeven, broken[0], tmp_path / "broken", *asked)
    state = broken[0].state()
    well = bench(breakeven, auto, tmp_path / "well", *asked)
    assert [(record.outcome, record.output_tokens) for record in measured(run)] == [("ok", 48)] * 8
    assert state["faults"]["exception"] > 10
    assert state["faults"]["step"] > 10
    assert state["faults"]["decoding"] > 10
    texts = {record.text for record in measured(well)}
    assert sum(record.text in texts for record in measured(run)) >= 6


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
def test_a_model_with_n_grams_computes_on_all_cores(
    broken: tuple[Governed, Path], breakeven: Run, tmp_path: Path
) -> None:
    """numba, which looks for them, can tell torch's OpenMP that there is one thread."""
    server = broken[0].server
    worker = next(pid for pid in descendants(server.pid) if b"Worker" in Path(f"/proc/{pid}/cmdline").read_bytes())
    before = ticks(worker)
    bench(breakeven, broken[0], tmp_path / "run", "--concurrency", 2, "--requests", 4)
    busy = sorted(after - before.get(thread, 0) for thread, after in ticks(worker).items())
    assert busy[-2] > busy[-1] / 4


def ticks(pid: int) -> dict[str, int]:
    """The processor time of each of its threads."""
    stats = {task.name: (task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()}
    return {thread: sum(map(int, stat.rpartition(")")[2].split()[11:13])) for thread, stat in stats.items()}


def test_answers_under_a_broken_policy_are_the_models_own(auto: Governed, broken: tuple[Governed, Path]) -> None:
    """Teacher-forced: given all that comes before, the model itself would have chosen each of their tokens.

    Counted tokens that it would not have chosen are near ties, which no drafting at all has as well. Steps as of a
    server without a drafter are among those of the broken one, between steps that draft, and are all of the last.
    """
    prompts = [prompt.as_text() for prompt in load_prompts(None, ("chat",), seed=5).prompts[:4]]
    with ThreadPoolExecutor(2) as pool:
        drafted = list(pool.map(lambda prompt: answered(broken[0], prompt), prompts))
        with Pin("auto", "0", auto.page).held():
            plain = list(pool.map(lambda prompt: answered(auto, prompt), prompts))
        with Pin("auto", "deep", auto.page).held():
            alone = list(pool.map(lambda prompt: answered(auto, prompt), prompts))
    shares = [agreement(auto, answers) for answers in (drafted, plain, alone)]
    assert min(shares) > 0.98
    assert max(shares) - min(shares) < 0.01
    assert any("leaves the drafter alone" in line for line in broken[0].server.log_tail(10_000) if "(Worker" in line)


class Answer(NamedTuple):
    """Token ids."""

    prompt: list[int]
    output: list[int]


def answered(server: Governed, prompt: str) -> Answer:
    """What a server says to a prompt, greedily."""
    asked = {"prompt": prompt, "max_tokens": 32, "ignore_eos": True, "return_token_ids": True}
    choice = completion(server, asked)
    return Answer(choice["prompt_token_ids"], choice["token_ids"])


def agreement(judge: Governed, answers: list[Answer]) -> float:
    """The share of output tokens that the judge's model puts first, given the tokens before."""
    first = []
    for prompt, output in answers:
        asked = {"prompt": prompt + output, "max_tokens": 1, "prompt_logprobs": 1}
        scored = completion(judge, asked)["prompt_logprobs"][len(prompt) :]
        first += [by_token[str(token)]["rank"] == 1 for token, by_token in zip(output, scored, strict=True)]
    return sum(first) / len(first)


def completion(server: Governed, asked: dict[str, Any]) -> Any:
    """The one choice that a server answers with."""
    with Client(server.server.url, {}, 120.0) as client:
        answer: Any = client.post("/v1/completions", json.dumps(asked | {"temperature": 0}).encode()).json()
    (choice,) = answer["choices"]
    return choice


def measured(run: Any) -> list[Any]:
    """The requests that count."""
    return [record for record in run.requests if record.phase == "measured"]


def test_a_kill_in_mid_run_leaves_nothing_but_what_was_learned(
    broken: tuple[Governed, Path], breakeven: Run, tmp_path: Path
) -> None:
    server, learned = broken
    processes = descendants(server.server.pid)
    killer = threading.Thread(target=kill_the_engine, args=(processes, tmp_path / "run" / "requests.jsonl", learned))
    killer.start()
    command = ["bench", "--server-url", server.server.url, *CHAT, "--concurrency", 2, "--duration", "30s"]
    done = breakeven(*command, "--no-ramp", "--output", tmp_path / "run", timeout_s=500)
    killer.join()
    assert "Traceback" not in done.stderr
    assert {record.outcome for record in read_run(tmp_path / "run").requests} > {"ok"}
    server.server.stop()
    assert within(30, lambda: not any(map(is_alive, processes)))
    governor = Governor(Policy([0, 2, 4]), "auto")
    assert "goes on" in governor.restore(learned)


def kill_the_engine(processes: list[int], requests: Path, learned: Path) -> None:
    """That of a server's processes in which vLLM schedules and the policy runs, once a request has ended."""
    assert within(300, lambda: requests.exists() and requests.stat().st_size > 0 and learned.exists())
    names = {pid: Path(f"/proc/{pid}/comm").read_text() for pid in processes if is_alive(pid)}
    for pid, name in names.items():
        if "EngineCor" in name:  # the kernel keeps fifteen letters of VLLM::EngineCore
            os.kill(pid, signal.SIGKILL)
