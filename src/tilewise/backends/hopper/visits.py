"""Which tiles a program visits, and in which order; names as in `steps`. EMPTY tiles are never visited, and of those that a
mask or the last key cuts all come before the FULL ones."""

# Kernels are in Gluon's language, not Python's:
# pyright: reportAttributeAccessIssue=false, reportInvalidTypeForm=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def rounds(tasks, C: gl.constexpr):
    """How many tiles a program has. `tasks` is how many there are, and where programs are told which are theirs (`roster`)."""
    if C.LISTED:
        count = gl.load(tasks[1] + gl.program_id(0))
    elif C.PERSISTENT:
        whole = tasks[0] // gl.num_programs(0)
        count = whole + (own(whole, tasks, C) < tasks[0]).to(gl.int32)
    else:
        count = gl.to_tensor(1)
    return count


@gluon.jit
def own(turn, tasks, C: gl.constexpr):
    """A program's tile of each round, and of one round more. Where they are alike, every other round goes backwards: then the
    last one is shared fairly."""
    one, programs = gl.program_id(0), gl.num_programs(0)
    if C.LISTED:
        one = gl.load(tasks[1] + (turn + 1) * programs + one)
    elif C.PERSISTENT:
        one = turn * programs + gl.where(turn % 2 == 0, one, programs - 1 - one)
    return one


@gluon.jit
def place(tile, axes, C: gl.constexpr):
    """Batch entry, head and block of query rows of a program's tile. `span` heads go together: the last blocks of all of them
    first, which under a causal mask have most to do."""
    n, _, h, _, span = axes
    blocks = gl.cdiv(n, C.BLOCK_M)
    section, rest = tile // (span * blocks), tile % (span * blocks)
    head = section * span + rest % span
    return head // h, head % h, blocks - 1 - rest // span


@gluon.jit
def interval(rows, b, mask, axes, C: gl.constexpr):
    """Keys [first, past) outside which a query row sees nothing. Rows past the end see none, whatever a key holds."""
    n, s = axes[0], axes[1]
    first_ptr, past_ptr, row_b, left, right, _, _ = mask
    if C.MASK == "NONE":
        first, past = rows * 0, rows * 0 + s
    elif C.MASK == "BAND":
        first, past = gl.minimum(gl.maximum(rows + left, 0), s), gl.minimum(gl.maximum(rows + right, 0), s)
    else:
        at = b.to(gl.int64) * row_b + rows
        first, past = gl.load(first_ptr + at, mask=rows < n, other=0), gl.load(past_ptr + at, mask=rows < n, other=0)
    return first, gl.where(rows < n, past, 0)


@gluon.jit
def visits_of(b, block, mask, axes, C: gl.constexpr):
    """(lo, full_lo, full_hi, hi): the tiles of keys that a block of query rows visits, lo to hi, and the FULL ones among them.
    A block that sees nothing visits one tile and finds it hidden."""
    n, s = axes[0], axes[1]
    _, _, _, left, right, visits_ptr, visits_b = mask
    if C.MASK == "NONE":
        lo, full_lo, full_hi, hi = n * 0, n * 0, s // C.BLOCK_N, gl.cdiv(s, C.BLOCK_N)
    elif C.MASK == "BAND":
        row, last = block * C.BLOCK_M, gl.minimum(block * C.BLOCK_M + C.BLOCK_M, n) - 1
        lo = gl.minimum(gl.maximum(row + left, 0), s) // C.BLOCK_N
        hi = gl.cdiv(gl.minimum(gl.maximum(last + right, 0), s), C.BLOCK_N)
        full_lo = gl.cdiv(gl.minimum(gl.maximum(last + left, 0), s), C.BLOCK_N)
        full_hi = gl.minimum(gl.maximum(row + right, 0), s) // C.BLOCK_N
    else:
        at = visits_ptr + b.to(gl.int64) * visits_b + block * 4
        lo, full_lo, full_hi, hi = gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3)
    lo = gl.minimum(gl.maximum(lo, 0), gl.cdiv(s, C.BLOCK_N) - 1)
    hi = gl.maximum(gl.minimum(hi, gl.cdiv(s, C.BLOCK_N)), lo + 1)
    full_lo = gl.minimum(gl.maximum(full_lo, lo), hi)
    full_hi = gl.minimum(gl.maximum(full_hi, full_lo), hi)
    return lo, full_lo, full_hi, hi


@gluon.jit
def cut(visits):
    """How many of the visited tiles are not FULL."""
    lo, full_lo, full_hi, hi = visits
    return full_lo - lo + hi - full_hi


@gluon.jit
def nth(t, visits):
    """The t-th visited tile: first those that end at `hi`, where a causal mask has the diagonal, then those that start at
    `lo`, then the FULL ones."""
    lo, full_lo, full_hi, hi = visits
    right, left = hi - full_hi, full_lo - lo
    return gl.where(t < right, full_hi + t, gl.where(t < right + left, lo + t - right, full_lo + t - right - left))
