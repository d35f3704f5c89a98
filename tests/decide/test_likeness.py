"""What may be compared with what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from breakeven.decide.likeness import check_alike, check_servers, config_differences, speculation_of
from breakeven.errors import UsageError
from breakeven.records import LevelPlan, Manifest
from tests.decide.arms import manifest


def closed(loads: Sequence[int] = (1, 2), max_tokens: int = 512) -> list[LevelPlan]:
    return [LevelPlan(index=i, run=0, concurrency=load, max_tokens=max_tokens) for i, load in enumerate(loads)]


def opened(rates: Sequence[float] = (1.0, 2.0), **fields: Any) -> list[LevelPlan]:
    known: dict[str, Any] = {"run": 0, "mode": "open", "arrivals": "poisson", "max_tokens": 512}
    return [LevelPlan(index=i, rate=rate, **(known | fields)) for i, rate in enumerate(rates)]


def pair(other: Manifest, reference: Manifest | None = None) -> dict[str, Manifest]:
    return {"off": reference or manifest("off", closed()), "on": other}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model": "another"}, r"the model \(m against another\)"),
        (
            {"prompts": {"source": "mine.jsonl", "sha256": "def"}},
            r"the prompts \(built-in abc against mine.jsonl def\)",
        ),
        ({"seed": 3}, r"--seed \(0 against 3\)"),
        ({"flags": {"temperature": 0.7}}, r"--temperature \(0.0 against 0.7\)"),
        ({"flags": {"ignore_eos": True}}, r"--ignore-eos \(False against True\)"),
        ({"flags": {"extra_body": {"top_k": 1}}}, r"--extra-body"),
        ({"flags": {"unique": True}}, r"--unique"),
        ({"flags": {"ramp": False}}, r"--no-ramp"),
        ({"host": {"cpu": "a cpu", "cores": 64}}, r"the client's cores \(2 against 64\)"),
        ({"host": {"cpu": "another", "cores": 2}}, r"the client's processor \(a cpu against another\)"),
        ({"target": {"api": "completions"}}, r"--api \(chat against completions\)"),
        ({"target": {"loopback": True}}, r"the server's place \(elsewhere against beside the client\)"),
        ({"levels": closed(max_tokens=128)}, r"--max-tokens \(512 against 128\)"),
    ],
)
def test_unlike_runs_are_refused_with_the_difference_and_the_mend(fields: dict[str, Any], named: str) -> None:
    other = manifest("on", fields.pop("levels", closed()), **fields)
    with pytest.raises(UsageError, match=f"^on is unlike off: {named}.*--force$") as raised:
        check_alike(pair(other), force=False)
    assert "\n" not in str(raised.value)
    assert len(check_alike(pair(other), force=True)) == 1


def test_all_differences_stand_in_one_line() -> None:
    other = manifest("on", closed(), model="another", seed=7)
    with pytest.raises(UsageError, match=r"the model .*; --seed "):
        check_alike(pair(other), force=False)


def test_a_servers_machine_counts_where_both_are_known() -> None:
    here = {"cpu": "a", "cores": 8, "gpus": ["NVIDIA H200, 143771 MiB, 570.1"]}
    newer_driver = here | {"gpus": ["NVIDIA H200, 143771 MiB, 580.2"]}
    other_gpu = here | {"gpus": ["NVIDIA A10, 24 GiB, 570.1"]}
    off = manifest("off", closed(), server_host=here)
    assert check_alike(pair(manifest("on", closed()), off), force=False) == []
    assert check_alike(pair(manifest("on", closed(), server_host=newer_driver), off), force=False) == []
    with pytest.raises(UsageError, match="the server's machine"):
        check_alike(pair(manifest("on", closed(), server_host=other_gpu), off), force=False)


def test_engine_version_and_configuration_never_refuse() -> None:
    other = manifest(
        "on", closed(), target={"engine": "sglang", "version": "2", "config": {"speculative_num_steps": 3}}
    )
    assert check_alike(pair(other), force=False) == []
    found = {each.name: (each.reference, each.other) for each in config_differences(manifest("off", closed()), other)}
    assert found == {"engine": ("vllm", "sglang"), "version": ("0.32.0", "2"), "speculative_num_steps": (None, 3)}


def test_answers_to_random_words_ignore_the_end_by_default() -> None:
    words = {"source": "random:128", "sha256": "abc"}
    off = manifest("off", closed(), prompts=words)
    on = manifest("on", closed(), prompts=words, flags={"ignore_eos": True})
    assert check_alike(pair(on, off), force=False) == []


def test_closed_and_open_loops_are_never_compared() -> None:
    other = manifest("on", opened())
    for force in (False, True):
        with pytest.raises(UsageError, match=r"off is closed; on is open; measure all with --concurrency or all"):
            check_alike(pair(other), force=force)


def test_loads_that_are_not_shared_are_listed() -> None:
    with pytest.raises(UsageError, match=r"no load in common: off has C=1, C=2; on has C=4, C=16; measure the same"):
        check_alike(pair(manifest("on", closed((16, 4)))), force=True)
    assert check_alike(pair(manifest("on", closed((2, 4)))), force=False) == []


def test_open_loads_have_to_come_alike() -> None:
    off = manifest("off", opened())
    assert check_alike(pair(manifest("on", opened()), off), force=False) == []
    with pytest.raises(UsageError, match=r"--arrivals \(poisson against constant\)"):
        check_alike(pair(manifest("on", opened(arrivals="constant")), off), force=False)
    with pytest.raises(UsageError, match=r"--max-in-flight \(0 against 8\)"):
        check_alike(pair(manifest("on", opened(max_in_flight=8)), off), force=False)


def test_one_length_of_answers_is_compared_at_a_time() -> None:
    both = [*closed(max_tokens=128), *closed(max_tokens=512)]
    with pytest.raises(UsageError, match=r"off has answers of several lengths \(--max-tokens 128, 512\)"):
        check_alike(pair(manifest("on", both), manifest("off", both)), force=True)
    assert check_alike(pair(manifest("on", both)), force=False) == []  # the one that the other has


def test_of_three_arms_no_two_are_the_same_server() -> None:
    arms = {name: manifest(name, closed()) for name in ("off", "k1", "k3")}
    assert check_servers(arms, force=False) == []
    arms["k3"].target["url"] = arms["k1"].target["url"]
    with pytest.raises(UsageError, match=r"^k1 and k3 are the same server \(http://k1:8000\): name each server once$"):
        check_servers(arms, force=False)
    assert check_servers(arms, force=True) == ["--force: k1 and k3 are the same server (http://k1:8000)"]
    del arms["off"]
    assert check_servers(arms, force=False) == []  # two may be: A/A


def test_servers_that_breakeven_started_are_never_the_same() -> None:
    same_port = {"target": {"url": "http://127.0.0.1:8000"}}
    arms = {name: manifest(name, closed(), flags={"serve": f"vllm {name}"}, **same_port) for name in ("a", "b", "c")}
    assert check_servers(arms, force=False) == []


def test_a_server_that_was_restarted_otherwise_is_another() -> None:
    arms = {
        f"k{k}": manifest("a", closed(), target={"url": "http://a:1", "config": {"speculative_num_steps": k}})
        for k in (0, 1, 3)
    }
    assert check_servers(arms, force=False) == []


def test_what_a_server_tells_of_speculation() -> None:
    config = {"max_model_len": 4096, "speculative_config": {"method": "eagle3", "num_speculative_tokens": 3}}
    assert speculation_of(manifest("on", closed(), target={"config": config})) == {
        "speculative_config.method": "eagle3",
        "speculative_config.num_speculative_tokens": 3,
    }
