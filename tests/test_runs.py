"""A run on disk: what was written comes back, a killed run as far as it came, and every damage in one line."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from breakeven.errors import RunError
from breakeven.measure.level import summarize_level
from breakeven.measure.summary import summarize, summary_of
from breakeven.records import EngineSample, LevelPlan, LevelRecord, Manifest, RequestRecord
from breakeven.runs import RunWriter, read_run, write_json
from tests.measure.handmade import S, level_record, request, steady_stream


def manifest(*plans: LevelPlan, **fields: Any) -> Manifest:
    known: dict[str, Any] = {
        "label": "on",
        "breakeven_version": "0.1.0",
        "target": {"engine": "vllm", "loopback": True},
        "model": "a-model",
        "flags": {},
        "prompts": {},
        "seed": 0,
        "levels": list(plans),
        "host": {"cores": 2},
        "started": "2026-01-01T00:00:00.000+00:00",
    }
    return Manifest(**(known | fields))


def uneven_level(index: int, concurrency: int = 3) -> tuple[LevelRecord, list[RequestRecord]]:
    """A level whose sums differ in the last digit with their order."""
    rng = random.Random(index)
    records = [
        request(
            1000 * index + 100 * slot + i,
            [(rng.uniform(20, 60) * (n + 1), rng.randint(0, 4)) for n in range(40)],
            sent_s=i * 2.5,
            level=index,
            phase="ramp" if not i else "measured",
        )
        for slot in range(concurrency)
        for i in range(28)
    ]
    rng.shuffle(records)
    samples = [EngineSample(time_ns=i * S, running=rng.random() * 3, kv_use=rng.random()) for i in range(60)]
    spec = {"acceptance_length": 1 + rng.random(), "acceptance_rate": rng.random(), "per_position": [rng.random()]}
    plan: dict[str, Any] = {"index": index, "run": index, "concurrency": concurrency}
    return level_record(2.5, 62.5, samples=samples, spec=spec, counters={"preemptions": 0.0}, **plan), records


def killed(directory: Path, plan: LevelPlan, records: list[RequestRecord]) -> None:
    """A run whose process was killed before its level was over."""
    with RunWriter.create(directory, manifest(plan)) as writer:
        for record in records:
            writer.add_request(record)


def refused(directory: Path) -> str:
    with pytest.raises(RunError) as caught:
        read_run(directory)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    level, records = uneven_level(0)
    with RunWriter.create(tmp_path / "a" / "run", manifest(level.plan)) as writer:
        for record in records:
            writer.add_request(record)
        writer.add_level(level)
        writer.finish(interrupted=True)
    run = read_run(tmp_path / "a" / "run")
    assert run.requests == records
    assert run.levels == [level]
    assert run.damaged is None
    assert run.manifest.interrupted
    assert run.manifest.ended is not None
    assert sorted(os.listdir(tmp_path / "a" / "run")) == ["levels.jsonl", "manifest.json", "requests.jsonl"]


def test_records_are_on_disk_as_soon_as_they_are_added(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "run", manifest()) as writer:
        writer.add_request(request(0, [(10, 1)]))
        assert (tmp_path / "run" / "requests.jsonl").read_bytes().count(b"\n") == 1


def test_summary_from_disk_equals_summary_from_memory_to_the_last_digit(tmp_path: Path) -> None:
    levels, summaries = [], []
    with RunWriter.create(tmp_path, run_manifest := manifest()) as writer:
        for index in range(3):
            level, records = uneven_level(index)
            for record in records:
                writer.add_request(record)
            writer.add_level(level)
            levels.append(level)
            summaries.append(summarize_level(level, random.Random(9).sample(records, len(records)), shared_cores=2))
    in_memory, from_disk = summary_of(run_manifest, summaries), summarize(read_run(tmp_path))
    assert msgspec.json.encode(from_disk) == msgspec.json.encode(in_memory)
    assert in_memory.spread[0].output_throughput.count == 3


def test_summary_json_holds_no_word_for_what_is_no_number(tmp_path: Path) -> None:
    level, records = uneven_level(0)
    write_json(tmp_path / "summary.json", summary_of(manifest(), [summarize_level(level, records, shared_cores=2)]))
    json.loads((tmp_path / "summary.json").read_bytes(), parse_constant=pytest.fail)


@pytest.mark.parametrize("cut_to", [slice(1), slice(60), slice(-2)])
def test_cut_last_line_is_left_out_and_told(tmp_path: Path, cut_to: slice) -> None:
    records = [request(i, [(10, 1), (20, 2)]) for i in range(5)]
    level = level_record()
    with RunWriter.create(tmp_path, manifest(level.plan)) as writer:
        for record in records:
            writer.add_request(record)
        writer.add_level(level)
    path = tmp_path / "requests.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][cut_to])
    run = read_run(tmp_path)
    assert run.requests == records[:4]
    assert run.damaged == "the last line of requests.jsonl is cut"
    assert summarize(run).damaged == run.damaged


def test_last_line_without_its_end_is_whole(tmp_path: Path) -> None:
    killed(tmp_path, level_record().plan, [request(0, [(10, 1)])])
    path = tmp_path / "requests.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    assert len(read_run(tmp_path).requests) == 1
    assert read_run(tmp_path).damaged is None


def test_cut_level_is_made_from_its_requests(tmp_path: Path) -> None:
    level = level_record()
    with RunWriter.create(tmp_path, manifest(level.plan)) as writer:
        writer.add_request(request(0, [(10, 1)]))
        writer.add_level(level)
    path = tmp_path / "levels.jsonl"
    path.write_bytes(path.read_bytes()[:40])
    run = read_run(tmp_path)
    assert [level.ended_by for level in run.levels] == ["killed"]
    assert run.damaged == "the last line of levels.jsonl is cut"


def test_a_disk_that_fills_up_ends_the_file_at_the_line_that_it_cut(tmp_path: Path) -> None:
    """A full disk takes a part of a line first; nothing may come behind it, or the run could not be read."""
    code = f"""
import resource, signal
from pathlib import Path
from breakeven.errors import RunError
from breakeven.runs import RunWriter
from tests.measure.handmade import request
from tests.test_runs import level_record, manifest
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
refused = 0
with RunWriter.create(Path({str(tmp_path / "run")!r}), manifest(level_record().plan)) as writer:
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    for i in range(50):
        if i == 45:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        try:
            writer.add_request(request(i, [(10, 1)], sent_s=i))
        except RunError:
            refused += 1
assert refused > 5, refused
"""
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent, env={**os.environ}, check=True)
    run = read_run(tmp_path / "run")
    assert run.damaged is not None
    assert 0 < len(run.requests) < 45


def test_a_killed_process_leaves_what_it_had_done(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from breakeven.runs import RunWriter
from tests.measure.handmade import request
from tests.test_runs import level_record, manifest
with RunWriter.create(Path({str(tmp_path / "run")!r}), manifest(level_record().plan)) as writer:
    for i in range(50):
        writer.add_request(request(i, [(10, 1)], sent_s=i))
    os.kill(os.getpid(), signal.SIGKILL)
"""
    died = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent, env={**os.environ})
    assert died.returncode == -signal.SIGKILL
    run = read_run(tmp_path / "run")
    assert len(run.requests) == 50
    assert run.manifest.ended is None


def killed_at(at_s: float, concurrency: int = 4, e2e_s: float = 8.0) -> list[RequestRecord]:
    """Slots that are apart by a share of a request; what runs at the kill leaves no record."""
    records = []
    for slot in range(concurrency):
        sent_s, number = 0.0, 0
        while sent_s < at_s:
            length_s = e2e_s if number else e2e_s * (slot + 1) / concurrency
            arrivals = [(50.0 * (i + 1), 1) for i in range(round(length_s / 0.05))]
            phase = "ramp" if sent_s < e2e_s else "measured"
            if sent_s + length_s <= at_s:
                records.append(request(100 * slot + number, arrivals, sent_s=sent_s, phase=phase))
            sent_s, number = sent_s + length_s + 0.0001, number + 1
    return sorted(records, key=lambda record: record.end_ns or 0)


@pytest.mark.parametrize("at_s", [40.0, 43.0, 62.7])
def test_level_without_its_record_gets_its_window_from_its_requests(tmp_path: Path, at_s: float) -> None:
    """Up to the moment from which on tokens of lost requests are missing: else the throughput would be too low."""
    plan = LevelPlan(index=0, run=0, concurrency=4, max_tokens=160)
    killed(tmp_path, plan, killed_at(at_s))
    (level,) = summarize(read_run(tmp_path)).levels
    assert level.ended_by == "killed"
    assert level.output_throughput.window_s is not None
    assert at_s - 17 < level.output_throughput.window_s < at_s - 8
    assert level.output_throughput.value == pytest.approx(80, rel=0.02)
    assert level.in_flight["mean"] == pytest.approx(4, rel=0.01)
    failed = {check.name for check in level.checks if not check.ok}
    assert failed == {"cut_short"}


def test_window_of_a_level_killed_in_its_drain_ends_where_the_drain_begins(tmp_path: Path) -> None:
    plan = LevelPlan(index=0, run=0, concurrency=4, max_tokens=160)
    records = killed_at(60)
    for record in records:
        if record.sent_ns is not None and record.sent_ns > 30 * S:
            record.phase = "drain"
    killed(tmp_path, plan, records)
    (level,) = read_run(tmp_path).levels
    assert level.closed_ns == min(record.sent_ns or 0 for record in records if record.phase == "drain")


def test_level_killed_in_its_ramp_has_no_window(tmp_path: Path) -> None:
    killed(tmp_path, LevelPlan(index=0, run=0, concurrency=4, max_tokens=160), killed_at(7))
    (level,) = summarize(read_run(tmp_path)).levels
    assert level.output_throughput.window_s is None
    assert not next(check.ok for check in level.checks if check.name == "steady")


def test_level_without_a_ramp_that_was_killed_has_no_window(tmp_path: Path) -> None:
    killed(tmp_path, level_record().plan, steady_stream(seconds=10))
    (level,) = read_run(tmp_path).levels
    assert (level.opened_ns, level.closed_ns) == (None, None)


def test_level_killed_in_its_warm_up_is_none(tmp_path: Path) -> None:
    killed(tmp_path, level_record().plan, [request(0, [(10, 1)], phase="warmup")])
    assert read_run(tmp_path).levels == []


def test_requests_that_were_never_sent_make_no_level(tmp_path: Path) -> None:
    unsent = request(0, outcome="connection", error="refused")
    unsent.sent_ns = None
    killed(tmp_path, level_record().plan, [unsent])
    assert read_run(tmp_path).levels == []


def test_levels_that_were_over_at_the_kill_keep_their_record(tmp_path: Path) -> None:
    level, records = uneven_level(0)
    plans = [level.plan, LevelPlan(index=1, run=0, concurrency=1, max_tokens=512), level_record(index=2).plan]
    with RunWriter.create(tmp_path, manifest(*plans)) as writer:
        for record in [*records, request(5000, [(10, 1)], level=1)]:
            writer.add_request(record)
        writer.add_level(level)
    assert [(level.plan.index, level.ended_by) for level in read_run(tmp_path).levels] == [
        (0, "duration"),
        (1, "killed"),
    ]


@pytest.mark.parametrize("name", ["requests.jsonl", "levels.jsonl"])
def test_damaged_line_is_named(tmp_path: Path, name: str) -> None:
    with RunWriter.create(tmp_path, manifest()) as writer:
        for _ in range(3):
            writer.add_request(request(0))
            writer.add_level(level_record())
    path = tmp_path / name
    lines = path.read_bytes().splitlines(keepends=True)
    for damage in (b"{\n", b"\n", b"\xff\xfe\n", b'{"id": 1}\n'):
        path.write_bytes(lines[0] + damage + lines[2])
        assert refused(tmp_path).startswith(f"{path}: line 2 is damaged: ")


@pytest.mark.parametrize("name", ["requests.jsonl", "levels.jsonl"])
def test_missing_file_is_named(tmp_path: Path, name: str) -> None:
    with RunWriter.create(tmp_path, manifest()):
        pass
    (tmp_path / name).unlink()
    assert refused(tmp_path) == f"{tmp_path / name}: No such file or directory"


def test_a_file_that_has_no_room_leaves_no_half_of_it(tmp_path: Path) -> None:
    size = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, size[1]))
    try:
        with pytest.raises(RunError, match=r"manifest.json can't be written: File too large"):
            RunWriter.create(tmp_path, manifest())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, size)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_without_a_run(tmp_path: Path) -> None:
    assert refused(tmp_path).startswith(f"{tmp_path} holds no run: manifest.json: No such file")
    (tmp_path / "file").write_text("")
    assert "holds no run" in refused(tmp_path / "file")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"schema": 5}', b"{}", b'{"schema": "breakeven.run/1"}', b"\xff"])
def test_damaged_manifest_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(data)
    assert refused(tmp_path).startswith(f"{tmp_path}/manifest.json is damaged: ")


def test_run_of_another_schema_is_refused_whatever_else_it_holds(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"schema": "breakeven.run/7", "levels": "somewhere else"}')
    assert refused(tmp_path) == f"{tmp_path} is a run of schema breakeven.run/7; this breakeven reads breakeven.run/1"


def test_place_that_is_taken_is_refused(tmp_path: Path) -> None:
    taken, run, file = tmp_path / "taken", tmp_path / "run", tmp_path / "file"
    taken.mkdir()
    (taken / "thesis.tex").write_text("dear")
    file.write_text("dear")
    with RunWriter.create(run, manifest()):
        pass
    for place, why in ((taken, "is no empty directory"), (file, "is no empty directory"), (run, "holds another run")):
        with pytest.raises(RunError, match=f"--output {place} {why}"):
            RunWriter.create(place, manifest())
    assert (taken / "thesis.tex").read_text() == file.read_text() == "dear"


def test_empty_directory_is_a_place(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path, manifest()):
        pass
    assert read_run(tmp_path).requests == []


@pytest.mark.parametrize("place", ["file/run", "x" * 300, "/proc/none/run"])
def test_place_that_cannot_be_is_refused_in_one_line(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="--output") as caught:
        RunWriter.create(tmp_path / place, manifest())
    assert "\n" not in str(caught.value)


def test_full_disk_is_told_in_one_line(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path, manifest()) as writer:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        try:
            with pytest.raises(RunError, match=f"--output {tmp_path}: File too large"):
                writer.add_request(request(0))
            with pytest.raises(RunError, match="File too large"):
                writer.finish(interrupted=False)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_json_is_written_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"a": 1})
    write_json(path, {"a": 2})
    assert json.loads(path.read_bytes()) == {"a": 2}
    assert os.listdir(tmp_path) == ["summary.json"]
    with pytest.raises(RunError, match="can't be written"):
        write_json(tmp_path / "none" / "summary.json", {})
