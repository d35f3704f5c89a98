"""A null server in which a control page's pin decides how long a step lasts, in a process of its own.

`controlled.py KEY` prints a line of JSON with both URLs and serves until stdin ends. The page is written
from the contract, not with the code that serves it in vLLM; `GET /log` tells which K ruled from when on.
"""

from __future__ import annotations

import http.client
import json
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import perf_counter_ns
from typing import Any, NamedTuple

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
        return [Ruled(*row) for row in self.ask("GET", "/log")[1]]

    def ask(self, method: str, path: str, body: object = None, key: str | None = None) -> tuple[int, Any]:
        """The status and the JSON that the page answers."""
        connection = http.client.HTTPConnection(self.page.removeprefix("http://"), timeout=10)
        text = None if body is None else json.dumps(body)
        with closing(connection):
            connection.request(method, path, text, {"Authorization": f"Bearer {key}"} if key else {})
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


class _Pins:
    def __init__(self) -> None:
        self.until_ns, self.pins = 0, 0
        self.log = [Ruled(perf_counter_ns(), None)]

    @property
    def k(self) -> int | None:
        if self.log[-1].k is not None and perf_counter_ns() > self.until_ns:
            self.log.append(Ruled(self.until_ns, None))
        return self.log[-1].k

    def rule(self, k: int | None, seconds: float = 0.0) -> None:
        self.until_ns = perf_counter_ns() + round(seconds * 1e9)
        self.log.append(Ruled(perf_counter_ns(), k))

    def state(self) -> dict[str, Any]:
        k = self.k
        pinned = None if k is None else {"k": k, "seconds_left": (self.until_ns - perf_counter_ns()) / 1e9}
        ruling = 2 if k is None else k
        return {"schema": "breakeven.control/1", "ks": KS, "k": ruling, "pinned": pinned, "pins": self.pins}


class _Steps(StepTable):
    def __init__(self, pins: _Pins) -> None:
        self._pins = pins

    def step_us(self, batch: int) -> float:
        return STEP_US[self._pins.k]


def _page(pins: _Pins, key: str) -> type[BaseHTTPRequestHandler]:
    class Page(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(200, pins.log if self.path == "/log" else pins.state())

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self._admits():
                assert asked["k"] in KS  # the client has asked before
                pins.pins += 1
                pins.rule(asked["k"], asked["seconds"])
                self._answer(200, pins.state())

        def do_DELETE(self) -> None:
            if self._admits():
                pins.rule(None)
                self._answer(200, pins.state())

        def _admits(self) -> bool:
            if not key or self.headers.get("Authorization") == f"Bearer {key}":
                return True
            self._answer(401, {"error": "no"})
            return False

        def _answer(self, status: int, said: object) -> None:
            body = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    return Page


def _main(key: str) -> None:
    pins = _Pins()
    page = ThreadingHTTPServer(("127.0.0.1", 0), _page(pins, key))
    threading.Thread(target=page.serve_forever, daemon=True).start()
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    listener.setblocking(False)
    urls = [f"http://127.0.0.1:{port}" for port in (listener.getsockname()[1], page.server_address[1])]
    print(json.dumps(dict(zip(("url", "page"), urls, strict=True))), flush=True)
    timetable = Timetable(_Steps(pins), (1,), 0.0, sys.maxsize, 1.0)
    setup = Setup(timetable, "null", "per-chunk", role_chunk=False, api_key=None, tls=None, exit_on_stdin_eof=True)
    Server(listener, setup).run()


if __name__ == "__main__":
    _main(sys.argv[1])
