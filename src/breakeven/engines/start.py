"""The server of a run: one that is there at a URL, or one that breakeven starts and stops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from breakeven.engines.process import ServerProcess
from breakeven.engines.serve import StartedServer
from breakeven.options import BenchOptions

__all__ = ["Server", "start"]

#: Lines of a dead server's log that a message quotes.
_LINES = 4


#: Requests that the embedded engine decodes at once in an open loop.
_OPEN_SLOTS = 16


class Server:
    """A server as a run sees it. `process` is None where it was there before and stays when the run is over."""

    def __init__(self, url: str, process: ServerProcess | StartedServer | None = None) -> None:
        self.url, self._process = url, process

    def has_ended(self) -> bool:
        """Whether the process that was started is gone."""
        return self._process is not None and self._process.exit_code() is not None

    def log_tail(self) -> str:
        """The end of the log in one line, empty where there is none."""
        return " | ".join(self._process.log_tail(_LINES)) if self._process else ""

    def save_log(self, path: Path) -> None:
        """Copies the log of a served command, without secrets; does nothing for other servers."""
        if isinstance(self._process, StartedServer):
            self._process.save_log(path)

    def host(self) -> dict[str, Any] | None:
        """The machine on which a command was served; None where breakeven does not know it."""
        return self._process.describe()["host"] if isinstance(self._process, StartedServer) else None


@contextmanager
def start(options: BenchOptions, say: Callable[[str], None]) -> Iterator[Server]:
    """The server to measure; one that is started lives as long as the context. `say` is told how starting goes.

    Raises:
        UsageError: the command can't be used, or the server doesn't start (`EngineError`, with the end of its log).
    """
    if options.local is not None:
        from breakeven.engines.llamacpp import start_local

        with start_local(options.local, slots=_slots(options)) as local:
            yield Server(local.url, local)
    elif options.serve is not None and options.serve_on is not None:
        from breakeven.engines.remote import serve_on

        with serve_on(options.serve_on, options.serve, start_timeout_s=options.serve_timeout_s, say=say) as remote:
            yield Server(remote.url, remote)
    elif options.serve is not None:
        from breakeven.engines.serve import serve

        with serve(options.serve, start_timeout_s=options.serve_timeout_s, say=say) as served:
            yield Server(served.url, served)
    else:
        assert options.server_url is not None
        yield Server(options.server_url)


def _slots(options: BenchOptions) -> int:
    if options.rate or options.trace is not None:
        return min(options.max_in_flight or _OPEN_SLOTS, _OPEN_SLOTS)
    return max(options.concurrency)
