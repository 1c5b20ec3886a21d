"""Masks that depend on which sequence, chunk or document a position lies in: one interval a row, looked up or counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .._errors import OptionError, ShapeError
from .._typing import Array
from ..arrays import FOREVER, bounded, check_integers, host, indices, integers, is_number, library, running_maximum, wide
from .base import Encoded, Mask


@dataclass(frozen=True, eq=False)
class Prefix(Mask):
    """Prefix language model: the first `length` keys are visible to all, the rest causally. `length`: int or "b"."""

    length: Array

    def __post_init__(self) -> None:
        length = bounded("Prefix: length", self.length)
        object.__setattr__(self, "length", length)
        if is_number(length) and length < 0:
            raise OptionError(f"Prefix: length cannot be negative, got {self.length}")

    def keep(self, i: Array, j: Array, b: Array = 0, h: Array = 0) -> Array:
        return (j <= i) | (j < _of_sequence(self.length, b, i))

    def interval(self, b: Array, i: Array) -> tuple[Array, Array]:
        xp = library(i)
        return xp.full_like(i, -FOREVER), xp.maximum(i + 1, _of_sequence(self.length, b, i) + 0 * i)

    def check(self, sizes: tuple[int, int, int, int]) -> None:
        _check_batch("Prefix: length", self.length, sizes[0], axes="b")

    def check_values(self) -> None:
        _check_not_negative("Prefix: length", self.length)

    def encode(self) -> Encoded:
        return (
            Encoded("prefix(INT)", [self.length], []) if is_number(self.length) else Encoded("prefix(ARRAY)", [], [self.length])
        )


@dataclass(frozen=True, eq=False)
class Chunked(Mask):
    """Positions are cut into chunks of `size`; a query sees its own chunk. Combine with `Causal()` for chunked causal."""

    size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", bounded("Chunked: size", self.size))
        if not is_number(self.size) or self.size < 1:
            raise OptionError(f"Chunked: size must be at least 1, got {self.size}")

    def keep(self, i: Array, j: Array, b: Array = 0, h: Array = 0) -> Array:
        return i // self.size == j // self.size

    def interval(self, b: Array, i: Array) -> tuple[Array, Array]:
        first = i // self.size * self.size
        return first, first + self.size

    def encode(self) -> Encoded:
        return Encoded("chunked(INT)", [self.size], [])


@dataclass(frozen=True, eq=False)
class Lengths(Mask):
    """Padding: sequence b has `kv[b]` real keys, at positions `first[b]` onwards (0 where not given: padding right)."""

    kv: Array
    first: Array | None = None

    def __post_init__(self) -> None:
        for name in ("kv", "first"):
            if name == "first" and self.first is None:
                continue
            value = bounded(f"Lengths: {name}", getattr(self, name))
            object.__setattr__(self, name, np.asarray([value]) if is_number(value) else value)

    def keep(self, i: Array, j: Array, b: Array = 0, h: Array = 0) -> Array:
        first, past = self._span(b, i)
        return (first <= j) & (j < past) & (i == i)

    def interval(self, b: Array, i: Array) -> tuple[Array, Array]:
        first, past = self._span(b, i)
        return first + 0 * i, past + 0 * i

    def _span(self, b: Array, like: Array) -> tuple[Array, Array]:
        first = 0 if self.first is None else _of_sequence(self.first, b, like)
        return first, first + _of_sequence(self.kv, b, like)

    def check(self, sizes: tuple[int, int, int, int]) -> None:
        _check_batch("Lengths: kv", self.kv, sizes[0], axes="b")
        _check_batch("Lengths: first", self.first, sizes[0], axes="b")

    def check_values(self) -> None:
        _check_not_negative("Lengths: kv", self.kv)

    def encode(self) -> Encoded:
        if self.first is None:
            return Encoded("lengths(ARRAY)", [], [self.kv])
        return Encoded("lengths(ARRAY, ARRAY)", [], [self.kv, self.first])


@dataclass(frozen=True, eq=False)
class Documents(Mask):
    """Packed documents: position x belongs to document `ids[x]`, and a query sees its own document only.

    Shapes  ids: "s" or "b s", integers; each document is one run of equal ids; a negative id is padding that neither
            sees nor is seen, as is every position outside [0, s)

    >>> Documents.from_lengths([2, 3]).ids
    array([0, 0, 1, 1, 1])
    """

    ids: Array

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", integers("Documents: ids", self.ids))
        if is_number(self.ids) or len(self.ids.shape) not in (1, 2):
            raise ShapeError(f"Documents: ids must be 's' or 'b s', got {getattr(self.ids, 'shape', self.ids)}")

    @classmethod
    def from_lengths(cls, lengths: Sequence[int]) -> Documents:
        return cls(np.repeat(np.arange(len(lengths)), lengths))

    @classmethod
    def from_position_ids(cls, position_ids: Array) -> Documents:
        """A new document starts wherever `position_ids` ("s" or "b s") does not go up by one."""
        position_ids = integers("position_ids", position_ids)
        before = position_ids[..., :1] - 1
        step = position_ids.diff(prepend=before) if hasattr(position_ids, "diff") else np.diff(position_ids, prepend=before)
        return cls((1 * (step != 1)).cumsum(-1))

    def keep(self, i: Array, j: Array, b: Array = 0, h: Array = 0) -> Array:
        mine, theirs = self._id(i, b), self._id(j, b)
        return (mine == theirs) & (mine >= 0)

    def _runs(self, like: Array) -> tuple[Array, Array, Array]:
        """ids, and where the run of each position starts and ends, all "b s" where `like` is. Kept on the host only: the ids
        of a device may have changed since, and it would take a wait to see."""
        return self._runs_on_host if library(like) is np else _find_runs(wide(self.ids, like))

    @cached_property
    def _runs_on_host(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return _find_runs(wide(self.ids))

    def _look_up(self, ids: Array, x: Array, b: Array) -> tuple[Array, tuple[Array, Array]]:
        """Which positions lie inside, and where to look them up; needs at least one position."""
        batch, size = ids.shape
        inside = (x >= 0) & (x < size)
        return inside, (b % batch, library(ids).where(inside, x, 0))

    def _id(self, x: Array, b: Array) -> Array:
        ids, _, _ = self._runs(x)
        if 0 in ids.shape:
            return 0 * x - 1
        inside, at = self._look_up(ids, x, b)
        return library(x).where(inside, ids[at], -1)

    def interval(self, b: Array, i: Array) -> tuple[Array, Array]:
        xp, (ids, first, past) = library(i), self._runs(i)
        if 0 in ids.shape:
            return xp.zeros_like(i), xp.zeros_like(i)
        inside, at = self._look_up(ids, i, b)
        seen = inside & (ids[at] >= 0)
        return xp.where(seen, first[at], 0), xp.where(seen, past[at], 0)

    def check(self, sizes: tuple[int, int, int, int]) -> None:
        _check_batch("Documents: ids", self.ids, sizes[0], axes="b s")

    def check_values(self) -> None:
        """Raise unless every document is one run of equal ids."""
        ids, first, _ = self._runs_on_host
        for row, starts in zip(ids, first, strict=True):
            runs = row[starts == np.arange(len(row))]
            runs = runs[runs >= 0]
            if len(np.unique(runs)) != len(runs):
                raise OptionError("Documents: each document must be one run of equal ids; an id comes back after another")

    def encode(self) -> Encoded:
        return Encoded("documents(ARRAY)", [], [self.ids])


def _find_runs(ids: Array) -> tuple[Array, Array, Array]:
    """ids "b s" or "s", and where the run of each position starts and ends, all "b s"."""
    xp = library(ids)
    ids = xp.atleast_2d(ids)
    edge, change = ids[:, :1] == ids[:, :1], ids[:, 1:] != ids[:, :-1]
    index = indices(slice(None), ids.shape[1], ids)

    def begins(at: Array) -> Array:
        return running_maximum(xp.where(at, index, 0))

    mirrored = begins(xp.flip(xp.concatenate([change, edge], 1), (1,)))  # a run ends where it begins from the other side
    return ids, begins(xp.concatenate([edge, change], 1)), ids.shape[1] - xp.flip(mirrored, (1,))


def _of_sequence(value: Array, b: Array, like: Array) -> Array:
    """The entry of sequence b: an int holds for all, an array "b" (or of one entry) is looked up where `like` is."""
    if is_number(value):
        return value
    value = wide(value, like)
    return value[b % len(value)] if len(value) else 0 * b


def _check_not_negative(name: str, value: Array) -> None:
    found = host(value)
    if found.size and found.min() < 0:
        raise OptionError(f"{name} cannot be negative, got {found.min()}")


def _check_batch(name: str, value: Array | None, batch: int, axes: str) -> None:
    """Raise unless `value` is an int, an array of the last axis alone, or one row for each batch entry."""
    if value is None or is_number(value):
        return
    check_integers(name, value)
    shape = tuple(value.shape)
    if len(shape) not in ({1} if axes == "b" else {1, 2}):
        raise ShapeError(f"{name} must be '{axes}', got {shape}")
    if len(shape) == len(axes.split()) and shape[0] not in (1, batch):
        raise ShapeError(f"axis b: {name} {shape} does not fit a batch of {batch}")
