"""What tests of started servers share: servers that misbehave, and a look for what they left behind."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

__all__ = ["GROUP", "PYTHONPATH", "TREE", "descendants", "has_run", "is_alive", "marked", "new_marker", "within"]

PYTHONPATH = os.pathsep.join([*sys.path, str(Path(__file__).parents[2])])
"""With it another Python imports what we do, and these tests."""

TREE = """
import http.server, signal, subprocess, sys
alone = False
stay = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
start = "subprocess.Popen([sys.executable, '-c', code, *sys.argv[1:]], start_new_session=True)"
orphan = f"import subprocess, sys; code = {stay!r}; {start}"
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for code in (stay, stay, orphan):
    subprocess.Popen([sys.executable, "-c", code, *sys.argv[2:]], start_new_session=alone)
    alone = True
print("up", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
"""A server at port argv[1] that ignores SIGTERM, as do a worker of its own group, one with a session of its own, and
one that has lost its parent. Each says "up", and has the other arguments in its command line."""

GROUP = TREE.replace("orphan)", "stay)").replace("alone = True", "")
"""The same with all its workers in its own process group."""


def new_marker() -> str:
    """A word that no other process has in its command line."""
    return f"marker-{uuid.uuid4().hex}"


def marked(marker: str) -> list[int]:
    """The processes that have `marker` in their command line; one that has ended and waits for its parent has none."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if marker in (directory / "cmdline").read_text(errors="replace"):
                found.append(int(directory.name))
        except OSError:  # it has ended meanwhile
            continue
    return found


def has_run(log: list[str]) -> bool:
    """Whether all four processes of TREE have said that they are up."""
    return "".join(log).count("up") == 4  # one's "up" may stand in another's line


def within(seconds: float, happens: Callable[[], bool]) -> bool:
    """Whether it happens in this time."""
    deadline = time.monotonic() + seconds
    while not happens() and time.monotonic() < deadline:
        time.sleep(0.02)
    return happens()


def descendants(pid: int) -> list[int]:
    """All processes that `pid` has started, they themselves, and so on."""
    parents = {}
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(directory.name)] = int((directory / "stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for parent in found:
        found += [child for child, its in parents.items() if its == parent]
    return found[1:]


def is_alive(pid: int) -> bool:
    """Whether it runs; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
