"""What is wrapped around vLLM's methods, on stand-ins with their names; `test_vllm_served` has the real ones."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from breakeven.act.deep import MARK, install
from breakeven.act.settings import Control

RUNNER, PROPOSER = "vllm.v1.worker.gpu_model_runner", "vllm.v1.spec_decode.llm_base_proposer"


class Tensor:
    """As far as it is used."""

    def new_empty(self, shape: tuple[int, ...]) -> Any:
        return SimpleNamespace(shape=shape)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model runner whose drafter counts how often it runs."""

    for field in Control._fields:
        monkeypatch.delenv(f"BREAKEVEN_{field.upper()}", raising=False)

    class SpecDecodeBaseProposer:
        runs = 0

        def propose(self, *, num_speculative_tokens: int, **kwargs: Any) -> Any:
            self.runs += 1
            return SimpleNamespace(shape=(3, num_speculative_tokens))

    class GPUModelRunner:
        def __init__(self) -> None:
            self.drafter = SpecDecodeBaseProposer()

        def propose_draft_token_ids(self, scheduler_output: Any) -> Any:
            batch = SimpleNamespace(batch_size=lambda: 3)
            return self.drafter.propose(
                num_speculative_tokens=scheduler_output.num_spec_tokens_to_schedule,
                next_token_ids=Tensor(),
                common_attn_metadata=batch,
            )

    for name, cls in ((RUNNER, GPUModelRunner), (PROPOSER, SpecDecodeBaseProposer)):
        module = ModuleType(name)
        setattr(module, cls.__name__, cls)
        monkeypatch.setitem(sys.modules, name, module)
    return GPUModelRunner()


def step(runner: Any, k: int, *, deep: bool) -> tuple[int, ...]:
    """The shape of the drafts of a step."""
    marked = {MARK: True} if deep else {}
    shape: tuple[int, ...] = runner.propose_draft_token_ids(
        SimpleNamespace(num_spec_tokens_to_schedule=k, **marked)
    ).shape
    return shape


@pytest.mark.parametrize(("said_by", "times"), [("variable", 1), ("variable", 2), ("file", 1)])
def test_the_drafter_runs_but_where_a_step_leaves_it_alone(
    runner: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said_by: str, times: int
) -> None:
    (tmp_path / "control.json").write_text('{"deep": true}')
    if said_by == "variable":
        monkeypatch.setenv("BREAKEVEN_DEEP", "1")
    else:
        monkeypatch.setenv("BREAKEVEN_CONFIG", str(tmp_path / "control.json"))
    for _ in range(times):
        install()
    shapes = [step(runner, k, deep=deep) for k, deep in ((2, False), (0, False), (0, True), (0, True), (0, False))]
    assert shapes == [(3, 2), (3, 0), (3, 0), (3, 0), (3, 0)]
    assert runner.drafter.runs == 3
    # A mark on a step that drafts, which the scheduler does not set, changes nothing.
    assert step(runner, 2, deep=True) == (3, 2)


@pytest.mark.parametrize("variables", [{}, {"BREAKEVEN_DEEP": "0"}, {"BREAKEVEN_DEEP": "1", "BREAKEVEN_PORT": "x"}])
def test_nothing_is_wrapped_where_nobody_asked_or_the_server_wont_start(
    runner: Any, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    install()
    assert step(runner, 0, deep=True) == (3, 0)
    assert runner.drafter.runs == 1
