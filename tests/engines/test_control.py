"""Pins on a control page, over real sockets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from breakeven.engines.control import Pin, place_of
from breakeven.engines.null import null_server
from breakeven.errors import UsageError
from tests.controlled import Controlled, controlled


@pytest.fixture(scope="module")
def server() -> Iterator[Controlled]:
    with controlled() as running:
        yield running


def pinned(server: Controlled) -> int | None:
    own: dict[str, int] | None = server.ask("GET", "/state")[1]["pinned"]
    return None if own is None else own["k"]


def test_the_page_is_on_the_servers_host_at_its_usual_port_or_at_the_given_one() -> None:
    assert place_of("a", "4@http://gpu1:8000") == ("http://gpu1:8000", "4", "http://gpu1:9310")
    assert place_of("a", "auto@https://gpu1/proxy#99") == ("https://gpu1/proxy", "auto", "http://gpu1:99")
    assert place_of("a", "deep@http://gpu1:8000").pin == "deep"
    assert place_of("a", "04@http://[::1]:8000") == ("http://[::1]:8000", "4", "http://[::1]:9310")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x@http://a", "--arm a: 'x' is no number of draft tokens and not auto"),
        ("-1@http://a", "'-1' is no number"),
        ("{k}@http://a", "is no number"),
        ("http://a", "'http://a' is no number"),
        ("4@a:8000", "behind the @ goes the server's URL"),
        ("4", "behind the @ goes the server's URL"),
        ("4@http://a#x", "behind the # goes the control page's port"),
        ("4@http://a#0", "behind the # goes the control page's port"),
        ("4@http://a#65536", "behind the # goes the control page's port"),
        ("4@http://", "is no URL"),
    ],
)
def test_a_place_that_cant_be_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        place_of("a", text)
    assert "\n" not in str(caught.value)


def test_a_pin_holds_as_long_as_its_turn_and_is_taken_away_whatever_happens(server: Controlled) -> None:
    def turn() -> None:
        with Pin("on", "4", server.page).held() as hold:
            assert pinned(server) == 4
            assert hold.broken() is None
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        turn()
    assert pinned(server) is None


def test_a_pin_is_renewed_where_a_turn_outlasts_it(server: Controlled) -> None:
    with Pin("on", "4", server.page, lease_s=3, renew_s=0.2).held() as hold:
        time.sleep(4)
        assert pinned(server) == 4
        assert hold.broken() is None


def test_auto_takes_away_the_pin_of_somebody_before(server: Controlled) -> None:
    server.ask("POST", "/pin", {"k": 2, "seconds": 60})
    with Pin("auto", "auto", server.page).held() as hold:
        assert pinned(server) is None
        assert hold.broken() is None


@pytest.mark.parametrize(
    ("pin", "deed", "words"),
    [
        ("4", lambda page: page.ask("POST", "/pin", {"k": 2, "seconds": 60}), "somebody else pinned K=2"),
        ("4", lambda page: page.ask("POST", "/pin", {"k": 4, "seconds": 60}), "somebody else set a pin"),
        ("4", lambda page: page.ask("DELETE", "/pin"), "the pin was gone"),
        ("auto", lambda page: page.ask("POST", "/pin", {"k": 0, "seconds": 60}), "somebody else pinned K=0"),
    ],
)
def test_a_pin_that_is_not_as_it_was_set_is_told(
    server: Controlled, pin: str, deed: Callable[[Controlled], object], words: str
) -> None:
    with Pin("on", pin, server.page).held() as hold:
        assert hold.broken() is None
        deed(server)
        assert hold.broken() == words
    assert pinned(server) is None


def test_a_pin_that_was_gone_for_a_while_is_told_though_it_was_renewed(server: Controlled) -> None:
    with Pin("on", "4", server.page, renew_s=0.2).held() as hold:
        server.ask("DELETE", "/pin")
        until_s = time.monotonic() + 20
        while pinned(server) is None and time.monotonic() < until_s:
            time.sleep(0.05)
        assert pinned(server) == 4
        assert hold.broken() == "the pin was gone"


def test_a_k_that_the_server_doesnt_declare_is_refused_with_those_that_it_does(server: Controlled) -> None:
    with pytest.raises(UsageError, match=r"--arm on: the server at .* does not declare K=3: it may be told 0, 2, 4"):
        Pin("on", "3", server.page).check()


def test_where_no_page_answers_it_is_told_how_to_start_the_server() -> None:
    for url in ("http://127.0.0.1:1", "http://no-such-host.invalid:9310"):
        with pytest.raises(UsageError, match=r"no control page answers at .* --scheduler-cls breakeven\.act") as caught:
            Pin("on", "4", url).check()
        assert "docs/vllm.md" in str(caught.value)
    with null_server() as other, pytest.raises(UsageError, match="what answers is no control page of"):
        Pin("on", "4", other.url).check()


def test_a_page_that_wants_a_key_gets_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BREAKEVEN_CONTROL_KEY", raising=False)
    with controlled("secret-1") as server:
        pin = Pin("on", "4", server.page)
        with pytest.raises(UsageError, match="refuses pins without a key: put the server's BREAKEVEN_KEY into"):
            pin.check()
        monkeypatch.setenv("BREAKEVEN_CONTROL_KEY", "secret-2")
        with pytest.raises(UsageError, match="refuses this key") as caught:
            pin.check()
        assert "secret" not in str(caught.value)
        monkeypatch.setenv("BREAKEVEN_CONTROL_KEY", "secret-1")
        pin.check()
        with pin.held():
            assert pinned(server) == 4
