"""What a switch costs, in seconds of work lost: measured at each one, probes included.

The step after a switch may be longer than its like (graphs to capture, a drafter to wake) and yield less (drafts that
were never made, or of a cache that is behind). What it took, less what its tokens would have taken in steps of their
own, is the price; a running mean is kept for switches that turn speculation on, off, and between lengths.
"""

from __future__ import annotations

from typing import Any, Literal

__all__ = ["Prices"]

_Kind = Literal["on", "off", "between"]

#: A mean over the last some thirty switches of a kind.
_MOST_SWITCHES = 30.0
#: Longer than any step after a switch: more is an accident, not a price.
_MOST_S = 2.0


def _kind_of(before: int, after: int) -> _Kind:
    """What a switch from one K to another is."""
    return "on" if before <= 0 < after else "off" if after <= 0 < before else "between"


class Prices:
    """The mean price of each kind of switch, in seconds; zero until one was seen."""

    def __init__(self) -> None:
        self._mean_s: dict[_Kind, float] = {"on": 0.0, "off": 0.0, "between": 0.0}
        self._count: dict[_Kind, float] = {"on": 0.0, "off": 0.0, "between": 0.0}

    def learn(self, before: int, after: int, took_s: float, worth_s: float) -> None:
        """Takes in the first step after a switch: how long it took, and what its tokens are worth in other steps."""
        kind = _kind_of(before, after)
        self._count[kind] = count = min(self._count[kind] + 1, _MOST_SWITCHES)
        lost_s = max(-_MOST_S, min(_MOST_S, took_s - worth_s))
        self._mean_s[kind] += (lost_s - self._mean_s[kind]) / count

    def of(self, before: int, after: int) -> float:
        """The price of a switch from one K to another, in seconds, never below zero."""
        return max(0.0, self._mean_s[_kind_of(before, after)])

    def state(self) -> dict[str, Any]:
        """Means and counts, as JSON has them."""
        return {"mean_s": dict(self._mean_s), "count": dict(self._count)}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes a state over.

        Raises:
            ValueError: it is no state.
        """
        for kind in self._mean_s:
            mean_s, count = float(state["mean_s"][kind]), float(state["count"][kind])
            if not (abs(mean_s) <= _MOST_S and 0 <= count <= _MOST_SWITCHES):
                raise ValueError(f"no price: {mean_s} s of {count} switches")
            self._mean_s[kind], self._count[kind] = mean_s, count
