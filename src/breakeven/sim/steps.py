"""How long a step takes, by the number of decoding requests B and of drafted tokens K: two forms of the same answer.

`roofline` says why: a step reads the weights once (`base_ms`), reads each request's KV cache (`request_ms`), and
computes B·(K+1) tokens, which costs nothing until the arithmetic takes as long as the reading (`knee_tokens`) and
`token_ms` for each token beyond. That one knee is why speculation pays with few requests and costs with many (roofline:
S. Williams et al., CACM 52(4), 2009; applied to verification: TurboSpec, arXiv 2406.14066). In a mixture of experts the
weights read grow with the tokens, 1 - (1 - share)^tokens of them being touched, so that drafts cost most where few
requests run and speculation pays most at middle loads (MoESD, arXiv 2505.19645).

`table` is what was measured or made up: milliseconds at points (B, K).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from functools import lru_cache
from itertools import groupby

from msgspec import Struct

__all__ = ["RooflineSteps", "StepTimes", "TableSteps"]


class RooflineSteps(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="form", tag="roofline"):
    """A step by its parts, all in milliseconds.

    `base_ms` + `request_ms`·B + `token_ms`·(tokens beyond `knee_tokens`) + `expert_ms`·(share of the experts that the
    tokens touch, one token touching `expert_share`) + K drafting passes of `draft_ms` + `draft_request_ms`·B.
    """

    base_ms: float
    request_ms: float = 0.0
    token_ms: float = 0.0
    knee_tokens: float = 0.0
    expert_ms: float = 0.0
    expert_share: float = 1.0
    draft_ms: float = 0.0
    draft_request_ms: float = 0.0

    def __post_init__(self) -> None:
        """Raises ValueError for a time below zero or a share that is none."""
        if not self.base_ms > 0:
            raise ValueError("base_ms must be above 0")
        if not 0 < self.expert_share <= 1:
            raise ValueError("expert_share must be above 0 and at most 1")
        for name in ("request_ms", "token_ms", "knee_tokens", "expert_ms", "draft_ms", "draft_request_ms"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be 0 or more")

    def step_ms(self, batch: int, k: int) -> float:
        """The length of a step that decodes `batch` requests (one or more) with `k` drafted tokens each."""
        tokens = batch * (k + 1)
        read = self.base_ms + self.request_ms * batch + self.expert_ms * (1 - (1 - self.expert_share) ** tokens)
        compute = self.token_ms * max(0.0, tokens - self.knee_tokens)
        return read + compute + k * (self.draft_ms + self.draft_request_ms * batch)

    def why_not(self, k: int) -> str | None:
        """Why steps of this K have no length; None as all have."""
        return None


class TableSteps(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="form", tag="table"):
    """A step by points (batch, K, milliseconds), of which K has one or more batches each.

    Linear in B between points, level below the first, and beyond the last with the slope before it. A K between two
    that are there is linear between those; one outside has no length.
    """

    points: tuple[tuple[float, int, float], ...]

    def __post_init__(self) -> None:
        """Raises ValueError for no points, two at one place, or one without a length."""
        if not self.points:
            raise ValueError("points must hold at least one [batch, k, ms]")
        for batch, k, ms in self.points:
            if not (0 < batch < math.inf and 0 <= k <= 64 and 0 < ms < math.inf):
                raise ValueError(f"the point [{batch:g}, {k}, {ms:g}] needs batch > 0, 0 <= k <= 64 and ms > 0")
        if len({point[:2] for point in self.points}) < len(self.points):
            raise ValueError("points has two at the same batch and k")

    @property
    def ks(self) -> list[int]:
        """The K that have points, ascending."""
        return sorted({k for _, k, _ in self.points})

    def step_ms(self, batch: int, k: int) -> float:
        """The length of a step that decodes `batch` requests (one or more) with `k` drafted tokens each."""
        lines = _lines(self.points)
        if k in lines:
            return _on_line(lines[k], batch)
        return _on_line([(float(each), _on_line(line, batch)) for each, line in lines.items()], k)

    def why_not(self, k: int) -> str | None:
        """Why steps of this K have no length; None if they have."""
        ks = self.ks
        if ks[0] <= k <= ks[-1]:
            return None
        return f"no step times for K={k}: the table has {', '.join(f'K={each}' for each in ks)}"


#: Either form; JSON tells them apart by the field `form`.
StepTimes = RooflineSteps | TableSteps


@lru_cache(maxsize=64)
def _lines(points: tuple[tuple[float, int, float], ...]) -> dict[int, list[tuple[float, float]]]:
    """For each K, ascending, its (batch, ms), ascending."""
    in_order = sorted(points, key=lambda point: (point[1], point[0]))
    return {k: [(batch, ms) for batch, _, ms in line] for k, line in groupby(in_order, key=lambda point: point[1])}


def _on_line(line: list[tuple[float, float]], x: float) -> float:
    """The value at x of a line through points, level before the first, never falling beyond the last."""
    if x <= line[0][0] or len(line) == 1:
        return line[0][1]
    right = min(bisect_right([at for at, _ in line], x), len(line) - 1)
    (x0, y0), (x1, y1) = line[right - 1 : right + 1]
    slope = (y1 - y0) / (x1 - x0)
    return y1 + max(slope, 0.0) * (x - x1) if x > x1 else y0 + slope * (x - x0)
