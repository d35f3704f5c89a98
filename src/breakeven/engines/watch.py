"""How many requests a server has in flight, watched from outside: its metrics page is read, nothing else is sent."""

from __future__ import annotations

import time
from collections.abc import Callable

from breakeven.engines.http import Client, shown
from breakeven.engines.metrics import parse_metrics
from breakeven.errors import TargetError

__all__ = ["watch_in_flight"]

_EVERY_S = 1.0
#: Silences in a row after which the server is taken to be gone.
_MOST_SILENCES = 10


def watch_in_flight(
    url: str, seconds: float, say: Callable[[str], None], every_s: float = _EVERY_S
) -> list[tuple[float, float]]:
    """Seconds since the start, and requests in flight (running and waiting) at each reading.

    Args:
        url: of the metrics page; `/metrics` is added to a root.
        seconds: for how long.
        say: told how it goes.
        every_s: between two readings.

    Raises:
        TargetError: the page can't be read, shows no running requests, or the server was gone for ten readings.
    """
    page = url if url.rstrip("/").endswith("metrics") else f"{url.rstrip('/')}/metrics"
    found: list[tuple[float, float]] = []
    began_s, silences = time.monotonic(), 0
    with Client(page, {}, timeout_s=5.0) as client:
        while (at_s := time.monotonic() - began_s) < seconds or not found:
            try:
                found.append((at_s, _in_flight(client, page)))
                silences = 0
                if len(found) == 1:
                    say(f"watching {shown(page)} for {seconds:.0f} s: {found[0][1]:g} requests in flight")
            except TargetError as error:
                silences += 1
                if not found or silences >= _MOST_SILENCES:
                    raise TargetError(f"--profile {error}".replace(" (--server-url)", "")) from None
            time.sleep(max(0.0, min(every_s, seconds - (time.monotonic() - began_s))))
    return [*found, (max(seconds, found[-1][0] + every_s), found[-1][1])]


def _in_flight(client: Client, page: str) -> float:
    answer = client.get("")
    if answer.status != 200:
        raise TargetError(f"{shown(page)} answered with status {answer.status}: is it the metrics page?")
    scrape = parse_metrics("other", answer.body)
    if scrape.running is None:
        raise TargetError(
            f"{shown(page)} shows no running requests: give the metrics page of vLLM, SGLang or llama.cpp"
        )
    return scrape.running + (scrape.waiting or 0.0)
