"""Sequences of different lengths packed end to end along one axis, described once instead of by six arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ._errors import OptionError, ShapeError
from ._typing import Array
from .arrays import FOREVER, HOST, Value, check_integers, indices, integers, is_number, library, wide
from .positions import Rows


@dataclass(frozen=True, eq=False)
class Ragged(Value):
    """Sequence r owns query rows `q_offsets[r]` to `q_offsets[r+1]` and key rows likewise (`cu_seqlens` elsewhere).

    Inside a sequence positions start at 0 and the last query row sits at the last key (bottom-right), as in a dense
    problem. Rows past the last offset belong to no sequence: they give o = 0, lse = -inf and gradients 0.

    >>> r = Ragged.from_lengths([3, 5])
    >>> r.q_offsets, r.sequences
    (array([0, 3, 8]), 2)
    """

    q_offsets: Array
    kv_offsets: Array

    def __post_init__(self) -> None:
        for name in ("q_offsets", "kv_offsets"):
            offsets = integers(name, getattr(self, name))
            if is_number(offsets):
                raise ShapeError(f"{name} must be one axis 'b+1', got the number {offsets}")
            object.__setattr__(self, name, offsets)
        for side, offsets in (("q", self.q_offsets), ("kv", self.kv_offsets)):
            if len(offsets.shape) != 1 or offsets.shape[0] < 1:
                raise ShapeError(f"{side}_offsets must be one axis 'b+1' with at least one entry, got {tuple(offsets.shape)}")
        if self.q_offsets.shape[0] != self.kv_offsets.shape[0]:
            raise ShapeError(
                f"axis b: q_offsets {tuple(self.q_offsets.shape)} and kv_offsets {tuple(self.kv_offsets.shape)} "
                "name different numbers of sequences"
            )

    @classmethod
    def from_lengths(cls, q: Sequence[int], kv: Sequence[int] | None = None) -> Ragged:
        """From the number of query rows, and of key rows where they differ, of each sequence."""
        q_offsets = _offsets("lengths of q", q)
        return cls(q_offsets, q_offsets if kv is None else _offsets("lengths of kv", kv))

    @classmethod
    def from_offsets(cls, q: Array, kv: Array | None = None) -> Ragged:
        """From `cu_seqlens`: "b+1" integers, starting at 0 and never decreasing; NumPy, torch or a list."""
        return cls(q, q if kv is None else kv)

    @property
    def sequences(self) -> int:
        return self.q_offsets.shape[0] - 1

    def check_values(self, rows: int, columns: int) -> None:
        """Raise unless the offsets start at 0, never decrease and stay inside the packed tensors."""
        for side, offsets, total in (("q", self.q_offsets, rows), ("kv", self.kv_offsets, columns)):
            offsets = wide(offsets)
            if offsets[0] != 0:
                raise OptionError(f"{side}_offsets must start at 0 to cover axis t from its first row, got {offsets[0]}")
            if (np.diff(offsets) < 0).any():
                r = int(np.argmax(np.diff(offsets) < 0))
                raise OptionError(f"{side}_offsets decrease from {offsets[r]} to {offsets[r + 1]} at sequence {r}")
            if offsets[-1] > total:
                raise ShapeError(f"axis t: {side}_offsets end at {offsets[-1]} but the packed tensor holds {total} rows")


@dataclass(frozen=True)
class Packed:
    """The layout of a packed problem: one row of b, whose rows belong to the sequences of a `Ragged`."""

    ragged: Ragged
    rows: int
    cols: int

    def queries(self, b: slice, i: slice, like: Array = HOST) -> Rows:
        xp, index = library(like), indices(i, self.rows, like)[None]
        q, kv = wide(self.ragged.q_offsets, like), wide(self.ragged.kv_offsets, like)
        r = _owner(q, index)
        shift = (kv[1:] - kv[:-1]) - (q[1:] - q[:-1]) if len(q) > 1 else xp.zeros_like(q)
        return Rows(r, xp.where(r < 0, 0, index - q[r] + shift[r]))

    def keys(self, b: slice, j: slice, like: Array = HOST) -> Rows:
        xp, index = library(like), indices(j, self.cols, like)[None]
        kv = wide(self.ragged.kv_offsets, like)
        r = _owner(kv, index)
        return Rows(xp.where(r < 0, -2, r), xp.where(r < 0, 0, index - kv[r]))

    def columns(self, b: slice, i: slice, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        xp, like = library(bounds[0]), bounds[0]
        q, kv = wide(self.ragged.q_offsets, like), wide(self.ragged.kv_offsets, like)
        r = _owner(q, indices(i, self.rows, like)[None])
        first, past = kv[r], kv[xp.where(r < 0, r, r + 1)]
        lo, hi = (xp.clip(x, -FOREVER, FOREVER) for x in bounds)
        return xp.clip(first + lo, first, past), xp.clip(first + hi, first, past)


def _offsets(name: str, lengths: Array) -> np.ndarray:
    """0 and the running sums of lengths: plain Python, so that it can also be traced."""
    if not isinstance(lengths, (list, tuple)):
        check_integers(name, integers(name, lengths))
        lengths = wide(lengths).tolist()
    offsets = [0]
    for length in lengths:
        if not isinstance(length, (int, np.integer)) or length < 0:
            raise OptionError(f"{name} must be integers that are not negative, one a sequence, got {length!r}")
        offsets.append(offsets[-1] + length)
    return np.asarray(offsets)


def _owner(offsets: Array, index: Array) -> Array:
    """The sequence that holds each packed row, -1 where none does."""
    xp = library(offsets)
    r = xp.searchsorted(offsets, index, side="right") - 1
    return xp.where(r < len(offsets) - 1, r, -1)
