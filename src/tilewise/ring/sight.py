"""What some rows see of others: the mask's tile question asked about shards. From its answers come what has to travel, what
is computed, and how much work that is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .._errors import OptionError
from ..arrays import is_number, wide
from ..mask import Causal, Full, Mask, Tile, Window
from ..positions import Dense, Positions
from ..problem import Problem
from ..tiles import blocks
from .runs import Runs

ROWS_AT_ONCE = 256
"""Rows of a point test that are looked at together."""


class Box(NamedTuple):
    """The smallest rectangle of a tile outside which nothing is visible: query rows [q[0], q[1]), key rows likewise."""

    q: tuple[int, int]
    kv: tuple[int, int]
    kind: Tile


def take_positions(positions: Positions, rows: Runs) -> Positions:
    """The positions of some rows of a side: arithmetic where the rows are.

    >>> take_positions(Positions(8, start=2), Runs((range(1, 8, 2),)))
    Positions(count=4, start=3, step=2, rows=None)
    """
    if positions.rows is not None:
        return Positions.of(wide(positions.rows)[..., rows.array()])
    if len(rows.ranges) > 1:
        steps = positions.step * rows.array()
        if is_number(positions.start):
            return Positions.of(positions.start + steps)
        return Positions.of(np.reshape(wide(positions.start), (-1, 1)) + steps)
    run = rows.ranges[0] if rows.ranges else range(0)
    start = positions.start if is_number(positions.start) else wide(positions.start)
    return Positions(rows.count, start + positions.step * run.start, positions.step * run.step)


def dense(problem: Problem) -> Dense:
    """The problem's layout, which shards are cut from."""
    if not isinstance(problem.layout, Dense):
        raise OptionError("packed sequences are sharded as one row with a Documents mask, not as ragged=")
    return problem.layout


def corner(problem: Problem, q: Runs, kv: Runs) -> Dense:
    """The layout of the tile of some query rows and some key rows."""
    layout = dense(problem)
    return Dense(problem.b, take_positions(layout.q, q), take_positions(layout.kv, kv))


def simplest(mask: Mask, layout: Dense) -> tuple[Mask, Dense]:
    """The same visible pairs as a band around the diagonal, with rows that follow each other, where they are one: of a zigzag
    shard's own block under a causal mask, say, which looks like any causal square. Kernels count such bands instead of looking
    rows up."""
    if mask.pointwise or isinstance(mask, Full) or layout.starts is not None or not layout.q.count:
        return mask, layout
    first, past = mask.bounds(layout, slice(0, layout.batch), slice(0, layout.q.count))
    found = band_of(first, past, layout.kv.count)
    if found is None:
        return mask, layout
    left, right = found  # row r sees keys [r + left, r + right)
    if right is None:
        start, band = left or 0, Full() if left is None else Window(left=0)
    else:
        start, band = right - 1, Causal() if left is None else Window(right - 1 - left, 0)
    return band, Dense(layout.batch, Positions(layout.q.count, start), Positions(layout.kv.count))


def band_of(first: np.ndarray, past: np.ndarray, s: int) -> tuple[int | None, int | None] | None:
    """(left, right) such that row r sees keys [r + left, r + right) of s, if it sees any; of each, None: no limit. None where
    intervals "b rows" are no such band."""
    row, some = np.arange(first.shape[1]), first < past
    limits: list[int | None] = []
    for edge, end in ((first, 0), (past, s)):
        inside = some & (edge > 0) & (edge < s)
        apart = np.unique((edge - row)[inside])
        if len(apart) > 1 or (not len(apart) and (edge[some] != end).any()):
            return None
        limits.append(int(apart[0]) if len(apart) else None)
    left, right = limits
    lo = np.zeros(len(row), int) if left is None else np.clip(row + left, 0, s)
    hi = np.full(len(row), s) if right is None else np.clip(row + right, 0, s)
    same = np.where(some, (first == lo) & (past == hi), lo >= hi)
    return (left, right) if some.any() and same.all() else None


def needed(problem: Problem, q: Runs) -> Runs:
    """Every key row that some of these query rows see, in any batch entry and head: runs of step 1."""
    p = problem
    if p.mask.pointwise:
        layout, seen = dense(p), np.zeros(p.s, bool)
        every = Dense(p.b, take_positions(layout.q, q), layout.kv)
        for _, keep in _grids(p, every, q.count, p.s):
            seen |= keep.any((0, 1, 2))
        rows = np.flatnonzero(seen)
        return Runs.spans(rows.tolist(), (rows + 1).tolist())
    return spans_of(*bounds(p, q))


def bounds(problem: Problem, q: Runs) -> tuple[np.ndarray, np.ndarray]:
    """The key rows [first, past) outside which each of these query rows sees nothing, "b rows" each."""
    p, layout = problem, dense(problem)
    every = Dense(p.b, take_positions(layout.q, q), layout.kv)
    return p.mask.bounds(every, slice(0, p.b), slice(0, q.count))


def spans_of(first: np.ndarray, past: np.ndarray) -> Runs:
    """The union of intervals [first, past), in any order."""
    some = first < past
    first, past = first[some], past[some]
    if (first[1:] < first[:-1]).any():
        order = np.argsort(first, kind="stable")
        first, past = first[order], past[order]
    if not len(first):
        return Runs()
    reach = np.maximum.accumulate(past)
    gaps = np.flatnonzero(first[1:] > reach[:-1])
    return Runs.spans(first[np.r_[0, gaps + 1]].tolist(), reach[np.r_[gaps, len(reach) - 1]].tolist())


def look(problem: Problem, q: Runs, kv: Runs) -> Box | None:
    """What the tile of these query and key rows holds, None where it is EMPTY."""
    p, layout = problem, corner(problem, q, kv)
    if not p.b or not q.count or not kv.count:
        return None
    rows, cols = _visible(p, layout, q.count, kv.count)
    if not len(rows):
        return None
    i, j = (int(rows[0]), int(rows[-1]) + 1), (int(cols[0]), int(cols[-1]) + 1)
    kind = p.mask.tiles(layout, slice(0, p.b), slice(*i), np.array(j))[0]
    return Box(i, j, Tile(kind))


def area(problem: Problem, q: Runs, kv: Runs) -> int:
    """Visible pairs of a tile over the batch, of one head where heads agree and on average over heads where they do not."""
    p, layout = problem, corner(problem, q, kv)
    if not p.mask.pointwise:
        first, past = p.mask.bounds(layout, slice(0, p.b), slice(0, q.count))
        return int((past - first).sum())
    return sum(int(np.broadcast_to(keep, (p.b, p.h, *keep.shape[2:])).sum()) for _, keep in
               _grids(p, layout, q.count, kv.count)) // p.h  # fmt: skip


def _grids(problem: Problem, layout: Dense, rows: int, cols: int) -> Iterator[tuple[slice, np.ndarray]]:
    """The visible pairs of each block of rows."""
    for i in blocks(rows, ROWS_AT_ONCE):
        yield i, problem.mask.grid(layout, slice(0, problem.b), i, slice(0, cols))


def _visible(problem: Problem, layout: Dense, rows: int, cols: int) -> tuple[np.ndarray, np.ndarray]:
    """The query rows that see something, and key rows whose first and last are the ends of what is seen."""
    if problem.mask.pointwise:
        some, seen = np.zeros(rows, bool), np.zeros(cols, bool)
        for i, keep in _grids(problem, layout, rows, cols):
            some[i] = keep.any((0, 1, 3))
            seen |= keep.any((0, 1, 2))
        return np.flatnonzero(some), np.flatnonzero(seen)
    first, past = problem.mask.bounds(layout, slice(0, problem.b), slice(0, rows))
    some = first < past
    ends = np.array([first[some].min(), past[some].max() - 1]) if some.any() else np.zeros(0, int)
    return np.flatnonzero(some.any(0)), ends
