"""What is added to vLLM's scheduler, on a stand-in with its names; `test_vllm_served` has the real one.

The stand-in's steps take what the test says, in a clock of its own.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from breakeven.act import deep
from breakeven.act import vllm as act
from breakeven.act.settings import Control
from breakeven.decide.observed import DEEP, Step
from breakeven.decide.policy import Policy

TABLE = [
    0,
    4,
    2,
    0,
    0,
    0,
    0,
    0,
    0,
]  # as vLLM builds it of [[1, 1, 4], [2, 2, 2], [3, 8, 0]]; nothing asks for the first


class Scheduler:
    """As far as it is used, that of vLLM 0.32."""

    def __init__(self, vllm_config: Any) -> None:
        self.dynamic_sd_lookup: Any = list(TABLE) if vllm_config.has_table else None
        self.running: list[str] = []
        self.waiting: list[str] = []
        self._inflight_prefills: set[str] = set()
        self.kv_cache_manager = SimpleNamespace(usage=0.25)
        self.was_shut_down = False

    def schedule(self, scheduled: dict[str, int], drafts: dict[str, list[int]], new: list[str]) -> Any:
        return SimpleNamespace(
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_spec_decode_tokens=drafts,
            scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in new],
            num_spec_tokens_to_schedule=self.dynamic_sd_lookup[len(scheduled)] if scheduled else 0,
        )

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> str:
        return "outputs"

    def shutdown(self) -> None:
        self.was_shut_down = True


class AsyncScheduler(Scheduler):
    """Another one."""


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A vLLM that can be imported, and a control page at any port."""
    modules = {name: ModuleType(name) for name in ("vllm", "vllm.v1.core.sched.scheduler")}
    modules["vllm.v1.core.sched.async_scheduler"] = ModuleType("async")
    modules["vllm.v1.core.sched.scheduler"].Scheduler = Scheduler  # type: ignore[attr-defined]
    modules["vllm.v1.core.sched.async_scheduler"].AsyncScheduler = AsyncScheduler  # type: ignore[attr-defined]
    modules["vllm"].__version__ = "0.32.0"  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in Control._fields:
        monkeypatch.delenv(f"BREAKEVEN_{name.upper()}", raising=False)
    monkeypatch.setenv("BREAKEVEN_PORT", "0")
    return modules["vllm"]


def config(**changed: Any) -> Any:
    """vLLM's configuration, as far as it is looked at."""
    said = {"ranks": 1, "asynchronous": False, "speculates": True, "has_table": True, "method": "eagle3", "v2": False}
    said |= changed
    rows = [[1, 1, 4], [2, 2, 2], [3, 8, 0]] if said["has_table"] else None
    speculative = SimpleNamespace(num_speculative_tokens_per_batch_size=rows, method=said["method"])
    return SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_size=said["ranks"]),
        speculative_config=speculative if said["speculates"] else None,
        scheduler_config=SimpleNamespace(async_scheduling=said["asynchronous"]),
        use_v2_model_runner=said["v2"],
        has_table=said["has_table"],
    )


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A scheduler under `fixed:2`."""
    monkeypatch.setenv("BREAKEVEN_POLICY", "fixed:2")
    made = act.scheduler(vllm_config=config())
    yield made
    made.shutdown()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What policies are shown, in order."""
    found: list[Any] = []
    choose = Policy.choose

    def watched(self: Policy, observation: Any) -> int:
        found.append(observation)
        return choose(self, observation)

    monkeypatch.setattr(Policy, "choose", watched)
    return found


class Clock:
    """Stands for `time` in `act.vllm`."""

    now_ns = 5_000

    def monotonic_ns(self) -> int:
        return self.now_ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(act, "time", found)
    return found


def sampled(**tokens: int) -> Any:
    """What the model gave: so many tokens to each request."""
    return SimpleNamespace(
        sampled_token_ids=[[1] * count for count in tokens.values()],
        req_id_to_index={name: place for place, name in enumerate(tokens)},
    )


def test_is_vllms_own_scheduler_with_something_before_it(engine: Any) -> None:
    assert isinstance(engine, Scheduler)
    assert type(engine).__name__ == "GovernedScheduler"
    other = act.scheduler(config(asynchronous=True))
    assert isinstance(other, AsyncScheduler)
    port = other._page.server_address[1]
    socket.create_connection(("127.0.0.1", port), timeout=10).close()
    other.shutdown()
    assert other.was_shut_down
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=10)


def test_the_policys_k_stands_where_the_table_was(engine: Any) -> None:
    engine.running = ["a"]
    assert engine.schedule({"a": 1}, {}, []).num_spec_tokens_to_schedule == 2


def test_counts_requests_that_decode_and_not_those_that_are_read(engine: Any, seen: list[Any]) -> None:
    engine.running, engine.waiting, engine._inflight_prefills = ["a", "b", "c"], ["d"], {"c"}
    engine.schedule({"a": 1, "b": 1, "c": 100}, {}, [])
    (observation,) = seen
    assert (observation.decoding, observation.waiting, observation.kv_use) == (2, 1, 0.25)


def test_reports_each_step_with_its_time_drafts_and_k(engine: Any, seen: list[Any], clock: Clock) -> None:
    engine.running = ["a", "b"]
    output = engine.schedule({"a": 3, "b": 3}, {"a": [7, 7], "b": [7, 7]}, [])
    clock.now_ns = 9_000
    assert engine.update_from_output(output, sampled(a=3, b=2)) == "outputs"
    clock.now_ns = 9_500  # what vLLM does between two steps is part of the second
    output = engine.schedule({"a": 3, "b": 3}, {"a": [7, 7], "b": [7, 7]}, [])
    clock.now_ns = 12_000
    engine.update_from_output(output, sampled(a=1, b=1))
    engine.schedule({"a": 1, "b": 1}, {}, [])
    assert [observation.last for observation in seen] == [
        None,
        Step(5_000, 4_000, decoding=2, k=2, drafts=2, accepted=(2, 1), prefill_tokens=0),
        Step(9_000, 3_000, decoding=2, k=2, drafts=2, accepted=(0, 0), prefill_tokens=0),
    ]


def test_a_pause_belongs_to_no_step(engine: Any, seen: list[Any], clock: Clock) -> None:
    engine.running = ["a"]
    output = engine.schedule({"a": 1}, {}, [])
    engine.running = []
    engine.update_from_output(output, sampled(a=1))
    clock.now_ns = 1_000_000
    engine.running = ["b"]
    output = engine.schedule({"b": 1}, {}, [])
    clock.now_ns = 1_002_000
    engine.update_from_output(output, sampled(b=1))
    engine.schedule({"b": 1}, {}, [])
    assert seen[-1].last.step_ns == 2_000


def test_of_two_steps_under_way_each_lasts_from_the_end_of_the_other(
    engine: Any, seen: list[Any], clock: Clock
) -> None:
    engine.running = ["a"]
    first = engine.schedule({"a": 1}, {}, [])
    clock.now_ns = 6_000
    second = engine.schedule({"a": 1}, {}, [])
    clock.now_ns = 8_000
    engine.update_from_output(first, sampled(a=1))
    clock.now_ns = 11_000
    engine.update_from_output(second, sampled(a=1))
    engine.schedule({"a": 1}, {}, [])
    assert (seen[-1].last.begun_ns, seen[-1].last.step_ns) == (8_000, 3_000)


def test_prompts_that_are_read_are_told_from_requests_that_decode() -> None:
    assert act.decoded({"a": 1, "b": 3}, {"b": [1, 2]}, set()) == (2, 0)
    assert act.decoded({"a": 1, "b": 3, "new": 1}, {"b": [1, 2]}, {"new"}) == (2, 1)
    assert act.decoded({"a": 1, "read on": 512}, {}, set()) == (1, 512)
    assert act.decoded({"new": 40}, {}, {"new"}) == (0, 40)


@pytest.mark.parametrize("lacks", ["kv_cache_manager", "_inflight_prefills", "waiting"])
def test_the_servers_own_table_decides_where_a_signal_is_missing(engine: Any, lacks: str) -> None:
    engine.running = ["a"]
    delattr(engine, lacks)
    assert engine.schedule({"a": 1}, {}, []).num_spec_tokens_to_schedule == 4
    assert engine._governor.faults == {"load": 1}


def test_an_output_of_another_form_is_counted_and_reaches_nobody(engine: Any) -> None:
    engine.running = ["a"]
    output = engine.schedule({"a": 2}, {"a": [7]}, [])
    assert engine.update_from_output(output, SimpleNamespace()) == "outputs"
    assert engine.update_from_output(SimpleNamespace(), SimpleNamespace()) == "outputs"
    assert engine._governor.faults == {"step": 2}
    assert engine.schedule({"a": 1}, {}, []).num_spec_tokens_to_schedule == 2


@pytest.mark.parametrize(
    ("changed", "policy", "says"),
    [
        ({"ranks": 2}, "auto", "--data-parallel-size 2: .* behind a router"),
        ({"speculates": False}, "auto", "no --speculative-config: `breakeven flags vllm` prints one"),
        ({"has_table": False}, "auto", "no num_speculative_tokens_per_batch_size.*breakeven flags vllm"),
        ({}, "fixed:3", "the policy fixed:3: K is one of 0, 2, 4 here"),
        ({}, "outo", "the policy outo: give auto"),
        ({}, "table:none.json", "none.json"),
    ],
)
def test_says_in_a_line_why_a_server_cant_be_controlled(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], policy: str, says: str
) -> None:
    monkeypatch.setenv("BREAKEVEN_POLICY", policy)
    with pytest.raises(RuntimeError, match=rf"^breakeven: .*{says}") as caught:
        act.scheduler(vllm_config=config(**changed))
    assert "\n" not in str(caught.value)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that may be left alone, of a breakeven that is installed as a plugin, in this environment or not."""
    found = [EntryPoint("breakeven", "breakeven.act.deep:install", "vllm.general_plugins")]
    monkeypatch.setattr(deep, "entry_points", lambda group: [each for each in found if each.group == group])
    monkeypatch.setenv("BREAKEVEN_DEEP", "1")
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)


@pytest.mark.usefixtures("plugin")
def test_a_step_that_leaves_the_drafter_alone_is_marked_and_told_apart(
    seen: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BREAKEVEN_POLICY", "fixed:0")
    engine = act.scheduler(vllm_config=config())
    engine.running = ["a"]
    outputs = []
    for k in (DEEP, 2, 0):
        engine._governor.pin(k, 60)
        outputs.append(engine.schedule({"a": 1}, {}, []))
        engine.update_from_output(outputs[-1], sampled(a=1))
        assert getattr(engine, deep.MARK) == (k != 2)
    engine.schedule({"a": 1}, {}, [])
    assert [output.num_spec_tokens_to_schedule for output in outputs] == [0, 2, 0]
    assert [getattr(output, deep.MARK) for output in outputs] == [True, False, False]
    assert [observation.last.k for observation in seen[1:]] == [DEEP, 2, 0]
    engine.shutdown()


@pytest.mark.usefixtures("plugin")
def test_n_grams_are_left_alone_at_each_step_of_k_0_and_the_policy_has_nothing_to_weigh(
    seen: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BREAKEVEN_POLICY", "fixed:0")
    engine = act.scheduler(vllm_config=config(method="ngram"))
    engine.running = ["a"]
    outputs = []
    for k in (0, 2):
        engine._governor.pin(k, 60)
        outputs.append(engine.schedule({"a": 1}, {}, []))
        engine.update_from_output(outputs[-1], sampled(a=1))
    engine.schedule({"a": 1}, {}, [])
    assert [getattr(output, deep.MARK) for output in outputs] == [True, False]
    assert [observation.last.k for observation in seen[1:]] == [0, 2]
    assert DEEP not in engine._governor.ks
    engine.shutdown()


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    ("changed", "variables", "says"),
    [
        ({"method": "suffix"}, {}, "the drafter suffix is none of eagle, eagle3, mtp, draft_model, ngram"),
        ({"v2": True}, {}, "VLLM_USE_V2_MODEL_RUNNER=0"),
        ({}, {"VLLM_PLUGINS": "lora"}, "VLLM_PLUGINS=lora leaves breakeven out"),
    ],
)
def test_says_in_a_line_why_the_drafter_cant_be_left_alone(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], variables: dict[str, str], says: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=rf"^breakeven: BREAKEVEN_DEEP: .*{says}"):
        act.scheduler(vllm_config=config(**changed))


@pytest.mark.usefixtures("plugin")
def test_a_breakeven_that_is_no_plugin_cant_leave_the_drafter_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep, "entry_points", lambda group: [])
    with pytest.raises(RuntimeError, match="not installed as a plugin"):
        act.scheduler(vllm_config=config())


def test_a_vllm_that_nobody_tried_needs_a_word(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    vllm.__version__ = "0.35.1"
    with pytest.raises(RuntimeError, match=r"vLLM 0\.35\.1 was not tried.*BREAKEVEN_UNTRIED=1"):
        act.scheduler(vllm_config=config())
    monkeypatch.setenv("BREAKEVEN_UNTRIED", "1")
    act.scheduler(vllm_config=config()).shutdown()


def test_what_was_learned_is_written_at_the_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "learned.json"
    monkeypatch.setenv("BREAKEVEN_STATE", str(path))
    act.scheduler(vllm_config=config()).shutdown()
    assert path.exists()
