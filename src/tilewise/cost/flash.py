"""FlashAttention-2's order. Forward: query tiles outside, keys stream past. Backward: three kernels and no atomics, one of
them with key tiles outside. Decode: few query rows, the keys split among programs."""

from __future__ import annotations

from dataclasses import replace

from ..problem import Problem
from ..tiles import TileShape, visible_pairs
from .count import PARTIAL_BYTES, Cost, Moved, tidy
from .visits import Visits, bias_distinct, bias_size, entries


def forward(problem: Problem, shape: TileShape) -> Cost:
    """One pass over query tiles: read q once, k and v once a visit; write o and lse once. Bias tiles are read too.

    Elements of a head     n·(d + e) + n + (d + e)·Σ keys visited: (2·T_r + 2)·N·d + N where nothing is hidden
    """
    p, z = problem, problem.itemsize
    total = Cost()
    for times, one in entries(p, shape):
        query = {
            "q": Moved(z * p.n * p.d, 0, z * p.n * p.d),
            "k": Moved(z * one.cols * p.d),
            "v": Moved(z * one.cols * p.e),
            "bias": Moved(z * bias_size(p, one)),
            "o": Moved(0, z * p.n * p.e, z * p.n * p.e),
            "lse": Moved(0, p.lse_itemsize * p.n, p.lse_itemsize * p.n),
        }
        key = {"k": Moved(least=z * one.seen_cols * p.d), "v": Moved(least=z * one.seen_cols * p.e)}
        exponentials = one.pairs + one.rows + (2 * p.n if p.score.sink else 0)  # p, alpha, and merging the sink
        streamed, stays = z * one.cols * (p.d + p.e), z * (p.n + one.rows) * p.d
        work = Cost(2 * one.pairs * (p.d + p.e), exponentials, query, chip_bytes=streamed + stays, reader_bytes=streamed)
        total += ((work + tiles_of(one)) * p.h + Cost(tensors=key) * p.g) * times
    return tidy(total + bias_once(p, shape))


def backward(problem: Problem, shape: TileShape) -> Cost:
    """Three passes: delta = rowsum(do∘o); dq over query tiles; dk and dv over key tiles, recomputing p in both."""
    first = dq(problem, shape)
    tiles = {name: getattr(first, name) for name in ("empty_tiles", "partial_tiles", "full_tiles")}
    return replace(delta(problem) + first + dk_dv(problem, shape), **tiles)


def delta(problem: Problem) -> Cost:
    """delta = rowsum(do∘o): o and do in, delta out."""
    p, rows = problem, problem.b * problem.h * problem.n
    read, write = rows * p.e * p.itemsize, rows * p.lse_itemsize
    return tidy(Cost(tensors={"do": Moved(read, 0, read), "o": Moved(read, 0, read), "delta": Moved(0, write, write)}))


def dq(problem: Problem, shape: TileShape) -> Cost:
    """Over query tiles: q, do, lse and delta once, k and v once a visit; s, dp and dq are three products."""
    p, z, y = problem, problem.itemsize, problem.lse_itemsize
    total = Cost()
    for times, one in entries(p, shape):
        query = {
            **{name: Moved(z * p.n * size, 0, z * p.n * size) for name, size in (("q", p.d), ("do", p.e))},
            **{name: Moved(y * p.n, 0, y * p.n) for name in ("lse", "delta")},
            "k": Moved(z * one.cols * p.d),
            "v": Moved(z * one.cols * p.e),
            "bias": Moved(z * bias_size(p, one)),
            "dq": Moved(0, z * p.n * p.d, z * p.n * p.d),
        }
        key = {"k": Moved(least=z * one.seen_cols * p.d), "v": Moved(least=z * one.seen_cols * p.e)}
        filled, used = z * (one.cols + p.n + one.rows) * (p.d + p.e), z * one.cols * (2 * p.d + p.e)
        work = Cost(2 * one.pairs * (2 * p.d + p.e), one.pairs, query, chip_bytes=filled, reader_bytes=used)
        total += ((work + tiles_of(one)) * p.h + Cost(tensors=key) * p.g) * times
    return tidy(total + bias_once(p, shape))


def dk_dv(problem: Problem, shape: TileShape) -> Cost:
    """Over key tiles: k and v once, q, do, lse and delta once a visit of each head of the group; s, dp, dk and dv are four
    products."""
    p, z, y = problem, problem.itemsize, problem.lse_itemsize
    total = Cost()
    for times, one in entries(p, shape):
        query = {
            **{name: Moved(z * one.rows * x, 0, z * one.seen_rows * x) for name, x in (("q", p.d), ("do", p.e))},
            **{name: Moved(y * one.rows, 0, y * one.seen_rows) for name in ("lse", "delta")},
            "bias": Moved(z * bias_size(p, one)),
        }
        whole = {"k": z * p.s * p.d, "v": z * p.s * p.e}
        key = {name: Moved(size, 0, size) for name, size in whole.items()}
        key |= {f"d{name}": Moved(0, size, size) for name, size in whole.items()}
        filled, used = z * (one.rows + one.cols) * (p.d + p.e), 2 * z * one.rows * (p.d + p.e)
        work = Cost(4 * one.pairs * (p.d + p.e), one.pairs, query, chip_bytes=filled, reader_bytes=used)
        total += ((work + tiles_of(one)) * p.h + Cost(tensors=key, chip_bytes=z * p.s * (p.d + p.e)) * p.g) * times
    return tidy(total + bias_once(p, shape))


def decode(problem: Problem, block_n: int, splits: int = 1) -> Cost:
    """Forward with few query rows: a program takes all query rows of all heads that share a key head, and every `splits`-th
    part of the key blocks. The parts, o and lse in float32, go through memory, and a second kernel merges them.

    Bytes of a key head     z·s·(d + e) whatever the group, so FLOP per byte = h/g for two-byte elements
    """
    p, z, y = problem, problem.itemsize, problem.lse_itemsize
    shape, parts = TileShape(max(p.n, 1), block_n), splits if splits > 1 else 0
    total = Cost()
    for times, one in entries(p, shape):
        keys = {name: z * one.seen_cols * x for name, x in (("k", p.d), ("v", p.e))}
        query = {
            "q": Moved(z * splits * p.n * p.d, 0, z * p.n * p.d),
            "bias": Moved(z * bias_size(p, one)),
            "o": Moved(0, z * p.n * p.e, z * p.n * p.e),
            "lse": Moved(0, y * p.n, y * p.n),
            "parts": Moved(*(PARTIAL_BYTES * parts * p.n * (p.e + 1) * x for x in (1, 1, 2))),
        }
        exponentials = one.pairs + one.rows + parts * p.n + (2 * p.n if p.score.sink else 0)
        stays = z * (splits * p.n + one.rows) * p.d
        work = Cost(2 * one.pairs * (p.d + p.e), exponentials, query, chip_bytes=stays)
        streamed = sum(keys.values())
        key = Cost(
            tensors={name: Moved(size, 0, size) for name, size in keys.items()},
            chip_bytes=streamed,
            reader_bytes=streamed,
        )
        total += ((work + tiles_of(one)) * p.h + key * p.g) * times
    return tidy(total + bias_once(p, shape))


def useful_flops(problem: Problem, backward: bool = False) -> int:
    """Operations on the pairs that the mask leaves, the usual count: two products forward, five backward."""
    p = problem
    return 2 * visible_pairs(p) * (3 * p.d + 2 * p.e if backward else p.d + p.e)


def tiles_of(one: Visits) -> Cost:
    """A head's tiles by kind."""
    return Cost(empty_tiles=one.empty, partial_tiles=one.partial, full_tiles=one.full)


def bias_once(problem: Problem, shape: TileShape) -> Cost:
    """What a kernel needs of the bias at least."""
    return Cost(tensors={"bias": Moved(least=problem.itemsize * bias_distinct(problem, shape))})
