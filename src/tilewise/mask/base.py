"""Which keys a query sees, as a value. A mask answers three questions: `keep(i, j)`, the definition; `interval(b, i)`,
the positions a row may see; and `tile(q, kv)`, whether a whole tile is EMPTY, PARTIAL or FULL.

The first two answer in the library and on the device of the positions they are asked about, where the arrays of the mask
follow them: NumPy on the host, or torch with nothing read back from a device. The third is an answer in Python, of the host."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import reduce
from operator import and_
from typing import Literal, NamedTuple

import numpy as np

from .._errors import DtypeError, OptionError
from .._typing import Array
from ..arrays import FOREVER, HOST, Value, indices, library
from ..positions import Dense, Layout, Positions

Align = Literal["bottom-right", "top-left"]


class Tile(IntEnum):
    """What a mask leaves of a tile: nothing, some of it, or all of it."""

    EMPTY = 0
    PARTIAL = 1
    FULL = 2


class Encoded(NamedTuple):
    """A mask taken apart for an operator's schema: text with INT and ARRAY where the numbers and the arrays go."""

    text: str
    ints: list[int]
    arrays: list[Array]


class Mask(Value):
    """Base of every mask. Keys at positions outside `interval` are hidden; `pointwise` masks also test each pair."""

    pointwise: bool = False
    align: Align | None = None

    def keep(self, i: Array, j: Array, b: Array = 0, h: Array = 0) -> Array:
        """True where query position i sees key position j, of sequence b and query head h; broadcasts. The definition."""
        raise NotImplementedError

    def interval(self, b: Array, i: Array) -> tuple[Array, Array]:
        """Key positions [lo, hi) outside which the row at position i of sequence b sees nothing, in the shape of i: "b rows".
        b is that or "b 1"."""
        return library(i).full_like(i, -FOREVER), library(i).full_like(i, FOREVER)

    def bind(self, starts: tuple[int, int] | None, heads: int) -> Mask:
        """This mask once it is known where the first query and key row sit (None: not in steps of one from a number that all
        share) and how many query heads there are."""
        return self

    def of_heads(self, first: int, past: int) -> Mask:
        """This mask, once bound, for query heads first … past − 1 alone, which count from 0 then."""
        return self

    def check(self, sizes: tuple[int, int, int, int]) -> None:
        """Raise `ShapeError` where an array of this mask does not fit the problem's (b, h, n, s)."""

    def check_values(self) -> None:
        """Raise `OptionError` where the numbers in an array of this mask make no sense: reads them, so it runs last."""

    def encode(self) -> Encoded:
        """The mask as text, integers and arrays; `mask.parse` is the inverse."""
        raise NotImplementedError

    def __and__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            raise DtypeError(f"a mask meets another mask, such as Where(table), not {type(other).__name__}")
        parts = tuple(p for side in (self, other) for p in (side.parts if isinstance(side, Both) else (side,)))
        return Both(parts)

    def bounds(self, layout: Layout, b: slice, i: slice, like: Array = HOST) -> tuple[Array, Array]:
        """The interval of each row as key indices [first, past), int64 "b rows", where `like` is."""
        xp, (sequence, position) = library(like), layout.queries(b, i, like)
        position = xp.broadcast_to(position, (len(sequence), position.shape[1]))
        first, past = layout.columns(b, i, self.interval(sequence, position))
        return first, xp.maximum(first, past)

    def grid(self, layout: Layout, b: slice, i: slice, j: slice, h: slice = slice(None), like: Array = HOST) -> Array:
        """The visible pairs of one tile and of query heads h, bool, broadcastable to "b h rows cols", where `like` is."""
        first, past = self.bounds(layout, b, i, like)
        column = indices(j, j.stop, like)
        keep = ((first[..., None] <= column) & (column < past[..., None]))[:, None]
        if not self.pointwise:
            return keep
        q, kv = layout.queries(b, i, like), layout.keys(b, j, like)
        b_, i_, j_ = q.sequence[:, None, :, None], q.position[:, None, :, None], kv.position[:, None, None, :]
        return keep & self.points(i_, j_, b_, h)

    def points(self, i: Array, j: Array, b: Array, h: slice) -> Array:
        """The pointwise part of a pointwise mask for query heads h, bool, broadcastable to "b h rows cols"."""
        raise NotImplementedError

    def tiles(self, layout: Layout, b: slice, i: slice, edges: np.ndarray) -> np.ndarray:
        """The kind of every tile of one row block, whose columns run from `edges[t]` to `edges[t+1]`. One home."""
        first, past = self.bounds(layout, b, i)
        lo, hi = edges[:-1], edges[1:]
        kinds = np.full(len(lo), Tile.EMPTY)
        if first.size == 0 or len(lo) == 0:
            return kinds
        near = slice(np.searchsorted(hi, first.min(), "right"), np.searchsorted(lo, past.max()))
        lo, hi, first, past = lo[near], hi[near], first[..., None], past[..., None]
        some = (np.minimum(past, hi) > np.maximum(first, lo)).any((0, 1))
        every = ((first <= lo) & (hi <= past)).all((0, 1))
        kinds[near] = np.where(some, np.where(every, Tile.FULL, Tile.PARTIAL), Tile.EMPTY)
        if self.pointwise:
            for t in np.flatnonzero(kinds):
                keep = self.grid(layout, b, i, slice(edges[t], edges[t + 1]))
                kinds[t] = Tile.FULL if keep.all() else Tile.PARTIAL if keep.any() else Tile.EMPTY
        return kinds

    def tile(self, q: Positions, kv: Positions, batch: int = 1, heads: int = 1) -> Tile:
        """EMPTY, PARTIAL or FULL: what this mask leaves of the tile of these query and key positions.

        >>> from tilewise.mask import Causal
        >>> Causal().tile(Positions(4, start=8), Positions(4)).name
        'FULL'
        """
        self.check((batch, heads, q.count, kv.count))
        if not q.count or not kv.count:
            return Tile.EMPTY
        layout = Dense(batch, q, kv)
        bound = self.bind(layout.starts, heads)
        return Tile(bound.tiles(layout, slice(0, batch), slice(0, q.count), np.array([0, kv.count]))[0])

    @property
    def kind(self) -> str:
        """All a kernel needs to know: NONE, INTERVAL (two integers a row) or TABLE (a tile table and a point test)."""
        return "TABLE" if self.pointwise else "INTERVAL"


@dataclass(frozen=True, eq=False)
class Both(Mask):
    """`a & b`: visible where every part says so. Intervals meet by max and min; pointwise parts are tested on top."""

    parts: tuple[Mask, ...]

    def __post_init__(self) -> None:
        aligns = {p.align for p in self.parts if p.align is not None}
        if len(aligns) > 1:
            raise OptionError("a mask cannot be aligned bottom-right and top-left at once: " + repr(self))

    @property
    def pointwise(self) -> bool:  # type: ignore[override]
        return any(p.pointwise for p in self.parts)

    @property
    def align(self) -> Align | None:  # type: ignore[override]
        return next((p.align for p in self.parts if p.align is not None), None)

    def keep(self, i: Array, j: Array, b: Array = 0, h: Array = 0) -> Array:
        keep = self.parts[0].keep(i, j, b, h)
        for part in self.parts[1:]:
            keep = keep & part.keep(i, j, b, h)
        return keep

    def interval(self, b: Array, i: Array) -> tuple[Array, Array]:
        lo, hi = self.parts[0].interval(b, i)
        for part in self.parts[1:]:
            first, past = part.interval(b, i)
            lo, hi = library(i).maximum(lo, first), library(i).minimum(hi, past)
        return lo, hi

    def points(self, i: Array, j: Array, b: Array, h: slice) -> Array:
        return reduce(and_, [part.points(i, j, b, h) for part in self.parts if part.pointwise])

    def bind(self, starts: tuple[int, int] | None, heads: int) -> Mask:
        return Both(tuple(part.bind(starts, heads) for part in self.parts))

    def of_heads(self, first: int, past: int) -> Mask:
        return Both(tuple(part.of_heads(first, past) for part in self.parts))

    def check(self, sizes: tuple[int, int, int, int]) -> None:
        for part in self.parts:
            part.check(sizes)

    def check_values(self) -> None:
        for part in self.parts:
            part.check_values()

    def encode(self) -> Encoded:
        parts = [part.encode() for part in self.parts]
        ints = [x for part in parts for x in part.ints]
        return Encoded(" & ".join([part.text for part in parts]), ints, [x for part in parts for x in part.arrays])
