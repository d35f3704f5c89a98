"""A run on disk: `manifest.json`, `requests.jsonl`, `levels.jsonl`; `summary.json` is derived from them.

Records are appended as requests end and flushed at once, so that a killed run keeps what was done.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
from msgspec import Struct

from breakeven.errors import RunError
from breakeven.records import RUN_SCHEMA, ClientCost, LevelPlan, LevelRecord, Manifest, RequestRecord

__all__ = ["Run", "RunWriter", "check_vacant", "finished_levels", "make_directory", "read_run", "write_json"]

_Record = TypeVar("_Record", RequestRecord, LevelRecord)

#: The files of a run. `requests.cut.jsonl` and `levels.cut.jsonl` hold what a resumed run measured again.
MANIFEST, REQUESTS, LEVELS, SUMMARY = "manifest.json", "requests.jsonl", "levels.jsonl", "summary.json"
#: The log of a server that was started.
SERVER_LOG = "server.log"


class Run:
    """A run as read from disk. `damaged` says in words what could not be read, None if nothing."""

    def __init__(
        self,
        manifest: Manifest,
        requests: list[RequestRecord],
        levels: list[LevelRecord],
        damaged: str | None,
    ) -> None:
        self.manifest, self.requests, self.levels, self.damaged = manifest, requests, levels, damaged

    def of_level(self, index: int) -> list[RequestRecord]:
        """The records of one level, in the order in which they ended."""
        return [record for record in self.requests if record.level == index]


class RunWriter:
    """Writes one run as it happens. Use as a context manager, which holds a lock on the run.

    Raises:
        RunError: the directory can't be written (at any time: the disk may fill up), or another process writes to it.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory, self._manifest = directory, manifest
        try:
            self._requests = (directory / REQUESTS).open("ab", buffering=0)
            self._levels = (directory / LEVELS).open("ab", buffering=0)
            fcntl.flock(self._requests, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"{directory}: another process is writing to this run; wait for it, or stop it") from None
        except OSError as error:
            raise RunError(f"--output {directory}: {error.strerror}") from None
        self._encoder = msgspec.json.Encoder()
        self._failure: RunError | None = None

    @classmethod
    def create(cls, directory: Path, manifest: Manifest) -> Self:
        """Begins a run in a directory that is new or empty.

        Raises:
            RunError: it holds another run, or can't be written.
        """
        check_vacant(directory)
        make_directory(directory)
        write_json(directory / MANIFEST, manifest)
        return cls(directory, manifest)

    @classmethod
    def reopen(cls, directory: Path) -> Self:
        """Takes hold of a run that is there; nothing is changed before `go_on`.

        Raises:
            RunError: there is none, it can't be written, or another process is writing to it.
        """
        return cls(directory, _read_manifest(directory))

    def go_on(self, manifest: Manifest, finished: Collection[int]) -> None:
        """Begins to go on with a run whose finished levels are given; lines of others move to a file beside.

        Raises:
            RunError: they can't be moved.
        """
        try:
            _set_aside(self.directory / REQUESTS, finished, lambda line: _RequestHead.decode(line).level)
            _set_aside(self.directory / LEVELS, finished, lambda line: _LevelHead.decode(line).plan.index)
        except OSError as error:
            raise RunError(f"--resume {self.directory}: {error.strerror}") from None
        manifest.ended, manifest.interrupted = None, False
        manifest.resumed.append(_now())
        self._manifest = manifest
        write_json(self.directory / MANIFEST, manifest)

    def plan(self, level: LevelPlan) -> None:
        """Notes in the manifest that a level is to be measured, where it was not planned before.

        Raises:
            RunError: it can't be written.
        """
        if all(each.index != level.index for each in self._manifest.levels):
            self._manifest.levels.append(level)
            write_json(self.directory / MANIFEST, self._manifest)

    def add_request(self, record: RequestRecord) -> None:
        """Appends one request's record."""
        self._append(self._requests, record)

    def add_level(self, record: LevelRecord) -> None:
        """Appends one level's record: the level is over."""
        self._append(self._levels, record)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._requests.close()
        self._levels.close()

    def finish(self, *, interrupted: bool) -> None:
        """Notes in the manifest that the run is over, and whether it got to its end."""
        self._manifest.ended = _now()
        self._manifest.interrupted = interrupted
        write_json(self.directory / MANIFEST, self._manifest)

    def _append(self, file: FileIO, record: RequestRecord | LevelRecord) -> None:
        if self._failure is not None:  # nothing may follow a line that is cut
            raise self._failure
        rest = memoryview(self._encoder.encode(record) + b"\n")
        try:
            while rest:  # a disk that fills up takes a part first
                rest = rest[file.write(rest) :]
        except OSError as error:
            mend = "what is there can be summarized"
            if self._manifest.turns is None:
                mend += f", and once there is room gone on with: breakeven bench --resume {self.directory}"
            self._failure = RunError(f"--output {self.directory}: {error.strerror}; {mend}")
            raise self._failure from None


def finished_levels(run: Run) -> set[int]:
    """The levels of a run that need not be measured again when it is resumed."""
    return {level.plan.index for level in run.levels if level.ended_by not in ("interrupted", "killed", "lost")}


def check_vacant(directory: Path) -> None:
    """Raises `RunError` where a run, or anything else, is at the place of a new run."""
    try:
        manifest = directory / MANIFEST
        holds_run = manifest.exists()
        # half a manifest is what a run leaves that was killed as it began
        is_taken = directory.exists() and (not directory.is_dir() or {*directory.iterdir()} - {_scratch(manifest)})
    except OSError as error:
        raise RunError(f"--output {directory}: {error.strerror}") from None
    if holds_run:
        raise RunError(f"--output {directory} holds another run: name a new directory")
    if is_taken:
        raise RunError(f"--output {directory} is no empty directory: name a new one")


def make_directory(directory: Path) -> None:
    """Makes a directory and those above it; raises `RunError` where that can't be done."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"--output {directory}: {error.strerror}") from None


def read_run(directory: Path) -> Run:
    """Reads a run; one that was killed is read as far as it came.

    Raises:
        RunError: there is no run, or one of another schema, or a line other than the last is damaged.
    """
    manifest = _read_manifest(directory)
    if manifest.ended is None and not any((directory / name).exists() for name in (REQUESTS, LEVELS)):
        return Run(manifest, [], [], None)  # killed as it began
    requests, cut_request = _read_lines(directory / REQUESTS, RequestRecord)
    levels, cut_level = _read_lines(directory / LEVELS, LevelRecord)
    cut = [name for name, is_cut in ((REQUESTS, cut_request), (LEVELS, cut_level)) if is_cut]
    levels += _unfinished(manifest, requests, levels)
    return Run(manifest, requests, levels, f"the last line of {' and '.join(cut)} is cut" if cut else None)


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file all or nothing.

    Raises:
        RunError: it can't be written.
    """
    scratch = _scratch(path)
    try:
        scratch.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
        os.replace(scratch, path)
    except OSError as error:
        with contextlib.suppress(OSError):  # half a file is no use, and would be in the way of another try
            scratch.unlink()
        raise RunError(f"{path} can't be written: {error.strerror}") from None


def _scratch(path: Path) -> Path:
    return path.with_suffix(".tmp")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class _OfLevel(Struct):
    level: int


class _Place(Struct):
    index: int


class _OfPlan(Struct):
    plan: _Place


_RequestHead, _LevelHead = msgspec.json.Decoder(_OfLevel), msgspec.json.Decoder(_OfPlan)


def _set_aside(path: Path, kept: Collection[int], level_of: Callable[[bytes], int]) -> None:
    """Moves the lines of other levels than those kept, and one that was cut, to a file beside."""
    lines = path.read_bytes().splitlines(keepends=True)
    is_kept = [line.endswith(b"\n") and level_of(line) in kept for line in lines]
    if all(is_kept):
        return
    with path.with_suffix(".cut.jsonl").open("ab") as aside:
        aside.writelines(line.rstrip(b"\n") + b"\n" for line, keep in zip(lines, is_kept, strict=True) if not keep)
    # In place, since the file is open for appending and locked. Levels come one after the other, so that what is kept
    # is written where it stands already: a kill in between harms nothing.
    with path.open("r+b") as file:
        file.writelines(line for line, keep in zip(lines, is_kept, strict=True) if keep)
        file.truncate()


class _Header(Struct):
    schema: str


def _read_manifest(directory: Path) -> Manifest:
    path = directory / MANIFEST
    try:
        data = path.read_bytes()
        schema = msgspec.json.decode(data, type=_Header).schema
        if schema != RUN_SCHEMA:
            raise RunError(f"{directory} is a run of schema {schema}; this breakeven reads {RUN_SCHEMA}")
        return msgspec.json.decode(data, type=Manifest)
    except OSError as error:
        raise RunError(f"{directory} holds no run: {MANIFEST}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise RunError(f"{path} is damaged: {error}") from None


def _read_lines(path: Path, kind: type[_Record]) -> tuple[list[_Record], bool]:
    """All records of a file of lines, and whether the last line was cut by a kill."""
    decoder = msgspec.json.Decoder(kind)
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}") from None
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            if number == len(lines):
                return records, True
            raise RunError(f"{path}: line {number} is damaged: {error}") from None
    return records, False


def _unfinished(
    manifest: Manifest, requests: Sequence[RequestRecord], levels: Sequence[LevelRecord]
) -> list[LevelRecord]:
    """A record for the level that a kill cut short; a level that was not past its warm-up has none."""
    over = {level.plan.index for level in levels}
    return [
        _from_requests(plan, there)
        for plan in manifest.levels
        if plan.index not in over
        and (there := [r for r in requests if r.level == plan.index and r.phase != "warmup" and r.sent_ns is not None])
    ]


def _from_requests(plan: LevelPlan, records: Sequence[RequestRecord]) -> LevelRecord:
    """The level as its requests show it: the window opens where the first of them was sent inside it."""
    spans = [(r.sent_ns or 0, r.end_ns or r.last_ns or r.sent_ns or 0, r.phase) for r in records]
    inside = [sent_ns for sent_ns, _, phase in spans if phase == "measured"]
    drain = [sent_ns for sent_ns, _, phase in spans if phase == "drain"]
    opened_ns = min(inside) if inside and any(phase == "ramp" for *_, phase in spans) else None
    if plan.mode == "closed":
        until_ns = _complete_until([(sent_ns, end_ns) for sent_ns, end_ns, _ in spans], plan.concurrency)
    else:
        until_ns = _sent_until(records)
    return LevelRecord(
        plan=plan,
        started_ns=min(sent_ns for sent_ns, *_ in spans),
        opened_ns=opened_ns,
        closed_ns=None if opened_ns is None else max(opened_ns, min([until_ns, *drain])),
        ended_ns=max(end_ns for _, end_ns, _ in spans),
        ended_by="killed",
        client=ClientCost(cpu_s=0.0, wall_s=0.0, chunks=0, lag_ms={}),
    )


def _complete_until(spans: Sequence[tuple[int, int]], concurrency: int) -> int:
    """The last moment at which as many requests as the level had slots were running.

    What ran at the kill left no record: after this moment tokens are missing. 0 where there is no such moment.
    """
    running = until_ns = 0
    for moment_ns, step in sorted([(sent_ns, 1) for sent_ns, _ in spans] + [(end_ns, -1) for _, end_ns in spans]):
        if running >= concurrency:
            until_ns = moment_ns
        running += step
    return until_ns


def _sent_until(records: Sequence[RequestRecord]) -> int:
    """When the last request was sent before one that left no record, since it was running at the kill."""
    ordered = sorted(records, key=lambda record: record.id)
    until_ns = 0
    for number, record in enumerate(ordered, ordered[0].id):
        if record.id != number:
            break
        until_ns = record.sent_ns or until_ns
    return until_ns
