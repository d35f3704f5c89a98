"""A null server in which a control page's pin decides how long a step lasts, in a process of its own.

`controlled.py KEY` prints a line of JSON with both URLs and serves until stdin ends. The page is that of a server that
breakeven acts in; its state also tells which K ruled from when on, as `log`.
"""

from __future__ import annotations

import http.client
import json
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from time import perf_counter_ns
from typing import Any, NamedTuple

from breakeven.act.governor import Governor
from breakeven.act.page import open_page
from breakeven.act.settings import Control
from breakeven.decide.policy import Policy
from breakeven.engines.null import NullServer
from breakeven.engines.null.loop import Server, Setup
from breakeven.engines.null.steps import StepTable, Timetable

__all__ = ["KS", "STEP_US", "Controlled", "controlled"]

#: The K that are declared, and how long a step lasts with each, whatever runs; None is what the policy makes of it.
KS = (0, 2, 4)
STEP_US: dict[int | None, float] = {0: 24_000.0, 2: 8_000.0, 4: 40_000.0, None: 16_000.0}


class Ruled(NamedTuple):
    """From then on (ns of `perf_counter`) this K was pinned; None: the policy decided."""

    since_ns: int
    k: int | None


class Controlled(NamedTuple):
    """A running server and its page; `arm` is what stands behind `pin:K@`."""

    null: NullServer
    page: str

    @property
    def arm(self) -> str:
        return f"{self.null.url}#{self.page.rpartition(':')[2]}"

    def log(self) -> list[Ruled]:
        """Which K ruled when, since the start."""
        return [Ruled(*row) for row in self.ask("GET", "/state")[1]["log"]]

    def ask(self, method: str, path: str, body: object = None, key: str | None = None) -> tuple[int, Any]:
        """The status and the JSON that the page answers."""
        connection = http.client.HTTPConnection(self.page.removeprefix("http://"), timeout=10)
        text = None if body is None else json.dumps(body)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        with closing(connection):
            connection.request(method, path, text, headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())


@contextmanager
def controlled(key: str = "") -> Iterator[Controlled]:
    """Runs it; with a key pins need that."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, __file__, key], stdin=pipe, stdout=pipe) as process:
        try:
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], 30)[0]
            said = json.loads(process.stdout.readline())
            port = int(said["url"].rpartition(":")[2])
            yield Controlled(NullServer(said["url"], port, process.pid), said["page"])
        finally:
            process.kill()


class _Ruling(Governor):
    """Keeps to 2 where nothing is pinned, writes down what ruled when, and is never idle."""

    def __init__(self) -> None:
        super().__init__(Policy(KS, mode=2), "fixed:2")
        self.log = [Ruled(perf_counter_ns(), None)]

    def pin(self, k: int, seconds: float) -> None:
        super().pin(k, seconds)
        self.log.append(Ruled(perf_counter_ns(), k))
        self.choose(1, 0, 0.0)

    def _release(self) -> None:
        super()._release()
        self.log.append(Ruled(perf_counter_ns(), None))

    def state(self) -> dict[str, Any]:
        return super().state() | {"log": self.log}


class _Steps(StepTable):
    def __init__(self, ruling: _Ruling) -> None:
        self._ruling = ruling

    def step_us(self, batch: int) -> float:
        self._ruling.choose(batch, 0, 0.0)
        return STEP_US[self._ruling.log[-1].k]


def _main(key: str) -> None:
    ruling = _Ruling()
    page = open_page(ruling, Control(port=0, key=key or None))
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    listener.setblocking(False)
    urls = [f"http://127.0.0.1:{port}" for port in (listener.getsockname()[1], page.server_address[1])]
    print(json.dumps(dict(zip(("url", "page"), urls, strict=True))), flush=True)
    timetable = Timetable(_Steps(ruling), (1,), 0.0, sys.maxsize, 1.0)
    setup = Setup(timetable, "null", "per-chunk", role_chunk=False, api_key=None, tls=None, exit_on_stdin_eof=True)
    Server(listener, setup).run()


if __name__ == "__main__":
    _main(sys.argv[1])
