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
from .backward_carry import carry
from .backward_walk import task_of
from .channel import open_ring
from .inline import declare_flag
from .layouts import in_memory

LOG2_E = gl.constexpr(1.4426950408889634)


kernel = gluon.jit(
    do_not_specialize=[
        *"row_b left right visits_b seen_b scale cap slope_b ahead".split(),
        *"n s h g group d e heads keys span sections turns total".split(),
    ],
    do_not_specialize_on_alignment="first_ptr past_ptr visits_ptr seen_ptr slope_ptr roster_ptr".split(),
)
"""What makes a kernel of a function: no number is specialised on, so that a new length needs no new compilation."""


@kernel
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, stats_desc, sums_desc, dk_desc, dv_desc, dk_ptr, dv_ptr, counts_ptr, notes_ptr,
    first_ptr, past_ptr, row_b, left, right, visits_ptr, visits_b, seen_ptr, seen_b,
    scale, cap, slope_ptr, slope_b, ahead, n, s, h, g, group, d, e, heads, keys, span, sections, turns,
    total, roster_ptr, C: gl.constexpr,
):  # fmt: skip
    """Grid: `total` = b·g·⌈s / N⌉ programs, in the order of `place_of`; or any number, where they stay, and each takes those
    blocks of keys that a roster gives it."""
    if C.MASK != "NONE":
        declare_flag(0)
        declare_flag(1)
    mask = (first_ptr, past_ptr, row_b, left, right, visits_ptr, visits_b, seen_ptr, seen_b, keys)
    axes = (n, s, h, g, group, heads, span, sections, turns)
    given, leaves = (q_desc, k_desc, v_desc, do_desc), (stats_desc, sums_desc, dk_desc, dv_desc)
    out, score = (dk_ptr, dv_ptr, notes_ptr, d, e, g), (scale * LOG2_E, cap * LOG2_E, slope_ptr, slope_b, ahead)
    if C.PERSISTENT:
        multiply_narrow(given, leaves, counts_ptr, out, score, mask, axes, (total, roster_ptr), scale, C)
    else:
        task = task_of(gl.program_id(0), mask, axes, C)
        if task[3] == 0:
            narrow.clear(out, task[0], s, C)
        elif C.WIDTH == 256:
            multiply_wide(given, leaves, counts_ptr, out, score, task, axes, scale, C)
        else:
            multiply_narrow(given, leaves, counts_ptr, out, score, mask, axes, (total, roster_ptr), scale, C)


@gluon.jit
def open_rooms(DTYPE: gl.constexpr, C: gl.constexpr):
    """Where ds is exchanged, and what leaves through: a room for each warpgroup, and when it has been taken."""
    exchange = gl.allocate_shared_memory(DTYPE, [2, 1, 1, C.N, C.M], in_memory(C.N, C.M, DTYPE))
    room = gl.allocate_shared_memory(DTYPE, [2, 1, 1, C.ROOM, C.WIDTH], in_memory(C.ROOM, C.WIDTH, DTYPE))
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for one in gl.static_range(2):
        mbarrier.init(taken.index(one), count=1)
    return exchange, (room, taken)


@gluon.jit
def multiply_narrow(given, leaves, counts_ptr, out, score, mask, axes, tasks, scale, C: gl.constexpr):
    """Heads of up to 128 columns, two warpgroups with 64 keys each."""
    stats, sums, dk, dv = leaves
    rows, keys = open_ring(given[0].dtype, C.ROWS), open_ring(given[0].dtype, C.KEYS)
    beside = gl.allocate_shared_memory(gl.float32, [2 * C.STAGES, 1, 1, 1, C.M], in_memory(1, C.M, gl.float32))
    exchange, staged = open_rooms(given[0].dtype, C)
    rings, blocks = (rows, keys, beside), gl.cdiv(axes[0], C.M)
    gl.warp_specialize(
        [
            (narrow.multiply, (rings, exchange, staged, out, score, mask, axes, tasks, scale, 0, C)),
            (narrow.multiply, (rings, exchange, staged, out, score, mask, axes, tasks, scale, 1, C)),
            (narrow.bring, (given, stats, rings, mask, axes, tasks, C)),
            (carry, (sums, (dk, dv), counts_ptr, staged, mask, axes, tasks, blocks, 0, C)),
            (carry, (sums, (dk, dv), counts_ptr, staged, mask, axes, tasks, blocks, 1, C)),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )


@gluon.jit
def multiply_wide(given, leaves, counts_ptr, out, score, task, axes, scale, C: gl.constexpr):
    """Heads of 256 columns, whose 64 keys two warpgroups share."""
    stats, sums, dk, dv = leaves
    whose, mask, visits, total = task
    score, n, s, blocks = narrow.score_of(score, whose[0], C), axes[0], axes[1], gl.cdiv(axes[0], C.M)
    q, do, keys = open_ring(given[0].dtype, C.Q), open_ring(given[0].dtype, C.DO), open_ring(given[0].dtype, C.KEYS)
    beside = gl.allocate_shared_memory(gl.float32, [3, 1, 1, 1, C.M], in_memory(1, C.M, gl.float32))
    exchange, staged = open_rooms(given[0].dtype, C)
    rings, mine = (q, do, keys, beside), (whose[0] * axes[3] + whose[1], whose[2])
    gl.warp_specialize(
        [
            (wide.first, (rings, exchange, staged, out, mine, score, mask, visits, total, n, s, scale, C)),
            (wide.second, (rings, exchange, staged, out, mine, score, mask, visits, total, n, s, scale, C)),
            (wide.bring, (given, stats, rings, whose, visits, total, C)),
            (wide.carry, (sums, (dk, dv), counts_ptr, staged, q, whose, mask, visits, total, blocks, 0, C)),
            (wide.carry, (sums, (dk, dv), counts_ptr, staged, q, whose, mask, visits, total, blocks, 1, C)),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )
