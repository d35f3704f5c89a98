"""The server of a run: one that is there at a URL, or one that breakeven starts and stops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from breakeven.engines.process import ServerProcess
from breakeven.engines.serve import StartedServer
from breakeven.options import BenchOptions

__all__ = ["Server", "start", "start_all"]

#: Lines of a dead server's log that a message quotes.
_LINES = 4


#: Requests that an engine decodes at once in an open loop: the embedded one, vLLM.
_OPEN_SLOTS, _OPEN_BATCH = 16, 64


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

        with start_local(options.local, slots=_slots(options, _OPEN_SLOTS)) as local:
            yield Server(local.url, local)
    elif options.vllm is not None:
        with start_all({options.vllm: options}, say) as servers:
            yield servers[options.vllm]
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


@contextmanager
def start_all(arms: Mapping[str, BenchOptions], say: Callable[[str], None]) -> Iterator[dict[str, Server]]:
    """The servers of arms that are up together, by the arms' names; vLLM's, slow to start, all start at once.

    Raises:
        UsageError: as `start`.
    """
    specs = {name: options.vllm for name, options in arms.items() if options.vllm is not None}
    with ExitStack() as stack:
        found = {}
        if specs:
            from breakeven.engines.vllm import start_vllm

            first = arms[next(iter(specs))]  # the load is the same for all
            servers = start_vllm(
                specs, requests=_slots(first, _OPEN_BATCH), start_timeout_s=first.serve_timeout_s, say=say
            )
            found = {name: Server(server.url, server) for name, server in stack.enter_context(servers).items()}
        others = {name: stack.enter_context(start(own, say)) for name, own in arms.items() if name not in specs}
        yield {name: (found | others)[name] for name in arms}


def _slots(options: BenchOptions, in_open_loop: int) -> int:
    if options.rate or options.trace is not None:
        return min(options.max_in_flight or in_open_loop, in_open_loop)
    return max(options.concurrency)
