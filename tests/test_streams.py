"""Many streams at once, as benchmarks/streams.py has them: nothing is lost, and memory has a bound."""

from __future__ import annotations

from benchmarks.streams import Load, measure


def test_of_a_thousand_streams_every_request_and_every_token_is_there() -> None:
    found = measure(Load([1000], 200, 4, 0.3))
    assert found.faults == []
    assert found.ended > 1200
    assert found.levels[0]["in_flight"]["max"] > 800  # a busy machine refills late
    assert found.peak_kib < 60 * 1024 + 1000 * 60  # some 47 MiB, and 20 to 30 KiB a stream
