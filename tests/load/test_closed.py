"""The closed loop in virtual time: who is in flight when, what counts, and how a level ends."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from msgspec import Struct

from breakeven.load.closed import ClosedLoop, warm_up
from breakeven.load.plan import LevelRequests, PlannedRequest
from breakeven.load.prompts import Prompt, PromptSet
from breakeven.load.window import Hooks, LevelTimes, StopRule
from breakeven.measure.level import LevelSummary, summarize_level
from breakeven.records import ClientCost, LevelPlan, LevelRecord, Phase, RequestRecord
from tests.load.virtual import VirtualRig

S = 1_000_000_000
PROMPTS = PromptSet(source="test", prompts=tuple(Prompt(id=f"p{i}", text="x") for i in range(64)))
STEP_S = 0.05


class Sent(Struct):
    """One request as the modelled server saw it."""

    planned: PlannedRequest
    sent_ns: int
    end_ns: int = 0
    cancelled: bool = False

    @property
    def phase(self) -> Phase:
        return self.planned.phase


def steady(planned: PlannedRequest) -> float:
    """A server of constant rate: a token each step."""
    return planned.max_tokens * STEP_S


def uneven(planned: PlannedRequest) -> float:
    """Answers that end before max-tokens, by their prompt."""
    return planned.max_tokens * STEP_S * random.Random(planned.prompt.id).uniform(0.3, 1.0)


class Rig(VirtualRig[Sent]):
    """A level on a modelled server, in virtual time."""

    def __init__(
        self,
        concurrency: int,
        stop: StopRule,
        *,
        ramp: bool = True,
        max_tokens: int = 100,
        takes: Callable[[PlannedRequest], float] = steady,
        comes_through: Callable[[Sent], bool] = lambda sent: True,
        is_precise: Callable[[float], bool] = lambda elapsed_s: False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.takes, self.comes_through = takes, comes_through
        self.looks: list[float] = []
        self.level = LevelPlan(index=0, run=0, concurrency=concurrency, max_tokens=max_tokens)

        async def look(opened_ns: int) -> bool:
            elapsed_s = (self.clock.now_ns() - opened_ns) / S
            self.looks.append(round(elapsed_s, 3))
            return is_precise(elapsed_s)

        self.requests = LevelRequests(self.level, PROMPTS, seed=seed, tag=None)
        self.closed = ClosedLoop(
            self.level,
            self.requests,
            self.send,
            self.clock,
            stop,
            ramp=ramp,
            hooks=Hooks(
                is_precise=look,
                on_open=lambda: self.note("open"),
                on_close=lambda: self.note("close"),
            ),
        )

    async def send(self, planned: PlannedRequest) -> bool:
        sent = Sent(planned, self.clock.now_ns())
        self.sent.append(sent)
        try:
            await asyncio.sleep(self.takes(planned))
        except asyncio.CancelledError:
            sent.cancelled = True
            raise
        finally:
            sent.end_ns = self.clock.now_ns()
        return self.comes_through(sent)

    def run(self) -> LevelTimes:
        return self.await_(self.closed.run())

    def in_flight(self) -> set[int]:
        """The numbers of requests that were in flight at any time between the level's start and its end."""
        steps: dict[int, int] = {}
        for sent in self.sent:
            steps[sent.sent_ns] = steps.get(sent.sent_ns, 0) + 1
            steps[sent.end_ns] = steps.get(sent.end_ns, 0) - 1
        count, seen = 0, set()
        times = self.closed.window.times
        for moment_ns in sorted(steps):
            count += steps[moment_ns]
            if times.started_ns <= moment_ns < times.ended_ns:
                seen.add(count)
        assert min(sent.sent_ns for sent in self.sent) == times.started_ns
        return seen

    def summary(self) -> LevelSummary:
        """The level's numbers, with a token at each step of each request."""
        times = self.closed.window.times
        record = LevelRecord(
            plan=self.level,
            started_ns=times.started_ns,
            opened_ns=times.opened_ns,
            closed_ns=times.closed_ns,
            ended_ns=times.ended_ns,
            ended_by=times.ended_by,
            client=ClientCost(cpu_s=0.1, wall_s=1.0, chunks=1, lag_ms={}),
        )
        return summarize_level(record, [self._record(i, sent) for i, sent in enumerate(self.sent)], shared_cores=None)

    def _record(self, number: int, sent: Sent) -> RequestRecord:
        step_ns = int(STEP_S * S)
        steps = (sent.end_ns - sent.sent_ns) // step_ns
        return RequestRecord(
            id=number,
            level=0,
            phase=sent.phase,
            prompt=sent.planned.prompt.id,
            kind="test",
            max_tokens=sent.planned.max_tokens,
            due_ns=sent.sent_ns,
            sent_ns=sent.sent_ns,
            end_ns=sent.end_ns,
            arrivals=[((i + 1) * step_ns, 1) for i in range(steps)],
            output_tokens=steps,
            outcome="cancelled" if sent.cancelled else "ok",
        )


STOPS = {
    "requests": StopRule(requests=40),
    "duration": StopRule(duration_s=30.0),
    "max_seconds": StopRule(requests=10**6, max_seconds=20.0),
    "budget": StopRule(requests=10**6, budget_s=40.0),
    "precision": StopRule(precise=True),
}


@pytest.mark.parametrize("takes", [steady, uneven])
@pytest.mark.parametrize("concurrency", [1, 2, 7, 32])
@pytest.mark.parametrize("ended_by", STOPS)
def test_exactly_c_requests_are_in_flight_from_start_to_end(
    ended_by: str, concurrency: int, takes: Callable[[PlannedRequest], float]
) -> None:
    rig = Rig(concurrency, STOPS[ended_by], takes=takes, is_precise=lambda elapsed_s: True)
    times = rig.run()
    assert times.ended_by == ended_by
    assert rig.in_flight() == {concurrency}


@pytest.mark.parametrize("concurrency", [1, 2, 7, 32])
def test_window_opens_when_every_slot_has_ended_its_ramp_request(concurrency: int) -> None:
    rig = Rig(concurrency, StopRule(requests=40), takes=uneven)
    times = rig.run()
    first = rig.sent[:concurrency]
    assert {sent.phase for sent in first} == {"ramp"}
    assert times.opened_ns == max(sent.end_ns for sent in first)
    assert not times.ramp_limited


def test_requests_after_a_slots_first_are_of_full_length_and_ramp_until_the_window_opens() -> None:
    rig = Rig(16, StopRule(requests=40))
    times = rig.run()
    assert times.opened_ns is not None
    refills = rig.of("ramp")[16:]
    assert refills
    assert {sent.planned.max_tokens for sent in rig.sent[16:]} == {100}
    assert all(sent.sent_ns <= times.opened_ns for sent in rig.of("ramp"))
    assert all(sent.sent_ns >= times.opened_ns for sent in rig.of("measured"))


def test_requests_sent_inside_the_window_and_only_those_are_measured() -> None:
    rig = Rig(8, StopRule(duration_s=30), takes=uneven)
    times = rig.run()
    assert times.opened_ns is not None
    assert times.closed_ns is not None
    assert times.closed_ns - times.opened_ns == pytest.approx(30 * S, abs=10)
    assert all(times.opened_ns <= sent.sent_ns <= times.closed_ns for sent in rig.of("measured"))
    assert all(sent.sent_ns >= times.closed_ns for sent in rig.of("drain"))
    assert {sent.phase for sent in rig.sent} == {"ramp", "measured", "drain"}


@pytest.mark.parametrize(("concurrency", "requests"), [(8, 100), (8, 8), (8, 3), (8, 1), (1, 5), (1, 1), (250, 7)])
def test_requests_are_exactly_as_many_as_asked_for(concurrency: int, requests: int) -> None:
    rig = Rig(concurrency, StopRule(requests=requests), takes=uneven)
    times = rig.run()
    assert times.ended_by == "requests"
    assert len(rig.of("measured")) == requests
    assert not any(sent.cancelled for sent in rig.of("measured"))
    # Until a slot is free for one more.
    assert times.closed_ns == min(
        sent.end_ns for sent in rig.sent if sent.end_ns >= max(sent.sent_ns for sent in rig.of("measured")) + 1
    )


@pytest.mark.parametrize("requests", [1, 5])
def test_with_one_slot_the_window_is_as_long_as_its_requests(requests: int) -> None:
    """C=1 is the serial benchmark: one after the other, nothing else sent."""
    rig = Rig(1, StopRule(requests=requests))
    times = rig.run()
    measured = rig.of("measured")
    assert (times.opened_ns, times.closed_ns) == (measured[0].sent_ns, measured[-1].end_ns)
    assert times.closed_ns == times.ended_ns
    assert [sent.phase for sent in rig.sent] == ["ramp", *["measured"] * requests]
    for before, after in zip(rig.sent, rig.sent[1:], strict=False):
        assert before.end_ns == after.sent_ns
    assert rig.summary().output_throughput.value == pytest.approx(1 / STEP_S, rel=0.01)


def test_max_seconds_count_from_the_opening() -> None:
    rig = Rig(4, StopRule(requests=10**6, max_seconds=12), max_tokens=1000)
    times = rig.run()
    assert times.opened_ns is not None
    assert times.opened_ns > 30 * S
    assert times.closed_ns == pytest.approx(times.opened_ns + 12 * S, abs=10)
    assert times.ended_by == "max_seconds"


def test_whichever_comes_first_closes_the_window() -> None:
    assert Rig(4, StopRule(requests=4, max_seconds=100)).run().ended_by == "requests"
    assert Rig(4, StopRule(requests=10**6, duration_s=10, max_seconds=12)).run().ended_by == "duration"


def test_precision_is_looked_at_only_at_45_90_180_s() -> None:
    rig = Rig(4, StopRule(precise=True, max_seconds=700))
    assert rig.run().ended_by == "max_seconds"
    assert rig.looks == [45, 90, 180, 360]


@pytest.mark.parametrize("at_s", [45, 90, 180])
def test_precision_ends_the_window_where_it_is_reached(at_s: float) -> None:
    rig = Rig(4, StopRule(precise=True, max_seconds=700), is_precise=lambda elapsed_s: elapsed_s >= at_s)
    times = rig.run()
    assert times.opened_ns is not None
    assert times.closed_ns == pytest.approx(times.opened_ns + at_s * S, abs=100)
    assert times.ended_by == "precision"


def test_precision_is_not_looked_at_in_the_drain() -> None:
    rig = Rig(2, StopRule(precise=True, max_seconds=40), max_tokens=2000)
    times = rig.run()
    assert times.closed_ns is not None
    assert times.ended_ns > times.closed_ns + 50 * S
    assert rig.looks == []


@pytest.mark.parametrize("takes", [steady, uneven])
@pytest.mark.parametrize("budget_s", [25.0, 40.0, 100.0])
def test_budget_leaves_room_for_the_drain(budget_s: float, takes: Callable[[PlannedRequest], float]) -> None:
    rig = Rig(8, StopRule(precise=True, budget_s=budget_s), takes=takes)
    times = rig.run()
    assert times.ended_by == "budget"
    assert rig.of("measured")
    # An answer may be a little longer than the ramp's longest.
    assert budget_s - 6 < times.ended_ns / S <= budget_s + 0.5


def test_budget_that_the_ramp_uses_up_leaves_no_window() -> None:
    rig = Rig(8, StopRule(precise=True, budget_s=3.0))
    times = rig.run()
    assert (times.ended_by, times.ramp_limited) == ("budget", True)
    assert times.opened_ns == times.closed_ns
    assert times.ended_ns / S == pytest.approx(3.0)
    assert not rig.of("measured")
    summary = rig.summary()
    assert summary.output_throughput.window_s is None
    assert summary.output_throughput.value == pytest.approx(8 / STEP_S, rel=0.05)


def test_budget_without_room_for_a_drain_after_the_ramp_leaves_no_window() -> None:
    rig = Rig(8, StopRule(precise=True, budget_s=8.0))
    times = rig.run()
    assert (times.ended_by, times.ramp_limited) == ("budget", False)
    assert times.opened_ns == times.closed_ns == times.ended_ns
    assert not rig.of("measured")


def test_budget_without_a_ramp_sends_nothing_that_would_end_after_it() -> None:
    rig = Rig(4, StopRule(precise=True, budget_s=23.0), ramp=False)
    times = rig.run()
    assert times.ended_by == "budget"
    assert len(rig.sent) == 16
    assert times.ended_ns / S == pytest.approx(20.0)


def test_ramp_limit_opens_the_window_and_says_so() -> None:
    rig = Rig(8, StopRule(duration_s=10, ramp_limit_s=2.0))
    times = rig.run()
    assert times.opened_ns == pytest.approx(2 * S, abs=10)
    assert times.ramp_limited
    assert times.closed_ns == pytest.approx(12 * S, abs=20)
    assert rig.in_flight() == {8}
    assert [name for name, _ in rig.calls] == ["open", "close"]


def test_ramp_limit_is_nothing_once_the_window_is_open() -> None:
    times = Rig(8, StopRule(duration_s=30, ramp_limit_s=6.0)).run()
    assert not times.ramp_limited


def test_drain_refills_until_the_last_measured_request_ended_and_cancels_the_rest() -> None:
    rig = Rig(8, StopRule(requests=24), takes=uneven)
    times = rig.run()
    assert times.ended_ns == max(sent.end_ns for sent in rig.of("measured"))
    assert {sent.phase for sent in rig.sent if sent.cancelled} == {"drain"}
    assert sum(sent.cancelled for sent in rig.sent) == 7
    assert any(not sent.cancelled for sent in rig.of("drain"))


@pytest.mark.parametrize(("concurrency", "requests"), [(8, 30), (8, 8), (8, 3), (1, 1)])
def test_without_a_ramp_all_start_at_once_and_every_request_counts(concurrency: int, requests: int) -> None:
    rig = Rig(concurrency, StopRule(requests=requests), ramp=False, takes=uneven)
    times = rig.run()
    assert (times.opened_ns, times.closed_ns, times.ended_by) == (None, None, "requests")
    assert sum(sent.sent_ns == times.started_ns for sent in rig.sent) == min(concurrency, requests)
    assert {sent.phase for sent in rig.sent} == {"measured"}
    assert {sent.planned.max_tokens for sent in rig.sent} == {100}
    assert len(rig.sent) == requests
    assert not any(sent.cancelled for sent in rig.sent)


def test_without_a_ramp_a_duration_ends_the_sending() -> None:
    rig = Rig(8, StopRule(duration_s=12), ramp=False)
    times = rig.run()
    assert (times.opened_ns, times.ended_by) == (None, "duration")
    assert len(rig.sent) == 24
    assert times.ended_ns == pytest.approx(15 * S, abs=100)
    assert not any(sent.cancelled for sent in rig.sent)


@pytest.mark.parametrize(("concurrency", "count"), [(1, 5), (3, 5), (8, 5), (8, 0), (2, 1)])
def test_warm_up_sends_as_many_as_asked_never_more_at_once_than_slots(concurrency: int, count: int) -> None:
    rig = Rig(concurrency, StopRule(requests=1), takes=uneven)
    rig.await_(warm_up(rig.requests, rig.send, count, concurrency))
    assert [sent.phase for sent in rig.sent] == ["warmup"] * count
    assert all(sent.planned.max_tokens == 100 for sent in rig.sent)
    moments = {sent.sent_ns for sent in rig.sent}
    most = max((sum(s.sent_ns <= moment < s.end_ns for s in rig.sent) for moment in moments), default=0)
    assert most == min(concurrency, count)


@pytest.mark.parametrize("ramp", [True, False])
@pytest.mark.parametrize("concurrency", [1, 8, 64])
def test_a_server_that_fails_everything_ends_the_level(concurrency: int, ramp: bool) -> None:
    rig = Rig(
        concurrency, StopRule(precise=True), ramp=ramp, takes=lambda planned: 0.001, comes_through=lambda sent: False
    )
    times = rig.run()
    assert times.ended_by == "failures"
    assert times.ended_ns < 60 * S
    assert len(rig.sent) <= max(20, 2 * concurrency) + concurrency


def test_failures_in_a_row_back_off_up_to_a_second() -> None:
    rig = Rig(1, StopRule(precise=True), takes=lambda planned: 0.0, comes_through=lambda sent: False)
    rig.run()
    pauses = [round((b.sent_ns - a.end_ns) / S, 2) for a, b in zip(rig.sent, rig.sent[1:], strict=False)]
    assert pauses[:5] == [0.1, 0.2, 0.4, 0.8, 1.0]
    assert set(pauses[5:]) == {1.0}


def test_a_server_that_dies_in_the_window_ends_the_level() -> None:
    rig = Rig(4, StopRule(precise=True), comes_through=lambda sent: sent.end_ns < 30 * S)
    times = rig.run()
    assert times.ended_by == "failures"
    assert times.opened_ns is not None
    assert times.closed_ns is not None
    assert 30 * S < times.closed_ns <= times.ended_ns < 100 * S


def test_single_failures_end_nothing() -> None:
    rig = Rig(4, StopRule(requests=100), comes_through=lambda sent: bool(sent.sent_ns % 3))
    assert rig.run().ended_by == "requests"


@pytest.mark.parametrize("ramp", [True, False])
def test_an_exception_in_a_slot_propagates(ramp: bool) -> None:
    def takes(planned: PlannedRequest) -> float:
        if rig.clock.now_ns() > 9 * S:
            raise ZeroDivisionError("a bug")
        return steady(planned)

    rig = Rig(4, StopRule(duration_s=100), ramp=ramp, takes=takes)
    with pytest.raises(ExceptionGroup) as caught:
        rig.run()
    assert caught.group_contains(ZeroDivisionError)
    assert rig.closed.window.times.ended_by == "interrupted"


def test_an_exception_in_looking_at_precision_propagates() -> None:
    def look(elapsed_s: float) -> bool:
        raise ZeroDivisionError("a bug")

    with pytest.raises(ExceptionGroup):
        Rig(4, StopRule(precise=True), is_precise=look).run()


@pytest.mark.parametrize(
    ("at_s", "stage", "ended_by"),
    [(1.0, "ramp", "interrupted"), (9.0, "window", "interrupted"), (16.0, "drain", "interrupted")],
)
def test_cancelling_ends_promptly_and_cancels_every_send(at_s: float, stage: str, ended_by: str) -> None:
    rig = Rig(8, StopRule(duration_s=10.0))

    async def cancel() -> str:
        task = asyncio.ensure_future(rig.closed.run())
        await asyncio.sleep(at_s)
        seen = rig.closed.window.stage
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return seen

    assert rig.await_(cancel()) == stage
    times = rig.closed.window.times
    assert sum(sent.cancelled for sent in rig.sent) == 8
    assert all(sent.end_ns for sent in rig.sent)
    assert times.ended_ns == pytest.approx(at_s * S, abs=10)
    assert times.ended_by == ended_by
    assert (times.opened_ns is None) is (times.closed_ns is None) is (stage == "ramp")
    assert [name for name, _ in rig.calls if name == "close"] == ["close"]


def test_a_warm_up_that_fails_is_not_hammered() -> None:
    rig = Rig(4, StopRule(requests=1), comes_through=lambda sent: False)
    rig.await_(warm_up(rig.requests, rig.send, 3000, 4))
    assert len(rig.sent) == 4


def test_a_warm_up_ends_with_its_time() -> None:
    rig = Rig(2, StopRule(requests=1), takes=lambda planned: 1.0)
    rig.await_(warm_up(rig.requests, rig.send, 1000, 2, limit_s=4.5))
    assert len(rig.sent) == 2 * 5


def test_an_interrupted_drain_is_no_whole_level() -> None:
    rig = Rig(4, StopRule(duration_s=10), takes=lambda planned: 8.0)

    async def interrupt() -> None:
        task = asyncio.ensure_future(rig.closed.run())
        while rig.closed.window.stage != "drain":
            await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.wait([task])

    rig.await_(interrupt())
    assert rig.closed.window.times.ended_by == "interrupted"
    assert rig.closed.window.times.closed_ns is not None


def test_cancelling_the_warm_up_cancels_its_sends() -> None:
    rig = Rig(4, StopRule(requests=1))

    async def cancel() -> None:
        task = asyncio.ensure_future(warm_up(rig.requests, rig.send, 9, 4))
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.wait([task])

    rig.await_(cancel())
    assert [sent.cancelled for sent in rig.sent] == [True] * 4


def test_opening_and_closing_are_told_once_and_when_they_happen() -> None:
    rig = Rig(4, StopRule(duration_s=10))
    times = rig.run()
    assert rig.calls == [("open", times.opened_ns), ("close", times.closed_ns)]


def test_two_runs_in_virtual_time_are_the_same_to_the_nanosecond() -> None:
    def times() -> list[tuple[int, int, str]]:
        rig = Rig(8, StopRule(requests=50), takes=uneven)
        rig.run()
        return [(sent.sent_ns, sent.end_ns, sent.planned.prompt.id) for sent in rig.sent]

    assert times() == times()


@pytest.mark.parametrize("takes", [steady, uneven])
@pytest.mark.parametrize("stop", [StopRule(duration_s=30.0), StopRule(requests=100)])
def test_throughput_of_a_ramped_window_has_no_bias(stop: StopRule, takes: Callable[[PlannedRequest], float]) -> None:
    """A slot that always decodes makes a token a step, so that the true rate is known without a model."""
    values = []
    for seed in range(8):
        rig = Rig(16, stop, takes=takes, seed=seed)
        rig.run()
        values.append(rig.summary().output_throughput.value)
    assert sum(values) / len(values) == pytest.approx(16 / STEP_S, rel=0.01)
    assert min(values) == pytest.approx(16 / STEP_S, rel=0.02)


def test_throughput_without_a_ramp_is_biased() -> None:
    """The tail, in which slots run empty, is part of it: that is why the ramp is the default."""
    rig = Rig(16, StopRule(duration_s=30.0), ramp=False, takes=uneven, max_tokens=400)
    rig.run()
    bias = rig.summary().output_throughput.value / (16 / STEP_S) - 1
    assert -0.4 < bias < -0.1
