"""A tuned arm against static ones that took turns with it: does it hold their envelope, and did it do what it says?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from breakeven.decide.atload import ArmAtLoad, Compared, arm_at_load, value_of
from breakeven.decide.caveats import batch_caveats, looping_caveats, measuring_caveats
from breakeven.decide.drafting import Drafting, drafting, drafting_caveats
from breakeven.decide.envelope import EnvelopeRatio, envelope_ratio
from breakeven.decide.holding import AtLevel, Holding, holding
from breakeven.decide.likeness import check_alike, check_servers, common_loads, lengths_compared
from breakeven.decide.ratio import NoRatio, Ratio, paired
from breakeven.decide.schedule import Schedule
from breakeven.decide.texts import repeating
from breakeven.decide.turns import ArmRun, How, Turn, blocks_of, how_measured, turns_of, whole
from breakeven.decide.verdict import DELTA, judge
from breakeven.errors import RunError, UsageError

__all__ = ["MARGIN", "VERIFICATION_SCHEMA", "Verification", "VerifiedLoad", "check_roles", "verify"]

#: Version of the layout of verification.json. History: 1, the first.
VERIFICATION_SCHEMA = "breakeven.verification/1"
#: How far below the best static arm still counts as holding the envelope.
MARGIN = 0.03

Block = Mapping[str, Turn]
Turns = Mapping[float, Sequence[Turn]]


class VerifiedLoad(Struct, frozen=True, kw_only=True):
    """One load.

    Attributes:
        arms: each arm's numbers, the tuned one last.
        static: by static arm the throughput of the tuned one over it; verdicts are corrected over arms and loads.
        envelope: the tuned arm over the best static one.
        drafting: what the tuned arm drafted, and should have.
    """

    load: float
    name: str
    arms: tuple[ArmAtLoad, ...]
    static: dict[str, Compared]
    envelope: AtLevel
    drafting: Drafting


class Verification(Struct, frozen=True, kw_only=True):
    """What came of putting a tuned arm to the proof.

    Attributes:
        tuned, static: the arms' names.
        directories: where each arm's run is, by its name.
        how: as the arms were measured.
        max_tokens: of each request.
        delta: below which arms are called the same.
        holding: the verdict.
        warnings: what to know before quoting anything.
    """

    schema: str = VERIFICATION_SCHEMA
    model: str
    tuned: str
    static: tuple[str, ...]
    directories: dict[str, str]
    how: How
    max_tokens: int
    delta: float
    loads: tuple[VerifiedLoad, ...]
    holding: Holding
    warnings: tuple[str, ...]


def check_roles(names: Sequence[str], tuned: str | None) -> str:
    """The name of the arm to prove: the given one, else the last.

    Raises:
        UsageError: there is no such arm, or fewer than two static ones beside it.
    """
    if tuned is not None and tuned not in names:
        raise UsageError(f"--tuned {tuned}: no arm has this name; there are {', '.join(names)}")
    if len(names) < 3:
        raise UsageError(
            "verify needs two static arms or more beside the tuned one: "
            "--arm off=URL --arm on=URL --arm tuned=URL (compare holds two arms against each other)"
        )
    return names[-1] if tuned is None else tuned


def verify(
    arms: Sequence[ArmRun],
    tuned: str | None = None,
    *,
    margin: float = MARGIN,
    schedule: Schedule | None = None,
    force: bool = False,
) -> Verification:
    """Puts a tuned arm to the proof.

    Args:
        arms: three or more that took turns; the last is the tuned one where `tuned` names no other.
        margin: how far below the best static arm still counts as holding the envelope, a share.
        schedule: what the tuned arm was started with.
        force: go on with runs that are unlike.

    Raises:
        UsageError: the runs can't be compared, or did not take turns; the schedule is for another model.
    """
    name = check_roles([arm.name for arm in arms], tuned)
    ordered = [arm for arm in arms if arm.name != name] + [arm for arm in arms if arm.name == name]
    how = _how(ordered)
    manifests = {arm.name: arm.run.manifest for arm in ordered}
    warnings = check_alike(manifests, force) + check_servers(manifests, force)
    if schedule is not None:
        schedule.check_model(manifests[name].model, "--schedule")
    plans = {arm.name: [level.plan for level in arm.run.levels] for arm in ordered}
    lengths = lengths_compared(plans)
    loads = common_loads(plans, lengths)
    every = {arm.name: turns_of(arm.run, lengths[arm.name]) for arm in ordered}
    shared = {own: {load: whole(turns[load]) for load in loads} for own, turns in every.items()}
    found = _loads(loads, shared, how, margin, schedule)
    looping = tuple(each for own, turns in shared.items() for each in repeating(own, turns))
    at_load = {each.load: {arm.arm: arm for arm in each.arms} for each in found[0]}
    caveats = [
        *measuring_caveats(ordered, every, {}),
        *drafting_caveats(name, {each.name: each.drafting for each in found[0]}),
        *batch_caveats(shared, at_load),
        *looping_caveats(looping),
    ]
    return Verification(
        model=manifests[name].model,
        tuned=name,
        static=tuple(shared)[:-1],
        directories={arm.name: arm.directory for arm in ordered},
        how=how,
        max_tokens=lengths[name],
        delta=DELTA,
        loads=found[0],
        holding=found[1],
        warnings=tuple(warnings + caveats),
    )


def _how(arms: Sequence[ArmRun]) -> How:
    *static, tuned = arms
    for arm in arms:
        if not arm.run.requests or not arm.run.levels:
            raise RunError(f"{arm.directory} ({arm.name}) has no records: measure it again, or name another run")
        if arm.run.levels[0].plan.mode != "closed":
            raise UsageError(
                f"{arm.name} was measured in an open loop: verify wants requests in flight (--concurrency)"
            )
    how = {arm.name: how_measured(tuned.run.manifest, arm.run.manifest) for arm in static}
    apart = [name for name, own in how.items() if own == "batches"]
    if apart:
        raise UsageError(
            f"{' and '.join(apart)} did not take turns with {tuned.name}: what the machine did in between would "
            "pass for a difference; measure them together (breakeven verify --arm …)"
        )
    return how[static[0].name]


def _loads(
    loads: Sequence[float], turns: Mapping[str, Turns], how: How, margin: float, schedule: Schedule | None
) -> tuple[tuple[VerifiedLoad, ...], Holding]:
    *static, tuned = turns
    blocks = {load: blocks_of({name: own[load] for name, own in turns.items()}) for load in loads}
    names = {load: turns[tuned][load][0].level.plan.name for load in loads}
    ratios = {(arm, load): _ratio(blocks[load], arm, tuned, how) for load in loads for arm in static}
    judged = judge(ratios)
    held = holding(
        {load: _against_best(blocks[load], static, tuned) for load in loads},
        names,
        arm=tuned,
        margin=margin,
        unit=("cycle", 2) if how == "pairs" else ("repeat", 1),
    )
    drafted = drafting(turns[tuned], schedule)
    found = []
    for load, at_level in zip(loads, held.levels, strict=True):
        at = {name: arm_at_load(name, own[load]) for name, own in turns.items()}
        compared = {
            arm: Compared.of(ratios[arm, load], judged[arm, load], value_of("throughput", at[arm], at[tuned]))
            for arm in static
        }
        found.append(
            VerifiedLoad(
                load=load,
                name=names[load],
                arms=tuple(at.values()),
                static=compared,
                envelope=at_level,
                drafting=drafted[load],
            )
        )
    return tuple(found), held


def _ratio(blocks: Sequence[Block], arm: str, tuned: str, how: How) -> Ratio | NoRatio:
    mine, its = ([block[name].rate for block in blocks] for name in (arm, tuned))
    return paired(mine, its, method=how, names=(arm, tuned))


def _against_best(blocks: Sequence[Block], static: Sequence[str], tuned: str) -> EnvelopeRatio | NoRatio:
    rates = {name: [block[name].rate for block in blocks] for name in (*static, tuned)}
    mine = rates.pop(tuned)
    return envelope_ratio(mine, rates, name=tuned)
