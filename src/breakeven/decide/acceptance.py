"""How many tokens a step would have to bring for a drafter to pay."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from breakeven.decide.ratio import Ratio
from breakeven.measure.stats import Interval

__all__ = ["NeededAcceptance", "needed_acceptance"]


class NeededAcceptance(Struct, frozen=True, kw_only=True):
    """Tokens per decode step and request: what there is, and what would break even.

    Attributes:
        have: what was measured; steps without a draft count too.
        needed: what would break even, at the step times measured.
        ci95: the interval of `needed` that TPOT's noise gives; None where TPOT's ratio is not known.
        most: what K draft tokens can bring at best, K + 1.
        verdict: `out_of_reach` where even that is too little, so that no drafter can pay at this K; `unknown` where the
            interval holds both answers.
    """

    have: float
    needed: float
    ci95: Interval | None
    most: int
    verdict: Literal["met", "not_met", "out_of_reach", "unknown"]


def needed_acceptance(
    tokens_per_step: float, k: int, *, tpot_ratio: Ratio | None = None, tpot_ms: tuple[float, float] | None = None
) -> NeededAcceptance:
    """The tokens per step at which speculation would break even at this load.

    A step lasts tokens_per_step x TPOT_on, and pays for itself where it brings as many tokens as plain decoding brings
    in that time, one each TPOT_off.

    Args:
        tokens_per_step: output tokens per decode step and request with speculation on, counted over all steps.
        k: draft tokens on the longest path.
        tpot_ratio: TPOT of on over off, with its noise.
        tpot_ms: instead, (off, on) without.

    Raises:
        ValueError: neither or both ways to give TPOT.
    """
    if (tpot_ratio is None) == (tpot_ms is None):
        raise ValueError("give either tpot_ratio or tpot_ms")
    if tpot_ratio is not None:
        inside = tpot_ratio.interval()
        low, value, high = inside.low, tpot_ratio.value, inside.high
    elif tpot_ms is not None:
        low = value = high = tpot_ms[1] / tpot_ms[0]
    most = k + 1
    verdict: Literal["met", "not_met", "out_of_reach", "unknown"] = "unknown"
    if tokens_per_step * low > most:
        verdict = "out_of_reach"
    elif low > 1:
        verdict = "not_met"
    elif high < 1:
        verdict = "met"
    return NeededAcceptance(
        have=tokens_per_step,
        needed=tokens_per_step * value,
        ci95=Interval(tokens_per_step * low, tokens_per_step * high) if tpot_ratio is not None else None,
        most=most,
        verdict=verdict,
    )
