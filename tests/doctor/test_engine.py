"""Metrics and speculation, as far as an engine tells."""

from __future__ import annotations

from typing import Any

import pytest

from breakeven.doctor.engine import engine_finding, metrics_finding, speculation_finding
from breakeven.engines.identify import Engine, Identity
from breakeven.engines.metrics import Scrape


def identity(engine: Engine = "vllm", models: tuple[str, ...] = ("m",), **config: Any) -> Identity:
    return Identity("http://host:1", engine, "1.2", models, config, ("chat",), None)


def test_the_engine_is_named_with_its_model_and_how_many_others_it_has() -> None:
    found = engine_finding(identity(models=("a", "b", "c")), "a")
    assert found.finding == "vllm 1.2 at http://host:1: model a (and 2 more: --model)"
    assert (found.state, engine_finding(identity("other"), "a").state) == ("ok", "note")


def test_metrics_that_are_off_are_told_with_the_flag_that_turns_them_on() -> None:
    found = metrics_finding("the server shows no /metrics: start it with --enable-metrics")
    assert (found.state, found.mend) == ("note", "start it with --enable-metrics")
    assert found.finding.startswith("the server shows no /metrics; ")
    assert metrics_finding(None).state == "ok"
    assert "--disable-log-stats" in (metrics_finding("the server shows no /metrics").mend or "")


@pytest.mark.parametrize(
    ("engine", "config", "configured"),
    [
        ("vllm", {"speculative_config": {"method": "eagle3"}}, True),
        ("vllm", {"speculative_config": None}, False),
        ("vllm", {"max_model_len": 1024}, None),
        ("sglang", {"speculative_algorithm": "EAGLE3"}, True),
        ("sglang", {"tp_size": 1}, False),
        ("sglang", {}, None),
        ("llama.cpp", {"speculative": True}, True),
        ("llama.cpp", {"speculative": False}, False),
    ],
)
def test_the_configuration_tells_of_speculation(
    engine: Engine, config: dict[str, Any], configured: bool | None
) -> None:
    is_speculating, found = speculation_finding(identity(engine, **config), None, None, "the server shows no /metrics")
    assert found.numbers["configured"] is configured
    assert is_speculating is bool(configured)
    assert found.state == {True: "note", False: "ok", None: "unknown"}[configured]


def test_counters_that_move_show_speculation() -> None:
    first, last = (Scrape(0, drafts=n, draft_tokens=3 * n, accepted=2 * n) for n in (10.0, 20.0))
    is_speculating, found = speculation_finding(identity(), first, last, None)
    assert is_speculating
    assert (found.state, found.finding) == ("ok", "on: 3.00 tokens per verify pass around one request")


def test_counters_that_are_not_there_leave_it_unknown() -> None:
    is_speculating, found = speculation_finding(identity(), Scrape(0), Scrape(1), None)
    assert (is_speculating, found.state) == (False, "unknown")
    assert "off, or not counted" in found.finding
