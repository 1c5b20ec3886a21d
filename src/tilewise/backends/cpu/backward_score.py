"""The weights of a tile whose scores are more than scale·q·k, or whose mask is more than an interval a row: bias, ALiBi,
softcap, a table, dropout; and what the gradients of bias and slopes take from the tile.

    s = cap·tanh((scale·q·k + bias − slope·|i − j|) / cap)    p = exp(s − lse)    w = p·drop
    ds = p·(dp·drop − total)·(1 − (s / cap)²)    dbias = ds    dslope = −ds·|i − j|"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from .arguments import Block, Words
from .arithmetic import LOG2_E, tanh
from .backward_steps import weight
from .random import at_least, choose, philox
from .scores import OPTIONS
from .vector import ADDRESS, BIT, F32, I8, I32, INDEX, Code, Module, Value, Variable

WORDS = (*OPTIONS, "dbias", "dbias_ptr", "dbias_b", "dbias_h", "dbias_n", "summed")
"""Of the call's block, beside those of the forward: dbias, where tiles of ds add up, float32 with its keys next to each other,
and whether sums of rows are wanted."""


@dataclass(frozen=True)
class Row:
    """One query row of a tile: the addresses of its entries of bias, table and dbias, its position, sequence and slope."""

    code: Code
    w: Words
    h: Value
    bias: Value
    table: Value
    dbias: Value
    i: Value
    sequence: Value
    slope: Value
    keys: Value
    """Where the positions of keys are."""


def weigh_scored(module: Module, block_of: Block) -> ir.Function:
    """w in the place of s, scale·q·k in base 2, and ds in the place of dp, both −0 where hidden. Adds to dbias and to sums.

    Parameters  block · s, ds: "rows vectors" of keys from number `key` on, row: their rows' distance · b, h, start, count:
                the rows · vectors · key · sums: of ds and of ds·|i − j| of each row, two numbers a row
    """
    name = "weigh_scored"
    if (found := module.find(name)) is not None:
        return found
    with module.function(name, (ADDRESS, ADDRESS, ADDRESS, *[INDEX] * 7, ADDRESS)) as code:
        block, s, ds, pitch, b, h, start, count, vectors, key, sums = code.arguments
        w = Words(code, block_of, block)
        stats, bounds = ((b * w.h + h) * w.n + start) * 4, w.row_b * b + start * 4
        with code.loop(count) as r:
            row = _row(code, w, b, h, start + r)
            less, shift, rest = (code.broadcast(pointer + stats + r * 4) for pointer in stats_of(w))
            low, high = (code.broadcast(pointer + bounds + r * 4, I32) for pointer in (w.first_ptr, w.past_ptr))
            total, far = (code.variable(code.vector(0.0)) for _ in range(2))
            with code.loop(vectors) as v:
                at, j = pitch * r + v * code.vector_bytes, key + v * code.lanes
                number = code.numbered() + j.to(I32)
                seen = code.variable((number >= low) & (number < high))
                distance = _distance(row, j)
                logit, slope = _logit(row, code.load(s + at), j, distance, seen)
                p, drop = weight(code, logit - shift - rest), _drop(row, j)
                change = p * (code.load(ds + at) * drop - less) * slope
                chance = code.select(seen.get(), p * drop, -0.0)
                change = code.select(seen.get(), change + 0.0, -0.0)
                code.store(s + at, chance)
                code.store(ds + at, change)
                with code.when(w.summed > 0):
                    total.set(total.get() + change)
                    far.set(code.fma(change, distance, far.get()))
                with code.when(w.dbias > 0):
                    place, left = row.dbias + j * 4, w.s - j
                    code.store(place, code.load(place, F32, left) + change, F32, left)
            with code.when(w.summed > 0):
                for place, x in ((sums + r * 8, total), (sums + r * 8 + 4, far)):
                    code.put(place, code.get(place) + code.total(x.get()))
    return module.find(name)  # type: ignore[return-value]


def fetch_bias(module: Module, block_of: Block) -> ir.Function:
    """Ask for the bias of a panel some time before it is read: its rows lie far apart. Parameters as in `weigh_scored`."""
    name = "fetch_bias"
    if (found := module.find(name)) is not None:
        return found
    with module.function(name, (ADDRESS, *[INDEX] * 6)) as code:
        block, b, h, start, count, vectors, key = code.arguments
        w = Words(code, block_of, block)
        with code.when((w.bias > 0) & (w.bias_s > 0)), code.loop(start, start + count) as i, code.loop(vectors) as v:
            code.prefetch(w.bias_ptr + w.bias_b * b + w.bias_h * h + w.bias_n * i + (key + v * code.lanes) * 4)
    return module.find(name)  # type: ignore[return-value]


def sees(module: Module, block_of: Block) -> ir.Function:
    """Whether a table, if there is one, leaves anything of a tile. Parameters: block, b, h, start, count, key, keys."""
    name = "sees"
    if (found := module.find(name)) is not None:
        return found
    with module.function(name, (ADDRESS, *[INDEX] * 6), gives=BIT) as code:
        block, b, h, start, count, key, keys = code.arguments
        w = Words(code, block_of, block)
        some = code.variable(code.constant(1, BIT))
        with code.when(w.table > 0):
            bits = code.variable(code.vector(0, I8))
            with code.loop(start, start + count) as i, code.loop(key, code.lesser(key + keys, w.s), code.lanes) as j:
                row = w.table_ptr + w.table_b * b + w.table_h * h + w.table_n * i
                bits.set(bits.get() | code.load(row + j, I8, w.s - j))
            some.set(code.any(bits.get().differs(0)))
        code.result = some.get()
    return module.find(name)  # type: ignore[return-value]


def stats_of(w: Words) -> tuple[Value, Value, Value]:
    """Where what is known of all rows, each "b h n", begins: total, lse in base 2 (0 where it is −inf), and what rounding that
    has left out."""
    size = w.b * w.h * w.n * 4
    return w.stats_ptr, w.stats_ptr + size, w.stats_ptr + size * 2


def _row(code: Code, w: Words, b: Value, h: Value, i: Value) -> Row:
    """What a row needs, of what there is."""
    bias = w.bias_ptr + w.bias_b * b + w.bias_h * h + w.bias_n * i
    table = w.table_ptr + w.table_b * b + w.table_h * h + w.table_n * i
    dbias = w.dbias_ptr + w.dbias_b * b + w.dbias_h * h + w.dbias_n * i
    position, sequence, slope = (code.variable(x) for x in (code.constant(0, I32), code.constant(0, I32), code.constant(0.0)))
    with code.when((w.alibi > 0) | (w.dropout > 0)):
        at = w.i_b * b + i * 4
        position.set(code.get(w.i_ptr + at, I32))
        sequence.set(code.get(w.sequence_ptr + at, I32))
    with code.when(w.alibi > 0):
        slope.set(code.get(w.alibi_ptr + w.alibi_b * b + h * 4) * LOG2_E)
    keys = w.j_ptr + w.j_b * b
    return Row(code, w, h, bias, table, dbias, position.get(), sequence.get(), slope.get(), keys)


def _distance(row: Row, j: Value) -> Value:
    """|i − j| of a vector of keys; 0 where nothing depends on it."""
    code, w = row.code, row.w
    distance = code.variable(code.vector(0.0))
    with code.when(w.alibi > 0):
        apart = code.load(row.keys + j * 4, I32, w.s - j) - row.i
        distance.set(code.select(apart < 0, apart * -1, apart).to(F32))
    return distance.get()


def _logit(row: Row, s: Value, j: Value, distance: Value, seen: Variable) -> tuple[Value, Value]:
    """The logit in base 2 from scale·q·k, and its derivative by that. What table and bias hide is taken out of `seen`."""
    code, w = row.code, row.w
    logit, slope = code.variable(code.fma(distance, row.slope * -1.0, s)), code.variable(code.vector(1.0))
    with code.when(w.bias > 0), code.either(w.bias_s.equals(0)) as (same, each):
        with same:
            logit.set(logit.get() + code.broadcast(row.bias) * LOG2_E)
        with each:
            logit.set(logit.get() + code.load(row.bias + j * 4, F32, w.s - j) * LOG2_E)
    with code.when(w.capped > 0):
        flat = tanh(code, logit.get() * (code.vector(1.0) / w.cap_f32))
        logit.set(flat * w.cap_f32)
        slope.set(code.fma(flat, flat * -1.0, 1.0))
    seen.set(seen.get() & logit.get().differs(float("-inf")))
    with code.when(w.table > 0):
        seen.set(seen.get() & code.load(row.table + j, I8, w.s - j).differs(0))
    return logit.get(), slope.get()


def _drop(row: Row, j: Value) -> Value:
    """What dropout multiplies the weights of a vector of keys by."""
    code, w = row.code, row.w
    factor = code.variable(code.vector(1.0))
    with code.when(w.dropout > 0):
        position = code.load(row.keys + j * 4, I32, w.s - j)
        quad = Value(code, code.builder.ashr(position.raw, code.vector(2, I32).raw))
        head = (row.h + w.first_head).to(I32)
        words = philox(code, (quad, row.i, head, row.sequence), (w.seed_low.to(I32), w.seed_high.to(I32)))
        kept = at_least(choose(code, words, position & 3), code.vector(w.threshold.to(I32)))
        factor.set(code.select(kept, code.vector(w.kept_f32), 0.0))
    return factor.get()
