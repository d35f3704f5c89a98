"""When requests of an open loop are due: seconds after the start, fixed before it, whatever the server does."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

__all__ = ["check_arrivals", "due_times"]


def check_arrivals(text: str) -> str:
    """The name of a distribution of gaps, if it is one; raises ValueError else."""
    if text in ("poisson", "constant"):
        return text
    kind, _, value = text.partition(":")
    if kind != "gamma" or not 0.01 <= float(value) <= 100:
        raise ValueError(text)
    return text


def due_times(rate: float, arrivals: str, *, seed: int, run: int = 0) -> Iterator[float]:
    """Endless due times at `rate` a second, in seconds after the start; the first after one gap.

    Gaps are `constant`, exponential (`poisson`), or gamma-distributed with a coefficient of variation
    (`gamma:CV`: 1 is Poisson, above it bursts). They depend on the seed, the distribution and `run` alone: two rates
    see the same pattern, stretched. Repeats of a level (`LevelPlan.run`) differ, in every arm alike: with the same
    pattern in each, what it does at a window's edges would look like a difference of arms that is beyond doubt.
    """
    gap = _gap(arrivals, random.Random(f"arrivals {seed} {arrivals}" + (f" {run}" if run else "")))
    at = 0.0
    while True:
        at += gap()
        yield at / rate


def _gap(arrivals: str, rng: random.Random) -> Callable[[], float]:
    """Gaps of mean 1."""
    if arrivals == "constant":
        return lambda: 1.0
    if arrivals == "poisson":
        return lambda: rng.expovariate(1.0)
    shape = float(arrivals.partition(":")[2]) ** -2  # of a gamma distribution: CV = 1 / sqrt(shape)
    return lambda: rng.gammavariate(shape, 1 / shape)
