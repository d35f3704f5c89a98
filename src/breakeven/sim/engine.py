"""The engine: a batch, a queue before it, and steps in virtual time, each of which gives every decoding request tokens.

Continuous batching: whoever is ready when a step begins takes part in it, up to the batch's limit. A request's first
token comes at the end of the step that finishes its prefill; from then on each step gives it one token and those of
its draft that the target accepts, never more than it still wants.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import numpy as np

from breakeven.decide.observed import Observation, Step
from breakeven.load.plan import PlannedRequest
from breakeven.sim.answers import Answers
from breakeven.sim.batch import Batch, Job, Tally
from breakeven.sim.machine import Machine
from breakeven.sim.model import EngineModel

__all__ = ["ChooseK", "Engine", "Observation", "Step"]

#: Says how many tokens the next step drafts for each request.
ChooseK = Callable[[Observation], int]


class Engine:
    """Runs steps: `begin` says when the next one ends, `finish` ends it. Times are those of the virtual clock.

    Args:
        model: what it is.
        machine: what it runs on.
        k: the tokens to draft, or who says so before each step, which then may be anything up to `most_k`.
        seed: of answers and jitter.
        most_k: the longest draft; needed where `k` is a function.
        drafter: whether one is loaded; by default unless `k` is the number 0.
    """

    def __init__(
        self,
        model: EngineModel,
        machine: Machine,
        k: int | ChooseK,
        *,
        seed: list[int],
        most_k: int | None = None,
        drafter: bool | None = None,
    ) -> None:
        self._model, self._machine = model, machine
        self._choose: ChooseK | None = None if isinstance(k, int) else k
        self._k = k if isinstance(k, int) else 0
        self._most_k = self._k if most_k is None else most_k
        model.check_k(self._most_k)
        self._drafter = (self._choose is not None or self._k > 0) if drafter is None else drafter
        self._batch = Batch(self._most_k)
        self._answers = Answers(model, self._most_k, np.random.default_rng([*seed, 1]))
        self._jitter = _Jitter(model.noise.jitter_sd, np.random.default_rng([*seed, 2]))
        self._step_ms: dict[tuple[int, int], float] = {}
        self._waiting: deque[Job] = deque()
        self._reading: list[Job] = []
        self._read: list[Job] = []  # those whose prompt the running step finishes
        self._decoding = self._prefill_tokens = 0  # of the running step
        self._first_tokens = self._prompt_tokens = self._gone_tokens = 0
        self._last: Step | None = None
        self._begun_ns = self._ends_ns = 0

    def submit(self, planned: PlannedRequest, sent_ns: int) -> Job:
        """Takes a request; it takes part from the next step on, if there is room."""
        job = Job(planned, self._answers.draw(planned), sent_ns)
        self._waiting.append(job)
        return job

    def drop(self, job: Job) -> None:
        """Forgets a request whose client has left."""
        if not job.left:
            return  # it had ended, and has been counted as gone
        self._batch.drop(job)
        for jobs in (self._waiting, self._reading, self._read):
            if job in jobs:
                jobs.remove(job)
        self._gone_tokens += _held(job)

    def begin(self, now_ns: int) -> int | None:
        """Begins a step, now or when the last one ended if that is later; returns its end, None if nobody is there."""
        self._begun_ns = max(now_ns, self._ends_ns)
        while self._waiting and self.running < self._model.max_batch:
            self._reading.append(self._waiting.popleft())
        if not self.running:
            return None
        cost_ms = self._plan_reading()
        reads_alone = self._model.prefill.chunk_tokens is None and self._prefill_tokens > 0
        self._decoding = 0 if reads_alone else len(self._batch)
        if self._choose is not None and self._decoding:
            self._k = self._ask(self._choose)
        cost_ms += self._length_ms(self._decoding, self._k)
        step_ns = round(cost_ms * 1e6 * self._machine.slowness(self._begun_ns) * self._jitter.next())
        self._ends_ns = self._begun_ns + max(1, step_ns)
        return self._ends_ns

    def finish(self) -> list[Job]:
        """Ends the step that was begun; returns who has all tokens now."""
        k, ended, accepted = self._k, list[Job](), tuple[int, ...]()
        if self._decoding:
            ended, accepted = self._batch.step(self._ends_ns, k)
        for job in self._read:
            job.arrivals.append((self._ends_ns - job.sent_ns, 1))
            job.left -= 1
            self._reading.remove(job)
            if job.left:
                self._batch.join(job)
            else:
                ended.append(job)
        self._first_tokens += len(self._read)
        self._prompt_tokens += self._prefill_tokens
        self._gone_tokens += sum(map(_held, ended))
        if self._choose is not None:
            step_ns, drafts = self._ends_ns - self._begun_ns, self._decoding if k else 0
            self._last = Step(self._begun_ns, step_ns, self._decoding, k, drafts, accepted, self._prefill_tokens)
        return ended

    @property
    def running(self) -> int:
        """Requests in the batch, those included whose prompts are being read."""
        return len(self._reading) + len(self._batch)

    @property
    def waiting(self) -> int:
        """Requests before it."""
        return len(self._waiting)

    @property
    def kv_use(self) -> float:
        """The share of the KV cache that the batch fills."""
        return min(1.0, (self._prompt_tokens + self.tally().tokens - self._gone_tokens) / self._model.kv_tokens)

    @property
    def prompt_tokens(self) -> int:
        """Input tokens read from the start."""
        return self._prompt_tokens

    def tally(self) -> Tally:
        """The counters of drafts, and of output tokens."""
        tally = self._batch.tally()
        return tally._replace(tokens=tally.tokens + self._first_tokens)

    def _plan_reading(self) -> float:
        """Decides which prompt tokens the step reads, first come first served; returns what they cost, in ms."""
        prefill = self._model.prefill
        room = math.inf if prefill.chunk_tokens is None else prefill.chunk_tokens
        self._read, self._prefill_tokens, cost_ms = [], 0, 0.0
        for job in self._reading:
            part = int(min(job.to_read, room - self._prefill_tokens))
            if not part:
                break
            if job.to_read == job.answer.input_tokens:
                cost_ms += prefill.request_ms
            cost_ms += prefill.token_ms * part
            job.to_read -= part
            self._prefill_tokens += part
            if not job.to_read:
                self._read.append(job)
        return cost_ms

    def _ask(self, choose: ChooseK) -> int:
        k = choose(Observation(self._begun_ns, self._decoding, len(self._waiting), self.kv_use, self._last))
        if not 0 <= k <= self._most_k:
            raise ValueError(f"the policy chose K={k}; it may choose 0 to {self._most_k}")
        return k

    def _length_ms(self, batch: int, k: int) -> float:
        length = self._step_ms.get((batch, k))
        if length is None:
            self._model.check_k(k)
            length = self._step_ms[batch, k] = self._model.step_ms(batch, k, drafter=self._drafter)
        return length


def _held(job: Job) -> int:
    """A request's tokens in the KV cache."""
    return job.answer.input_tokens - job.to_read + job.answer.tokens - job.left


class _Jitter:
    """Lognormal factors of mean 1, one a step: independent ones leave the long run as it is."""

    def __init__(self, sd: float, rng: np.random.Generator) -> None:
        self._sd, self._rng = sd, rng
        self._drawn: list[float] = []

    def next(self) -> float:
        """The next factor."""
        if not self._sd:
            return 1.0
        if not self._drawn:
            self._drawn = np.exp(self._sd * self._rng.standard_normal(1024) - self._sd**2 / 2).tolist()
        return self._drawn.pop()
