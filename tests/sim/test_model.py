"""Models as JSON: what is left out, what comes back, and what is refused in one line."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from breakeven.errors import UsageError
from breakeven.sim.model import Acceptance, EngineModel, Lengths, Noise, read_model
from tests.sim.handy import CROSSING


def test_a_model_comes_back_from_its_file(tmp_path: Path) -> None:
    model = msgspec.structs.replace(
        CROSSING,
        noise=Noise(sd=0.1),
        lengths=Lengths(median_tokens=90.0),
        acceptance=Acceptance(kinds={"code": (0.9,)}),
    )
    (tmp_path / "m.json").write_bytes(msgspec.json.encode(model))
    assert read_model(tmp_path / "m.json") == model


def test_what_a_file_leaves_out_has_its_default(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text('{"steps": {"form": "roofline", "base_ms": 30}, "max_batch": 8}')
    model = read_model(tmp_path / "m.json")
    assert (model.max_batch, model.step_ms(1, 0, drafter=False), model.noise) == (8, 30.0, Noise())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "truncated"),
        ('{"stepz": 1}', "stepz"),
        ('{"steps": {"form": "roofline", "base_ms": 0}}', r"base_ms must be above 0 - at `\$.steps`"),
        ('{"steps": {"form": "table", "points": []}}', "at least one"),
        ('{"steps": {"form": "curve"}}', "curve"),
        ('{"acceptance": {"default": [1.2]}}', "between 0 and 1"),
        ('{"acceptance": {"decay": 0}}', "decay"),
        ('{"noise": {"memory_s": 0}}', "memory_s"),
        ('{"noise": {"sd": "much"}}', "sd"),
        ('{"prefill": {"chunk_tokens": 0}}', "chunk_tokens"),
        ('{"lengths": {"median_tokens": 0}}', "median_tokens"),
        ('{"max_batch": 0}', "max_batch"),
    ],
)
def test_a_file_that_is_no_model_is_refused_in_a_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(UsageError, match=said) as raised:
        read_model(tmp_path / "m.json")
    assert str(raised.value).startswith(f"--model {tmp_path / 'm.json'}: ")
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--model .*none\.json: No such file"):
        read_model(tmp_path / "none.json")


def test_a_k_without_step_times_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--k 5: no step times for K=5: the table has K=0, K=3"):
        CROSSING.check_k(5)
    with pytest.raises(UsageError, match="--k 65"):
        EngineModel().check_k(65)


def test_positions_beyond_those_listed_decay() -> None:
    acceptance = Acceptance(default=(0.8,), kinds={"code": (0.9, 0.5)}, decay=0.5)
    assert acceptance.positions("chat", 3) == pytest.approx([0.8, 0.4, 0.2])
    assert acceptance.positions("code", 3) == pytest.approx([0.9, 0.5, 0.25])
    assert acceptance.positions("code", 1) == [0.9]


def test_a_loaded_drafter_costs_at_k_0_alone() -> None:
    model = EngineModel(residual_ms=3.0)
    assert model.step_ms(4, 0, drafter=True) - model.step_ms(4, 0, drafter=False) == pytest.approx(3.0)
    assert model.step_ms(4, 2, drafter=True) == model.step_ms(4, 2, drafter=False)
