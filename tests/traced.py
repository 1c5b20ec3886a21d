"""Walks that happen, one load at a time, for what no reference runs: the chip's own memory, split keys, a ring. They know
loops and the sizes of blocks, and no formula."""

from __future__ import annotations

from collections import Counter

import numpy as np

from tilewise.cost import Cost, Meter
from tilewise.cost.count import PARTIAL_BYTES, tidy
from tilewise.problem import Inputs, Partial, Problem
from tilewise.reference.flash import Head, heads, sink_state
from tilewise.softmax import absorb, empty, finish, merge
from tilewise.tiles import TileShape, blocks, walk, walk_keys


def seen(price: Cost) -> Cost:
    """Of a cost what a meter sees."""
    return Cost(price.flops, price.exponentials, price.tensors)


def counted(meter: Meter) -> Cost:
    """A meter's counts, without tensors of which it saw nothing but empty blocks."""
    return tidy(meter.cost)


class Shared:
    """Shared memory: bytes in and out. `readers` warps share the rows of a tile."""

    def __init__(self, problem: Problem, readers: int) -> None:
        self.itemsize, self.readers, self.bytes = problem.itemsize, readers, 0

    def once(self, part: slice, *widths: int) -> None:
        """Blocks are filled in, or read once."""
        for width in widths:
            self.bytes += (part.stop - part.start) * width * self.itemsize

    def each(self, part: slice, *widths: int) -> None:
        """Blocks are read by each reader, who needs all of them."""
        for _ in range(self.readers):
            self.once(part, *widths)

    def reduce(self, part: slice, width: int) -> None:
        """What readers hold parts of is summed: each writes its float32 part and reads it."""
        for _ in range(self.readers):
            self.bytes += (part.stop - part.start) * width * 4 * 2


def chip_queries_outside(problem: Problem, shape: TileShape, readers: int, products: str) -> int:
    """q stays, for dq do too, and each warp reads its own rows of it; k and v stream past all of them. `products` says what
    streams through each product: "k v" forward, "k v k" for dq."""
    p, shared = problem, Shared(problem, readers)
    stays = (p.d,) if products == "k v" else (p.d, p.e)
    for head in heads(p, EMPTY, Meter.of(p)):
        for i, visits in walk(p, shape, head.b):
            shared.once(i, *stays)
            for visit in visits:
                shared.once(visit.j, p.d, p.e)
                shared.once(i, *stays)
                for name in products.split():
                    shared.each(visit.j, p.d if name == "k" else p.e)
    return shared.bytes


def chip_keys_outside(problem: Problem, shape: TileShape, readers: int, kind: str) -> int:
    """Keys stay in shared memory. kind "dk_dv": all of them, q and do stream; "flash1": q streams and o is summed over readers;
    "flash1 backward": q and do stream and dq is summed; "atomic": ds goes through shared memory instead."""
    p, shared = problem, Shared(problem, readers)
    for head in heads(p, EMPTY, Meter.of(p)):
        for j, visits in walk_keys(p, shape, head.b):
            if head.x % p.group == 0 and (visits or kind == "dk_dv"):
                shared.once(j, p.d, p.e)
            for visit in visits:
                shared.once(visit.i, p.d)
                shared.once(j, p.d, p.e)  # s = q·kᵀ and o += p·v, or dp = do·vᵀ
                shared.each(visit.i, p.d)
                if kind == "flash1":
                    shared.reduce(visit.i, p.e)
                    continue
                shared.once(visit.i, p.e)
                shared.each(visit.i, p.e, p.e, p.d)  # dp, dv += pᵀ·do, dk += dsᵀ·q
                if kind == "flash1 backward":
                    shared.once(j, p.d)  # dq += ds·k
                    shared.reduce(visit.i, p.d)
                if kind == "atomic":
                    shared.once(visit.i, j.stop - j.start, j.stop - j.start)  # ds in, ds out
                    shared.each(j, p.d)
    return shared.bytes


EMPTY = Inputs(*[np.zeros((0, 0, 0, 0))] * 3)


def chip_product(problem: Problem, shape: TileShape, readers: int, sizes: tuple[int, int, int]) -> int:
    """rows × inner × cols of every head, in tiles of the output: rows of the left factor belong to one reader each."""
    shared, (rows, inner, cols) = Shared(problem, readers), sizes
    for _ in range(problem.b * problem.h):
        for i in blocks(rows, shape.block_m):
            for j in blocks(cols, shape.block_n):
                shared.once(i, inner, inner)
                shared.once(j, inner)
                shared.each(j, inner)
    return shared.bytes


def decode(problem: Problem, x: Inputs[np.ndarray], block_n: int, splits: int, meter: Meter) -> Partial:
    """Split keys, really computed: each program folds its blocks of keys for all heads of a group, and the parts merge."""
    p = problem
    o, lse = np.zeros((p.b, p.n, p.h, p.e)), np.zeros((p.b, p.h, p.n))
    parts: dict[tuple[int, int], list] = {}
    programs = [heads(p, x, meter)[i : i + p.group] for i in range(0, p.b * p.h, p.group)]
    for program in programs:
        (visits,) = [row for _, row in walk(p, TileShape(max(p.n, 1), block_n), program[0].b)] or [[]]
        for split in range(splits):
            _fold(p, program, visits[split::splits], split, parts)
    if splits > 1:
        meter.kernel()
    for program in programs:
        for head in program:
            o[head.b.start, :, head.x], lse[head.b.start, head.x] = _merged(p, head, parts, meter)
    return Partial(o, lse)


def _fold(p: Problem, program: list[Head], visits: list, split: int, parts: dict) -> None:
    meter = program[0].meter
    states = {head.x: empty(p.n, p.e) for head in program}
    queries = {head.x: head.rows("q", slice(0, p.n)) for head in program}
    for visit in visits:
        k, v = program[0].rows("k", visit.j), program[0].rows("v", visit.j)
        for head in program:
            s = head.logits(queries[head.x], k, visit)
            states[head.x] = absorb(states[head.x], s, v, head.drop(visit))
            meter.product(p.n, s.shape[1], p.e)
            meter.exponential(s.size + len(s))
    for head in program:
        parts.setdefault((head.b.start, head.x), []).append((split, states[head.x]))


def _merged(p: Problem, head: Head, parts: dict, meter: Meter) -> tuple[np.ndarray, np.ndarray]:
    """o and lse of one head from its parts; each but a lone one makes its way through memory and is weighed once."""
    at, mine = (head.b.start, head.x), parts[head.b.start, head.x]
    total = mine[0][1]
    for _, part in mine[1:]:
        total = merge(total, part)
    if len(mine) > 1:
        for split, part in mine:
            numbers = np.concatenate([part.acc, part.l[:, None]], axis=1)
            meter.write(numbers, "parts", (*at, split), PARTIAL_BYTES)
            meter.kernel()
            meter.read(numbers, "parts", (*at, split), PARTIAL_BYTES)
            meter.exponential(p.n)
    if head.inputs.sink is not None:
        total = merge(total, sink_state(p.n, p.e, head.inputs.sink[head.x]))
        meter.exponential(2 * p.n)
    o, lse = finish(total)
    return meter.write(o, "o", at), meter.write(lse, "lse", at)


def ring(problem: Problem, ranks: int) -> list[Counter[str]]:
    """A ring simulated with arrays: who sent how many messages and bytes, forward and "back"."""
    p, step = problem, max(1, -(-problem.s // ranks))
    bounds = [slice(min(r * step, p.s), min((r + 1) * step, p.s)) for r in range(ranks)]
    sent = [Counter[str]() for _ in range(ranks)]

    def shard(rank: int, dtype: type) -> list[np.ndarray]:
        rows = bounds[rank].stop - bounds[rank].start
        return [np.zeros((p.b, rows, p.g, width), dtype) for width in (p.d, p.e)]

    def turn(held: list, hops: str, count: str) -> list:
        for rank in range(ranks):
            sent[rank][hops] += 1
            sent[rank][count] += sum(x.nbytes for x in held[rank])
        return [held[rank - 1] for rank in range(ranks)]

    keys = [shard(rank, np.float16) for rank in range(ranks)]
    for _ in range(ranks - 1):
        keys = turn(keys, "hops", "bytes")
    keys = [shard(rank, np.float16) for rank in range(ranks)]
    grads = [shard(rank, np.float32) for rank in range(ranks)]
    for hop in range(ranks if ranks > 1 else 0):
        grads = turn(grads, "back hops", "back bytes")
        if hop < ranks - 1:
            keys = turn(keys, "back hops", "back bytes")
    assert [g[0].shape[1] for g in grads] == [b.stop - b.start for b in bounds]  # home again
    return sent
