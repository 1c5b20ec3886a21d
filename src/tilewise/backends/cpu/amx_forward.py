"""The forward pass of bfloat16 inputs where the processor multiplies tiles: what `forward_kernel` does, with other products.

A panel is two tiles of queries, and its scores lie as they do there, Sᵀ "keys panel" in float32: so masks and scores are the
same functions. K is packed as A, Qᵀ as B, Vᵀ as A; weights are rounded to bfloat16 on their way to the second product, as
kernels for GPUs do, and summed up before that.

    Sᵀ = K·Qᵀ    p = 2^(factor·s − m)    Oᵀ = α·Oᵀ + Vᵀ·Pᵀ

Source: Dao 2023, FlashAttention-2, algorithm 1."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from .amx import DEPTH, LINE, SIDE, TILE, Product, Tiles, configured, pair_up
from .amx_pack import pack
from .arguments import Words
from .arithmetic import EXP2_ROUGH, exp2
from .forward_kernel import (
    BLOCK,
    State,
    begin_state,
    each_task,
    state_of,
    write_end,
    write_load,
    write_panel,
    write_score,
    write_task,
)
from .panel import careful_product, rows, vectors_at, weigh
from .scores import Place, drop
from .target import Target
from .vector import ADDRESS, BF16, F32, INDEX, Code, Module, Value, Variable

CHUNK = 128
"""Keys whose scores a thread keeps at a time, beside those of the next ones. So many terms are added to o before it is stored:
with half as many a head of 128 took a twentieth longer, a head of 64 did not."""

HEADROOM = 8.0
"""m follows the largest score, in base 2, when it lies further behind: weights may grow to 2^8, and α is mostly 1."""

SCORE_ROWS = 3 * CHUNK + 1
"""Rows of a panel's scratch memory: α, and scores and weights of two chunks."""


def write(target: Target, kind: Any, out: Any) -> Module:
    """The kernel `forward` for bfloat16 inputs and outputs of a kind."""
    assert kind == BF16 and target.amx
    module = Module(target)
    absorb = {vectors: write_absorb(module, vectors) for vectors in range(1, target.vectors + 1)}
    load, panel = write_load(module, bring_tiles(module)), write_panel(module, absorb)
    attend = write_task(module, write_begin(module), load, panel, write_end(module, out))
    with module.function("forward", (ADDRESS,), exported=True) as code, configured(code):
        each_task(code, attend)
    return module


def write_begin(module: Module) -> ir.Function:
    """`begin(block, scratch, b, x, i, p)`: panel p, whose first query is row i: its Qᵀ, an empty state, and what it sees."""
    row_bytes, turn = 4 * module.target.panel, pack(module, paired=False, turned=True)
    with module.function("begin", (ADDRESS, ADDRESS, INDEX, INDEX, INDEX, INDEX)) as code:
        block, scratch, b, x, i, p = code.arguments
        w = Words(code, BLOCK, block)
        queries, source = scratch + p * w.d_columns * row_bytes, w.q_ptr + b * w.q_b + x * w.q_h + i * w.q_n
        count = code.lesser(w.n - i, code.index(module.target.panel))
        code.call(turn, source, w.q_n, count, w.d, queries, row_bytes, SIDE * row_bytes, LINE)
        begin_state(code, w, scratch, (b, i, p))
    return module.find("begin")  # type: ignore[return-value]


def bring_tiles(module: Module) -> Callable[..., Value]:
    """Keys and values as tiles."""
    natural, turned = pack(module, paired=False, turned=False), pack(module, paired=True, turned=True)

    def bring(code: Code, w: Words, scratch: Value, k: Value, v: Value, at: Value, count: Value) -> Value:
        key_row, value_row = w.d_columns * (SIDE * 2), w.e_columns * (DEPTH * 2)
        keys, values = scratch + w.k_at + at // SIDE * key_row, scratch + w.v_at + at // DEPTH * value_row
        code.call(natural, k, w.k_s, count, w.d, keys, LINE, TILE, key_row)
        return code.call(turned, v, w.v_s, count, w.e, values, LINE, TILE, value_row)

    return bring


class Panel:
    """A panel of queries and the keys from row `at` of a block on: the matrices of their products, in tiles."""

    def __init__(self, code: Code, w: Words, scratch: Value, p: Value, at: Value) -> None:
        self.code, self.w, self.row, row = code, w, 4 * code.module.target.panel, 4 * code.module.target.panel
        self.state, self.depth = state_of(code, w, scratch, p), w.d_columns // DEPTH
        key_row, value_row = w.d_columns * (SIDE * 2), w.e_columns * (DEPTH * 2)
        self.k = Tiles(scratch + w.k_at + at // SIDE * key_row, LINE, key_row, TILE)
        self.q = Tiles(scratch + p * w.d_columns * row, row, SIDE * row, LINE)
        self.v = Tiles(scratch + w.v_at + at // DEPTH * value_row, LINE, TILE, value_row)
        self.o = Tiles(scratch + w.o_at + p * w.e_columns * row, row, SIDE * row, LINE)
        self.alpha = scratch + w.p_at

    def scores(self, c: Value) -> Value:
        """Where those of chunk c are: every other one has the same place."""
        return self.alpha + self.row + (c & 1) * (CHUNK * self.row)

    def weights(self, c: Value) -> Value:
        return self.alpha + (2 * CHUNK + 1) * self.row + (c & 1) * (CHUNK // 2 * self.row)

    def score(self, c: Value, r: Value, vectors: int) -> Product:
        """Compute the scores of rows r … r + 15 of a chunk of keys; `keep` stores them."""
        product = Product(self.code, (1, vectors))
        product.begin()
        product.add(self.k.part(c * (CHUNK // SIDE) + r // SIDE, 0), self.q, self.depth)
        return product

    def keep(self, product: Product, c: Value, r: Value) -> None:
        product.end(Tiles(self.scores(c) + r * self.row, self.row, 0, LINE))

    def add(self, c: Value, x: Value, depth: Value | int, shape: tuple[int, int], first: int = 0) -> None:
        """What a chunk adds to rows of tiles of o, from row x on."""
        product, o = Product(self.code, shape, first), self.o.part(x, 0)
        product.begin(o)
        product.add(self.v.part(x, c * (CHUNK // DEPTH)), Tiles(self.weights(c), self.row, SIDE * self.row, LINE), depth)
        product.end(o)

    def add_all(self, c: Value, depth: Value, vectors: int) -> None:
        tiles = self.w.e_columns // SIDE
        with self.code.loop(self.code.index(0), tiles & -2, 2) as x:
            self.add(c, x, depth, (2, vectors))
        with self.code.when((tiles & 1) > 0):
            self.add(c, tiles - 1, depth, (1, vectors))


def write_absorb(module: Module, vectors: int) -> ir.Function:
    """`absorb(block, scratch, head, i, p, start, j, keys, kind)`: see `forward_kernel`; j − start is a multiple of `DEPTH`."""
    name = f"absorb_{vectors}"
    usual, special = write_usual(module, vectors), write_special(module, vectors)
    with module.function(name, (ADDRESS, ADDRESS, *[INDEX] * 7)) as code:
        block, *_, kind = code.arguments
        dropout = Words(code, BLOCK, block).dropout
        with code.either(((kind >> 8) | dropout).equals(0)) as branches:
            for branch, function in zip(branches, (usual, special), strict=True):
                with branch:
                    code.call(function, *code.arguments)
    return module.find(name)  # type: ignore[return-value]


def write_usual(module: Module, vectors: int) -> ir.Function:
    """`absorb` as it mostly is. While the weights of a chunk of keys are computed, tiles make the scores of the next one and
    add the one before to o: the processor does some of both at once, if instructions of both are not far apart."""
    name, row = f"usual_{vectors}", 4 * module.target.panel
    rescale, begin = write_rescale(module, vectors), write_chunk(module, vectors)
    with module.function(name, (ADDRESS, ADDRESS, *[INDEX] * 7)) as code:
        block, scratch, head, i, p, start, j, keys, kind = code.arguments
        w, none = Words(code, BLOCK, block), code.index(0)
        panel, chunks = Panel(code, w, scratch, p, j - start), (keys + (CHUNK - 1)) // CHUNK
        m, l, tiles = panel.state.m, panel.state.l, w.e_columns // SIDE  # noqa: E741 - the paper's ℓ
        folded = (w.bias | w.alibi | w.capped).equals(0) & (w.scale_f32 > 0.0)
        factor = code.select(folded, w.scale_f32, 1.0)
        with code.loop(none, filled(code, keys, none), SIDE) as r:
            panel.keep(panel.score(none, r, vectors), none, r)
        with code.loop(chunks) as c:
            size, ahead = filled(code, keys, c), filled(code, keys, c + 1)
            with code.when(c > 0):
                code.call(rescale, panel.o.address, panel.alpha, w.e_columns)
            there = code.lesser(keys - c * CHUNK, code.index(CHUNK))
            code.call(begin, block, panel.scores(c), head, i, j + c * CHUNK, there, m, kind & 255, panel.alpha, factor)
            sums = [code.variable(x) for x in vectors_at(code, l, vectors)]
            pivots = [code.select(x.equals(-math.inf), code.vector(0.0), x) for x in vectors_at(code, m, vectors)]

            def weigh(r: Value, c: Value = c, sums: Any = sums, pivots: Any = pivots) -> None:
                at = panel.scores(c) + r * row, panel.weights(c) + r * (row // 2)
                weigh_rows(code, at, sums, [x * -1.0 for x in pivots], factor)

            with code.loop(none, size, SIDE) as r:
                with code.when(r < ahead):
                    product = panel.score(c + 1, r, vectors)
                weigh(r)
                with code.when(r < ahead):
                    panel.keep(product, c + 1, r)
                with code.when(c > 0), code.loop(tiles * r // size, tiles * (r + SIDE) // size) as x:
                    panel.add(c - 1, x, CHUNK // DEPTH, (1, vectors), vectors)
                weigh(r + SIDE // 2)
            for v, total in enumerate(sums):
                code.store(l + v * code.vector_bytes, total.get())
        code.call(rescale, panel.o.address, panel.alpha, w.e_columns)
        panel.add_all(chunks - 1, filled(code, keys, chunks - 1) // DEPTH, vectors)
    return module.find(name)  # type: ignore[return-value]


def filled(code: Code, keys: Value, c: Value) -> Value:
    """How many of so many keys chunk c holds, filled up to whole tiles; 0 behind the last one."""
    left = code.greater(code.lesser(keys - c * CHUNK, code.index(CHUNK)), 0)
    return (left + (DEPTH - 1)) & -DEPTH


def weigh_rows(code: Code, at: tuple[Value, Value], sums: list[Variable], shifts: list[Value], factor: Value) -> None:
    """Scores of half a tile's keys become weights, rounded, a row for every two keys; and their sums. `at`: of scores, of
    weights."""
    row = 4 * code.module.target.panel
    with code.loop(code.index(SIDE // 4)) as pair:
        for v, (total, shift) in enumerate(zip(sums, shifts, strict=True)):
            place = at[0] + pair * (2 * row) + v * code.vector_bytes
            logits = [code.fma(code.load(one), factor, shift) for one in (place, place + row)]
            even, odd = (exp2(code, x, EXP2_ROUGH) for x in logits)
            total.set(total.get() + (even + odd))
            code.store(at[1] + pair * row + v * code.vector_bytes, pair_up(code, even, odd))


def write_chunk(module: Module, vectors: int) -> ir.Function:
    """`chunk(block, s, head, i, j, keys, state, kind, alpha, factor)`: what comes before weights, which are
    2^(factor·s − m): masks and the like, −inf where a tile has more keys than there are, m, α, and ℓ times α."""
    name, row = f"chunk_{vectors}", 4 * module.target.panel
    score, scaled = write_score(module, vectors), scale(module, vectors)
    with module.function(name, (*Place.takes, ADDRESS, INDEX, ADDRESS, F32)) as code:
        block, s, head, i, j, keys, state, kind, alpha, factor = code.arguments
        w, known = Words(code, BLOCK, block), State(code, state)
        with code.when(factor.differs(w.scale_f32)):
            code.call(scaled, s, keys, w.scale_f32)
        code.call(score, block, s, head, i, j, keys, state, kind)
        with rows(code, s + keys * row, (keys * -1) & (DEPTH - 1), vectors) as (_, places):
            for place in places:
                code.store(place, code.vector(-math.inf))
        largest = [[code.variable(code.vector(-math.inf)) for _ in range(vectors)] for _ in range(4)]
        with code.loop(code.index(0), (keys + 3) & -4, 4) as r:
            for at, mine in enumerate(largest):
                for most, score in zip(mine, vectors_at(code, s + (r + at) * row, vectors), strict=True):
                    most.set(code.greater(score, most.get()))
        for v in range(vectors):
            at = v * code.vector_bytes
            a, b, c, d = (mine[v].get() for mine in largest)
            most, before = code.greater(code.greater(a, b), code.greater(c, d)) * factor, code.load(known.m + at)
            after = code.select(most > before + HEADROOM, most, before)
            shrunk = exp2(code, before - code.select(after.equals(-math.inf), code.vector(0.0), after))
            code.store(alpha + at, shrunk)
            code.store(known.m + at, after)
            code.store(known.l + at, code.load(known.l + at) * shrunk)
    return module.find(name)  # type: ignore[return-value]


def write_rescale(module: Module, vectors: int) -> ir.Function:
    """`rescale(o, alpha, columns)`: Oᵀ times α, without a look at it where α is 1 for all."""
    name = f"rescale_{vectors}"
    if (found := module.find(name)) is not None:
        return found
    with module.function(name, (ADDRESS, ADDRESS, INDEX)) as code:
        o, alpha, columns = code.arguments
        factors = vectors_at(code, alpha, vectors)
        changed = factors[0].differs(1.0)
        for factor in factors[1:]:
            changed = changed | factor.differs(1.0)
        with code.when(code.any(changed)):
            times(code, o, columns, factors)
    return module.find(name)  # type: ignore[return-value]


def times(code: Code, at: Value, count: Value, factors: Sequence[Value]) -> None:
    """Rows of a panel times factors, one for each vector of it."""
    with rows(code, at, count, len(factors)) as (_, places):
        for place, factor in zip(places, factors, strict=True):
            code.store(place, code.load(place) * factor)


def scale(module: Module, vectors: int) -> ir.Function:
    """`scale(s, keys, factor)`: scores times a factor."""
    name = f"scale_{vectors}"
    if (found := module.find(name)) is not None:
        return found
    with module.function(name, (ADDRESS, INDEX, F32)) as code:
        s, keys, factor = code.arguments
        times(code, s, keys, [factor] * vectors)
    return module.find(name)  # type: ignore[return-value]


def write_special(module: Module, vectors: int) -> ir.Function:
    """`absorb` where weights are dropped or some value is not finite: chunk by chunk, weights in float32 first."""
    name, row = f"special_{vectors}", 4 * module.target.panel
    score, scaled, marked = write_score(module, vectors), scale(module, vectors), weigh(module, vectors, True)
    rescale, dropped = write_rescale(module, vectors), drop(module, BLOCK, vectors)
    careful, rounded = careful_product(module, vectors, BF16), round_pairs(module, vectors)
    with module.function(name, (ADDRESS, ADDRESS, *[INDEX] * 7)) as code:
        block, scratch, head, i, p, start, first, keys, kind = code.arguments
        w, none = Words(code, BLOCK, block), code.index(0)
        panel = Panel(code, w, scratch, p, first - start)
        b, g, state, alpha = head // w.h, head % w.h // w.group, panel.state, panel.alpha
        values = w.v_ptr + b * w.v_b + g * w.v_g + first * w.v_s
        with code.loop((keys + (CHUNK - 1)) // CHUNK) as c:
            s, size, j = panel.scores(c), filled(code, keys, c), first + c * CHUNK
            count = code.lesser(keys - c * CHUNK, code.index(CHUNK))
            with code.loop(none, size, SIDE) as r:
                panel.keep(panel.score(c, r, vectors), c, r)
            code.call(scaled, s, count, w.scale_f32)
            code.call(score, block, s, head, i, j, count, state.m, kind & 255)
            code.call(marked, s, count, state.m, state.l, alpha)
            with code.when(w.dropout.differs(0)):
                code.call(dropped, block, s, head, i, j, count)
            with code.either((kind >> 8).equals(0)) as (clean, dirty):
                with clean:
                    with rows(code, s + count * row, size - count, vectors) as (_, places):
                        for place in places:
                            code.store(place, code.vector(0.0))
                    code.call(rounded, s, size, panel.weights(c))
                    code.call(rescale, panel.o.address, alpha, w.e_columns)
                    panel.add_all(c, size // DEPTH, vectors)
                with dirty, code.loop(w.e) as x:
                    column = values + c * CHUNK * w.v_s + x * 2
                    code.call(careful, column, w.v_s, s, count, panel.o.address + x * row, alpha)
    return module.find(name)  # type: ignore[return-value]


def round_pairs(module: Module, vectors: int) -> ir.Function:
    """`round(s, keys, pairs)`: weights to where the second product looks for them; `keys`: an even number."""
    name, row = f"round_{vectors}", 4 * module.target.panel
    with module.function(name, (ADDRESS, INDEX, ADDRESS)) as code:
        s, keys, pairs = code.arguments
        with rows(code, pairs, keys // 2, vectors) as (pair, places):
            for v, place in enumerate(places):
                one = s + pair * (2 * row) + v * code.vector_bytes
                code.store(place, pair_up(code, code.load(one), code.load(one + row)))
    return module.find(name)  # type: ignore[return-value]
