"""Who decodes, and what a step gives them.

Plain Python over the batch: working a request's whole way out with numpy when it joins, which is possible where K stays
the same, was tried and gained a tenth to a third (`benchmarks/sim.py` has the speed of this one).
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from breakeven.load.plan import PlannedRequest
from breakeven.sim.answers import Answer

__all__ = ["Batch", "Job", "Tally"]


class Job:
    """A request in the engine. Its `arrivals` are those of a record; `left` are the tokens that it still wants."""

    __slots__ = ("answer", "arrivals", "left", "planned", "sent_ns", "to_read")

    def __init__(self, planned: PlannedRequest, answer: Answer, sent_ns: int) -> None:
        self.planned, self.answer, self.sent_ns = planned, answer, sent_ns
        self.to_read, self.left = answer.input_tokens, answer.tokens
        self.arrivals: list[tuple[int, int]] = []


class Tally(NamedTuple):
    """What has been counted from the start; `accepted` is per draft position."""

    drafts: int
    draft_tokens: int
    accepted: tuple[int, ...]
    tokens: int


class Batch:
    """Requests that have their first token and want more; drafts are of at most `most_k` tokens."""

    def __init__(self, most_k: int) -> None:
        self._luck: dict[Job, list[int]] = {}
        self._accepted = [0] * most_k
        self._drafts = self._draft_tokens = self._tokens = 0

    def __len__(self) -> int:
        return len(self._luck)

    def join(self, job: Job) -> None:
        """Takes a request in: the next step gives it tokens."""
        self._luck[job] = job.answer.draw_runs(job.left)

    def drop(self, job: Job) -> None:
        """Takes one out whose client has left."""
        self._luck.pop(job, None)

    def step(self, now_ns: int, k: int) -> tuple[list[Job], tuple[int, ...]]:
        """Ends a step of `k` drafted tokens; returns who has all tokens now, and the accepted ones per position.

        This is the hot path: a turn of its loop is a request-step.
        """
        ended, runs, given = [], [0] * (k + 1), 0
        for job, luck in self._luck.items():
            run = luck.pop()
            if run > k:
                run = k
            runs[run] += 1
            tokens = run + 1
            if tokens >= job.left:
                tokens = job.left
                ended.append(job)
            job.left -= tokens
            given += tokens
            job.arrivals.append((now_ns - job.sent_ns, tokens))
        self._tokens += given
        accepted = self._count(runs) if k else ()
        for job in ended:
            del self._luck[job]
        return ended, accepted

    def tally(self) -> Tally:
        """All counts, those of requests included that have ended or left."""
        return Tally(self._drafts, self._draft_tokens, tuple(self._accepted), self._tokens)

    def _count(self, runs: list[int]) -> tuple[int, ...]:
        """Counts drafts of which `runs[i]` had i tokens accepted; returns the accepted per position."""
        self._drafts += len(self._luck)
        self._draft_tokens += len(self._luck) * (len(runs) - 1)
        accepted = tuple(accumulate(reversed(runs[1:])))[::-1]
        for position, count in enumerate(accepted):
            self._accepted[position] += count
        return accepted
