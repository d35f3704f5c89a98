"""One arm against the best of several at a load, whose best is not known and must not be picked by luck.

The best of arms that were measured with noise looks better than it is: who is compared with it is flattered by nobody
and wronged by everybody's luck. So the blocks (turns in which every arm had its visit) are parted in two; the best arm
is chosen on the one half and compared on the other, and the other way round (cross-fitting, as in V. Chernozhukov and
others, *Econometrics Journal* 21, 2018). Chosen in noise, it is now and then not the best: then the tested arm is
flattered, by no more than the arms differ, and by nothing where they are equal. The lower end of the interval allows
for that; docs/statistics.md has the coverage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct, structs

from breakeven.decide.ratio import NoRatio, log_mean, paired
from breakeven.decide.student import t_quantile, two_sided_p
from breakeven.measure.stats import FloatArray, Interval

__all__ = ["EnvelopeRatio", "envelope_ratio", "over_levels"]

#: The share of what the chosen arms lag behind the one that leads over all blocks that the lower end allows for. By
#: simulation, where up to five arms can't be told apart at any of six levels, the geometric mean's interval covers down
#: to 70 % without it, to 90 % with a half and to 94 % with this. Where one arm leads clearly the lag is 0.
_ALLOWED = 0.75
#: From so many blocks on both halves can hold whole ABBA cycles, in which no arm always comes first.
_CYCLES_FROM = 4


class EnvelopeRatio(Struct, frozen=True, kw_only=True):
    """The tested arm over the best of the others, at one load or as the geometric mean over several.

    Attributes:
        log: the estimate, natural logarithm.
        se, df: its standard error and degrees of freedom.
        lag: by how much, on the log scale, the arms that were chosen may lag behind the best; 0 where one leads.
        n: blocks, or loads.
        best: the arms that were chosen, that of the first half first; one where both halves chose the same.
    """

    log: float
    se: float
    df: float
    lag: float
    n: int
    best: tuple[str, ...] = ()

    @property
    def value(self) -> float:
        """The ratio itself."""
        return math.exp(self.log)

    @property
    def half_width(self) -> float:
        """Half of the 95 % interval's width on the log scale: 0.03 is about 3 %."""
        return self.interval().log_half_width

    def interval(self, confidence: float = 0.95) -> Interval:
        """Student's t interval, its lower end lowered by the allowance for a wrong choice."""
        half = t_quantile((1 + confidence) / 2, self.df) * self.se
        return Interval(math.exp(self.log - self.lag - half), math.exp(self.log + half))

    def p_value(self, value: float) -> float:
        """Two-sided, of the ratio being `value`."""
        return two_sided_p((self.log - math.log(value)) / self.se, self.df)

    def after(self, times: float) -> EnvelopeRatio:
        """What it would be after so many times the blocks, if estimate and noise stay what they are."""
        shrunk = math.sqrt(times)
        return structs.replace(
            self, se=self.se / shrunk, df=self.df * times, lag=self.lag / shrunk, n=round(self.n * times)
        )


def envelope_ratio(
    tuned: Sequence[float],
    static: Mapping[str, Sequence[float]],
    *,
    name: str = "the tuned arm",
) -> EnvelopeRatio | NoRatio:
    """The tuned arm over the best static one at a load.

    Args:
        tuned: its throughput in each block, in their order.
        static: the others' in the same blocks, two arms or more.
        name: what the tuned arm is called where it failed.
    """
    for arm, rates in static.items():
        if isinstance(failed := log_mean(rates), NoRatio) and failed.reason in ("arm_failed", "some_failed"):
            return NoRatio(failed.reason, f"{arm}: {failed.detail}")
    names = list(static)
    logs = np.log(np.array([static[arm] for arm in names], dtype=np.float64))
    chosen = _chosen(logs)
    best = logs[chosen, np.arange(logs.shape[1])]
    ratio = paired(np.exp(best).tolist(), tuned, names=("the best static arm", name))
    if isinstance(ratio, NoRatio):
        return ratio
    leader = logs[logs.mean(axis=1).argmax()]
    return EnvelopeRatio(
        log=ratio.log,
        se=ratio.se,
        df=ratio.df,
        lag=_ALLOWED * max(0.0, float((leader - best).mean())),
        n=ratio.n,
        best=tuple(dict.fromkeys(names[place] for place in chosen)),
    )


def over_levels(ratios: Sequence[EnvelopeRatio]) -> EnvelopeRatio:
    """The geometric mean over loads, which were measured one after the other: variances add up.

    Degrees of freedom after F. E. Satterthwaite (*Biometrics Bulletin* 2, 1946). Lags are no noise: they are averaged
    as they are.
    """
    variances = np.array([ratio.se**2 for ratio in ratios])
    squares = float((variances**2 / np.array([ratio.df for ratio in ratios])).sum())
    return EnvelopeRatio(
        log=float(np.mean([ratio.log for ratio in ratios])),
        se=math.sqrt(variances.sum()) / len(ratios),
        df=float(variances.sum() ** 2 / squares),
        lag=float(np.mean([ratio.lag for ratio in ratios])),
        n=len(ratios),
    )


def _chosen(logs: FloatArray) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """For each block the arm that was best in the blocks of the other half; `logs` has a row for each arm."""
    blocks = np.arange(logs.shape[1])
    half = blocks // 2 % 2 if len(blocks) >= _CYCLES_FROM else blocks % 2
    chosen = np.zeros(len(blocks), dtype=np.intp)
    for mine in (0, 1):
        others = logs[:, half != mine]
        if others.size:
            chosen[half == mine] = others.mean(axis=1).argmax()
    return chosen
