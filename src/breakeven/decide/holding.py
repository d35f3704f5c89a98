"""Whether a tuned arm holds the envelope of the static ones within a margin, over all loads, and that in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from msgspec import Struct

from breakeven.decide.envelope import EnvelopeRatio, over_levels
from breakeven.decide.ratio import NoRatio
from breakeven.decide.verdict import SIGNIFICANCE, holm, more_wanted
from breakeven.measure.stats import Interval

__all__ = ["AtLevel", "Holding", "LevelState", "Outcome", "holding"]

#: `holds`: surely above 1 - margin; `loses`: surely below; `close`: neither, and measured as finely as the margin;
#: `open`: neither, and not measured finely enough; `unknown`: no ratio.
LevelState = Literal["holds", "loses", "close", "open", "unknown"]
Outcome = Literal["holds", "loses", "undecided"]


class AtLevel(Struct, frozen=True, kw_only=True):
    """One load: the tuned arm over the best static one.

    Attributes:
        value, ci95: the ratio with its interval; None where there is none.
        half_width: of the interval, on the log scale.
        n: blocks that it rests on.
        best: the static arms that were chosen as the best, one for each half of the blocks where they differ.
        p_holm: of the ratio being 1 - margin, adjusted over the loads.
        more: blocks that would make it as fine as the margin; None where it is, or where nothing would.
        why_not: the reason where there is no ratio.
    """

    load: float
    name: str
    state: LevelState
    value: float | None = None
    ci95: Interval | None = None
    half_width: float | None = None
    n: int | None = None
    best: tuple[str, ...] = ()
    p_holm: float | None = None
    more: int | None = None
    why_not: NoRatio | None = None


class Holding(Struct, frozen=True, kw_only=True):
    """The verdict over all loads.

    Attributes:
        margin: how far below the envelope still counts as holding it.
        levels: in rising order of load.
        mean, mean_ci95: the geometric mean over the loads that have a ratio; None where none has.
        outcome: `loses` where a level does (Holm over the levels) or the mean's interval lies wholly below 1 - margin;
            `holds` where all levels do, or where the mean's lower end is at least 1 - margin and no level is `open` or
            `unknown`; else `undecided`.
        sentence: to quote, without a full stop.
    """

    margin: float
    levels: tuple[AtLevel, ...]
    mean: float | None
    mean_ci95: Interval | None
    outcome: Outcome
    sentence: str


class _Loads(NamedTuple):
    """What the verdict rests on."""

    arm: str
    margin: float
    unit: tuple[str, int]
    levels: tuple[AtLevel, ...]
    mean: EnvelopeRatio | None
    ratios: Sequence[EnvelopeRatio]

    def at(self, *states: LevelState) -> list[AtLevel]:
        """The levels in one of these states."""
        return [level for level in self.levels if level.state in states]


def holding(
    ratios: Mapping[float, EnvelopeRatio | NoRatio],
    names: Mapping[float, str],
    *,
    arm: str,
    margin: float,
    unit: tuple[str, int] = ("cycle", 2),
) -> Holding:
    """The verdict on all loads.

    Being above the margin at every level needs no correction, since each part of that claim has to pass; being below
    it at any level does (Holm).

    Args:
        ratios: by load in rising order.
        names: of the loads.
        arm: the tuned arm's name.
        margin: a share, such as 0.03.
        unit: what is measured more of, and of how many blocks one is.
    """
    usable = {load: ratio for load, ratio in ratios.items() if isinstance(ratio, EnvelopeRatio)}
    adjusted = dict(zip(usable, holm([ratio.p_value(1 - margin) for ratio in usable.values()]), strict=True))
    levels = tuple(_level(load, names[load], ratio, adjusted.get(load), margin) for load, ratio in ratios.items())
    mean = over_levels(list(usable.values())) if usable else None
    found = _Loads(arm, margin, unit, levels, mean, list(usable.values()))
    outcome = _outcome(found)
    return Holding(
        margin=margin,
        levels=levels,
        mean=mean.value if mean else None,
        mean_ci95=mean.interval() if mean else None,
        outcome=outcome,
        sentence=_SENTENCES[outcome](found),
    )


def _level(load: float, name: str, ratio: EnvelopeRatio | NoRatio, p_holm: float | None, margin: float) -> AtLevel:
    if isinstance(ratio, NoRatio):
        return AtLevel(load=load, name=name, state="unknown", why_not=ratio)
    state = _state(ratio, p_holm or 0.0, margin)
    return AtLevel(
        load=load,
        name=name,
        state=state,
        value=ratio.value,
        ci95=ratio.interval(),
        half_width=ratio.half_width,
        n=ratio.n,
        best=ratio.best,
        p_holm=p_holm,
        more=_finer(ratio, margin) if state == "open" else None,
    )


def _state(ratio: EnvelopeRatio, p_holm: float, margin: float) -> LevelState:
    if ratio.value < 1 - margin and p_holm < SIGNIFICANCE:
        return "loses"
    if ratio.interval().low >= 1 - margin:
        return "holds"
    return "close" if ratio.half_width <= margin else "open"


def _finer(ratio: EnvelopeRatio, margin: float) -> int | None:
    return more_wanted(ratio.n, lambda times: ratio.after(times).half_width <= margin)


def _outcome(found: _Loads) -> Outcome:
    if found.mean is None:
        return "undecided"
    inside = found.mean.interval()
    if found.at("loses") or inside.high < 1 - found.margin:
        return "loses"
    if found.at("unknown"):
        return "undecided"
    if len(found.at("holds")) == len(found.levels):
        return "holds"
    return "holds" if inside.low >= 1 - found.margin and not found.at("open") else "undecided"


def _holds(found: _Loads) -> str:
    percent = f"{100 * found.margin:g} % below the best static arm"
    if len(found.at("holds")) == len(found.levels):
        how = f"nowhere more than {percent}"
    else:
        lowest = min(found.at("close"), key=lambda level: level.value or 0.0)
        how = f"at no load surely more than {percent} (lowest at {lowest.name}: {_with_interval(lowest)})"
    return f"{found.arm} holds the envelope: {how}, geometric mean {_mean(found)}"


def _loses(found: _Loads) -> str:
    places = [f"at {level.name}: {_with_interval(level)} of {' or '.join(level.best)}" for level in found.at("loses")]
    if not places:
        return (
            f"{found.arm} loses over all loads: geometric mean {_mean(found)} of the best static arm, "
            f"below {1 - found.margin:g}"
        )
    return f"{found.arm} loses {'; '.join(places)}"


def _undecided(found: _Loads) -> str:
    parts = [f"no ratio at {level.name} ({level.why_not.detail})" for level in found.at("unknown") if level.why_not]
    wide = found.at("open")
    if wide:
        widths = ", ".join(f"{level.name} (±{100 * (level.half_width or 0):.1f} %)" for level in wide)
        parts.append(f"intervals too wide at {widths}, {_more(found, [level.more for level in wide])}")
    elif not parts:
        parts.append(
            f"the geometric mean {_mean(found)} reaches below {1 - found.margin:g}, {_more(found, [_surer(found)])}"
        )
    return f"undecided: {'; '.join(parts)}"


_SENTENCES = {"holds": _holds, "loses": _loses, "undecided": _undecided}


def _surer(found: _Loads) -> int | None:
    """Blocks at each load that would bring the mean's lower end up to the margin."""

    def passes(times: float) -> bool:
        return over_levels([ratio.after(times) for ratio in found.ratios]).interval().low >= 1 - found.margin

    return more_wanted(min(ratio.n for ratio in found.ratios), passes)


def _more(found: _Loads, blocks: Sequence[int | None]) -> str:
    word, size = found.unit
    if any(each is None for each in blocks):
        return f"and no bearable number of {word}s would do"
    wanted = math.ceil(max(each or 0 for each in blocks) / size)
    return f"{wanted} more {word}{'s' * (wanted > 1)} would do"


def _mean(found: _Loads) -> str:
    if found.mean is None:
        return "unknown"
    inside = found.mean.interval()
    return f"{found.mean.value:.3f} (95 %: {inside.low:.3f} to {inside.high:.3f})"


def _with_interval(level: AtLevel) -> str:
    if level.value is None or level.ci95 is None:
        return "unknown"
    return f"{level.value:.3f} (95 %: {level.ci95.low:.3f} to {level.ci95.high:.3f})"
