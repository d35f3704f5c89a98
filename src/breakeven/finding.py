"""The turns of a comparison that looks for a load itself: `compare --find`.

`decide.find` says where to measure next; here what was measured is put before it, and what it chose becomes levels.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count

from msgspec import structs

from breakeven.decide.blocks import LOWEST_FIRST, Block, Pace, Search, Stop
from breakeven.decide.find import next_for_break_even
from breakeven.decide.findknee import next_for_knee
from breakeven.decide.ratio import NoRatio, Ratio, log_mean, paired
from breakeven.decide.slo import Slo, limit_ratio, parse_slos, statistic_of
from breakeven.errors import UsageError
from breakeven.levels import duration
from breakeven.measure.level import LevelSummary
from breakeven.options import BenchOptions, CompareOptions, FindOptions
from breakeven.records import LevelPlan

__all__ = ["Finding", "check_find"]

#: By arm, its levels so far, in their order.
Summaries = Mapping[str, Sequence[LevelSummary]]
_WHAT = {"break-even": "the break-even", "knee": "each arm's knee", "slo": "the largest load that holds --slo"}


def check_find(options: CompareOptions, arms: Mapping[str, BenchOptions]) -> None:
    """Raises `UsageError` where a search can't be done with these arms and this load."""
    find, bench = options.find, options.bench
    if find is None:
        return
    for name, own in arms.items():
        if own.serve:
            raise UsageError(
                f"--find needs arms that are up together, and --arm {name}=serve:… takes whole sweeps: start the "
                "servers yourself and give their URLs, or give --concurrency instead"
            )
    if bench.rate or bench.trace is not None:
        raise UsageError("--find looks for requests in flight: leave --rate and --trace out")
    if len(bench.max_tokens) > 1:
        raise UsageError("--find looks at one length of answers: give --max-tokens one number")


class Finding:
    """Chooses loads until the answer is as narrow as asked for, or time is up.

    Args:
        find: what is looked for.
        level: any level of the search, for what all have in common.
        summaries: each arm's levels, which grow as turns are taken; the first arm is the reference.
        elapsed_s: asked how long the whole comparison has run.
        say: told what is done, and why.
    """

    def __init__(
        self,
        find: FindOptions,
        level: LevelPlan,
        summaries: Summaries,
        elapsed_s: Callable[[], float],
        say: Callable[[str], None],
    ) -> None:
        self._find, self._level, self._summaries = find, level, summaries
        self._elapsed_s, self._say = elapsed_s, say
        self._search = Search(low=find.between[0], high=find.between[1], precision=find.precision)
        self._slos = parse_slos(find.slo) if find.slo else ()
        self._numbers = count()
        self._turns: dict[int, int] = {}
        self._took_s: dict[int, float] = {}

    def describe(self) -> str:
        """What is looked for, in words."""
        find = self._find
        limit = "" if find.max_seconds is None else f", for {duration(find.max_seconds)} at most"
        return (
            f"{_WHAT[find.what]} between C={find.between[0]} and C={find.between[1]}, within {100 * find.precision:g} %"
            f"{limit}"
        )

    def levels(self, told: Callable[[LevelPlan], None]) -> Iterator[LevelPlan]:
        """The level of each next turn of all arms; what it gave is looked at when the next one is asked for.

        Args:
            told: called with a level whose load has got its turns.
        """
        while isinstance(chosen := self._choose(), Block):
            self._say(f"C={chosen.load}: {chosen.turns} turns of each arm ({chosen.why})")
            for done in range(chosen.turns):
                if done and done % 2 == 0 and self._left_s() < 2 * self._pace().at(chosen.load):
                    break
                level = self._take_turn(chosen.load)
                yield level
                self._took_s[chosen.load] += time.monotonic() - self._began_s
            told(level)
        self._say(f"search over: {chosen.why}" if chosen.reached else f"search ended: {chosen.why}")

    def planned(self) -> list[LevelPlan]:
        """The levels of the first block, by which arms are found to be alike."""
        first = structs.replace(self._level, concurrency=self._search.low)
        return [structs.replace(first, index=turn, run=turn) for turn in range(LOWEST_FIRST)]

    def _take_turn(self, load: int) -> LevelPlan:
        run = self._turns.get(load, 0)
        self._turns[load] = run + 1
        self._took_s.setdefault(load, 0.0)
        self._began_s = time.monotonic()
        return structs.replace(self._level, concurrency=load, index=next(self._numbers), run=run)

    def _choose(self) -> Block | Stop:
        """The first block that any of the answers wants; what stopped the last of them where none does."""
        stops: list[Stop] = []
        for names in self._wanted():
            chosen = self._next(*names)
            if isinstance(chosen, Block):
                return chosen
            stops.append(chosen)
        return next((stop for stop in stops if not stop.reached), stops[-1])

    def _wanted(self) -> list[tuple[str, ...]]:
        names = list(self._summaries)
        if self._find.what == "break-even":
            return [(names[0], name) for name in names[1:]]
        return [(name,) for name in names]

    def _next(self, *names: str) -> Block | Stop:
        pace, left_s = self._pace(), self._left_s()
        if self._find.what == "knee":
            means = {load: log_mean([each.rate for each in own]) for load, own in self._at_loads(names[0]).items()}
            return next_for_knee(means, self._search, pace, left_s)
        seen = self._ratios(*names) if self._find.what == "break-even" else self._limits(names[0])
        return next_for_break_even(seen, self._search, pace, left_s)

    def _ratios(self, reference: str, other: str) -> dict[int, Ratio | NoRatio]:
        mine, its = self._at_loads(reference), self._at_loads(other)
        return {
            load: paired([each.rate for each in mine[load]], [each.rate for each in its[load]])
            for load in sorted(self._turns)
        }

    def _limits(self, name: str) -> dict[int, Ratio | NoRatio]:
        """At each load the limit over the latency that comes nearest to breaking its own."""
        return {
            load: min((self._limit(slo, own) for slo in self._slos), key=_margin)
            for load, own in self._at_loads(name).items()
        }

    @staticmethod
    def _limit(slo: Slo, own: Sequence[LevelSummary]) -> Ratio | NoRatio:
        values = [statistic_of(slo, getattr(each, f"{slo.metric}_ms")) for each in own]
        return limit_ratio(slo, log_mean([value or 0.0 for value in values]))

    def _at_loads(self, name: str) -> dict[int, list[LevelSummary]]:
        found: dict[int, list[LevelSummary]] = {load: [] for load in sorted(self._turns)}
        for summary in self._summaries[name]:
            found[summary.load["concurrency"]].append(summary)
        return found

    def _pace(self) -> Pace:
        return Pace({load: took_s / self._turns[load] for load, took_s in self._took_s.items()})

    def _left_s(self) -> float:
        return math.inf if self._find.max_seconds is None else self._find.max_seconds - self._elapsed_s()


def _margin(ratio: Ratio | NoRatio) -> float:
    """A load whose latency has no value can't be said to hold."""
    return ratio.gain if isinstance(ratio, Ratio) else -math.inf
