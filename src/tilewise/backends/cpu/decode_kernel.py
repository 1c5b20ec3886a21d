"""o and lse of one query row a head: decode. There is next to nothing to compute for each key, so what counts is that every key
and value is read once, and in the order in which they lie in memory: the query heads of a group share each load, with the head
size in the lanes, and all heads look at a few keys before the next ones come. A task is a range of keys of one batch entry; its
partial results are merged, in the order of the keys, by whoever finishes the last of them. How keys are split depends on the
problem alone, and so does the result.

A tile of scores is one vector: `lanes` dot products of `heads` query heads with lanes / heads keys, heads outside.

Source: Dao, Haziza, Massa, Sizov 2023, Flash-Decoding; Milakov & Gimelshein 2018, section 3, for the merge."""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir

from .arguments import Block, Words
from .arithmetic import LN_2, LOG2_E, exp2, log, tanh
from .pack import key_columns
from .target import Target
from .vector import ADDRESS, I32, INDEX, ITEMSIZE, Code, Module, Value

BLOCK = Block(
    "q_ptr", "q_b", "q_h", "k_ptr", "k_b", "k_s", "k_g", "v_ptr", "v_b", "v_s", "v_g", "o_ptr", "o_b", "o_h", "lse_ptr",
    "first_ptr", "past_ptr", "sight_b", "sink_ptr", "sinks", "capped", "cap_f32", "scale_f32",
    "b", "h", "g", "group", "d", "e", "d_columns", "e_columns", "splits", "split_keys", "step",
    "scratch_ptr", "scratch_bytes", "counter_ptr", "partial_ptr", "partial_bytes",
)  # fmt: skip
"""What a call tells the kernel. Distances in bytes; `split_keys` keys a task; counters and partial results of all tasks."""

KEYS = 8
"""Keys of a step, if tiles are not longer. They follow each other in memory with all their heads, or head by head in runs of
so many; of runs twice as long, an Intel Xeon of 2023 read a quarter less in a second."""

HEADS = (4, 2, 1)
"""Query heads that share a load; a group is cut into these."""


def head_bytes(target: Target, d: int, e_columns: int) -> int:
    """Scratch memory of one query head: q, its sums, m, ℓ and α."""
    return 4 * (key_columns(target, d) + e_columns + 3 * target.lanes)


def step_keys(target: Target, group: int) -> int:
    """Keys of a step for groups of so many query heads: whole tiles of every size that such a group is cut into."""
    least = next(heads for heads in heads_of(target) if group % heads == 0)
    return max(KEYS, target.lanes // least)


def heads_of(target: Target) -> tuple[int, ...]:
    return tuple(heads for heads in HEADS if heads <= target.lanes)


def write(target: Target, kind: Any, out: Any) -> Module:
    """The kernel `decode` for inputs and outputs of these kinds."""
    module = Module(target)
    attend, merge = write_task(module, kind), write_merge(module, out)
    with module.function("decode", (ADDRESS,), exported=True) as code:
        (block,) = code.arguments
        w = Words(code, BLOCK, block)
        scratch = w.scratch_ptr + BLOCK.take(code, block, "slot") * w.scratch_bytes
        with code.repeat() as leave:
            task = BLOCK.take(code, block, "task")
            leave(task >= w.b * w.splits)
            code.call(attend, block, scratch, task)
            entry = task // w.splits
            done = code.fetch_add(w.counter_ptr + entry * 8, 1)
            with code.when(done.equals(w.splits - 1)), code.loop(w.g) as g:
                code.call(merge, block, entry * w.g + g)
    return module


class Chunk:
    """Where some heads of a group keep what they know: q "heads columns", sums "heads columns", and m, ℓ and α in the lanes of
    their tiles."""

    def __init__(self, code: Code, w: Words, address: Value, heads: int) -> None:
        self.q = address
        self.sums = address + w.d_columns * (4 * heads)
        self.m = self.sums + w.e_columns * (4 * heads)
        self.l, self.alpha = self.m + code.vector_bytes, self.m + 2 * code.vector_bytes


def write_task(module: Module, kind: Any) -> ir.Function:
    """`attend(block, scratch, task)`: what the query heads of one batch entry make of a range of keys. `scratch`: scores of a
    step, then the chunks of heads."""
    target = module.target
    sizes = heads_of(target)
    begin, step, end = ({heads: make(module, heads, kind) for heads in sizes} for make in (write_begin, write_step, write_end))
    with module.function("attend", (ADDRESS, ADDRESS, INDEX)) as code:
        block, scratch, task = code.arguments
        w = Words(code, BLOCK, block)
        entry, split = task // w.splits, task % w.splits
        sight = entry * w.sight_b
        first, past = (code.get(pointer + sight, I32).to(INDEX) for pointer in (w.first_ptr, w.past_ptr))
        lo = code.greater(first, split * w.split_keys)
        hi = code.lesser(past, (split + 1) * w.split_keys)

        def each(functions: dict[int, ir.Function], *more: Value) -> None:
            """The chunks of each group, one after the other."""
            place = code.variable(code.index(CHUNKS_AT))
            with code.loop(w.g) as g:
                x = code.variable(code.index(0))
                x.set(code.index(0))
                for heads, function in functions.items():
                    with code.loop((w.group - x.get()) // heads):
                        code.call(function, block, scratch, scratch + place.get(), entry * w.g + g, x.get(), *more)
                        x.set(x.get() + heads)
                        place.set(place.get() + (w.d_columns + w.e_columns) * (4 * heads) + 3 * code.vector_bytes)

        each(begin)
        with code.loop((hi - lo + w.step - 1) // w.step) as c:
            j = lo + c * w.step
            each(step, j, code.lesser(hi - j, w.step))
        each(end, split)
    return module.find("attend")  # type: ignore[return-value]


CHUNKS_AT = 4 * HEADS[0] * 16
"""Where the chunks begin in scratch memory: behind the scores of `HEADS[0]` heads and the keys of any step."""


def write_begin(module: Module, heads: int, kind: Any) -> ir.Function:
    """`begin(block, scratch, chunk, head, x)`: q as float32 times scale, and nothing seen. x: the first query head's number in
    its group."""
    name = f"begin_{heads}"
    with module.function(name, (ADDRESS, ADDRESS, ADDRESS, INDEX, INDEX)) as code:
        block, _, address, head, x = code.arguments
        w = Words(code, BLOCK, block)
        chunk = Chunk(code, w, address, heads)
        source = w.q_ptr + head // w.g * w.q_b + (head % w.g * w.group + x) * w.q_h
        for r in range(heads):
            row, place = source + w.q_h * r, chunk.q + w.d_columns * (4 * r)
            with code.loop(code.index(0), w.d, code.lanes) as at:
                left = code.lesser(w.d - at, code.index(code.lanes))
                code.store(place + at * 4, code.load(row + at * ITEMSIZE[kind], kind, left) * w.scale_f32)
        with code.loop(code.index(0), w.e_columns * heads, code.lanes) as at:
            code.store(chunk.sums + at * 4, code.vector(0.0))
        code.store(chunk.m, code.vector(-math.inf))
        code.store(chunk.l, code.vector(0.0))
    return module.find(name)  # type: ignore[return-value]


def write_step(module: Module, heads: int, kind: Any) -> ir.Function:
    """`step(block, scratch, chunk, head, x, j, keys)`: the heads of a chunk after the keys j … j + keys − 1."""
    name = f"step_{heads}"
    scores, weigh, add = write_scores(module, heads, kind), write_weigh(module, heads), write_values(module, heads, kind)
    with module.function(name, (ADDRESS, ADDRESS, ADDRESS, INDEX, INDEX, INDEX, INDEX)) as code:
        block, s, address, head, _, j, keys = code.arguments
        w = Words(code, BLOCK, block)
        b, g = head // w.g, head % w.g
        k, v = w.k_ptr + b * w.k_b + g * w.k_g + j * w.k_s, w.v_ptr + b * w.v_b + g * w.v_g + j * w.v_s
        code.call(scores, block, s, address, k, keys)
        code.call(weigh, block, s, address, keys)
        code.call(add, block, s, address, v, keys)
    return module.find(name)  # type: ignore[return-value]


def write_scores(module: Module, heads: int, kind: Any) -> ir.Function:
    """`scores(block, s, chunk, k, keys)`: s = q·k, tile by tile; −inf for keys beyond the last."""
    name, each = f"scores_{heads}", module.target.lanes // heads
    with module.function(name, (ADDRESS, ADDRESS, ADDRESS, ADDRESS, INDEX)) as code:
        block, s, address, k, keys = code.arguments
        w = Words(code, BLOCK, block)
        q, whole = Chunk(code, w, address, heads).q, w.d & -code.lanes

        def tile(j: Value, last: Value | None) -> Value:
            rows = [k + w.k_s * (j + r if last is None else code.lesser(j + r, last)) for r in range(each)]
            sums = [code.variable(code.vector(0.0)) for _ in range(heads * each)]

            def step(at: Value, left: Value | None = None) -> None:
                loaded = [code.load(row + at * ITEMSIZE[kind], kind, left) for row in rows]
                for row in rows:
                    code.prefetch(row + w.k_s * w.step + at * ITEMSIZE[kind])
                for r in range(heads):
                    mine = code.load(q + (w.d_columns * r + at) * 4)
                    for column, vector in enumerate(loaded):
                        one = sums[r * each + column]
                        one.set(code.fma(mine, vector, one.get()))

            with code.loop(code.index(0), whole, code.lanes) as at:
                step(at)
            with code.when(whole < w.d):
                step(whole, w.d - whole)
            return code.totals([one.get() for one in sums])

        full = keys // each
        with code.loop(full) as t:
            code.store(s + t * code.vector_bytes, tile(t * each, None))
        with code.when(keys % each > 0):
            there = (code.numbered() & (each - 1)) < code.vector((keys % each).to(I32))
            found = code.select(there, tile(full * each, keys - 1), code.vector(-math.inf))
            code.store(s + full * code.vector_bytes, found)
    return module.find(name)  # type: ignore[return-value]


def write_weigh(module: Module, heads: int) -> ir.Function:
    """`weigh(block, s, chunk, keys)`: the step of the online softmax, α and m alike in all lanes of a head, ℓ lane by lane."""
    name, each = f"weigh_{heads}", module.target.lanes // heads
    with module.function(name, (ADDRESS, ADDRESS, ADDRESS, INDEX)) as code:
        block, s, address, keys = code.arguments
        w = Words(code, BLOCK, block)
        chunk, tiles = Chunk(code, w, address, heads), (keys + (each - 1)) // each
        with code.when(w.capped.differs(0)):
            most = code.vector(w.cap_f32)
            with code.loop(tiles) as t:
                score = code.load(s + t * code.vector_bytes)
                capped = most * tanh(code, score / most)
                code.store(s + t * code.vector_bytes, code.select(score.equals(-math.inf), score, capped))
        before = code.load(chunk.m)
        largest = code.variable(before)
        with code.loop(tiles) as t:
            largest.set(code.greater(code.load(s + t * code.vector_bytes), largest.get()))
        m = code.among(largest.get(), each, code.greater)
        pivot = code.select(m.equals(-math.inf), code.vector(0.0), m)
        alpha = exp2(code, before - pivot)
        total = code.variable(code.load(chunk.l) * alpha)
        with code.loop(tiles) as t:
            weight = exp2(code, code.load(s + t * code.vector_bytes) - pivot)
            total.set(total.get() + weight)
            code.store(s + t * code.vector_bytes, weight)
        for place, value in ((chunk.m, m), (chunk.l, total.get()), (chunk.alpha, alpha)):
            code.store(place, value)
    return module.find(name)  # type: ignore[return-value]


def write_values(module: Module, heads: int, kind: Any) -> ir.Function:
    """`values(block, s, chunk, v, keys)`: sums = α·sums + p·v, some vectors of a row at a time."""
    name, target = f"values_{heads}", module.target
    each, most = target.lanes // heads, max(1, target.registers // 2 // heads) if target.registers >= 32 else 2
    with module.function(name, (ADDRESS, ADDRESS, ADDRESS, ADDRESS, INDEX)) as code:
        block, s, address, v, keys = code.arguments
        w = Words(code, BLOCK, block)
        chunk = Chunk(code, w, address, heads)
        alphas = [code.broadcast(chunk.alpha + 4 * each * r) for r in range(heads)]

        def part(x: Value, vectors: int, left: Value | None = None) -> None:
            places = [[chunk.sums + (w.e_columns * r + x + c * code.lanes) * 4 for c in range(vectors)] for r in range(heads)]
            sums = [[code.variable(code.load(p) * alphas[r]) for p in places[r]] for r in range(heads)]
            with code.loop(keys) as j:
                row = v + w.v_s * j + x * ITEMSIZE[kind]
                loaded = [code.load(row + c * code.lanes * ITEMSIZE[kind], kind, left) for c in range(vectors)]
                for c in range(vectors):
                    code.prefetch(row + w.v_s * w.step + c * code.lanes * ITEMSIZE[kind])
                weights = s + (j // each * code.lanes + j % each) * 4
                for r in range(heads):
                    weight = code.broadcast(weights + 4 * each * r)
                    for c in range(vectors):
                        sums[r][c].set(code.fma(weight, loaded[c], sums[r][c].get()))
            for r in range(heads):
                for c in range(vectors):
                    code.store(places[r][c], sums[r][c].get())

        wide = most * code.lanes
        lots, whole = w.e // wide * wide, w.e & -code.lanes
        with code.loop(code.index(0), lots, wide) as x:
            part(x, most)
        with code.loop(lots, whole, code.lanes) as x:
            part(x, 1)
        with code.when(whole < w.e):
            part(whole, 1, w.e - whole)
    return module.find(name)  # type: ignore[return-value]


def write_end(module: Module, heads: int, kind: Any) -> ir.Function:
    """`end(block, scratch, chunk, head, x, split)`: m, ℓ and sums of the heads of a chunk to where all partial results lie: for
    each query head m, ℓ, and from `lanes` numbers on the sums."""
    del kind
    name, each = f"end_{heads}", module.target.lanes // heads
    with module.function(name, (ADDRESS, ADDRESS, ADDRESS, INDEX, INDEX, INDEX)) as code:
        block, _, address, head, x, split = code.arguments
        w = Words(code, BLOCK, block)
        chunk = Chunk(code, w, address, heads)
        m, total = code.load(chunk.m), code.among(code.load(chunk.l), each, lambda a, b: a + b)
        for r in range(heads):
            place = w.partial_ptr + ((head * w.group + x + r) * w.splits + split) * w.partial_bytes
            code.put(place, code.lane(m, each * r))
            code.put(place + 4, code.lane(total, each * r))
            with code.loop(code.index(0), w.e_columns, code.lanes) as at:
                found = code.load(chunk.sums + (w.e_columns * r + at) * 4)
                code.store(place + (at + code.lanes) * 4, found)
    return module.find(name)  # type: ignore[return-value]


def write_merge(module: Module, out: Any) -> ir.Function:
    """`merge(block, head)`: the query heads of one key head, from their parts in order.

    M = max m_a    o = Σ 2^(m_a − M)·sums_a / L    L = Σ 2^(m_a − M)·ℓ_a    lse = log L + M"""
    with module.function("merge", (ADDRESS, INDEX)) as code:
        block, head = code.arguments
        w = Words(code, BLOCK, block)
        with code.loop(w.group) as r:
            x = head % w.g * w.group + r
            parts = w.partial_ptr + (head * w.group + r) * w.splits * w.partial_bytes
            most, total = code.variable(code.vector(-math.inf)), code.variable(code.vector(0.0))
            with code.when(w.sinks.differs(0)):
                most.set(code.broadcast(w.sink_ptr + x * 4) * LOG2_E)
                total.set(code.vector(1.0))
            with code.loop(w.splits) as a:
                most.set(code.greater(code.broadcast(parts + a * w.partial_bytes), most.get()))
            pivot = code.select(most.get().equals(-math.inf), code.vector(0.0), most.get())
            with code.when(w.sinks.differs(0)):
                total.set(exp2(code, code.broadcast(w.sink_ptr + x * 4) * LOG2_E - pivot))
            with code.loop(w.splits) as a:
                part = parts + a * w.partial_bytes
                weight = exp2(code, code.broadcast(part) - pivot)
                total.set(code.fma(weight, code.broadcast(part + 4), total.get()))
                code.store(part, weight)
            nothing = total.get().equals(0.0)
            factor = code.select(nothing, code.vector(0.0), code.vector(1.0) / total.get())
            lse = code.select(nothing, code.vector(-math.inf), code.fma(most.get(), LN_2, log(code, total.get())))
            code.put(w.lse_ptr + (head // w.g * w.h + x) * 4, code.lane(lse, 0))
            row = w.o_ptr + head // w.g * w.o_b + x * w.o_h
            with code.loop(code.index(0), w.e, code.lanes) as at:
                _write_row(code, w, (parts, row, at), (nothing, factor), out)
    return module.find("merge")  # type: ignore[return-value]


def _write_row(code: Code, w: Words, where: tuple[Value, Value, Value], end: tuple[Value, Value], out: Any) -> None:
    """One vector of a row of o, from the parts, whose first number is their weight by now."""
    parts, row, at = where
    nothing, factor = end
    total = code.variable(code.vector(0.0))
    with code.loop(w.splits) as a:
        part = parts + a * w.partial_bytes
        total.set(code.fma(code.broadcast(part), code.load(part + (at + code.lanes) * 4), total.get()))
    found = code.select(nothing, code.vector(0.0), total.get() * factor)
    code.store(row + at * ITEMSIZE[out], found, out, code.lesser(w.e - at, code.index(code.lanes)))
