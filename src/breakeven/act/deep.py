"""An experiment: K = 0 that costs nothing. For vLLM, `BREAKEVEN_DEEP=1`.

At K = 0 stock vLLM still runs a drafter with a KV cache of its own once a step, without drafting, to keep that cache in
step. What isn't run costs nothing, and leaves a cache behind in which the requests that lived through it have holes:
their next drafts fail. No answer changes, since drafts are verified. When it pays is the policy's to say
(`decide.policy`, `DEEP`). n-grams keep nothing: with them each step of K = 0 is meant.

A step that leaves the drafter alone is marked by the scheduler. If there are no drafts of the step before to verify, it
is then made as by a server that has no drafter: the sampler isn't that of drafts, which copies all logits, and nobody
asks the worker for drafts.

vLLM calls `install` in each of its processes, by the entry point `vllm.general_plugins`. Wrapped are, where the model
runs, `GPUModelRunner.execute_model` and `sample_tokens`, which then know of no `speculative_config`, and
`SpecDecodeBaseProposer.propose`, which else returns no drafts without running; `EngineCore.post_step`, which asks.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any

from breakeven.act.settings import read_control
from breakeven.errors import UsageError

__all__ = ["CACHED", "MARK", "METHODS", "check_drafter", "install"]

#: The drafters that vLLM runs at K = 0 to keep their cache in step.
CACHED = ("eagle", "eagle3", "mtp", "draft_model")
#: Those that can be left alone.
METHODS = (*CACHED, "ngram")
#: The attribute of a scheduler's output whose step leaves the drafter alone, and of who has to know: a drafter, a model
#: runner in a step as of a server without a drafter, and a scheduler whose last step drafts nothing.
MARK = "breakeven_deep"
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
    from vllm.v1.engine.core import EngineCore  # type: ignore[import-not-found,unused-ignore]
    from vllm.v1.spec_decode.llm_base_proposer import (  # type: ignore[import-not-found,unused-ignore]
        SpecDecodeBaseProposer,
    )
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # type: ignore[import-not-found,unused-ignore]

    if not hasattr(SpecDecodeBaseProposer.propose, MARK):
        EngineCore.post_step = _asking(EngineCore.post_step)
        GPUModelRunner.execute_model = _beginning(GPUModelRunner.execute_model)
        GPUModelRunner.sample_tokens = _ending(GPUModelRunner.sample_tokens)
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


def _asking(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def post_step(engine: Any, model_executed: bool) -> None:
        own(engine, model_executed and not getattr(engine.scheduler, MARK, False))

    return post_step


def _beginning(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def execute_model(runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        is_marked = getattr(scheduler_output, MARK, False)
        if hasattr(runner, "drafter"):  # the last one of a pipeline has it
            setattr(runner.drafter, MARK, is_marked)
        # With asynchronous scheduling the drafter's side corrects the lengths; of a hybrid model it places the state.
        drafts = scheduler_output.scheduled_spec_decode_tokens or scheduler_output.num_spec_tokens_to_schedule
        is_plain = is_marked and not drafts
        setattr(runner, MARK, is_plain and not runner.use_async_scheduling and not runner.model_config.is_hybrid)
        with _plain(runner):
            return own(runner, scheduler_output, *args, **kwargs)

    return execute_model


def _ending(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def sample_tokens(runner: Any, *args: Any, **kwargs: Any) -> Any:
        with _plain(runner):
            return own(runner, *args, **kwargs)

    return sample_tokens


@contextmanager
def _plain(runner: Any) -> Iterator[None]:
    """Both halves of a step that is as of a server without a drafter."""
    config = runner.speculative_config
    if getattr(runner, MARK, False):
        _tell()
        runner.speculative_config = None
    try:
        yield
    finally:
        runner.speculative_config = config


def _resting(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def propose(drafter: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("num_speculative_tokens") != 0 or not getattr(drafter, MARK, False):
            return own(drafter, *args, **kwargs)
        _tell()
        drafter.num_speculative_tokens, drafter._last_draft_probs = 0, None
        return kwargs["next_token_ids"].new_empty((kwargs["common_attn_metadata"].batch_size(), 0))

    setattr(propose, MARK, True)
    return propose


@functools.cache  # once, and not from `install`: when vLLM loads its plugins it can't log yet
def _tell() -> None:
    _log.info("breakeven: leaves the drafter alone, for the first time here (BREAKEVEN_DEEP)")
