"""`--serve`: any command as the server, on this machine."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from breakeven.engines.serve import parse_command, serve
from breakeven.errors import EngineError, RunError, UsageError
from breakeven.host import cpu_model, cuda_version, describe_host, gpu_lines
from tests.engines.processes import PYTHONPATH, TREE, has_run, marked, new_marker, within

PYTHON = shlex.quote(sys.executable)
NULL_SERVER = f"{PYTHON} -m breakeven.engines.null --port {{port}}"
SECRET = "sk-7f3a-very-secret"

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")

HOLDER = """
import sys, time
from tests.engines.processes import has_run, within
from breakeven.engines import serve
serve.STOP_GRACE_S = 0.3
with serve.serve(sys.argv[1], start_timeout_s=30, say=print) as server:
    assert within(20, lambda: has_run(server.log_tail(9)))
    print("all up", flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs of failed starts stay; let them stay here."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def script(tmp_path: Path, code: str) -> str:
    """The command that runs `code`."""
    path = tmp_path / "server.py"
    path.write_text(code)
    return f"{PYTHON} {shlex.quote(str(path))}"


def no_word(_: str) -> None:
    pass


def test_a_command_is_served_on_a_free_port_and_described() -> None:
    said: list[str] = []
    with serve(NULL_SERVER, start_timeout_s=30, say=said.append) as server:
        hello = json.loads(server.log_tail(1)[0])
        assert server.exit_code() is None
        description = server.describe()
    assert server.url == f"http://127.0.0.1:{hello['port']}"
    assert said == [f"starting {NULL_SERVER} on port {hello['port']}"]
    assert description["command"] == NULL_SERVER
    assert description["host"].items() <= describe_host().items()
    assert description["host"].keys() == {"cpu", "cores", "memory_gib", "system", "gpus", "cuda"}


def test_the_port_goes_in_wherever_it_is_named_and_other_braces_stay() -> None:
    command = parse_command("""A={port} B=x=y serve {model} --config '{"k": {"port": {port}}}' --port={port}""").at(81)
    assert command.words == ("serve", "{model}", "--config", '{"k": {"port": 81}}', "--port=81")
    assert command.environment == {"A": "81", "B": "x=y"}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("vllm serve M --port 8000", r"vllm …, has no \{port\}: .*--serve \"vllm serve MODEL --port \{port\}\""),
        ("vllm serve 'M --port {port}", "no closing quotation: check --serve's quotes"),
        ("", "there is no command to serve: .*--serve"),
        ("CUDA_VISIBLE_DEVICES={port}", "there is no command to serve: .*--serve"),
    ],
)
def test_what_is_no_command_is_refused_with_the_mend(command: str, message: str) -> None:
    with pytest.raises(UsageError, match=message), serve(command, start_timeout_s=1, say=no_word):
        pass


@pytest.mark.parametrize("program", ["no-such-server", "~/bin/server", "/no/such/server"])
def test_a_program_that_is_not_there_is_named_with_the_mend(program: str) -> None:
    with (
        pytest.raises(EngineError, match=f"^can't run {program}: --serve needs a program that is on PATH, or"),
        serve(f"{program} {{port}}", start_timeout_s=1, say=no_word),
    ):
        pass


def test_variables_before_the_program_are_its_environment(tmp_path: Path) -> None:
    code = "import os, sys; print(os.environ['GREETING'], sys.argv[1:], 'HOME' in os.environ)"
    command = f"GREETING='well met' {script(tmp_path, code)} {{port}} '{{\"k\": 1}}'"
    with (
        pytest.raises(EngineError, match=r"""ends: well met \['\d+', '\{"k": 1\}'\] True$"""),
        serve(command, start_timeout_s=20, say=no_word),
    ):
        pass


def test_the_program_is_looked_for_on_the_path_given_before_it(tmp_path: Path) -> None:
    program = tmp_path / "my-server"
    program.write_text(f"#!/bin/sh\nexec {NULL_SERVER.replace('{port}', '$1')}\n")
    program.chmod(0o755)
    path = shlex.quote(f"{tmp_path}:{os.environ['PATH']}")
    with serve(f"PATH={path} my-server {{port}}", start_timeout_s=30, say=no_word) as server:
        assert server.exit_code() is None


def test_a_start_that_failed_leaves_the_log_and_names_it(tmp_path: Path) -> None:
    command = f"{script(tmp_path, 'print(1); raise SystemExit(3)')} {{port}}"
    with pytest.raises(EngineError) as caught, serve(command, start_timeout_s=20, say=no_word):
        pass
    (log,) = tmp_path.glob("breakeven-*/server.log")
    assert str(caught.value) == f"the server exited with 3 before it answered; its log ({log}) ends: 1"


def test_a_temporary_log_goes_with_the_server_and_a_given_one_stays(tmp_path: Path) -> None:
    with serve(NULL_SERVER, start_timeout_s=30, say=no_word) as server:
        server.save_log(tmp_path / "copy.log")
    assert "port" in (tmp_path / "copy.log").read_text()
    assert list(tmp_path.glob("breakeven-*")) == []
    with serve(NULL_SERVER, start_timeout_s=30, say=no_word, log_path=tmp_path / "given.log"):
        pass
    assert "port" in (tmp_path / "given.log").read_text()


def test_waiting_is_said_now_and_then_and_silence_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("breakeven.engines.serve.SAY_EVERY_S", 0.4)
    said: list[str] = []
    command = (
        f"{script(tmp_path, 'import time; print(9 * chr(10) + 200 * chr(108), flush=True); time.sleep(600)')} {{port}}"
    )
    with (
        pytest.raises(
            EngineError, match=r"did not answer http://127.0.0.1:\d+/health within 1.5 s; its log .* ends: lll"
        ),
        serve(command, start_timeout_s=1.5, say=said.append, log_path=tmp_path / "log"),
    ):
        pass
    assert 1 <= len(said) - 1 <= 3
    assert re.fullmatch(r"waiting for the server, \d s; its log: l{100}…", said[-1])


def test_secrets_are_in_no_word_of_ours(tmp_path: Path) -> None:
    code = "import os, sys, time; print(sys.argv, os.environ['HF_TOKEN'], flush=True); raise SystemExit(3)"
    command = f"HF_TOKEN={SECRET}1 {script(tmp_path, code)} --api-key {SECRET}2 --key={SECRET}3 --port {{port}}"
    said: list[str] = []
    with pytest.raises(EngineError) as caught, serve(command, start_timeout_s=20, say=said.append):
        pass
    assert SECRET not in f"{caught.value} {said}"
    assert said[0].startswith("starting HF_TOKEN=*** ")


def test_a_saved_log_and_a_manifest_hold_no_secret(tmp_path: Path) -> None:
    command = f"sh -c 'echo $0; exec {NULL_SERVER}' --api-key={SECRET}"
    with serve(command, start_timeout_s=30, say=no_word) as server:
        server.save_log(tmp_path / "log")
        assert SECRET not in json.dumps(server.describe())
    assert (tmp_path / "log").read_text().startswith("--api-key=***\n")


@pytest.mark.parametrize(
    "command",
    [
        f"sh -c 'exec serve --api-key {SECRET} --port $0' {{port}}",
        f"sh -c 'HF_TOKEN={SECRET}; serve --port {{port}}'",
        f'sh -c "serve --api-key={SECRET}&&true" {{port}}',
        f"sh -c 'serve --api-key {SECRET} it'\"'\"'s' {{port}}",
        f"env HF_TOKEN={SECRET} serve --port {{port}}",
        f"HTTPS_PROXY=http://me:{SECRET}@proxy:3128 serve --port {{port}}",
        f"serve --port {{port}} --hub https://me:{SECRET}@hub",
    ],
)
def test_secrets_are_found_where_a_shell_or_a_url_holds_them(command: str) -> None:
    assert SECRET not in parse_command(command).shown()


def test_the_log_of_a_start_that_failed_holds_no_secret(tmp_path: Path) -> None:
    command = f"{script(tmp_path, 'import sys; print(sys.argv[2]); raise SystemExit(3)')} --api-key {SECRET} {{port}}"
    with pytest.raises(EngineError), serve(command, start_timeout_s=20, say=no_word):
        pass
    (log,) = tmp_path.glob("breakeven-*/server.log")
    assert log.read_text() == "***\n"


def test_a_log_that_has_no_room_is_an_error_in_one_line() -> None:
    words = "^the server's log, /dev/full, can't be written: No space left on device"
    with serve(NULL_SERVER, start_timeout_s=30, say=no_word) as server, pytest.raises(RunError, match=words):
        server.save_log(Path("/dev/full"))


def test_placeholders_and_lengths_are_no_secrets() -> None:
    command = parse_command("serve --api-key EMPTY --max-tokens 12345678 --tokenizer some-tokenizer --port {port}")
    assert command.secrets == ()


@on_linux
def test_nothing_of_a_served_command_is_left_when_we_are_killed_outright(tmp_path: Path) -> None:
    marker = new_marker()
    command = [sys.executable, "-c", HOLDER, f"{script(tmp_path, TREE)} {{port}} {marker}"]
    env = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": PYTHONPATH}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True) as holder:
        assert holder.stdout is not None
        assert any(line == "all up\n" for line in holder.stdout)
        alive = marked(marker)
        holder.kill()
    assert len(alive) == 6
    assert within(30, lambda: marked(marker) == [])


@on_linux
def test_nothing_of_a_served_command_is_left_when_its_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("breakeven.engines.serve.STOP_GRACE_S", 0.3)
    marker = new_marker()
    with serve(f"{script(tmp_path, TREE)} {{port}} {marker}", start_timeout_s=30, say=no_word) as server:
        assert within(20, lambda: has_run(server.log_tail(9)))
        assert len(marked(marker)) == 5
    assert marked(marker) == []


@pytest.mark.parametrize(
    ("header", "version"),
    [
        ("| NVIDIA-SMI 570.86.15   Driver Version: 570.86.15   CUDA Version: 12.8     |", "12.8"),
        ("| NVIDIA-SMI 610.43.02   KMD Version: 610.43.02   CUDA UMD Version: 13.3     |", "13.3"),
        ("| NVIDIA-SMI 535.54.03   Driver Version: 535.54.03   CUDA Version: N/A      |", None),
        ("", None),
    ],
)
def test_the_cuda_version_is_read_from_the_header_of_old_drivers_and_new(header: str, version: str | None) -> None:
    assert cuda_version(header) == version


def test_gpus_and_processor_are_read_from_what_machines_print() -> None:
    assert gpu_lines("NVIDIA H200, 143771 MiB, 570.86.15\n\n") == ["NVIDIA H200, 143771 MiB, 570.86.15"]
    assert cpu_model("processor\t: 0\nmodel name\t: Some CPU @ 2.0GHz\nmodel name\t: x\n") == "Some CPU @ 2.0GHz"
    assert cpu_model("processor\t: 0\nFeatures\t: fp asimd\n") is None
