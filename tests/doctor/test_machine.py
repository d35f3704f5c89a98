"""What is said of this machine, from a tree of files as Linux has them."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import pytest

from breakeven.doctor.ceiling import Ceiling
from breakeven.doctor.machine import ceiling_finding, clock_finding, examine_machine, kernel_stamps
from breakeven.report.diagnosis import Finding

FILES = {
    "proc/sys/net/ipv4/ip_local_port_range": "32768\t60999",
    "proc/sys/net/core/somaxconn": "4096",
    "proc/self/cgroup": "0::/user.slice/ours",
    "proc/meminfo": "MemTotal: 65000000 kB\nMemAvailable: 60000000 kB",
    "sys/fs/cgroup/cpu.max": "max 100000",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance",
}


def found(root: Path, streams: int = 8, **changes: str) -> dict[str, Finding]:
    """The findings by name, in a tree of these files with some changed."""
    for name, text in (FILES | changes).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return {finding.name: finding for finding in examine_machine(streams, root=root)}


def test_a_good_machine_has_nothing_to_mend(tmp_path: Path) -> None:
    findings = found(tmp_path)
    named = ("descriptors", "ports", "somaxconn", "governor", "memory")
    assert {name: findings[name].state for name in named} == dict.fromkeys(named, "ok")
    assert all(findings[name].mend is None for name in named)
    assert findings["ports"].numbers["ports"] == 28_232


def test_where_nothing_can_be_read_that_is_unknown_and_no_problem(tmp_path: Path) -> None:
    findings = {finding.name: finding for finding in examine_machine(8, root=tmp_path)}
    unknown = {name for name, finding in findings.items() if finding.state == "unknown"}
    assert unknown == {"ports", "somaxconn", "governor", "memory"}
    assert "problem" not in {finding.state for finding in findings.values()}


def test_more_streams_than_descriptors_or_ports_are_a_problem(tmp_path: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    findings = found(tmp_path, streams=max(hard, 28_233))
    if hard != resource.RLIM_INFINITY:
        assert findings["descriptors"].state == "problem"
        assert f"ulimit -Hn {max(hard, 28_233) + 64}" in (findings["descriptors"].mend or "")
    assert findings["ports"].state == "problem"
    assert "sysctl -w net.ipv4.ip_local_port_range" in (findings["ports"].mend or "")


def test_a_short_listen_queue_is_told(tmp_path: Path) -> None:
    finding = found(tmp_path, **{"proc/sys/net/core/somaxconn": "32"})["somaxconn"]
    assert (finding.state, "net.core.somaxconn" in (finding.mend or "")) == ("note", True)


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"sys/fs/cgroup/cpu.max": "150000 100000"}, 1.5),
        ({"sys/fs/cgroup/user.slice/cpu.max": "400000 100000", "sys/fs/cgroup/cpu.max": "300000 100000"}, 3.0),
        ({"sys/fs/cgroup/user.slice/ours/cpu.max": "50000 100000"}, 0.5),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/box\n0::/",
                "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "250000",
                "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            2.5,
        ),
    ],
    ids=["none", "of the root", "the lowest counts", "of our own group", "version 1"],
)
def test_the_quota_is_the_lowest_of_all_groups_around_us(
    tmp_path: Path, files: dict[str, str], quota: float | None
) -> None:
    finding = found(tmp_path, **files)["cores"]
    assert finding.numbers["quota"] == quota
    assert (finding.state == "problem") is (quota is not None and quota < 1)


def test_a_governor_that_saves_power_is_told_with_the_command(tmp_path: Path) -> None:
    finding = found(tmp_path, **{"sys/devices/system/cpu/cpu1/cpufreq/scaling_governor": "powersave"})["governor"]
    assert finding.state == "note"
    assert finding.numbers["governors"] == ["performance", "powersave"]
    assert "cpupower frequency-set -g performance" in (finding.mend or "")


def test_the_groups_limit_on_memory_counts_too(tmp_path: Path) -> None:
    finding = found(tmp_path, **{"sys/fs/cgroup/user.slice/memory.max": str(512 << 20)})["memory"]
    assert (finding.state, finding.numbers["bytes"]) == ("note", 512 << 20)


def test_this_very_machine_can_be_examined() -> None:
    assert {finding.area for finding in examine_machine(1)} == {"machine"}


def test_steps_of_wall_time_are_a_problem() -> None:
    assert clock_finding(0).state != "problem"
    stepped = clock_finding(2)
    assert (stepped.state, stepped.numbers["steps"]) == ("problem", 2)
    assert "stepped 2 times" in stepped.finding


@pytest.mark.skipif(sys.platform != "linux", reason="SO_TIMESTAMPNS is Linux's")
def test_linux_stamps_what_comes_in() -> None:
    """Each time: Linux begins to stamp a moment after it is asked to, and ends when no socket wants it any more."""
    assert all(kernel_stamps() for _ in range(20))


def ceiling(streams: int, *, p99: float, offered: float | None = 20_000) -> Ceiling:
    return Ceiling(
        streams=streams,
        chunks_per_s=40_000,
        cpu_us_per_chunk=20,
        offered_per_s=offered,
        received_per_s=19_900,
        reads_per_s=19_800,
        lag_ms={"p50": 0.1, "p99": p99, "max": p99},
        clock_steps=0,
    )


def test_a_ceiling_is_told_with_what_it_rests_on() -> None:
    finding = ceiling_finding(ceiling(100, p99=1), 100)
    assert finding.state == "ok"
    for words in ("40,000 chunks/s on a core", "19,900 chunks/s in 19,800 reads", "20.0 µs each", "1.0 ms (p99)"):
        assert words in finding.finding


def test_a_late_loop_is_told_apart_from_a_large_burst() -> None:
    """A thousand chunks of 20 µs come at once and take 20 ms; a hundred take 2."""
    burst, disturbed = ceiling_finding(ceiling(1000, p99=25), 1000), ceiling_finding(ceiling(100, p99=25), 100)
    assert burst.state == disturbed.state == "note"
    assert "take 20 ms" in (burst.mend or "")
    assert "taskset" in (disturbed.mend or "")


def test_no_ceiling_is_unknown_with_the_reason() -> None:
    finding = ceiling_finding("the null server did not start", 100)
    assert (finding.state, finding.finding) == ("unknown", "no ceiling: the null server did not start")
