"""The gradient of a bias that may be broadcast along any axis: a program owns a tile of it and adds up ds over every axis that
the bias has only once. No atomics; where few tiles would leave the device idle, the sum is cut into parts of fixed size."""

# Kernels are in Triton's language, not Python's:
# pyright: reportAttributeAccessIssue=false, reportInvalidTypeForm=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from ..reads import blocks
from .call import Call
from .launch import launch
from .steps import kernel, load, load_stats, options_at, product, recompute
from .walk import interval

PROGRAMS = 1024
"""Programs that keep a device busy."""


def bias_gradient(call: Call, do: Tensor, stats: Tensor) -> Tensor:
    """dbias in the shape and dtype of the bias."""
    p, x, sizes = call.problem, call.x, call.config.dbias
    assert x.bias is not None
    shape = (1,) * (4 - x.bias.dim()) + tuple(x.bias.shape)
    m, n = sizes.block_m, sizes.block_n
    tiled = [p.b, p.h, blocks(p.n, m), blocks(p.s, n)]
    full = [p.b, p.h, p.n, p.s]
    owns = [have == want for have, want in zip(shape, full, strict=True)]  # an axis of one that is whole is owned, too
    tiles, terms = 1, 1
    for own, count in zip(owns, tiled, strict=True):
        tiles, terms = (tiles * count, terms) if own else (tiles, terms * count)
    parts = max(1, min(terms, PROGRAMS // tiles))
    out = torch.empty(parts, *shape, dtype=stats.dtype, device=do.device)
    args = (
        *call.slabs(do, sizes),
        stats,
        stats.shape[3],
        out,
        *call.options(sizes),
        terms,
        blocks(terms, parts),
        p.b,
        p.n,
        p.s,
        p.h,
        p.group,
    )
    launch(dbias_kernel, tiles * parts, args, (*owns, call.variant(sizes, call.config.hides)), sizes, call.kinds)
    return out.sum(0).reshape(x.bias.shape).to(x.bias.dtype)


@kernel
def dbias_kernel(
    q0, q1, k0, k1, v0, v1, do0, do1, stats_ptr, padded: tl.int64, out_ptr,
    scale: tl.float64, softcap: tl.float64, bias_ptr, bias_b: tl.int64, bias_h: tl.int64, bias_n: tl.int64, bias_s: tl.int64,
    alibi_ptr, alibi_b: tl.int64, seed_ptr, threshold: tl.uint32, factor: tl.float64,
    i_ptr, j_ptr, r_ptr, i_b: tl.int64, j_b: tl.int64,
    first_ptr, past_ptr, row_b: tl.int64, left: tl.int32, right: tl.int32,
    table_ptr, table_b: tl.int64, table_h: tl.int64, table_n: tl.int64, table_s: tl.int64,
    terms: tl.int32, share: tl.int32, b: tl.int32, n: tl.int32, s: tl.int32, h: tl.int32, group: tl.int32,
    OWN_B: tl.constexpr, OWN_H: tl.constexpr, OWN_N: tl.constexpr, OWN_S: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Grid: parts × tiles of the bias. A part adds up `share` of the `terms` tiles of ds that belong to its tile."""
    given = (
        scale, softcap, bias_ptr, bias_b, bias_h, bias_n, bias_s, alibi_ptr, alibi_b, seed_ptr, threshold, factor,
        i_ptr, j_ptr, r_ptr, i_b, j_b, first_ptr, past_ptr, row_b, left, right, table_ptr, table_b, table_h, table_n, table_s,
    )  # fmt: skip
    across, down = tl.cdiv(s, C.BLOCK_N), tl.cdiv(n, C.BLOCK_M)
    bs, hs, downs, acrosses = b if OWN_B else 1, h if OWN_H else 1, down if OWN_N else 1, across if OWN_S else 1
    pid = tl.program_id(0)
    my_col, my_row = pid % acrosses, pid // acrosses % downs
    my_head, my_b = pid // acrosses // downs % hs, pid // acrosses // downs // hs % bs
    part = pid // acrosses // downs // hs // bs
    acc = tl.zeros([C.BLOCK_M, C.BLOCK_N], C.ACC)
    for term in range(part * share, tl.minimum(part * share + share, terms)):
        rest = term
        col, row, head, at = my_col, my_row, my_head, my_b
        if not OWN_S:
            col, rest = rest % across, rest // across
        if not OWN_N:
            row, rest = rest % down, rest // down
        if not OWN_H:
            head, rest = rest % h, rest // h
        if not OWN_B:
            at = rest
        options = options_at(at, head, given, C)
        i, j = row * C.BLOCK_M + tl.arange(0, C.BLOCK_M), (col * C.BLOCK_N + tl.arange(0, C.BLOCK_N))[None, :]
        first, past = interval(options[3], i, n, s, C)
        sees = (i < n) & (first < col * C.BLOCK_N + C.BLOCK_N) & (past > col * C.BLOCK_N)
        if tl.max(sees.to(tl.int32)) > 0:
            q = load((q0, q1), at, head, row * C.BLOCK_M, C.BLOCK_M, C.D0, C.D1)
            do = load((do0, do1), at, head, row * C.BLOCK_M, C.BLOCK_M, C.E0, C.E1)
            k = load((k0, k1), at, head // group, col * C.BLOCK_N, C.BLOCK_N, C.D0, C.D1)
            v = load((v0, v1), at, head // group, col * C.BLOCK_N, C.BLOCK_N, C.E0, C.E1)
            lse, total = load_stats(stats_ptr, at * h + head, i, padded, b * h)
            qk, dp = product(q, k, C.D1, C), product(do, v, C.E1, C)
            _, ds, _ = recompute(
                qk,
                dp,
                (lse[:, None], total[:, None]),
                (row * C.BLOCK_M, col * C.BLOCK_N),
                i[:, None],
                j,
                first[:, None],
                past[:, None],
                options,
                n,
                s,
                C,
                False,
            )
            acc += tl.where(i[:, None] < n, ds, 0.0)
    rows_in, cols_in = n if OWN_N else 1, s if OWN_S else 1
    i, j = my_row * C.BLOCK_M + tl.arange(0, C.BLOCK_M), my_col * C.BLOCK_N + tl.arange(0, C.BLOCK_N)
    plane = out_ptr + (((part * bs + my_b) * hs + my_head).to(tl.int64) * rows_in) * cols_in
    if OWN_N and OWN_S:
        ptr = plane + i[:, None].to(tl.int64) * s + j[None, :]
        tl.store(ptr, acc, mask=(i < n)[:, None] & (j < s)[None, :])
    elif OWN_N:
        tl.store(plane + i, tl.sum(acc, 1), mask=i < n)
    elif OWN_S:
        tl.store(plane + j, tl.sum(acc, 0), mask=j < s)
    else:
        tl.store(plane, tl.sum(acc))
