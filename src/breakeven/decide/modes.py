"""How a policy is named: `auto`, `auto:schedule.json`, `table:schedule.json`, `fixed:K`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from breakeven.decide.policy import Policy, Settings
from breakeven.decide.schedule import read_schedule
from breakeven.errors import UsageError

__all__ = ["policy_of"]


def policy_of(name: str, ks: Sequence[int], *, objective_ms: float | None = None, deep: bool = False) -> Policy:
    """The policy of a name, for an engine that may be told these K; `objective_ms` is that of its `Settings`.

    `deep` is whether the engine can leave the drafter alone.

    `auto:FILE` learns as `auto` does, begins with what the schedule says and measured, and falls back to it.

    Raises:
        UsageError: there is no such policy, K or schedule.
    """
    kind, _, rest = name.partition(":")
    settings = Settings(objective_ms=objective_ms)
    if kind == "auto":
        return Policy(ks, schedule=read_schedule(Path(rest)) if rest else None, settings=settings, deep=deep)
    if kind == "table" and rest:
        return Policy(ks, schedule=read_schedule(Path(rest)), mode="table", settings=settings, deep=deep)
    if kind == "fixed" and rest.isdecimal():
        if int(rest) not in ks:
            raise UsageError(f"the policy {name}: K is one of {', '.join(map(str, sorted(ks)))} here")
        return Policy(ks, mode=int(rest), settings=settings, deep=deep)
    raise UsageError(f"the policy {name}: give auto, auto:FILE, table:FILE or fixed:K")
