"""Runs of arms with different draft lengths become a schedule, and what it is expected to gain."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from msgspec import Struct

from breakeven.decide.borders import batch_of, growing, ranges_of
from breakeven.decide.choice import Choice, choose
from breakeven.decide.drafter import drafter_of
from breakeven.decide.gain import LevelGains, ProfileGain, gains_at, gains_over, outside, tuned_rates
from breakeven.decide.knee import Knee, knee
from breakeven.decide.profile import Profile
from breakeven.decide.rates import LoadRates, load_rates
from breakeven.decide.ratio import LogMean, Ratio
from breakeven.decide.schedule import Level, Limit, Rate, Schedule
from breakeven.decide.student import t_quantile
from breakeven.decide.turns import ArmRun
from breakeven.decide.verdict import DELTA
from breakeven.errors import UsageError
from breakeven.measure.stats import Interval

__all__ = ["TUNED_SCHEMA", "ArmRate", "ArmShape", "OverProfile", "Tuned", "TunedArm", "TunedLevel", "tune"]

#: Version of the layout of `breakeven tune --format json`. History: 1, the first.
TUNED_SCHEMA = "breakeven.tuned/1"
#: How engines call the most requests that they run at once: vLLM 0.32, SGLang 0.5.23, llama.cpp.
_MOST_BATCH = ("max_num_seqs", "max_running_requests", "total_slots")


class TunedArm(NamedTuple):
    """An arm, what it drafts (as `variants.Variant` has it), and its run."""

    k: int
    topk: int
    draft_tokens: int | None
    run: ArmRun

    @property
    def name(self) -> str:
        """The arm's name."""
        return self.run.name

    @property
    def is_tree(self) -> bool:
        """Whether it drafts more than one token at a position: no engine changes such a shape while it runs."""
        return self.topk > 1


class ArmShape(Struct, frozen=True, kw_only=True):
    """An arm and what it drafts."""

    name: str
    k: int
    topk: int
    draft_tokens: int | None


class ArmRate(Struct, frozen=True, kw_only=True):
    """An arm's tokens a second at a load; None where it failed."""

    arm: str
    value: float | None
    ci95: Interval | None


class TunedLevel(Struct, frozen=True, kw_only=True):
    """One load.

    Attributes:
        batch: requests that ran in the engine, None where it doesn't tell.
        best: the arm with the highest throughput, trees among them, whatever the noise; None if all failed.
        arm: the one that the table has there; None without a table, or where the load says nothing for it.
        gains: against each arm alone; None without a table.
    """

    load: float
    name: str
    batch: float | None
    rates: tuple[ArmRate, ...]
    best: str | None
    arm: str | None = None
    gains: LevelGains | None = None


class OverProfile(Struct, frozen=True, kw_only=True):
    """The gain over a profile; `outside`: the share of its time at loads that were not measured."""

    profile: Profile
    outside: float
    gains: tuple[ProfileGain, ...]


class Tuned(Struct, frozen=True, kw_only=True):
    """What came out.

    Attributes:
        schedule: None where no table is made; then `why_not` says why, in a sentence without its full stop.
        off, on: the arm that drafts nothing; of those that draft, the best one at all loads alike.
        is_cross_fitted: whether gains were judged on other turns than those that the table was chosen on.
        limit: the knee of the table's arms over the engine's batch.
        tied: by arm of the table those that can't be told apart from it at its loads.
    """

    schema: str = TUNED_SCHEMA
    model: str
    arms: tuple[ArmShape, ...]
    levels: tuple[TunedLevel, ...]
    schedule: Schedule | None
    why_not: str | None
    off: str | None
    on: str | None
    is_cross_fitted: bool
    limit: Knee | None
    tied: dict[str, tuple[str, ...]]
    over_profile: OverProfile | None
    warnings: tuple[str, ...]


class _Ground(NamedTuple):
    """What a table can rest on: the arms that an engine can switch between, and the loads where all of them were
    measured and the batch grows."""

    arms: list[TunedArm]
    levels: list[LoadRates]
    warnings: list[str]

    @property
    def names(self) -> list[str]:
        return [arm.name for arm in self.arms]


def tune(
    arms: Sequence[TunedArm], *, source: str, profile: Profile | None = None, warnings: Sequence[str] = ()
) -> Tuned:
    """The schedule of arms that were measured alike.

    Args:
        arms: two or more; of those that draft no tree each has a K of its own.
        source: the directory of the runs.
        profile: the load that the gain is worked out for.
        warnings: what is known of the measurement already.

    Raises:
        UsageError: two arms draft the same, or nothing can be compared.
    """
    ordered = sorted(arms, key=lambda arm: (arm.topk, arm.k, arm.draft_tokens or 0))
    _check_shapes(ordered)
    levels = load_rates([arm.run for arm in ordered])
    ground = _ground(ordered, levels)
    choice = _choice(ground)
    tuned = None if choice.why_not else tuned_rates(ground.levels, ground.names, DELTA)
    gains = [] if choice.why_not else gains_at(ground.levels, ground.names, choice, tuned)
    over = None
    if profile is not None and not choice.why_not:
        found = gains_over(profile, ground.levels, ground.names, choice, tuned)
        over = OverProfile(profile=profile, outside=outside(profile, ground.levels), gains=tuple(found))
    limit = None if choice.why_not else _limit(ground, choice)
    notes = [*warnings, *ground.warnings, *_better_trees(ordered, levels, ground, choice)]
    if not choice.why_not and tuned is None:
        notes.append("the gains are flattered: too few turns to judge the table on others than it was chosen on")
    return Tuned(
        model=ordered[0].run.run.manifest.model,
        arms=tuple(ArmShape(name=arm.name, k=arm.k, topk=arm.topk, draft_tokens=arm.draft_tokens) for arm in ordered),
        levels=tuple(_level(level, ordered, ground, choice, gains) for level in levels),
        schedule=None if choice.why_not else _schedule(ground, choice, limit, source),
        why_not=choice.why_not,
        off=next((arm.name for arm in ground.arms if arm.k == 0), None),
        on=_best_on(ground),
        is_cross_fitted=tuned is not None,
        limit=limit,
        tied={segment.arm: tied for segment, tied in zip(choice.segments, choice.tied, strict=True) if tied},
        over_profile=over,
        warnings=tuple(notes),
    )


def _check_shapes(arms: Sequence[TunedArm]) -> None:
    seen: dict[tuple[int, int, int | None], str] = {}
    for arm in arms:
        shape = (arm.k, arm.topk, arm.draft_tokens if arm.is_tree else None)
        if shape in seen:
            raise UsageError(f"{seen[shape]} and {arm.name} both draft {arm.k} tokens: give one arm for each K")
        seen[shape] = arm.name


def _ground(arms: Sequence[TunedArm], levels: Sequence[LoadRates]) -> _Ground:
    switchable = [arm for arm in arms if not arm.is_tree]
    warnings = []
    failed = {arm.name: [level.name for level in levels if level.log(arm.name) is None] for arm in switchable}
    for name, where in failed.items():
        if where:
            warnings.append(f"{name} brought nothing at {', '.join(where)}: it is left out of the table")
    switchable = [arm for arm in switchable if not failed[arm.name]]
    several = [level for level in levels if all(_has_noise(level, arm.name) for arm in switchable)]
    if few := [level.name for level in levels if level not in several]:
        warnings.append(f"{', '.join(few)}: an arm has too few turns, or too short ones, for an interval; left out")
    if several and any(level.batch is None for level in several):
        warnings.append("no engine tells how many requests it runs: the table is by requests in flight at the client")
        several = [level._replace(batch=None) for level in several]
    kept, queued = growing(several)
    if queued:
        warnings.append(
            f"{', '.join(level.name for level in queued)}: the engine ran no more requests than at a lower load, the "
            "others waited; left out of the table"
        )
    return _Ground(switchable, kept, warnings)


def _has_noise(level: LoadRates, arm: str) -> bool:
    """Whether it is known how sure the arm's throughput is."""
    mean = level.means[arm]
    return isinstance(mean, LogMean) or mean.reason == "zero_variance"


def _choice(ground: _Ground) -> Choice:
    if len(ground.arms) < 2:
        why = f"only {ground.names[0]}" if ground.arms else "none"
        return Choice((), (), f"of the arms that an engine can switch between {why} is left: no table is made")
    if not ground.levels:
        return Choice((), (), "no load was measured long enough in all arms: no table is made; measure longer")
    return choose(ground.levels, ground.names)


def _best_on(ground: _Ground) -> str | None:
    """Of the arms that draft the one with the highest mean log throughput."""
    means = {arm.name: math.fsum(level.log(arm.name) or 0.0 for level in ground.levels) for arm in ground.arms if arm.k}
    return max(means, key=means.__getitem__, default=None)


def _limit(ground: _Ground, choice: Choice) -> Knee:
    return knee({batch_of(level): level.means[choice.arm_at(i)] for i, level in enumerate(ground.levels)})


def _level(
    level: LoadRates, arms: Sequence[TunedArm], ground: _Ground, choice: Choice, gains: Sequence[LevelGains]
) -> TunedLevel:
    place = next((i for i, own in enumerate(ground.levels) if own.load == level.load), None)
    in_table = place is not None and bool(choice.segments)
    rates = tuple(_rate(level, arm.name) for arm in arms)
    known = {rate.arm: rate.value for rate in rates if rate.value is not None}
    return TunedLevel(
        load=level.load,
        name=level.name,
        batch=level.batch,
        rates=rates,
        best=max(known, key=known.__getitem__, default=None),
        arm=choice.arm_at(place) if in_table and place is not None else None,
        gains=gains[place] if in_table and place is not None else None,
    )


def _rate(level: LoadRates, arm: str) -> ArmRate:
    log, mean = level.log(arm), level.means[arm]
    ci95 = None
    if isinstance(mean, LogMean):
        half = t_quantile(0.975, mean.df) * mean.se
        ci95 = Interval(math.exp(mean.log - half), math.exp(mean.log + half))
    return ArmRate(arm=arm, value=None if log is None else math.exp(log), ci95=ci95)


def _schedule(ground: _Ground, choice: Choice, limit: Knee | None, source: str) -> Schedule:
    ks = {arm.name: arm.k for arm in ground.arms}
    manifest = ground.arms[-1].run.run.manifest
    config: Mapping[str, Any] = manifest.target.get("config") or {}
    ranges, borders = ranges_of(choice, ground.levels, ks, _most_batch(config))
    drafter = drafter_of(manifest)
    return Schedule(
        model=manifest.model,
        ranges=ranges,
        engine=_text(manifest.target.get("engine")),
        engine_version=_text(manifest.target.get("version")),
        method=drafter.method,
        speculation=drafter.settings,
        max_tokens=next((plan.max_tokens for plan in manifest.levels), None),
        borders=borders,
        arms={k: name for name, k in ks.items()},
        batch_from="concurrency" if ground.levels[0].batch is None else "running",
        measured_to=ground.levels[-1].batch or ground.levels[-1].load,
        levels=tuple(
            Level(level.load, level.batch or level.load, ks[choice.arm_at(i)], _rates(level, ks))
            for i, level in enumerate(ground.levels)
        ),
        limit=_as_limit(limit),
        source=source,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _rates(level: LoadRates, ks: Mapping[str, int]) -> dict[int, Rate]:
    found = {k: _rate(level, arm) for arm, k in ks.items()}
    return {k: Rate(rate.value or 0.0, *_ends(rate.ci95)) for k, rate in found.items()}


def _ends(interval: Interval | None) -> tuple[float | None, float | None]:
    return (None, None) if interval is None else (interval.low, interval.high)


def _most_batch(config: Mapping[str, Any]) -> int | None:
    return next((config[name] for name in _MOST_BATCH if isinstance(config.get(name), int)), None)


def _as_limit(found: Knee | None) -> Limit | None:
    if found is None:
        return None
    return Limit(found.kind, found.load, *_ends(found.ci95))


def _better_trees(arms: Sequence[TunedArm], levels: Sequence[LoadRates], ground: _Ground, choice: Choice) -> list[str]:
    """Where a tree is faster than what the table has: only a restart can bring that."""
    if choice.why_not:
        return []
    found = []
    for i, level in enumerate(ground.levels):
        whole = next(own for own in levels if own.load == level.load)
        ratios = {arm.name: whole.ratio(choice.arm_at(i), arm.name) for arm in arms if arm.is_tree}
        better = {
            name: ratio
            for name, ratio in ratios.items()
            if isinstance(ratio, Ratio) and ratio.log > 0 and ratio.p_value * len(ratios) < 0.05
        }
        if better:
            name, ratio = max(better.items(), key=lambda item: item[1].log)
            ends = ratio.interval()
            found.append(
                f"{level.name}: the tree {name} is {100 * (ratio.value - 1):.0f} % faster than the table's "
                f"{choice.arm_at(i)} (95 %: {100 * (ends.low - 1):.0f} to {100 * (ends.high - 1):.0f}), and no engine "
                "changes to a tree while it runs"
            )
    return found


def _text(value: object) -> str | None:
    return None if value is None else str(value)
