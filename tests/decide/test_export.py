"""Flags that the engines take, and what they would refuse."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from breakeven.decide.drafter import drafter_of, k_of
from breakeven.decide.export import Engine, check_shapes, export, export_for
from breakeven.decide.schedule import Range, Schedule
from breakeven.errors import UsageError
from tests.decide.arms import manifest

EAGLE = {"method": "eagle3", "model": "heads/a b"}


def schedule(*ranges: tuple[int, int, int], **fields: Any) -> Schedule:
    known: dict[str, Any] = {"engine": "vllm", "method": "eagle3", "speculation": EAGLE}
    return Schedule(model="m", ranges=tuple(Range(*each) for each in ranges), **(known | fields))


FALLING = schedule((1, 4, 3), (5, 9, 1), (10, 64, 0))
RISING = schedule((1, 4, 0), (5, 64, 3))


def vllm_config(found: Schedule) -> dict[str, object]:
    flag, text = shlex.split(export(found, "vllm").flags)
    assert flag == "--speculative-config"
    config: dict[str, object] = json.loads(text)
    return config


def test_vllm_gets_its_table_as_one_word_of_a_shell() -> None:
    assert vllm_config(FALLING) == {
        **EAGLE,
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 9, 1], [10, 64, 0]],
    }
    assert "'" in export(FALLING, "vllm").flags


def test_one_draft_length_at_every_load_needs_no_table() -> None:
    single = schedule((1, 64, 2))
    assert vllm_config(single) == {**EAGLE, "num_speculative_tokens": 2}
    assert "--speculative-adaptive" not in export(single, "sglang").flags
    assert "draft_len_schedule" not in export(single, "tensorrt-llm").files["tensorrt-llm.yaml"]


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
def test_where_no_draft_pays_there_are_no_flags(engine: Engine) -> None:
    found = export(schedule((1, 64, 0)), engine)
    assert found.flags == ""
    assert "without speculation" in found.notes[0]


def test_a_drafter_that_nobody_told_leaves_a_place_for_it_and_says_so() -> None:
    found = export(replace(FALLING, method=None, speculation={}), "vllm")
    assert '"method":"…"' in found.flags
    assert found.notes[0].startswith("the server doesn't tell its drafter")
    without_head = export(replace(FALLING, speculation={"method": "eagle3"}), "vllm")
    assert '"model":"…"' in without_head.flags
    ngram = replace(FALLING, method="ngram", speculation={"method": "ngram", "prompt_lookup_max": 4})
    assert "…" not in export(ngram, "vllm").flags


def test_sglang_gets_tiers_of_a_single_candidate() -> None:
    found = export(FALLING, "sglang")
    words = shlex.split(found.flags)
    assert words[words.index("--speculative-algorithm") + 1] == "EAGLE3"
    assert words[words.index("--speculative-draft-model-path") + 1] == "heads/a b"
    assert words[words.index("--speculative-eagle-topk") + 1] == "1"
    assert words[words.index("--speculative-num-steps") + 1] == "3"
    assert words[words.index("--speculative-num-draft-tokens") + 1] == "4"
    tiers = json.loads(found.files[words[words.index("--speculative-adaptive-config") + 1]])
    assert tiers == {"1": {"candidate_steps": [3]}, "5": {"candidate_steps": [1]}, "10": {"candidate_steps": [0]}}


def test_sglang_switches_only_eagle() -> None:
    with pytest.raises(UsageError, match="only EAGLE and EAGLE3 while it runs, not ngram"):
        export(replace(FALLING, method="ngram", speculation={"method": "ngram"}), "sglang")
    own = replace(FALLING, method="NEXTN", speculation={"speculative_algorithm": "NEXTN"})
    assert "--speculative-algorithm EAGLE " in export(own, "sglang").flags


def test_tensorrt_llm_gets_the_ends_of_ranges_and_no_row_for_nothing() -> None:
    found = export(FALLING, "tensorrt-llm")
    assert found.flags == "--extra_llm_api_options tensorrt-llm.yaml"
    assert found.files["tensorrt-llm.yaml"] == (
        'speculative_config:\n  decoding_type: Eagle3\n  max_draft_len: 3\n  speculative_model: "heads/a b"\n'
        "  draft_len_schedule:\n    4: 3\n    9: 1\n"
    )
    assert not found.notes
    goes_on = export(schedule((1, 4, 3), (5, 64, 1)), "tensorrt-llm")
    assert "    64: 1\n" in goes_on.files["tensorrt-llm.yaml"]
    assert "drafts nothing above 64" in goes_on.notes[0]


def test_tensorrt_llm_refuses_a_table_that_rises() -> None:
    with pytest.raises(UsageError, match="smallest batches must draft the most"):
        export(RISING, "tensorrt-llm")
    assert vllm_config(RISING)["num_speculative_tokens_per_batch_size"] == [[1, 4, 0], [5, 64, 3]]


def test_json_is_the_file_itself() -> None:
    assert export(FALLING, "json").flags == FALLING.to_json()


def test_an_engine_has_its_form_and_others_have_json() -> None:
    assert [export_for(engine) for engine in ("vllm", "sglang", "llama.cpp", None)] == [
        "vllm",
        "sglang",
        "json",
        "json",
    ]


def test_what_an_engine_cant_switch_is_refused_before_anything_is_measured() -> None:
    check_shapes("vllm", [0, 1, 3])
    check_shapes("sglang", [0, 1], [4])
    check_shapes("json", [0, 0], [4])
    with pytest.raises(UsageError, match="its table has no top-k"):
        check_shapes("vllm", [0, 1], [4])
    with pytest.raises(UsageError, match="only between configurations of top-k 1"):
        check_shapes("sglang", [0], [4, 8])
    with pytest.raises(UsageError, match="every K is 0"):
        check_shapes("vllm", [0])


def test_the_drafter_is_found_in_the_configuration_or_the_command() -> None:
    config = {"speculative_config": EAGLE | {"num_speculative_tokens": 3, "draft_tensor_parallel_size": None}}
    assert drafter_of(manifest("a", [], target={"config": config})) == ("eagle3", EAGLE)
    assert k_of(config) == 3
    filled = {"prompt_lookup_max": 0, "prompt_lookup_min": 0}  # which vLLM says of EAGLE-3 and takes from nobody
    running = {"speculative_config": EAGLE | filled}
    assert drafter_of(manifest("a", [], target={"config": running})) == ("eagle3", EAGLE)
    resolved = {"speculative_config": {"method": "ngram", "model": "ngram", "prompt_lookup_max": 4}}
    own_words = {"method": "ngram", "prompt_lookup_max": 4}
    assert drafter_of(manifest("a", [], target={"config": resolved})) == ("ngram", own_words)
    assert k_of({"speculative_config": None}) == 0
    command = 'vllm serve M --port {port} --speculative-config \'{"method":"ngram","num_speculative_tokens":4}\''
    assert drafter_of(manifest("a", [], flags={"serve": command})) == ("ngram", {"method": "ngram"})
    own = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "p", "speculative_num_steps": 5}
    assert drafter_of(manifest("a", [], target={"config": own})).method == "EAGLE3"
    assert k_of(own) == 5
    assert drafter_of(manifest("a", [], flags={"vllm": "ngram:4"})).method == "ngram"
    assert drafter_of(manifest("a", [], flags={"vllm": "off"})) == (None, {})
    assert k_of({}) is None


# ---- the engines' own code, where it is there ----


@pytest.fixture(scope="module")
def vllm_python() -> Path:
    """The interpreter of an environment with vLLM."""
    for place in (os.environ.get("BREAKEVEN_VLLM_PYTHON"), ".venv-vllm/bin/python"):
        if place and Path(place).exists():
            return Path(place)
    pytest.skip("no vLLM here (make vllm, or BREAKEVEN_VLLM_PYTHON)")


def test_vllms_own_code_reads_the_table_as_it_was_meant(vllm_python: Path) -> None:
    tables = [vllm_config(each)["num_speculative_tokens_per_batch_size"] for each in (FALLING, RISING)]
    # By its file: the package itself takes some seconds to import.
    code = (
        "import importlib.util, json, sys\n"
        "root = importlib.util.find_spec('vllm').submodule_search_locations[0]\n"
        "spec = importlib.util.spec_from_file_location('utils', root + '/v1/spec_decode/dynamic/utils.py')\n"
        "utils = importlib.util.module_from_spec(spec); spec.loader.exec_module(utils)\n"
        "print(json.dumps([utils.build_dynamic_sd_schedule_lookup(t, 128, 3) for t in json.loads(sys.argv[1])]))\n"
    )
    done = subprocess.run(
        [str(vllm_python), "-c", code, json.dumps(tables)], capture_output=True, text=True, timeout=120, check=True
    )
    for found, lookup in zip((FALLING, RISING), json.loads(done.stdout), strict=True):
        assert lookup[1:] == [found.k_at(batch) for batch in range(1, 129)]
