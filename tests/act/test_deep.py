"""What is wrapped around vLLM's methods, on stand-ins with their names; `test_vllm_served` has the real ones."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from breakeven.act.deep import MARK, install
from breakeven.act.settings import Control


class Tensor:
    """As far as it is used."""

    def new_empty(self, shape: tuple[int, ...]) -> Any:
        return SimpleNamespace(shape=shape)


class Engine:
    """A vLLM: its scheduler's part, its engine, its model runner and its drafter, which count what they are asked."""

    def __init__(self, core: type[Any], runner: type[Any]) -> None:
        self.core, self.runner = core(), runner()

    def step(self, k: int, *, deep: bool, drafts: int = 0) -> str:
        """A step that verifies so many drafts and makes k a request; says what it was."""
        output = SimpleNamespace(
            num_spec_tokens_to_schedule=k, scheduled_spec_decode_tokens={"a": [7] * drafts} if drafts else {}
        )
        setattr(output, MARK, deep)
        setattr(self.core.scheduler, MARK, k == 0)
        drafter, asked = self.runner.drafter, self.core.asked
        runs = drafter.runs
        self.runner.execute_model(output)
        shape = self.runner.sample_tokens(None)
        self.core.post_step(True)
        assert self.runner.speculative_config == "eagle3"
        assert shape is None or shape == (3, k)
        drafted = "runs" if drafter.runs > runs else "rests"
        return f"{'plain' if shape is None else drafted}{' asked' if self.core.asked > asked else ''}"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """The stand-ins, in modules of vLLM's names."""

    for field in Control._fields:
        monkeypatch.delenv(f"BREAKEVEN_{field.upper()}", raising=False)

    class SpecDecodeBaseProposer:
        runs = 0

        def propose(self, *, num_speculative_tokens: int, **kwargs: Any) -> Any:
            self.runs += 1
            return SimpleNamespace(shape=(3, num_speculative_tokens))

    class GPUModelRunner:
        use_async_scheduling = False

        def __init__(self) -> None:
            self.drafter = SpecDecodeBaseProposer()
            self.speculative_config: str | None = "eagle3"
            self.model_config = SimpleNamespace(is_hybrid=False)

        def execute_model(self, scheduler_output: Any) -> None:
            self._state = scheduler_output, self.speculative_config

        def sample_tokens(self, grammar_output: Any) -> Any:
            """The shape of the drafts; None where no drafter is known."""
            output, config = self._state
            assert config == self.speculative_config, "both halves of a step have to know the same"
            if config is None:
                return None
            return self.drafter.propose(
                num_speculative_tokens=output.num_spec_tokens_to_schedule,
                next_token_ids=Tensor(),
                common_attn_metadata=SimpleNamespace(batch_size=lambda: 3),
            ).shape

    class EngineCore:
        asked = 0
        scheduler = SimpleNamespace()

        def post_step(self, model_executed: bool) -> None:
            self.asked += model_executed

    for name, cls in (
        ("vllm.v1.worker.gpu_model_runner", GPUModelRunner),
        ("vllm.v1.spec_decode.llm_base_proposer", SpecDecodeBaseProposer),
        ("vllm.v1.engine.core", EngineCore),
    ):
        module = ModuleType(name)
        setattr(module, cls.__name__, cls)
        monkeypatch.setitem(sys.modules, name, module)
    return Engine(EngineCore, GPUModelRunner)


@pytest.mark.parametrize(("said_by", "times"), [("variable", 1), ("variable", 2), ("file", 1)])
def test_the_drafter_runs_but_where_a_step_leaves_it_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said_by: str, times: int
) -> None:
    (tmp_path / "control.json").write_text('{"deep": true}')
    if said_by == "variable":
        monkeypatch.setenv("BREAKEVEN_DEEP", "1")
    else:
        monkeypatch.setenv("BREAKEVEN_CONFIG", str(tmp_path / "control.json"))
    for _ in range(times):
        install()
    # Two drafts a step; kept in step; alone, first with drafts of the step before; kept in step; and drafts again.
    assert engine.step(2, deep=False, drafts=2) == "runs asked"
    assert engine.step(0, deep=False, drafts=2) == "runs"
    assert engine.step(0, deep=False) == "runs"
    assert engine.step(2, deep=False) == "runs asked"
    assert engine.step(0, deep=True, drafts=2) == "rests"
    assert engine.step(0, deep=True) == engine.step(0, deep=True) == "plain"
    assert engine.step(0, deep=False) == "runs"
    assert engine.step(2, deep=False) == "runs asked"
    # A mark on a step that drafts, which the scheduler does not set, changes nothing.
    assert engine.step(2, deep=True) == "runs asked"


@pytest.mark.parametrize("why", ["asynchronous", "hybrid"])
def test_where_the_drafters_side_is_needed_only_the_drafter_rests(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setenv("BREAKEVEN_DEEP", "1")
    install()
    if why == "hybrid":
        engine.runner.model_config.is_hybrid = True
    else:
        engine.runner.use_async_scheduling = True
    assert engine.step(0, deep=True) == "rests"


def test_a_runner_of_a_pipeline_that_has_no_drafter_makes_the_same_steps(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BREAKEVEN_DEEP", "1")
    install()
    first = type(engine.runner)()
    del first.drafter
    output = SimpleNamespace(num_spec_tokens_to_schedule=0, scheduled_spec_decode_tokens={}, **{MARK: True})
    first.execute_model(output)
    assert first.sample_tokens(None) is None


def test_what_fails_in_a_step_leaves_the_runner_as_it_was(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(runner: Any, scheduler_output: Any) -> None:
        raise ValueError("no memory")

    monkeypatch.setattr(type(engine.runner), "execute_model", fails)
    monkeypatch.setenv("BREAKEVEN_DEEP", "1")
    install()
    with pytest.raises(ValueError, match="no memory"):
        engine.step(0, deep=True)
    assert engine.runner.speculative_config == "eagle3"


@pytest.mark.parametrize("variables", [{}, {"BREAKEVEN_DEEP": "0"}, {"BREAKEVEN_DEEP": "1", "BREAKEVEN_PORT": "x"}])
def test_nothing_is_wrapped_where_nobody_asked_or_the_server_wont_start(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    install()
    assert engine.step(0, deep=True) == "runs asked"
