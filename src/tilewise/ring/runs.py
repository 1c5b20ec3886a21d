"""Sets of rows, kept as the few arithmetic runs that they are: a contiguous shard is one, a zigzag shard two, a striped one
a single run with a step. Rows of the sequence and rows of a buffer are written the same way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from .._errors import OptionError


@dataclass(frozen=True)
class Runs:
    """Strictly increasing rows, as ranges one after the other.

    >>> zigzag = Runs((range(2, 4), range(8, 10)))
    >>> zigzag.count, zigzag.array(), zigzag.take(Runs.span(1, 3)).array()
    (4, array([2, 3, 8, 9]), array([3, 8]))
    >>> Runs((range(3, 4), range(8, 9))).within(zigzag).array()     # the inverse of take
    array([1, 2])
    """

    ranges: tuple[range, ...] = ()

    def __post_init__(self) -> None:
        kept = tuple(x for x in self.ranges if len(x))
        object.__setattr__(self, "ranges", kept)
        if any(x.step < 1 for x in kept) or any(a[-1] >= b[0] for a, b in pairwise(kept)):
            raise OptionError(f"rows must strictly increase, got {kept}")

    @classmethod
    def span(cls, start: int, stop: int) -> Runs:
        """Rows start, start + 1, ... stop − 1."""
        return cls((range(start, stop),))

    @classmethod
    def of(cls, rows: np.ndarray) -> Runs:
        """Rows given one by one, in increasing order. Two of them make a run only where they follow each other."""
        rows = np.asarray(rows, np.int64)
        steps = np.diff(rows)
        if len(steps) > 1 and (steps == steps[0]).all():
            return cls((range(int(rows[0]), int(rows[-1]) + 1, int(steps[0])),))
        cuts = np.flatnonzero(steps != 1) + 1
        first, last = rows[np.r_[0, cuts]] if len(rows) else rows, rows[np.r_[cuts - 1, len(rows) - 1]] if len(rows) else rows
        return cls(tuple(range(a, b + 1) for a, b in zip(first.tolist(), last.tolist(), strict=True)))

    @classmethod
    def union(cls, parts: Iterable[Runs]) -> Runs:
        """Every row that is in one of `parts`."""
        kept = [part for part in parts if part.count]
        if len(kept) == 1:
            return kept[0]
        ranges = sorted((x for part in kept for x in part.ranges), key=lambda x: x.start)
        if any(x.step != 1 for x in ranges):
            return cls.of(np.unique(np.concatenate([part.array() for part in kept])))
        return cls.spans([x.start for x in ranges], [x.stop for x in ranges])

    @classmethod
    def spans(cls, first: Iterable[int], past: Iterable[int]) -> Runs:
        """Every row in one of the intervals [first, past), which come in the order of `first`."""
        merged: list[list[int]] = []
        for lo, hi in zip(first, past, strict=True):
            if hi <= lo:
                continue
            if merged and lo <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], hi)
            else:
                merged.append([lo, hi])
        return cls(tuple(range(lo, hi) for lo, hi in merged))

    @cached_property
    def count(self) -> int:
        return sum(len(x) for x in self.ranges)

    def array(self) -> np.ndarray:
        """The rows one by one, int64."""
        parts = [np.arange(x.start, x.stop, x.step, dtype=np.int64) for x in self.ranges]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    @cached_property
    def _table(self) -> np.ndarray:
        """Start, step and length of each run and how many rows come before it: "4 runs"."""
        lengths = np.array([len(x) for x in self.ranges], np.int64)
        rows = [[x.start for x in self.ranges], [x.step for x in self.ranges], lengths, np.cumsum(lengths) - lengths]
        return np.array(rows, np.int64).reshape(4, len(self.ranges))

    def find(self, row: np.ndarray | int) -> np.ndarray:
        """The index of the first of these rows at or after each `row`, between 0 and count."""
        row = np.asarray(row, np.int64)
        start, step, length, before = self._table
        if not len(start):
            return np.zeros(row.shape, np.int64)
        at = np.maximum(np.searchsorted(start, row, "right") - 1, 0)
        return before[at] + np.clip(-((start[at] - row) // step[at]), 0, length[at])

    def at(self, index: np.ndarray) -> np.ndarray:
        """The row at each index."""
        start, step, _, before = self._table
        run = np.searchsorted(before, index, "right") - 1
        return start[run] + step[run] * (index - before[run])

    def take(self, index: Runs) -> Runs:
        """The rows at these indices."""
        if index.count == self.count:
            return self
        if any(x.step != 1 for x in index.ranges):
            return Runs.of(self.array()[index.array()])
        before, found = self._table[3].tolist(), []
        for part in index.ranges:
            r = int(np.searchsorted(self._table[3], part.start, "right")) - 1
            while r < len(before) and before[r] < part.stop:
                found.append(self.ranges[r][max(part.start - before[r], 0) : part.stop - before[r]])
                r += 1
        return _joined(found)

    def within(self, outer: Runs) -> Runs:
        """The indices of these rows among the rows of `outer`, all of which it must hold."""
        found = []
        for x in self.ranges:
            first, last = outer.find(np.array([x[0], x[-1]])).tolist()
            if last - first + 1 != len(x):
                return Runs.of(outer.find(self.array()))
            found.append(range(first, last + 1))
        return _joined(found)

    def without(self, other: Runs) -> Runs:
        """The rows that `other` does not hold."""
        return Runs.of(np.setdiff1d(self.array(), other.array(), assume_unique=True))


def _joined(ranges: list[range]) -> Runs:
    """Runs of these ranges, where one of step 1 that goes on from the one before it is part of it."""
    if any(x.step != 1 for x in ranges):
        return Runs(tuple(ranges))
    return Runs.spans([x.start for x in ranges], [x.stop for x in ranges])
