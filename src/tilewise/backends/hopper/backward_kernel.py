"""The gradients of q, k and v on a Hopper. A program owns 128 keys of one key head, 64 for each of two warpgroups, which keep
their dk and dv in registers while the query rows that see them pass by, 64 a step:

    sᵀ = k·qᵀ    dpᵀ = v·doᵀ    pᵀ = exp(sᵀ − lse)    dsᵀ = pᵀ∘(dpᵀ − delta + dlse)
    dv += pᵀ·do    dk += dsᵀ·q    dq += ds·k

Tiles lie on their sides, keys in rows, so that pᵀ and dsᵀ are left operands straight from the registers that they were
computed in. Only dq mixes what the two warpgroups hold: ds passes through shared memory, and a step later each warpgroup
multiplies all of it with half the columns of k. dq of a step then waits in shared memory for a warp of its own, which lets
the copy engine add it to float32 sums in memory: in the order of keys, kept by a counter for each block of rows, so that
every run gives the same bits.

Nothing is in flight where a step ends, nor where operands are made of registers: else the assembler would make every product
wait for the one before.

Programs may stay, and go from one block of keys to the next in the order of `place_of`: then the least block that is not done
is always somebody's next, and nobody waits for ever where all programs run at once. Counts of steps and phases go on from block
to block; the next first rows come while the last step is under way, the next v and k as soon as no product reads the ones
before, and dk and dv leave like dq, through the same shared memory, while they come."""

# Kernels are in Gluon's language, not Python's:
# pyright: reportAttributeAccessIssue=false, reportInvalidTypeForm=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false, reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from . import backward_variant as sizes
from .backward_carry import dq_room
from .backward_walk import HALF, beginning, following, shown, task_of
from .channel import WARP, WARPGROUP, arrived, claim, release, send, send_to, tile
from .inline import agree, alike, anew, lower_flag, meet, note, signal
from .layouts import halves, joined, of_columns, of_operand, of_rows, of_sums, pieces
from .visits import own as nth_task
from .visits import rounds

LOG2_E = gl.constexpr(1.4426950408889634)
BOTH = gl.constexpr(sizes.READERS)
PART = gl.constexpr(sizes.PART)
CHUNK = gl.constexpr(16)
"""Columns of weights that are computed together where there is a score."""


# ---- the warp that loads


@gluon.jit
def bring(descriptors, stats, rings, mask, axes, tasks, C: gl.constexpr):
    """Of each block of keys: q, do, lse and delta of its first step, v and k, and what the other steps need."""
    k, v, keys = descriptors[1], descriptors[2], rings[1]
    at, one = gl.to_tensor(0), nth_task(0, tasks, C)
    for turn in range(rounds(tasks, C)):
        coming = nth_task(turn + 1, tasks, C)
        whose, _, visits, total = task_of(one, mask, axes, C)
        b, key_head, block, h = whose
        m, head = beginning(visits)
        bring_rows(descriptors, stats, rings, b, m, head, h, at, C)
        claim(keys, turn * 2 + 1, C.KEYS)
        send(keys, v, b, key_head, block * C.N, turn * 2 + 1, 0, C.KEYS)
        claim(keys, turn * 2, C.KEYS)
        send(keys, k, b, key_head, block * C.N, turn * 2, 0, C.KEYS)
        for later in range(at + 1, at + total):
            m, head = following(m, head, visits)
            bring_rows(descriptors, stats, rings, b, m, head, h, later, C)
        at, one = at + total, coming


@gluon.jit
def bring_rows(descriptors, stats, rings, b, m, head, h, at, C: gl.constexpr):
    """What a step needs of its query rows."""
    q, _, _, do = descriptors
    rows, _, beside = rings
    claim(rows, at, C.ROWS)
    send(rows, q, b, head, m * C.M, at, 0, C.ROWS)
    send(rows, do, b, head, m * C.M, at, 1, C.ROWS)
    for kind in gl.static_range(2):
        to = beside.index(at % C.ROWS.STAGES * 2 + kind)
        send_to(rows, stats, [kind, b * h + head, m, 0], at, to, C.ROWS)


# ---- the warpgroups that multiply


@gluon.jit
def stat(beside, at, kind, C: gl.constexpr):
    """lse or delta − dlse of the query rows of a step, one a column."""
    return beside.index(at % C.ROWS.STAGES * 2 + kind).reshape([C.M]).load(of_columns(C.M))[None, :]


@gluon.jit
def score_of(score, b, C: gl.constexpr):
    """(unit, cap, slopes, ahead) of a batch entry."""
    unit, cap, slopes, slope_b, ahead = score
    if C.ALIBI:
        found = (unit, cap, slopes + b * slope_b, ahead)
    else:
        found = (unit, cap, 0, 0)
    return found


@gluon.jit
def logits(x, first, apart, head, score, MINE: gl.constexpr, COLUMNS: gl.constexpr, C: gl.constexpr):
    """Logits in base 2 of query rows from `first` of a step on, whose first one is `apart` from the first key, and by what they
    grow with those before a cap."""
    unit, cap, slopes, ahead = score
    x *= unit
    if C.ALIBI:
        keys = (MINE * HALF + gl.arange(0, HALF, gl.SliceLayout(1, x.type.layout))).to(gl.float32)
        rows = (first + gl.arange(0, COLUMNS, gl.SliceLayout(0, x.type.layout))).to(gl.float32)
        distance = gl.abs((keys + (apart + anew() - ahead).to(gl.float32))[:, None] - rows[None, :])
        x -= gl.load(slopes + head).to(gl.float32) * LOG2_E * distance
    if C.CAPPED:
        t = 1 - 2 / (gl.exp2(x * (2 * LOG2_E / cap)) + 1)
        x = cap * t
        slack = 1 - t * t
    else:
        slack = x
    return x, slack


@gluon.jit
def scored(x, dp, rings, at, apart, head, score, first, MINE: gl.constexpr, COLUMNS: gl.constexpr, C: gl.constexpr):
    """p and ds in the dtype of products, a few columns after the other: with more to compute, registers are worth more than
    time."""
    if COLUMNS > CHUNK:
        HALVED: gl.constexpr = COLUMNS // 2
        x_left, x_right = halves(x, COLUMNS)
        dp_left, dp_right = halves(dp, COLUMNS)
        p_left, ds_left = scored(x_left, dp_left, rings, at, apart, head, score, first, MINE, HALVED, C)
        p_right, ds_right = scored(x_right, dp_right, rings, at, apart, head, score, first + HALVED, MINE, HALVED, C)
        p, ds = joined(p_left, p_right, COLUMNS), joined(ds_left, ds_right, COLUMNS)
    else:
        x, slack = logits(x, first, apart, head, score, MINE, COLUMNS, C)
        lse, total = stats_of(rings, at, 0, first, x, COLUMNS, C), stats_of(rings, at, 1, first, x, COLUMNS, C)
        weights = gl.exp2(x - lse)
        slope = weights * (dp - total)
        if C.CAPPED:
            slope *= slack
        p, ds = weights.to(rings[0][0].dtype), slope.to(rings[0][0].dtype)
    return p, ds


@gluon.jit
def stats_of(rings, at, kind, first, like, COLUMNS: gl.constexpr, C: gl.constexpr):
    """lse or delta − dlse of some query rows of a step, one a column of a tile."""
    line = rings[2].index(at % C.ROWS.STAGES * 2 + kind).reshape([C.M]).slice(first, COLUMNS)
    return line.load(gl.SliceLayout(0, like.type.layout))[None, :]


@gluon.jit
def put(ds, exchange, at, MINE: gl.constexpr, C: gl.constexpr):
    """ds of this warpgroup's keys into shared memory, for both."""
    exchange.index(at & 1).reshape([C.N, C.M]).slice(MINE * HALF, HALF, 0).store(ds)
    fence_async_shared()


@gluon.jit
def tell(at, MINE: gl.constexpr, C: gl.constexpr):
    """Say that ds of a step is there, and that what lay there before is no longer read."""
    signal(C.MET + (at & 1) * 2 + MINE, BOTH)


@gluon.jit
def leave(dq, staged, at, MINE: gl.constexpr, C: gl.constexpr):
    """A piece of dq into shared memory, once what left before has been taken; `at` counts what leaves."""
    room, taken = staged
    mbarrier.wait(taken.index(MINE), (at & 1) ^ 1)
    dq_room(room, MINE, C).reshape([C.PIECE, 32]).store(pieces(dq, C.COLUMNS))
    fence_async_shared()
    signal(C.LEFT + MINE, WARPGROUP + WARP)


@gluon.jit
def own(at):
    """The place of k, with v after it, among a program's own tiles: 0, for no program has so many steps, but not to the
    compiler. What products need to find these tiles is better made in each step than kept: registers are few, and ptxas would
    keep it in memory."""
    return at >> 30


@gluon.jit
def step(rings, at, m, head, block, score, mask, visits, n, s, MINE: gl.constexpr, C: gl.constexpr):
    """p and ds of a step, in the dtype of products; p ready to be a left operand."""
    rows, keys, beside = rings
    D: gl.constexpr = of_operand(C.WIDTH)
    zero = gl.zeros([HALF, C.M], gl.float32, of_sums(C.M))
    first = own(at)
    k, v = (tile(keys, 0, first, C.KEYS), tile(keys, 0, first + 1, C.KEYS))
    k, v = k.slice(MINE * HALF, HALF, 0), v.slice(MINE * HALF, HALF, 0)
    q, do = tile(rows, at, 0, C.ROWS), tile(rows, at, 1, C.ROWS)
    x = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    dp = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
    if C.PLAIN:
        x = warpgroup_mma_wait(1, deps=[x])
        if (m < visits[2]) | (m >= visits[3]):
            x = gl.where(shown(m, block, mask, n, s, MINE, C), x, float("-inf"))
        p = gl.exp2(x * score[0] - stat(beside, at, 0, C))
        dp = warpgroup_mma_wait(0, deps=[dp])
        ds = p * (dp - stat(beside, at, 1, C))
        p = gl.convert_layout(p.to(q.dtype), D)
        ds = ds.to(q.dtype)
    else:
        x, dp = warpgroup_mma_wait(0, deps=[x, dp])
        p, ds = scored(x, dp, rings, at, block * C.N - m * C.M, head, score, 0, MINE, C.M, C)
        p = gl.convert_layout(p, of_sums(C.M), assert_trivial=True)
        ds = gl.convert_layout(ds, of_sums(C.M), assert_trivial=True)
        if (m < visits[2]) | (m >= visits[3]):
            keep = shown(m, block, mask, n, s, MINE, C)
            p, ds = gl.where(keep, p, 0.0), gl.where(keep, ds, 0.0)
        p = gl.convert_layout(p, D)
    return p, ds


@gluon.jit
def dq_of(rings, exchange, at, MINE: gl.constexpr, C: gl.constexpr):
    """This warpgroup's part of dq of a step, under way: half the columns of 64 rows, or all of half of 128."""
    meet(C.MET + (at & 1) * 2 + 1 - MINE, BOTH)
    k, ds = tile(rings[1], 0, own(at), C.KEYS), exchange.index(at & 1).reshape([C.N, C.M])
    if C.SPLIT:
        k = k.slice(MINE * C.COLUMNS, C.COLUMNS, 1)
    else:
        ds = ds.slice(MINE * PART, PART, 1)
    zero = gl.zeros([PART, C.COLUMNS], gl.float32, of_sums(C.COLUMNS))
    return warpgroup_mma(ds.permute((1, 0)), k, zero, use_acc=False, is_async=True)


@gluon.jit
def multiply(rings, exchange, staged, out, score, mask, axes, tasks, scale, MINE: gl.constexpr, C: gl.constexpr):
    """A warpgroup's half of every block of keys."""
    at, one = gl.to_tensor(0), nth_task(0, tasks, C)
    for turn in range(rounds(tasks, C)):
        coming = nth_task(turn + 1, tasks, C)
        at = multiply_keys(rings, exchange, staged, out, one, score, mask, axes, turn, at, scale, MINE, C)
        one = coming


@gluon.jit
def multiply_keys(
    rings, exchange, staged, out, one, score, mask, axes, turn, start, scale, MINE: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """dk and dv of 64 keys, and half the columns of every step's dq. How many steps have gone, of which `start` before."""
    rows, keys, _ = rings
    n, s = axes[0], axes[1]
    whose, mask, visits, total = task_of(one, mask, axes, C)
    start = alike(start)
    score, block, past = score_of(score, whose[0], C), whose[2], start + total
    D: gl.constexpr = of_operand(C.WIDTH)
    zero = gl.zeros([HALF, C.WIDTH], gl.float32, of_sums(C.WIDTH))
    arrived(rows, start, C.ROWS)
    arrived(keys, turn * 2 + 1, C.KEYS)
    arrived(keys, turn * 2, C.KEYS)
    m, head = beginning(visits)
    p, ds = step(rings, start, m, head, block, score, mask, visits, n, s, MINE, C)
    put(ds, exchange, start, MINE, C)
    tell(start, MINE, C)
    dv = warpgroup_mma(p, tile(rows, start, 1, C.ROWS), zero, use_acc=False, is_async=True)
    dk = warpgroup_mma(gl.convert_layout(ds, D), tile(rows, start, 0, C.ROWS), zero, use_acc=False, is_async=True)
    dv, dk = warpgroup_mma_wait(0, deps=[dv, dk])
    release(rows, start, C.ROWS)
    for at in range(start + 1, past):
        m, head = following(m, head, visits)
        arrived(rows, at, C.ROWS)
        p, ds = step(rings, at, m, head, block, score, mask, visits, n, s, MINE, C)
        dq = dq_of(rings, exchange, at - 1, MINE, C)
        dv = warpgroup_mma(p, tile(rows, at, 1, C.ROWS), dv, is_async=True)
        dk = warpgroup_mma(gl.convert_layout(ds, D), tile(rows, at, 0, C.ROWS), dk, is_async=True)
        put(ds, exchange, at, MINE, C)
        dq = warpgroup_mma_wait(2, deps=[dq])
        tell(at, MINE, C)
        leave(dq, staged, at - 1, MINE, C)
        dv, dk = warpgroup_mma_wait(0, deps=[dv, dk])
        release(rows, at, C.ROWS)
    if C.PERSISTENT:
        release(keys, 1, C.KEYS)
    dq = dq_of(rings, exchange, past - 1, MINE, C)
    if C.MASK != "NONE":
        judge(dk, dv, out, whose, s, past, MINE, C)
    dq = warpgroup_mma_wait(0, deps=[dq])
    if C.PERSISTENT:
        release(keys, 0, C.KEYS)
    leave(dq, staged, past - 1, MINE, C)
    finish(dk * scale, dv, staged, out, whose, past, s, MINE, C)
    return past


@gluon.jit
def judge(dk, dv, out, whose, s, past, MINE: gl.constexpr, C: gl.constexpr):
    """A note where dk or dv of a warpgroup's keys hold what is not finite. The named barrier that carries the answer is the
    next step's: the step that used it before is behind both warpgroups, and the next takes a k that this one makes room for
    later."""
    _, _, notes, _, _, g = out
    b, key_head, block, _ = whose
    lower_flag(MINE)
    note(gl.sum(dk - dk, 1) + gl.sum(dv - dv, 1), 0, MINE, 2)
    bad = agree(MINE, C.MET + (past & 1) * 2 + MINE, WARPGROUP)
    leave_note(notes, b * g + key_head, block * 2 + MINE, s, bad)


@gluon.jit
def finish(dk, dv, staged, out, whose, past, s, MINE: gl.constexpr, C: gl.constexpr):
    """dk and dv to memory, or to where they are carried away from, one after the other."""
    dk_ptr, dv_ptr, _, d, e, g = out
    b, key_head, block, _ = whose
    if C.WIDE:
        write(dk_ptr, dk, b, key_head, block * C.N + MINE * HALF, 0, s, g, d, C.WIDTH)
        write(dv_ptr, dv, b, key_head, block * C.N + MINE * HALF, 0, s, g, e, C.WIDTH)
    else:
        leave_keys(dk, staged, past, MINE, C)
        leave_keys(dv, staged, past + 1, MINE, C)


@gluon.jit
def leave_keys(x, staged, at, MINE: gl.constexpr, C: gl.constexpr):
    """dk or dv into shared memory; as `leave`. Two leave, so that those of the next block count as its steps do."""
    room, taken = staged
    mbarrier.wait(taken.index(MINE), (at & 1) ^ 1)
    room.index(MINE).reshape([C.ROOM, C.WIDTH]).slice(0, HALF, 0).store(x.to(room.dtype))
    fence_async_shared()
    signal(C.LEFT + MINE, WARPGROUP + WARP)


@gluon.jit
def leave_note(notes, at, half, s, what):
    """Note `what`, 0 or 1, for a half of a block of keys of head `at`."""
    many = gl.cdiv(s, HALF)
    if half < many:
        gl.store(notes + at * many + half, gl.to_tensor(what).to(gl.int8))


@gluon.jit
def write(ptr, x, b, key_head, row, first, s, g, columns, WIDTH: gl.constexpr):
    """WIDTH columns from `first` on of rows of one head of a contiguous tensor "b s g columns"."""
    r, c = row + gl.arange(0, HALF, of_rows(WIDTH)), first + gl.arange(0, WIDTH, of_columns(WIDTH))
    at = ((b.to(gl.int64) * s + r) * g + key_head) * columns
    gl.store(ptr + at[:, None] + c[None, :], x, mask=(r < s)[:, None] & (c < columns)[None, :])


@gluon.jit
def clear(out, whose, s, C: gl.constexpr):
    """dk and dv of keys that no row sees."""
    dk_ptr, dv_ptr, notes, d, e, g = out
    b, key_head, block, _ = whose
    zero = gl.zeros([HALF, C.WIDTH], dk_ptr.dtype.element_ty, of_sums(C.WIDTH))
    HALVES: gl.constexpr = C.N // HALF
    for half in gl.static_range(HALVES):
        write(dk_ptr, zero, b, key_head, block * C.N + half * HALF, 0, s, g, d, C.WIDTH)
        write(dv_ptr, zero, b, key_head, block * C.N + half * HALF, 0, s, g, e, C.WIDTH)
        if C.MASK != "NONE":
            leave_note(notes, b * g + key_head, block * HALVES + half, s, 0)
