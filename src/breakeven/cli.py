"""The command line: parse, call, print. Heavy imports wait until a command needs them."""

from __future__ import annotations

import argparse
import errno
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from breakeven import __version__
from breakeven.commands import bench, compare, doctor, paste, simulate, summarize, tune, verify
from breakeven.errors import UsageError

__all__ = ["main"]

#: What writing fails with where it is no fault of ours: a full disk, a quota, a limit, a terminal that is gone.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Exit codes: 0; 1 for a finding (the server was lost, a problem on this machine); 2 for what can't be done as asked;
    128 + signal if interrupted.
    """
    # No number here is worth a thread pool: it would double the time numpy takes to load, and contend with the loop.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    _mend_streams()
    args = _parser().parse_args(argv)
    _end_in_order()
    try:
        return int(args.run(args))
    except UsageError as error:
        print(f"breakeven {args.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output is gone; nothing is left to tell it.
        _drop_output()
        return 141
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        _drop_output()
        place = error.filename or "what is to be printed"
        print(f"breakeven {args.command}: error: {place} can't be written: {error.strerror}", file=sys.stderr)
        return 2


def _drop_output() -> None:
    """Standard output takes nothing any more: Python must not try again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _end_in_order() -> None:
    """SIGTERM and SIGHUP end a command as Ctrl-C does: what it has started is stopped, and its scratch files go."""
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]

    def stop(number: int, _: object) -> NoReturn:
        for other in numbers:
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in numbers:
        signal.signal(number, stop)


def _mend_streams() -> None:
    """Output must not fail for a closed stream, whose number another file would get, or a letter that it can't show."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", closefd=False))
        if isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="replace")


class _Parser(argparse.ArgumentParser):
    """Errors in one line, without the usage that pushes them off the screen."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="breakeven", description="Find the load at which speculative decoding stops paying.")
    parser.add_argument("--version", action="version", version=f"breakeven {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (bench, compare, tune, verify, paste, summarize, simulate, doctor):
        command.add(commands)
    return parser
