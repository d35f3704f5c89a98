"""What rigs of a level in virtual time share: the loop, its clock, and what was sent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Generic, Protocol, TypeVar

from breakeven.clock import VirtualClock, VirtualLoop
from breakeven.records import Phase

_T = TypeVar("_T")


class InPhase(Protocol):
    """A request as a rig noted it."""

    @property
    def phase(self) -> Phase: ...


_Sent = TypeVar("_Sent", bound=InPhase)


class VirtualRig(Generic[_Sent]):
    """A virtual loop with its clock; `sent` is filled by the rig, `calls` by the window's hooks."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.clock = VirtualClock(self.loop)
        self.sent: list[_Sent] = []
        self.calls: list[tuple[str, int]] = []

    def note(self, what: str) -> None:
        """Notes a call of a hook and when it came."""
        self.calls.append((what, self.clock.now_ns()))

    def await_(self, work: Awaitable[_T]) -> _T:
        """Runs it to its end, where no task may be left."""

        async def whole() -> _T:
            return await work

        try:
            return self.loop.run_until_complete(whole())
        finally:
            assert not asyncio.all_tasks(self.loop)
            self.loop.close()

    def of(self, phase: Phase) -> list[_Sent]:
        """What was sent in a phase."""
        return [sent for sent in self.sent if sent.phase == phase]
