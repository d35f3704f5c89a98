from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from breakeven.decide.slo import LoadLatencies, Slo, largest_load, parse_slos
from breakeven.errors import UsageError
from breakeven.measure.stats import Distribution


def levels(ttft_p99: Sequence[float | None], tpot_p50: Sequence[float], requests: int = 400) -> list[LoadLatencies]:
    return [
        LoadLatencies(
            2.0**i,
            requests,
            {
                "ttft": Distribution(count=requests, p99=ttft),
                "tpot": Distribution(count=requests, p50=tpot),
            },
        )
        for i, (ttft, tpot) in enumerate(zip(ttft_p99, tpot_p50, strict=True))
    ]


SLOS = parse_slos("ttft_p99:2000,tpot_p50:50")


def test_limits_are_read_as_written() -> None:
    assert parse_slos("ttft_p99:2000, TPOT_p50:50.5,e2e_mean:.5") == (
        Slo("ttft", "p99", 2000.0),
        Slo("tpot", "p50", 50.5),
        Slo("e2e", "mean", 0.5),
    )
    assert str(parse_slos("itl_p95:20")[0]) == "itl_p95:20"


@pytest.mark.parametrize(
    "text",
    ["", "ttft", "ttft_p99", "ttft_p98:5", "icl_p50:5", "ttft_p99:", "ttft_p99:-5", "ttft_p99:0", "ttft_p99:nan",
     "ttft_p99:5,", "ttft_p99=5", "ttft_p99:1e3"],
)  # fmt: skip
def test_what_is_no_limit_gets_one_line_with_the_mend(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--slo: .*for instance ttft_p99:2000") as caught:
        parse_slos(text)
    assert "\n" not in str(caught.value)


def test_one_latency_has_one_limit() -> None:
    with pytest.raises(UsageError, match="ttft_p99 is limited twice"):
        parse_slos("ttft_p99:5,ttft_p99:6")


def test_between_two_loads_the_limit_is_met_on_a_line_over_log_load() -> None:
    found = largest_load(SLOS, levels([500, 1000, 1500, 2500], [20, 30, 35, 40]))
    assert (found.last_held, found.load) == (4, pytest.approx(4 * math.sqrt(2)))
    assert [(str(v.slo), v.load, v.value_ms) for v in found.violations] == [("ttft_p99:2000", 8, 2500)]


def test_the_first_limit_to_break_decides() -> None:
    found = largest_load(SLOS, levels([500, 1000, 1500, 2500], [20, 30, 49, 149]))
    assert found.load == pytest.approx(4 * 2**0.01)
    assert len(found.violations) == 2


def test_only_the_loads_from_the_lowest_on_count() -> None:
    found = largest_load(SLOS, levels([500, 3000, 600, 700], [20] * 4))
    assert (found.last_held, found.load) == (1, pytest.approx(2**0.6))


def test_limits_held_everywhere_give_at_least_the_highest_load() -> None:
    found = largest_load(SLOS, levels([500, 600], [20, 20]))
    assert (found.load, found.violations) == (2, ())


def test_limits_held_nowhere_give_no_load() -> None:
    found = largest_load(SLOS, levels([5000, 6000], [20, 20]))
    assert (found.load, found.last_held, found.violations[0].load) == (None, None, 1)


def test_a_limit_held_to_the_digit_is_held() -> None:
    assert largest_load(SLOS, levels([2000, 2500], [20, 20])).load == 1


def test_a_load_without_that_latency_does_not_hold() -> None:
    found = largest_load(SLOS, levels([500, None], [20, 20]))
    assert (found.load, found.violations[0].value_ms) == (1, None)


def test_a_p99_of_few_requests_is_marked() -> None:
    few = largest_load(SLOS, levels([500, 600], [20, 20], requests=299))
    assert few.rumours == ((SLOS[0], (1, 2)),)
    assert largest_load(SLOS, levels([500, 600], [20, 20], requests=300)).rumours == ()


def test_no_level_holds_nothing() -> None:
    assert largest_load(SLOS, []).load is None


def visits(metric: str, values: Sequence[float], count: int = 150) -> tuple[dict[str, Distribution], ...]:
    return tuple({metric: Distribution(count=count, p50=value, p99=value)} for value in values)


def test_the_largest_load_has_an_interval_by_the_noise_between_visits() -> None:
    """At 1 the limit surely holds, at 4 it surely breaks, and at 2 nobody can tell."""
    found = largest_load(
        parse_slos("tpot_p50:50"),
        [
            LoadLatencies(
                load, 900, {"tpot": Distribution(count=900, p50=at)}, visits("tpot", (at - 1, at, at + 1) * 2)
            )
            for load, at in ((1.0, 30.0), (2.0, 49.9), (4.0, 80.0))
        ],
    )
    assert found.load is not None
    assert found.ci95 is not None
    assert 1.5 < found.ci95.low < found.load < found.ci95.high < 2.5
    assert found.ci95.low < 2.0 < found.ci95.high


def test_visits_too_short_for_a_p99_give_no_interval() -> None:
    for count, is_there in ((150, True), (99, False)):
        measured = [
            LoadLatencies(
                load, 900, {"ttft": Distribution(count=900, p99=at)}, visits("ttft", (at - 9, at, at + 9) * 2, count)
            )
            for load, at in ((1.0, 300.0), (2.0, 800.0))
        ]
        assert (largest_load(parse_slos("ttft_p99:500"), measured).ci95 is not None) == is_there
