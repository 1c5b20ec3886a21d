"""The gradients of q, k and v of heads of 256 columns. dk and dv of 64 keys fill the registers of two warpgroups, half the
columns each; so the two share each step. One makes p and the other ds, which meet in shared memory, and each multiplies both
with its columns:

    first   sᵀ = k·qᵀ    pᵀ = exp(sᵀ − lse)               second  dpᵀ = v·doᵀ    dsᵀ = pᵀ∘(dpᵀ − delta + dlse)
    both    dv += pᵀ·do    dk += dsᵀ·q    dq += ds·k

Everything else is as in `backward_kernel`."""

# Kernels are in Gluon's language, not Python's:
# pyright: reportAttributeAccessIssue=false, reportInvalidTypeForm=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false, reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .backward_carry import carry_dq
from .backward_kernel import BOTH, PART, leave, logits, write
from .backward_walk import HALF, beginning, following, shown
from .channel import WARP, WARPGROUP, arrived, claim, release, send, send_to, tile
from .inline import agree, anew, lower_flag, meet, note, signal
from .layouts import in_memory, of_columns, of_operand, of_sums
from .versions import recast, store_tile

OWN = gl.constexpr(128)
"""Columns of dk and dv that a warpgroup keeps."""


@gluon.jit
def bring(descriptors, stats, rings, whose, visits, total, C: gl.constexpr):
    """k and v once, then q and lse, do and delta of each step."""
    q_desc, k_desc, v_desc, do_desc = descriptors
    q, do, keys, beside = rings
    b, key_head, block, h = whose
    claim(keys, 0, C.KEYS)
    send(keys, k_desc, b, key_head, block * C.N, 0, 0, C.KEYS)
    send(keys, v_desc, b, key_head, block * C.N, 0, 1, C.KEYS)
    m, head = beginning(visits)
    for at in range(total):
        claim(q, at, C.Q)
        send(q, q_desc, b, head, m * C.M, at, 0, C.Q)
        send_to(q, stats, [0, b * h + head, m, 0], at, beside.index(at % C.Q.STAGES), C.Q)
        claim(do, at, C.DO)
        send(do, do_desc, b, head, m * C.M, at, 0, C.DO)
        send_to(do, stats, [1, b * h + head, m, 0], at, beside.index(C.Q.STAGES), C.DO)
        m, head = following(m, head, visits)


@gluon.jit
def carry(sums, out, counts, staged, q, whose, mask, visits, total, blocks, MINE: gl.constexpr, C: gl.constexpr):
    """A warpgroup's half of dq of every step; then half of dk and dv."""
    b, key_head, block, _ = whose
    carry_dq(sums, counts, staged, whose, mask, visits, total, blocks, MINE, C)
    if not C.WIDE:
        meet(C.LEFT + MINE, WARPGROUP + WARP)
        place = [b, key_head, block * C.N, MINE * OWN]
        store_tile(out[0], place, halved(q, MINE, 0, C))
        store_tile(out[1], place, halved(q, MINE, 1, C))
        tma.store_wait(0)


@gluon.jit
def halved(q, MINE: gl.constexpr, kind, C: gl.constexpr):
    """Where half the columns of dk or dv are left: shared memory that q no longer needs."""
    SHAPE: gl.constexpr = [4, 1, 1, PART, OWN]
    return recast(q[0], q[0].dtype, SHAPE, in_memory(PART, OWN, q[0].dtype)).index(MINE * 2 + kind)


@gluon.jit
def stat(beside, at, C: gl.constexpr):
    """lse or delta − dlse of the query rows of a step, one a column."""
    return beside.index(at).reshape([C.M]).load(of_columns(C.M))[None, :]


@gluon.jit
def piece_of(rings, exchange, PIECE: gl.constexpr, C: gl.constexpr):
    """One piece of dq of a step, under way."""
    k = tile(rings[2], 0, anew(), C.KEYS).slice(PIECE * C.COLUMNS, C.COLUMNS, 1)
    zero = gl.zeros([PART, C.COLUMNS], gl.float32, of_sums(C.COLUMNS))
    ds = exchange.index(1).reshape([C.N, C.M]).permute((1, 0))
    return warpgroup_mma(ds, k, zero, use_acc=False, is_async=True)


@gluon.jit
def end_step(dv, dk, rings, exchange, staged, at, MINE: gl.constexpr, C: gl.constexpr):
    """dv and dk of a step and both pieces of dq, once dv and dk are under way."""
    dq = piece_of(rings, exchange, MINE * 2, C)
    dv = warpgroup_mma_wait(2, deps=[dv])
    release(rings[1], at, C.DO)
    dk, dq = warpgroup_mma_wait(0, deps=[dk, dq])
    release(rings[0], at, C.Q)
    leave(dq, staged, at * 2, MINE, C)
    dq = piece_of(rings, exchange, MINE * 2 + 1, C)
    dq = warpgroup_mma_wait(0, deps=[dq])
    leave(dq, staged, at * 2 + 1, MINE, C)
    return dv, dk


@gluon.jit
def first(rings, exchange, staged, out, whose, score, mask, visits, total, n, s, scale, C: gl.constexpr):
    """The warpgroup that makes p."""
    q, do, keys, beside = rings
    _, block = whose
    dv = gl.zeros([HALF, OWN], gl.float32, of_sums(OWN))
    dk = gl.zeros([HALF, OWN], gl.float32, of_sums(OWN))
    zero = gl.zeros([HALF, C.M], gl.float32, of_sums(C.M))
    arrived(keys, 0, C.KEYS)
    m, head = beginning(visits)
    for at in range(total):
        arrived(q, at, C.Q)
        x = warpgroup_mma(
            tile(keys, 0, anew(), C.KEYS), tile(q, at, 0, C.Q).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        x = warpgroup_mma_wait(0, deps=[x])
        unit, slack = score[0], x
        if not C.PLAIN:
            x, slack = logits(x, 0, block * C.N - m * C.M, head, score, 0, C.M, C)
            unit = 1.0
        if (m < visits[2]) | (m >= visits[3]):
            x = gl.where(shown(m, block, mask, n, s, 0, C), x, float("-inf"))
        weights = gl.exp2(x * unit - stat(beside, at % C.Q.STAGES, C))
        p = weights.to(q[0].dtype)
        if at > 0:
            meet(C.MET + 2, BOTH)
        exchange.index(0).reshape([C.N, C.M]).store(p)
        if C.CAPPED:  # where ds will be: what it is of dp
            exchange.index(1).reshape([C.N, C.M]).store((weights * slack).to(q[0].dtype))
        signal(C.MET, BOTH)
        arrived(do, at, C.DO)
        dv = warpgroup_mma(gl.convert_layout(p, of_operand(OWN)), tile(do, at, 0, C.DO).slice(0, OWN, 1), dv, is_async=True)
        meet(C.MET + 1, BOTH)
        dk = warpgroup_mma(exchange.index(1).reshape([C.N, C.M]), tile(q, at, 0, C.Q).slice(0, OWN, 1), dk, is_async=True)
        dv, dk = end_step(dv, dk, rings, exchange, staged, at, 0, C)
        signal(C.MET + 3, BOTH)
        m, head = following(m, head, visits)
    meet(C.MET + 2, BOTH)
    finish(dk, dv, scale, q, out, whose, staged, total, s, 0, C)


@gluon.jit
def second(rings, exchange, staged, out, whose, score, mask, visits, total, n, s, scale, C: gl.constexpr):
    """The warpgroup that makes ds."""
    q, do, keys, beside = rings
    dv = gl.zeros([HALF, OWN], gl.float32, of_sums(OWN))
    dk = gl.zeros([HALF, OWN], gl.float32, of_sums(OWN))
    zero = gl.zeros([HALF, C.M], gl.float32, of_sums(C.M))
    arrived(keys, 0, C.KEYS)
    for at in range(total):
        arrived(do, at, C.DO)
        dp = warpgroup_mma(
            tile(keys, 0, anew() + 1, C.KEYS), tile(do, at, 0, C.DO).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        dp = warpgroup_mma_wait(0, deps=[dp])
        dp -= stat(beside, C.Q.STAGES, C)
        meet(C.MET, BOTH)
        p = exchange.index(0).reshape([C.N, C.M]).load(of_sums(C.M))
        if C.CAPPED:
            slope = exchange.index(1).reshape([C.N, C.M]).load(of_sums(C.M))
        else:
            slope = p
            signal(C.MET + 2, BOTH)
        ds = (slope.to(gl.float32) * dp).to(q[0].dtype)
        if at > 0:
            meet(C.MET + 3, BOTH)
        exchange.index(1).reshape([C.N, C.M]).store(ds)
        fence_async_shared()
        signal(C.MET + 1, BOTH)
        dv = warpgroup_mma(gl.convert_layout(p, of_operand(OWN)), tile(do, at, 0, C.DO).slice(OWN, OWN, 1), dv, is_async=True)
        arrived(q, at, C.Q)
        dk = warpgroup_mma(gl.convert_layout(ds, of_operand(OWN)), tile(q, at, 0, C.Q).slice(OWN, OWN, 1), dk, is_async=True)
        dv, dk = end_step(dv, dk, rings, exchange, staged, at, 1, C)
        if C.CAPPED:
            signal(C.MET + 2, BOTH)
    meet(C.MET + 3, BOTH)
    finish(dk, dv, scale, q, out, whose, staged, total, s, 1, C)


@gluon.jit
def finish(dk, dv, scale, q, out, whose, staged, total, s, MINE: gl.constexpr, C: gl.constexpr):
    """Half the columns of dk and dv to memory, or to where they are carried away from; and a note where they are not finite."""
    dk_ptr, dv_ptr, notes, d, e, g = out
    at, block = whose
    mbarrier.wait(staged[1].index(MINE), 1)  # both pieces of the last step have been taken
    if C.MASK == "NONE":
        meet(C.MET, BOTH)  # the other warpgroup is done with shared memory, too
    else:
        lower_flag(MINE)
        note(gl.sum(dk - dk, 1) + gl.sum(dv - dv, 1), 0, MINE, 2)
        bad = agree(MINE, C.MET, BOTH)
        if MINE == 0:
            gl.store(notes + at * gl.cdiv(s, C.N) + block, bad.to(gl.int8))
    dk *= scale
    if C.WIDE:
        write(dk_ptr, dk, at // g, at % g, block * C.N, MINE * OWN, s, g, d, OWN)
        write(dv_ptr, dv, at // g, at % g, block * C.N, MINE * OWN, s, g, e, OWN)
    else:
        room = anew()
        halved(q, MINE, room, C).reshape([PART, OWN]).store(dk.to(q[0].dtype))
        halved(q, MINE, room + 1, C).reshape([PART, OWN]).store(dv.to(q[0].dtype))
        fence_async_shared()
        signal(C.LEFT + MINE, WARPGROUP + WARP)
