"""The backward pass of bfloat16 inputs where the processor multiplies tiles: `backward_kernel` with other products. All their
factors are bfloat16, all their sums float32, and a tile of scores is computed in panels of 32 keys.

    S = Q·Kᵀ    dP = dO·Vᵀ    dVᵀ += dOᵀ·P    dKᵀ += Qᵀ·dS    dQ = dS·K

P and dS are written as B of the products for dV and dK, whose sums are therefore kept transposed, and dS as A for dQ."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from ...problem import Problem
from ...tiles import TileShape
from .amx import DEPTH, LINE, SIDE, TILE, Product, Tiles, configured, follow, multiply, pair_up
from .amx_forward import scale
from .amx_pack import pack
from .arguments import Words
from .arithmetic import EXP2_ROUGH
from .backward_kernel import BLOCK, SUMS_BYTES, Keys, Kinds, Reach, Rows, Way, store_rows
from .backward_kernel import write as write_kernel
from .backward_score import fetch_bias, stats_of, weigh_scored
from .backward_steps import Matrix, bring, clear, multiply_seen, weigh, weight
from .pack import unpack_outputs
from .panel import careful_product
from .target import Target, l2_bytes
from .vector import ADDRESS, BF16, BIT, F32, I32, INDEX, Code, Module, Value

ROWS = 128
"""Query rows of a block: so long are the sums that dV and dK take from it before they are stored."""

KEYS = 512
"""The most keys of a block: with fewer, query rows come by more often."""

SHARE = 0.6
"""The part of a second-level cache that a block of keys and all that meets it may fill."""

VECTORS = 2
"""Vectors of keys in a panel."""

TOGETHER = 4
"""Panels that meet the same rows before the next rows come."""

PITCH = VECTORS * LINE
"""Bytes of a row of a panel, in float32 or of pairs."""


def write(target: Target, kinds: Kinds) -> Module:
    """The kernel `backward` for bfloat16 inputs and gradients."""
    assert kinds == Kinds(BF16, BF16) and target.amx
    return write_kernel(target, kinds, TILES)


def sizes(problem: Problem) -> TileShape:
    """Rows and keys of a block: as many keys as the cache has room for, in blocks of one size."""
    rows = min(ROWS, _filled(max(problem.n, 1), DEPTH))
    one, two = (scratch(problem, TileShape(rows, keys))[1] for keys in (DEPTH, 2 * DEPTH))
    panels = 1 + int((SHARE * l2_bytes() - one) / (two - one))
    keys = min(max(panels, 1) * DEPTH, KEYS)
    blocks = -(-max(problem.s, 1) // keys)
    return TileShape(rows, _filled(-(-max(problem.s, 1) // blocks), DEPTH))


def scratch(problem: Problem, shape: TileShape) -> tuple[dict[str, int], int]:
    """Where the matrices of a thread lie, in the kernel's words; and the bytes of all of them. See `Near`."""
    (rows, keys), d, e = shape, _filled(problem.d, DEPTH), _filled(problem.e, DEPTH)
    near, pairs = DEPTH * PITCH, TOGETHER * rows * PITCH // 2
    length = {
        "kt": 2 * keys * d, "vt": 2 * keys * e, "k": 2 * keys * d, "dk": 4 * keys * d, "dv": 4 * keys * e,
        "q": 4 * rows * d, "do": 4 * rows * e, "p": near + pairs, "ds": near + pairs + 2 * rows * keys,
        "dq": 4 * rows * d, "sums": rows * SUMS_BYTES + PITCH + 4 * DEPTH * d,
    }  # fmt: skip
    words, end = {"key_row": PITCH, "d_row": 4 * d, "e_row": 4 * e}, 0
    for name, size in length.items():
        words[f"{name}_at"] = end
        end += _filled(size, LINE)
    return words, end


class Near:
    """A thread's scratch memory. Of a block of keys, panel by panel: B of Kᵀ and Vᵀ, dKᵀ and dVᵀ; and B of K. Of a block of
    rows: A of Q, dO and their transposes, dQ and sums; of `DEPTH` rows of a panel S and dP, later P and dS, of all its rows
    both in pairs, and of all panels A of dS. And a vector or two of one number, and a panel of K in float32."""

    def __init__(self, code: Code, block: Value, w: Words, slot: Value) -> None:
        self.code, self.block, self.w = code, block, w
        self.scratch = w.scratch_ptr + w.scratch_bytes * slot
        self.d, self.e = ((x + (DEPTH - 1)) & -DEPTH for x in (w.d, w.e))
        q, do, s, dp = (self.scratch + at for at in (w.q_at, w.do_at, w.p_at, w.ds_at))
        self.q, self.do = (Tiles(at, LINE, wide * DEPTH, TILE) for at, wide in ((q, self.d), (do, self.e)))
        self.turned_q, self.turned_do = (
            Tiles(at + w.rows * wide * 2, LINE, TILE, wide * LINE) for at, wide in ((q, self.d), (do, self.e))
        )
        self.s, self.dp = _panel(s), _panel(dp)
        self.p, self.ds = (_panel(at + DEPTH * PITCH) for at in (s, dp))
        self.pairs_bytes = w.rows * (PITCH // 2)
        self.all_ds = Tiles(self.ds.address + self.pairs_bytes * TOGETHER, LINE, TILE, w.rows * LINE)
        self.k = Tiles(self.scratch + w.k_at, w.d_row, w.d_row * SIDE, LINE)
        self.dq, self.dq_factor = Matrix(self.scratch + w.dq_at, w.d_row), w.scale_f32
        self.sums = Matrix(self.scratch + w.sums_at, code.index(SUMS_BYTES))
        self.number = self.sums.at(w.rows)
        self.float_k = Matrix(self.number + PITCH, w.d_row)

    def key_panel(self, name: str, at: Value) -> Tiles:
        """Of kt, vt, dk or dv, the panel that begins with key `at` of the block."""
        half, wide = (1 if name in ("kt", "vt") else 2), (self.d if name in ("kt", "dk") else self.e)
        return _panel(self.scratch + getattr(self.w, f"{name}_at") + at * wide * (2 * half))

    def vector_of(self, key: Value) -> Value:
        """Where the panel of a key begins; 0 for a negative one."""
        return self.code.greater(key, 0) & -DEPTH

    def whole_vectors(self, count: Value) -> Value:
        """So many keys, filled up to whole panels."""
        return (count + (DEPTH - 1)) & -DEPTH

    def spread(self, number: Value) -> Value:
        """Where a panel's row of one number is, now this one."""
        for v in range(VECTORS):
            self.code.store(self.number + v * LINE, self.code.vector(number))
        return self.number


def _panel(address: Value) -> Tiles:
    """B or C, two tiles wide."""
    return Tiles(address, PITCH, SIDE * PITCH, LINE)


def _load_keys(module: Module, kinds: Kinds, near: Near, at: Keys) -> Value:
    """Bring a block of keys near, and zeros for its sums; 1 if k holds anything but finite numbers."""
    code, w, (b, g, start, count) = near.code, near.w, at
    k, v = w.k_ptr + w.k_b * b + w.k_g * g + w.k_s * start, w.v_ptr + w.v_b * b + w.v_g * g + w.v_s * start
    turned, paired = pack(module, paired=False, turned=True), pack(module, paired=True, turned=False)
    with code.loop(code.index(0), count, DEPTH) as x:
        left = code.lesser(count - x, code.index(DEPTH))
        for name, source, row, columns in (("kt", k, w.k_s, w.d), ("vt", v, w.v_s, w.e)):
            to = near.key_panel(name, x)
            code.call(turned, source + row * x, row, left, columns, to.address, PITCH, to.down, LINE)
        for name, columns in (("dk", near.d), ("dv", near.e)):
            code.call(clear(module), near.key_panel(name, x).address, PITCH, columns, DEPTH)
    return code.call(paired, k, w.k_s, count, w.d, near.k.address, near.k.pitch, LINE, near.k.down)


def _store_keys(module: Module, kinds: Kinds, near: Near, at: Keys) -> None:
    """Write dk and dv of a block of keys."""
    code, w, (b, g, start, count) = near.code, near.w, at
    unpack = unpack_outputs(module, kinds.made)
    dk = w.dk_ptr + w.dk_b * b + w.dk_g * g + w.dk_s * start, w.dk_s
    dv = w.dv_ptr + w.dv_b * b + w.dv_g * g + w.dv_s * start, w.dv_s
    wanted = ("dk", w.k_needed, dk, w.d, w.scale_f32), ("dv", w.v_needed, dv, w.e, code.constant(1.0))
    for name, needed, (target, row), columns, factor in wanted:
        with code.when(needed > 0):
            number = near.spread(factor)
            with code.loop(code.index(0), count, SIDE) as x:
                panel = near.key_panel(name, x & -DEPTH).address + (x & SIDE) * 4
                code.call(unpack, panel, number, columns, target + row * x, row, count - x)


def _load_rows(module: Module, kinds: Kinds, near: Near, at: Rows) -> Value:
    """Bring a block of rows near, and zeros for its sums; whether q and do hold anything but finite numbers."""
    code, w, (b, h, start, count) = near.code, near.w, at
    natural, turned = pack(module, paired=False, turned=False), pack(module, paired=True, turned=True)
    q, do = w.q_ptr + w.q_b * b + w.q_h * h + w.q_n * start, w.do_ptr + w.do_b * b + w.do_h * h + w.do_n * start
    dirty = code.index(0)
    for source, row, columns, plain, other in (
        (q, w.q_n, w.d, near.q, near.turned_q),
        (do, w.do_n, w.e, near.do, near.turned_do),
    ):
        dirty = dirty | code.call(natural, source, row, count, columns, plain.address, LINE, plain.across, plain.down)
        code.call(turned, source, row, count, columns, other.address, LINE, other.down, other.across)
    with code.when(w.summed > 0):
        code.call(clear(module), *near.sums, count, 2)
    return dirty > 0


def _tile(module: Module, kinds: Kinds, near: Near, reach: Reach, rows: Rows, keys: Any, dirty: Value) -> None:
    """What a tile adds to dv, dk and dq, some panels of its keys at a time; for S, `DEPTH` rows of one panel."""
    code, w, count, (first, left, right), none = near.code, near.w, rows[3], keys, near.code.index(0)
    careful = dirty & (w.hides > 0)
    with code.when(careful):
        code.call(clear(module), *near.dq, count, near.d)
    with code.loop(left, right, TOGETHER * DEPTH) as group:
        stop = code.lesser(group + TOGETHER * DEPTH, right)
        with code.loop(none, count, DEPTH) as r, code.loop(group, stop, DEPTH) as at:
            _square(module, kinds, near, reach, rows, (first, at, r), (at - group, at - left), careful)
        with code.when(careful.equals(0)):
            _add_up(module, near, count, (group, stop))
    with code.when((w.q_needed > 0) & careful.equals(0)):
        k, wide = near.k.part(left // DEPTH, 0), (w.d + (SIDE - 1)) // SIDE
        dq = near.dq.address, near.dq.row, near.dq.row * SIDE
        high = (count + (DEPTH - 1)) // DEPTH * 2
        code.call(multiply(module, "zero"), *near.all_ds, *k[:3], *dq, high, wide, (right - left) // DEPTH)


def _square(
    module: Module, kinds: Kinds, near: Near, reach: Reach, rows: Rows, place: Any, inside: tuple[Value, Value], careful: Value
) -> None:
    """P and dS of `DEPTH` rows, from row r of a block on, and of the panel at key `at` of the block that begins with key
    `first`; `place`: first, at and r; `inside`: how far the panel is into what is together, and into the tile."""
    code, (b, h, start, count), (first, at, r) = near.code, rows, place
    some = (b, h, start + r, code.lesser(count - r, code.index(DEPTH)))
    pairs = r * (PITCH // 2) + near.pairs_bytes * (inside[0] // DEPTH)
    to = near.p.address + pairs, near.ds.address + pairs, near.all_ds.at(r // SIDE, inside[1] // DEPTH)
    with code.either(code.call(_meet(module), near.block, b, start + r, some[3], first + at)) as (yes, no):
        with yes:
            for x, panel, depth, made in ((near.q, "kt", near.d, near.s), (near.do, "vt", near.e, near.dp)):
                product = Product(code, (2, 2))
                product.begin()
                product.add(x.part(r // SIDE, 0), near.key_panel(panel, at), depth // DEPTH)
                product.end(made)
            _weigh(module, near, reach, some, (first + at, r), to, careful)
            with code.when(careful):
                _add_seen(module, kinds, near, some, (first, at), r)
        with no:
            _each_pair(code, to, code.index(0), lambda _: ([code.vector(0.0)] * VECTORS,) * 2)


def _add_up(module: Module, near: Near, count: Value, keys: tuple[Value, Value]) -> None:
    """What panels, `keys` from one to before another, add to dv and dk: two tiles of columns of all panels, then the next."""
    code, w, more, (group, stop) = near.code, near.w, multiply(module, "add"), keys
    deep = (count + (DEPTH - 1)) // DEPTH
    for needed, x, panel, columns, factor in (
        (w.v_needed, near.turned_do, "dv", w.e, near.p),
        (w.k_needed, near.turned_q, "dk", w.d, near.ds),
    ):
        high = (columns + (SIDE - 1)) // SIDE
        with code.when(needed > 0), code.loop(code.index(0), high, 2) as c, code.loop(group, stop, DEPTH) as at:
            pairs = factor.address + near.pairs_bytes * ((at - group) // DEPTH), *factor[1:3]
            sums, some = near.key_panel(panel, at).part(c, 0)[:3], code.lesser(high - c, code.index(2))
            code.call(more, *x.part(c, 0), *pairs, *sums, some, code.index(VECTORS), deep)


def _meet(module: Module) -> ir.Function:
    """`meet(block, b, start, count, key)`: whether any of at most `DEPTH` rows sees a key of the panel that begins at `key`."""
    if (found := module.find("meet")) is not None:
        return found
    with module.function("meet", (ADDRESS, *[INDEX] * 4), gives=BIT) as code:
        block, b, start, count, key = code.arguments
        w = Words(code, BLOCK, block)
        at, some = w.row_b * b + start * 4, []
        for v in range(DEPTH // SIDE):
            left = count - v * SIDE
            low, high = (code.load(x + at + v * LINE, I32, left) for x in (w.first_ptr, w.past_ptr))
            begin = code.vector(key.to(I32))
            some.append(code.any((low < begin + DEPTH) & (high > begin) & (low < high)))
        code.result = some[0] | some[1]
    return module.find("meet")  # type: ignore[return-value]


def _weigh(
    module: Module, near: Near, reach: Reach, rows: Rows, at: tuple[Value, Value], to: tuple[Value, ...], careful: Value
) -> None:
    """P and dS of `DEPTH` rows of a panel from S and dP, to where `_pair` writes; `at`: the first key, and where the rows
    begin in their block. Where something is `careful` or scored, they are in float32 first."""
    code, w, (b, h, start, count), (key, r) = near.code, near.w, rows, at
    stats, bounds = ((b * w.h + h) * w.n + start) * 4, w.row_b * b + start * 4
    total, lse, rest = (pointer + stats for pointer in stats_of(w))
    bound = w.first_ptr + bounds, w.past_ptr + bounds
    s, dp, vectors = near.s.address, near.dp.address, code.index(VECTORS)
    with code.either(careful | (w.scored > 0)) as (slow, fast):
        with slow:
            code.call(fetch_bias(module, BLOCK), near.block, b, h, start, count, vectors, key)
            code.call(scale(module, VECTORS), s, count, w.log2_scale_f32)
            with code.either(w.scored > 0) as (scored, plain):
                with scored:
                    where = (near.block, s, dp, PITCH, b, h, start, count, vectors, key, near.sums.at(r))
                    code.call(weigh_scored(module, BLOCK), *where)
                with plain:
                    code.call(weigh(module, True), s, dp, PITCH, count, vectors, total, lse, rest, *bound, key)
            code.call(_round(module), s, dp, *to, count)
        with fast:
            masked = (key < reach.most_first) | (reach.least_past < key + DEPTH)
            with code.either(masked) as branches:
                for branch, cut in zip(branches, (True, False), strict=True):
                    with branch:
                        code.call(_weigh_pairs(module, cut), s, dp, *to, count, total, lse, *bound, key, w.log2_scale_f32)


def _add_seen(module: Module, kinds: Kinds, near: Near, rows: Rows, keys: tuple[Value, Value], r: Value) -> None:
    """What rows of a panel, from row r of a block on, add to dv, dk and dq where q, k or do hold NaN or infinities: pairs that
    are hidden are not looked at."""
    code, w, (b, h, start, count), (first, at) = near.code, near.w, rows, keys
    number, seen = near.spread(code.constant(1.0)), careful_product(module, VECTORS, BF16)
    q, do = w.q_ptr + w.q_b * b + w.q_h * h + w.q_n * start, w.do_ptr + w.do_b * b + w.do_h * h + w.do_n * start
    for needed, source, row, columns, panel, factor in (
        (w.v_needed, do, w.do_n, w.e, "dv", near.s),
        (w.k_needed, q, w.q_n, w.d, "dk", near.dp),
    ):
        with code.when(needed > 0), code.loop(columns) as x:
            place = near.key_panel(panel, at).address + x * PITCH
            code.call(seen, source + x * 2, row, factor.address, count, place, number)
    with code.when(w.q_needed > 0):
        g, left = h // w.group, code.lesser(w.s - first - at, code.index(DEPTH))
        k = w.k_ptr + w.k_b * b + w.k_g * g + w.k_s * (first + at)
        code.call(bring(module, kinds.given), *near.float_k, k, w.k_s, left, w.d, code.constant(1.0))
        vectors = (w.d + (SIDE - 1)) // SIDE
        dq = near.dq.at(r), near.dq.row
        code.call(multiply_seen(module), near.dp.address, PITCH, 4, *near.float_k, *dq, count, left, vectors)


def _pair(code: Code, at: tuple[Value, ...], r: Value, p: list[list[Value]], ds: list[list[Value]]) -> None:
    """Write two rows of a panel, r and r + 1: P and dS in pairs, dS as A. `p`, `ds`: vectors of the first, of the second."""
    pairs_p, pairs_ds, natural = at
    for target, rows in ((pairs_p, p), (pairs_ds, ds)):
        for v in range(VECTORS):
            code.store(target + r * (PITCH // 2) + v * LINE, pair_up(code, rows[0][v], rows[1][v]))
    for row in range(2):
        code.store(natural + (r + row) * LINE, follow(code, *ds[row]))


def _each_pair(code: Code, at: tuple[Value, ...], count: Value, one: Any) -> None:
    """Write `count` rows of a panel, two by two, filled up with zeros to `DEPTH`; `one(r)`: vectors of P and of dS of a row."""
    nothing = [code.vector(0.0)] * VECTORS
    with code.loop(code.index(0), count & -2, 2) as r:
        (p, ds), (next_p, next_ds) = one(r), one(r + 1)
        _pair(code, at, r, [p, next_p], [ds, next_ds])
    with code.when((count & 1) > 0):
        p, ds = one(count - 1)
        _pair(code, at, count - 1, [p, nothing], [ds, nothing])
    with code.loop((count + 1) & -2, code.index(DEPTH), 2) as r:
        _pair(code, at, r, [nothing, nothing], [nothing, nothing])


def _round(module: Module) -> ir.Function:
    """`round(s, dp, p, ds, natural, count)`: P and dS from float32, where S and dP have been."""
    if (found := module.find("round")) is not None:
        return found
    with module.function("round", (*[ADDRESS] * 5, INDEX)) as code:
        s, dp, *at, count = code.arguments

        def one(r: Value) -> Any:
            return tuple([code.load(x + r * PITCH + v * LINE) for v in range(VECTORS)] for x in (s, dp))

        _each_pair(code, tuple(at), count, one)
    return module.find("round")  # type: ignore[return-value]


def _weigh_pairs(module: Module, masked: bool) -> ir.Function:
    """P = exp2(factor·s − lse), dS = P·(dP − total), both 0 where masked and outside a row's interval.

    Parameters  s, dp · p, ds, natural: see `_pair` · count: rows · total, lse, first, past: of each row · key · factor"""
    name = "weigh_pairs_masked" if masked else "weigh_pairs"
    if (found := module.find(name)) is not None:
        return found
    with module.function(name, (*[ADDRESS] * 5, INDEX, *[ADDRESS] * 4, INDEX, F32)) as code:
        s, dp, *at, count, total, lse, first, past, key, factor = code.arguments

        def one(r: Value) -> Any:
            less, shift = code.broadcast(total + r * 4), code.broadcast(lse + r * 4) * -1.0
            low, high = (code.broadcast(x + r * 4, I32) for x in (first, past))
            weights, changes = [], []
            for v in range(VECTORS):
                place = r * PITCH + v * LINE
                p = weight(code, code.fma(code.load(s + place), factor, shift), EXP2_ROUGH)
                change = p * (code.load(dp + place) - less)
                if masked:
                    j = code.numbered() + (key + v * code.lanes).to(I32)
                    seen = (j >= low) & (j < high)
                    p, change = (code.select(seen, x, code.vector(0.0)) for x in (p, change))
                weights.append(p)
                changes.append(change)
            return weights, changes

        _each_pair(code, tuple(at), count, one)
    return module.find(name)  # type: ignore[return-value]


def _filled(size: int, step: int) -> int:
    """`size`, filled up to a multiple of `step`."""
    return -(-size // step) * step


TILES = Way(Near, _load_keys, _store_keys, _load_rows, _tile, store_rows, configured)
