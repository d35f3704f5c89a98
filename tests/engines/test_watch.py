"""Watching how many requests a server has in flight."""

from __future__ import annotations

import http.client
import http.server
import json
import threading

import pytest

from breakeven.engines.null import null_server
from breakeven.engines.watch import watch_in_flight
from breakeven.errors import TargetError


def test_requests_that_run_and_wait_are_counted_and_nothing_else_is_sent() -> None:
    with null_server("--step-us", "20000", "--max-batch", "1") as server:
        done = [threading.Thread(target=_ask, args=(server.port,)) for _ in range(3)]
        for thread in done:
            thread.start()
        said: list[str] = []
        found = watch_in_flight(server.url, 1.0, said.append, every_s=0.05)
        for thread in done:
            thread.join()
        assert len(server.truth()) == 3
    assert max(in_flight for _, in_flight in found) == 3
    assert found[-1][0] >= 1.0
    assert len(said) == 1


def _ask(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    body = json.dumps({"model": "null", "prompt": "x", "max_tokens": 40})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    connection.getresponse().read()
    connection.close()


def test_a_server_that_isnt_there_or_shows_nothing_is_named() -> None:
    with pytest.raises(TargetError, match=r"--profile connection refused at http://127\.0\.0\.1:9") as caught:
        watch_in_flight("http://127.0.0.1:9/metrics", 1.0, print)
    assert "--server-url" not in str(caught.value)
    with (
        null_server() as server,
        pytest.raises(TargetError, match="answered with status 404: is it the metrics page"),
    ):
        watch_in_flight(f"{server.url}/no/metrics", 1.0, print)


def test_what_is_watched_is_said_once_however_often_the_server_is_silent() -> None:
    answers = iter(["vllm:num_requests_running 3\n"])

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = next(answers, None)
            self.send_response(200 if text else 500)
            self.send_header("Content-Length", str(len(text or "")))
            self.end_headers()
            self.wfile.write((text or "").encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        said: list[str] = []
        with pytest.raises(TargetError, match="answered with status 500"):
            watch_in_flight(f"http://127.0.0.1:{server.server_port}", 5.0, said.append, every_s=0.01)
        server.shutdown()
    assert len(said) == 1
