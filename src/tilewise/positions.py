"""Where rows sit in the sequence. Masks speak only of positions, so causal alignment, a cache offset, chunked prefill
and every ring layout are positions and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np

from ._errors import OptionError, ShapeError
from ._typing import Array
from .arrays import HOST, Value, bounded, indices, integers, is_number, library, search, wide


class Rows(NamedTuple):
    """Rows of one side: which sequence each belongs to and where in it. Both int64, broadcastable to "b rows"."""

    sequence: Array
    position: Array


@dataclass(frozen=True, eq=False)
class Positions(Value):
    """Row r of batch entry b sits at `start[b] + step·r`, or at `rows[..., r]` where rows are given one by one.

    Shapes  start: one int or "b" · rows: "count" or "b count", strictly increasing along the last axis

    >>> Positions(3, start=5).array()
    array([[5, 6, 7]])
    >>> Positions(8, start=1, step=4).find(np.array([[6]]))     # rows sit at 1, 5, 9, ...: the first at or after 6
    array([[2]])
    """

    count: int
    start: Array = 0
    step: int = 1
    rows: Array | None = None

    def __post_init__(self) -> None:
        if not is_number(bounded("positions: count", self.count)) or self.count < 0:
            raise OptionError(f"positions: count cannot be negative, got {self.count}")
        object.__setattr__(self, "start", bounded("positions: start", self.start))
        if not is_number(self.start) and len(self.start.shape) != 1:
            raise ShapeError(f"positions: start must be one number or 'b', got {tuple(self.start.shape)}")
        if not is_number(bounded("positions: step", self.step)) or self.step < 1:
            raise OptionError(f"positions: step must be at least 1, got {self.step}")
        if self.rows is None:
            return
        object.__setattr__(self, "rows", integers("positions: rows", self.rows))
        if is_number(self.rows) or len(self.rows.shape) not in (1, 2):
            raise ShapeError(f"positions: rows must be 'count' or 'b count', got {getattr(self.rows, 'shape', self.rows)}")
        if self.rows.shape[-1] != self.count:
            raise ShapeError(f"positions: rows {tuple(self.rows.shape)} do not hold count = {self.count} positions")

    @classmethod
    def of(cls, rows: Array) -> Positions:
        """Positions given one by one: "count", or "b count" where they differ by batch entry."""
        rows = integers("positions: rows", rows)
        if is_number(rows):
            raise ShapeError(f"positions: rows must be 'count' or 'b count', got the number {rows}")
        return cls(rows.shape[-1], rows=rows)

    def array(self, like: Array = HOST) -> Array:
        """All positions, int64 "b count" with b = 1 where every batch entry agrees."""
        if self.rows is not None:
            return library(like).atleast_2d(wide(self.rows, like))
        return self._starts(like) + self.step * indices(slice(None), self.count, like)[None]

    def _starts(self, like: Array) -> Array:
        """Where the first row sits: one number, or "b 1"."""
        return self.start if is_number(self.start) else wide(self.start, like)[:, None]

    def cut(self, part: slice) -> Positions:
        """The positions of rows `part.start` to `part.stop`."""
        first, past, _ = part.indices(self.count)
        count = max(past - first, 0)
        if self.rows is not None:
            return replace(self, count=count, rows=self.rows[..., part])
        start = self.start if is_number(self.start) else wide(self.start, self.start)
        return replace(self, count=count, start=start + self.step * first)

    def find(self, position: Array) -> Array:
        """Index of the first row at or after `position` ("b rows"), between 0 and count."""
        if self.rows is not None:
            return search(self.array(position), position)
        return library(position).clip(-((self._starts(position) - position) // self.step), 0, self.count)

    def check_values(self, side: str) -> None:
        """Raise unless rows given one by one strictly increase, which `find` relies on."""
        if self.rows is not None and (np.diff(self.array(), axis=1) <= 0).any():
            raise OptionError(f"positions of {side}: rows must strictly increase along the last axis")


class Layout(Protocol):
    """How rows and columns of the score matrix map to sequences and positions. Two exist: `Dense` and `Packed`. Answers are in
    the library and on the device of `like`, or of `bounds`."""

    def queries(self, b: slice, i: slice, like: Array = HOST) -> Rows: ...

    def keys(self, b: slice, j: slice, like: Array = HOST) -> Rows: ...

    def columns(self, b: slice, i: slice, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        """Key positions [lo, hi) of each query row as key indices [first, past)."""
        ...


@dataclass(frozen=True)
class Dense:
    """A rectangular batch: every batch entry is one sequence with its own positions on each side."""

    batch: int
    q: Positions
    kv: Positions

    @property
    def starts(self) -> tuple[int, int] | None:
        """The positions of the first query and key row, where rows follow each other and all entries agree."""
        sides = (self.q, self.kv)
        if any(side.rows is not None or side.step != 1 or not is_number(side.start) for side in sides):
            return None
        return self.q.start, self.kv.start

    def queries(self, b: slice, i: slice, like: Array = HOST) -> Rows:
        return self._rows(self.q, b, i, like)

    def keys(self, b: slice, j: slice, like: Array = HOST) -> Rows:
        return self._rows(self.kv, b, j, like)

    def columns(self, b: slice, i: slice, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        kv = _batch(self.kv, b)
        return kv.find(bounds[0]), kv.find(bounds[1])

    def _rows(self, side: Positions, b: slice, part: slice, like: Array) -> Rows:
        return Rows(indices(b, self.batch, like)[:, None], _batch(side, b).cut(part).array(like))


def _batch(side: Positions, b: slice) -> Positions:
    """The positions of some batch entries, where they differ by entry."""
    if side.rows is not None and len(side.rows.shape) == 2 and side.rows.shape[0] > 1:
        return replace(side, rows=side.rows[b])
    if not is_number(side.start) and len(side.start) > 1:
        return replace(side, start=side.start[b])
    return side
