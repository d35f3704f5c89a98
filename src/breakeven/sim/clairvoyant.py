"""The most tokens that anybody could make in a world, who knows all that will come and pays for switches as all do.

Dynamic programming over ticks, backwards (R. Bellman, 1957): the state is the K in use and how stale the drafter's
cache is, of which eight levels are kept and interpolated between. What a policy is charged for within a tick, this
pays too; it may only switch between ticks, a quarter of a second, in which no load changes.
"""

from __future__ import annotations

import numpy as np

from breakeven.sim.worlds import TICK_S, World

__all__ = ["best_tokens", "static_tokens"]

_LEVELS = 9


def static_tokens(world: World) -> dict[int, float]:
    """The expected tokens of each K, kept from beginning to end."""
    return {k: float(world.tokens_per_s(k).sum() * TICK_S) for k in world.ks}


def best_tokens(world: World) -> float:
    """The clairvoyant's expected tokens; it begins with any K, for nothing."""
    switching, ks = world.switching, world.ks
    levels = np.linspace(0, 1, _LEVELS) if switching.stale_share else np.zeros(1)
    # Tokens of a tick by tick, K and level; what a switch to a K costs then, in tokens.
    fresh = 1 - switching.stale_share * levels
    tokens = np.stack([world.tokens_per_s(k, fresh).T * TICK_S for k in ks], axis=1)
    costs = tokens * (switching.switch_ms / 1e3 / TICK_S)
    moves = [_moves(world, k, levels) for k in ks]
    value = np.zeros((len(ks), len(levels)))
    for tick in range(len(world.batches) - 1, -1, -1):
        later = np.stack(
            [v[left] * (1 - part) + v[right] * part for v, (left, right, part) in zip(value, moves, strict=True)]
        )
        stay = tokens[tick] + later
        switched = (stay - costs[tick]).max(axis=0)
        value = np.maximum(stay, switched)
    return float(value[:, 0].max())


def _moves(world: World, k: int, levels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where a tick of `k` takes each level of staleness: the levels below and above, and how far between."""
    if len(levels) == 1:
        return np.zeros(1, int), np.zeros(1, int), np.zeros(1)
    place = world.switching.staler(levels, world.rests(k), TICK_S) * (len(levels) - 1)
    left = np.minimum(place.astype(int), len(levels) - 2)
    return left, left + 1, place - left
