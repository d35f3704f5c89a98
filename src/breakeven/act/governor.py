"""Stands between an engine's scheduler and the policy: no fault of either reaches the other, and people may look on.

The engine's thread asks for K and reports steps; the control page's threads read and pin. A lock keeps them apart: the
longest that it is held for is a page's reading, some hundred microseconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from breakeven.decide.observed import Observation, Step
from breakeven.decide.policy import Policy
from breakeven.errors import UsageError

__all__ = ["LONGEST_PIN_S", "STATE_SCHEMA", "Governor"]

#: The layout of a control page's state. History: 1, the first.
STATE_SCHEMA = "breakeven.control/1"
#: A pin that nobody renews ends: whoever set it may be gone.
LONGEST_PIN_S = 3600.0
#: Choices of which the median cost is told.
_RECENT = 1000


class Governor:
    """Chooses K for an engine.

    Args:
        policy: decides where nobody has pinned a K.
        name: how the policy is called.
        clock_ns: a monotonic clock, in nanoseconds.

    Attributes:
        active_k: the K of the step that was scheduled last.
        decoding: the requests that it decodes.
        faults: of the engine's signals, by what raised: those that the policy itself finds are in its own `faults`.
    """

    def __init__(self, policy: Policy, name: str, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._policy, self._name, self._clock_ns = policy, name, clock_ns
        self._mode = policy.mode
        self._lock = threading.Lock()
        self._pin: tuple[int, int] | None = None  # K, and until when in nanoseconds
        self._last: Step | None = None
        self._costs_ns: deque[int] = deque(maxlen=_RECENT)
        self._cost_ns = self.pins = 0
        self.active_k, self.decoding = policy.k, 0
        self.faults: dict[str, int] = {}

    @property
    def ks(self) -> tuple[int, ...]:
        """The K that the engine may be told, ascending."""
        return self._policy.ks

    def choose(self, decoding: int, waiting: int, kv_use: float) -> int:
        """The K for the step that begins now; the arguments are those of `Observation`."""
        begun_ns = self._clock_ns()
        with self._lock:
            self._end_pin(begun_ns)
            k = self._policy.choose(Observation(begun_ns, decoding, waiting, kv_use, self._last))
            self.active_k, self.decoding = k, decoding
            cost_ns = self._clock_ns() - begun_ns
            self._cost_ns += cost_ns
            self._costs_ns.append(cost_ns)
        return k

    def report(self, step: Step) -> None:
        """A step is over."""
        self._last = step

    def fault(self, signal: str) -> None:
        """The engine didn't give a signal; what it does instead is the caller's to say."""
        self.faults[signal] = self.faults.get(signal, 0) + 1

    def pin(self, k: int, seconds: float) -> None:
        """Holds a K for so long.

        Raises:
            UsageError: the engine doesn't know this K, or the time can't be.
        """
        if type(k) is not int or k not in self.ks:
            raise UsageError(f"K={k} is not declared: the server may be told {', '.join(map(str, self.ks))}")
        if not (isinstance(seconds, int | float) and 0 < seconds <= LONGEST_PIN_S):
            raise UsageError(f"seconds={seconds}: a number above 0, up to {LONGEST_PIN_S:g}, is needed")
        with self._lock:
            self._pin = k, self._clock_ns() + round(seconds * 1e9)
            self._policy.mode = k
            self.pins += 1

    def unpin(self) -> None:
        """The policy decides again."""
        with self._lock:
            self._release()

    def _release(self) -> None:
        self._pin, self._policy.mode = None, self._mode

    def _end_pin(self, now_ns: int) -> None:
        """Takes a pin away whose time is over."""
        if self._pin and now_ns >= self._pin[1]:
            self._release()

    def state(self) -> dict[str, Any]:
        """What is going on, as JSON has it."""
        policy = self._policy
        with self._lock:
            now_ns = self._clock_ns()
            self._end_pin(now_ns)
            pin, costs_ns = self._pin, list(self._costs_ns)
            estimates = policy.estimates(max(1, self.decoding)) if policy.steps else []
        return {
            "schema": STATE_SCHEMA,
            "policy": self._name,
            "ks": list(self.ks),
            "k": self.active_k,
            "decoding": self.decoding,
            "pinned": {"k": pin[0], "seconds_left": (pin[1] - now_ns) / 1e9} if pin else None,
            "pins": self.pins,
            "estimates": [{"k": e.k, "tokens_per_s": e.tokens_per_s, "doubt": e.doubt} for e in estimates],
            "steps": policy.steps,
            "switches": policy.switches,
            "probe_steps": policy.probe_steps,
            "probe_share": policy.probe_share,
            "fallback_steps": policy.fallback_steps,
            "faults": dict(policy.faults) | self.faults,
            "policy_seconds": self._cost_ns / 1e9,
            "policy_us_median": statistics.median(costs_ns) / 1e3 if costs_ns else None,
        }

    def restore(self, path: Path) -> str:
        """Goes on from what `keep` wrote; says what came of it. A file that can't be read is no reason not to start."""
        try:
            self._policy.restore(json.loads(path.read_text("utf-8")))
        except FileNotFoundError:
            return f"nothing was learned yet ({path})"
        except (OSError, ValueError) as error:
            return f"{path} is not used: {error}"
        return f"goes on from {path}"

    def keep(self, path: Path) -> None:
        """Writes what was learned; a disk that is full is counted and no more."""
        with self._lock:
            learned = self._policy.state()
        new = path.with_name(f"{path.name}.new")
        try:
            new.write_text(json.dumps(learned), "utf-8")
            os.replace(new, path)
        except OSError:
            self.fault("state_file")
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
