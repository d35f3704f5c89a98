"""Arrivals of many requests as columns, which is what every number is computed from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from breakeven.records import RequestRecord

__all__ = ["ArrivalTable", "IntArray"]

IntArray = NDArray[np.int64]


class ArrivalTable:
    """Arrivals in rows, request after request; requests without one are not in it.

    Columns, each of shape (arrivals,): `at_ns` (absolute), `tokens`, `before_ns` (the same request's arrival before;
    the row's own where it is the first), `is_first`. Per request, each of shape (requests,): `first` and `last`, the
    numbers of its first and last row, and `sent_ns`.
    """

    def __init__(self, requests: Sequence[tuple[int, Sequence[tuple[int, int]]]]) -> None:
        requests = [request for request in requests if request[1]]
        sizes = np.array([len(arrivals) for _, arrivals in requests], dtype=np.int64)
        flat = list(chain.from_iterable(arrivals for _, arrivals in requests))
        rows = np.array(flat, dtype=np.int64).reshape(-1, 2)
        self.sent_ns: IntArray = np.array([sent_ns for sent_ns, _ in requests], dtype=np.int64)
        self.last: IntArray = np.cumsum(sizes) - 1
        self.first: IntArray = self.last - sizes + 1
        self.at_ns: IntArray = rows[:, 0] + np.repeat(self.sent_ns, sizes)
        self.tokens: IntArray = rows[:, 1]
        self.is_first = np.zeros(len(rows), dtype=np.bool_)
        self.is_first[self.first] = True
        self.before_ns: IntArray = np.where(self.is_first, self.at_ns, np.roll(self.at_ns, 1))

    @classmethod
    def of(cls, records: Iterable[RequestRecord]) -> ArrivalTable:
        """The table of records; those that were never sent are left out."""
        return cls([(record.sent_ns, record.arrivals) for record in records if record.sent_ns is not None])

    @property
    def e2e_ns(self) -> IntArray:
        """Per request, from first byte written to last output."""
        return self.at_ns[self.last] - self.sent_ns

    def without_empty(self) -> tuple[IntArray, IntArray]:
        """Gaps (ns) and tokens of the later arrivals, where one that adds no token joins the next."""
        kept = self.is_first | (self.tokens > 0)
        at_ns, is_first, tokens = self.at_ns[kept], self.is_first[kept], self.tokens[kept]
        later = ~is_first
        return (at_ns - np.roll(at_ns, 1))[later], tokens[later]
