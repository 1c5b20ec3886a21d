"""o and lse: a program owns a block of query rows of one head, and folds its state over the key tiles that its rows can see.
One warp brings tiles; the others, in warpgroups of 64 rows each, multiply.

The product with v of one tile and the product with k of the next are in flight together, so that a warpgroup computes weights
while the tensor cores work for the other. What the pipeline assumes, that nothing hidden is infinite and no sum overflows, is
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
from .layouts import ROWS, beside, folded, in_memory, of_rows, of_sums
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
def q_by_k(rings, at, served, MINE: gl.constexpr, C: gl.constexpr):
    """Start q·kᵀ of a tile."""
    q, k = tile(rings[0], served, MINE, C.Q), tile(rings[1], at, 0, C.K)
    nothing = gl.zeros([ROWS, C.BLOCK_N], gl.float32, of_sums(C.BLOCK_N))
    return warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def absorb(m, l, x, unit, alpha, MINE: gl.constexpr, C: gl.constexpr):
    """The reference and l before the weights of a tile, what earlier sums shrink by, and whether they do: only where a row of
    the warp has outgrown its reference. A warp decides for itself."""
    moved = gl.to_tensor(0)
    if not C.FIXED:
        highs = highest(x, C)
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
    x = q_by_k(rings, at, served, MINE, C)
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
def fold(rings, at, served, rows, visits, score, MINE: gl.constexpr, C: gl.constexpr):
    """The state after every tile that the rows see, and how many tiles have gone."""
    unit, count, partial = unit_of(score, C), visits[3] - visits[0], cut(visits)
    arrived(rings[1], at, C.K)
    x = warpgroup_mma_wait(0, deps=[q_by_k(rings, at, served, MINE, C)])
    release(rings[1], at, C.K)
    start = nth(0, visits) * C.BLOCK_N
    x = logits(x, start, rows, score, C.BLOCK_N, C)
    if partial > 0:
        x = hide(x, start, rows, C.BLOCK_N, C)
    m = rowmax(highest(x, C), C) * unit
    p = gl.exp2(x * unit - beside(pivot(m), x))
    l = sums(p, C.BLOCK_N, C)
    if C.FIXED:  # a row that sees something, but nothing of its first tile, has no reference
        l += beside(gl.where((m == float("-inf")) & (rows[1] < rows[2]), float("nan"), 0.0), l)
    alpha = gl.full([ROWS], 1.0, gl.float32, of_rows(C.BLOCK_N))
    acc = gl.zeros([ROWS, C.E], gl.float32, of_sums(C.E))
    state = (m, l, acc, as_operand(rounded(p, rings[2][0].dtype), C), alpha, gl.to_tensor(0))
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
    acc = warpgroup_mma_wait(0, deps=[acc])
    release(rings[2], at - 1, C.V)
    return m, l, acc, at


@gluon.jit
def judge(l, acc, MINE: gl.constexpr, C: gl.constexpr):
    """Take note of rows whose weights have left what their reference can hold, or whose sums are not finite."""
    finite = gl.sum(folded(acc * 0.0, C.E, C.WIDTH), 1)
    note(l + gl.convert_layout(finite, l.type.layout, assert_trivial=True), C.LIMIT, BROKEN + MINE, C.WIDTH // 2)


@gluon.jit
def o_block(one, out, rings, room, given, at, served, MINE: gl.constexpr, C: gl.constexpr):
    """A warpgroup's share of one block of query rows of one head. How many tiles have gone."""
    b, head, block = place(one, given[1], C)
    row = block * C.BLOCK_M + MINE * ROWS
    rows, score, sink = rows_of(row, b, head, given, of_rows(C.BLOCK_N), C)
    visits = visits_of(b, block, given[0], given[1], C)
    arrived(rings[0], served, C.Q)
    m, l, acc, at = fold(rings, at, served, rows, visits, score, MINE, C)
    judge(l, acc, MINE, C)
    o, lse = finish(m, total(l, C), acc, sink, C)
    write(o, lse, b, head, row + anew(), out, room.index(MINE), given[1], C)
    if not C.APART:
        release(rings[0], served, C.Q)
    return at


@gluon.jit
def consumer(out, rings, room, given, tasks, MINE: gl.constexpr, C: gl.constexpr):
    """A warpgroup that multiplies. Whether any of the program has met what the pipeline cannot do."""
    lower_flag(MINE)
    lower_flag(BROKEN + MINE)
    if C.TURNS:
        open_turns(MINE, C.TURN, C.GROUPS)
    at, one = gl.to_tensor(0), own(0, tasks, C)
    for served in range(rounds(tasks, C)):
        following = own(served + 1, tasks, C)
        at = o_block(one, out, rings, room, given, at, served, MINE, C)
        one = following
    if not C.WIDE:
        tma.store_wait(0)
    return (agree(BROKEN + MINE, C.VERDICT, C.READERS),)


@kernel
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, o_ptr, lse_ptr, seen_ptr, seen_b: gl.int64, seen_row: gl.int64, seen_head: gl.int64,
    seen_lse_ptr, seen_lse_b: gl.int64, seen_lse_row: gl.int64, seen_lse_head: gl.int64,
    v_ptr, v_b: gl.int64, v_head: gl.int64, v_row: gl.int64,
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
    seen = seen_ptr, seen_b, seen_row, seen_head, seen_lse_ptr, seen_lse_b, seen_lse_row, seen_lse_head
    slabs, out = (q_desc, k_desc, v_desc), (o_desc, o_ptr, lse_ptr, seen)
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
