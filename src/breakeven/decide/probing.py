"""When to look at a K that is not in use, and what may be spent on it.

A K is worth a look while its optimistic value (the believed one and some standard deviations: upper confidence
bounds, P. Auer et al., Machine Learning 47, 2002) would beat the one in use by the dead band. Doubt grows with age,
so that what was ruled out is looked at again, the rarer the worse it was. Looks are a few steps long and spread out;
what they lose is paid from an account that is fed with a share of all time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from breakeven.decide.steptime import STRANGER

__all__ = ["Prober"]

#: What a step of a probe costs at least, as a share of itself: a look that seems free is not had at all times.
_LEAST_COST = 0.1
#: A server that starts may look around at once; one that sat still for an hour may not spend it in a minute.
_START_S, _MOST_S = 1.0, 2.0
#: A probe may begin whenever the account is not in debt, however long a step is: else a slow engine stays unknown.
_LEAST_STEPS = 2


class Prober:
    """The account, and the probe that is under way.

    Args:
        now_s: when it begins.
        budget: the share of all time that probes may lose.
        steps: of a probe, beside the first, which teaches nothing.
        curiosity: standard deviations by which a K may be better than believed.
    """

    def __init__(self, now_s: float, *, budget: float, steps: int, curiosity: float) -> None:
        self._budget, self._steps, self._curiosity = budget, steps, curiosity
        self._account_s = _START_S
        self._looked_s = now_s
        self._left = 0
        self.k: int | None = None
        self.spent_s = 0.0

    def earn(self, elapsed_s: float) -> None:
        """Feeds the account."""
        self._account_s = min(_MOST_S, self._account_s + self._budget * elapsed_s)

    def pay(self, lost: float, step_s: float) -> None:
        """Pays a step of a probe that loses this share of its tokens, if it does."""
        self._take(max(_LEAST_COST, lost) * step_s)

    def wish(
        self, now_s: float, gap_s: float, gains: Sequence[float], doubts: Sequence[float], dead_band: float
    ) -> int | None:
        """The place of the K that is most worth a look now, one in doubt of its gain; None for none.

        So much time is between two searches for one, and after a probe.
        """
        if now_s < self._looked_s + gap_s or self._account_s <= 0:
            return None
        self._looked_s = now_s
        return self.hope(gains, doubts, range(len(gains)), dead_band)

    def hope(
        self, gains: Sequence[float], doubts: Sequence[float], places: Sequence[int], dead_band: float
    ) -> int | None:
        """Which of these places may have the most to it; None where none may have more than what is in use."""
        best, most = None, dead_band
        for j in places:
            if doubts[j] and gains[j] + self._curiosity * doubts[j] > most:
                best, most = j, gains[j] + self._curiosity * doubts[j]
        # A full account would only overflow, and hopes that rest on other loads or times may be wrong for good.
        if best is None and self._account_s >= _MOST_S:
            strangest = max(places, key=doubts.__getitem__, default=None)
            return strangest if strangest is not None and doubts[strangest] > STRANGER else None
        return best

    def buy(self, cost_s: float) -> bool:
        """Pays for something longer than a probe, if the account has it, or is half full."""
        if self._account_s < min(cost_s, _START_S):
            return False
        self._take(cost_s)
        return True

    def begin(self, k: int, lost: float, step_s: float, switches_s: float) -> None:
        """Begins a probe with the step that begins now.

        Where its switches are dear it is longer, until its steps cost as much; where its steps are it is shorter.
        """
        cost_s = max(_LEAST_COST, lost) * step_s
        steps = max(self._steps, min(4 * self._steps, int(switches_s / cost_s)))
        affordable = int((self._account_s - switches_s) / cost_s)
        self._take(switches_s)
        self.k, self._left = k, max(_LEAST_STEPS, min(steps, affordable))

    def goes_on(self, now_s: float) -> bool:
        """Whether the probe has another step; ends it if not."""
        self._left -= 1
        if self._left < 0:
            self.stop(now_s)
        return self.k is not None

    def stop(self, now_s: float) -> None:
        """Ends the probe, if one is under way."""
        self.k, self._left, self._looked_s = None, 0, now_s

    def _take(self, cost_s: float) -> None:
        self._account_s -= cost_s
        self.spent_s += cost_s

    def state(self) -> dict[str, Any]:
        """The account, as JSON has it."""
        return {"account_s": self._account_s}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes a state over.

        Raises:
            ValueError: it is no state.
        """
        account_s = float(state["account_s"])
        if not -1e3 < account_s <= _MOST_S:
            raise ValueError(f"an account of {account_s} s")
        self._account_s = account_s
