"""What tests of whole commands share: a way to run the command line as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def breakeven(tmp_path: Path) -> Run:
    """Runs `breakeven ARGS…` in an empty directory, as `run_in` does."""
    return partial(run_in, tmp_path)


def run_in(
    place: Path, *args: object, env: dict[str, str] | None = None, timeout_s: float = 60
) -> subprocess.CompletedProcess[str]:
    """Runs `breakeven ARGS…` in a directory; `env` adds variables. Waits a minute at most."""
    clean = {name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"}
    return subprocess.run(
        [sys.executable, "-m", "breakeven", *map(str, args)],
        cwd=place,
        env=clean | (env or {}),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
