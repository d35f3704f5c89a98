"""The control page of a server: metrics for Prometheus, the state as JSON, and a pin that holds a K for some seconds.

GET /metrics    GET /state    POST /pin {"k": 4, "seconds": 30}    DELETE /pin
"""

from __future__ import annotations

import hmac
import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from breakeven.act.governor import Governor
from breakeven.act.settings import Control
from breakeven.errors import UsageError

__all__ = ["metrics", "open_page"]

#: A pin is some dozen bytes.
_MOST_BODY = 4096
_TIMEOUT_S = 10.0

#: Name, type, help, and the key of the state that has the value.
_SIMPLE = (
    ("active_k", "gauge", "Draft tokens of the step scheduled last", "k"),
    ("decoding_requests", "gauge", "Requests that it decodes, those whose prompt is being read left out", "decoding"),
    ("steps_total", "counter", "Choices of K", "steps"),
    ("switches_total", "counter", "Changes of the K in use, probes left out", "switches"),
    ("probe_steps_total", "counter", "Steps that looked at another K", "probe_steps"),
    ("probe_share", "gauge", "What these cost so far, as a share of all time", "probe_share"),
    (
        "fallback_steps_total",
        "counter",
        "Steps that the declared table decided since a signal failed",
        "fallback_steps",
    ),
    ("policy_seconds_total", "counter", "Time that choices took", "policy_seconds"),
    ("pins_total", "counter", "Pins that were set", "pins"),
)


def metrics(state: Mapping[str, Any]) -> str:
    """A governor's state in Prometheus' text format."""
    lines = []
    for name, kind, meaning, key in _SIMPLE:
        lines += [*_head(name, kind, meaning), f"breakeven:{name} {state[key]:.10g}"]
    lines += _head("pinned_k", "gauge", "The K that is pinned, if one is")
    lines += [f"breakeven:pinned_k {state['pinned']['k']}"] if state["pinned"] else []
    lines += _head("estimated_tokens_per_second", "gauge", "What is believed of each K at this load, all requests")
    lines += [
        f'breakeven:estimated_tokens_per_second{{k="{each["k"]}"}} {each["tokens_per_s"]:.6g}'
        for each in state["estimates"]
    ]
    lines += _head("faults_total", "counter", "Signals that were impossible or missing, and exceptions")
    lines += [f'breakeven:faults_total{{signal="{signal}"}} {count}' for signal, count in state["faults"].items()]
    return "\n".join(lines) + "\n"


def _head(name: str, kind: str, meaning: str) -> list[str]:
    return [f"# HELP breakeven:{name} {meaning}.", f"# TYPE breakeven:{name} {kind}"]


def open_page(governor: Governor, control: Control) -> ThreadingHTTPServer:
    """Serves the page from a thread of its own; `shutdown()` and `server_close()` end it.

    Raises:
        UsageError: its port is taken, or its host is none of this machine's.
    """
    try:
        server = _Server((control.host, control.port), _handler(governor, control.key))
    except OSError as error:
        raise UsageError(
            f"the control page can't listen on {control.host}:{control.port} ({error.strerror}): "
            "set BREAKEVEN_PORT to a free port (0: any)"
        ) from None
    threading.Thread(target=server.serve_forever, name="breakeven control page", daemon=True).start()
    return server


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that went away is nothing to print into the engine's log."""


def _handler(governor: Governor, key: str | None) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _TIMEOUT_S
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._answer(200, metrics(governor.state()), "text/plain; version=0.0.4; charset=utf-8")
            elif self.path in ("/", "/state"):
                self._answer_json(200, governor.state())
            else:
                self._answer_json(404, {"error": "there are /state, /metrics and /pin"})

        def do_POST(self) -> None:
            wanted = self._body()
            if wanted is None or not self._may_pin():
                return
            try:
                governor.pin(wanted.get("k"), wanted.get("seconds"))
            except UsageError as error:
                self._answer_json(400, {"error": str(error)})
            else:
                self._answer_json(200, governor.state())

        def do_DELETE(self) -> None:
            if self._may_pin():
                governor.unpin()
                self._answer_json(200, governor.state())

        def _may_pin(self) -> bool:
            if self.path != "/pin":
                self._answer_json(404, {"error": "pins are at /pin"})
                return False
            given = self.headers.get("Authorization", "").removeprefix("Bearer ")
            if key is not None and not hmac.compare_digest(given.encode(), key.encode()):
                self._answer_json(401, {"error": "the key is missing or wrong: Authorization: Bearer KEY"})
                return False
            return True

        def _body(self) -> Any:
            """The object that was sent; None once an error was answered.

            Only JSON by its name is taken: a page in a browser can't send that elsewhere without asking.
            """
            length = self.headers.get("Content-Length", "")
            if not length.isdecimal() or int(length) > _MOST_BODY:
                self.close_connection = True
                return self._answer_json(400, {"error": f"a body of up to {_MOST_BODY} bytes, with its length"})
            text = self.rfile.read(int(length))
            if self.headers.get_content_type() != "application/json":
                return self._answer_json(415, {"error": "Content-Type: application/json is needed"})
            try:
                wanted = json.loads(text)
            except ValueError:
                wanted = None
            if not isinstance(wanted, dict):
                return self._answer_json(400, {"error": 'the body is an object: {"k": 4, "seconds": 30}'})
            return wanted

        def _answer_json(self, status: int, said: Mapping[str, Any]) -> None:
            self._answer(status, json.dumps(said) + "\n", "application/json")

        def _answer(self, status: int, text: str, kind: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any, **kwargs: Any) -> None:
            """Nothing: requests to this page don't belong into the engine's log."""

    return Handler
