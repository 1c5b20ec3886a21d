"""What a walk visits, summed: all that a count of bytes and operations needs of it, and nothing of the order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..mask import Tile
from ..problem import Problem
from ..tiles import TileShape, blocks, table


class Visits(NamedTuple):
    """The tiles that one head of one batch entry visits."""

    pairs: int = 0
    """Query-key pairs of those tiles, hidden ones included."""
    rows: int = 0
    """Query rows, each as often as tiles of its block are visited."""
    cols: int = 0
    """Keys, each as often as tiles of its block are visited."""
    seen_rows: int = 0
    """Query rows of blocks that visit any tile."""
    seen_cols: int = 0
    """Keys of blocks that any tile is visited of."""
    empty: int = 0
    partial: int = 0
    full: int = 0

    @property
    def tiles(self) -> int:
        return self.partial + self.full


def entries(problem: Problem, shape: TileShape) -> Iterator[tuple[int, Visits]]:
    """The visits of each batch entry; entries whose rows see the same keys visit the same, and come once, with their number."""
    p = problem
    if p.mask.pointwise or p.b < 2:
        for b in blocks(p.b, 1):
            yield 1, visits(p, shape, b)
        return
    seen = np.concatenate(p.mask.bounds(p.layout, slice(0, p.b), slice(0, p.n)), axis=1)
    _, index, counts = np.unique(seen, axis=0, return_index=True, return_counts=True)
    for b, times in zip(index.tolist(), counts.tolist(), strict=True):
        yield times, visits(p, shape, slice(b, b + 1))


def visits(problem: Problem, shape: TileShape, b: slice) -> Visits:
    """The sums over the tiles of batch entry b, one block of query rows at a time."""
    sizes = np.array([j.stop - j.start for j in blocks(problem.s, shape.block_n)], np.int64)
    edges = np.concatenate([[0], np.cumsum(sizes)])
    total, seen = Visits(), np.zeros(len(sizes), bool)
    for i in blocks(problem.n, shape.block_m):
        kinds = problem.mask.tiles(problem.layout, b, i, edges)
        hit = kinds != Tile.EMPTY
        seen |= hit
        rows, cols, tiles, full = i.stop - i.start, int(sizes[hit].sum()), int(hit.sum()), int((kinds == Tile.FULL).sum())
        row = Visits(rows * cols, rows * tiles, cols, rows * (tiles > 0), 0, len(sizes) - tiles, tiles - full, full)
        total = Visits(*map(sum, zip(total, row, strict=True)))
    return total._replace(seen_cols=int(sizes[seen].sum()))


def bias_size(problem: Problem, one: Visits) -> int:
    """Elements of the bias that the tiles of `one` head bring on chip: a broadcast axis brings one element a tile."""
    shape = problem.score.bias
    if shape is None:
        return 0
    down, across = (size > 1 for size in (1, 1, *shape)[-2:])
    return (one.pairs if across else one.rows) if down else (one.cols if across else one.tiles)


def bias_distinct(problem: Problem, shape: TileShape) -> int:
    """Elements of the bias that any tile needs, each once."""
    p = problem
    if p.score.bias is None or not p.b:
        return 0
    b, h, n, s = (1,) * (4 - len(p.score.bias)) + p.score.bias
    hit = np.stack([table(p, shape, entry) != Tile.EMPTY for entry in blocks(p.b, 1)])
    for axis, length in ((0, b), (1, n), (2, s)):
        hit = np.logical_or.reduce(hit, axis, keepdims=True) if length == 1 else hit
    rows, cols = (
        np.array([1] if length == 1 else [part.stop - part.start for part in blocks(length, block)], np.int64)
        for length, block in ((n, shape.block_m), (s, shape.block_n))
    )
    return h * int(np.einsum("bij,i,j->", hit, rows, cols))
