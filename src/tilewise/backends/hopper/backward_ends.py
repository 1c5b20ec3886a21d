"""What comes before and after the main kernel of backward, in Triton: what ds needs of each row, and dq from its float32
sums."""

# Kernels are in Triton's language, not Python's:
# pyright: reportAttributeAccessIssue=false, reportInvalidTypeForm=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

kernel = triton.jit(
    do_not_specialize="o_b o_h o_n do_b do_h do_n e n h blocks padded heads d scale".split(),
    do_not_specialize_on_alignment="lse_ptr dlse_ptr".split(),
)
"""What makes a kernel of a function: no length is specialised on, so that a new one compiles nothing."""


@kernel
def delta_kernel(
    o_ptr, o_b: tl.int64, o_h: tl.int64, o_n: tl.int64, do_ptr, do_b: tl.int64, do_h: tl.int64, do_n: tl.int64,
    lse_ptr, dlse_ptr, stats_ptr, counts_ptr, n: tl.int32, h: tl.int32, blocks: tl.int32, padded: tl.int64, heads: tl.int32,
    e: tl.int32, ROWS: tl.constexpr, E: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """lse in base 2, and delta − dlse with delta = rowsum(do∘o), "2 b h padded". A row that saw nothing, or lies past the
    end, gets an lse of +inf: its weights are 0 whatever its logits. And counters of blocks of dq start at 0. Strides of o and
    do are given in steps of 16 bytes. Grid: b·h·padded / ROWS."""
    o_step, do_step = 128 // o_ptr.dtype.element_ty.primitive_bitwidth, 128 // do_ptr.dtype.element_ty.primitive_bitwidth
    pid = tl.program_id(0)
    many = (padded // ROWS).to(tl.int32)
    # heads side by side: their rows are neighbours in memory
    at, block = pid % h + pid // (h * many) * h, pid // h % many
    b, head = (at // h).to(tl.int64), (at % h).to(tl.int64)
    i, c = block * ROWS + tl.arange(0, ROWS), tl.arange(0, E)
    inside = (i < n)[:, None] if WHOLE else (i < n)[:, None] & (c < e)[None, :]
    o_at = (b * o_b + head * o_h + i[:, None] * o_n) * o_step + c[None, :]
    o = tl.load(o_ptr + o_at, mask=inside, other=0).to(tl.float32)
    do_at = (b * do_b + head * do_h + i[:, None] * do_n) * do_step + c[None, :]
    do = tl.load(do_ptr + do_at, mask=inside, other=0).to(tl.float32)
    total = tl.sum(o * do, 1)
    line = at.to(tl.int64) * n + i
    lse = tl.load(lse_ptr + line, mask=i < n, other=float("-inf"))
    if dlse_ptr is not None:
        total -= tl.load(dlse_ptr + line, mask=i < n, other=0.0)
    to = stats_ptr + at.to(tl.int64) * padded + i
    tl.store(to, tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634))
    tl.store(to + heads.to(tl.int64) * padded, total)
    if block < blocks:
        tl.store(counts_ptr + (at.to(tl.int64) * blocks + block) * 2 + tl.arange(0, 2), tl.zeros([2], tl.int32))


@kernel
def dq_kernel(
    sums_ptr, counts_ptr, dq_ptr, notes_ptr, scale: tl.float32, n: tl.int32, h: tl.int32, blocks: tl.int32, d: tl.int32,
    ROWS: tl.constexpr, M: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """dq "b n h d" = scale·sums; 0 where nobody has counted, and a note where ROWS rows hold what is not finite. The sums are
    those of blocks of M rows. Grid: b·h·⌈n / ROWS⌉."""
    pid, many = tl.program_id(0), tl.cdiv(n, ROWS)
    at, block = pid % h + pid // (h * many) * h, pid // h % many
    b, head = (at // h).to(tl.int64), (at % h).to(tl.int64)
    tile = at.to(tl.int64) * blocks + block * ROWS // M
    x = tl.load(sums_ptr + tile * (M * WIDTH) + block * ROWS % M * WIDTH + tl.arange(0, ROWS * WIDTH))
    x = whole(x, ROWS, WIDTH, PIECES)
    counted = tl.load(counts_ptr + tile * 2) > 0
    if notes_ptr is not None:
        tl.store(notes_ptr + at * many + block, tl.max((((x - x) != 0) & counted).to(tl.int8)))
    x = tl.where(counted, x * scale, 0.0)
    i, c = block * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    line, x = (b * n + i[:, None]) * h + head, x.to(dq_ptr.dtype.element_ty)
    if WHOLE:
        tl.store(dq_ptr + line * WIDTH + c[None, :], x, mask=(i < n)[:, None])
    else:
        tl.store(dq_ptr + line * d + c[None, :], x, mask=(i < n)[:, None] & (c < d)[None, :])


@triton.jit
def whole(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr):
    """Rows of dq from so many pieces, side by side, each in the order of `layouts.pieces`."""
    # piece, warp, eighth of its columns, row, lane, half of rows, column
    x = tl.reshape(x, [PIECES, ROWS // 16, WIDTH // 8 // PIECES, 8, 4, 2, 2])
    return tl.reshape(tl.permute(x, [1, 5, 3, 0, 2, 4, 6]), [ROWS, WIDTH])
