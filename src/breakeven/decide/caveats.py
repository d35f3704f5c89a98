"""What to know before quoting a comparison, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from breakeven.decide.atload import ArmAtLoad
from breakeven.decide.texts import Repeating
from breakeven.decide.turns import ArmRun, How, Turn

__all__ = ["batch_caveats", "looping_caveats", "measuring_caveats"]

#: Running batches further apart than this, at the same load, are not the same load for the engine; and by at least so
#: many requests, since the gauge is sampled.
_BATCH_SHARE, _BATCH_REQUESTS = 0.05, 0.5

Turns = Mapping[float, Sequence[Turn]]


def measuring_caveats(arms: Sequence[ArmRun], turns: Mapping[str, Turns], how: Mapping[str, How]) -> list[str]:
    """What went otherwise than planned while measuring: runs cut short, pins that didn't hold, arms without turns."""
    warnings = [f"{arm.name}: {arm.run.damaged}; the run is used up to it" for arm in arms if arm.run.damaged]
    for name, own in turns.items():
        cut = [turn.level.plan.name for visits in own.values() for turn in visits if not turn.is_finished]
        if cut:
            warnings.append(f"{name}: measuring was cut short at {', '.join(dict.fromkeys(cut))}")
    warnings += [caveat for arm in arms for caveat in _pin_caveats(arm, turns[arm.name])]
    apart = [name for name, own_how in how.items() if own_how == "batches"]
    if apart:
        warnings.append(
            f"{' and '.join(apart)} did not take turns with {arms[0].name}: the intervals know nothing of what the "
            "machine did between the runs (under drifts of some percent they hold the truth in 83 to 90 of 100 cases)"
        )
    return warnings


def _pin_caveats(arm: ArmRun, turns: Turns) -> list[str]:
    every = [turn.level for own in turns.values() for turn in own]
    broken = [level for level in every if level.pin_broken]
    if not broken:
        return []
    pin = arm.run.manifest.flags.get("pin")
    what = "the policy's choice" if pin == "auto" else f"K={pin}"
    where = ", ".join(dict.fromkeys(level.plan.name for level in broken))
    why = "; ".join(dict.fromkeys(str(level.pin_broken) for level in broken))
    return [
        f"{arm.name}: its pin did not hold in {len(broken)} of {len(every)} turns, at {where} ({why}): what was "
        f"measured there is not {what}"
    ]


def batch_caveats(turns: Mapping[str, Turns], at_load: Mapping[float, Mapping[str, ArmAtLoad]]) -> list[str]:
    """Arms whose engines ran batches of unequal size at the same load."""
    reference, *others = turns
    found = []
    for load, by_arm in at_load.items():
        mine = by_arm[reference].running
        for other in others:
            its = by_arm[other].running
            if mine is None or its is None:
                continue
            if abs(its - mine) > max(_BATCH_SHARE * mine, _BATCH_REQUESTS):
                name = turns[reference][load][0].level.plan.name
                found.append(f"{name}: the engine ran {mine:.1f} requests at once in {reference}, {its:.1f} in {other}")
    return found


def looping_caveats(looping: Sequence[Repeating]) -> list[str]:
    """The arms whose answers loop: a line each, with the loads and the kinds that do so most."""
    caveats = []
    for arm in dict.fromkeys(each.arm for each in looping):
        own = [each for each in looping if each.arm == arm]
        least, largest = (_percent(pick(each.share for each in own)) for pick in (min, max))
        most: dict[str, float] = {}
        for each in own:
            most |= {kind: max(share, most.get(kind, 0.0)) for kind, share in each.kinds.items()}
        kinds = ", ".join(f"{kind} {_percent(share)}" for kind, share in most.items())
        span = least if least == largest else f"{least} to {largest}"
        caveats.append(
            f"{arm}: {span} of the answers at {', '.join(each.name for each in own)} end in a loop (at most {kinds}): "
            "repetition is easily drafted, so it flatters speculation"
        )
    return caveats


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
