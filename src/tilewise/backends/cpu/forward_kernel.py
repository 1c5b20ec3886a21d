"""o and lse. A task is a block of query rows of one head: its panels and their states stay in a core's second-level cache while
the keys that they see come by, block by block, and are absorbed. The words are those of `reference/flash.py`.

Blocks of keys begin at multiples of their size and a panel looks at no key that none of its queries sees; so a result depends
neither on how many rows a task has nor on who takes it.

Source: Dao 2023, FlashAttention-2, algorithm 1."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir

from ...mask import Tile
from .arguments import LINE, Block, Words
from .arithmetic import LN_2, LOG2_E, exp2, log
from .micro import product
from .pack import pack_keys, pack_queries, pack_values, unpack_outputs
from .panel import careful_product, hide, weigh
from .scores import OPTIONS, Place, add_alibi, add_bias, cap, drop, hide_points
from .target import Target
from .vector import ADDRESS, I8, I32, INDEX, ITEMSIZE, Code, Module, Value

BLOCK = Block(
    "q_ptr", "q_b", "q_h", "q_n", "k_ptr", "k_b", "k_g", "k_s", "v_ptr", "v_b", "v_g", "v_s",
    "o_ptr", "o_b", "o_h", "o_n", "lse_ptr", "first_ptr", "past_ptr", "sight_b", "sink_ptr", "sinks",
    "b", "h", "group", "n", "s", "d", "e", "scale_f32", "rows", "keys", "ahead", "d_columns", "e_columns",
    "scratch_ptr", "scratch_bytes", "o_at", "state_at", "p_at", "k_at", "v_at",
    "kind_ptr", "kind_b", "kind_h", "kind_n", *OPTIONS,
)  # fmt: skip
"""What a call tells the kernel. Distances are in bytes; `rows` of a task, whole panels, and `keys` of a block; `ahead`: rows
that are fetched while a tile of scores is computed; the tiles in a thread's scratch memory begin at …_at, those of Qᵀ at 0."""

FOREVER = 2**31 - 1
"""No key comes after this one."""


class State:
    """Where a panel keeps what it knows: m, l and the bounds of its queries, and the bounds of all of them together."""

    def __init__(self, code: Code, address: Value) -> None:
        lanes = 4 * code.module.target.panel
        self.m, self.l, self.first, self.past = (address + at * lanes for at in range(4))
        bounds = address + 4 * lanes
        self.lo, self.hi, self.full_lo, self.full_hi = (bounds + 8 * at for at in range(4))
        """Keys [lo, hi) that some query sees; all see [full_lo, full_hi)."""


def state_bytes(target: Target) -> int:
    return 16 * target.panel + 64


def write(target: Target, kind: Any, out: Any) -> Module:
    """The kernel `forward` for inputs and outputs of these kinds."""
    module = Module(target)
    load, fetch = write_load(module, bring_float32(module, kind)), write_fetch(module, kind)
    absorb = {vectors: write_absorb(module, vectors, fetch) for vectors in range(1, target.vectors + 1)}
    attend = write_task(module, write_begin(module, kind), load, write_panel(module, absorb), write_end(module, out))
    with module.function("forward", (ADDRESS,), exported=True) as code:
        each_task(code, attend)
    return module


def each_task(code: Code, attend: ir.Function) -> None:
    """Take tasks until none is left: what every thread of a call does."""
    (block,) = code.arguments
    w = Words(code, BLOCK, block)
    scratch = w.scratch_ptr + BLOCK.take(code, block, "slot") * w.scratch_bytes
    tasks = w.b * w.h * ((w.n + w.rows - 1) // w.rows)
    with code.repeat() as leave:
        task = BLOCK.take(code, block, "task")
        leave(task >= tasks)
        code.call(attend, block, scratch, task)


def write_task(module: Module, begin: ir.Function, load: ir.Function, absorb: ir.Function, end: ir.Function) -> ir.Function:
    """`attend(block, scratch, task)`: o and lse of a block of query rows; the last rows of all heads, which see the most
    keys of a causal mask, come first. Where one block holds all keys, panels come and go one by one."""
    panel, absorb_block = module.target.panel, write_block(module, load, absorb)
    with module.function("attend", (ADDRESS, ADDRESS, INDEX)) as code:
        block, scratch, task = code.arguments
        w = Words(code, BLOCK, block)
        heads = w.b * w.h
        row = (w.n + w.rows - 1) // w.rows - 1 - task // heads
        head, i = task % heads, row * w.rows
        b, x = head // w.h, head % w.h
        count = code.lesser(w.rows, w.n - i)
        panels = (count + (panel - 1)) // panel
        with code.either(w.s <= w.keys) as (one, several):
            with one:
                dirty = code.call(load, block, scratch, head, 0, 0, w.s)
                with code.loop(panels) as p:
                    code.call(begin, block, scratch, b, x, i + p * panel, 0)
                    code.call(absorb, block, scratch, head, i + p * panel, 0, 0, w.s, dirty)
                    code.call(end, block, scratch, b, x, i + p * panel, 0)
            with several:
                lo, hi = code.variable(w.s), code.variable(code.index(0))
                with code.loop(panels) as p:
                    code.call(begin, block, scratch, b, x, i + p * panel, p)
                    state = state_of(code, w, scratch, p)
                    lo.set(code.lesser(code.get(state.lo, INDEX), lo.get()))
                    hi.set(code.greater(code.get(state.hi, INDEX), hi.get()))
                with code.loop(lo.get() // w.keys, (hi.get() + w.keys - 1) // w.keys) as c:
                    start = c * w.keys
                    code.call(absorb_block, block, scratch, head, i, start, code.greater(lo.get(), start), hi.get())
                with code.loop(panels) as p:
                    code.call(end, block, scratch, b, x, i + p * panel, p)
    return module.find("attend")  # type: ignore[return-value]


def state_of(code: Code, w: Words, scratch: Value, p: Value) -> State:
    return State(code, scratch + w.state_at + p * state_bytes(code.module.target))


def write_begin(module: Module, kind: Any) -> ir.Function:
    """`begin(block, scratch, b, x, i, p)`: panel p, whose first query is row i: its Qᵀ, an empty state, and what it sees."""
    target = module.target
    pack = pack_queries(module, kind)
    with module.function("begin", (ADDRESS, ADDRESS, INDEX, INDEX, INDEX, INDEX)) as code:
        block, scratch, b, x, i, p = code.arguments
        w, row_bytes = Words(code, BLOCK, block), 4 * target.panel
        queries = scratch + p * w.d_columns * row_bytes
        for v in range(target.vectors):
            at, row = v * code.vector_bytes, i + v * target.lanes
            with code.when(row < w.n):
                source = w.q_ptr + b * w.q_b + x * w.q_h + row * w.q_n
                code.call(pack, source, w.q_n, w.n - row, w.d, queries + at, w.scale_f32)
        begin_state(code, w, scratch, (b, i, p))
    return module.find("begin")  # type: ignore[return-value]


def begin_state(code: Code, w: Words, scratch: Value, at: tuple[Value, Value, Value]) -> None:
    """An empty state of panel p, whose first query is row i of entry b, and what the panel sees; `at`: b, i and p."""
    target, (b, i, p) = code.module.target, at
    state, o = state_of(code, w, scratch, p), scratch + w.o_at + p * w.e_columns * (4 * target.panel)
    bounds = [code.variable(code.vector(x, I32)) for x in (FOREVER, 0, 0, FOREVER)]
    for v in range(target.vectors):
        place, row = v * code.vector_bytes, i + v * target.lanes
        code.store(state.m + place, code.vector(-math.inf))
        code.store(state.l + place, code.vector(0.0))
        with code.when(row < w.n):
            look(code, w, (b, row), bounds, (state.first + place, state.past + place))
    reduce = (code.least, code.most, code.most, code.least)
    for place, bound, of in zip((state.lo, state.hi, state.full_lo, state.full_hi), bounds, reduce, strict=True):
        code.put(place, of(bound.get()).to(INDEX))
    with code.loop(w.e_columns * target.vectors) as r:
        code.store(o + r * code.vector_bytes, code.vector(0.0))


def look(code: Code, w: Words, at: tuple[Value, Value], bounds: list, places: tuple[Value, Value]) -> None:
    """What the queries of one vector see: their [first, past) into their lanes, and into the bounds of the panel. Lanes beyond
    the last query see whatever the others do; a query that sees nothing does not widen what the panel looks at."""
    b, row = at
    there = code.first(code.lesser(w.n - row, code.index(code.lanes)))
    offset, left = b * w.sight_b + row * 4, w.n - row
    first, past = (code.load(pointer + offset, I32, left) for pointer in (w.first_ptr, w.past_ptr))
    sees = there & (first < past)
    lo, hi, full_lo, full_hi = bounds
    nothing, forever = code.vector(0, I32), code.vector(FOREVER, I32)
    lo.set(code.lesser(code.select(sees, first, forever), lo.get()))
    hi.set(code.greater(code.select(sees, past, nothing), hi.get()))
    first, past = code.select(there, first, nothing), code.select(there, past, forever)
    full_lo.set(code.greater(first, full_lo.get()))
    full_hi.set(code.lesser(past, full_hi.get()))
    code.store(places[0], first)
    code.store(places[1], past)


def write_load(module: Module, bring: Callable[..., Value]) -> ir.Function:
    """`load(block, scratch, head, start, lo, hi)`: keys [lo, hi) of the block that begins at `start`, as products take them.
    Returns 1 where some value is not finite. `bring` writes what packs `count` rows of K and V as rows `at` … of the block."""
    with module.function("load", (ADDRESS, ADDRESS, *[INDEX] * 4), gives=INDEX) as code:
        block, scratch, head, start, lo, hi = code.arguments
        w = Words(code, BLOCK, block)
        b, g, lo = head // w.h, head % w.h // w.group, lo & -module.target.step
        k, v = w.k_ptr + b * w.k_b + g * w.k_g + lo * w.k_s, w.v_ptr + b * w.v_b + g * w.v_g + lo * w.v_s
        code.result = bring(code, w, scratch, k, v, lo - start, hi - lo)
    return module.find("load")  # type: ignore[return-value]


def bring_float32(module: Module, kind: Any) -> Callable[..., Value]:
    """Keys and values as float32."""
    keys_of, values_of, rows = pack_keys(module, kind), pack_values(module, kind), module.target.rows

    def bring(code: Code, w: Words, scratch: Value, k: Value, v: Value, at: Value, count: Value) -> Value:
        code.call(keys_of, k, w.k_s, count, w.d, scratch + w.k_at + at * (w.d_columns * 4))
        return code.call(values_of, v, w.v_s, count, w.e, scratch + w.v_at + at * (4 * rows), w.keys)

    return bring


def write_block(module: Module, load: ir.Function, absorb: ir.Function) -> ir.Function:
    """`absorb_block(block, scratch, head, i, start, lo, hi)`: keys [lo, hi) of the block that begins at `start`, loaded and
    absorbed by every panel of the task whose first row is i that sees some of them."""
    panel = module.target.panel
    with module.function("absorb_block", (ADDRESS, ADDRESS, *[INDEX] * 5)) as code:
        block, scratch, head, i, start, lo, hi = code.arguments
        w = Words(code, BLOCK, block)
        hi, count = code.lesser(start + w.keys, hi), code.lesser(w.rows, w.n - i)
        panels = (count + (panel - 1)) // panel
        wanted = code.variable(code.index(0))
        with code.loop(panels) as p:
            wanted.set(wanted.get() | tile_kind(code, w, head, i + p * panel, start))
        with code.when(wanted.get().differs(Tile.EMPTY)):
            dirty = code.call(load, block, scratch, head, start, lo, hi)
            with code.loop(panels) as p:
                code.call(absorb, block, scratch, head, i + p * panel, p, start, hi, dirty)
    return module.find("absorb_block")  # type: ignore[return-value]


def write_panel(module: Module, absorb: dict[int, ir.Function]) -> ir.Function:
    """`absorb_panel(block, scratch, head, i, p, start, hi, dirty)`: the keys before `hi` of the loaded block that begins at
    `start`, absorbed by panel p, whose first query is row i, if it sees some of them. `absorb`: for so many vectors."""
    target = module.target
    with module.function("absorb_panel", (ADDRESS, ADDRESS, *[INDEX] * 6)) as code:
        block, scratch, head, i, p, start, hi, dirty = code.arguments
        w = Words(code, BLOCK, block)
        state = state_of(code, w, scratch, p)
        mine = code.greater(code.get(state.lo, INDEX), start) & -target.step
        keys, here = code.lesser(code.get(state.hi, INDEX), hi) - mine, tile_kind(code, w, head, i, start)
        with code.when((keys > 0) & here.differs(Tile.EMPTY)):
            vectors = (w.n - i + (target.lanes - 1)) // target.lanes
            for size, function in absorb.items():
                with code.when(vectors.equals(size) if size < target.vectors else vectors >= size):
                    code.call(function, block, scratch, head, i, p, start, mine, keys, here | (dirty << 8))
    return module.find("absorb_panel")  # type: ignore[return-value]


def write_fetch(module: Module, kind: Any) -> ir.Function:
    """`fetch(block, head, i, p, start, t)`: while panel p, whose first query is row i, works on the t-th tile of its scores,
    memory fetches some rows of what is loaded next: of the keys and values of the block after the one that begins at `start`,
    or where one block holds all keys, of the queries of the next panel."""
    panel, rows = module.target.panel, module.target.rows
    with module.function("fetch", (ADDRESS, *[INDEX] * 5)) as code:
        block, head, i, p, start, t = code.arguments
        w = Words(code, BLOCK, block)
        b, x = head // w.h, head % w.h

        def ask(base: Value, step: Value, columns: Value, span: tuple[Value, Value]) -> None:
            with code.loop(*span) as r, code.loop(code.index(0), columns * ITEMSIZE[kind], LINE) as at:
                code.prefetch(base + step * r + at, 2)

        with code.either(w.s <= w.keys) as (one, several):
            with one:
                first = i + panel + t * w.ahead
                span = first, code.lesser(code.lesser(first + w.ahead, i + 2 * panel), w.n)
                ask(w.q_ptr + b * w.q_b + x * w.q_h, w.q_n, w.d, span)
            with several:
                first = start + w.keys + (p * (w.keys // rows) + t) * w.ahead
                span = first, code.lesser(code.lesser(first + w.ahead, start + w.keys * 2), w.s)
                g = x // w.group
                ask(w.k_ptr + b * w.k_b + g * w.k_g, w.k_s, w.d, span)
                ask(w.v_ptr + b * w.v_b + g * w.v_g, w.v_s, w.e, span)
    return module.find("fetch")  # type: ignore[return-value]


def tile_kind(code: Code, w: Words, head: Value, i: Value, start: Value) -> Value:
    """What a point test leaves of the tile of a panel and a block of keys: a `Tile`, FULL where there is no test."""
    kind = code.variable(code.index(Tile.FULL))
    with code.when(w.table.differs(0)):
        place = w.kind_ptr + head // w.h * w.kind_b + head % w.h * w.kind_h
        place = place + i // code.module.target.panel * w.kind_n + start // w.keys
        kind.set(code.get(place, I8).to(INDEX))
    return kind.get()


def write_absorb(module: Module, vectors: int, fetch: ir.Function) -> ir.Function:
    """`absorb(block, scratch, head, i, p, start, j, keys, kind)`: panel p, whose first query is row i, after the keys j …
    j + keys − 1 of the block that begins at `start`: scores, weights, and what they add to o. `kind`: of the tile, and in the
    bits above a byte whether some value is not finite."""
    target, name = module.target, f"absorb_{vectors}"
    scores, outputs = product(module, target.rows, vectors, "zero"), product(module, target.rows, vectors, "rescale", unroll=1)
    careful, marked, plain = careful_product(module, vectors), weigh(module, vectors, True), weigh(module, vectors, False)
    score, dropped = write_score(module, vectors), drop(module, BLOCK, vectors)
    with module.function(name, (ADDRESS, ADDRESS, *[INDEX] * 7)) as code:
        block, scratch, head, i, p, start, j, keys, kind = code.arguments
        w, row, tile = Words(code, BLOCK, block), 4 * target.panel, 4 * target.rows
        state, s = state_of(code, w, scratch, p), scratch + w.p_at
        queries, o = scratch + p * w.d_columns * row, scratch + w.o_at + p * w.e_columns * row
        k_row = w.d_columns * 4
        k, v = scratch + w.k_at + (j - start) * k_row, scratch + w.v_at + (j - start) * tile
        alpha = s + (w.keys + target.rows) * row
        with code.loop(code.index(0), keys, target.rows) as r:
            code.call(fetch, block, head, i, p, start, r // target.rows)
            code.call(scores, k + r * k_row, k_row, 4, queries, row, w.d, s + r * row, row, s)
        code.call(score, block, s, head, i, j, keys, state.m, kind & 255)
        with code.either((kind >> 8).equals(0)) as (clean, dirty):
            with clean:
                code.call(plain, s, keys, state.m, state.l, alpha)
            with dirty:
                code.call(marked, s, keys, state.m, state.l, alpha)
        with code.when(w.dropout.differs(0)):
            code.call(dropped, block, s, head, i, j, keys)
        with code.either((kind >> 8).equals(0)) as (clean, dirty):
            with clean, code.loop(code.index(0), w.e_columns, target.rows) as x:
                code.call(outputs, v + x * w.keys * 4, 4, tile, s, row, keys, o + x * row, row, alpha)
            with dirty, code.loop(w.e) as x:
                column = v + (x // target.rows * w.keys * target.rows + x % target.rows) * 4
                code.call(careful, column, tile, s, keys, o + x * row, alpha)
    return module.find(name)  # type: ignore[return-value]


def write_score(module: Module, vectors: int) -> ir.Function:
    """`score(block, s, head, i, j, keys, state, kind)`: all that is done to scores before softmax, masks included."""
    name = f"score_{vectors}"
    if (found := module.find(name)) is not None:
        return found
    biased, sloped, capped = (make(module, BLOCK, vectors) for make in (add_bias, add_alibi, cap))
    masked, tested = hide(module, vectors), hide_points(module, BLOCK, vectors)
    with module.function(name, (*Place.takes, ADDRESS, INDEX)) as code:
        block, s, head, i, j, keys, state, kind = code.arguments
        w, known = Words(code, BLOCK, block), State(code, state)
        for option, function in ((w.bias, biased), (w.alibi, sloped), (w.capped, capped)):
            with code.when(option.differs(0)):
                code.call(function, block, s, head, i, j, keys)
        full = (code.get(known.full_lo, INDEX) <= j) & (code.get(known.full_hi, INDEX) >= j + keys)
        with code.when(full.equals(0)):
            code.call(masked, s, keys, j, known.first, known.past)
        with code.when(w.table.differs(0) & kind.differs(Tile.FULL)):
            code.call(tested, block, s, head, i, j, keys)
    return module.find(name)  # type: ignore[return-value]


def write_end(module: Module, out: Any) -> ir.Function:
    """`end(block, scratch, b, x, i, p)`: o = acc / ℓ and lse = log ℓ + m, with the sink as one more logit; 0 and −inf where a
    query has seen nothing."""
    target = module.target
    unpack = unpack_outputs(module, out)
    with module.function("end", (ADDRESS, ADDRESS, INDEX, INDEX, INDEX, INDEX)) as code:
        block, scratch, b, x, i, p = code.arguments
        w, row_bytes = Words(code, BLOCK, block), 4 * target.panel
        state, o = state_of(code, w, scratch, p), scratch + w.o_at + p * w.e_columns * row_bytes
        for v in range(target.vectors):
            at, row = v * code.vector_bytes, i + v * target.lanes
            with code.when(row < w.n):
                finish(code, w, x, (state.m + at, state.l + at))
                lse = w.lse_ptr + ((b * w.h + x) * w.n + row) * 4
                code.store(lse, code.load(state.m + at), count=code.lesser(w.n - row, code.index(code.lanes)))
                target_o = w.o_ptr + b * w.o_b + x * w.o_h + row * w.o_n
                code.call(unpack, o + at, state.l + at, w.e, target_o, w.o_n, w.n - row)
    return module.find("end")  # type: ignore[return-value]


def finish(code: Code, w: Words, x: Value, state: tuple[Value, Value]) -> None:
    """m and ℓ of one vector of queries become lse and what acc is multiplied by: 1 / ℓ, or 0 where nothing was seen."""
    m, l = code.variable(code.load(state[0])), code.variable(code.load(state[1]))  # noqa: E741 - the paper's ℓ
    factor = code.variable(code.vector(1.0))
    with code.when(w.sinks.differs(0)):
        sink = code.broadcast(w.sink_ptr + x * 4) * LOG2_E
        most = code.greater(sink, m.get())
        pivot = code.select(most.equals(-math.inf), code.vector(0.0), most)
        shrunk = exp2(code, m.get() - pivot)
        l.set(l.get() * shrunk + exp2(code, sink - pivot))
        m.set(most)
        factor.set(shrunk)
    nothing = l.get().equals(0.0)
    code.store(state[0], code.select(nothing, code.vector(-math.inf), code.fma(m.get(), LN_2, log(code, l.get()))))
    code.store(state[1], code.select(nothing, code.vector(0.0), factor.get() / l.get()))
