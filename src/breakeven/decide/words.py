"""Verdicts in words that a person can quote."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

from breakeven.decide.breakeven import BreakEven, Crossing, Kind, State
from breakeven.decide.knee import Knee
from breakeven.decide.ratio import Ratio
from breakeven.decide.verdict import Longer

__all__ = ["break_even_sentence", "knee_words", "longer_words"]


def break_even_sentence(found: BreakEven, *, reference: str, other: str, is_rate: bool = False) -> str:
    """The answer in one sentence, without a full stop.

    Args:
        found: where the other arm pays.
        reference, other: the arms' names. `on` against `off` is called speculation.
        is_rate: whether loads are requests a second instead of requests in flight.
    """
    subject = "speculation" if (reference, other) == ("off", "on") else f"{other} against {reference}"
    text = _BY_KIND[found.kind](found, subject) + _without_verdict(found)
    if is_rate:
        text = re.sub(r"\bC=([\d.]*\d)", r"\1/s", text.replace("requests in flight", "requests a second"))
    return text if text.startswith(other) else text[0].upper() + text[1:]


def longer_words(loads: Sequence[Longer]) -> str:
    """Which loads to measure longer, and by how much: `measure C=8 and C=16 about 4 min longer each`."""
    bearable = [item for item in loads if item.observations is not None]
    if not bearable:
        return f"no bearable time would decide {_listed([f'C={_load(item.load)}' for item in loads])}"
    times = [_time(item) for item in bearable]
    names = [f"C={_load(item.load)}" for item in bearable]
    if len(set(times)) == 1:
        return f"measure {_listed(names)} {times[0]} longer{' each' * (len(names) > 1)}"
    return f"measure {_listed([f'{name} {time}' for name, time in zip(names, times, strict=True)])} longer"


def knee_words(found: Knee) -> str:
    """An arm's knee: `12 requests in flight (95 %: 10 to 15)`."""
    if found.load is None:
        return f"not known: {found.why_not}"
    if found.ci95 is None:
        return (
            f"at or {'below' if found.kind == 'at_or_below_lowest' else 'above'} {_load(found.load)} requests in flight"
        )
    grows = ", and throughput still grows a little at the highest load" * found.grows
    return f"{_load(found.load)} requests in flight (95 %: {_load(found.ci95.low)} to {_load(found.ci95.high)}){grows}"


def _everywhere(found: BreakEven, subject: str) -> str:
    return f"{subject} pays at {_every(found)}: {_sizes(found, 'pays')}"


def _nowhere(found: BreakEven, subject: str) -> str:
    costs = f"{_sizes(found, 'costs')} at {_every(found)}" if set(found.states) == {"costs"} else _by_state(found)
    return f"{subject} pays nowhere: {costs}"


def _no_difference(found: BreakEven, subject: str) -> str:
    return f"{subject} makes no difference beyond {100 * found.delta:g} % at {_every(found)}"


def _one_crossing(word: str) -> Callable[[BreakEven, str], str]:
    return lambda found, subject: (
        f"{subject} pays {word} {_at(found.crossings[0], unit=True)} and costs {_worst(found)}{_more(found)}"
    )


def _inside(found: BreakEven, subject: str) -> str:
    first, second = found.crossings
    return f"{subject} pays between {_at(first)} and {_at(second, unit=True)}, {_best(found)}{_more(found)}"


def _outside(found: BreakEven, subject: str) -> str:
    first, second = found.crossings
    return (
        f"{subject} pays below {_at(first)} and above {_at(second, unit=True)} and costs {_worst(found)}{_more(found)}"
    )


def _partial(found: BreakEven, subject: str) -> str:
    return f"{subject} {_by_state(found)}{_bound(found)}{_more(found)}"


def _suspected(found: BreakEven, subject: str) -> str:
    near = _listed([_load(crossing.load) for crossing in found.crossings if crossing.load is not None])
    text = f"{subject} seems to cross break-even {len(found.crossings)} times, near {near} requests in flight"
    return f"{text}: measure C={_listed(list(map(str, found.add_loads)))} too" if found.add_loads else text


def _cant_tell(found: BreakEven, subject: str) -> str:
    same = [load for load, state in zip(found.loads, found.states, strict=True) if state == "same"]
    known = f" (it makes no difference beyond {100 * found.delta:g} % at {_loads(same, found)})" if same else ""
    return f"the data can't tell where {subject} pays{known}: {longer_words(found.longer)}"


def _nothing(found: BreakEven, subject: str) -> str:
    reasons = dict.fromkeys(f"at {_load(load)} {why.detail}" for load, why in found.unusable)
    return f"{subject} can't be judged: {'; '.join(reasons) or 'no load was measured in both arms'}"


_PARTIAL: tuple[Kind, ...] = ("pays_up_to", "pays_from", "costs_up_to", "costs_from", "partly")
_BY_KIND: dict[Kind, Callable[[BreakEven, str], str]] = {
    "pays_everywhere": _everywhere,
    "pays_nowhere": _nowhere,
    "no_difference": _no_difference,
    "pays_below": _one_crossing("below"),
    "pays_above": _one_crossing("above"),
    "pays_between": _inside,
    "pays_outside": _outside,
    **dict.fromkeys(_PARTIAL, _partial),
    "crossings_suspected": _suspected,
    "cant_tell": _cant_tell,
    "nothing_to_compare": _nothing,
}


def _by_state(found: BreakEven) -> str:
    """`pays at 1 to 4 (between 8 % and 63 % faster), undecided at 8`: each state where there is one."""
    verbs: dict[State, str] = {
        "pays": "pays",
        "costs": "costs",
        "same": f"no difference beyond {100 * found.delta:g} %",
        "open": "undecided",
    }
    parts = []
    for state, verb in verbs.items():
        loads = [load for load, own in zip(found.loads, found.states, strict=True) if own == state]
        if loads:
            sizes = f" ({_sizes(found, state)})" if state in ("pays", "costs") else ""
            parts.append(f"{verb} at {_loads(loads, found)}{sizes}")
    return ", ".join(parts)


def _bound(found: BreakEven) -> str:
    if not found.crossings:
        return ""
    crossing = found.crossings[0]
    side, load = ("above", crossing.low) if crossing.low is not None else ("below", crossing.high)
    return (
        "" if load is None else f"; its break-even, if it has one, lies {side} {_load(load)} requests in flight (95 %)"
    )


def _more(found: BreakEven) -> str:
    return f"; for the rest {longer_words(found.longer)}" if found.longer else ""


def _every(found: BreakEven) -> str:
    which = "with a verdict" if found.unusable else "measured"
    if len(found.loads) == 1:
        return f"the one load {which} ({_load(found.loads[0])})"
    return f"every load {which} ({_load(found.loads[0])} to {_load(found.loads[-1])})"


def _without_verdict(found: BreakEven) -> str:
    """The loads that the answer leaves out: who quotes it would take them for measured and found alike."""
    loads = [_load(load) for load, _ in found.unusable] if found.loads else []
    return f"; no verdict at {_listed(loads)}" if loads else ""


def _at(crossing: Crossing, *, unit: bool = False) -> str:
    inside = [load for load in (crossing.low, crossing.high) if load is not None]
    interval = f" (95 %: {' to '.join(map(_load, inside))})"
    return f"{_load(crossing.load or math.sqrt(inside[0] * inside[-1]))}{' requests in flight' * unit}{interval}"


def _worst(found: BreakEven) -> str:
    load, ratio = min(zip(found.loads, found.ratios, strict=True), key=lambda pair: pair[1].gain)
    return f"{_percent(ratio)} at {_load(load)}"


def _best(found: BreakEven) -> str:
    load, ratio = max(zip(found.loads, found.ratios, strict=True), key=lambda pair: pair[1].gain)
    return f"{_percent(ratio)} {_adjective(ratio)} at {_load(load)}"


def _sizes(found: BreakEven, state: State) -> str:
    """`between 8 % and 63 % faster`, over the loads of one state."""
    ratios = sorted(
        (ratio for ratio, own in zip(found.ratios, found.states, strict=True) if own == state),
        key=lambda ratio: abs(ratio.gain),
    )
    least, most = _percent(ratios[0]), _percent(ratios[-1])
    return f"{least if least == most else f'between {least} and {most}'} {_adjective(ratios[0])}"


def _adjective(ratio: Ratio) -> str:
    if ratio.lower_is_better:
        return "shorter" if ratio.gain > 0 else "longer"
    return "faster" if ratio.gain > 0 else "slower"


def _percent(ratio: Ratio) -> str:
    size = 100 * abs(ratio.value - 1)
    return f"{size:.0f} %" if size >= 1 else f"{size:.1f} %"


def _loads(loads: Sequence[float], found: BreakEven) -> str:
    """`1 to 8` where they are neighbours among those measured, else one by one."""
    first = found.loads.index(loads[0])
    if len(loads) > 2 and tuple(loads) == found.loads[first : first + len(loads)]:
        return f"{_load(loads[0])} to {_load(loads[-1])}"
    return _listed([_load(load) for load in loads])


def _load(load: float) -> str:
    """Two digits below ten, whole numbers above; measured loads as they are."""
    if load < 0.95:
        return f"{load:.2g}"
    return f"{load:.0f}" if load >= 9.95 or load == round(load) else f"{load:.1f}"


def _time(item: Longer) -> str:
    if item.seconds is None:
        return f"by {item.observations} observations"
    if item.seconds < 90:
        return f"about {math.ceil(item.seconds / 10) * 10} s"
    return f"about {math.ceil(item.seconds / 60)} min"


def _listed(items: Sequence[str]) -> str:
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)
