"""A program's rows once more, one step after the other: where weights have left what their reference could hold, or where sums
are not finite, be it that values at the end of bf16 have summed up to infinity or that what hidden pairs hold has been
multiplied by 0. One warpgroup does it all, after the others have gone; it takes about ten times as long."""

# Kernels are in Gluon's language, not Python's:
# pyright: reportAttributeAccessIssue=false, reportInvalidTypeForm=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma, warpgroup_mma_wait

from .channel import fetch
from .inline import anew, rounded
from .layouts import ROWS, beside, of_columns, of_rows, of_sums
from .steps import as_operand, finish, hide, logits, pivot, scaled, unit_of
from .visits import cut, nth, own, place, rounds, visits_of
from .write import rows_of, write


@gluon.jit
def again(slabs, out, rings, room, given, value, tasks, door, C: gl.constexpr):
    """All blocks of this program. `value` is where v lies, and how far apart its batch entries, heads and rows are."""
    mask, axes = given[0], given[1]
    v_ptr, v_b, v_head, v_row = value
    count = gl.to_tensor(0)
    for one in range(rounds(tasks, C)):
        b, head, block = place(own(one, tasks, C), axes, C)
        visits = visits_of(b, block, mask, axes, C)
        at = v_ptr + b.to(gl.int64) * v_b + (head // axes[3]).to(gl.int64) * v_head
        for part in range(C.GROUPS):
            row = block * C.BLOCK_M + part * ROWS
            rows, score, sink = rows_of(row, b, head, given, of_rows(C.FEW), C)
            q = rings[0][0].index(0)
            count = fetch(door, slabs[0], b, head, row, q, count, ROWS * C.D * 2)
            where = (door, slabs, rings, b, head // axes[3], count)
            m, l, acc, count = careful_fold(where, rows, visits, score, (at, v_row), axes, C)
            o, lse = finish(m, l, acc, sink, C)
            write(o, lse, b, head, row, out, room.index(0), axes, C)
    if not C.WIDE:
        tma.store_wait(0)


@gluon.jit
def careful_fold(where, rows, visits, score, value, axes, C: gl.constexpr):
    """The state after every tile that the rows see, FEW keys at a time. The reference is the largest so far and ROOM more."""
    door, slabs, rings, b, key_head, count = where
    unit, partial = unit_of(score, C), cut(visits)
    q, k, v = rings[0][0].index(0), rings[1][0].index(0), rings[2][0].index(0)
    m, l = gl.full([ROWS], float("-inf"), gl.float32, of_rows(C.FEW)), gl.zeros([ROWS], gl.float32, of_rows(C.FEW))
    acc = gl.zeros([ROWS, C.E], gl.float32, of_sums(C.E))
    FEW: gl.constexpr = C.FEW
    BLOCK_N: gl.constexpr = C.BLOCK_N
    for t in range(visits[3] - visits[0]):
        start = nth(t, visits) * BLOCK_N
        count = fetch(door, slabs[1], b, key_head, start, k, count, BLOCK_N * C.D * 2)
        count = fetch(door, slabs[2], b, key_head, start, v, count, BLOCK_N * C.E * 2)
        for part in gl.static_range(BLOCK_N // FEW):
            keys = k.reshape([BLOCK_N, C.D]).slice(part * FEW, FEW)
            x = gl.zeros([ROWS, FEW], gl.float32, of_sums(FEW))
            x = warpgroup_mma(q.reshape([ROWS, C.D]), keys.permute((1, 0)), x, use_acc=False, is_async=True)
            x = warpgroup_mma_wait(0, deps=[x])
            at = start + part * FEW
            x = hide(logits(x, at, rows, score, FEW, C), at, rows, FEW, C)
            new = gl.maximum(m, gl.convert_layout(gl.max(x, 1), of_rows(FEW)) * unit + C.ROOM)
            alpha = gl.exp2(m - pivot(new))
            p = gl.exp2(x * unit - beside(pivot(new), x))
            m, l, acc = new, l * alpha + gl.convert_layout(gl.sum(p, 1), of_rows(FEW)), scaled(acc, alpha)
            p = rounded(p, v.dtype)
            if t < partial:
                acc = weigh_rows(acc, p, rows, at, value, axes, C)
            else:
                few = v.reshape([BLOCK_N, C.E]).slice(part * FEW, FEW)
                acc = warpgroup_mma(as_operand(p, C), few, acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[acc])
    return m, l, acc, count


@gluon.jit
def weigh_rows(acc, p, rows, start, value, axes, C: gl.constexpr):
    """acc + p·v over the pairs that are seen, of FEW keys from `start` on, one after the other: a product multiplies, and 0·NaN
    is NaN. `value` is where a head's values lie, and how far apart its rows are."""
    ptr, row = value
    e = gl.arange(0, C.E, of_columns(C.E))
    j = start + gl.arange(0, C.FEW, of_columns(C.FEW))[None, :]
    for one in range(start, gl.minimum(start + C.FEW, axes[1])):
        at = ptr + one.to(gl.int64) * row + e
        if C.COLUMNS == C.E:
            v = gl.load(at).to(gl.float32)
        else:
            v = gl.load(at, mask=e < C.COLUMNS, other=0.0).to(gl.float32)
        seen = (rows[1] <= one) & (one < rows[2])
        weight = gl.sum(gl.where(j + anew() == one, p.to(gl.float32), 0.0), 1)
        acc += gl.where(beside(seen, acc), beside(weight, acc) * v[None, :], 0.0)
    return acc
