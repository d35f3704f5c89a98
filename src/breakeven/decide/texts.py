"""What the texts of two arms tell: whether speculation changed them, and whether loops flatter an arm."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import combinations

from msgspec import Struct

from breakeven.decide.lossless import Difference, differing
from breakeven.decide.turns import Turn
from breakeven.records import RequestRecord

__all__ = ["REPEATING", "Losslessness", "Repeating", "losslessness", "repeating"]

#: The share of answers that end in a loop from which an arm is named; the check `degenerate` has the same.
REPEATING = 0.1

Turns = Mapping[float, Sequence[Turn]]


class Losslessness(Struct, frozen=True, kw_only=True):
    """How many answers differ: of each other arm against the reference, and of each arm between two of its passes.

    An answer is one prompt at one load. Both are by arm and empty where `why_not` says why; `within` lacks arms that
    answered no prompt twice.
    """

    between: dict[str, Difference]
    within: dict[str, Difference]
    why_not: str | None = None


class Repeating(Struct, frozen=True, kw_only=True):
    """An arm and load at which many answers end in a loop: their share, over all and by the kinds that do so most."""

    arm: str
    load: float
    name: str
    share: float
    kinds: dict[str, float]


def losslessness(arms: Mapping[str, Turns], temperature: float) -> Losslessness:
    """Compares the texts of the arms' answers.

    Ramp requests, which are cut at random lengths, don't count, nor do answers of unequal max-tokens.

    Args:
        arms: by name each arm's turns by load, the reference first.
        temperature: at which they were sampled: above 0 any two answers differ.
    """
    if temperature > 0:
        return Losslessness(between={}, within={}, why_not=f"at temperature {temperature:g} any two answers differ")
    texts = {name: _texts(turns) for name, turns in arms.items()}
    if not any(texts.values()):
        return Losslessness(between={}, within={}, why_not="no texts were kept: --keep-text keeps them")
    reference, *others = texts
    between = {other: _between(texts[reference], texts[other]) for other in others}
    within = {name: found for name, own in texts.items() if (found := _within(own)).prompts}
    return Losslessness(between=between, within=within)


def repeating(arm: str, turns: Turns) -> list[Repeating]:
    """The loads at which more than a tenth of an arm's answers end in a loop."""
    found = []
    for load, own in sorted(turns.items()):
        well = [record for turn in own for record in turn.well]
        looping = Counter(record.kind for record in well if record.repetition > 0.5)
        if well and looping.total() > REPEATING * len(well):
            sent = Counter(record.kind for record in well)
            kinds = {kind: count / sent[kind] for kind, count in looping.most_common()}
            most = {kind: share for kind, share in kinds.items() if share > REPEATING}
            name, share = own[0].level.plan.name, looping.total() / len(well)
            found.append(Repeating(arm=arm, load=load, name=name, share=share, kinds=most))
    return found


class _Answer(Struct, frozen=True):
    """One text, and where it is from: load, number of its turn, index of its level."""

    load: float
    turn: int
    level: int
    prompt: str
    max_tokens: int
    text: str


def _texts(turns: Turns) -> list[_Answer]:
    """The answers in the order of their loads and turns; of a prompt that a turn answers twice the first."""
    seen: dict[tuple[int, str], _Answer] = {}
    for load, own in sorted(turns.items()):
        for turn in own:
            for record in turn.records:
                if _counts(record):
                    plan = turn.level.plan
                    answer = _Answer(load, plan.run, plan.index, record.prompt, record.max_tokens, record.text or "")
                    seen.setdefault((plan.index, record.prompt), answer)
    return list(seen.values())


def _counts(record: RequestRecord) -> bool:
    return record.text is not None and record.outcome == "ok" and record.phase in ("measured", "drain")


def _between(reference: Sequence[_Answer], other: Sequence[_Answer]) -> Difference:
    """The same prompt at the same load and turn; of several turns the first that both have."""
    theirs = {(answer.load, answer.turn, answer.prompt, answer.max_tokens): answer for answer in other}
    first: dict[str, str] = {}
    second: dict[str, str] = {}
    for answer in reference:
        partner = theirs.get((answer.load, answer.turn, answer.prompt, answer.max_tokens))
        name = f"{answer.prompt} at load {answer.load:g}"
        if partner is not None and name not in first:
            first[name], second[name] = answer.text, partner.text
    return differing(first, second)


def _within(answers: Sequence[_Answer]) -> Difference:
    """The same prompt in two turns of a load; where no load has two turns, at any two loads."""
    same_load = _twice(answers, lambda answer: (answer.load, answer.prompt, answer.max_tokens))
    return same_load if same_load.prompts else _twice(answers, lambda answer: (answer.prompt, answer.max_tokens))


def _twice(answers: Sequence[_Answer], key: Callable[[_Answer], Hashable]) -> Difference:
    groups: defaultdict[Hashable, list[_Answer]] = defaultdict(list)
    for answer in answers:
        groups[key(answer)].append(answer)
    passes = {str(name): next(iter(combinations(own, 2)), None) for name, own in groups.items()}
    both = {f"{own[0].prompt} {name}": own for name, own in passes.items() if own is not None}
    return differing(
        {name: first.text for name, (first, _) in both.items()},
        {name: second.text for name, (_, second) in both.items()},
    )
