"""Which query rows see the keys of a program, in blocks, and in which order: names as in `backward_kernel`. A program walks
its blocks of query rows, in each for all query heads of its group; and whoever adds to a block of dq comes there in the order
in which programs start, so that nobody waits for one that has not begun.

Up: blocks of keys start from the last, and walk rows from the first that sees them. Under a causal mask all of them add
somewhere else at any time, and nobody waits at all; but those with most to do start last. Down: blocks of keys start from the
first, and walk rows from the last; who has most to do starts first, but waits where many start together. So sections of heads
go up and down in turn, and the last one down: one that ends with long programs is followed by one that begins with them.

Going up, who starts together comes to a row twice as many steps apart as a group has heads, and by then L2 has forgotten the
rows of large groups. Going down, they pass it one step after the other, and waiting is little to programs of so many steps:
so sections of large groups all go down.

    mask    (first, past, left, right, visits, seen, keys)     rows r see keys [first[r], past[r]), or [r + left, r + right);
                                                               `keys` blocks of keys
    whose   (b, key_head, block, h)                            the batch entry, key head and block of keys of a task
    axes    (n, s, h, g, group, heads, span, sections, turns)  sizes of the problem, and those of `place_of`
    visits  (lo, hi, full_lo, full_hi, up, head, group)        blocks [lo, hi), of which [full_lo, full_hi) hide nothing, of
                                                               heads from `head` on"""

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
def place_of(pid, heads, blocks, span, sections, turns):
    """(head, block of keys, up: 0 or 1) of a program: `span` heads are a section, whose blocks start together, and go
    up and down in turn if `turns` is 1. `sections`, how many they are, is given: with one more division ptxas keeps no address
    of the loops in a register."""
    section, rest = pid // (span * blocks), pid % (span * blocks)
    up = (sections - section + 1) & turns
    width = gl.minimum(span, heads - section * span)
    block = rest // width
    return section * span + rest % width, gl.where(up == 1, blocks - 1 - block, block), up


@gluon.jit
def task_of(one, masks, axes, C: gl.constexpr):
    """Whose keys a task has, their mask, the visits to them, and how many steps they are. `masks`: (first, past, row_b, left,
    right, visits, visits_b, seen, seen_b, keys), what is looked up with the steps between batch entries."""
    n, s, h, g, group, heads, span, sections, turns = axes
    first, past, row_b, left, right, looked_up, visits_b, seen, seen_b, keys = masks
    at, block, up = place_of(one, heads, keys, span, sections, turns)
    b, key_head = at // g, at % g
    if C.MASK == "ROWS":
        mask = (first + b * row_b, past + b * row_b, 0, 0, looked_up + b * visits_b, seen + b * seen_b, keys)
    else:
        mask = (0, 0, left, right, 0, 0, keys)
    lo, hi, full_lo, full_hi = visits_of(block, mask, n, s, C)
    return (b, key_head, block, h), mask, (lo, hi, full_lo, full_hi, up, key_head * group, group), (hi - lo) * group


@gluon.jit
def visits_of(block, mask, n, s, C: gl.constexpr):
    """The blocks of query rows that see a block of keys. One that ends past the last key hides something from all of them."""
    _, _, left, right, visits, _, _ = mask
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
def rank(m, block, mask, up, C: gl.constexpr):
    """How many blocks of keys come to block m of query rows before this one. Those that come there follow each other."""
    _, _, left, right, _, seen, keys = mask
    if C.MASK == "NONE":
        first, last = keys * 0, keys - 1
    elif C.MASK == "BAND":
        first = gl.maximum(m * C.M + left, 0) // C.N
        last = gl.minimum(gl.maximum((m + 1) * C.M - 2 + right, 0) // C.N, keys - 1)
    else:
        first, last = gl.load(seen + m * 2), gl.load(seen + m * 2 + 1)
    return gl.where(up == 1, last - block, block - first)


@gluon.jit
def beginning(visits):
    """The block of query rows and the query head of a program's first step."""
    return gl.where(visits[4] == 1, visits[0], visits[1] - 1), visits[5]


@gluon.jit
def following(m, head, visits):
    """Those of the step after block m of a head: the next head, or the first one and the next block."""
    _, _, _, _, up, first, group = visits
    last = head == first + group - 1
    return gl.where(last, gl.where(up == 1, m + 1, m - 1), m), gl.where(last, first, head + 1)


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
    first, past, left, right, _, _, _ = mask
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
