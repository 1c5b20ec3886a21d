"""Which query rows see the keys of a program, in blocks, and in which order: names as in `backward_kernel`. A program walks
its blocks of query rows from the last to the first, for each query head of its group in turn; and blocks of dq are added to
by programs of ascending keys. Then whoever comes next to a block finds it just left, whether a mask is causal, a window or
none.

    mask    (first, past, left, right, visits, seen_from)      rows r see keys [first[r], past[r]), or [r + left, r + right)
    visits  (lo, hi, full_lo, full_hi)                         blocks [lo, hi), of which [full_lo, full_hi) hide nothing"""

# Kernels are in Gluon's language, not Python's:
# pyright: reportAttributeAccessIssue=false, reportInvalidTypeForm=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .inline import anew
from .layouts import of_columns, of_rows

HALF = gl.constexpr(64)
"""Keys of a warpgroup's tile."""

NEVER = gl.constexpr(2**31 - 1)
"""Further than any two rows are apart."""


@gluon.jit
def place_of(pid, heads, blocks, span):
    """(head, block of keys) of a program: blocks ascend together for `span` heads at a time, so that few programs wait for each
    other at first and none waits for one that has not begun."""
    first = pid // (span * blocks) * span
    width = gl.minimum(span, heads - first)
    rest = pid % (span * blocks)
    return first + rest % width, rest // width


@gluon.jit
def visits_of(block, mask, n, s, C: gl.constexpr):
    """The blocks of query rows that see a block of keys. One that ends past the last key hides something from all of them."""
    _, _, left, right, visits, _ = mask
    last = gl.cdiv(n, C.M)
    if C.MASK == "NONE":
        lo, hi, full_lo, full_hi = last * 0, last, last * 0, n // C.M
    elif C.MASK == "BAND":
        start, end = block * C.N, gl.minimum(block * C.N + C.N, s)
        lo = gl.minimum(gl.maximum(start + 1 - right, 0) // C.M, last)
        hi = gl.maximum(gl.cdiv(gl.minimum(gl.maximum(end - left, 0), n), C.M), lo)
        full_lo = gl.minimum(gl.cdiv(gl.maximum(end - right, 0), C.M), hi)
        full_hi = gl.maximum(gl.minimum(gl.maximum(start + 1 - left, 0), n) // C.M, full_lo)
    else:
        at = visits + block * 4
        lo, hi, full_lo, full_hi = gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3)
    full_hi = gl.where(block * C.N + C.N > s, full_lo, full_hi)
    return lo, hi, full_lo, full_hi


@gluon.jit
def rank(m, block, mask, C: gl.constexpr):
    """How many blocks of keys before this one are seen from block m of query rows: theirs follow each other."""
    _, _, left, _, _, seen_from = mask
    if C.MASK == "NONE":
        before = block
    elif C.MASK == "BAND":
        before = block - gl.maximum(m * C.M + left, 0) // C.N
    else:
        before = block - gl.load(seen_from + m)
    return before


@gluon.jit
def following(m, head, visits):
    """The block and the query head after block m of a head."""
    again = m == visits[0]
    return gl.where(again, visits[1] - 1, m - 1), head + again.to(gl.int32)


@gluon.jit
def gap(ahead, MINE: gl.constexpr, C: gl.constexpr):
    """Key less query row of each pair of a warpgroup's tile, keys in rows, where the first ones of their blocks are `ahead`
    apart."""
    keys = ahead + anew() + MINE * HALF + gl.arange(0, HALF, of_rows(C.M))
    return keys[:, None] - gl.arange(0, C.M, of_columns(C.M))[None, :]


@gluon.jit
def shown(m, block, mask, n, s, MINE: gl.constexpr, C: gl.constexpr):
    """Which pairs of a warpgroup's tile are seen. (Rows past the last one have weights of 0 by their lse, unless a key holds
    what is not finite: then a block that hides nothing else has to look, and others are noted and mended.)"""
    first, past, left, right, _, _ = mask
    j = anew() + block * C.N + MINE * HALF + gl.arange(0, HALF, of_rows(C.M))
    if C.MASK == "ROWS":
        i = m * C.M + gl.arange(0, C.M, of_columns(C.M))
        lo, hi = gl.load(first + i, mask=i < n, other=0), gl.load(past + i, mask=i < n, other=0)
        keep = (j[:, None] >= lo[None, :]) & (j[:, None] < hi[None, :])
    elif C.MASK == "BAND":
        apart = gap(block * C.N - m * C.M, MINE, C)
        keep = (apart >= left) & (apart < gl.where(j < s, right, -NEVER)[:, None])
    else:
        i = m * C.M + gl.arange(0, C.M, of_columns(C.M))
        keep = (j < s)[:, None] & (i < n)[None, :]
    return keep
