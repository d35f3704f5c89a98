"""This machine as a place to make load from: its limits, its clock, its cores.

Linux tells nearly all of it in /proc and /sys; where a file is not there, the finding is `unknown`.
"""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from breakeven.clock import ANCILLARY_SIZE, ask_for_stamps
from breakeven.doctor.ceiling import SPARE_DESCRIPTORS, Ceiling
from breakeven.host import core_count
from breakeven.measure.checks import LATE_MS
from breakeven.report.diagnosis import Finding, State, on_machine

__all__ = ["ceiling_finding", "clock_finding", "examine_machine", "kernel_stamps"]

#: Connections that the client opens at once: a listen queue must hold as many.
_OPENED_AT_ONCE = 64
#: A reading of the clock that takes longer than this asks the hypervisor or a chip: the TSC takes some 50 ns.
_SLOW_CLOCK_NS = 1000.0
#: By then a kernel that stamps at all has begun to, on a busy machine too: it takes it some microseconds.
_STAMPS_BEGIN_S = 1.0
#: The program, its libraries and some ten thousand requests in flight fit into this.
_MEMORY_BYTES = 1 << 30


def examine_machine(streams: int, *, root: Path = Path("/")) -> list[Finding]:
    """All but clock and ceiling.

    Args:
        streams: the most requests in flight that are wanted.
        root: where /proc and /sys are.
    """
    return [
        _descriptors(streams),
        _ports(streams, root),
        _listen_queue(root),
        _cores(root),
        _load(),
        _governor(root),
        _memory(root),
    ]


def ceiling_finding(ceiling: Ceiling | str, streams: int) -> Finding:
    """A ceiling in words, or why there is none."""
    name = f"{streams} stream{'s' * (streams > 1)}"
    if isinstance(ceiling, str):
        return on_machine(name, "unknown", f"no ceiling: {ceiling}")
    p50, p99 = ceiling.lag_ms.get("p50", 0.0), ceiling.lag_ms.get("p99", 0.0)
    shape = f"{ceiling.received_per_s:,.0f} chunks/s in {ceiling.reads_per_s:,.0f} reads"
    cost = f"{ceiling.cpu_us_per_chunk:.1f} µs each, loop late by {p50:.1f} ms (p50), {p99:.1f} ms (p99)"
    if ceiling.offered_per_s is None:
        found = f"{streams} streams as fast as the null server can: {shape}, {cost}"
        return on_machine("unpaced", "ok", found, ceiling=ceiling)
    found = f"the client takes {ceiling.chunks_per_s:,.0f} chunks/s on a core, by the cost of {shape}: {cost}"
    if p99 <= LATE_MS:
        return on_machine(name, "ok", found, ceiling=ceiling)
    burst_ms = streams * ceiling.cpu_us_per_chunk / 1e3
    if p99 <= LATE_MS + burst_ms:
        mend = f"{streams} chunks of one step come at once and take {burst_ms:.0f} ms: such levels will be marked late"
    else:
        mend = "others take the core: stop what else runs here, or give the client cores of its own (taskset -c)"
    return on_machine(name, "note", found, mend, ceiling=ceiling)


def clock_finding(clock_steps: int, *, root: Path = Path("/")) -> Finding:
    """The clock that stamps: its resolution, what a reading costs, the kernel's stamps, and steps of wall time.

    `clock_steps` counts steps beyond slewing, as `clock.KernelClock` saw them while the ceiling was measured.
    """
    resolution_ns = time.get_clock_info("perf_counter").resolution * 1e9
    cost_ns, stamped = _reading_cost_ns(), kernel_stamps()
    source = _text(root / "sys/devices/system/clocksource/clocksource0/current_clocksource")
    found = (
        f"perf_counter has a resolution of {resolution_ns:g} ns, a reading takes {cost_ns:.0f} ns"
        f"{f' ({source})' if source else ''}; the kernel {'stamps' if stamped else 'does not stamp'} what comes in; "
        f"wall time was {f'stepped {clock_steps} times' if clock_steps else 'not stepped'}"
    )
    state: State = "ok"
    mend = None
    if clock_steps:
        state = "problem"
        mend = "let NTP slew, not step: chronyc tracking, or timedatectl timesync-status; wait until it has settled"
    elif cost_ns > _SLOW_CLOCK_NS:
        state, mend = "note", "boot with clocksource=tsc tsc=reliable if the processor's TSC is invariant"
    elif not stamped:
        state, mend = "note", "a busy client stamps late: keep it below half of its ceiling, or run it on Linux"
    numbers = {"resolution_ns": resolution_ns, "reading_ns": cost_ns, "source": source}
    return on_machine("clock", state, found, mend, kernel_stamps=stamped, steps=clock_steps, **numbers)


def kernel_stamps() -> bool:
    """Whether the kernel gives a receive stamp with what comes in over loopback (SO_TIMESTAMPNS).

    Linux begins to stamp a moment after the first socket has asked (`net_enable_timestamp` leaves it to a worker), so
    that what comes in at once may have none.
    """
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            socket.create_connection(listener.getsockname()) as near,
        ):
            far, _ = listener.accept()
            with far:
                ask_for_stamps(near)
                near.settimeout(1.0)
                give_up_s = time.monotonic() + _STAMPS_BEGIN_S
                while time.monotonic() < give_up_s:
                    far.send(b"x")
                    if near.recvmsg(1, ANCILLARY_SIZE)[1]:
                        return True
                    time.sleep(0.001)
                return False
    except OSError:
        return False


def _descriptors(streams: int) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return on_machine("descriptors", "ok", "no limit on open files", soft=soft)
    most = hard - SPARE_DESCRIPTORS
    found = f"{hard:,} open files allowed (soft limit {soft:,}, raised when needed): --concurrency up to {most:,}"
    mend = (
        f"for C={streams}: ulimit -Hn {streams + SPARE_DESCRIPTORS} as root, a line '* hard nofile 1048576' in "
        "/etc/security/limits.conf, or docker run --ulimit nofile=1048576"
    )
    short = most < streams
    return on_machine("descriptors", "problem" if short else "ok", found, mend if short else None, soft=soft, hard=hard)


def _ports(streams: int, root: Path) -> Finding:
    text = _text(root / "proc/sys/net/ipv4/ip_local_port_range")
    if text is None:
        return on_machine("ports", "unknown", "the range of local ports can't be read here")
    low, high = map(int, text.split())
    count = high - low + 1
    found = f"local ports {low} to {high}: {count:,} streams to one address"
    short = count < streams
    mend = "sysctl -w net.ipv4.ip_local_port_range='1024 65535'" if short else None
    return on_machine("ports", "problem" if short else "ok", found, mend, ports=count)


def _listen_queue(root: Path) -> Finding:
    text = _text(root / "proc/sys/net/core/somaxconn")
    if text is None:
        return on_machine("somaxconn", "unknown", "the longest listen queue can't be read here")
    longest = int(text)
    found = f"a server on this machine may let {longest:,} connections wait; the client opens {_OPENED_AT_ONCE} at once"
    short = longest < _OPENED_AT_ONCE
    mend = "sysctl -w net.core.somaxconn=4096, then start the server again" if short else None
    return on_machine("somaxconn", "note" if short else "ok", found, mend, somaxconn=longest)


def _cores(root: Path) -> Finding:
    cores, quota = core_count(), _cpu_quota(root)
    found = f"{cores} core{'s' * (cores > 1)}, " + (f"limited to {quota:g}" if quota else "no quota")
    state: State = "ok"
    mend = None
    if quota is not None and quota < 1:
        state, mend = "problem", "the client needs a core: docker run --cpus=2, or cpu.max of its cgroup"
    elif min(cores, quota or cores) < 2:
        state, mend = "note", "a server on this machine would share the client's core: measure it from another one"
    return on_machine("cores", state, found, mend, cores=cores, quota=quota)


def _load() -> Finding:
    load, cores = os.getloadavg()[0], core_count()
    found = f"load average {load:.2f} over the last minute on {cores} cores"
    busy = load > 0.5 * cores
    mend = "others use this machine (top): stop them, or wait; the engine itself may be among them" if busy else None
    return on_machine("load", "note" if busy else "ok", found, mend, load=load)


def _governor(root: Path) -> Finding:
    files = root.glob("sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor")
    governors = sorted({text for file in files if (text := _text(file))})
    if not governors:
        return on_machine("governor", "unknown", "the frequency governor can't be read, as in most virtual machines")
    steady = governors == ["performance"]
    mend = None if steady else "cores wake up slowly: cpupower frequency-set -g performance"
    found = f"frequency governor {', '.join(governors)}"
    return on_machine("governor", "ok" if steady else "note", found, mend, governors=governors)


def _memory(root: Path) -> Finding:
    sizes = [*_available(root), *_limits(root, "memory", "memory.max", "memory.limit_in_bytes")]
    if not sizes:
        return on_machine("memory", "unknown", "the memory can't be read here")
    size = min(sizes)
    short = size < _MEMORY_BYTES
    mend = "a long run at a high load may not fit: free some, or raise memory.max of the cgroup" if short else None
    return on_machine("memory", "note" if short else "ok", f"{size / 2**30:.1f} GiB to be had", mend, bytes=size)


def _available(root: Path) -> Iterator[int]:
    for line in (_text(root / "proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _cpu_quota(root: Path) -> float | None:
    """The fewest cores that any control group around us allows; None where none limits them."""
    quotas = []
    for directory in _groups(root, "cpu"):
        words = (_text(directory / "cpu.max") or "").split()  # version 2: "200000 100000" or "max 100000"
        if not words:
            words = [_text(directory / f"cpu.cfs_{part}_us") or "" for part in ("quota", "period")]
        if all(word.isdecimal() for word in words):  # version 1 has a quota of -1 where there is none
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def _limits(root: Path, controller: str, *names: str) -> Iterator[int]:
    for directory in _groups(root, controller):
        for name in names:
            text = _text(directory / name)
            if text is not None and text.isdecimal():
                yield int(text)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The directories of the control groups that we are in, versions 1 and 2, from our own up to the root."""
    base = root / "sys/fs/cgroup"
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        number, controllers, path = line.split(":", 2)
        if number != "0" and controller not in controllers.split(","):
            continue
        top = base if number == "0" else base / controllers
        own = top / path.strip("/")
        yield from (own, *(parent for parent in own.parents if parent.is_relative_to(top)))


def _reading_cost_ns(readings: int = 1000) -> float:
    began = time.perf_counter_ns()
    for _ in range(readings):
        time.perf_counter_ns()
    return (time.perf_counter_ns() - began) / readings


def _text(path: Path) -> str | None:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return None
