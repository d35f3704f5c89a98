"""How a policy is named: `auto`, `auto:schedule.json`, `table:schedule.json`, `fixed:K`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from breakeven.decide.policy import Policy, Settings
from breakeven.decide.schedule import read_schedule
from breakeven.errors import UsageError

__all__ = ["policy_of"]


def policy_of(name: str, ks: Sequence[int], *, objective_ms: float | None = None, deep: bool = False) -> Policy:
    """The policy of a name, for an engine that may be told these K; `objective_ms` is that of its `Settings`,
    `deep` that of the policy.

    `auto:FILE` learns as `auto` does, begins with what the schedule says and measured, and falls back to it.

    Raises:
        UsageError: there is no such policy, K or schedule.
    """
    kind, _, rest = name.partition(":")
    policy = partial(Policy, ks, settings=Settings(objective_ms=objective_ms), deep=deep)
    if kind == "auto":
        return policy(schedule=read_schedule(Path(rest)) if rest else None)
    if kind == "table" and rest:
        return policy(schedule=read_schedule(Path(rest)), mode="table")
    if kind == "fixed" and rest.isdecimal():
        if int(rest) not in ks:
            raise UsageError(f"the policy {name}: K is one of {', '.join(map(str, sorted(ks)))} here")
        return policy(mode=int(rest))
    raise UsageError(f"the policy {name}: give auto, auto:FILE, table:FILE or fixed:K")
