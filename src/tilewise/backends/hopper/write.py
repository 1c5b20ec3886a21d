"""Where a block of query rows starts and where it ends: what its rows are given, and their o and lse in memory; names as in
`steps`."""

# Kernels are in Gluon's language, not Python's:
# pyright: reportAttributeAccessIssue=false, reportInvalidTypeForm=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from .layouts import ROWS, beside, in_memory, of_columns, of_rows
from .steps import scaled, shares
from .versions import barrier, recast, store_tile
from .visits import interval


@gluon.jit
def rows_of(row, b, head, given, LAYOUT: gl.constexpr, C: gl.constexpr):
    """`rows` and `score` of the ROWS query rows of a head from `row` on, and the head's sink."""
    mask, axes, options = given
    scale, softcap, alibi_ptr, alibi_b, sink_ptr, far = options
    i = row + gl.arange(0, ROWS, LAYOUT)
    first, past = interval(i, b, mask, axes, C)
    slope, sink = gl.to_tensor(0.0), gl.to_tensor(0.0)
    if C.ALIBI:
        slope = gl.load(alibi_ptr + b * alibi_b + head).to(gl.float32)
    if C.SINK:
        sink = gl.load(sink_ptr + head).to(gl.float32)
    return (i, first, past), (scale, softcap, slope, far), sink


@gluon.jit
def merged(o, lse, b, head, row, seen, n, C: gl.constexpr):
    """o and lse of ROWS rows from `row` on, with what they have `seen` before: where that lies, o and then lse, and how far
    apart batch entries, rows and heads are, of o in steps of 16 bytes."""
    o_ptr, o_b, o_row, o_head, lse_ptr, lse_b, lse_row, lse_head = seen
    i = row + gl.arange(0, ROWS, lse.type.layout)
    other = gl.load(lse_ptr + b * lse_b + head * lse_head + i * lse_row, mask=i < n, other=float("-inf"))
    lse, mine, theirs = shares(lse, other)
    i, e = row + gl.arange(0, ROWS, of_rows(C.E)), gl.arange(0, C.E, of_columns(C.E))
    at = (b * o_b + head * o_head + i * o_row) * 4
    some = beside((i < n) & (gl.convert_layout(theirs, of_rows(C.E)) > 0), o)
    before = gl.load(o_ptr + at[:, None] + e[None, :], mask=some & (e < C.COLUMNS)[None, :], other=0.0)
    return scaled(o, mine) + scaled(before, theirs), lse


@gluon.jit
def write(o, lse, b, head, row, out, room, axes, C: gl.constexpr):
    """o and lse of ROWS rows from `row` on. o leaves by way of `room` in shared memory, or in float32 directly. Where APART it
    may still be on its way when this ends."""
    o_desc, o_ptr, lse_ptr, seen = out
    n, h = axes[0], axes[2]
    i = row + gl.arange(0, ROWS, lse.type.layout)
    if C.ONTO:
        o, lse = merged(o, lse, b, head, row, seen, n, C)
    gl.store(lse_ptr + (b * h + head).to(gl.int64) * n + i, lse, mask=i < n)
    if C.WIDE:
        i, e = row + gl.arange(0, ROWS, of_rows(C.E)), gl.arange(0, C.E, of_columns(C.E))
        at = ((b.to(gl.int64) * n + i) * h + head) * C.COLUMNS
        gl.store(o_ptr + at[:, None] + e[None, :], o, mask=(i < n)[:, None] & (e < C.COLUMNS)[None, :])
    else:
        room = recast(room, room.dtype, [1, 1, ROWS, C.E], in_memory(ROWS, C.E, room.dtype))
        if C.APART:
            tma.store_wait(0)
            barrier()
        room.reshape([ROWS, C.E]).store(o.to(room.dtype))
        fence_async_shared()
        barrier()
        store_tile(o_desc, [b, head, row, 0], room)
        if not C.APART:
            tma.store_wait(0)
            barrier()
