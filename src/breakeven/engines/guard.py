"""The process between breakeven and a server: when breakeven is gone, nothing of the server is left.

    python guard.py PATIENCE_S GRACE_S COMMAND …

It runs the command in a session of its own and holds it until one of these comes: the command ends; standard
input does, of which breakeven has the only other end, so that `kill -9` counts too; a signal. Then everything that
the command started has to go, sessions of their own or not: the command's standard input is closed, PATIENCE_S later
SIGTERM goes to all of it, GRACE_S later SIGKILL. What comes on standard input is handed to the command's. The exit
code is the command's as shells tell it: 128 + N after signal N, 127 or 126 if it can't be run.

On Linux the guard is a "child subreaper", prctl(2): what loses its parent becomes the guard's child, so that nothing
escapes by forking twice. Elsewhere it is the command's process group that ends.

`remote` sends this file to machines that have no breakeven: it needs the standard library only, and Python 3.6 can
read it (hence the quoted annotations).
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

__all__ = ["KILL_LIMIT_S", "main"]

#: How long after SIGKILL what can't die yet is waited for: a driver may hold a process while it frees a GPU's memory.
KILL_LIMIT_S = 30.0
POLL_S = 0.02
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
LINUX = sys.platform == "linux"


def main(argv: "list[str]") -> int:
    """Hold the command `argv[2:]`, end it, return its exit code."""
    patience_s, grace_s, command = float(argv[0]), float(argv[1]), argv[2:]
    signals = _signals_as_bytes()
    if LINUX:
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        server = _start(command)
    except OSError as error:
        print(f"can't run {command[0]}: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126
    return _Guard(server).hold(signals, patience_s, grace_s)


class _Guard:
    def __init__(self, server: "subprocess.Popen[bytes]") -> None:
        assert server.stdin is not None
        self._pid, self._stdin = server.pid, server.stdin
        self._code = -1  # until the command has ended

    def hold(self, signals: int, patience_s: float, grace_s: float) -> int:
        """Wait for the end, see to it that it is one of everything, return the exit code."""
        while self._code < 0 and self._relay(signals):
            self._reap()
        with contextlib.suppress(OSError):
            self._stdin.close()
        if self._code >= 0 or not self._gone_within(patience_s):
            self._signal(signal.SIGTERM)
            self._gone_within(grace_s)
        until = time.monotonic() + KILL_LIMIT_S
        while not self._gone_within(0) and time.monotonic() < until:
            self._signal(signal.SIGKILL)  # again and again: a process may have forked while its like were looked for
            self._gone_within(5 * POLL_S)
        return abs(self._code)

    def _relay(self, signals: int) -> bool:
        """Wait for something to happen; False if it is that all has to end."""
        ready, _, _ = select.select([0, signals], [], [])
        if signals in ready:
            return not os.read(signals, 512).strip(bytes([signal.SIGCHLD]))
        data = os.read(0, 65536)
        with contextlib.suppress(OSError):  # that the command doesn't read is its own affair
            self._stdin.write(data)
        return bool(data)

    def _reap(self) -> bool:
        """Collect what has ended; False where no child is left, neither alive nor ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._pid:
                self._code = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)

    def _gone_within(self, seconds: float) -> bool:
        """Wait until nothing is left, but no longer. Whatever is left descends from a child of ours."""
        until = time.monotonic() + seconds
        while self._reap() or not (LINUX or _group_is_gone(self._pid)):
            if time.monotonic() >= until:
                return False
            time.sleep(POLL_S)
        return True

    def _signal(self, number: int) -> None:
        if not LINUX:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, number)
            return
        for pid in _descendants():
            with contextlib.suppress(ProcessLookupError, PermissionError):  # gone by now; become another user's
                os.kill(pid, number)


def _signals_as_bytes() -> int:
    """A descriptor from which each signal that comes can be read, as one byte."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    return readable


def _start(command: "list[str]") -> "subprocess.Popen[bytes]":
    # Code between fork and exec is safe here, where there is one thread: SIGTERM shall come if the guard is killed.
    before = (lambda: _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)) if LINUX else None
    return subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True, preexec_fn=before)


def _prctl(option: int, value: int) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(option, int(value), 0, 0, 0)


def _descendants() -> "list[int]":
    """The ids of all processes whose line of parents leads here, as /proc/PID/stat tells it (proc(5))."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
            parent = int(stat.read().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    found = [os.getpid()]
    for pid in found:
        found += children.get(pid, ())
    return found[1:]


def _group_is_gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # the interpreter's own way out would look after a child that could not be killed
