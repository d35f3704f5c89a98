"""`breakeven doctor`: is this machine fit to make load, what answers at a URL, and how long will a bench take?"""

from __future__ import annotations

import resource
from collections.abc import Iterable

from breakeven.doctor.ceiling import PACE_PER_S, SPARE_DESCRIPTORS, Ceiling, measure_ceiling
from breakeven.doctor.machine import ceiling_finding, clock_finding, examine_machine
from breakeven.doctor.server import examine_server, headroom
from breakeven.errors import BreakevenError
from breakeven.options import BenchOptions
from breakeven.report.diagnosis import Diagnosis, Finding

__all__ = ["doctor"]

#: Streams of the ceilings. The one in the middle stands for all: a lone stream wakes the loop for each chunk.
_STREAMS = (1, 100, 1000)
_TYPICAL = 100
_SECONDS = 1.5


def doctor(options: BenchOptions, *, seconds: float = _SECONDS) -> Diagnosis:
    """Looks at this machine and, where `options` has a `server_url`, at the server. Takes about ten seconds.

    `seconds` is how long each ceiling is measured. The soft limit on open files is raised as far as that needs.

    Raises:
        UsageError: the server can't be reached or refuses, or something else in `options` can't be used.
    """
    server = examine_server(options) if options.server_url is not None else None
    machine = examine_machine(options.max_in_flight or max(options.concurrency))
    _raise_soft_limit(max(_STREAMS) + SPARE_DESCRIPTORS)
    ceilings = {streams: _ceiling(streams, seconds, PACE_PER_S) for streams in _STREAMS}
    fastest = _ceiling(_TYPICAL, seconds, None)
    findings = [ceiling_finding(ceiling, streams) for streams, ceiling in ceilings.items()]
    findings += [ceiling_finding(fastest, _TYPICAL), _clock([*ceilings.values(), fastest]), *machine]
    if server is not None:
        findings += server.findings
        if isinstance(typical := ceilings[_TYPICAL], Ceiling):
            findings += headroom(options, server.record, typical.chunks_per_s)
    return Diagnosis(findings=findings)


def _ceiling(streams: int, seconds: float, pace_per_s: float | None) -> Ceiling | str:
    """The ceiling, or why there is none."""
    try:
        return measure_ceiling(streams, seconds, pace_per_s=pace_per_s)
    except (BreakevenError, OSError) as error:
        return str(error)


def _clock(ceilings: Iterable[Ceiling | str]) -> Finding:
    return clock_finding(sum(ceiling.clock_steps for ceiling in ceilings if isinstance(ceiling, Ceiling)))


def _raise_soft_limit(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
