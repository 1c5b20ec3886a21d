"""The gradients as one kernel. A task is a block of keys of one key head: it keeps k, v and the sums dk and dv near, while
blocks of query rows come by. In a tile of scores the keys lie in the lanes, so that q and do are read as they are.

Scores are in base 2 and have the bits that the forward's had: the same products in the same order. So the weights of a row sum
up to 1 as nearly as its lse allows.

    dv = pᵀ·do    dp = do·vᵀ    ds = p∘(dp − total)    dq = scale·ds·k    dk = scale·dsᵀ·q    total = rowsum(do∘o) − dlse

Blocks of keys add to a block of dq in their own order: each waits for its turn. Tasks are taken in that order too, so whoever
waits, waits for somebody who is at work; nothing is summed in two orders, and no thread has a dq of its own.

Source: Dao 2023, FlashAttention-2, algorithm 2."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from llvmlite import ir

from .arguments import Block, Words
from .arithmetic import LN_2, LOG2_E
from .backward_score import WORDS, fetch_bias, sees, stats_of, weigh_scored
from .backward_steps import Matrix, across, add, bring, clear, multiply, multiply_seen, put, turn, weigh
from .target import Target
from .vector import ADDRESS, I32, INDEX, ITEMSIZE, Code, Module, Value

LOG2_E_REST = LOG2_E - float(np.float32(LOG2_E))
"""What float32 leaves out of log2 e."""

MATRICES = ("kt", "vt", "k", "dk", "dv", "q", "do", "p", "ds", "dq", "sums")
"""What a thread keeps near: kᵀ and vᵀ "d keys", k, dk and dv "keys d" of its block; of a block of rows q, do, p and ds "rows
keys", and what the tile adds to dq and to two sums of each row."""

SUMS_BYTES = 8
"""Of the two sums of a row: of ds, and of ds·|i − j|."""

REACH = ("begin", "end", "least_first", "most_first", "least_past", "most_past")
"""What is known of a block of rows: the blocks of keys that it sees, from `begin` to before `end`, and between which limits
its rows' intervals begin and end. A row that sees nothing begins at s and ends at 0."""

BLOCK = Block(
    "q_ptr", "q_b", "q_h", "q_n", "k_ptr", "k_b", "k_g", "k_s", "v_ptr", "v_b", "v_g", "v_s",
    "o_ptr", "o_b", "o_h", "o_n", "do_ptr", "do_b", "do_h", "do_n", "lse_ptr", "lse_b", "lse_h", "lse_n",
    "dlse_ptr", "dlse_b", "dlse_h", "dlse_n", "dq_ptr", "dq_b", "dq_h", "dq_n", "dk_ptr", "dk_b", "dk_g", "dk_s",
    "dv_ptr", "dv_b", "dv_g", "dv_s", "stats_ptr", "turn_ptr", "first_ptr", "past_ptr", "row_b",
    "reach_ptr", "reach_b", "scratch_ptr", "scratch_bytes", *(f"{name}_at" for name in MATRICES), "key_row", "d_row", "e_row",
    "b", "n", "s", "h", "g", "group", "d", "e", "rows", "keys", "row_blocks", "row_tasks", "key_tasks", "together",
    "scale_f32", "log2_scale_f32", "hides", "scored", "sums_ptr", "q_needed", "k_needed", "v_needed", *WORDS,
)  # fmt: skip
"""What one call tells the kernel. Distances in bytes. `rows` and `keys` of a block; `together`: key heads of one task; `stats`:
what is known of each row, "3 b h n", written first (see `stats_of`); `turn`: how many row tasks are done, and then, for each of
"b h row_blocks", how many blocks of keys it has met; `hides`: whether any pair may be hidden; `scored`: whether tiles are for
`weigh_scored`; `sums`: float32 "b h n 2"."""

PANEL = 4
"""Vectors of keys that are weighed at a time, at most. Keys of a block and of a tile are filled up to whole vectors."""

Keys: TypeAlias = "tuple[Value, Value, Value, Value]"
"""A block of keys: batch entry, key head, first key and how many."""

Rows: TypeAlias = "tuple[Value, Value, Value, Value]"
"""A block of query rows: batch entry, query head, first row and how many."""


@dataclass(frozen=True)
class Kinds:
    """Kinds of number in memory: of q, k and v; and of o, do, dk and dv."""

    given: Any
    made: Any


class Near:
    """A thread's scratch memory: its matrices by name, and the widths of d and e in whole vectors."""

    kt: Matrix
    vt: Matrix
    k: Matrix
    dk: Matrix
    dv: Matrix
    q: Matrix
    do: Matrix
    p: Matrix
    ds: Matrix
    dq: Matrix
    sums: Matrix
    dq_factor: Value
    """What is still missing from dq."""

    def __init__(self, code: Code, block: Value, w: Words, slot: Value) -> None:
        self.code, self.block, self.w = code, block, w
        scratch = w.scratch_ptr + w.scratch_bytes * slot
        sums_row = code.index(SUMS_BYTES)
        rows = (w.key_row, w.key_row, w.d_row, w.d_row, w.e_row, w.d_row, w.e_row, w.key_row, w.key_row, w.d_row, sums_row)
        for name, row in zip(MATRICES, rows, strict=True):
            setattr(self, name, Matrix(scratch + getattr(w, f"{name}_at"), row))
        self.d, self.e = ((x + (code.lanes - 1)) & -code.lanes for x in (w.d, w.e))
        self.dq_factor = code.constant(1.0)

    def vector_of(self, key: Value) -> Value:
        """Where the vector of a key begins; 0 for a negative one."""
        return self.code.greater(key, 0) & -self.code.lanes

    def whole_vectors(self, count: Value) -> Value:
        """So many keys, filled up to whole vectors."""
        return (count + (self.code.lanes - 1)) & -self.code.lanes


class Reach:
    """What is known of a block of rows, as a kernel has read it."""

    def __init__(self, code: Code, w: Words, b: Value, i: Value) -> None:
        at = w.reach_ptr + w.reach_b * b + i * (8 * len(REACH))
        self.begin, self.end, self.least_first, self.most_first, self.least_past, self.most_past = (
            code.get(at + 8 * place, INDEX) for place in range(len(REACH))
        )


class Way(NamedTuple):
    """How blocks are brought near, multiplied and put back: what differs between products of vectors and products of tiles."""

    near: Callable[[Code, Value, Words, Value], Any]
    load_keys: Callable[[Module, Kinds, Any, Keys], Value]
    store_keys: Callable[[Module, Kinds, Any, Keys], None]
    load_rows: Callable[[Module, Kinds, Any, Rows], Value]
    tile: Callable[[Module, Kinds, Any, Reach, Rows, tuple[Value, Value, Value], Value], None]
    """All that a tile adds up, near; whether `dirty`, that is with numbers in q, k or do that are not finite."""
    store_rows: Callable[[Module, Any, Rows], None]
    ready: Callable[[Code], AbstractContextManager[None]]
    """What a thread needs around all of it."""


def write(target: Target, kinds: Kinds, way: Way | None = None) -> Module:
    """The kernel `backward`: every thread of a call runs it until no task is left."""
    module, way = Module(target), way or VECTORS
    rows, keys = _rows(module, kinds), _keys(module, kinds, way)
    with module.function("backward", (ADDRESS,), exported=True) as code, way.ready(code):
        (block,) = code.arguments
        slot, w = BLOCK.take(code, block, "slot"), Words(code, BLOCK, block)
        with code.repeat() as leave:
            task = BLOCK.take(code, block, "task")
            leave(task >= w.row_tasks + w.key_tasks)
            with code.either(task < w.row_tasks) as (yes, no):
                with yes:
                    code.call(rows, block, task)
                with no:
                    wait(code, w.turn_ptr, w.row_tasks)
                    code.call(keys, block, task - w.row_tasks, slot)
    return module


def wait(code: Code, counter: Value, number: Value) -> None:
    """Until other threads have brought a counter to a number."""
    rest = code.module.declare("sched_yield", ir.FunctionType(I32, []))
    with code.repeat() as leave:
        leave(code.fetch_add(counter, 0).equals(number))
        code.call(rest)


def _rows(module: Module, kinds: Kinds) -> ir.Function:
    """What every block of keys needs of a block of rows: total, lse in base 2, and the zeros that dq begins with."""
    with module.function("rows", (ADDRESS, INDEX)) as code:
        block, task = code.arguments
        w = Words(code, BLOCK, block)
        at, start = task // w.row_blocks, task % w.row_blocks * w.rows
        b, h, count = at // w.h, at % w.h, code.lesser(w.rows, w.n - start)
        with code.loop(start, start + count) as i:
            o, do = w.o_ptr + w.o_b * b + w.o_h * h + w.o_n * i, w.do_ptr + w.do_b * b + w.do_h * h + w.do_n * i
            delta = code.variable(code.vector(0.0))

            def along(x: Value, left: Value | None, o: Value = o, do: Value = do, delta: Any = delta) -> None:
                one, other = (code.load(row + x * ITEMSIZE[kinds.made], kinds.made, left) for row in (o, do))
                delta.set(code.fma(one, other, delta.get()))

            across(code, w.e, along)
            dlse = code.get(w.dlse_ptr + w.dlse_b * b + w.dlse_h * h + w.dlse_n * i)
            lse = code.get(w.lse_ptr + w.lse_b * b + w.lse_h * h + w.lse_n * i)
            place = (at * w.n + i) * 4
            totals, shifts, rests = stats_of(w)
            code.put(totals + place, code.total(delta.get()) - dlse)
            pivot = code.select(lse.equals(-math.inf), code.constant(0.0), lse)
            shift = pivot * LOG2_E
            code.put(shifts + place, shift)
            code.put(rests + place, code.fma(pivot, LOG2_E, shift * -1.0) + pivot * LOG2_E_REST)
        with code.when(w.q_needed > 0):
            code.call(clear(module), w.dq_ptr + w.dq_b * b + w.dq_h * h + w.dq_n * start, w.dq_n, count, w.d)
        code.fetch_add(w.turn_ptr, 1)
    return module.find("rows")  # type: ignore[return-value]


def _keys(module: Module, kinds: Kinds, way: Way) -> ir.Function:
    """dk and dv of a block of keys, of one key head or of all that a task holds `together`, and its share of dq."""
    with module.function("keys", (ADDRESS, INDEX, INDEX)) as code:
        block, task, slot = code.arguments
        w = Words(code, BLOCK, block)
        near, parts = way.near(code, block, w, slot), w.b * w.g // w.together
        j, start = task // parts, task // parts * w.keys
        count = code.lesser(w.keys, w.s - start)
        first = task % parts * w.together
        with code.loop(first, first + w.together) as head:
            b, g = head // w.g, head % w.g
            dirty = way.load_keys(module, kinds, near, (b, g, start, count))
            with code.loop(g * w.group, (g + 1) * w.group) as h, code.loop(w.row_blocks) as i:
                reach = Reach(code, w, b, i)
                with code.when((reach.begin <= j) & (j < reach.end)):
                    code.call(_visit(module, kinds, way), block, slot, b, h, i, j, dirty)
            way.store_keys(module, kinds, near, (b, g, start, count))
    return module.find("keys")  # type: ignore[return-value]


def _load_keys(module: Module, kinds: Kinds, near: Near, at: Keys) -> Value:
    """Bring a block of keys near, and zeros for its sums; 1 if k holds anything but finite numbers."""
    code, w, (b, g, start, count) = near.code, near.w, at
    k, v = w.k_ptr + w.k_b * b + w.k_g * g + w.k_s * start, w.v_ptr + w.v_b * b + w.v_g * g + w.v_s * start
    whole = near.whole_vectors(count)
    code.call(turn(module, kinds.given), *near.kt, k, w.k_s, count, whole, w.d, code.constant(1.0))
    code.call(turn(module, kinds.given), *near.vt, v, w.v_s, count, whole, w.e, code.constant(1.0))
    dirty = code.call(bring(module, kinds.given), *near.k, k, w.k_s, count, w.d, w.scale_f32)
    code.call(clear(module), near.k.at(count), near.k.row, whole - count, near.d)
    code.call(clear(module), *near.dk, whole, near.d)
    code.call(clear(module), *near.dv, whole, near.e)
    return dirty.to(INDEX)


def _store_keys(module: Module, kinds: Kinds, near: Near, at: Keys) -> None:
    """Write dk and dv of a block of keys."""
    code, w, (b, g, start, count) = near.code, near.w, at
    with code.when(w.k_needed > 0):
        dk = w.dk_ptr + w.dk_b * b + w.dk_g * g + w.dk_s * start
        code.call(put(module, kinds.made), dk, w.dk_s, *near.dk, count, w.d, code.constant(LN_2))
    with code.when(w.v_needed > 0):
        dv = w.dv_ptr + w.dv_b * b + w.dv_g * g + w.dv_s * start
        code.call(put(module, kinds.made), dv, w.dv_s, *near.dv, count, w.e, code.constant(1.0))


def _visit(module: Module, kinds: Kinds, way: Way) -> ir.Function:
    """What a tile, row block i of head h with key block j, adds to dv, dk and dq."""
    if (found := module.find("visit")) is not None:
        return found
    with module.function("visit", (ADDRESS, *[INDEX] * 6)) as code:
        block, slot, b, h, i, j, dirty = code.arguments
        w = Words(code, BLOCK, block)
        near, reach = way.near(code, block, w, slot), Reach(code, w, b, i)
        start, count = i * w.rows, code.lesser(w.rows, w.n - i * w.rows)
        left = near.vector_of(reach.least_first - j * w.keys)
        right = code.lesser(near.whole_vectors(code.lesser(reach.most_past, w.s) - j * w.keys), w.keys)
        some = code.call(sees(module, BLOCK), block, b, h, start, count, j * w.keys + left, right - left)
        with code.when(some):
            dirty = way.load_rows(module, kinds, near, (b, h, start, count)) | (dirty > 0)
            way.tile(module, kinds, near, reach, (b, h, start, count), (j * w.keys, left, right), dirty)
        with code.when((w.q_needed > 0) | (w.summed > 0)):
            counter = w.turn_ptr + ((b * w.h + h) * w.row_blocks + i + 1) * 8
            wait(code, counter, j - reach.begin)
            with code.when(some):
                way.store_rows(module, near, (b, h, start, count))
            code.fetch_add(counter, 1)
    return module.find("visit")  # type: ignore[return-value]


def _load_rows(module: Module, kinds: Kinds, near: Near, at: Rows) -> Value:
    """Bring a block of rows near, q times scale·log2 e as the forward has it, and zeros for its sums; whether q and do hold
    anything but finite numbers."""
    code, w, (b, h, start, count) = near.code, near.w, at
    q, do = w.q_ptr + w.q_b * b + w.q_h * h + w.q_n * start, w.do_ptr + w.do_b * b + w.do_h * h + w.do_n * start
    q_dirty = code.call(bring(module, kinds.given), *near.q, q, w.q_n, count, w.d, w.log2_scale_f32)
    do_dirty = code.call(bring(module, kinds.made), *near.do, do, w.do_n, count, w.e, code.constant(1.0))
    with code.when(w.summed > 0):
        code.call(clear(module), *near.sums, count, 2)
    return q_dirty | do_dirty


def store_rows(module: Module, near: Any, at: Rows) -> None:
    """Add what a tile gives to dq and to the sums of its rows."""
    code, w, (b, h, start, count) = near.code, near.w, at
    with code.when(w.q_needed > 0):
        target = w.dq_ptr + w.dq_b * b + w.dq_h * h + w.dq_n * start
        code.call(add(module), target, w.dq_n, *near.dq, count, w.d, near.dq_factor)
    with code.when(w.summed > 0):
        place = w.sums_ptr + ((b * w.h + h) * w.n + start) * SUMS_BYTES
        code.call(add(module), place, SUMS_BYTES, *near.sums, count, 2, code.constant(1.0))


def _tile(module: Module, kinds: Kinds, near: Near, reach: Reach, rows: Rows, keys: Any, dirty: Value) -> None:
    """What a tile adds to dv, dk and dq."""
    del kinds
    code, (_, left, right) = near.code, keys
    _score(module, near, reach, rows, keys)
    with code.either(dirty & (near.w.hides > 0)) as branches:
        for branch, careful in zip(branches, (True, False), strict=True):
            with branch:
                _add_up(module, near, careful, rows[3], (left, right))


def _score(module: Module, near: Near, reach: Reach, rows: Rows, keys: tuple[Value, Value, Value]) -> None:
    """p and ds of a tile, panel by panel of its keys from `left` to before `right`; zeros right of it, where the strips of a
    product reach."""
    code, w, (b, h, start, count), (first, left, right) = near.code, near.w, rows, keys
    product = multiply(module, "zero")
    stats, bounds = ((b * w.h + h) * w.n + start) * 4, w.row_b * b + start * 4
    given = (*[pointer + stats for pointer in stats_of(w)], w.first_ptr + bounds, w.past_ptr + bounds)
    with code.loop(left, right, PANEL * code.lanes) as at:
        width = code.lesser(right - at, code.index(PANEL * code.lanes))
        p, ds, vectors = near.p.at(0, at), near.ds.at(0, at), width // code.lanes
        key = first + at
        code.call(fetch_bias(module, BLOCK), near.block, b, h, start, count, vectors, key)
        code.call(product, *near.q, 4, near.kt.at(0, at), near.kt.row, p, near.p.row, count, w.d, vectors)
        code.call(product, *near.do, 4, near.vt.at(0, at), near.vt.row, ds, near.ds.row, count, w.e, vectors)
        with code.either(w.scored > 0) as (more, plain):
            with more:
                where = (near.block, p, ds, near.p.row, b, h, start, count, vectors, key, near.sums.address)
                code.call(weigh_scored(module, BLOCK), *where)
            with plain:
                masked = (key < reach.most_first) | (reach.least_past < key + width)
                with code.either(masked) as branches:
                    for branch, cut in zip(branches, (True, False), strict=True):
                        with branch:
                            code.call(weigh(module, cut), p, ds, near.p.row, count, vectors, *given, key)
    for matrix in (near.p, near.ds):
        code.call(clear(module), matrix.at(0, right), matrix.row, count, code.index(code.lanes))


def _add_up(module: Module, near: Near, careful: bool, count: Value, keys: tuple[Value, Value]) -> None:
    """dv += pᵀ·do, dk += dsᵀ·q, and this tile's ds·k, each if it is needed."""
    code, w, (left, right) = near.code, near.w, keys
    width, product = right - left, multiply_seen(module) if careful else multiply(module, "add")
    with code.when(w.v_needed > 0):
        p, row = near.p.at(0, left), near.p.row
        code.call(product, p, 4, row, *near.do, near.dv.at(left), near.dv.row, width, count, near.e // code.lanes)
    with code.when(w.k_needed > 0):
        ds, row = near.ds.at(0, left), near.ds.row
        code.call(product, ds, 4, row, *near.q, near.dk.at(left), near.dk.row, width, count, near.d // code.lanes)
    with code.when(w.q_needed > 0):
        ds, row, k = near.ds.at(0, left), near.ds.row, near.k.at(left)
        if careful:
            code.call(clear(module), *near.dq, count, near.d)
        else:
            product = multiply(module, "zero")
        code.call(product, ds, row, 4, k, near.k.row, *near.dq, count, width, near.d // code.lanes)


VECTORS = Way(Near, _load_keys, _store_keys, _load_rows, _tile, store_rows, lambda code: nullcontext())
