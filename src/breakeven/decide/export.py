"""A table as an engine wants it: flags to paste, held against the engine's own rules.

What the rules are was read in the releases that are named at each.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from breakeven.decide.schedule import Schedule
from breakeven.errors import UsageError

__all__ = ["UNKNOWN", "Engine", "Exported", "check_shapes", "export", "export_for", "vllm_drafter"]

Engine = Literal["vllm", "sglang", "tensorrt-llm", "json"]

#: Stands where nobody told what the engine needs.
UNKNOWN = "…"
_SGLANG_FILE, _TENSORRT_FILE = "sglang-adaptive.json", "tensorrt-llm.yaml"
#: SGLang's names of the drafters whose steps it can change while it runs, by those that vLLM has for them.
_SGLANG_ALGORITHMS = {"eagle": "EAGLE", "eagle3": "EAGLE3", "nextn": "EAGLE"}
#: TensorRT-LLM's `decoding_type`, by vLLM's names.
_TENSORRT_TYPES = {"eagle3": "Eagle3", "eagle": "Eagle", "ngram": "NGram", "mtp": "MTP", "draft_model": "Draft_Target"}


class Exported(NamedTuple):
    """Flags for a shell, the files that they name (by name), and what to know."""

    engine: Engine
    flags: str
    files: dict[str, str]
    notes: tuple[str, ...]


def export_for(engine: str | None) -> Engine:
    """The form that an engine takes, by the name that it was identified by."""
    return "vllm" if engine == "vllm" else "sglang" if engine == "sglang" else "json"


def check_shapes(engine: Engine, ks: Sequence[int], topks: Sequence[int] = ()) -> None:
    """Before anything is measured: whether the engine can switch between these draft lengths.

    Args:
        engine: whose table it will be.
        ks: the draft lengths, those with a top-k above 1 left out.
        topks: the top-k of the arms that draft trees.

    Raises:
        UsageError: it can't.
    """
    if engine == "json":
        return
    if topks and engine != "sglang":
        raise UsageError(f"--export {engine}: its table has no top-k, and these arms do: leave --vary or --export out")
    if topks and len(set(ks)) < 2:
        raise UsageError(
            "--export sglang: SGLang switches only between configurations of top-k 1, and fewer than two of these arms "
            "are that: add topk=1, or leave --export out"
        )
    if not any(ks):
        raise UsageError(f"--export {engine}: every K is 0: there is nothing to switch on; add a K above 0")


def export(schedule: Schedule, engine: Engine) -> Exported:
    """The schedule for an engine.

    Raises:
        UsageError: the engine would refuse it.
    """
    if engine == "json":
        return Exported(engine, schedule.to_json(), {}, ())
    if not schedule.max_k:
        return Exported(engine, "", {}, ("no draft pays at any load: start the server without speculation",))
    exporters: Mapping[str, Callable[[Schedule], Exported]] = {
        "vllm": _vllm,
        "sglang": _sglang,
        "tensorrt-llm": _tensorrt,
    }
    return exporters[engine](schedule)


def _vllm(schedule: Schedule) -> Exported:
    """vLLM 0.32, `v1/spec_decode/dynamic/utils.py`: ranges in order, from 1, K from 0 to num_speculative_tokens, which
    is above 0. The last K goes on beyond the last range, up to --max-num-seqs.
    """
    config = vllm_drafter(schedule) | {"num_speculative_tokens": schedule.max_k}
    if len(schedule.ranges) > 1:
        config["num_speculative_tokens_per_batch_size"] = [[each.lo, each.hi, each.k] for each in schedule.ranges]
    notes = _unknown_notes(UNKNOWN in config.values())
    if len(schedule.ranges) > 1:
        notes.append("vLLM drops the table under data parallelism, and counts requests that are still being read too")
    text = json.dumps(config, separators=(",", ":"), ensure_ascii=False)
    return Exported("vllm", f"--speculative-config {shlex.quote(text)}", {}, tuple(notes))


def _sglang(schedule: Schedule) -> Exported:
    """SGLang 0.5.23, `speculative/adaptive_spec_params.py` and `arg_groups/speculative_hook.py`: EAGLE and EAGLE3 with
    top-k 1; keys are the smallest batch of a tier, and a tier with a single candidate keeps to it, whatever is
    accepted; --speculative-num-steps must be one of the candidates.
    """
    known = schedule.speculation.get("speculative_algorithm") or schedule.method
    algorithm = _SGLANG_ALGORITHMS.get(str(known).lower(), UNKNOWN)
    if known and algorithm == UNKNOWN:
        raise UsageError(f"--export sglang: SGLang switches only EAGLE and EAGLE3 while it runs, not {known}")
    model = schedule.speculation.get("speculative_draft_model_path") or schedule.speculation.get("model")
    words = ["--speculative-algorithm", algorithm]
    words += ["--speculative-draft-model-path", str(model)] if model else []
    words += ["--speculative-eagle-topk", "1", "--speculative-num-steps", str(schedule.max_k)]
    words += ["--speculative-num-draft-tokens", str(schedule.max_k + 1)]
    notes = _unknown_notes(algorithm == UNKNOWN)
    if len(schedule.ranges) == 1:
        return Exported("sglang", shlex.join(words), {}, tuple(notes))
    tiers = {str(each.lo): {"candidate_steps": [each.k]} for each in schedule.ranges}
    words += ["--speculative-adaptive", "--speculative-adaptive-config", _SGLANG_FILE]
    notes.append("SGLang rounds a batch up to the next one that it has a CUDA graph for before it looks here")
    return Exported("sglang", shlex.join(words), {_SGLANG_FILE: json.dumps(tiers, indent=2) + "\n"}, tuple(notes))


def _tensorrt(schedule: Schedule) -> Exported:
    """TensorRT-LLM 1.3, `llmapi/llm_args.py`, `DecodingBaseConfig`: a key is the largest batch of its range, the
    smallest key has max_draft_len, no other has more, and above the largest key nothing is drafted. Earlier releases
    took keys for the smallest batch of a range.
    """
    first, *_, last = (*schedule.ranges, schedule.ranges[-1])
    if first.k != schedule.max_k:
        raise UsageError(
            f"--export tensorrt-llm: its smallest batches must draft the most, and here batches up to {first.hi} draft "
            f"{first.k} and larger ones {schedule.max_k}: use another form, or a single draft length"
        )
    drafter = schedule.speculation
    kind = _TENSORRT_TYPES.get(str(schedule.method).lower(), UNKNOWN)
    lines = ["speculative_config:", f"  decoding_type: {kind}", f"  max_draft_len: {schedule.max_k}"]
    model = drafter.get("model") or drafter.get("speculative_draft_model_path")
    lines += [f"  speculative_model: {json.dumps(model)}"] if model else []
    ranges = schedule.ranges[:-1] if not last.k else schedule.ranges
    if len(schedule.ranges) > 1:
        lines += ["  draft_len_schedule:", *(f"    {each.hi}: {each.k}" for each in ranges)]
    notes = _unknown_notes(kind == UNKNOWN)
    if last.k:
        notes.append(f"TensorRT-LLM drafts nothing above {last.hi}: set that to its max_batch_size")
    text = "\n".join(lines) + "\n"
    return Exported("tensorrt-llm", f"--extra_llm_api_options {_TENSORRT_FILE}", {_TENSORRT_FILE: text}, tuple(notes))


def vllm_drafter(schedule: Schedule) -> dict[str, Any]:
    """vLLM's settings of the drafter, from whatever engine they are; `UNKNOWN` stands for what nobody tells."""
    if schedule.engine == "vllm" or "method" in schedule.speculation:
        found = dict(schedule.speculation)
    else:
        model = schedule.speculation.get("speculative_draft_model_path")
        found = {"model": model} if model else {}
    method = found.pop("method", None) or (schedule.method or UNKNOWN).lower()
    if method in ("eagle", "eagle3") and not found.get("model"):
        found["model"] = UNKNOWN
    return {"method": method, **found}


def _unknown_notes(is_unknown: bool) -> list[str]:
    return [f"the server doesn't tell its drafter: put it where {UNKNOWN} stands"] if is_unknown else []
