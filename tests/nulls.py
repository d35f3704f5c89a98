"""Null servers for the tests of whole commands, and commands that are ended in the middle."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from breakeven.engines.null import NullServer, null_server

__all__ = ["ended", "has_begun", "serving"]


def serving(*flags: str) -> Any:
    """A module's fixture: a null server with these flags."""

    @pytest.fixture(scope="module")
    def server() -> Iterator[NullServer]:
        with null_server(*flags) as running:
            yield running

    return server


def ended(
    *args: object, cwd: Path, when: Callable[[], bool], number: int, wait_s: float = 15, end_s: float = 20
) -> subprocess.CompletedProcess[str]:
    """Runs `breakeven ARGS…` until `when`, then sends it the signal; fails where one takes longer than it may."""
    process = subprocess.Popen(
        [sys.executable, "-m", "breakeven", *map(str, args)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until = time.monotonic() + wait_s
        while not when():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < until, "what was waited for has not come"
            time.sleep(0.02)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=end_s)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def has_begun(path: Path) -> Callable[[], bool]:
    """Whether something stands in a file."""
    return lambda: path.exists() and path.stat().st_size > 0
