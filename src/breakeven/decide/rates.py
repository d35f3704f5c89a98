"""What several arms brought at each load, turn by turn, so that any two of them can be set against each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from types import MappingProxyType
from typing import NamedTuple

from breakeven.decide.atload import arm_at_load
from breakeven.decide.likeness import common_loads, lengths_compared
from breakeven.decide.ratio import LogMean, Method, NoRatio, Ratio, log_mean, paired, unpaired
from breakeven.decide.turns import ArmRun, Turn, blocks_of, geometric_mean, how_measured, mean_rate, turns_of, whole

__all__ = ["LoadRates", "load_rates"]


class LoadRates(NamedTuple):
    """All arms at one load.

    Attributes:
        load: requests in flight at the client.
        batch: requests that ran in the engine, the mean over arms; None where no engine told.
        turns: by arm its tokens a second in each turn that all arms finished, in their order. Without pairs empty.
        means: by arm its mean log throughput.
        method: how the arms were measured against each other.
        name: how the load is called.
        alone: by arm its tokens a second where there are no pairs.
    """

    load: float
    batch: float | None
    turns: dict[str, tuple[float, ...]]
    means: dict[str, LogMean | NoRatio]
    method: Method
    name: str
    alone: Mapping[str, float] = MappingProxyType({})

    def ratio(self, reference: str, other: str) -> Ratio | NoRatio:
        """Other over reference."""
        if self.method == "batches":
            return unpaired(self.means[reference], self.means[other], method=self.method)
        return paired(self.turns[reference], self.turns[other], method=self.method, names=(reference, other))

    def log(self, arm: str) -> float | None:
        """An arm's mean log throughput; None where it failed in a turn."""
        rates = (self.alone[arm],) if self.method == "batches" else self.turns[arm]
        return fmean(map(math.log, rates)) if rates and min(rates) > 0 else None

    def only(self, turns: Sequence[int]) -> LoadRates:
        """The same of some turns, by their place. For arms that were measured in pairs or sweeps."""
        kept = {arm: tuple(rates[turn] for turn in turns) for arm, rates in self.turns.items()}
        return self._replace(turns=kept, means={arm: log_mean(rates) for arm, rates in kept.items()})


def load_rates(arms: Sequence[ArmRun]) -> list[LoadRates]:
    """What was measured, by rising load. The runs are alike (`decide.likeness.check_alike`).

    Raises:
        UsageError: no load is common to all arms, or answers have several lengths.
    """
    plans = {arm.name: [level.plan for level in arm.run.levels] for arm in arms}
    lengths = lengths_compared(plans)
    hows = {how_measured(arms[0].run.manifest, arm.run.manifest) for arm in arms[1:]}
    method: Method = hows.pop() if len(hows) == 1 else "batches"
    every = {arm.name: turns_of(arm.run, lengths[arm.name]) for arm in arms}
    return [
        _at_load(load, {name: whole(own[load]) for name, own in every.items()}, method)
        for load in common_loads(plans, lengths)
    ]


def _at_load(load: float, turns: Mapping[str, Sequence[Turn]], method: Method) -> LoadRates:
    running = [at.running for name, own in turns.items() if (at := arm_at_load(name, own)).running is not None]
    batch = fmean(value for value in running if value is not None) if running else None
    name = next(iter(turns.values()))[0].level.plan.name
    if method == "batches":
        means = {arm: mean_rate(own, arm) for arm, own in turns.items()}
        alone = {arm: geometric_mean([turn.rate for turn in own]) for arm, own in turns.items()}
        return LoadRates(load, batch, {}, means, method, name, alone)
    blocks = blocks_of(turns)
    rates = {arm: tuple(block[arm].rate for block in blocks) for arm in turns}
    return LoadRates(load, batch, rates, {arm: log_mean(own) for arm, own in rates.items()}, method, name)
