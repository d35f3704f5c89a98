"""The levels of a run, one after the other, and the line that says how far it is."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence

from breakeven.levels import duration, stop_rule
from breakeven.load.window import StopRule
from breakeven.measurer import Measurer
from breakeven.options import BenchOptions
from breakeven.records import LevelPlan
from breakeven.report.live import Live
from breakeven.report.table import level_line

__all__ = ["Sweep"]

#: The most of a level's budget that its warm-up may take.
_WARM_UP_SHARE = 0.25


class Sweep:
    """Runs levels in turn, within the budget if there is one, and says how far it is.

    Args:
        options: what was asked for.
        count: how many levels the whole run has.
        live: where progress is shown.
        planned_s: how long the run may take.
    """

    def __init__(self, options: BenchOptions, count: int, live: Live, *, planned_s: float) -> None:
        self._options, self._count, self._live, self._planned_s = options, count, live, planned_s
        self._done = 0

    async def run(self, measurer: Measurer, levels: Sequence[LevelPlan]) -> None:
        """Runs these levels, or as many as the server lives to see. Cancelling it writes down the one it was in."""
        self._began_s = time.monotonic()
        share = len(levels) / self._count  # of the budget: the rest went, or goes, to other levels
        self._ends_s = self._began_s + (self._options.budget_s or math.inf) * share
        for done, level in enumerate(levels):
            self._left = len(levels) - done
            await self._run_level(measurer, level)
            if measurer.lost:
                return
            self._done += 1

    async def _run_level(self, measurer: Measurer, level: LevelPlan) -> None:
        self._level_began_s = now_s = time.monotonic()
        ends_s = now_s + (self._ends_s - now_s) / self._left
        limit_s = _WARM_UP_SHARE * (ends_s - now_s)

        def stop() -> StopRule:
            budget_s = max(0.0, ends_s - time.monotonic()) if self._options.budget_s else None
            return stop_rule(self._options, budget_s)

        display = asyncio.create_task(self._display(measurer, level))
        before = len(measurer.summaries)
        try:
            await measurer.measure(level, stop, warmup=self._options.warmup, warmup_limit_s=limit_s)
        finally:
            display.cancel()
            for summary in measurer.summaries[before:]:
                self._live.say(level_line(summary))

    async def _display(self, measurer: Measurer, level: LevelPlan) -> None:
        """Draws the live line each second."""
        if self._options.quiet:
            return
        where = f"level {level.index + 1}/{self._count}  {level.name}  max-tokens={level.max_tokens}"
        async for at in measurer.watch():
            self._live.update(
                f"{where}  {at.stage}  {at.in_flight} in flight  {at.ended} done  {at.rate:.0f} tok/s"
                f"  about {duration(self._seconds_left())} left"
            )

    def _seconds_left(self) -> float:
        """Until the run ends: by the levels so far, before there is one by the plan, with a budget by that."""
        now_s = time.monotonic()
        if self._options.budget_s is not None:
            return self._ends_s - now_s
        if not self._done:
            return max(self._planned_s - (now_s - self._began_s), 0.0)
        mean_s = (self._level_began_s - self._began_s) / self._done
        return max(self._left * mean_s - (now_s - self._level_began_s), 0.0)
