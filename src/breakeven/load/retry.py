"""How long to wait before a refused request is sent again (`--retry`)."""

from __future__ import annotations

import random
from datetime import UTC
from email.utils import parsedate_to_datetime

__all__ = ["wait_ns"]

#: The first wait and the longest one where the server names none; they double in between.
_SHORTEST_NS, _LONGEST_NS = 500_000_000, 8_000_000_000


def wait_ns(retry_after: bytes | None, retries: int, seed: int, wall_ns: int) -> int:
    """The wait in nanoseconds: what the server asks for, else exponential back-off with jitter.

    Args:
        retry_after: the value of the header, a number of seconds or an HTTP date (RFC 9110, section 10.2.3).
        retries: how often the request has been sent again before.
        seed: what tells this request from the others, so that they don't all come back at once; the same seed waits
            the same time in each run.
        wall_ns: the wall time now, in nanoseconds since 1970.
    """
    asked_ns = _asked_ns(retry_after, wall_ns) if retry_after else None
    if asked_ns is not None:
        return asked_ns
    longest_ns = min(_LONGEST_NS, _SHORTEST_NS << min(retries, 8))
    return random.Random(f"retry {seed} {retries}").randint(longest_ns // 2, longest_ns)


def _asked_ns(retry_after: bytes, wall_ns: int) -> int | None:
    value = retry_after.strip()
    try:
        if value.isdigit():
            return int(value) * 1_000_000_000
        moment = parsedate_to_datetime(value.decode("latin-1"))
        # A date without a zone, as asctime writes it, is in GMT too (RFC 9110, section 5.6.7).
        aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return max(0, int(aware.timestamp() * 1e9) - wall_ns)
    except (ValueError, OverflowError):
        return None
