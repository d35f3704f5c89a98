"""The control page, over a socket."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from breakeven.act.governor import Governor
from breakeven.act.page import open_page
from breakeven.act.settings import Control
from breakeven.decide.policy import Policy
from breakeven.errors import UsageError


@contextlib.contextmanager
def page(**control: Any) -> Iterator[tuple[Governor, int]]:
    """A governor of K 0, 2 and 4 with its page, and the port of that."""
    governor = Governor(Policy([0, 2, 4], mode=0), "fixed:0")
    server = open_page(governor, Control(port=0, **control))
    try:
        yield governor, server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def ask(port: int, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """The status, and the answer: read if it is JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        text = body if isinstance(body, str) else json.dumps(body)
        sent = {"Content-Type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, None if body is None else text, sent)
        answer = connection.getresponse()
        read = answer.read().decode()
        kind = answer.headers["Content-Type"]
        return answer.status, json.loads(read) if kind == "application/json" else read
    finally:
        connection.close()


def test_shows_the_state_and_the_same_as_metrics() -> None:
    with page() as (governor, port):
        governor.choose(7, 0, 0.5)
        governor.fault("load")
        governor.pin(4, 60)
        status, state = ask(port, "GET", "/state")
        assert (status, state["decoding"], state["pinned"]["k"]) == (200, 7, 4)
        status, text = ask(port, "GET", "/metrics")
        families = {family.name: family for family in text_string_to_metric_families(text)}
        values = {
            (sample.name, *sample.labels.values()): sample.value
            for family in families.values()
            for sample in family.samples
        }
        assert status == 200
        assert values["breakeven:decoding_requests",] == 7
        assert values["breakeven:steps_total",] == 1
        assert values["breakeven:pinned_k",] == 4
        assert values["breakeven:faults_total", "load"] == 1
        assert {name[1] for name in values if name[0] == "breakeven:estimated_tokens_per_second"} == {"0", "2", "4"}
        assert families["breakeven:active_k"].type == "gauge"


def test_no_k_is_pinned_where_none_is() -> None:
    with page() as (_, port):
        families = text_string_to_metric_families(ask(port, "GET", "/metrics")[1])
        assert [family.samples for family in families if family.name == "breakeven:pinned_k"] == [[]]


def test_pins_and_takes_the_pin_away() -> None:
    with page() as (governor, port):
        status, state = ask(port, "POST", "/pin", {"k": 2, "seconds": 60})
        assert (status, state["pinned"]["k"]) == (200, 2)
        assert governor.choose(1, 0, 0.0) == 2
        assert ask(port, "DELETE", "/pin")[1]["pinned"] is None
        assert governor.choose(1, 0, 0.0) == 0


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"k": 3, "seconds": 1}, 400, "K=3 is not declared: the server may be told 0, 2, 4"),
        ({"k": 2}, 400, "seconds=None"),
        ({"seconds": 2}, 400, "K=None"),
        ([], 400, "object"),
        ("{", 400, "object"),
        ("x" * 5000, 400, "4096 bytes"),
    ],
)
def test_says_what_is_wrong_with_a_pin(body: Any, status: int, says: str) -> None:
    with page() as (governor, port):
        found, answer = ask(port, "POST", "/pin", body)
        assert found == status
        assert says in answer["error"]
        assert governor.choose(1, 0, 0.0) == 0


def test_a_browser_that_sends_a_form_cant_pin() -> None:
    with page() as (_, port):
        assert ask(port, "POST", "/pin", {"k": 2, "seconds": 9}, Content_Type="text/plain")[0] == 415


def test_a_pin_needs_the_key_where_there_is_one() -> None:
    with page(key="secret") as (governor, port):
        pin = {"k": 2, "seconds": 60}
        assert ask(port, "POST", "/pin", pin)[0] == 401
        assert ask(port, "POST", "/pin", pin, Authorization="Bearer wrong")[0] == 401
        assert ask(port, "DELETE", "/pin")[0] == 401
        assert governor.choose(1, 0, 0.0) == 0
        assert ask(port, "POST", "/pin", pin, Authorization="Bearer secret")[0] == 200
        status, state = ask(port, "GET", "/state")
        assert status == 200
        assert "secret" not in json.dumps(state)


def test_there_is_nothing_elsewhere() -> None:
    with page() as (_, port):
        assert ask(port, "GET", "/pin")[0] == 404
        assert ask(port, "POST", "/state", {"k": 2, "seconds": 1})[0] == 404


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UsageError, match=rf"127\.0\.0\.1:{port}.*BREAKEVEN_PORT"):
            open_page(Governor(Policy([0, 2]), "auto"), Control(port=port))
