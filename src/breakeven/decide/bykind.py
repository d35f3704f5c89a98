"""Where an arm pays for one kind of prompts, if that is not where it pays for the rest.

A kind has no throughput of its own in a mixed batch: its decode rate is compared, tokens after the first arrival over
the time from first to last arrival, of that kind's requests in each turn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct

from breakeven.decide.breakeven import BreakEven, break_even
from breakeven.decide.ratio import NoRatio, Ratio, paired
from breakeven.decide.turns import How, Turn, decoding
from breakeven.decide.verdict import SIGNIFICANCE, holm
from breakeven.records import RequestRecord

__all__ = ["KindAnswer", "KindDifference", "by_kind"]


class KindDifference(Struct, frozen=True, kw_only=True):
    """At one load the kind's ratio over that of all other kinds: above 1 the arm does more for this kind."""

    load: float
    value: float
    p_holm: float


class KindAnswer(Struct, frozen=True, kw_only=True):
    """Where the arm pays for one kind, by decode rate; `differs` are the loads at which the kind is surely apart."""

    kind: str
    break_even: BreakEven
    differs: tuple[KindDifference, ...]
    sentence: str = ""


class _Rates:
    """Tokens and time of one arm's turn by kind."""

    def __init__(self, records: Sequence[RequestRecord]) -> None:
        by_kind: defaultdict[str, list[RequestRecord]] = defaultdict(list)
        for record in records:
            by_kind[record.kind].append(record)
        self.sums = {
            kind: np.array([decodes.tokens.sum(), decodes.ns.sum()])
            for kind, own in by_kind.items()
            if len((decodes := decoding(own)).ns)
        }

    def of(self, kind: str) -> float:
        """Tokens a nanosecond; 0 without requests."""
        tokens, ns = self.sums.get(kind, (0.0, 0.0))
        return float(tokens / ns) if ns else 0.0

    def of_rest(self, kind: str) -> float:
        """Of all other kinds together."""
        tokens, ns = sum((own for name, own in self.sums.items() if name != kind), start=np.zeros(2))
        return float(tokens / ns) if ns else 0.0


def by_kind(levels: Mapping[float, Sequence[tuple[Turn, Turn]]], how: How, delta: float) -> list[KindAnswer]:
    """The kinds whose ratio differs from that of the rest at some load, by Holm's procedure over kinds and loads.

    Args:
        levels: by load the pairs of turns, the reference's first.
        how: what the pairs are.
        delta: below which arms are called the same.
    """
    rates = {load: [(_Rates(a.well), _Rates(b.well)) for a, b in turns] for load, turns in levels.items()}
    kinds = sorted({kind for pairs in rates.values() for a, b in pairs for kind in a.sums | b.sums})
    against_rest = {
        (kind, load): ratio
        for kind in kinds
        for load, pairs in rates.items()
        if isinstance(ratio := _against_rest(kind, pairs, how), Ratio)
    }
    adjusted = dict(zip(against_rest, holm([ratio.p_value for ratio in against_rest.values()]), strict=True))
    answers = []
    for kind in kinds:
        differs = tuple(
            KindDifference(load=load, value=against_rest[kind, load].value, p_holm=adjusted[kind, load])
            for load in rates
            if adjusted.get((kind, load), 1.0) < SIGNIFICANCE
        )
        if differs:
            found = break_even({load: _ratio(kind, pairs, how) for load, pairs in rates.items()}, delta)
            answers.append(KindAnswer(kind=kind, break_even=found, differs=differs))
    return answers


def _ratio(kind: str, pairs: Sequence[tuple[_Rates, _Rates]], how: How) -> Ratio | NoRatio:
    """Over the turns in which both arms were asked for this kind: with few requests a turn some don't have all."""
    both = [(a.of(kind), b.of(kind)) for a, b in pairs if a.of(kind) and b.of(kind)]
    return paired([a for a, _ in both], [b for _, b in both], method=how)


def _against_rest(kind: str, pairs: Sequence[tuple[_Rates, _Rates]], how: How) -> Ratio | NoRatio:
    quads = [(a.of(kind), b.of(kind), a.of_rest(kind), b.of_rest(kind)) for a, b in pairs]
    whole = [quad for quad in quads if all(quad)]
    return paired([rest_b / rest_a for *_, rest_a, rest_b in whole], [b / a for a, b, *_ in whole], method=how)
