"""The mask for everything else: a point test or a dense table of which pairs are visible."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from operator import and_
from typing import Any

import numpy as np

from .._errors import DtypeError, OptionError, ShapeError
from .._typing import Array
from ..arrays import bounded, host, indices, library, placed
from .base import Encoded, Mask

_functions: weakref.WeakValueDictionary[int, Callable[..., Array]] = weakref.WeakValueDictionary()


@dataclass(frozen=True, eq=False)
class Where(Mask):
    """Visible where `test` says so: a function of positions, or a boolean table of rows and columns.

    A function `test(b, h, i, j)` gets integer arrays that broadcast to "b h rows cols" (sequence, query head, query
    position, key position) and is asked tile by tile: no n×s table is ever made. A table broadcasts to "b h n s".
    Row and column 0 of a table belong to the first query and key row; or, with `start`, to query position `start` and key
    position 0, and positions outside the table are hidden.

    >>> Where(lambda b, h, i, j: (i + j) % 2 == 0).keep(1, 3)
    True
    """

    test: Array | Callable[..., Array]
    start: int | None = None
    heads: int = 1
    column: int = 0

    pointwise = True

    def __post_init__(self) -> None:
        if self.start is not None:
            object.__setattr__(self, "start", bounded("Where: start", self.start))
        if callable(self.test):
            return
        if not hasattr(self.test, "shape"):
            object.__setattr__(self, "test", np.asarray(self.test))
        if str(self.test.dtype).removeprefix("torch.") != "bool":
            raise DtypeError(f"Where: a table must be boolean (True: visible), got {self.test.dtype}; add numbers with bias=")
        if not 2 <= len(self.test.shape) <= 4:
            raise ShapeError(f"Where: a table must broadcast to 'b h n s', got {tuple(self.test.shape)}")

    def keep(self, i: Array, j: Array, b: Array = 0, h: Array = 0) -> Array:
        if callable(self.test):
            return self.test(b, h, i, j)
        table = self._table(i)
        index = (b, h, i - (self.start or 0), j - self.column)
        index = tuple(x * 0 if size == 1 else x for x, size in zip(index, table.shape, strict=True))
        inside = reduce(and_, [(x >= 0) & (x < size) for x, size in zip(index, table.shape, strict=True)])
        if 0 in table.shape:
            return inside
        return inside & table[tuple(library(i).where(inside, x, 0) for x in index)]

    def _table(self, like: Array) -> Array:
        """The table where `like` is, with all four axes. Kept on the host only, as a walk asks there tile by tile."""
        return self._table_on_host if library(like) is np else _four_axes(placed(self.test, like))

    @cached_property
    def _table_on_host(self) -> np.ndarray:
        return _four_axes(host(self.test))

    def points(self, i: Array, j: Array, b: Array, h: slice) -> Array:
        keep = _booleans(self.keep(i, j, b, indices(h, self.heads, i)[None, :, None, None]))
        return _four_axes(placed(keep, i))

    def bind(self, starts: tuple[int, int] | None, heads: int) -> Mask:
        if callable(self.test) or self.start is not None:
            return replace(self, heads=heads)
        if starts is None:
            raise OptionError(
                "Where: a table needs start= where positions are packed, strided or differ by batch entry; or use a function"
            )
        return replace(self, start=starts[0], column=starts[1], heads=heads)

    def of_heads(self, first: int, past: int) -> Mask:
        test: Any = self.test
        if (first, past) == (0, self.heads):
            return self
        if callable(test):
            return replace(self, test=lambda b, h, i, j: test(b, h + first, i, j), heads=past - first)
        shared = len(test.shape) < 3 or test.shape[-3] == 1
        return replace(self, test=test if shared else test[..., first:past, :, :], heads=past - first)

    def check(self, sizes: tuple[int, int, int, int]) -> None:
        if callable(self.test):
            return
        shape = (1,) * (4 - len(self.test.shape)) + tuple(self.test.shape)
        for axis, have, want in zip("bhns", shape, sizes, strict=True):
            if have not in (1, want) and (self.start is None or axis in "bh"):
                raise ShapeError(
                    f"axis {axis}: Where table {tuple(self.test.shape)} does not broadcast to {tuple(sizes)} 'b h n s'"
                )

    def encode(self) -> Encoded:
        start = ", INT" if self.start is not None else ""
        ints = [self.start] if self.start is not None else []
        if callable(self.test):
            _functions[id(self.test)] = self.test
            return Encoded(f"where(INT{start})", [id(self.test), *ints], [])
        return Encoded(f"where(ARRAY{start})", ints, [self.test])


def _booleans(keep: Array) -> Array:
    """What a function returned, as booleans."""
    if library(keep) is not np:
        return keep.bool()
    keep = np.asarray(keep)
    if keep.dtype.kind not in "biu":
        raise DtypeError(f"Where: a function must return booleans (True: visible), got {keep.dtype}")
    return keep.astype(bool)


def _four_axes(x: Array) -> Array:
    """`x`, which broadcasts to "b h n s", with all of these axes."""
    return x.reshape((1,) * (4 - x.ndim) + tuple(x.shape))


def function(handle: int) -> Callable[..., Array]:
    """The point test behind an encoded handle, as long as somebody holds it."""
    if handle not in _functions:
        raise OptionError(f"Where: no function is known as {handle}; pass Where a function or a boolean table")
    return _functions[handle]
