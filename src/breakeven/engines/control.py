"""Pins of K on the control page of a server that breakeven acts in (`act/page.py`): several arms inside one server.

An arm's turn holds its pin from before its first request until after its last one has ended. A pin is a lease, renewed
while the turn lasts, so that none stays for long where breakeven was killed.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
from msgspec import Struct

from breakeven.engines.http import Client, Response, checked_url
from breakeven.errors import TargetError, UsageError

__all__ = ["CONTROL_PORT", "KEY_VARIABLE", "Pin", "Place", "place_of"]

#: Where a control page is if nobody said: `BREAKEVEN_PORT` of the server's process.
CONTROL_PORT = 9310
#: The variable with the key that a pin has to show, which is `BREAKEVEN_KEY` of the server's process.
KEY_VARIABLE = "BREAKEVEN_CONTROL_KEY"
#: The layout of a page's state that is understood.
STATE_SCHEMA = "breakeven.control/1"
#: How long a pin holds by itself, and how often it is looked at and renewed: two lost answers in a row are borne.
LEASE_S, RENEW_S = 60.0, 20.0
#: What a page calls them: nothing is pinned, or the K that is less than none.
_WORDS = {"auto": None, "deep": -1}
#: A page answers within a millisecond, from a process that may be busy.
_TIMEOUT_S = 5.0


class Place(NamedTuple):
    """Where a pinned arm is, as fields of `BenchOptions`: `pin` is a number of draft tokens, `auto` or `deep`."""

    server_url: str
    pin: str
    control_url: str


class _Pinned(Struct, frozen=True):
    k: int


class _State(Struct, frozen=True, kw_only=True):
    """What is used of a page's state; `pins` counts all that were ever set."""

    schema: str
    ks: list[int]
    k: int
    pinned: _Pinned | None = None
    pins: int = 0


def place_of(arm: str, text: str) -> Place:
    """Reads what stands behind `pin:`, as `4@http://HOST:8000`, `auto@…`, `deep@…`, or `4@…#9311` for another port.

    Raises:
        UsageError: K, the URL or the port can't be used.
    """
    pin, _, where = text.partition("@")
    if pin not in _WORDS and not (pin.isascii() and pin.isdecimal()):
        raise UsageError(f"--arm {arm}: {pin[:40]!r} is no number of draft tokens and not auto: pin:4@http://HOST:8000")
    url, hashed, port = where.partition("#")
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--arm {arm}: behind the @ goes the server's URL: pin:{pin}@http://HOST:8000")
    if hashed and not (port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 65536):
        raise UsageError(f"--arm {arm}: behind the # goes the control page's port: pin:{pin}@{url}#{CONTROL_PORT}")
    host = checked_url(url).hostname or ""
    host = f"[{host}]" if ":" in host else host
    page = f"http://{host}:{int(port) if hashed else CONTROL_PORT}"
    return Place(url, pin if pin in _WORDS else str(int(pin)), page)


class Pin:
    """What an arm pins, and where.

    Args:
        arm: its name, for errors.
        pin: a number of draft tokens; `auto`, with which the server's policy decides; `deep`, which leaves the drafter
            alone.
        url: the control page.
        lease_s, renew_s: how long a pin holds by itself, and how often it is looked at and renewed.
    """

    def __init__(self, arm: str, pin: str, url: str, *, lease_s: float = LEASE_S, renew_s: float = RENEW_S) -> None:
        self.k = _WORDS[pin] if pin in _WORDS else int(pin)
        self.renew_s = renew_s
        self._arm, self._url, self._lease_s = arm, url, lease_s

    def check(self) -> None:
        """Finds out whether the page is there, takes our key and declares this K; takes away what pin there is.

        Raises:
            TargetError: it is not so.
        """
        ks = self.state().ks
        if self.k is not None and self.k not in ks:
            raise TargetError(
                f"--arm {self._arm}: the server at {self._url} does not declare "
                f"{f'K={self.k}' if self.k >= 0 else 'deep (BREAKEVEN_DEEP)'}: it may be told {', '.join(map(str, ks))}"
            )
        self.take_away()

    @contextlib.contextmanager
    def held(self) -> Iterator[Hold]:
        """Holds the pin as long as the context, and takes it away then.

        Its beginning and its end ask the page and wait for the answer: nothing must be in flight then.

        Raises:
            TargetError: the page doesn't take it.
        """
        hold, over = Hold(self), threading.Event()
        keeper = threading.Thread(target=hold.keep, args=(over,), name=f"pin of {self._arm}", daemon=True)
        try:
            hold.renew()
            keeper.start()
            yield hold
        finally:
            over.set()
            if keeper.ident is not None:
                keeper.join()
            with contextlib.suppress(TargetError):  # a page that is gone has no pin; else its lease ends by itself
                self.take_away()

    def state(self) -> _State:
        """What the page tells.

        Raises:
            TargetError: there is no page, or it refuses us; so with all that follows.
        """
        return self._read(lambda client: client.get("/state"))

    def set(self) -> _State:
        """Sets the pin or, for `auto`, takes away what pin there is."""
        if self.k is None:
            return self.take_away()
        body = msgspec.json.encode({"k": self.k, "seconds": self._lease_s})
        return self._read(lambda client: client.post("/pin", body))

    def take_away(self) -> _State:
        """Lets the policy decide again."""
        return self._read(lambda client: client.delete("/pin"))

    def _read(self, ask: Callable[[Client], Response]) -> _State:
        key = os.environ.get(KEY_VARIABLE, "").strip()
        with Client(self._url, {"Authorization": f"Bearer {key}"} if key else {}, _TIMEOUT_S) as client:
            try:
                answer = ask(client)
            except TargetError:
                raise self._no_page("no control page answers") from None
        if answer.status == 401:
            raise TargetError(
                f"--arm {self._arm}: the control page at {self._url} refuses "
                f"{'this' if key else 'pins without a'} key: put the server's BREAKEVEN_KEY into {KEY_VARIABLE}"
            )
        try:
            state = msgspec.json.decode(answer.body, type=_State)
        except msgspec.DecodeError:
            state = None
        if answer.status != 200 or state is None or state.schema != STATE_SCHEMA:
            raise self._no_page(f"what answers is no control page of {STATE_SCHEMA} (HTTP {answer.status})")
        return state

    def _no_page(self, what: str) -> TargetError:
        return TargetError(
            f"--arm {self._arm}: {what} at {self._url}: start the server with --scheduler-cls "
            "breakeven.act.vllm.scheduler (docs/vllm.md), or name the page's port: pin:K@URL#PORT"
        )


class Hold:
    """A pin while a turn lasts."""

    def __init__(self, pin: Pin) -> None:
        self._pin = pin
        self._why: str | None = None
        self._pins = 0
        self._lock = threading.Lock()  # a look between a renewal and its answer would take it for somebody else's

    def broken(self) -> str | None:
        """Asks the page whether the pin is as it was set: in words what is wrong, or was before; None if nothing."""
        with self._lock:
            self._why = self._why or self._look()
            return self._why

    def renew(self) -> None:
        """Sets the pin again; raises `TargetError` where the page doesn't take it."""
        with self._lock:
            self._pins = self._pin.set().pins

    def keep(self, over: threading.Event) -> None:
        """Looks at the pin and renews it until `over`."""
        while not over.wait(self._pin.renew_s):
            self.broken()
            with contextlib.suppress(TargetError):  # the next look tells
                self.renew()

    def _look(self) -> str | None:
        try:
            state = self._pin.state()
        except TargetError:
            return "the control page no longer answered"
        wanted, pinned = self._pin.k, state.pinned.k if state.pinned else None
        if pinned != wanted:
            return "the pin was gone" if pinned is None else f"somebody else pinned K={pinned}"
        if state.pins != self._pins:
            return "somebody else set a pin"
        if wanted is not None and state.k != wanted:
            return f"the server used K={state.k}"
        return None
