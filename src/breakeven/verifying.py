"""`breakeven verify`: static arms and a tuned one, measured by turns or read, and whether the tuned one holds."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from breakeven.decide.comparison import compare
from breakeven.decide.schedule import Schedule, read_schedule
from breakeven.decide.verify import MARGIN, Verification, check_roles, verify
from breakeven.errors import UsageError
from breakeven.options import CompareOptions
from breakeven.records import Manifest
from breakeven.runs import write_json
from breakeven.versus import COMPARISON, VERIFICATION, Measured, arm_options, measure_arms, read_arms

__all__ = ["Verified", "measure_and_verify", "verify_directories"]


class Verified(NamedTuple):
    """A verification that is over; `verification` is None, and `why_not` says why, where it ended too early."""

    verification: Verification | None
    measured: Measured
    why_not: str | None = None


def verify_directories(
    directories: Sequence[Path],
    tuned: str | None = None,
    *,
    margin: float = MARGIN,
    schedule: Path | None = None,
    force: bool = False,
) -> Verification:
    """Puts runs that exist to the proof; one directory of a comparison stands for its arms.

    Raises:
        UsageError: they can't be read, did not take turns, or are of another model than the schedule.
    """
    arms, known = read_arms(directories), _schedule(schedule)
    return verify(arms, tuned, margin=margin, schedule=known, force=force)


def measure_and_verify(
    options: CompareOptions,
    tuned: str | None = None,
    *,
    margin: float = MARGIN,
    schedule: Path | None = None,
) -> Verified:
    """Measures all arms by turns, then puts the tuned one to the proof; what came out is written beside the runs.

    Raises:
        UsageError: something that was asked for can't be done, or the schedule is for another model.
    """
    name, known = check_roles([arm for arm, _ in options.arms], tuned), _schedule(schedule)
    arms = arm_options(options)
    for flag, is_given in (("--rate", options.bench.rate), ("--trace", options.bench.trace)):
        if is_given:
            raise UsageError(
                f"{flag}: below saturation an open loop's output is its input in every arm; "
                "verify wants requests in flight (--concurrency)"
            )

    def check(arm: str, manifest: Manifest) -> None:
        if known is not None and arm == name:
            known.check_model(manifest.model, f"--schedule {schedule}")

    # The ratios that `--precision` watches are those to the tuned arm.
    measured = measure_arms(options, arms, command="verify", first=name, check=check)
    try:
        found = verify(measured.arms, name, margin=margin, schedule=known, force=options.force)
    except UsageError as error:
        if not measured.signal and measured.lost is None:
            raise
        return Verified(None, measured, str(error))
    write_json(measured.directory / VERIFICATION, found)
    with contextlib.suppress(UsageError):  # an arm that failed at every load can't be compared; the verdict says so
        write_json(measured.directory / COMPARISON, compare(measured.arms, force=options.force))
    return Verified(found, measured)


def _schedule(path: Path | None) -> Schedule | None:
    return None if path is None else read_schedule(path)
