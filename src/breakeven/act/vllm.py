"""The policy inside a stock vLLM server: `--scheduler-cls breakeven.act.vllm.scheduler`.

vLLM calls `scheduler` where it would make its own `Scheduler` or `AsyncScheduler`, and gets one of these with three
methods more looked after. The actuator is one attribute, `dynamic_sd_lookup`: vLLM's own table from batch size to K,
of which it asks an item each step, and which here asks the policy. Nothing is patched but by an experiment, `act.deep`.

A step first verifies the drafts that the step before made and then makes its own, of the K that it was told. So in the
first step after a switch both meet; `decide.belief` takes such steps for what a switch costs and nothing else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from breakeven.act.deep import CACHED, MARK, check_drafter
from breakeven.act.governor import Governor
from breakeven.act.page import open_page
from breakeven.act.settings import Control, read_control
from breakeven.decide.modes import policy_of
from breakeven.decide.observed import DEEP, Step
from breakeven.errors import UsageError

if TYPE_CHECKING:
    from http.server import ThreadingHTTPServer

__all__ = ["LOOKED_AT", "decoded", "scheduler"]

#: Releases of which the scheduler was read (0.32.0 was also run).
LOOKED_AT = ("0.32", "0.33")
#: What was learned is written down so often, for a server that is killed.
_KEEP_S = 10.0

# Of vLLM's own tree, so that its handlers print it.
_log = logging.getLogger("vllm.breakeven")


def scheduler(*args: Any, **kwargs: Any) -> Any:
    """vLLM's scheduler, with K decided here. Takes what vLLM gives to its own.

    Raises:
        RuntimeError: the server can't be controlled, or was told something that can't be: in one line, with the mend.
    """
    vllm_config: Any = kwargs.get("vllm_config", args[0] if args else None)
    try:
        control = read_control()
        _check(vllm_config, untried=control.untried)
        if control.deep:
            check_drafter(vllm_config)
        method = vllm_config.speculative_config.method
        engine = _class(vllm_config)(*args, **kwargs)
        engine.govern(control, method)
    except UsageError as error:
        raise RuntimeError(f"breakeven: {error}") from None
    return engine


def _check(vllm_config: Any, *, untried: bool) -> None:
    """What has to be so before vLLM's own scheduler can be made.

    Raises:
        UsageError: it isn't.
    """
    import vllm  # type: ignore[import-not-found,unused-ignore]  # an environment of its own

    version = str(vllm.__version__)
    if not untried and ".".join(version.split(".")[:2]) not in LOOKED_AT:
        raise UsageError(
            f"vLLM {version} was not tried: {' and '.join(LOOKED_AT)} were looked at: take one of these, or set "
            "BREAKEVEN_UNTRIED=1"
        )
    ranks = vllm_config.parallel_config.data_parallel_size
    if ranks > 1:
        raise UsageError(
            f"--data-parallel-size {ranks}: ranks that draft different K wait for each other for ever: start {ranks} "
            "servers behind a router instead, each with its own policy"
        )
    if vllm_config.speculative_config is None:
        raise UsageError("the server has no --speculative-config: `breakeven flags vllm` prints one")
    if not vllm_config.speculative_config.num_speculative_tokens_per_batch_size:
        raise UsageError(
            "--speculative-config has no num_speculative_tokens_per_batch_size, which declares the K that may be used: "
            "`breakeven flags vllm --k 0 2 4` prints one"
        )


def _class(vllm_config: Any) -> type[Any]:
    """vLLM's scheduler of this configuration, with `_Governed` before it."""
    if vllm_config.scheduler_config.async_scheduling:
        from vllm.v1.core.sched.async_scheduler import (  # type: ignore[import-not-found,unused-ignore]
            AsyncScheduler as Own,
        )
    else:
        from vllm.v1.core.sched.scheduler import (  # type: ignore[import-not-found,unused-ignore]
            Scheduler as Own,
        )
    return type(f"Governed{Own.__name__}", (_Governed, Own), {})


class _Governed:
    """What is added to a scheduler of vLLM's; the names without an underscore in front are its."""

    dynamic_sd_lookup: Any
    running: list[Any]
    waiting: Any
    kv_cache_manager: Any
    _inflight_prefills: Any

    def govern(self, control: Control, method: str) -> None:
        """Begins; called once, when the scheduler is complete. `method` is the drafter, as vLLM calls it.

        Raises:
            UsageError: policy, schedule, K, key or port can't be.
        """
        table = self.dynamic_sd_lookup
        if not isinstance(table, list) or not table:
            raise UsageError(
                "this vLLM keeps no table of K by batch size: is num_speculative_tokens_per_batch_size set?"
            )
        ks = sorted(set(table[1:]))
        if control.deep and ks[0]:
            raise UsageError(f"BREAKEVEN_DEEP: 0 is none of the K that are declared, {', '.join(map(str, ks))}")
        # The K whose steps leave the drafter alone: where it has no cache there is nothing to weigh.
        self._resting = (DEEP if method in CACHED else 0,) if control.deep else ()
        policy = policy_of(control.policy, ks, objective_ms=control.objective_ms, deep=DEEP in self._resting)
        self._governor = Governor(policy, control.policy)
        if control.state is not None:
            _log.info("breakeven: %s", self._governor.restore(control.state))
        self._table: list[int] = table
        self._since_ns: int | None = None  # when the work began that is now under way
        # What was scheduled, with which K, and when that step began at the earliest.
        self._under_way: deque[tuple[Any, int, int]] = deque()
        self._page: ThreadingHTTPServer | None = open_page(self._governor, control)
        self._ended, self._state = threading.Event(), control.state
        if self._state is not None:
            threading.Thread(target=self._keep, args=(self._state,), name="breakeven state", daemon=True).start()
        self.dynamic_sd_lookup = _Lookup(self)
        host, port = self._page.server_address[:2]
        listed = " ".join(map(str, policy.ks))
        _log.info("breakeven: policy %s over K %s, control page http://%s:%s", control.policy, listed, str(host), port)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's; notes when the step began, which is when the one before it ended if there was work all the time."""
        begun_ns = time.monotonic_ns() if self._since_ns is None else self._since_ns
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        k, drafts = self._governor.active_k, output.num_spec_tokens_to_schedule
        rests = not drafts and k in self._resting
        setattr(self, MARK, not drafts)
        setattr(output, MARK, rests)
        self._under_way.append((output, k if rests else drafts, begun_ns))
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """vLLM's; reports the step to the policy."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        now_ns = time.monotonic_ns()
        try:
            k, begun_ns = self._begun(scheduler_output)
            begun_ns = max(begun_ns, self._since_ns or 0)
            if scheduler_output.total_num_scheduled_tokens:
                self._governor.report(_step(scheduler_output, model_runner_output, k, begun_ns, now_ns))
        except Exception:  # noqa: BLE001  a signal that another release gives differently must not reach a request
            self._governor.fault("step")
        self._since_ns = now_ns if self.running else None
        return outputs

    def shutdown(self) -> None:
        """vLLM's; ends the page and writes down what was learned."""
        self._ended.set()
        if self._state is not None:
            self._governor.keep(self._state)
        if self._page is not None:
            self._page.shutdown()
            self._page.server_close()
            self._page = None
        super().shutdown()  # type: ignore[misc]

    def k_for(self, scheduled: int) -> int:
        """The K of the step that is being scheduled, of so many requests; by the table where a signal is missing."""
        try:
            # Those whose prompt isn't read to its end in this step draft nothing.
            decoding = max(1, len(self.running) - len(self._inflight_prefills))
            return max(0, self._governor.choose(decoding, len(self.waiting), self.kv_cache_manager.usage))
        except Exception:  # noqa: BLE001  as above
            self._governor.fault("load")
            return self._table[min(scheduled, len(self._table) - 1)]

    def _begun(self, scheduler_output: Any) -> tuple[int, int]:
        """A step's K, and when it began at the earliest; with asynchronous scheduling, two are under way."""
        while True:
            output, k, begun_ns = self._under_way.popleft()
            if output is scheduler_output:
                return k, begun_ns

    def _keep(self, path: Path) -> None:
        while not self._ended.wait(_KEEP_S):
            self._governor.keep(path)


def _step(scheduler_output: Any, model_runner_output: Any, k: int, begun_ns: int, now_ns: int) -> Step:
    drafts = scheduler_output.scheduled_spec_decode_tokens
    new = {request.req_id for request in scheduler_output.scheduled_new_reqs}
    decoding, prefill_tokens = decoded(scheduler_output.num_scheduled_tokens, drafts, new)
    return Step(
        begun_ns=begun_ns,
        step_ns=now_ns - begun_ns,
        decoding=decoding,
        k=k,
        drafts=len(drafts),
        accepted=_accepted(drafts, model_runner_output),
        prefill_tokens=prefill_tokens,
    )


class _Lookup:
    """Stands where vLLM has its table."""

    def __init__(self, governed: _Governed) -> None:
        self._governed = governed

    def __getitem__(self, scheduled: int) -> int:
        return self._governed.k_for(scheduled)


def decoded(scheduled: dict[str, int], drafts: dict[str, Sequence[int]], new: set[str]) -> tuple[int, int]:
    """How many requests a step decodes, and how many tokens of prompts it reads.

    Args:
        scheduled: tokens of each request in the step.
        drafts: those of them that are drafts.
        new: the requests of which the step reads the beginning.
    """
    total = sum(scheduled.values())
    if not new and total == len(scheduled) + sum(map(len, drafts.values())):
        return len(scheduled), 0
    # A request that decodes has one token beside its drafts; a piece of a prompt of that length is rare.
    decoding = [r for r, tokens in scheduled.items() if r not in new and tokens == 1 + len(drafts.get(r, ()))]
    return len(decoding), total - sum(scheduled[r] for r in decoding)


def _accepted(drafts: dict[str, Sequence[int]], model_runner_output: Any) -> tuple[int, ...]:
    """At how many requests each draft position was accepted; what is sampled is that and one token more."""
    if not drafts:
        return ()
    sampled, place = model_runner_output.sampled_token_ids, model_runner_output.req_id_to_index
    lengths = [len(sampled[place[request]]) - 1 for request in drafts]
    return tuple(sum(length > i for length in lengths) for i in range(max(map(len, drafts.values()))))
