"""What a `vllm:` arm asks for: `ngram:4`, `eagle3:2`, a table, `eagle3:[[1,4,2],[5,64,0]]`, or a policy that chooses
among some K in the server, `eagle3:auto@0,1,2`, or `…@deep,0,1,2` where it may leave the drafter alone too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from breakeven.errors import UsageError

__all__ = ["METHODS", "MOST_K", "OFF", "Speculation", "parse_speculation"]

METHODS = ("ngram", "eagle3")
"""vLLM's own names of the drafters that can be asked for here."""

OFF = "off"
"""Also `ngram:0` and `eagle3:0`, so that a template of a K has its K = 0."""

MOST_K = 16
"""vLLM has no limit of its own; a typing error shall not cost a minute's start and then a very slow server."""

#: The kinds of policies that the server's own process reads (`decide.modes`).
POLICIES = ("auto", "table", "fixed")

#: Longest and shortest run of tokens that the n-gram drafter looks up in what is there already. vLLM's default is 5
#: and 5, which it calls arbitrary; shorter ones draft more often.
_NGRAM = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}

#: Batch sizes from and to, and the K for them.
_Row = tuple[int, int, int]


class Speculation(NamedTuple):
    """A drafter and its K. `table` has a K for each range of batch sizes, and `k` is then the largest in it.

    With a `policy` (`decide.modes` reads it) the table only declares which K there are; `deep` is its `BREAKEVEN_DEEP`.
    """

    method: str
    k: int
    table: tuple[_Row, ...] = ()
    policy: str | None = None
    deep: bool = False

    def config(self, head: Path | None = None) -> dict[str, Any] | None:
        """vLLM's --speculative-config, None where there is no speculation; `head` is the folder of EAGLE-3's."""
        if self.method == OFF:
            return None
        config: dict[str, Any] = {"method": self.method, "num_speculative_tokens": self.k}
        config |= _NGRAM if self.method == "ngram" else {"model": str(head)}
        return config | ({"num_speculative_tokens_per_batch_size": self.table} if self.table else {})

    def __str__(self) -> str:
        """As it would be written in an arm."""
        if self.method == OFF:
            return OFF
        if self.policy is not None:
            deep = "deep," if self.deep else ""
            return f"{self.method}:{self.policy}@{deep}{','.join(str(k) for *_, k in reversed(self.table))}"
        rows = json.dumps(self.table, separators=(",", ":"))
        return f"{self.method}:{rows if self.table else self.k}"


def parse_speculation(text: str) -> Speculation:
    """Read what stands after `vllm:`; nothing is `off`.

    Raises UsageError for a drafter that is none, a K that can't be, and a table that vLLM would refuse.
    """
    method, _, rest = text.partition(":")
    if text in ("", OFF):
        return Speculation(OFF, 0)
    if method not in METHODS:
        raise _refused(text, f"{method!r} is no drafter of ours: give ngram:K, eagle3:K, or {OFF}")
    if rest.startswith("["):
        table = _parse_table(text, rest)
        return Speculation(method, max(k for _, _, k in table), table)
    if "@" in rest:
        return _parse_policy(text, method, *rest.rsplit("@", 1))
    k = int(rest) if rest.isascii() and rest.isdigit() else -1
    if not 0 <= k <= MOST_K:
        raise _refused(text, f"K, the draft tokens a step, is a whole number from 0 to {MOST_K}, as in {method}:2")
    return Speculation(method, k) if k else Speculation(OFF, 0)


def _parse_policy(text: str, method: str, policy: str, listed: str) -> Speculation:
    """The K of a policy, each at a batch size of its own: the largest at 1, the smallest at all the others."""
    deep = listed.startswith("deep,")
    given = listed.removeprefix("deep,").split(",")
    found = [int(k) for k in given if k.isascii() and k.isdigit()]
    ks = sorted(set(found), reverse=True)
    if len(found) != len(given) or len(ks) < 2 or ks[0] > MOST_K:
        raise _refused(text, f"a policy chooses among two or more K from 0 to {MOST_K}, as in {method}:auto@0,2,4")
    if policy.partition(":")[0] not in POLICIES:
        raise _refused(text, f"{policy!r} is no policy: auto, auto:FILE, table:FILE or fixed:K stands before the @")
    if deep and ks[-1]:
        raise _refused(text, f"deep is beside K = 0, as in {method}:auto@deep,0,1,2")
    return Speculation(method, ks[0], tuple((size, size, k) for size, k in enumerate(ks, 1)), policy, deep)


def _parse_table(text: str, rows: str) -> tuple[_Row, ...]:
    """The table in the order of its batch sizes, checked as vLLM does: v1/spec_decode/dynamic/utils.py in 0.32.0.

    Gaps are allowed, there and after the last row the K before goes on. That all K are 0 is refused as well.
    """
    try:
        read = json.loads(rows)
    except ValueError:
        read = None
    if not isinstance(read, list) or not read or not all(map(_is_row, read)):
        raise _refused(text, "a table is rows of [first batch size, last, K] in whole numbers: [[1,4,2],[5,64,0]]")
    table = tuple(sorted((first, last, k) for first, last, k in read))
    if table[0][0] != 1:
        raise _refused(text, f"the table's first batch size is {table[0][0]}: it has to begin at 1")
    end = 0
    for first, last, k in table:
        if first > last:
            raise _refused(text, f"batch sizes {first} to {last} are none: the smaller one stands first")
        if first <= end:
            raise _refused(text, f"batch size {first} has two rows")
        if not 0 <= k <= MOST_K:
            raise _refused(text, f"K, the draft tokens a step, is a whole number from 0 to {MOST_K}, not {k}")
        end = last
    if not any(k for _, _, k in table):
        raise _refused(text, "every K is 0: use vllm: for a server without speculation")
    return table


def _is_row(row: object) -> bool:
    return isinstance(row, list) and len(row) == 3 and all(type(value) is int for value in row)


def _refused(text: str, why: str) -> UsageError:
    return UsageError(f"vllm:{text if len(text) <= 60 else text[:60] + '…'}: {why}")
