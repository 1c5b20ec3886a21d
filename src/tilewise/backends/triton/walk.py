"""Which keys a row sees and which tiles a block visits, as a program finds out; names as in `steps`. `rows`, 1-D, are indices
of query rows. EMPTY tiles are in no visits."""

# Kernels are in Triton's language, not Python's:
# pyright: reportAttributeAccessIssue=false, reportInvalidTypeForm=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def interval(mask, rows, n, s, C: tl.constexpr):
    """Key rows [first, past) outside which a query row sees nothing: all, a band around the diagonal, or looked up."""
    first_ptr, past_ptr, left, right, _ = mask
    if C.MASK == "NONE":
        first, past = rows * 0, rows * 0 + s
    elif C.BAND:
        first, past = tl.minimum(tl.maximum(rows + left, 0), s), tl.minimum(tl.maximum(rows + right, 0), s)
    else:
        first = tl.load(first_ptr + rows, mask=rows < n, other=0)
        past = tl.load(past_ptr + rows, mask=rows < n, other=0)
    return first, past


@triton.jit
def hide(x, mask, first, past, i, j, n, s, C: tl.constexpr):
    """-inf where a pair is hidden; `first` and `past` are shaped as i."""
    if C.BAND:
        keep = (i + mask[2] <= j) & (j < i + mask[3]) & (j < s)
    else:
        keep = (first <= j) & (j < past)
    keep &= i < n  # rows past the end see nothing, whatever a key holds
    if C.MASK == "TABLE":
        ptr, row, col = mask[4]
        seen = tl.load(ptr + i * row + j * col, mask=(i < n) & (j < s), other=0)
        keep &= seen != 0
    return tl.where(keep, x, float("-inf"))


@triton.jit
def visits_of_rows(mask, lists, first, past, rows, n, s, C: tl.constexpr):
    """The key tiles that a block of query rows visits."""
    order, count = lists
    if C.MASK == "TABLE":
        visits = counted(order, count)
    else:
        sees = (rows < n) & (first < past)
        lo = tl.min(tl.where(sees, first, s)) // C.BLOCK_N
        hi = tl.maximum(tl.cdiv(tl.max(tl.where(sees, past, 0)), C.BLOCK_N), lo)
        full_lo = tl.minimum(tl.cdiv(tl.max(tl.where(rows < n, first, 0)), C.BLOCK_N), hi)
        full_hi = tl.maximum(tl.min(tl.where(rows < n, past, s)) // C.BLOCK_N, full_lo)
        visits = (lo, full_lo, full_hi, hi, order)
    return visits


@triton.jit
def visits_of_cols(mask, lists, col, n, s, C: tl.constexpr):
    """The blocks of query rows that visit the key tile which starts at `col`. Under a mask one that ends past the last row is
    PARTIAL."""
    order, count = lists
    last = tl.cdiv(n, C.BLOCK_M)
    if C.MASK == "NONE":
        visits = (last * 0, last * 0, last, last, order)
    elif C.MASK == "TABLE" or not C.BAND:
        visits = counted(order, count)
    else:
        left, right, past = mask[2], mask[3], tl.minimum(col + C.BLOCK_N, s)
        lo = tl.minimum(tl.maximum(col + 1 - right, 0) // C.BLOCK_M, last)
        hi = tl.maximum(tl.cdiv(tl.minimum(tl.maximum(past - left, 0), n), C.BLOCK_M), lo)
        full_lo = tl.minimum(tl.cdiv(tl.maximum(past - right, 0), C.BLOCK_M), hi)
        full_hi = tl.maximum(tl.minimum(tl.maximum(col + 1 - left, 0), n) // C.BLOCK_M, full_lo)
        visits = (lo, full_lo, full_hi, hi, order)
    return visits


@triton.jit
def counted(order, count):
    """Visits that have been counted before."""
    return tl.load(count), tl.load(count + 1), tl.load(count + 2), tl.load(count + 3), order


@triton.jit
def widened(visits):
    """The same tiles, all of them as PARTIAL ones."""
    lo, _, _, hi, order = visits
    return lo, lo, lo, hi, order


@triton.jit
def count_of(visits, FULL: tl.constexpr):
    """How many tiles of one kind are visited."""
    lo, full_lo, full_hi, hi, _ = visits
    if FULL:
        count = full_hi - full_lo
    else:
        count = full_lo - lo + hi - full_hi
    return count


@triton.jit
def tile_of(t, visits, C: tl.constexpr, FULL: tl.constexpr):
    """The t-th visited tile of one kind: FULL ones are full_lo to full_hi, PARTIAL ones lie from lo up to them and from them
    up to hi. With a table these numbers count along `order`, a list of tiles."""
    lo, full_lo, full_hi, _, order = visits
    if FULL:
        tile = full_lo + t
    else:
        tile = tl.where(t < full_lo - lo, lo + t, full_hi + t - (full_lo - lo))
    if C.MASK == "TABLE":
        tile = tl.load(order + tile)
    return tile


@triton.jit
def lists_at(b, head, block, lists, C: tl.constexpr, ROWS: tl.constexpr):
    """(order, count) of one block of rows, or of columns: lists are "b h blocks width" and counts "b h blocks 4"."""
    order, count, list_b, list_h, width = lists
    at = b * list_b + head * list_h + block
    if C.MASK == "TABLE":
        order += at * width
    else:
        order = 0
    if C.MASK == "TABLE" or not (ROWS or C.BAND or C.MASK == "NONE"):
        count += at * 4
    else:
        count = 0
    return order, count
