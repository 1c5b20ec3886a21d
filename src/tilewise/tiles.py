"""Which tiles are visited, in which order. One walk drives the reference, the torch backend, the cost model, the trace and
the pictures; tiles that the mask hides are never in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ._errors import OptionError
from .mask import Tile
from .problem import Problem


class TileShape(NamedTuple):
    """Rows and columns of a score tile: B_r and B_c in the paper."""

    block_m: int
    block_n: int


class Visit(NamedTuple):
    """One tile of the score matrix that some row of batch entries `b` can see: query rows i, key rows j."""

    b: slice
    i: slice
    j: slice
    kind: Tile


def blocks(size: int, block: int) -> list[slice]:
    """`size` rows cut into blocks, the last one ragged.

    >>> blocks(5, 2)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    if block < 1:
        raise OptionError(f"a block must hold at least one row, got {block}")
    return [slice(x, min(x + block, size)) for x in range(0, size, block)]


def walk(problem: Problem, shape: TileShape, b: slice) -> Iterator[tuple[slice, list[Visit]]]:
    """Each block of query rows with the tiles it visits, left to right: the order of forward and dQ. A tile that no row of the
    batch entries b sees is not there; one is FULL only if it is for all of them."""
    columns = blocks(problem.s, shape.block_n)
    edges = np.array([0, *(j.stop for j in columns)])
    for i in blocks(problem.n, shape.block_m):
        kinds = problem.mask.tiles(problem.layout, b, i, edges)
        yield i, [Visit(b, i, columns[t], Tile(kinds[t])) for t in np.flatnonzero(kinds)]


def walk_keys(problem: Problem, shape: TileShape, b: slice) -> Iterator[tuple[slice, list[Visit]]]:
    """Each block of key rows with the tiles that visit it, top to bottom: the order of dK and dV."""
    columns: dict[int, list[Visit]] = {j.start: [] for j in blocks(problem.s, shape.block_n)}
    for _, row in walk(problem, shape, b):
        for visit in row:
            columns[visit.j.start].append(visit)
    for j in blocks(problem.s, shape.block_n):
        yield j, columns[j.start]


def table(problem: Problem, shape: TileShape, b: slice) -> np.ndarray:
    """The kind of every tile, int "row blocks × key blocks", hidden ones included: for pictures and counts."""
    edges = np.array([0, *(j.stop for j in blocks(problem.s, shape.block_n))])
    rows = [problem.mask.tiles(problem.layout, b, i, edges) for i in blocks(problem.n, shape.block_m)]
    return np.stack(rows) if rows else np.zeros((0, len(edges) - 1), int)


def visible_pairs(problem: Problem) -> int:
    """Query-key pairs that the mask leaves, over batch and heads: what an honest count of operations counts."""
    p, total = problem, 0
    for b in blocks(p.b, 1):
        for i in blocks(p.n, 256):
            if p.mask.pointwise:
                keep = p.mask.grid(p.layout, b, i, slice(0, p.s))
                total += int(np.broadcast_to(keep, (1, p.h, i.stop - i.start, p.s)).sum())
            else:
                first, past = p.mask.bounds(p.layout, b, i)
                total += p.h * int((past - first).sum())
    return total
