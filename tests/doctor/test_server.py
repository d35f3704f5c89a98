"""What is found at a URL: a null server as it is, and behind a proxy that does what bad proxies do."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from breakeven.doctor.server import Examined, examine_server, headroom
from breakeven.engines.null import NullServer, null_server
from breakeven.errors import TargetError
from breakeven.options import BenchOptions
from breakeven.report.diagnosis import Finding
from tests.measure.handmade import request


class Proxy:
    """A TCP proxy before a server on loopback that names itself in each answer.

    With `hold_s` it passes an answer on when nothing more has come for so long; with `closing` it then closes.
    """

    def __init__(self, port: int, *, hold_s: float, closing: bool) -> None:
        self._port, self._hold_s, self._closing = port, hold_s, closing
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def stop(self) -> None:
        for sock in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in [self._listener, *self._sockets]:
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                self._sockets += [near, far]
                for serve in (self._ask, self._answer):
                    thread = threading.Thread(target=serve, args=(near, far))
                    self._threads.append(thread)
                    thread.start()

    def _ask(self, near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := near.recv(1 << 16):
                far.sendall(data)
            far.shutdown(socket.SHUT_RDWR)

    def _answer(self, near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := far.recv(1 << 16):
                held = data + (self._rest(far) if self._hold_s else b"")
                near.sendall(held.replace(b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nVia: 1.1 front\r\n"))
                if self._closing:
                    near.shutdown(socket.SHUT_RDWR)

    def _rest(self, far: socket.socket) -> bytes:
        held = b""
        far.settimeout(self._hold_s)
        try:
            while data := far.recv(1 << 16):
                held += data
        except TimeoutError:
            pass
        far.settimeout(None)
        return held


@contextlib.contextmanager
def proxy(server: NullServer, *, hold_s: float = 0.0, closing: bool = False) -> Iterator[Proxy]:
    front = Proxy(server.port, hold_s=hold_s, closing=closing)
    try:
        yield front
    finally:
        front.stop()


@pytest.fixture(scope="module")
def server() -> Iterator[NullServer]:
    with null_server("--step-us", "5000", "--prefill-us", "20000") as running:
        yield running


def examined(url: str, **options: Any) -> tuple[dict[str, Finding], Examined]:
    exam = examine_server(BenchOptions(server_url=url, **options))
    return {finding.name: finding for finding in exam.findings}, exam


def test_a_plain_server_is_told_as_it_is(server: NullServer) -> None:
    found, exam = examined(server.url)
    assert [finding for finding in exam.findings if finding.state == "problem"] == []
    assert found["engine"].numbers["engine"] == "vllm"
    assert f"{server.url}: model null" in found["engine"].finding
    assert found["api"].numbers == {"api": "chat", "counting": "continuous", "tokens_from": "chunks"}
    assert found["metrics"].numbers["metrics"] is True
    assert found["proxy"].state == "ok"
    assert found["streaming"].state == "ok"
    assert found["keep-alive"].numbers["kept_alive"] is True
    assert found["way"].numbers["loopback"] is True
    assert 0 < found["way"].numbers["connect_ms"] < 1000


def test_the_speed_of_one_request_is_the_timetables(server: NullServer) -> None:
    numbers = examined(server.url)[0]["speed"].numbers
    assert numbers["tokens"] == 64
    assert numbers["ttft_ms"] >= 20
    assert 4.5 < numbers["tpot_ms"] < 15


def test_the_time_of_a_bench_follows_its_flags(server: NullServer) -> None:
    found, _ = examined(server.url, concurrency=(1, 2), duration_s=60.0, warmup=0, max_tokens=(10,))
    assert found["plan"].numbers["levels"] == 2
    assert 120 < found["plan"].numbers["least_s"] < 140
    assert "2 levels" in found["plan"].finding


def test_a_proxy_that_holds_answers_back_is_found(server: NullServer) -> None:
    with proxy(server, hold_s=0.08) as front:
        found, _ = examined(front.url)
    assert found["streaming"].state == "problem"
    assert found["streaming"].numbers["bursts"] <= 3
    assert found["proxy"].state == "note"
    assert "via: 1.1 front" in found["proxy"].finding


def test_a_proxy_that_passes_on_what_comes_is_only_named(server: NullServer) -> None:
    with proxy(server) as front:
        found, _ = examined(front.url)
    assert found["proxy"].state == "note"
    assert found["streaming"].state == "ok"
    assert found["keep-alive"].state == "ok"


def test_a_connection_that_is_closed_after_each_answer_is_told(server: NullServer) -> None:
    with proxy(server, hold_s=0.08, closing=True) as front:
        found, _ = examined(front.url)
    assert found["keep-alive"].state == "note"


def test_counts_that_the_server_does_not_give_are_told() -> None:
    with null_server("--step-us", "2000", "--usage", "none") as server:
        found, _ = examined(server.url)
    assert found["api"].state == "note"
    assert found["api"].numbers["tokens_from"] == "estimated"


def test_what_does_not_answer_is_an_error_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(TargetError, match="--server-url"):
        examine_server(BenchOptions(server_url=f"http://127.0.0.1:{port}"))


def test_headroom_is_the_most_that_the_load_can_bring_against_the_ceiling() -> None:
    """A stream of 100 chunks a second: 200 of them bring 20,000."""
    record = request(0, [(300 + 10 * i, 1) for i in range(64)])
    at = {c: headroom(BenchOptions(concurrency=(1, c)), record, 40_000)[0] for c in (200, 201)}
    assert at[200].numbers["most_per_s"] == pytest.approx(20_000)
    assert (at[200].state, at[201].state) == ("ok", "note")
    assert headroom(BenchOptions(rate=(10.0,), max_tokens=(500,)), record, 40_000)[0].numbers["most_per_s"] == 5000
    assert headroom(BenchOptions(), request(0, []), 40_000) == []
