"""An experiment: K = 0 that costs nothing, since the drafter is left alone. For vLLM, `BREAKEVEN_DEEP=1`.

At K = 0 stock vLLM still runs the drafter once a step, without drafting, to keep its KV cache in step. What isn't run
costs nothing, and leaves a cache behind in which the requests that lived through it have holes: their next drafts fail.
No answer changes, since drafts are verified. When it pays is the policy's to say (`decide.policy`, `DEEP`).

vLLM calls `install` in each of its processes, by the entry point `vllm.general_plugins`. Where the model runs, two
methods are wrapped: `GPUModelRunner.propose_draft_token_ids`, which sees the mark that the scheduler sets, and
`SpecDecodeBaseProposer.propose`, which then returns no drafts without running.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from breakeven.act.settings import read_control
from breakeven.errors import UsageError

__all__ = ["MARK", "METHODS", "check_drafter", "install"]

#: The drafters that vLLM runs at K = 0 to keep their cache in step.
METHODS = ("eagle", "eagle3", "mtp", "draft_model")
#: The attribute of a scheduler's output whose step leaves the drafter alone, and of a drafter that is left alone.
MARK, _RESTED = "breakeven_deep", "breakeven_rested"
_GROUP, _NAME = "vllm.general_plugins", "breakeven"

# Of vLLM's own tree, so that its handlers print it.
_log = logging.getLogger("vllm.breakeven")


def install() -> None:
    """Wraps vLLM's methods; does nothing unless it is asked to, and no harm if called twice."""
    try:
        if not read_control().deep:
            return
    except UsageError:  # told once, by the scheduler, which doesn't start then
        return
    from vllm.v1.spec_decode.llm_base_proposer import (  # type: ignore[import-not-found,unused-ignore]
        SpecDecodeBaseProposer,
    )
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # type: ignore[import-not-found,unused-ignore]

    if not hasattr(SpecDecodeBaseProposer.propose, MARK):
        GPUModelRunner.propose_draft_token_ids = _marking(GPUModelRunner.propose_draft_token_ids)
        SpecDecodeBaseProposer.propose = _resting(SpecDecodeBaseProposer.propose)


def check_drafter(vllm_config: Any) -> None:
    """Whether the drafter of a server can be left alone.

    Raises:
        UsageError: it can't, in one line that says why.
    """
    method = vllm_config.speculative_config.method
    if method not in METHODS:
        raise UsageError(f"BREAKEVEN_DEEP: the drafter {method} is none of {', '.join(METHODS)}: leave it unset")
    if vllm_config.use_v2_model_runner:
        raise UsageError("BREAKEVEN_DEEP: the model runner V2 can't: set VLLM_USE_V2_MODEL_RUNNER=0, or leave it unset")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and _NAME not in allowed.split(","):
        raise UsageError(f"BREAKEVEN_DEEP: VLLM_PLUGINS={allowed} leaves {_NAME} out: add it")
    if not any(each.name == _NAME for each in entry_points(group=_GROUP)):
        raise UsageError("BREAKEVEN_DEEP: breakeven is not installed as a plugin of vLLM: pip install it there again")


def _marking(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def propose_draft_token_ids(runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        setattr(runner.drafter, MARK, getattr(scheduler_output, MARK, False))
        return own(runner, scheduler_output, *args, **kwargs)

    return propose_draft_token_ids


def _resting(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def propose(drafter: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("num_speculative_tokens") != 0 or not getattr(drafter, MARK, False):
            return own(drafter, *args, **kwargs)
        if not hasattr(propose, _RESTED):  # when vLLM loads its plugins it can't log yet
            setattr(propose, _RESTED, True)
            _log.info("breakeven: leaves the drafter alone, for the first time here (BREAKEVEN_DEEP)")
        drafter.num_speculative_tokens, drafter._last_draft_probs = 0, None
        return kwargs["next_token_ids"].new_empty((kwargs["common_attn_metadata"].batch_size(), 0))

    setattr(propose, MARK, True)
    return propose
