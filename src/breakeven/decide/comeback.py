"""What a pause does to a drafter: the share of its acceptance that is left then, and how it returns.

Some engines keep the drafter's KV cache in step while K is 0 (stock vLLM does, for a forward pass a step), others let
it get stale: drafts then fail that would have been right, until the requests that lived through the pause are gone. A
policy that took such drafts for what they seem would never come back. The share left is a property of the engine, the
acceptance one of the prompts, and only their product is seen during a pause. Both ends of one tell them apart: what
probes find soon after its beginning against what was known just before, and what they found last, or else what the
first drafts after it find, against what is found once it is over. Prompts that change at the same moment err to either
side, and average out. How long a return takes is how many drafts fail until a cache is whole again, of those that were
to fail at its beginning.

Who rents until the rent is the price pays twice the price where pauses are long. What pauses have saved so far, in
prices, predicts the next one: the more it was, the less is waited for, never less than a quarter (ski rental with
predictions: M. Purohit et al., NeurIPS 2018; the worst case is five prices then, not two).
"""

from __future__ import annotations

import math
from typing import Any

__all__ = ["Comeback"]

#: Into a pause it takes so long until a cache is as stale as it gets, and about so long out of it until it is whole,
#: before that was measured: the requests of most services live some seconds.
_GETTING_STALE_S, _FADES_S = 1.0, 4.0
#: A return is over then, and its length is one of these; it can only be told where so much was lost.
_RETURN_S, _LEAST_FADES_S, _LEAST_LOST = 12.0, 0.5, 0.2
#: Drafts that make a comparison, and the comparisons that "nothing is lost" weighs as.
_ENOUGH_DRAFTS, _FAITH = 100, 2.0
#: What is expected of a drafter that was left alone weighs less: engines and drafters differ.
_FAITH_BEHIND = 0.5
#: So far into a pause drafts are looked at to find what is left, while comparisons are fewer than two; and those of so
#: long after a return say it as well.
_ASKS_AFTER_S, _AT_FIRST_S = 3.0, 1.0
_MOST_DRAFTS = 400.0
_LEAST_LEFT = 0.3
#: What a pause saved moves the mean by, and what it is at the most, in prices; a price is asked at least in this part.
_MOVES, _MOST_SAVED, _MOST_TRUST = 0.3, 12.0, 4.0


class Comeback:
    """Learns the share left from pauses, and says how fresh drafts are at a moment.

    Args:
        expected: the share left that a pause is taken for at first.

    Attributes:
        left: the share of acceptance that is left in a pause: 1 where nothing is lost.
        fades_s: the time in which a return makes good what was lost, but for a third.
        worth: what pauses saved, in prices of a return; one until there was one.
    """

    def __init__(self, expected: float = 1.0) -> None:
        self._log_sum, self._count = 0.0, 0.0
        self._expected, self._faith = expected, _FAITH if expected == 1.0 else _FAITH_BEHIND
        self.left, self.fades_s, self.worth = expected, _FADES_S, 1.0
        self._paused_s: float | None = None
        self._returned_s = -math.inf
        self._before: float | None = None  # acceptance when the pause began
        self._hits = self._tried = 0.0  # of the first position, in this pause
        self._found: float | None = None  # acceptance at the end of the last pause
        self._back_hits = self._back_tried = 0.0  # of the first position, since the last return
        self._first_hits = self._first_tried = 0.0  # and at first

    def fresh(self, now_s: float) -> float:
        """The share of acceptance that drafts have at this moment."""
        if self.left == 1.0:
            return 1.0
        if self._paused_s is not None:
            return self.left if self.is_stale(now_s) else 1.0
        return 1 - (1 - self.left) * math.exp((self._returned_s - now_s) / self.fades_s)

    def is_stale(self, now_s: float) -> bool:
        """Whether the drafter is as stale as it gets."""
        return self._paused_s is not None and now_s - self._paused_s > _GETTING_STALE_S

    def asks(self, now_s: float) -> bool:
        """Whether drafts would tell at this moment what is left, of which little is known."""
        is_due = self._paused_s is not None and now_s - self._paused_s > _ASKS_AFTER_S
        return is_due and self._before is not None and self._count < _FAITH

    def price_s(self, tokens: float) -> float:
        """What a return costs in seconds of work, at so many tokens a step of fresh drafts."""
        return (1 - self.left) * (1 - 1 / tokens) * self.fades_s

    def rent_s(self, tokens: float) -> float:
        """What must have been lost before a pause is begun, in seconds of work."""
        return self.price_s(tokens) / max(1.0, min(_MOST_TRUST, self.worth))

    def saved(self, saved_s: float, tokens: float) -> None:
        """A pause is over that saved so many seconds of work."""
        price_s = self.price_s(tokens)
        if price_s > 0:
            self.worth += _MOVES * (min(_MOST_SAVED, saved_s / price_s) - self.worth)

    def pause(self, now_s: float, acceptance: float) -> None:
        """Speculation goes off; `acceptance` is that of the first position."""
        self._paused_s, self._before = now_s, acceptance
        self._hits = self._tried = 0.0

    def resume(self, now_s: float) -> None:
        """It comes back on."""
        if self._paused_s is not None and now_s - self._paused_s > _GETTING_STALE_S:
            self._returned_s = now_s
            self._found = self._hits / self._tried if self._tried >= _ENOUGH_DRAFTS else None
            self._back_hits = self._back_tried = self._first_hits = self._first_tried = 0.0
        self._paused_s = None

    def look(self, now_s: float, hits: float, tried: float, acceptance: float) -> bool:
        """Takes drafts in; returns whether they say something of the acceptance, too."""
        if self._paused_s is None:
            if now_s - self._returned_s <= _RETURN_S:
                self._back_hits, self._back_tried = self._back_hits + hits, self._back_tried + tried
                if now_s - self._returned_s <= _AT_FIRST_S:
                    self._first_hits, self._first_tried = self._first_hits + hits, self._first_tried + tried
            elif self._back_tried:
                self._look_back(acceptance)
            return True
        if now_s - self._paused_s <= _GETTING_STALE_S:
            return True
        keep = _MOST_DRAFTS / max(_MOST_DRAFTS, self._tried)
        self._hits, self._tried = self._hits * keep + hits, self._tried * keep + tried
        if self._before is None:
            return True
        if self._tried >= _ENOUGH_DRAFTS:
            self._compare(self._hits / self._tried, self._before)
            self._before = None
        return False

    def _look_back(self, whole: float) -> None:
        """A return is over."""
        if self._found is None and self._first_tried >= _ENOUGH_DRAFTS:
            self._found = self._first_hits / self._first_tried
        if self._found is not None:
            self._compare(self._found, whole)
            self._found = None
        if self._back_tried >= _ENOUGH_DRAFTS and 1 - self.left > _LEAST_LOST and whole > 0.01:
            lost_s = _RETURN_S * (1 - self._back_hits / self._back_tried / whole)
            took_s = max(_LEAST_FADES_S, min(_RETURN_S, lost_s / (1 - self.left)))
            self.fades_s += (took_s - self.fades_s) / (1 + _FAITH)
        self._back_hits = self._back_tried = 0.0

    def _set_left(self) -> None:
        log = (self._log_sum + self._faith * math.log(self._expected)) / (self._count + self._faith)
        self.left = max(_LEAST_LEFT, min(1.0, math.exp(log)))

    def _compare(self, stale: float, whole: float) -> None:
        """Adds a comparison to the mean, of which the old ones fade."""
        if stale > 0.01 and whole > 0.01:
            self._log_sum = 0.9 * self._log_sum + max(-1.2, min(0.3, math.log(stale / whole)))
            self._count = 0.9 * self._count + 1
            self._set_left()

    def state(self) -> dict[str, Any]:
        """What was learned, as JSON has it; a pause under way is not."""
        return {"log_sum": self._log_sum, "count": self._count, "fades_s": self.fades_s, "worth": self.worth}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes a state over.

        Raises:
            ValueError: it is no state.
        """
        log_sum, count, fades_s = (float(state[name]) for name in ("log_sum", "count", "fades_s"))
        worth = float(state.get("worth", 1.0))
        if not (abs(log_sum) <= 12 and 0 <= count <= 10 and _LEAST_FADES_S <= fades_s <= _RETURN_S):
            raise ValueError(f"no mean: {log_sum} of {count}, {fades_s} s")
        if not 0 <= worth <= _MOST_SAVED:
            raise ValueError(f"no worth of a pause: {worth}")
        self._log_sum, self._count, self.fades_s, self.worth = log_sum, count, fades_s, worth
        self._set_left()
