"""How many prompts get another text, between arms and between two passes of one. Information, never a verdict.

Batching changes the order of sums, and near ties then pick another token: an engine differs from itself. What differs
between arms is to be read beside that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist

from msgspec import Struct

from breakeven.measure.stats import Interval

__all__ = ["Difference", "differing", "wilson"]

_EXAMPLES = 3


class Difference(Struct, frozen=True, kw_only=True):
    """Prompts that both sides answered, and how many of the answers differ.

    `share` and `ci95` are None without any such prompt; `examples` are the first prompts that differ, with the number
    of characters that the answers have in common at their start.
    """

    prompts: int
    differ: int
    share: float | None
    ci95: Interval | None
    examples: tuple[tuple[str, int], ...] = ()


def differing(first: Mapping[str, str], second: Mapping[str, str]) -> Difference:
    """Compares texts by prompt.

    Args:
        first, second: by prompt the text of one answer, of the same largest length on both sides. Prompts that only one
            side answered don't count.
    """
    both = sorted(first.keys() & second.keys())
    differ = [prompt for prompt in both if first[prompt] != second[prompt]]
    return Difference(
        prompts=len(both),
        differ=len(differ),
        share=len(differ) / len(both) if both else None,
        ci95=wilson(len(differ), len(both)) if both else None,
        examples=tuple((prompt, _common(first[prompt], second[prompt])) for prompt in differ[:_EXAMPLES]),
    )


def wilson(hits: int, count: int) -> Interval:
    """The 95 % score interval of a share (E. B. Wilson, *J. Am. Statist. Assoc.* 22, 1927), right near 0 and 1 too."""
    z = NormalDist().inv_cdf(0.975)
    share, shrunk = hits / count, 1 + z * z / count
    middle = (share + z * z / (2 * count)) / shrunk
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / shrunk
    return Interval(max(0.0, middle - half), min(1.0, middle + half))


def _common(first: str, second: str) -> int:
    pairs = zip(first, second, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
