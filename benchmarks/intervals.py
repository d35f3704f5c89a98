"""How often a throughput interval holds the true throughput, by simulation, with the stopping rule on.

    python benchmarks/intervals.py [--windows 1000] [--seed 1]

Simulated is a closed loop on an engine that verifies drafts: each step takes 50-80 ms with AR(1) noise, more where a
request is admitted (prefill), and gives each slot one token and those accepted of K = 3; how many depends on the kind
of the prompt. The true value is what all windows of a scenario give together. docs/statistics.md has the figures.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from breakeven.measure.stats import BATCHES, Interval, batch_interval

FloatArray = NDArray[np.float64]

PRECISION = 0.05
LOOKS_S = (45.0, 90.0, 180.0)
CAP_S = 240.0
#: Tokens a step and slot: 1 + Binomial(3, p), p by kind; kinds come in turn as in `load.prompts`.
DRAFTED = 3
ACCEPTED = np.linspace(0.35, 0.85, 8)


class Scenario(NamedTuple):
    """An engine and a load. `memory` is the AR(1) coefficient from step to step, `noise` its standard deviation."""

    concurrency: int
    latency_s: float
    memory: float
    noise: float = 0.15
    step_s: float = 0.065
    prefill_s: float = 0.03
    balanced: bool = True
    ramp: bool = True


class Windows(NamedTuple):
    """Simulated levels, a row each: after each step the time since the window opened, and totals up to then."""

    elapsed_s: FloatArray
    tokens: FloatArray
    ended: FloatArray
    latency_s: FloatArray

    @property
    def truth(self) -> float:
        """Tokens a second over all windows up to the cap."""
        return float(np.mean(self._upto(self.tokens, CAP_S) - self._upto(self.tokens, 0.0)) / CAP_S)

    def rates(self, row: int, seconds: float) -> FloatArray:
        """The batch means of one window of a length, as `measure.throughput.batch_rates` has them."""
        edges = np.linspace(0.0, seconds, BATCHES + 1)
        rates: FloatArray = np.diff(np.interp(edges, self.elapsed_s[row], self.tokens[row])) / (seconds / BATCHES)
        return rates

    def interval(self, row: int, seconds: float, *, batch_latencies: float = 2.0) -> tuple[float, Interval | None]:
        """Value and interval of one window; no interval where a batch is shorter than so many mean latencies."""
        rates = self.rates(row, seconds)
        first, last = np.searchsorted(self.elapsed_s[row], [0.0, seconds])
        count = self.ended[row, last] - self.ended[row, first]
        mean_s = (self.latency_s[row, last] - self.latency_s[row, first]) / max(1.0, count)
        enough = seconds / BATCHES >= batch_latencies * mean_s
        return float(rates.mean()), batch_interval(rates) if count and enough else None

    def _upto(self, totals: FloatArray, seconds: float) -> FloatArray:
        return np.array([np.interp(seconds, x, y) for x, y in zip(self.elapsed_s, totals, strict=True)])


def simulate(scenario: Scenario, windows: int, seed: int, seconds: float = CAP_S) -> Windows:
    """Runs `windows` levels of one scenario side by side, each long enough for a window of `seconds`."""
    rng, shape = np.random.default_rng(seed), (windows, scenario.concurrency)
    per_step = 1 + DRAFTED * ACCEPTED.mean()
    max_tokens = scenario.latency_s / scenario.step_s * per_step / 0.7
    sent = rng.integers(0, 8, size=windows)  # where in the order of prompts the level begins

    def kinds(starting: NDArray[np.bool_]) -> NDArray[np.int64]:
        turn: NDArray[np.int64] = (sent[:, None] + np.cumsum(starting, axis=1)) % 8
        return turn if scenario.balanced else rng.integers(0, 8, size=shape)

    def lengths() -> FloatArray:
        drawn: FloatArray = max_tokens * rng.uniform(0.4, 1.0, size=shape)
        return drawn

    share = (rng.permuted(np.tile(np.arange(shape[1]), (windows, 1)), axis=1) + rng.random(shape)) / shape[1]
    left = np.minimum(lengths(), share * max_tokens) if scenario.ramp else lengths()
    accepted = ACCEPTED[kinds(np.ones(shape, dtype=np.bool_))]
    began, ramping, opened_s = np.zeros(shape), np.ones(shape, dtype=np.bool_), np.full(windows, np.nan)
    noise, now_s = rng.normal(0, scenario.noise, windows), np.zeros(windows)
    starting = np.ones(windows) * shape[1]
    rows: list[tuple[FloatArray, ...]] = [(now_s.copy(), *np.zeros((3, windows)))]
    if not scenario.ramp:
        opened_s[:] = 0.0
    while np.isnan(opened_s).any() or (now_s - opened_s).min() <= seconds:
        shock = rng.normal(0, scenario.noise * np.sqrt(1 - scenario.memory**2), windows)
        noise = scenario.memory * noise + shock
        now_s += scenario.step_s * np.exp(noise) + scenario.prefill_s * starting
        gained = np.minimum(1 + rng.binomial(DRAFTED, accepted), np.ceil(left))
        left -= gained
        done = left <= 0
        _, tokens, ended, latency_s = rows[-1]
        took = np.where(done, now_s[:, None] - began, 0.0).sum(axis=1)
        rows.append((now_s.copy(), tokens + gained.sum(axis=1), ended + done.sum(axis=1), latency_s + took))
        ramping &= ~done
        opened_s = np.where(np.isnan(opened_s) & ~ramping.any(axis=1), now_s, opened_s)
        accepted = np.where(done, ACCEPTED[kinds(done)], accepted)
        left, began = np.where(done, lengths(), left), np.where(done, now_s[:, None], began)
        starting = done.sum(axis=1)
        sent += starting
    at_s, tokens, ended, latency_s = (np.array(column).T for column in zip(*rows, strict=True))
    return Windows(at_s - opened_s[:, None], tokens, ended, latency_s)


#: Takes windows and a row: the length of the window it ends with, its value and its interval.
Rule = Callable[[Windows, int], tuple[float, float, Interval | None]]


def at_looks(found: Windows, row: int) -> tuple[float, float, Interval | None]:
    """breakeven's rule: (length, value, interval) of the first look that is precise enough, else of the cap."""
    return _first_narrow(found, row, LOOKS_S)


def each_second(found: Windows, row: int) -> tuple[float, float, Interval | None]:
    """A rule that breakeven does not use: the same, looked at each second from 10 s on."""
    return _first_narrow(found, row, np.arange(10.0, CAP_S, 1.0))


def each_second_of_any_batch(found: Windows, row: int) -> tuple[float, float, Interval | None]:
    """Another: each second, however short the batches are against the latency."""
    return _first_narrow(found, row, np.arange(10.0, CAP_S, 1.0), batch_latencies=0.0)


def of_length(seconds: float) -> Rule:
    """No rule: a window of a given length."""
    return lambda found, row: (seconds, *found.interval(row, seconds))


def _first_narrow(
    found: Windows, row: int, looks_s: Iterable[float], *, batch_latencies: float = 2.0
) -> tuple[float, float, Interval | None]:
    for seconds in looks_s:
        value, interval = found.interval(row, seconds, batch_latencies=batch_latencies)
        if interval is not None and (interval.high - interval.low) / 2 <= PRECISION * value:
            return seconds, value, interval
    return (CAP_S, *found.interval(row, CAP_S))


class Outcome(NamedTuple):
    """What a rule gave over all windows; `coverage` and `half_width` are over those that had an interval."""

    coverage: float
    with_interval: float
    half_width: float
    seconds: float
    bias: float


def judge(found: Windows, rule: Rule) -> Outcome:
    """How a rule fares on simulated windows."""
    truth, results = found.truth, [rule(found, row) for row in range(len(found.elapsed_s))]
    intervals = [interval for *_, interval in results if interval is not None]
    return Outcome(
        coverage=float(np.mean([i.low <= truth <= i.high for i in intervals])) if intervals else float("nan"),
        with_interval=len(intervals) / len(results),
        half_width=float(np.mean([(i.high - i.low) / 2 for i in intervals])) / truth if intervals else float("nan"),
        seconds=float(np.mean([seconds for seconds, *_ in results])),
        bias=float(np.mean([value for _, value, _ in results])) / truth - 1,
    )


SCENARIOS = [
    Scenario(concurrency=concurrency, latency_s=latency_s, memory=memory, step_s=step_s)
    for concurrency, step_s in ((4, 0.05), (16, 0.065), (64, 0.08))
    for latency_s in (3.0, 5.0, 10.0)
    for memory in (0.9, 0.98)
]
RULES: dict[str, Rule] = {
    "45 s": of_length(45.0),
    "60 s": of_length(60.0),
    "120 s": of_length(120.0),
    "240 s": of_length(240.0),
    "looks": at_looks,
    "each second": each_second,
    "each second, any batch": each_second_of_any_batch,
}


def whole_run_bias(latency_s: float, sending_s: float, concurrency: int, rng: np.random.Generator) -> float:
    """What the tail costs a run that starts all at once, sends for a while and counts all until the last end.

    On slots of constant rate, so that the true throughput is that of all slots busy.
    """
    lengths_s = latency_s / 0.7 * rng.uniform(0.4, 1.0, size=(2000, concurrency, int(sending_s / latency_s * 3) + 9))
    ends_s = np.cumsum(lengths_s, axis=2)
    last_s = np.where(ends_s >= sending_s, ends_s, np.inf).min(axis=2)
    return float(np.mean(last_s.mean(axis=1) / last_s.max(axis=1))) - 1


def print_coverage(windows: int, seed: int) -> None:
    """Coverage of each rule in each scenario; `-` where fewer than half of the windows have an interval."""
    print("Coverage in %, of the looks' windows also their mean length, half width and bias:\n")
    print(f"| C | latency s | AR(1) | {' | '.join(RULES)} | length s | half width % | bias % |")
    print("| ---: " * (6 + len(RULES)) + "|")
    for scenario in SCENARIOS:
        found = simulate(scenario, windows, seed)
        outcomes = {name: judge(found, rule) for name, rule in RULES.items()}
        cells = [f"{100 * o.coverage:.1f}" if o.with_interval > 0.5 else "-" for o in outcomes.values()]
        looks = outcomes["looks"]
        print(
            f"| {scenario.concurrency} | {scenario.latency_s:g} | {scenario.memory} | {' | '.join(cells)} "
            f"| {looks.seconds:.0f} | {100 * looks.half_width:.1f} | {100 * looks.bias:+.2f} |",
            flush=True,
        )


def print_starts(windows: int, seed: int) -> None:
    """What the first 30 s and a whole run of 30 s say, against the true throughput."""
    print("\nBias in % of 30 s, C=16:\n")
    print("| latency s | ramp, window | all at once, first 30 s | all at once, whole run |")
    print("| ---: | ---: | ---: | ---: |")
    for latency_s in (3.0, 5.0, 10.0):
        ramped = simulate(Scenario(16, latency_s, 0.9), windows, seed)
        at_once = simulate(Scenario(16, latency_s, 0.9, ramp=False), windows, seed, 30.0)
        biases = [float(np.mean([f.rates(i, 30.0).mean() for i in range(windows)])) for f in (ramped, at_once)]
        cells = [f"{100 * (value / ramped.truth - 1):+.1f}" for value in biases]
        whole = whole_run_bias(latency_s, 30.0, 16, np.random.default_rng(seed))
        print(f"| {latency_s:g} | {' | '.join(cells)} | {100 * whole:+.1f} |", flush=True)


def print_orders(windows: int, seed: int) -> None:
    """What the balanced order of prompts does to the spread of a minute."""
    print("\nStandard deviation in % of 60 s of throughput, C=4:\n")
    print("| latency s | kinds in turn | kinds at random |")
    print("| ---: | ---: | ---: |")
    for latency_s in (3.0, 5.0, 10.0):
        spreads = []
        for balanced in (True, False):
            found = simulate(Scenario(4, latency_s, 0.9, balanced=balanced), windows, seed, 60.0)
            values = np.array([found.rates(i, 60.0).mean() for i in range(windows)])
            spreads.append(f"{100 * values.std() / values.mean():.2f}")
        print(f"| {latency_s:g} | {' | '.join(spreads)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=1000, help="per scenario (1000)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    began = time.perf_counter()
    print_coverage(args.windows, args.seed)
    print_starts(args.windows, args.seed)
    print_orders(args.windows, args.seed)
    print(f"\n{args.windows} windows each, seed {args.seed}, {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
