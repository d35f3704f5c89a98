"""The open loop in virtual time: what is sent when, what counts, and how a level ends."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from itertools import count, islice, pairwise

import pytest
from msgspec import Struct

from breakeven.clock import VirtualClock, VirtualLoop
from breakeven.load.closed import ClosedLoop
from breakeven.load.open import OpenLoop
from breakeven.load.pace import due_times
from breakeven.load.plan import LevelRequests, PlannedRequest
from breakeven.load.prompts import Prompt, PromptSet
from breakeven.load.window import Hooks, LevelTimes, StopRule
from breakeven.records import LevelPlan, Phase
from tests.load.virtual import VirtualRig

S = 1_000_000_000
MS = 1_000_000
PROMPTS = PromptSet(source="test", prompts=tuple(Prompt(id=f"p{i}", text="x") for i in range(64)))


class Sent(Struct):
    """One request as the modelled server saw it."""

    planned: PlannedRequest
    due_ns: int
    sent_ns: int
    end_ns: int = 0
    cancelled: bool = False

    @property
    def phase(self) -> Phase:
        return self.planned.phase

    @property
    def late_ns(self) -> int:
        return self.sent_ns - self.due_ns


def uneven(sent: Sent) -> float:
    """Answers of 1 to 3 s, by their number."""
    return random.Random(sent.due_ns).uniform(1.0, 3.0)


class Rig(VirtualRig[Sent]):
    """A level on a modelled server that serves `servers` at once, in virtual time."""

    def __init__(
        self,
        rate: float,
        stop: StopRule,
        *,
        due: Iterable[float] | None = None,
        ramp: bool = True,
        max_in_flight: int = 10_000,
        servers: int = 10_000,
        takes: Callable[[Sent], float] = lambda sent: 2.0,
        comes_through: Callable[[Sent], bool] = lambda sent: True,
        is_precise: Callable[[float], bool] = lambda elapsed_s: False,
        arrivals: str = "poisson",
    ) -> None:
        super().__init__()
        self.takes, self.comes_through = takes, comes_through
        self.busy = asyncio.Semaphore(servers)
        self.due = list(islice(due_times(rate, arrivals, seed=1), 20_000)) if due is None else due
        plan = LevelPlan(index=0, run=0, max_tokens=100, mode="open", rate=rate, arrivals=arrivals)

        async def look(opened_ns: int) -> bool:
            return is_precise((self.clock.now_ns() - opened_ns) / S)

        self.open = OpenLoop(
            self.due,
            LevelRequests(plan, PROMPTS, seed=0, tag=None).next,
            self.send,
            self.clock,
            stop,
            rate=rate,
            max_in_flight=max_in_flight,
            ramp=ramp,
            hooks=Hooks(
                is_precise=look,
                on_open=lambda: self.note("open"),
                on_close=lambda: self.note("close"),
            ),
        )

    async def send(self, planned: PlannedRequest, due_ns: int) -> bool:
        sent = Sent(planned, due_ns, self.clock.now_ns())
        self.sent.append(sent)
        try:
            async with self.busy:
                await asyncio.sleep(self.takes(sent))
        except asyncio.CancelledError:
            sent.cancelled = True
            raise
        finally:
            sent.end_ns = self.clock.now_ns()
        return self.comes_through(sent)

    def run(self) -> LevelTimes:
        return self.await_(self.open.run())

    def most_in_flight(self) -> int:
        moments = sorted([(s.sent_ns, 1) for s in self.sent] + [(s.end_ns, -1) for s in self.sent])
        running = most = 0
        for _, step in moments:
            running += step
            most = max(most, running)
        return most


def opened_and_closed(times: LevelTimes) -> tuple[int, int]:
    assert times.opened_ns is not None
    assert times.closed_ns is not None
    return times.opened_ns, times.closed_ns


def test_requests_go_out_when_they_are_due_whether_the_server_keeps_up_or_not() -> None:
    for servers in (10_000, 1):
        rig = Rig(5.0, StopRule(duration_s=30), servers=servers)
        rig.run()
        assert [sent.due_ns for sent in rig.sent] == [round(at * S) for at in rig.due[: len(rig.sent)]]
        assert all(0 <= sent.late_ns <= 2 * MS for sent in rig.sent)


def test_no_drift_over_ten_minutes() -> None:
    rig = Rig(20.0, StopRule(duration_s=600), arrivals="constant", takes=lambda sent: 0.5)
    rig.run()
    assert len(rig.sent) > 12_000
    assert rig.sent[-1].due_ns == pytest.approx(len(rig.sent) / 20 * S, abs=1000)
    assert max(sent.late_ns for sent in rig.sent) <= 2 * MS


def test_a_slow_release_shifts_no_later_request() -> None:
    """What makes a request holds the loop up for 3.3 s: those due meanwhile go at once, the next one when it is due."""
    rig = Rig(1.0, StopRule(duration_s=30), arrivals="constant")
    make = rig.open._next

    def slow(phase: Phase) -> PlannedRequest:
        if len(rig.sent) == 5:
            rig.loop._virtual_ns += int(3.3 * S)
        return make(phase)

    rig.open._next = slow
    rig.run()
    late = [round(sent.late_ns / S, 1) for sent in rig.sent]
    assert late[:12] == [0, 0, 0, 0, 0, 3.3, 2.3, 1.3, 0.3, 0, 0, 0]
    assert [sent.due_ns for sent in rig.sent[:12]] == [(i + 1) * S for i in range(12)]


def test_many_due_at_once_all_go() -> None:
    rig = Rig(10.0, StopRule(requests=1000), due=[1.0] * 500 + [2.0 + i / 1000 for i in range(1500)], ramp=False)
    rig.run()
    assert len(rig.sent) == 1000
    assert [sent.sent_ns // S for sent in rig.sent] == [1] * 500 + [2] * 500
    assert max(sent.late_ns for sent in rig.sent) <= 2 * MS


@pytest.mark.parametrize("rate", [0.05, 0.5, 5.0, 50.0])
def test_window_opens_when_all_that_was_sent_before_the_first_end_has_ended(rate: float) -> None:
    rig = Rig(rate, StopRule(requests=30), takes=uneven)
    opened_ns, _ = opened_and_closed(rig.run())
    first_end_ns = min(sent.end_ns for sent in rig.sent)
    wave = [sent for sent in rig.sent if sent.sent_ns < first_end_ns]
    assert opened_ns == max(sent.end_ns for sent in wave)
    assert all(sent.sent_ns <= opened_ns for sent in rig.of("ramp"))
    assert all(sent.sent_ns >= opened_ns for sent in rig.of("measured"))
    assert rig.calls[0] == ("open", opened_ns)


def test_at_a_low_rate_the_window_opens_with_the_first_end() -> None:
    rig = Rig(0.01, StopRule(requests=3), arrivals="constant")
    opened_ns, closed_ns = opened_and_closed(rig.run())
    assert opened_ns == rig.sent[0].end_ns
    assert [sent.phase for sent in rig.sent] == ["ramp", *["measured"] * 3]
    # Until one more is due: each gap belongs to the window, or three gaps would count as two.
    assert closed_ns == pytest.approx(500 * S, abs=10)


def test_in_overload_the_window_opens_and_the_backlog_grows() -> None:
    rig = Rig(5.0, StopRule(requests=100), servers=5)  # 2.5 a second
    opened_ns, closed_ns = opened_and_closed(rig.run())
    running = [sum(sent.sent_ns <= at < sent.end_ns for sent in rig.sent) for at in (opened_ns, closed_ns)]
    assert running[1] - running[0] > 40


def test_what_fails_at_once_is_no_ramp() -> None:
    """The first three are refused: the window waits for a server that is full."""
    rig = Rig(
        5.0,
        StopRule(requests=20),
        takes=lambda sent: 0.001 if sent.due_ns <= 0.6 * S else 2.0,
        comes_through=lambda sent: sent.due_ns > 0.6 * S,
        arrivals="constant",
    )
    opened_ns, _ = opened_and_closed(rig.run())
    assert opened_ns > 2.8 * S


def test_a_failure_within_the_first_wave_opens_nothing_early() -> None:
    rig = Rig(
        5.0,
        StopRule(requests=20),
        takes=lambda sent: 0.001 if sent.due_ns == 2 * S else 2.0,
        comes_through=lambda sent: sent.due_ns != 2 * S,
        arrivals="constant",
    )
    opened_ns, _ = opened_and_closed(rig.run())
    assert opened_ns == pytest.approx(4.0 * S, abs=0.3 * S)


@pytest.mark.parametrize("ramp", [True, False])
@pytest.mark.parametrize(("rate", "limit"), [(0.5, 20), (20.0, 100)])
def test_a_server_that_fails_everything_ends_the_level(rate: float, limit: int, ramp: bool) -> None:
    """After 5 s of failures, but no fewer than 20."""
    rig = Rig(rate, StopRule(requests=10**6), ramp=ramp, takes=lambda sent: 0.001, comes_through=lambda sent: False)
    times = rig.run()
    assert times.ended_by == "failures"
    assert limit <= len(rig.sent) <= limit + 1


def test_single_failures_end_nothing() -> None:
    rig = Rig(5.0, StopRule(requests=100), comes_through=lambda sent: bool(sent.due_ns % 3))
    assert rig.run().ended_by == "requests"


@pytest.mark.parametrize("bound", [1, 2, 7])
def test_never_more_are_running_than_allowed_and_the_rest_is_late(bound: int) -> None:
    rig = Rig(10.0, StopRule(requests=40), max_in_flight=bound)
    rig.run()
    assert rig.most_in_flight() == bound
    assert [sent.due_ns for sent in rig.sent] == sorted(sent.due_ns for sent in rig.sent)
    # Each waits for room, which comes every 2 s / bound, while its due time passed at 10 a second.
    late = [sent.late_ns for sent in rig.sent]
    assert late[0] <= 2 * MS
    assert late[30] == pytest.approx(30 / bound * 2 * S - 3 * S, rel=0.5)
    assert all(b.sent_ns >= a.sent_ns for a, b in pairwise(rig.sent))


def test_a_bound_that_is_not_reached_changes_nothing() -> None:
    def times(bound: int) -> list[tuple[int, int]]:
        rig = Rig(2.0, StopRule(requests=50), max_in_flight=bound)
        rig.run()
        return [(sent.sent_ns, sent.end_ns) for sent in rig.sent]

    assert times(1000) == times(10_000)


STOPS = {
    "requests": StopRule(requests=40),
    "duration": StopRule(duration_s=30.0),
    "max_seconds": StopRule(requests=10**6, max_seconds=20.0),
    "budget": StopRule(requests=10**6, budget_s=40.0),
    "precision": StopRule(precise=True),
}


@pytest.mark.parametrize("servers", [10_000, 6])
@pytest.mark.parametrize("ended_by", STOPS)
def test_each_end_of_a_level(ended_by: str, servers: int) -> None:
    rig = Rig(5.0, STOPS[ended_by], servers=servers, takes=uneven, is_precise=lambda elapsed_s: True)
    times = rig.run()
    opened_ns, closed_ns = opened_and_closed(times)
    assert times.ended_by == ended_by
    measured, drain = rig.of("measured"), rig.of("drain")
    assert all(opened_ns <= sent.sent_ns <= closed_ns for sent in measured)
    assert not any(sent.cancelled for sent in [*rig.of("ramp"), *measured])
    assert all(sent.sent_ns >= closed_ns for sent in drain)
    assert times.ended_ns == pytest.approx(max(sent.end_ns for sent in measured), abs=10)
    if ended_by == "requests":
        assert len(measured) == 40
    if ended_by == "budget" and servers > 6:
        assert times.ended_ns / S == pytest.approx(40, abs=4)
    assert [name for name, _ in rig.calls] == ["open", "close"]


def test_window_of_so_many_requests_lasts_so_many_gaps() -> None:
    rig = Rig(10.0, StopRule(requests=50), arrivals="constant")
    opened_ns, closed_ns = opened_and_closed(rig.run())
    assert closed_ns - opened_ns == pytest.approx(50 / 10 * S, abs=0.11 * S)


def test_drain_keeps_the_load_up_until_the_last_measured_request_has_ended() -> None:
    rig = Rig(5.0, StopRule(duration_s=20), arrivals="constant", takes=uneven)
    times = rig.run()
    drain = rig.of("drain")
    assert drain[0].due_ns - rig.of("measured")[-1].due_ns == 0.2 * S
    assert drain[-1].sent_ns >= times.ended_ns - 0.2 * S
    assert any(sent.cancelled for sent in drain)


def test_drain_is_no_longer_a_load_than_the_window_was() -> None:
    rig = Rig(5.0, StopRule(duration_s=10), servers=2)  # 1 a second: 40 are behind when it closes
    times = rig.run()
    opened_ns, closed_ns = opened_and_closed(times)
    length_ns = closed_ns - opened_ns
    drain = rig.of("drain")
    assert closed_ns + 0.8 * length_ns < max(sent.sent_ns for sent in drain) <= closed_ns + length_ns
    assert times.ended_ns > closed_ns + 1.5 * length_ns
    assert not any(sent.cancelled for sent in rig.of("measured"))


def test_a_trace_ends_with_its_last_request() -> None:
    due = [0.0, 0.0, 1.5, 4.0]
    rig = Rig(1.0, StopRule(), due=due, ramp=False, takes=lambda sent: 3.0)
    times = rig.run()
    assert times.ended_by == "trace"
    assert [sent.due_ns for sent in rig.sent] == [round(at * S) for at in due]
    assert {sent.phase for sent in rig.sent} == {"measured"}
    assert (times.opened_ns, times.closed_ns) == (None, None)
    assert times.ended_ns == pytest.approx(7 * S, abs=10)
    assert not any(sent.cancelled for sent in rig.sent)


@pytest.mark.parametrize(
    ("stop", "ended_by", "sent"),
    [(StopRule(requests=7), "requests", 7), (StopRule(duration_s=4.5), "duration", 5), (StopRule(), "trace", 20)],
)
def test_a_trace_may_be_cut_short(stop: StopRule, ended_by: str, sent: int) -> None:
    rig = Rig(1.0, stop, due=[float(i) for i in range(20)], ramp=False)
    assert rig.run().ended_by == ended_by
    assert len(rig.sent) == sent
    assert not any(s.cancelled for s in rig.sent)


def test_without_a_ramp_every_request_counts_and_there_is_no_window() -> None:
    rig = Rig(5.0, StopRule(requests=40), ramp=False)
    times = rig.run()
    assert (times.opened_ns, times.closed_ns, times.ended_by) == (None, None, "requests")
    assert [sent.phase for sent in rig.sent] == ["measured"] * 40
    assert not any(sent.cancelled for sent in rig.sent)


def test_measured_requests_have_the_same_prompts_as_in_a_closed_loop() -> None:
    rig = Rig(5.0, StopRule(requests=100), takes=uneven)
    rig.run()
    closed: list[str] = []
    loop = VirtualLoop()

    async def send(planned: PlannedRequest) -> bool:
        if planned.phase == "measured":
            closed.append(planned.prompt.id)
        await asyncio.sleep(1.0)
        return True

    plan = LevelPlan(index=3, run=0, concurrency=7, max_tokens=50)
    requests = LevelRequests(plan, PROMPTS, seed=9, tag=None)
    other = ClosedLoop(plan, requests, send, VirtualClock(loop), StopRule(requests=100))
    loop.run_until_complete(other.run())
    loop.close()
    assert [sent.planned.prompt.id for sent in rig.of("measured")] == closed
    assert {sent.planned.max_tokens for sent in rig.sent} == {100}


@pytest.mark.parametrize("stage", ["ramp", "window", "drain"])
@pytest.mark.parametrize("bound", [10_000, 3])
def test_cancelling_ends_promptly_and_cancels_every_send(stage: str, bound: int) -> None:
    rig = Rig(5.0, StopRule(duration_s=10.0), max_in_flight=bound, takes=lambda sent: 4.0)

    async def cancel() -> int:
        task = asyncio.ensure_future(rig.open.run())
        await asyncio.sleep(1.0)
        while rig.open.window.stage != stage:
            await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return rig.clock.now_ns()

    now_ns = rig.await_(cancel())
    times = rig.open.window.times
    assert times.ended_by == "interrupted"
    assert times.ended_ns == now_ns
    assert all(sent.end_ns for sent in rig.sent)
    assert sum(sent.cancelled for sent in rig.sent) == sum(sent.end_ns == now_ns for sent in rig.sent) > 0


@pytest.mark.parametrize("ramp", [True, False])
def test_an_exception_in_a_request_propagates(ramp: bool) -> None:
    def takes(sent: Sent) -> float:
        if sent.due_ns > 9 * S:
            raise ZeroDivisionError("a bug")
        return 2.0

    rig = Rig(4.0, StopRule(duration_s=100), ramp=ramp, takes=takes)
    with pytest.raises(ExceptionGroup) as caught:
        rig.run()
    assert caught.group_contains(ZeroDivisionError)
    assert rig.open.window.times.ended_by == "interrupted"


def test_a_schedule_may_be_endless() -> None:
    rig = Rig(10.0, StopRule(requests=20), due=(i / 10 for i in count()))
    assert rig.run().ended_by == "requests"
    assert len(rig.of("measured")) == 20


def test_two_runs_in_virtual_time_are_the_same_to_the_nanosecond() -> None:
    def times() -> list[tuple[int, int, str]]:
        rig = Rig(8.0, StopRule(requests=50), takes=uneven)
        rig.run()
        return [(sent.sent_ns, sent.end_ns, sent.planned.prompt.id) for sent in rig.sent]

    assert times() == times()
