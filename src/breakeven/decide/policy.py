"""The K for the next step, from what the steps before it took and gave. Pure: observations in, K out.

Of a K that `decide.belief` holds for better than the one in use, evidence is gathered: the gain beyond the dead band
and the doubt about it, times the time that it has been so (a cumulated sum: E. Page, Biometrika 41, 1954). The policy
switches once the evidence reaches what a switch costs: waiting has then lost as much as the switch will, which is the
rule for renting or buying (A. Karlin et al., Algorithmica 3, 1988). A large gain is taken within a few steps, a small
one within seconds, one within the dead band never. K that are not in use are looked at now and then
(`decide.probing`).

An engine may be able to leave its drafter alone instead of keeping it in step at K = 0. That is one more K, `DEEP`: the
rent is what the K in use costs beyond it, the price what a drafter that fell behind costs when it comes back.

Nothing that the engine says may hurt it: what is impossible is counted and not learned from; what raises is counted,
and the declared table decides for a while.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from breakeven.decide.belief import Belief, Estimate
from breakeven.decide.observed import DEEP, Observation, Step
from breakeven.decide.probing import Prober
from breakeven.decide.schedule import Range, Schedule

__all__ = ["STATE_SCHEMA", "Mode", "Policy", "Settings"]

#: The layout of a state. History: 1, the first.
STATE_SCHEMA = "breakeven.policy/1"
#: At a load that stays it decides every so many steps, and learns from them then: a step teaches little, and what is
#: worked out between two of them keeps the engine waiting. The load stays while it is within these factors.
_EVERY_STEPS, _LESS, _MORE = 4, 0.75, 1.5
#: Patience, dwell and the gap between probes are at least so many steps, however long those are: the first step of a K
#: teaches nothing, and an engine of 300 ms a step would be through with a probe every other one.
_PATIENT_STEPS, _DWELL_STEPS, _GAP_STEPS = 0.2, 3.0, 8.0
#: A gap between two steps longer than this, and than two steps, is no evidence of anything.
_LONGEST_GAP_S = 0.5
#: A gain more in doubt than this is a reason to look, and no evidence.
_MOST_DOUBT = 0.35
#: Longer steps, and clocks that go backwards or on by a day, are a fault.
_LONGEST_STEP_NS, _LONGEST_PAUSE_S = 60e9, 86400.0
#: So many observations in a row without a step to learn from: the signals have stopped.
_LOST_AFTER = 64
#: After an exception the table decides so long, and everything is learned anew.
_HOLD_S = 10.0
#: Above these shares of the KV cache and of the objective, latency is at risk.
_FULL_KV, _NEAR = 0.95, 0.9

#: `auto`; `table` obeys the schedule; a number is that K.
Mode = Literal["auto", "table"] | int


class Settings(NamedTuple):
    """What may be set (docs/policy.md says where the values are from).

    Attributes:
        dead_band: gains below this are none.
        confidence: standard deviations of doubt that a gain must exceed the dead band by.
        curiosity: those by which a K may be better than believed, to be worth a look.
        patience_s: evidence that a switch needs even where it costs nothing, in seconds of work; at least a fifth of a
            step.
        dwell_s: a K is kept at least so long, and for three steps.
        budget: the share of throughput that probes may cost.
        probe_steps: steps of a probe that teach something.
        probe_gap_s: between probes, and at least eight steps.
        objective_ms: the time per output token that is promised; no probes while it is at risk.
    """

    dead_band: float = 0.01
    confidence: float = 0.5
    curiosity: float = 1.5
    patience_s: float = 0.02
    dwell_s: float = 0.3
    budget: float = 0.008
    probe_steps: int = 4
    probe_gap_s: float = 0.3
    objective_ms: float | None = None


class Policy:
    """Chooses K. It learns in each mode.

    Args:
        ks: the K that the engine may be told.
        schedule: the declared table: for the beginning, for unknown territory, and where something is wrong; what was
            measured for it is believed at first. By default the smallest K at all loads.
        mode: who decides.
        settings: how `auto` decides.
        deep: whether the engine can leave the drafter alone; `choose` may then return `DEEP`.

    Attributes:
        ks: what may be chosen, ascending; `DEEP` is the first of them.
        faults: how often which signal was impossible, and `exception`.
        steps, switches, probe_steps, fallback_steps: choices in all; changes of the K in use; looks at others; steps of
            `auto` that the table decided since something was wrong.

    Raises:
        ValueError: the K or the mode can't be.
    """

    def __init__(
        self,
        ks: Sequence[int],
        *,
        schedule: Schedule | None = None,
        mode: Mode = "auto",
        settings: Settings | None = None,
        deep: bool = False,
    ) -> None:
        self.ks = tuple(sorted(set(ks)))
        if not self.ks or self.ks[0] < 0:
            raise ValueError(f"K must be numbers from 0: {list(ks)}")
        if deep and self.ks[0] > 0:
            raise ValueError(f"deep is beside K=0, which is none of the K: {list(ks)}")
        if mode == "table" and schedule is None:
            raise ValueError("the mode `table` needs a schedule")
        self._schedule = schedule or Schedule(model="", ranges=(Range(1, 1, self.ks[0]),))
        self.ks = (DEEP, *self.ks) if deep else self.ks
        self._place = {k: j for j, k in enumerate(self.ks)}
        self._range: int | None = None
        self.mode, self._settings = mode, settings or Settings()
        self.faults: Counter[str] = Counter()
        self.steps = self.switches = self.probe_steps = self.fallback_steps = 0
        self._now_s, self._hold_until_s = 0.0, -math.inf
        self._seen_ns = self._learned_ns = -1
        self._learned_k, self._step_s = 0, 0.0  # of the last step that could be learned from
        self._k = self._by_table(1)
        self._forget()

    def choose(self, seen: Observation) -> int:
        """The K for the step that begins now. Never raises."""
        self.steps += 1
        try:
            self._unseen.append(seen)
            self._due_in -= 1
            if self._due_in > 0 and type(seen.decoding) is int and self._least < seen.decoding < self._most:
                return self._k
            return self._choose(seen)
        except Exception:  # noqa: BLE001  a fault in here must not reach a request: it is counted, and the table decides
            self.faults["exception"] += 1
            self._forget()
            self._hold_until_s = self._now_s + _HOLD_S
            return self._safe(seen)

    @property
    def k(self) -> int:
        """The K in use, probes aside."""
        return self._k

    @property
    def mode(self) -> Mode:
        """Who decides; may be set at any time."""
        return self._mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        if isinstance(mode, int) and mode not in self.ks:
            raise ValueError(f"K={mode} is none of those that the engine may be told: {list(self.ks)}")
        self._mode: Mode = mode
        self._due_in = 0
        self._saved_s: float | None = None  # by having gone deep, against the next best

    @property
    def probe_share(self) -> float:
        """What probes have cost so far, as a share of all time."""
        return self._prober.spent_s / self._worked_s if self._worked_s else 0.0

    def estimates(self, decoding: int) -> list[Estimate]:
        """What is believed of each K at a load, ascending."""
        return self._belief.estimates(self._now_s, decoding, self._k)

    def state(self) -> dict[str, Any]:
        """All that was learned, but for the last few steps, as JSON has it: some kilobytes."""
        learned = {"belief": self._belief.state(), "prober": self._prober.state()}
        return {"schema": STATE_SCHEMA, "ks": list(self.ks), "k": self._k, "now_s": self._now_s, **learned}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from a state, as if no time had passed. If it raises, nothing is known.

        Raises:
            ValueError: it is no state, or of other K.
        """
        try:
            if state["schema"] != STATE_SCHEMA or state["ks"] != list(self.ks) or state["k"] not in self._place:
                raise ValueError(f"{state['schema']} of K {state['ks']}, not {STATE_SCHEMA} of {list(self.ks)}")
            self._now_s = float(state["now_s"])
            self._forget()
            self._belief.restore(state["belief"])
            self._prober.restore(state["prober"])
            self._k = state["k"]
            self._belief.begin(self._now_s, self._k)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            self._now_s = 0.0
            self._forget()
            raise ValueError(f"no state of this policy: {error}") from None

    def _forget(self) -> None:
        """Everything learned and under way."""
        s = self._settings
        self._belief = Belief(self.ks, self._now_s)
        self._belief.assume(self._schedule.levels)
        self._belief.begin(self._now_s, self._k)
        self._prober = Prober(self._now_s, budget=s.budget, steps=s.probe_steps, curiosity=s.curiosity)
        self._since_s = self._now_s
        self._worked_s = 0.0
        self._missing = 0
        self._evidence_s = [0.0] * len(self.ks)
        self._saved_s = None
        self._unseen: list[Observation] = []  # since the last decision
        # Steps to the next one, but for loads outside of these.
        self._due_in, self._least, self._most = 0, 0.0, 0.0

    def _safe(self, seen: Any) -> int:
        """The K that was fixed, else the table's, whatever was seen."""
        if isinstance(self._mode, int):
            return self._mode
        decoding = getattr(seen, "decoding", 1)
        return self._by_table(decoding if type(decoding) is int and decoding > 0 else 1)

    def _by_table(self, decoding: int) -> int:
        """The table's K, or the next smaller one that the engine may be told."""
        self._range = self._schedule.range_at(decoding, self._range)
        wanted = self._schedule.ranges[self._range].k
        return max((k for k in self.ks if k <= wanted), default=self.ks[0])

    def _choose(self, seen: Observation) -> int:
        unseen, self._unseen, self._due_in = self._unseen, [], 0
        elapsed_s = 0.0
        for each in unseen:
            elapsed_s += self._tick(each.now_ns)
            self._take_in(each.last)
        if not (type(seen.decoding) is int and seen.decoding > 0):
            self.faults["decoding"] += 1
            return self._safe(seen)
        if self._mode == "auto":
            if self._missing < _LOST_AFTER and self._now_s >= self._hold_until_s:
                return self._decide(seen, elapsed_s)
            self.fallback_steps += 1
        else:
            self._rest(seen.decoding - 1, seen.decoding + 1)
        if self._prober.k is not None:
            self._prober.stop(self._now_s)
        return self._use(self._mode if isinstance(self._mode, int) else self._by_table(seen.decoding))

    def _rest(self, least: float, most: float) -> None:
        """The next decision is some steps from now, while the load is between these."""
        self._due_in, self._least, self._most = _EVERY_STEPS, least, most

    def _tick(self, now_ns: int) -> float:
        """Moves the policy's own clock on as the engine's has gone; returns by how much, gaps left out."""
        if not math.isfinite(now_ns):
            self.faults["clock"] += 1
            return 0.0
        elapsed_s = (now_ns - self._seen_ns) / 1e9 if self._seen_ns >= 0 else 0.0
        if not 0 <= elapsed_s < _LONGEST_PAUSE_S:
            self.faults["clock"] += 1
            elapsed_s = 0.0
        self._seen_ns = now_ns
        self._now_s += elapsed_s
        return min(elapsed_s, max(_LONGEST_GAP_S, 2 * self._step_s))

    def _take_in(self, step: Step | None) -> None:
        """Learns from a step that is over, if it is one."""
        if step is None or step.begun_ns == self._learned_ns:
            self._missing += 1
            return
        fault = self._fault_of(step)
        if fault is not None:
            self.faults[fault] += 1
            self._missing += 1
            return
        self._missing, self._learned_ns = 0, step.begun_ns
        self._learned_k, self._step_s = step.k, step.step_ns / 1e9
        if step.decoding:  # else it read prompts, and nothing else
            self._belief.learn(self._now_s, step)

    def _fault_of(self, step: Step) -> str | None:
        """The signal of a step that can't be; None if it can be learned from."""
        if not 0 < step.step_ns < _LONGEST_STEP_NS:
            return "step_time"
        if step.k not in self._place:
            return "k"
        if not (type(step.decoding) is int and step.decoding >= 0):
            return "decoding"
        if not 0 <= step.prefill_tokens < math.inf:
            return "prefill_tokens"
        most = step.decoding
        # The first step after a switch verifies drafts of the K before.
        if len(step.accepted) > max(step.k, self._learned_k, 0):
            return "accepted"
        for accepted in step.accepted:
            if not 0 <= accepted <= most:
                return "accepted"
            most = accepted
        return None

    def _decide(self, seen: Observation, elapsed_s: float) -> int:
        decoding = seen.decoding
        self._worked_s += elapsed_s
        if self._prober.k is None and self._belief.is_strange(decoding, self._k):
            self._use(self._by_table(decoding))
        doubts = self._belief.doubts(self._now_s, decoding, self._k)
        gains = self._belief.gains(decoding, self._k)
        if self._prober.k is not None:
            return self._go_on(decoding, gains)
        self._rest(_LESS * decoding, _MORE * decoding)
        self._prober.earn(elapsed_s)
        self._gather(decoding, gains, doubts, elapsed_s)
        step_s = self._belief.step_s(decoding, self._k)
        ripe = self._ripe(step_s)
        return self._look(seen, gains, doubts, step_s) if ripe is None else self._use(ripe, gains)

    def _gather(self, decoding: int, gains: Sequence[float], doubts: Sequence[float], elapsed_s: float) -> None:
        """Adds to the evidence for each K what its gain exceeds dead band and doubt by, over the time since.

        What is believed of a K that was never seen at such a load is a reason to look, and no evidence.
        """
        if self._saved_s is not None:
            self._saved_s += max(0.0, -max(gains[1:])) * elapsed_s
        dead_band, confidence, evidence_s = self._settings.dead_band, self._settings.confidence, self._evidence_s
        for j, (gain, doubt) in enumerate(zip(gains, doubts, strict=True)):
            if doubt < _MOST_DOUBT and not self._belief.is_strange(decoding, self.ks[j]):
                evidence_s[j] = max(0.0, evidence_s[j] + (gain - dead_band - confidence * doubt) * elapsed_s)

    def _ripe(self, step_s: float) -> int | None:
        """The K whose evidence exceeds what a switch to it costs by the most, if one does."""
        if self._now_s - self._since_s < max(self._settings.dwell_s, _DWELL_STEPS * step_s):
            return None
        patience_s = max(self._settings.patience_s, _PATIENT_STEPS * step_s)
        spare_s, k = max(
            (
                (evidence_s - patience_s - self._belief.price_s(self._k, k), k)
                for k, evidence_s in zip(self.ks, self._evidence_s, strict=True)
                if k != self._k and evidence_s >= patience_s
            ),
            default=(-math.inf, self._k),
        )
        return k if spare_s >= 0 else None

    def _use(self, k: int, gains: Sequence[float] | None = None) -> int:
        """Switches if it is another K than before. Evidence for what is better still by these gains is kept."""
        if k != self._k:
            self.switches += 1
            self._belief.switched(self._now_s, self._k, k, self._saved_s)
            self._saved_s = 0.0 if k == DEEP and self._mode == "auto" else None
            self._k, self._since_s, self._due_in = k, self._now_s, 0
            least = gains[self._place[k]] + self._settings.dead_band if gains else math.inf
            better = (gain > least for gain in gains or self._evidence_s)
            self._evidence_s = [s if b else 0.0 for s, b in zip(self._evidence_s, better, strict=True)]
        return k

    def _look(self, seen: Observation, gains: Sequence[float], doubts: Sequence[float], step_s: float) -> int:
        """Begins a probe, if one is worth it now; returns the K of the next step."""
        if self._k == DEEP:
            if self._now_s - self._since_s > self._settings.dwell_s and self._visits(seen, gains, doubts):
                return self._k
            # A look finds how long a step takes, and at first what is left of the drafter.
            asks = self._belief.asks(self._now_s)
            strange = [self._belief.is_strange(seen.decoding, k) for k in self.ks]
            doubts = [
                1.0 if asks and k > 0 else doubt if new else 0.0
                for k, doubt, new in zip(self.ks, doubts, strange, strict=True)
            ]
        gap_s = max(self._settings.probe_gap_s, _GAP_STEPS * step_s)
        wanted = self._prober.wish(self._now_s, gap_s, gains, doubts, self._settings.dead_band)
        if wanted is None or self._is_at_risk(seen):
            return self._k
        k = self.ks[wanted]
        its_s, look_s = self._belief.step_s(seen.decoding, k), self._belief.look_s(self._k, k)
        self._prober.begin(k, -math.expm1(gains[wanted]), its_s, look_s)
        self.probe_steps += 1
        self._due_in = 0
        return k

    def _visits(self, seen: Observation, gains: Sequence[float], doubts: Sequence[float]) -> bool:
        """Comes back from `DEEP`, if another K may be better by now: a look from there finds drafts that fail."""
        if self._is_at_risk(seen):
            return False
        drafting = [j for j, k in enumerate(self.ks) if k > 0 and not self._belief.is_strange(seen.decoding, k)]
        wanted = self._prober.hope(gains, doubts, drafting, self._settings.dead_band)
        if wanted is None or not self._prober.buy(self._belief.visit_s(self.ks[wanted])):
            return False
        self._use(self.ks[wanted])
        return True

    def _go_on(self, decoding: int, gains: Sequence[float]) -> int:
        """Goes on with a probe, or back to the K in use."""
        k = self._prober.k or 0
        self._prober.pay(-math.expm1(gains[self._place[k]]), self._belief.step_s(decoding, k))
        if self._prober.goes_on(self._now_s):
            self.probe_steps += 1
            return k
        return self._k

    def _is_at_risk(self, seen: Observation) -> bool:
        """Whether a slower step could break the promise: it is near, somebody waits, or the cache is full."""
        objective_ms = self._settings.objective_ms
        if objective_ms is None:
            return False
        token_ms = 1e3 * self._belief.token_s(seen.decoding, self._k)
        return seen.waiting > 0 or seen.kv_use > _FULL_KV or token_ms > _NEAR * objective_ms
