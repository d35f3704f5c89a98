"""The trend under measured step times: t = a + b·B + c·K + d·B·K around the present batch, no term negative.

The form is TurboSpec's (arXiv 2406.14066: linear in the batch and in the tokens verified) with drafting beside it; a
roofline is two such planes and a knee, and the fit is local (W. Cleveland, JASA 74, 1979), so that the knee bends it
only from nearby.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["Point", "Trend", "fit_trend"]

#: What a drafted token costs, as a share of the step, until something is known: a guess worth a twentieth of a step.
_DRAFT_SHARE, _GUESS_WEIGHT = 0.05, 0.05
#: A coefficient near zero counts as a guess of zero: what one K or one batch can't tell stays there.
_RIDGE = 1e-4


class Point(NamedTuple):
    """A step time that was seen, in seconds, and its say."""

    batch: int
    k: int
    step_s: float
    weight: float


class Trend(NamedTuple):
    """The coefficients, in seconds: `base`, per request, per drafted token, per both."""

    base: float
    request: float
    draft: float
    both: float

    def log_s(self, batch: int, k: int) -> float:
        """The logarithm of a step's seconds."""
        return math.log(max(1e-6, self.base + self.request * batch + self.draft * k + self.both * batch * k))


def fit_trend(points: Sequence[Point], ks: Sequence[int], batch: int) -> Trend:
    """The non-negative least squares fit of relative errors.

    Args:
        points: one or more.
        ks: all K that there are; each has a guess at the batch of the weightiest point, drawn from it.
        batch: the present one.
    """
    best = max(points, key=lambda point: point.weight)
    base_s = best.step_s / (1 + _DRAFT_SHARE * best.k)
    guesses = [Point(best.batch, k, base_s * (1 + _DRAFT_SHARE * k), _GUESS_WEIGHT) for k in ks]
    rows, wanted = [], []
    for b, k, step_s, weight in (*points, *guesses):
        root = math.sqrt(weight)
        rows.append([root / step_s, root * b / batch / step_s, root * k / step_s, root * b / batch * k / step_s])
        wanted.append(root)
    a, y = np.array(rows), np.array(wanted)
    normal, right = a.T @ a, a.T @ y
    normal[np.diag_indices(4)] += _RIDGE * np.diag(normal) + 1e-12
    base, request, draft, both = _non_negative(normal, right)
    return Trend(base, request / batch, draft, both / batch)


def _non_negative(normal: np.ndarray, right: np.ndarray) -> list[float]:
    """Solves the normal equations, leaving terms out that would be negative, the most negative first."""
    kept = list(range(len(right)))
    found = [0.0] * len(right)
    while kept:
        solved = np.linalg.solve(normal[np.ix_(kept, kept)], right[kept]).tolist()
        if min(solved) >= 0:
            for place, value in zip(kept, solved, strict=True):
                found[place] = value
            return found
        kept.pop(solved.index(min(solved)))
    return found
