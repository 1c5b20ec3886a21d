"""What a walk costs: floating-point operations, exponentials and bytes moved between memory and chip. The same counts come
out of a `Meter` that watches the reference run, and a test holds the two equal.

Source: Dao et al. 2022, FlashAttention, theorem 2; Dao 2023, FlashAttention-2, section 3.1 (query tiles outside)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields

import numpy as np

from .mask import Tile
from .problem import Problem
from .tiles import TileShape, Visit, blocks, walk, walk_keys


@dataclass(frozen=True)
class Cost:
    """Units: flops count a multiply and an add as two, in matrix products only; bytes cross the edge of the chip."""

    flops: int = 0
    exponentials: int = 0
    read_bytes: int = 0
    write_bytes: int = 0
    empty_tiles: int = 0
    partial_tiles: int = 0
    full_tiles: int = 0

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return self.read_bytes + self.write_bytes

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __str__(self) -> str:
        tiles = f"{self.full_tiles} full, {self.partial_tiles} partial, {self.empty_tiles} skipped tiles"
        moved = f"{self.read_bytes / 1e6:.3f} MB read, {self.write_bytes / 1e6:.3f} MB written"
        return f"{self.flops / 1e9:.3f} GFLOP, {moved}, {tiles}"


@dataclass
class Meter:
    """Counts what passes through it. `read` and `write` hand their array back; `product` counts a matrix product."""

    itemsize: int
    lse_itemsize: int
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("flops", "exponentials", "read_bytes", "write_bytes"), 0)
    )

    @classmethod
    def of(cls, problem: Problem) -> Meter:
        return cls(problem.itemsize, problem.lse_itemsize)

    def read(self, x: np.ndarray, statistic: bool = False) -> np.ndarray:
        """`x` comes on chip; `statistic`: lse and delta, which are kept wider."""
        self.counts["read_bytes"] += x.size * (self.lse_itemsize if statistic else self.itemsize)
        return x

    def write(self, x: np.ndarray, statistic: bool = False) -> np.ndarray:
        """`x` leaves the chip."""
        self.counts["write_bytes"] += x.size * (self.lse_itemsize if statistic else self.itemsize)
        return x

    def product(self, rows: int, inner: int, cols: int) -> None:
        """A rows × inner matrix times an inner × cols matrix."""
        self.counts["flops"] += 2 * rows * inner * cols

    def exponential(self, count: int) -> None:
        self.counts["exponentials"] += count


def forward(problem: Problem, shape: TileShape) -> Cost:
    """One pass over query tiles: read q once, k and v once a visit; write o and lse once. Bias tiles are read too."""
    return _each_batch(problem, lambda b: _forward(problem, shape, b))


def backward(problem: Problem, shape: TileShape) -> Cost:
    """Three passes: delta = rowsum(do∘o); dq over query tiles; dk and dv over key tiles, recomputing p in both."""
    return _each_batch(problem, lambda b: _backward(problem, shape, b))


def standard(problem: Problem, backward: bool = False) -> Cost:
    """Attention that stores the n×s scores s and weights p, each written once and read back once (Dao et al. 2022, algorithm
    0); backward reads p twice, and stores dp and ds (algorithm 3)."""
    p, heads = problem, problem.b * problem.h
    pairs = heads * p.n * p.s
    q, o, k, v = heads * p.n * p.d, heads * p.n * p.e, p.b * p.g * p.s * p.d, p.b * p.g * p.s * p.e
    if not backward:
        return Cost(2 * pairs * (p.d + p.e), pairs, (q + k + v + 2 * pairs) * p.itemsize, (o + 2 * pairs) * p.itemsize)
    reads = q + k + v + 2 * o + 5 * pairs
    return Cost(2 * pairs * (2 * p.d + 2 * p.e), 0, reads * p.itemsize, (q + k + v + 2 * pairs) * p.itemsize)


def _each_batch(problem: Problem, price: Callable[[slice], Cost]) -> Cost:
    """The price of every batch entry; entries whose rows see the same keys cost the same and are walked once."""
    p = problem
    if p.mask.pointwise or p.b < 2:
        return sum((price(b) for b in blocks(p.b, 1)), Cost())
    seen = np.concatenate(p.mask.bounds(p.layout, slice(0, p.b), slice(0, p.n)), axis=1)
    _, index, counts = np.unique(seen, axis=0, return_index=True, return_counts=True)
    return sum((_scaled(price(slice(b, b + 1)), n) for b, n in zip(index.tolist(), counts.tolist(), strict=True)), Cost())


def _tile_counts(problem: Problem, shape: TileShape, visits: Iterable[Visit]) -> Cost:
    kinds = [v.kind for v in visits]
    full, partial = kinds.count(Tile.FULL), kinds.count(Tile.PARTIAL)
    everything = len(blocks(problem.n, shape.block_m)) * len(blocks(problem.s, shape.block_n))
    h = problem.h
    return Cost(empty_tiles=h * (everything - full - partial), partial_tiles=h * partial, full_tiles=h * full)


def _scaled(cost: Cost, times: int) -> Cost:
    return Cost(*(times * getattr(cost, f.name) for f in fields(cost)))


def _length(part: slice) -> int:
    return part.stop - part.start


def _forward(problem: Problem, shape: TileShape, b: slice) -> Cost:
    p, visits, total = problem, [], Cost()
    for i, row in walk(p, shape, b):
        rows, cols = _length(i), sum(_length(v.j) for v in row)
        pairs = rows * cols
        reads = rows * p.d + cols * (p.d + p.e) + (pairs if p.score.bias is not None else 0)
        exponentials = pairs + rows * len(row) + (2 * rows if p.score.sink else 0)  # p, alpha, and merging the sink
        writes = rows * (p.e * p.itemsize + p.lse_itemsize)
        total += Cost(2 * pairs * (p.d + p.e), exponentials, reads * p.itemsize, writes)
        visits += row
    return _scaled(total, p.h) + _tile_counts(p, shape, visits)


def _backward(problem: Problem, shape: TileShape, b: slice) -> Cost:
    p, visits = problem, []
    bias = 1 if p.score.bias is not None else 0
    each_head = Cost(0, 0, p.n * 2 * p.e * p.itemsize, p.n * p.lse_itemsize)  # delta: o and do in, delta out
    each_key_head = Cost()
    for i, row in walk(p, shape, b):  # dq: q, do, lse, delta once; k and v once a visit
        rows, cols = _length(i), sum(_length(v.j) for v in row)
        reads = (rows + cols) * (p.d + p.e) + bias * rows * cols
        each_head += Cost(
            2 * rows * cols * (2 * p.d + p.e),
            rows * cols,
            reads * p.itemsize + 2 * rows * p.lse_itemsize,
            rows * p.d * p.itemsize,
        )
        visits += row
    for j, column in walk_keys(p, shape, b):  # dk, dv: k and v once; q, do, lse, delta once a visit of each head of the group
        cols, rows = _length(j), sum(_length(v.i) for v in column)
        reads = rows * (p.d + p.e) + bias * rows * cols
        each_head += Cost(4 * rows * cols * (p.d + p.e), rows * cols, reads * p.itemsize + 2 * rows * p.lse_itemsize)
        each_key_head += Cost(0, 0, cols * (p.d + p.e) * p.itemsize, cols * (p.d + p.e) * p.itemsize)
    return _scaled(each_head, p.h) + _scaled(each_key_head, p.g) + _tile_counts(p, shape, visits)
