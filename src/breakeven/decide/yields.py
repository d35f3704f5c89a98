"""Tokens that a step gives a request, by K: learned per draft position, and forgotten slowly.

The chance that position i is accepted, given all before it were, doesn't depend on how long the draft is, so one K
teaches about all: a step of K gives 1 + p₁ + p₁p₂ + … + p₁…p_K tokens to a request (Y. Leviathan et al., ICML 2023, for
equal p; per position as in TurboSpec, arXiv 2406.14066). Position 1 is counted per decoding request, not per draft: an
n-gram drafter that finds nothing for half of them has its p₁ halved, which is what throughput sees.

Forgetting is discounting (A. Garivier and E. Moulines, ALT 2011): the weight of what was seen halves in
`_HALF_LIFE_S` and never exceeds `_MOST_DRAFTS`, so that a busy server follows its mix of prompts within seconds. The
estimate stays where it was while its weight goes: what was last known is the best guess, and its doubt says to look.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

__all__ = ["Yields"]

#: Tuned on the simulator's tuning seeds (docs/policy.md).
_HALF_LIFE_S = 45.0
_MOST_DRAFTS = 3000.0
#: A drafter never seen: about what EAGLE-3 heads and n-grams reach, with the weight of one draft.
_FIRST_GUESS, _GUESS_WEIGHT = 0.6, 1.0
#: Drafts of one request resemble each other: their variance counts twice.
_OVERDISPERSION = 2.0
_MOST_VARIANCE = 0.09
#: A mix of prompts that nobody watches may have wandered by 0.1 in a minute: what was ruled out is looked at again.
_WANDERS_PER_S = 0.1**2 / 60


class Yields:
    """Acceptance per position, and the tokens a step that follow from it.

    Args:
        most_k: the longest draft.
    """

    def __init__(self, most_k: int) -> None:
        self._p = [_FIRST_GUESS] * most_k
        self._weight = [_GUESS_WEIGHT] * most_k
        self._at_s = [0.0] * most_k

    def learn(self, now_s: float, drafts: float, k: int, accepted: Sequence[int]) -> None:
        """Takes a step of `k` drafted tokens in: how many of so many drafts had each position accepted."""
        tried = drafts
        for i in range(k):
            hits = accepted[i] if i < len(accepted) else 0
            weight = self._weight[i] * 0.5 ** ((now_s - self._at_s[i]) / _HALF_LIFE_S) + tried
            self._p[i] = min(1.0, self._p[i] + (hits - tried * self._p[i]) / weight)
            self._weight[i] = weight if weight < _MOST_DRAFTS else _MOST_DRAFTS
            self._at_s[i] = now_s
            if not hits:
                return
            tried = hits

    @property
    def first(self) -> float:
        """The believed chance of the first position."""
        return self._p[0] if self._p else 0.0

    def tokens(self) -> list[float]:
        """Tokens a step and request for drafts of 0, 1, …, most_k tokens."""
        survived, total, tokens = 1.0, 1.0, [1.0]
        for p in self._p:
            survived *= p
            total += survived
            tokens.append(total)
        return tokens

    def variances(self, now_s: float) -> list[float]:
        """The variance of each position's chance, which grows as what was seen of it ages."""
        found = []
        for p, weight, at_s in zip(self._p, self._weight, self._at_s, strict=True):
            age_s = now_s - at_s
            left = weight * 0.5 ** (age_s / _HALF_LIFE_S)
            variance = _OVERDISPERSION * (p * (1 - p) + 0.01) / (left + 1.0) + _WANDERS_PER_S * age_s
            found.append(min(_MOST_VARIANCE, variance))
        return found

    def slopes(self, tokens: Sequence[float], k: int) -> list[float]:
        """How the logarithm of `tokens` of `k` drafted ones grows with the chance of each position."""
        return [(tokens[k] - tokens[i]) / (max(p, 0.02) * tokens[k]) if i < k else 0.0 for i, p in enumerate(self._p)]

    def state(self) -> dict[str, Any]:
        """All of it, as JSON has it; ages are kept by `now_s` of the policy."""
        return {"p": list(self._p), "weight": list(self._weight), "at_s": list(self._at_s)}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes a state over.

        Raises:
            ValueError: it is of another K, or no state.
        """
        p, weight, at_s = ([float(x) for x in state[name]] for name in ("p", "weight", "at_s"))
        if not len(p) == len(weight) == len(at_s) == len(self._p):
            raise ValueError(f"acceptance of {len(p)} positions, not {len(self._p)}")
        if not all(0 <= x <= 1 for x in p) or not all(0 <= x < math.inf for x in weight):
            raise ValueError("acceptance that is no probability")
        self._p, self._weight, self._at_s = p, weight, at_s
