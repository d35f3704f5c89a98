"""Arms measured by turns, each into a run of its own.

Arms that are up together take turns within a level, in ABBA order, so that whatever drifts meets both alike. Each turn
is a level of its arm's run, with a ramp, which discards the first turnover after the switch, a window, and a drain,
which leaves the machine to the next. Where an arm is started with a command, the arms are taken not to fit on the
machine together: whole sweeps take turns then.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import uvloop
from msgspec import structs

from breakeven.arm import Arm
from breakeven.benchmark import client_ceiling
from breakeven.decide.likeness import check_alike, check_servers
from breakeven.decide.ratio import Ratio, paired
from breakeven.engines.start import Server, start, start_all
from breakeven.errors import TargetError
from breakeven.finding import Finding, check_find
from breakeven.interrupts import until_signal
from breakeven.levels import duration, plan_levels, stop_rule
from breakeven.load.window import StopRule
from breakeven.measure.level import LevelSummary
from breakeven.measurer import Material, Measurer
from breakeven.options import BenchOptions, CompareOptions
from breakeven.records import LevelPlan, Manifest, Turns
from breakeven.report.live import Live
from breakeven.resuming import check_same, origin_ns
from breakeven.runs import SERVER_LOG, RunWriter
from breakeven.sweep import Sweep

__all__ = ["Alternation"]

#: The window of a turn where nobody said how long: so many times the longest request of its ramp, and so many seconds
#: at least. With `--budget` windows are shorter, and as many turns as fit, no fewer than LEAST_TURNS.
TURNOVERS, TURNOVERS_IN_BUDGET = (3.0, 5.0), (1.5, 2.0)
LEAST_TURNS = 3
#: The ratio's precision is looked at when so many times `--cycles` are done, and not after each one: that would
#: pick the moments at which the interval happens to be narrow.
LOOKS = (1, 2, 4)


class _Ready(NamedTuple):
    """An arm that can take its turn."""

    name: str
    measurer: Measurer


class Alternation:
    """Measures all arms from the first look to the last record.

    Args:
        options: what was asked for.
        arms: each arm's options, by its name; the first is the reference.
        material: what is sent.
        live: where progress is shown.
        room: requests that can run at once.
        make_directory: called once all arms are found to be usable; the directory gets a run for each, named for it.
        check: called with each arm's name and manifest before it is measured; raises where it can't be used.

    `lost` names the arm whose server was gone, if one was.
    """

    def __init__(
        self,
        options: CompareOptions,
        arms: Mapping[str, BenchOptions],
        material: Material,
        live: Live,
        room: int,
        make_directory: Callable[[], Path],
        check: Callable[[str, Manifest], None] = lambda name, manifest: None,
    ) -> None:
        check_find(options, arms)
        self._options, self._arms, self._material = options, arms, material
        self._live, self._room, self._make_directory = live, room, make_directory
        self._check = check
        self._group = secrets.token_hex(8)
        self._loads = plan_levels(structs.replace(options.bench, runs=1), material.trace)
        self._by_sweeps = any(own.serve for own in arms.values())
        # By name, so that a search sees what its turns gave; filled when the arms are ready.
        self._summaries: dict[str, Sequence[LevelSummary]] = dict.fromkeys(arms, ())
        self._finding = self._make_finding(options)
        self._turns = options.repeats if self._by_sweeps else 2 * options.cycles
        self._most_turns = self._turns * (LOOKS[-1] if options.precision and not self._by_sweeps else 1)
        self._manifests: dict[str, Manifest] = {}
        self._writers: dict[str, RunWriter] = {}
        self._next_ids: dict[str, int] = {}
        self._visits = 0
        self._ceiling: float | None = None
        self.lost: str | None = None

    @cached_property
    def directory(self) -> Path:
        """Where the runs are."""
        return self._make_directory()

    def run(self) -> int:
        """Measures; returns the number of the signal that ended it early, else 0."""
        self._began_s = time.monotonic()
        with contextlib.ExitStack() as self._files:
            stopped_by = self._run_sweeps() if self._by_sweeps else self._run_pairs()
            for writer in self._writers.values():
                writer.finish(interrupted=bool(stopped_by) or self.lost is not None)
        return stopped_by

    # ---- arms that are up together ----

    def _run_pairs(self) -> int:
        with start_all(self._arms, self._live.say) as servers:
            return uvloop.run(self._measure_pairs(servers))

    async def _measure_pairs(self, servers: Mapping[str, Server]) -> int:
        arms = {name: await self._meet(name, server) for name, server in servers.items()}
        for name, arm in arms.items():
            self._live.say(f"{name}: {arm.describe()}")
        self._announce_plan()
        self._ceiling = await client_ceiling(self._live, self._room)
        async with contextlib.AsyncExitStack() as stack:
            ready = [await stack.enter_async_context(self._ready(name, arm)) for name, arm in arms.items()]
            return await until_signal(self._alternate(ready))

    async def _alternate(self, arms: Sequence[_Ready]) -> None:
        self._summaries |= {arm.name: arm.measurer.summaries for arm in arms}
        plan = self._finding.levels(partial(self._say_load, arms)) if self._finding else self._grid(arms)
        for level in plan:
            for writer in self._writers.values():
                writer.plan(level)
            await self._take_turns(arms, level)
            if self.lost:
                return

    def _grid(self, arms: Sequence[_Ready]) -> Iterator[LevelPlan]:
        """The loads in their order, each until it has its turns, is precise, or has had its share of the budget."""
        for load in self._loads:
            began_s = time.monotonic()
            share_s = self._budget_left_s() / (len(self._loads) - load.index)
            for number in range(self._most_turns):
                took_s = time.monotonic() - began_s
                if number >= LEAST_TURNS and took_s * (number + 1) / number > share_s:
                    break
                if number in self._looks() and self._is_precise(arms, load):
                    break
                yield structs.replace(load, index=self._index(load, number), run=number)
            self._say_load(arms, load)
            if (took_s := time.monotonic() - began_s) > 1.2 * share_s:
                self._live.say(
                    f"note: {LEAST_TURNS} turns of each arm at {load.name} took {duration(took_s)} of the "
                    f"{duration(share_s)} that --budget left for them: lower --max-tokens or raise it"
                )

    def _looks(self) -> list[int]:
        return [self._turns * look for look in LOOKS] if self._options.precision else []

    def _index(self, load: LevelPlan, number: int) -> int:
        return load.index * self._most_turns + number

    async def _take_turns(self, arms: Sequence[_Ready], level: LevelPlan) -> None:
        if self._options.concurrently:
            async with asyncio.TaskGroup() as group:
                for arm in arms:
                    group.create_task(self._visit(arm, level))
            return
        for arm in arms if level.run % 2 == 0 else reversed(arms):
            await self._visit(arm, level)
            if self.lost:
                return

    async def _visit(self, arm: _Ready, level: LevelPlan) -> None:
        """One turn of one arm. Only the first at a load is warmed up: the ramp is enough for those that follow."""
        display = asyncio.create_task(self._display(arm, level))
        try:
            await arm.measurer.measure(level, self._stop, warmup=0 if level.run else self._options.bench.warmup)
        except TargetError as error:  # the control page lives in the server's process
            self._live.say(str(error))
            self.lost = arm.name
            return
        finally:
            display.cancel()
        self._visits += 1
        if arm.measurer.lost:
            self.lost = arm.name

    def _stop(self) -> StopRule:
        bench = self._options.bench
        rule = stop_rule(bench)
        if bench.requests is None and bench.duration_s is None and bench.trace is None:
            turnovers, least_s = TURNOVERS if bench.budget_s is None else TURNOVERS_IN_BUDGET
            return structs.replace(rule, precise=False, requests=None, turnovers=turnovers, turnovers_least_s=least_s)
        return rule

    def _budget_left_s(self) -> float:
        budget_s = self._options.bench.budget_s
        return math.inf if budget_s is None else max(0.0, budget_s - self._elapsed_s())

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def _is_precise(self, arms: Sequence[_Ready], load: LevelPlan) -> bool:
        ratios = self._ratios(arms, load).values()
        return all(
            ratio is not None and ratio.interval(0.95).log_half_width <= (self._options.precision or 0)
            for ratio in ratios
        )

    def _ratios(self, arms: Sequence[_Ready], load: LevelPlan) -> dict[str, Ratio | None]:
        """The ratio of each arm's throughput to the reference's so far, None where there is none."""
        reference, *others = ([summary.rate for summary in _at(arm, load)] for arm in arms)
        found: dict[str, Ratio | None] = {}
        for arm, rates in zip(arms[1:], others, strict=True):
            ratio = paired(reference, rates) if len(reference) == len(rates) else None
            found[arm.name] = ratio if isinstance(ratio, Ratio) else None
        return found

    # ---- arms that are not ----

    def _run_sweeps(self) -> int:
        names = list(self._arms)
        for repeat in range(self._turns):
            for name in names if repeat % 2 == 0 else reversed(names):
                self._live.say(f"sweep {repeat + 1}/{self._turns} of {name}")
                if stopped_by := self._run_sweep(name, repeat):
                    return stopped_by
                if self.lost:
                    return 0
        return 0

    def _run_sweep(self, name: str, repeat: int) -> int:
        try:
            with start(self._arms[name], self._live.say) as server:
                stopped_by = uvloop.run(self._measure_sweep(name, server, repeat))
                server.save_log(self.directory / name / SERVER_LOG)
                return stopped_by
        except (KeyboardInterrupt, SystemExit) as end:  # while a server starts, which is not done in the event loop
            if not self._writers:
                raise
            # `cli` ends what it does at SIGTERM and SIGHUP with 128 + the number.
            return int(end.code or 128) - 128 if isinstance(end, SystemExit) else int(signal.SIGINT)

    async def _measure_sweep(self, name: str, server: Server, repeat: int) -> int:
        arm = await self._meet(name, server)
        self._live.say(f"{name}: {arm.describe()}")
        if not self._visits:  # this machine's, whichever arm is up
            self._ceiling = await client_ceiling(self._live, self._room)
        levels = [structs.replace(load, index=self._index(load, repeat), run=repeat) for load in self._loads]
        bench = self._options.bench
        sweeps_left = self._turns * len(self._arms) - self._visits
        budget_s = None if bench.budget_s is None else max(1.0, (bench.budget_s - self._elapsed_s()) / sweeps_left)
        sweep = Sweep(structs.replace(bench, budget_s=budget_s), len(levels), self._live, planned_s=math.inf)
        self._visits += 1
        async with self._ready(name, arm) as ready:
            stopped_by = await until_signal(sweep.run(ready.measurer, levels))
            self.lost = name if ready.measurer.lost else None
        return stopped_by

    # ---- both ----

    async def _meet(self, name: str, server: Server) -> Arm:
        """Finds out what an arm is, and whether it can be compared with those met before, or with itself then."""
        arm = Arm(self._arms[name], self._material, server)
        await arm.probe()
        levels = self._finding.planned() if self._finding else self._planned()
        turns = Turns(group=self._group, arm=name, how="sweeps" if self._by_sweeps else "pairs")
        manifest = arm.manifest(levels, turns)
        if name in self._manifests:
            check_same(self._manifests[name], manifest)
        self._manifests.setdefault(name, manifest)
        check_alike(self._manifests, self._options.force)
        check_servers(self._manifests, self._options.force)
        self._check(name, manifest)
        return arm

    def _planned(self) -> list[LevelPlan]:
        return [
            structs.replace(load, index=self._index(load, number), run=number)
            for load in self._loads
            for number in range(self._turns)
        ]

    def _make_finding(self, options: CompareOptions) -> Finding | None:
        if options.find is None:
            return None
        return Finding(options.find, self._loads[0], self._summaries, self._elapsed_s, self._live.say)

    @contextlib.asynccontextmanager
    async def _ready(self, name: str, arm: Arm) -> AsyncIterator[_Ready]:
        manifest = self._manifests[name]
        if name not in self._writers:
            self._writers[name] = self._files.enter_context(RunWriter.create(self.directory / name, manifest))
        async with arm.measuring(
            self._writers[name],
            origin_ns=origin_ns(manifest),
            first_id=self._next_ids.get(name, 0),
            room=self._room,
            ceiling=self._ceiling,
        ) as measurer:
            try:
                yield _Ready(name, measurer)
            finally:
                self._next_ids[name] = measurer.client.next_id

    # ---- what is said ----

    def _announce_plan(self) -> None:
        if self._finding:
            self._live.say(f"plan: {self._finding.describe()}, into {self.directory}")
            return
        budget_s, loads = self._options.bench.budget_s, len(self._loads)
        turns = f"{self._turns}" if self._most_turns == self._turns else f"{self._turns} to {self._most_turns}"
        if budget_s is not None:
            turns = f"within about {duration(budget_s)} up to {self._most_turns}"
        what = f"{loads} load{'s' * (loads > 1)}, {turns} turns of each arm at each"
        self._live.say(f"plan: {what}, into {self.directory}")

    def _say_load(self, arms: Sequence[_Ready], load: LevelPlan) -> None:
        for name, ratio in self._ratios(arms, load).items():
            if ratio is None:
                self._live.say(f"{load.name}: no ratio of {name} to {arms[0].name}")
            else:
                low, high = ratio.interval(0.95).low, ratio.interval(0.95).high
                self._live.say(
                    f"{load.name}: {name}/{arms[0].name} {ratio.value:.3f} tok/s (95 %: {low:.3f} to {high:.3f}), "
                    f"{ratio.n} pairs"
                )

    async def _display(self, arm: _Ready, level: LevelPlan) -> None:
        if self._options.bench.quiet:
            return
        of = "" if self._finding else f"/{self._turns}"
        where = f"{level.name}  turn {level.run + 1}{of} of {arm.name}"
        async for at in arm.measurer.watch():
            self._live.update(f"{where}  {at.stage}  {at.in_flight} in flight  {at.rate:.0f} tok/s{self._left()}")

    def _left(self) -> str:
        if not self._visits or self._finding:
            return ""
        visits = len(self._loads) * self._turns * len(self._arms)
        left_s = min(self._elapsed_s() / self._visits * max(0, visits - self._visits), self._budget_left_s())
        return f"  about {duration(left_s)} left"


def _at(arm: _Ready, load: LevelPlan) -> list[LevelSummary]:
    return [summary for summary in arm.measurer.summaries if summary.load == load.load]
