"""The line that shows progress."""

from __future__ import annotations

import io

import pytest

from breakeven.report.live import Live


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_line_is_rewritten_and_never_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    live = Live(stream, quiet=False)
    live.update("x" * 200)
    live.say("done")
    assert stream.getvalue() == "\r" + "x" * 39 + "\x1b[K" + "\r\x1b[K" + "done\n"


def test_elsewhere_lines_come_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    stream = io.StringIO()
    live = Live(stream, quiet=False)
    for _ in range(25):
        now_s += 1.0
        live.update(f"at {now_s:.0f}")
    assert stream.getvalue() == "at 10\nat 20\n"


def test_quiet_shows_only_what_stays() -> None:
    stream = Terminal()
    live = Live(stream, quiet=True)
    live.update("now")
    live.say("done")
    assert stream.getvalue() == "done\n"


def test_a_reader_that_is_gone_does_not_stop_the_run() -> None:
    stream = io.StringIO()
    live = Live(stream, quiet=False)
    stream.close()
    live.say("done")
