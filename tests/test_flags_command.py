"""`breakeven flags vllm` as a user runs it, and as a shell, vLLM and the engine's process take what it prints."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from breakeven.act.settings import read_control
from breakeven.decide.modes import policy_of
from breakeven.decide.schedule import Limit, Range, Schedule
from breakeven.engines.speculation import parse_speculation
from tests.conftest import Run

NGRAM = ("--k", 0, 2, 4, "--method", "ngram")


def write(place: Path, **fields: Any) -> str:
    """A schedule in a file whose name a shell would cut; its arms were 0, 1 and 3."""
    known: dict[str, Any] = {
        "model": "org/m",
        "ranges": (Range(1, 8, 3), Range(9, 64, 0)),
        "engine": "vllm",
        "method": "eagle3",
        "speculation": {"method": "eagle3", "model": "heads/it's one"},
        "arms": {0: "k0", 1: "k1", 3: "k3"},
    }
    (place / "a b.json").write_text(Schedule(**(known | fields)).to_json())
    return "a b.json"


def pasted(printed: str, tmp_path: Path, **variables: str) -> tuple[dict[str, str], list[str]]:
    """What a shell makes of the lines: the variables of `vllm`'s process and its arguments."""
    fake = tmp_path / "bin" / "vllm"
    fake.parent.mkdir(exist_ok=True)
    fake.write_text('#!/bin/sh\nenv -0\nprintf "\\001\\000"\nprintf "%s\\000" "$@"\n')
    fake.chmod(0o755)
    env = {"PATH": f"{fake.parent}:{os.environ['PATH']}"} | variables
    done = subprocess.run(["sh", "-c", printed], env=env, capture_output=True, text=True, check=True, timeout=60)
    before, _, after = done.stdout.partition("\x01\x00")
    told = dict(line.split("=", 1) for line in before.split("\0") if line)
    return {name: text for name, text in told.items() if name.startswith("BREAKEVEN_")}, after.split("\0")[:-1]


def config_of(words: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(words[words.index("--speculative-config") + 1])
    return config


def check_table(config: dict[str, Any]) -> None:
    """Held against the rules that vLLM has for a table."""
    table = config["num_speculative_tokens_per_batch_size"]
    found = parse_speculation(f"ngram:{json.dumps(table)}")
    assert [list(row) for row in found.table] == table
    assert found.k == config["num_speculative_tokens"]
    assert all(one[1] + 1 == other[0] for one, other in pairwise(table))


def test_a_shell_starts_vllm_with_a_table_of_every_k(breakeven: Run, tmp_path: Path) -> None:
    done = breakeven("flags", "vllm", *NGRAM, "--model", "a model")
    assert done.returncode == 0, done.stderr
    assert [line.partition(" ")[0] for line in done.stdout.splitlines()[:2]] == ["BREAKEVEN_POLICY=auto", "vllm"]
    variables, words = pasted(done.stdout, tmp_path)
    assert variables == {"BREAKEVEN_POLICY": "auto"}
    assert words[:4] == ["serve", "a model", "--scheduler-cls", "breakeven.act.vllm.scheduler"]
    assert "--max-num-seqs" not in words
    config = config_of(words)
    check_table(config)
    drafts = (parse_speculation("ngram:4").config() or {}).items()
    assert drafts <= config.items()
    assert config["num_speculative_tokens_per_batch_size"] == [[1, 1, 4], [2, 2, 2], [3, 256, 0]]
    assert "pip install --no-deps breakeven" in done.stderr
    assert "data parallelism must be 1" in done.stderr
    assert "NUMBA_THREADING_LAYER=workqueue" in done.stderr


def test_a_schedule_says_k_model_drafter_and_the_largest_batch(breakeven: Run, tmp_path: Path) -> None:
    path = write(tmp_path, limit=Limit("found", 24.1, 20.0, 29.0))
    done = breakeven("flags", "vllm", "--policy", f"auto:{path}")
    variables, words = pasted(done.stdout, tmp_path)
    assert variables == {"BREAKEVEN_POLICY": f"auto:{path}"}
    assert words[1] == "org/m"
    assert words[words.index("--max-num-seqs") + 1] == "25"
    config = config_of(words)
    check_table(config)
    assert (config["method"], config["model"]) == ("eagle3", "heads/it's one")
    assert config["num_speculative_tokens_per_batch_size"] == [[1, 8, 3], [9, 9, 1], [10, 25, 0]]
    # A table obeys itself: what else was measured is of no use to it.
    table = breakeven("flags", "vllm", "--policy", f"table:{path}", "--max-num-seqs", 40)
    assert config_of(pasted(table.stdout, tmp_path)[1])["num_speculative_tokens_per_batch_size"] == [
        [1, 8, 3],
        [9, 40, 0],
    ]


def test_k_beside_a_schedule_are_added_to_its_own(breakeven: Run, tmp_path: Path) -> None:
    done = breakeven("flags", "vllm", "--policy", f"auto:{write(tmp_path)}", "--k", 0, 5, "--method", "ngram")
    config = config_of(pasted(done.stdout, tmp_path)[1])
    check_table(config)
    assert config["num_speculative_tokens_per_batch_size"] == [[1, 1, 5], [2, 8, 3], [9, 256, 0]]
    assert "model" not in config
    assert "measured with eagle3, not ngram" in done.stderr


def test_the_engines_process_reads_what_was_asked_for_and_the_key_is_the_shells(breakeven: Run, tmp_path: Path) -> None:
    page = ("--host", "0.0.0.0", "--port", 9400, "--state", "it's learned", "--objective-ms", 50)
    asked = ("--policy", "fixed:2", *NGRAM, *page, "--key-from-environment")
    done = breakeven("flags", "vllm", *asked, env={"BREAKEVEN_KEY": "hush-hush"})
    assert "hush-hush" not in done.stdout + done.stderr
    assert 'BREAKEVEN_KEY="$BREAKEVEN_KEY" \\\n' in done.stdout
    variables, words = pasted(done.stdout, tmp_path, BREAKEVEN_KEY="it's $HOME")
    control = read_control(variables)
    assert control[:6] == ("fixed:2", "0.0.0.0", 9400, "it's $HOME", Path("it's learned"), 50.0)
    ks = [row[2] for row in config_of(words)["num_speculative_tokens_per_batch_size"]]
    assert policy_of(control.policy, ks).mode == 2


def test_a_drafter_with_a_cache_may_be_left_alone(breakeven: Run, tmp_path: Path) -> None:
    done = breakeven("flags", "vllm", "--deep", "--policy", f"auto:{write(tmp_path)}")
    assert read_control(pasted(done.stdout, tmp_path)[0]).deep
    assert "NUMBA" not in done.stderr  # for n-grams


def test_k_that_a_server_may_never_reach_are_named(breakeven: Run, tmp_path: Path) -> None:
    path = write(tmp_path, ranges=(Range(1, 200, 3), Range(201, 256, 0)))
    assert "K = 0 stands only beyond 128" in breakeven("flags", "vllm", "--policy", f"table:{path}").stderr
    told = breakeven("flags", "vllm", "--policy", f"table:{path}", "--max-num-seqs", 300)
    assert "stands only beyond" not in told.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--method", "ngram"), "--k is missing"),
        (("--method", "ngram", "--k", "2"), "--k 2: with one K there is nothing to choose"),
        (("--method", "ngram", "--k", "2", "2"), "--k 2: with one K there is nothing to choose"),
        (("--method", "ngram", "--k", "0", "-1"), "--k"),
        (("--method", "ngram", "--k", "0", "17"), "from 0 to 16"),
        (("--k", "0", "2"), "--method is missing"),
        (("--k", "0", "2", "--method", "eagle3"), "--draft-model"),
        ((*NGRAM, "--policy", "fast"), "the policy fast: give auto, auto:FILE"),
        ((*NGRAM, "--policy", "fixed:3"), "fixed:3: K is one of 0, 2, 4"),
        ((*NGRAM, "--policy", "table:nowhere.json"), "nowhere.json can't be read"),
        ((*NGRAM, "--max-num-seqs", "2"), "--max-num-seqs 2"),
        (
            ("--method", "suffix", "--k", "0", "2", "--deep"),
            "--deep is for eagle, eagle3, mtp, draft_model, ngram, bes",
        ),
        (("--method", "mtp", "--k", "1", "2", "--deep"), "beside --k 0"),
        ((*NGRAM, "--host", "0.0.0.0"), "--host 0.0.0.0: others than this machine may pin K there"),
        ((*NGRAM, "--port", "70000"), "--port"),
        ((*NGRAM, "--objective-ms", "nan"), "--objective-ms"),
        (("--policy", "auto:a b.json", "--model", "other"), "a b.json is for the model org/m, not other"),
        (("--policy", "table:one.json"), "one.json has only K = 2"),
        (("--policy", "table:many.json"), "K = 20, and 16 is the most"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    breakeven: Run, tmp_path: Path, args: tuple[str, ...], words: str
) -> None:
    write(tmp_path)
    (tmp_path / "one.json").write_text(Schedule(model="m", ranges=(Range(1, 9, 2),)).to_json())
    (tmp_path / "many.json").write_text(Schedule(model="m", ranges=(Range(1, 9, 20), Range(10, 19, 0))).to_json())
    done = breakeven("flags", "vllm", *args)
    assert done.returncode == 2
    assert done.stdout == ""
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_one_k_of_a_schedule_goes_with_others(breakeven: Run, tmp_path: Path) -> None:
    path = write(tmp_path, ranges=(Range(1, 64, 3),))
    done = breakeven("flags", "vllm", "--policy", f"auto:{path}", "--max-num-seqs", 64)
    table = config_of(pasted(done.stdout, tmp_path)[1])["num_speculative_tokens_per_batch_size"]
    assert {row[2] for row in table} == {0, 1, 3}
    assert shlex.split(done.stdout)[-2] == "--speculative-config"
