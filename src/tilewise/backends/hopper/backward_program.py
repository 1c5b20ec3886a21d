"""The kernel of backward: what a program finds out about itself before its warps part."""

# Kernels are in Gluon's language, not Python's:
# pyright: reportAttributeAccessIssue=false, reportInvalidTypeForm=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from . import backward_kernel as narrow
from . import backward_wide as wide
from .backward_walk import place_of, visits_of
from .channel import open_ring
from .inline import declare_flag
from .layouts import in_memory

LOG2_E = gl.constexpr(1.4426950408889634)


kernel = gluon.jit(
    do_not_specialize=[
        *"row_b left right visits_b seen_b scale cap slope_b ahead".split(),
        *"n s h g d e heads keys span sections turns".split(),
    ],
    do_not_specialize_on_alignment="first_ptr past_ptr visits_ptr seen_ptr slope_ptr".split(),
)
"""What makes a kernel of a function: no number is specialised on, so that a new length needs no new compilation."""


@kernel
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, stats_desc, sums_desc, dk_desc, dv_desc, dk_ptr, dv_ptr, counts_ptr, notes_ptr,
    first_ptr, past_ptr, row_b, left, right, visits_ptr, visits_b, seen_ptr, seen_b,
    scale, cap, slope_ptr, slope_b, ahead, n, s, h, g, d, e, heads, keys, span, sections, turns, C: gl.constexpr,
):  # fmt: skip
    """Grid: b·g·⌈s / N⌉ programs, in the order of `place_of`."""
    if C.MASK != "NONE":
        declare_flag(0)
        declare_flag(1)
    at, block, up = place_of(gl.program_id(0), heads, keys, span, sections, turns)
    b, key_head = at // g, at % g
    group = h // g
    whose = (b, key_head, block, h)
    if C.MASK == "ROWS":
        mask = (first_ptr + b * row_b, past_ptr + b * row_b, 0, 0, visits_ptr + b * visits_b, seen_ptr + b * seen_b, keys)
    else:
        mask = (0, 0, left, right, 0, 0, keys)
    if C.ALIBI:
        score = (scale * LOG2_E, cap * LOG2_E, slope_ptr + b * slope_b, ahead)
    else:
        score = (scale * LOG2_E, cap * LOG2_E, 0, 0)
    lo, hi, full_lo, full_hi = visits_of(block, mask, n, s, C)
    visits = (lo, hi, full_lo, full_hi, up, key_head * group, group)
    total = (hi - lo) * group
    out = (dk_ptr, dv_ptr, notes_ptr, d, e, g)
    if total == 0:
        narrow.clear(out, whose, at, s, C)
    else:
        own, own_full = open_ring(q_desc.dtype, C.KEYS)
        exchange = gl.allocate_shared_memory(q_desc.dtype, [2, 1, 1, C.N, C.M], in_memory(C.N, C.M, q_desc.dtype))
        pieces = gl.allocate_shared_memory(gl.float32, [2, 1, 1, C.PIECE, 32], in_memory(C.PIECE, 32, gl.float32))
        taken = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for one in gl.static_range(2):
            mbarrier.init(taken.index(one), count=1)
        kept, staged, mine = (own, own_full), (pieces, taken), (at, block)
        given, leaves, many = (q_desc, k_desc, v_desc, do_desc), (dk_desc, dv_desc), gl.cdiv(n, C.M)
        if C.WIDTH == 256:
            q, q_full = open_ring(q_desc.dtype, C.Q)
            do, do_full = open_ring(q_desc.dtype, C.DO)
            beside = gl.allocate_shared_memory(gl.float32, [3, 1, 1, 1, C.M], in_memory(1, C.M, gl.float32))
            rings = ((q, q_full), (do, do_full), kept, beside)
            gl.warp_specialize(
                [
                    (wide.first, (rings, exchange, staged, out, mine, score, mask, visits, total, n, s, scale, C)),
                    (wide.second, (rings, exchange, staged, out, mine, score, mask, visits, total, n, s, scale, C)),
                    (wide.bring, (given, stats_desc, rings, whose, visits, total, C)),
                    (wide.carry, (sums_desc, leaves, counts_ptr, staged, rings[0], whose, mask, visits, total, many, 0, C)),
                    (wide.carry, (sums_desc, leaves, counts_ptr, staged, rings[0], whose, mask, visits, total, many, 1, C)),
                ],
                [4, 1, 1, 1],
                [240, 24, 24, 24],
            )
        else:
            rows, full = open_ring(q_desc.dtype, C.ROWS)
            beside = gl.allocate_shared_memory(gl.float32, [2 * C.STAGES, 1, 1, 1, C.M], in_memory(1, C.M, gl.float32))
            rings = ((rows, full), kept, beside)
            gl.warp_specialize(
                [
                    (narrow.multiply, (rings, exchange, staged, out, mine, score, mask, visits, total, n, s, scale, 0, C)),
                    (narrow.multiply, (rings, exchange, staged, out, mine, score, mask, visits, total, n, s, scale, 1, C)),
                    (narrow.bring, (given, stats_desc, rings, whose, visits, total, C)),
                    (narrow.carry, (sums_desc, leaves, counts_ptr, staged, rings[0], whose, mask, visits, total, many, 0, C)),
                    (narrow.carry, (sums_desc, leaves, counts_ptr, staged, rings[0], whose, mask, visits, total, many, 1, C)),
                ],
                [4, 1, 1, 1],
                [240, 24, 24, 24],
            )
