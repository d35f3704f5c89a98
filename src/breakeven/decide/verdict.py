"""From ratios to verdicts: same, faster, slower or undecided, and how much longer to measure the undecided ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Literal, TypeVar

from msgspec import Struct

from breakeven.decide.ratio import NoRatio, Ratio
from breakeven.decide.student import t_quantile

__all__ = ["DELTA", "SIGNIFICANCE", "Judgement", "Longer", "Verdict", "holm", "judge", "longer", "more_wanted"]

Verdict = Literal["same", "faster", "slower", "undecided"]
K = TypeVar("K", bound=Hashable)

#: Two arms closer than this are the same for anybody's purpose.
DELTA = 0.02
SIGNIFICANCE = 0.05
#: The chance with which the predicted length decides, if the difference is what it seems to be.
_POWER = 0.8
#: Beyond so many times what was measured a prediction says nothing.
_MOST_TIMES = 1000.0


class Judgement(Struct, frozen=True, kw_only=True):
    """The verdict on one ratio.

    Attributes:
        verdict: what may be quoted beside the claim's other ratios.
        alone: what it would be if it were the only ratio of its claim.
        p_value, p_holm: of no difference, alone and within the claim; None where there is no ratio.
        why_not: the reason where there is no ratio.
    """

    verdict: Verdict
    alone: Verdict
    p_value: float | None = None
    p_holm: float | None = None
    why_not: NoRatio | None = None


class Longer(Struct, frozen=True):
    """A load to measure longer: by so many observations, and seconds where one's length is known.

    Both are None where no bearable length is predicted to decide it.
    """

    load: float
    observations: int | None
    seconds: float | None


def judge(claim: Mapping[K, Ratio | NoRatio], delta: float = DELTA) -> dict[K, Judgement]:
    """Verdicts on all ratios (loads, or loads and metrics) that one quoted claim rests on.

    `same` where the 90 % interval lies within 1 / (1 + delta) to 1 + delta, which is the two one-sided tests of D.
    Schuirmann (*J. Pharmacokinet. Biopharm.* 15, 1987) at 5 %; else `faster` or `slower` where no difference is
    rejected at 5 %, by Holm's procedure over the claim. `faster` means the better arm for latencies too. Being the same
    everywhere needs no correction: each part of that claim has to pass.
    """
    usable = {key: ratio for key, ratio in claim.items() if isinstance(ratio, Ratio)}
    p_alone = {key: ratio.p_value for key, ratio in usable.items()}
    p_holm = dict(zip(p_alone, holm(list(p_alone.values())), strict=True))
    judged = {}
    for key, ratio in claim.items():
        if isinstance(ratio, NoRatio):
            judged[key] = Judgement(verdict="undecided", alone="undecided", why_not=ratio)
        else:
            verdict, alone = (_verdict(ratio, p, delta) for p in (p_holm[key], p_alone[key]))
            judged[key] = Judgement(verdict=verdict, alone=alone, p_value=p_alone[key], p_holm=p_holm[key])
    return judged


def holm(p_values: Sequence[float]) -> list[float]:
    """P values adjusted so that, of all true nulls together, one is rejected in at most so many cases.

    S. Holm, *A simple sequentially rejective multiple test procedure*, Scand. J. Statist. 6, 1979.
    """
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = highest
    return adjusted


def longer(load: float, ratio: Ratio, *, tests: int = 1, delta: float = DELTA) -> Longer:
    """How much more of the same would decide a ratio with 80 % chance, if its estimate and noise stay what they are.

    Args:
        load: where the ratio was measured.
        tests: how many ratios the claim has: the hardest of them is the one that Holm tests at 5 % / tests.
    """
    more = more_wanted(ratio.n, lambda times: _decides(ratio, times, tests, delta))
    return Longer(load, more, None if more is None or ratio.each_s is None else more * ratio.each_s)


def more_wanted(n: int, passes: Callable[[float], bool]) -> int | None:
    """How many more observations than `n` it takes, if `passes` says whether so many times `n` are enough.

    None where no bearable number is.
    """
    times, most = 1.0, _MOST_TIMES
    if not passes(most):
        return None
    while most / times > 1.01:
        middle = math.sqrt(times * most)
        times, most = (times, middle) if passes(middle) else (middle, most)
    return max(1, math.ceil(n * (most - 1)))


def _verdict(ratio: Ratio, p_value: float, delta: float) -> Verdict:
    interval = ratio.interval(0.90)
    if interval.low >= 1 / (1 + delta) and interval.high <= 1 + delta:
        return "same"
    if p_value >= SIGNIFICANCE:
        return "undecided"
    return "faster" if ratio.gain > 0 else "slower"


def _decides(ratio: Ratio, times: float, tests: int, delta: float) -> bool:
    """Whether `times` the observations are likely enough to decide: the usual sample size of a t test."""
    se, df, size = ratio.se / math.sqrt(times), ratio.df * times, abs(ratio.log)
    differs = size >= (t_quantile(1 - SIGNIFICANCE / 2 / tests, df) + t_quantile(_POWER, df)) * se
    # Half of what may go wrong lies on either side where the arms are exactly the same.
    same = math.log1p(delta) - size >= (t_quantile(0.95, df) + t_quantile((1 + _POWER) / 2, df)) * se
    return differs or same
