"""o and lse: a program owns a block of query rows of one head, and folds its state over the key tiles that its rows can see.
One warp brings tiles; the others, in warpgroups of 64 rows each, multiply.

The product with v of one tile and the product with k of the next are in flight together, so that a warpgroup computes weights
while the tensor cores work for the other; from block to block, too, where a program has several (AHEAD): o of one leaves while
q·kᵀ of the next is made. What the pipeline assumes, that nothing hidden is infinite and no sum overflows, is
asked once in the end; a program that has met the contrary does its rows again, with care (`careful`)."""

# Kernels are in Gluon's language, not Python's:
# pyright: reportAttributeAccessIssue=false, reportInvalidTypeForm=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma, warpgroup_mma_wait

from .careful import again
from .channel import arrived, claim, open_door, open_ring, open_turns, pass_turn, release, send, take_turn, tile
from .inline import agree, anew, declare_flag, flag, lower_flag, note, rounded, vote
from .layouts import ROWS, beside, folded, in_memory, joined, of_rows, of_sums
from .steps import (
    HIGHS,
    as_operand,
    finish,
    hide,
    highest,
    kernel,
    logits,
    pivot,
    rowmax,
    scaled,
    sums,
    total,
    unit_of,
    weights,
)
from .visits import cut, nth, own, place, rounds, visits_of
from .write import rows_of, write

TAU = gl.constexpr(3)
"""A logit in base 2 may pass its row's reference by 2^TAU before the reference follows: weights stay below 2^8."""


BROKEN = gl.constexpr(8)
"""The first of the flags of warpgroups that a block has to be done again; those before say that references have moved."""


@gluon.jit
def bring(slabs, rings, one, mask, axes, at, served, C: gl.constexpr):
    """What one block of query rows reads: q, and k and v of each visited tile. How many tiles have come after it."""
    b, head, block = place(one, axes, C)
    q_desc, k_desc, v_desc = slabs
    q, k, v = rings
    claim(q, served, C.Q)
    GROUPS: gl.constexpr = C.GROUPS
    for part in gl.static_range(GROUPS):
        send(q, q_desc, b, head, block * C.BLOCK_M + part * ROWS, served, part, C.Q)
    visits = visits_of(b, block, mask, axes, C)
    key_head = head // axes[3]
    for t in range(visits[3] - visits[0]):
        row = nth(t, visits) * C.BLOCK_N
        claim(k, at, C.K)
        send(k, k_desc, b, key_head, row, at, 0, C.K)
        claim(v, at, C.V)
        send(v, v_desc, b, key_head, row, at, 0, C.V)
        at += 1
    return at


@gluon.jit
def producer(slabs, rings, mask, axes, tasks, C: gl.constexpr):
    """The warp that brings tiles."""
    at, one = gl.to_tensor(0), own(0, tasks, C)
    for served in range(rounds(tasks, C)):
        following = own(served + 1, tasks, C)
        at = bring(slabs, rings, one, mask, axes, at, served, C)
        one = following


@gluon.jit
def q_by_k(rings, at, served, KEYS: gl.constexpr, MINE: gl.constexpr, C: gl.constexpr):
    """Start q·kᵀ of the first KEYS of a tile."""
    q, k = tile(rings[0], served, MINE, C.Q), tile(rings[1], at, 0, C.K)
    if KEYS < C.BLOCK_N:
        k = k.slice(0, KEYS)
    return warpgroup_mma(q, k.permute((1, 0)), no_product(KEYS), use_acc=False, is_async=True)


@gluon.jit
def no_product(KEYS: gl.constexpr):
    """What stands for q·kᵀ of a tile where there is none."""
    return gl.zeros([ROWS, KEYS], gl.float32, of_sums(KEYS))


@gluon.jit
def enter(rings, at, served, MINE: gl.constexpr, C: gl.constexpr):
    """Start q·kᵀ of the first tile of a block, as far as these rows may see it."""
    arrived(rings[0], served, C.Q)
    arrived(rings[1], at, C.K)
    return q_by_k(rings, at, served, C.FIRST[MINE], MINE, C)


@gluon.jit
def entered(x, rings, at, C: gl.constexpr):
    """That product, once it is made."""
    x = warpgroup_mma_wait(0, deps=[x])
    release(rings[1], at, C.K)
    return x


@gluon.jit
def absorb(m, l, x, unit, alpha, MINE: gl.constexpr, C: gl.constexpr):
    """The reference and l before the weights of a tile, what earlier sums shrink by, and whether they do: only where a row of
    the warp has outgrown its reference. A warp decides for itself."""
    moved = gl.to_tensor(0)
    if not C.FIXED:
        highs = highest(x, C.BLOCK_N)
        vote(highs * unit - beside(m, highs), TAU, MINE, HIGHS // 2)
        moved = flag(MINE)
        alpha = gl.full([ROWS], 1.0, gl.float32, of_rows(C.BLOCK_N))
        if moved != 0:
            new = gl.maximum(m, rowmax(highs, C) * unit)
            alpha = gl.exp2(m - pivot(new))
            l *= beside(alpha, l)
            m = new
    return m, l, alpha, moved


@gluon.jit
def turn(state, rings, at, served, rows, t, visits, score, CUT: gl.constexpr, MINE: gl.constexpr, C: gl.constexpr):
    """The state after one more tile, whose weights are known but not yet multiplied: those of the tile before are."""
    m, l, acc, p, alpha, moved = state
    arrived(rings[1], at, C.K)
    if C.TURNS:
        take_turn(MINE, C.TURN)
    x = q_by_k(rings, at, served, C.BLOCK_N, MINE, C)
    if not C.FIXED:
        if moved != 0:
            acc = scaled(acc, alpha)
    arrived(rings[2], at - 1, C.V)
    acc = warpgroup_mma(p, tile(rings[2], at - 1, 0, C.V), acc, is_async=True)
    if C.TURNS:
        pass_turn(MINE, C.TURN, C.GROUPS)
    x = warpgroup_mma_wait(1, deps=[x])
    release(rings[1], at, C.K)
    if CUT or not C.PLAIN:
        start = nth(t, visits) * C.BLOCK_N
        x = logits(x, start, rows, score, C.BLOCK_N, C)
        if CUT:
            x = hide(x, start, rows, C.BLOCK_N, C)
    unit = unit_of(score, C)
    m, l, alpha, moved = absorb(m, l, x, unit, alpha, MINE, C)
    p, l = weights(x, l, pivot(m), unit, C.BLOCK_N, rings[2][0].dtype, C)
    acc = warpgroup_mma_wait(0, deps=[acc])
    release(rings[2], at - 1, C.V)
    return m, l, acc, as_operand(p, C), alpha, moved


@gluon.jit
def fold(x, rings, at, served, rows, visits, score, MINE: gl.constexpr, C: gl.constexpr):
    """The state after every tile that the rows see, its last product under way, and how many tiles have gone. x: q·kᵀ of the
    first."""
    unit, count, partial = unit_of(score, C), visits[3] - visits[0], cut(visits)
    start = nth(0, visits) * C.BLOCK_N
    x = logits(x, start, rows, score, C.FIRST[MINE], C)
    if partial > 0:
        x = hide(x, start, rows, C.FIRST[MINE], C)
    m = rowmax(highest(x, C.FIRST[MINE]), C) * unit
    p = gl.exp2(x * unit - beside(pivot(m), x))
    l = sums(p, C.FIRST[MINE], C)
    p = rounded(p, rings[2][0].dtype)
    if C.FIRST[MINE] < C.BLOCK_N:  # none of these rows sees the right half
        p = joined(p, gl.full([ROWS, C.BLOCK_N // 2], 0.0, p.dtype, p.type.layout), C.BLOCK_N)
    if C.FIXED:  # a row that sees something, but nothing of its first tile, has no reference
        l += beside(gl.where((m == float("-inf")) & (rows[1] < rows[2]), float("nan"), 0.0), l)
    alpha = gl.full([ROWS], 1.0, gl.float32, of_rows(C.BLOCK_N))
    acc = gl.zeros([ROWS, C.E], gl.float32, of_sums(C.E))
    state = (m, l, acc, as_operand(p, C), alpha, gl.to_tensor(0))
    at += 1
    for t in range(1, partial):
        state = turn(state, rings, at, served, rows, t, visits, score, True, MINE, C)
        at += 1
    for t in range(gl.maximum(partial, 1), count):
        state = turn(state, rings, at, served, rows, t, visits, score, False, MINE, C)
        at += 1
    m, l, acc, p, alpha, moved = state
    if C.APART:
        release(rings[0], served, C.Q)
    arrived(rings[2], at - 1, C.V)
    if not C.FIXED:
        if moved != 0:
            acc = scaled(acc, alpha)
    acc = warpgroup_mma(p, tile(rings[2], at - 1, 0, C.V), acc, is_async=True)
    return m, l, acc, at


@gluon.jit
def judge(l, acc, MINE: gl.constexpr, C: gl.constexpr):
    """Take note of rows whose weights have left what their reference can hold, or whose sums are not finite."""
    finite = gl.sum(folded(acc * 0.0, C.E, C.WIDTH), 1)
    note(l + gl.convert_layout(finite, l.type.layout, assert_trivial=True), C.LIMIT, BROKEN + MINE, C.WIDTH // 2)


@gluon.jit
def leave(m, l, acc, sink, here, at, out, rings, room, axes, LATER: gl.constexpr, MINE: gl.constexpr, C: gl.constexpr):
    """o and lse of a block whose last product is under way, with LATER others that have been started since."""
    b, head, block = here
    acc = warpgroup_mma_wait(LATER, deps=[acc])
    release(rings[2], at - 1, C.V)
    judge(l, acc, MINE, C)
    o, lse = finish(m, total(l, C), acc, sink, C)
    write(o, lse, b, head, block * C.BLOCK_M + MINE * ROWS + anew(), out, room.index(MINE), axes, C)


@gluon.jit
def o_block(x, here, following, out, rings, room, given, at, served, count, MINE: gl.constexpr, C: gl.constexpr):
    """A warpgroup's share of one block of query rows of one head, `served` of a program's `count`. Where AHEAD, x is q·kᵀ of
    its first tile, but for a program's first block. That of the next block, where this lies, and how many tiles have gone."""
    b, head, block = here
    rows, score, sink = rows_of(block * C.BLOCK_M + MINE * ROWS, b, head, given, of_rows(C.BLOCK_N), C)
    visits = visits_of(b, block, given[0], given[1], C)
    if not C.AHEAD or served == 0:
        x = entered(enter(rings, at, served, MINE, C), rings, at, C)
    m, l, acc, at = fold(x, rings, at, served, rows, visits, score, MINE, C)
    if C.AHEAD and served + 1 < count:
        x = enter(rings, at, served + 1, MINE, C)
        there = place(following, given[1], C)
        leave(m, l, acc, sink, here, at, out, rings, room, given[1], 1, MINE, C)
        x = entered(x, rings, at, C)
    else:
        there = place(following, given[1], C)
        leave(m, l, acc, sink, here, at, out, rings, room, given[1], 0, MINE, C)
        x = no_product(C.FIRST[MINE])
    if not C.APART:
        release(rings[0], served, C.Q)
    return x, there, at


@gluon.jit
def consumer(out, rings, room, given, tasks, MINE: gl.constexpr, C: gl.constexpr):
    """A warpgroup that multiplies. Whether any of the program has met what the pipeline cannot do."""
    lower_flag(MINE)
    lower_flag(BROKEN + MINE)
    if C.TURNS:
        open_turns(MINE, C.TURN, C.GROUPS)
    x, at, count = no_product(C.FIRST[MINE]), gl.to_tensor(0), rounds(tasks, C)
    here = place(own(0, tasks, C), given[1], C)
    for served in range(count):
        following = own(served + 1, tasks, C)
        x, here, at = o_block(x, here, following, out, rings, room, given, at, served, count, MINE, C)
    if not C.WIDE:
        tma.store_wait(0)
    return (agree(BROKEN + MINE, C.VERDICT, C.READERS),)


@kernel
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, o_ptr, lse_ptr, v_ptr, v_b: gl.int64, v_head: gl.int64, v_row: gl.int64,
    first_ptr, past_ptr, row_b: gl.int64, left: gl.int32, right: gl.int32, visits_ptr, visits_b: gl.int64,
    scale: gl.float32, softcap: gl.float32, alibi_ptr, alibi_b: gl.int64, sink_ptr, far: gl.int32,
    n: gl.int32, s: gl.int32, h: gl.int32, group: gl.int32, span: gl.int32, tiles: gl.int32, roster_ptr, C: gl.constexpr,
):  # fmt: skip
    """Grid: any number of programs; each takes every so manieth of `tiles` = b·h·⌈n / BLOCK_M⌉ blocks of query rows, or those
    that a roster gives it."""
    GROUPS: gl.constexpr = C.GROUPS
    for one in gl.static_range(GROUPS):
        declare_flag(one)
        declare_flag(BROKEN + one)
    rings = open_ring(q_desc.dtype, C.Q), open_ring(q_desc.dtype, C.K), open_ring(q_desc.dtype, C.V)
    room, door = rings[0][0], open_door()
    if C.APART:
        room = gl.allocate_shared_memory(q_desc.dtype, C.O.SHAPE, in_memory(ROWS, C.E, q_desc.dtype))
    mask, axes = (first_ptr, past_ptr, row_b, left, right, visits_ptr, visits_b), (n, s, h, group, span)
    tasks = tiles, roster_ptr
    given = mask, axes, (scale, softcap, alibi_ptr, alibi_b, sink_ptr, far)
    slabs, out = (q_desc, k_desc, v_desc), (o_desc, o_ptr, lse_ptr)
    if C.GROUPS == 2:
        broken = gl.warp_specialize([
            (consumer, (out, rings, room, given, tasks, 0, C)),
            (consumer, (out, rings, room, given, tasks, 1, C)),
            (producer, (slabs, rings, mask, axes, tasks, C)),
        ], [4, 1], C.WORKERS)  # fmt: skip
    else:
        broken = gl.warp_specialize([
            (consumer, (out, rings, room, given, tasks, 0, C)),
            (consumer, (out, rings, room, given, tasks, 1, C)),
            (consumer, (out, rings, room, given, tasks, 2, C)),
            (producer, (slabs, rings, mask, axes, tasks, C)),
        ], [4, 4, 1], C.WORKERS)  # fmt: skip
    if broken[0] != 0:
        again(slabs, out, rings, room, given, (v_ptr, v_b, v_head, v_row), tasks, door, C)
