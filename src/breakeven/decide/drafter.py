"""Which drafter a server has, as far as its configuration or the command that started it tells."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple

from breakeven.records import Manifest

__all__ = ["Drafter", "drafter_of", "k_of"]

#: What of vLLM's speculative configuration says which drafter it is (0.32, `config/speculative.py`); the rest follows.
_VLLM = ("method", "model", "prompt_lookup_max", "prompt_lookup_min", "draft_tensor_parallel_size", "quantization")
#: The same of SGLang's arguments (0.5.23, `arg_groups/fields/spec.py`).
_SGLANG = ("speculative_algorithm", "speculative_draft_model_path")
_CONFIG_FLAGS = ("--speculative-config", "--speculative_config", "-sc")


class Drafter(NamedTuple):
    """`method` as the engine calls it, None where nobody tells; `settings` by the engine's own names."""

    method: str | None
    settings: dict[str, Any]


def drafter_of(manifest: Manifest) -> Drafter:
    """The drafter of an arm."""
    config = manifest.target.get("config") or {}
    vllm = config.get("speculative_config") or _from_command(str(manifest.flags.get("serve") or ""))
    if isinstance(vllm, dict) and vllm:
        # vLLM fills in the method's own name where a drafter has no model, and lengths of 0 where it looks nothing up,
        # which it would refuse if it were told them (`SpeculativeConfig.__post_init__`).
        filled_in = {"model"} if vllm.get("model") == vllm.get("method") else set()
        settings = {name: vllm[name] for name in _VLLM if vllm.get(name) and name not in filled_in}
        return Drafter(_text(settings.get("method")), settings)
    if config.get("speculative_algorithm"):
        settings = {name: config[name] for name in _SGLANG if config.get(name) is not None}
        return Drafter(str(config["speculative_algorithm"]), settings)
    started = str(manifest.flags.get("vllm") or manifest.flags.get("local") or "")
    method = re.split("[:@]", started)[0]
    return Drafter(method, {"method": method}) if method not in ("", "off", "none") else Drafter(None, {})


def _from_command(command: str) -> Mapping[str, Any] | None:
    """vLLM's speculative configuration out of the command that started it."""
    try:
        words = shlex.split(command)
    except ValueError:
        return None
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in _CONFIG_FLAGS:
            text = value if equals else "".join(words[place + 1 : place + 2])
            try:
                found = json.loads(text)
            except ValueError:
                return None
            return found if isinstance(found, dict) else None
    return None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def k_of(config: Mapping[str, Any]) -> int | None:
    """Tokens that a server drafts along one path, by its configuration; None where it doesn't tell."""
    if "speculative_config" in config:
        own = config["speculative_config"]
        found = own.get("num_speculative_tokens") if isinstance(own, dict) else 0
    else:
        found = config.get("speculative_num_steps", config.get("k"))
    return found if isinstance(found, int) else None
