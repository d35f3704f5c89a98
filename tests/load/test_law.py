"""What an open loop sent, not only what it planned, follows the law that it was asked for, and does not drift."""

from __future__ import annotations

import asyncio
import math
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise

import pytest
import uvloop

from breakeven.clock import VirtualClock, VirtualLoop
from breakeven.engines.null import NullServer, null_server
from breakeven.load.client import Client
from breakeven.load.dialect import COUNTING, dialect_for
from breakeven.load.open import OpenLoop
from breakeven.load.pace import due_times
from breakeven.load.plan import LevelRequests, PlannedRequest
from breakeven.load.prompts import Prompt, PromptSet
from breakeven.load.target import Target
from breakeven.load.window import StopRule
from breakeven.records import LevelPlan, RequestRecord

S, MS = 1_000_000_000, 1_000_000
RATE = 200.0
#: Of virtual time; ten take some 8 s of CPU.
MINUTES = int(os.environ.get("BREAKEVEN_LAW_MINUTES", "2"))
PLAN = LevelPlan(index=0, run=0, max_tokens=1, mode="open", rate=RATE, arrivals="poisson")
PROMPTS = PromptSet(source="test", prompts=(Prompt(id="p", text="x"),))


def distance(sample: Sequence[float], law: Callable[[float], float]) -> float:
    """Kolmogorov's: the largest difference between the sample's distribution function and the law's."""
    n = len(sample)
    at_each = enumerate(map(law, sorted(sample)))
    return max(max((i + 1) / n - probability, probability - i / n) for i, probability in at_each)


def critical(n: int) -> float:
    """The distance that one sample in a hundred of the law exceeds: Kolmogorov's limit, sqrt(-ln(0.01 / 2) / 2)."""
    return math.sqrt(-math.log(0.005) / 2 / n)


def exponential(gap_s: float) -> float:
    return 1 - math.exp(-RATE * gap_s)


def erlang(count: int) -> Callable[[float], float]:
    """The law of the sum of so many exponential gaps."""

    def law(seconds: float) -> float:
        x, term, below = RATE * seconds, 1.0, 1.0
        for k in range(1, count):
            term *= x / k
            below += term
        return 1 - math.exp(-x) * below

    return law


def gaps_s(times_ns: Sequence[int]) -> list[float]:
    return [(b - a) / S for a, b in pairwise(times_ns)]


def test_the_test_itself_tells_laws_apart() -> None:
    for arrivals in ("constant", "gamma:0.8", "gamma:1.25"):
        due = list(islice(due_times(RATE, arrivals, seed=1), 1000))
        assert distance([b - a for a, b in pairwise(due)], exponential) > critical(999)


@pytest.fixture(scope="module")
def offered() -> list[tuple[int, int]]:
    """`(due, sent)` of each request of some minutes in virtual time, ns after the start; answers take 0.3 s."""
    loop = VirtualLoop()
    clock = VirtualClock(loop)
    sent: list[tuple[int, int]] = []

    async def send(planned: PlannedRequest, due_ns: int) -> bool:
        sent.append((due_ns, clock.now_ns()))
        await asyncio.sleep(0.3)
        return True

    due = due_times(RATE, "poisson", seed=3)
    requests = LevelRequests(PLAN, PROMPTS, seed=0, tag=None)
    stop = StopRule(duration_s=60 * MINUTES)
    level = OpenLoop(due, requests.next, send, clock, stop, rate=RATE, max_in_flight=10_000, ramp=False)
    try:
        loop.run_until_complete(level.run())
    finally:
        loop.close()
    return sent


def test_every_request_is_due_to_the_nanosecond_when_it_was_planned(offered: list[tuple[int, int]]) -> None:
    planned, mean = due_times(RATE, "poisson", seed=3), 60 * MINUTES * RATE
    assert len(offered) == pytest.approx(mean, abs=5 * math.sqrt(mean))
    assert all(due_ns == round(at_s * S) for (due_ns, _), at_s in zip(offered, planned, strict=False))


def test_over_minutes_requests_do_not_become_later(offered: list[tuple[int, int]]) -> None:
    """None is later than the shortest sleep, a millisecond, and the last thousand are no later than the first."""
    late_ns = [sent_ns - due_ns for due_ns, sent_ns in offered]
    assert 0 <= min(late_ns) <= max(late_ns) <= 1.01 * MS
    assert statistics.median(late_ns) <= 10
    first, last = statistics.fmean(late_ns[:1000]), statistics.fmean(late_ns[-1000:])
    assert last == pytest.approx(first, abs=0.05 * MS)


def test_what_was_sent_passes_kolmogorov_smirnov_tests(offered: list[tuple[int, int]]) -> None:
    due_ns, sent_ns = ([row[column] for row in offered] for column in (0, 1))
    assert distance(gaps_s(due_ns), exponential) < critical(len(due_ns) - 1)
    # A sleep is a millisecond at least, which a single gap (5 ms) shows and the sum of twenty does not.
    sums_s = gaps_s(sent_ns[::20])
    assert distance(sums_s, erlang(20)) < critical(len(sums_s))
    # Given how many there are, the times of a Poisson process lie evenly.
    assert distance([at_ns / S for at_ns in sent_ns], lambda at_s: at_s / (60 * MINUTES)) < critical(len(sent_ns))


@pytest.fixture(scope="module")
def server() -> Iterator[NullServer]:
    with null_server("--step-us", "1000") as running:
        yield running


async def _offer(url: str, count: int) -> list[RequestRecord]:
    records: list[RequestRecord] = []
    client = Client(
        Target(url, {}),
        dialect_for("chat", COUNTING["continuous"]),
        "null",
        records.append,
        sampling={},
        extra_body={},
        timeout_s=20.0,
        stall_timeout_s=20.0,
    )
    async with client:
        await client.connect(16)
        requests = LevelRequests(PLAN, PROMPTS, seed=0, tag=None)
        due, stop = due_times(RATE, "poisson", seed=1), StopRule(requests=count)
        level = OpenLoop(due, requests.next, client.send, client.clock, stop, rate=RATE, max_in_flight=500, ramp=False)
        await level.run()
        await client.settled()
    return sorted(records, key=lambda record: record.id)


def test_in_real_time_a_server_sees_requests_come_by_the_law(server: NullServer) -> None:
    """Each request comes once and, but for moments in which the machine is busy, when it was due."""
    count = 700
    records = uvloop.run(_offer(server.url, count))
    assert [record.outcome for record in records] == ["ok"] * count
    due_ns = [record.due_ns for record in records]
    assert distance(gaps_s(due_ns), exponential) < critical(count - 1)
    came_ns = sorted(row.arrival_ns for row in server.truth())
    assert len(came_ns) == count
    offset_ns = min(came - due for came, due in zip(came_ns, due_ns, strict=True))
    late_ns = [came - due - offset_ns for came, due in zip(came_ns, due_ns, strict=True)]
    assert statistics.median(late_ns) < 5 * MS
    span_ns = due_ns[-1] - due_ns[0]
    evenly = distance([(at_ns - came_ns[0]) / span_ns for at_ns in came_ns], lambda share: min(max(share, 0.0), 1.0))
    assert evenly < critical(count) + 0.05  # a twentieth of the time is what a busy machine may hold them up
