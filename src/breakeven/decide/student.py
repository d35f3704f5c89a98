"""Student's t for any real number of degrees of freedom, without scipy.

The tail is an incomplete beta function (Abramowitz and Stegun, *Handbook of Mathematical Functions*, 26.5.27), which
is computed from its continued fraction (26.5.8) by Lentz's method as modified by I. Thompson and A. Barnett
(*J. Comput. Phys.* 64, 1986).
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

__all__ = ["t_quantile", "tail", "two_sided_p"]

#: Stands for a zero denominator in Lentz's method.
_TINY = 1e-300
_ROUNDING = 1e-15
#: The fraction needs some sqrt(df) terms; this is enough for a million degrees of freedom.
_MOST_TERMS = 5000


def tail(t: float, df: float) -> float:
    """P(T > t) for t >= 0 and finite df > 0."""
    # Both x and 1 - x as quotients: a difference would lose the digits of a small t.
    whole = df + t * t
    return 0.5 * _incomplete_beta(df / 2, 0.5, df / whole, t * t / whole)


def two_sided_p(t: float, df: float) -> float:
    """P(|T| > |t|): how often chance alone gives a t as far from zero."""
    return 2 * tail(abs(t), df)


@lru_cache(maxsize=4096)
def t_quantile(p: float, df: float) -> float:
    """The t below which T lies with probability p, 0 < p < 1.

    Newton's method for log tail over log t. There the tail is concave and soon a straight line of slope -df, so that
    after at most one step too far each step comes closer from the same side.
    """
    if p <= 0.5:
        return 0.0 if p == 0.5 else -t_quantile(1 - p, df)
    log_t = math.log(NormalDist().inv_cdf(p))
    for _ in range(50):
        t = math.exp(log_t)
        above = tail(t, df)
        step = math.log(above / (1 - p)) * above / (_density(t, df) * t)
        log_t += min(2.0, max(-2.0, step))
        if abs(step) < 1e-12:
            break
    return math.exp(log_t)


def _density(t: float, df: float) -> float:
    log_scale = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(df * math.pi)
    return math.exp(log_scale - (df + 1) / 2 * math.log1p(t * t / df))


def _incomplete_beta(a: float, b: float, x: float, y: float) -> float:
    """I_x(a, b), regularised; y = 1 - x. The fraction converges fast below the mean, so what is above is mirrored."""
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, y, x)
    if x <= 0:
        return 0.0
    log_beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    return math.exp(a * math.log(x) + b * math.log(y) - log_beta) * _fraction(a, b, x) / a


def _fraction(a: float, b: float, x: float) -> float:
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1) or _TINY)
    value = d
    for m in range(1, _MOST_TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / (1 + term * d or _TINY)
            c = 1 + term / c or _TINY
            value *= c * d
        if abs(c * d - 1) < _ROUNDING:
            break
    return value
