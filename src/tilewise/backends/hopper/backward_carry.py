"""The two warps of backward that carry away what warpgroups leave in shared memory, one for each of them: dq of every step,
added to float32 sums in the order of keys, then dk and dv."""

# Kernels are in Gluon's language, not Python's:
# pyright: reportAttributeAccessIssue=false, reportInvalidTypeForm=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false, reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .backward_walk import HALF, beginning, following, rank, task_of
from .channel import WARP, WARPGROUP
from .inline import await_count, count_up, meet, settle
from .layouts import in_memory
from .versions import add_tile, recast, store_tile
from .visits import own as nth_task
from .visits import rounds


@gluon.jit
def carry(sums, out, counts, staged, mask, axes, tasks, blocks, MINE: gl.constexpr, C: gl.constexpr):
    """Of each block of keys: a warpgroup's part of dq of every step; then its 64 rows of dk and dv."""
    room, taken = staged
    one = nth_task(0, tasks, C)
    for turn in range(rounds(tasks, C)):
        coming = nth_task(turn + 1, tasks, C)
        whose, known, visits, total = task_of(one, mask, axes, C)
        b, key_head, block, _ = whose
        carry_dq(sums, counts, staged, whose, known, visits, total, blocks, MINE, C)
        if not C.WIDE:
            for kind in gl.static_range(2):
                meet(C.LEFT + MINE, WARPGROUP + WARP)
                store_tile(out[kind], [b, key_head, block * C.N + MINE * HALF, 0], room.index(MINE).slice(0, HALF, 2))
                tma.store_wait(0)
                mbarrier.arrive(taken.index(MINE), count=1)
        one = coming


@gluon.jit
def carry_dq(sums, counts, staged, whose, mask, visits, total, blocks, MINE: gl.constexpr, C: gl.constexpr):
    """Add each step's part of dq, in LEAVINGS pieces, to memory once all programs that come before have; the first of them
    stores. Nobody but those who come next waits for the way there: it is shorter than a step."""
    room, taken = staged
    b, _, block, h = whose
    LEAVINGS: gl.constexpr = C.LEAVINGS
    m, head = beginning(visits)
    for _ in range(total):
        count = counts + ((b * h + head) * blocks + m) * 2 + MINE
        turn = rank(m, block, mask, visits[4], C)
        await_count(count, turn)
        for piece in gl.static_range(LEAVINGS):
            place = [b * h + head, m, (MINE * LEAVINGS + piece) * C.PIECE, 0]
            meet(C.LEFT + MINE, WARPGROUP + WARP)
            if turn == 0:
                store_tile(sums, place, dq_room(room, MINE, C))
            else:
                add_tile(sums, place, dq_room(room, MINE, C))
            tma.store_wait(0)
            mbarrier.arrive(taken.index(MINE), count=1)
        settle()
        count_up(count)
        m, head = following(m, head, visits)


@gluon.jit
def dq_room(room, MINE: gl.constexpr, C: gl.constexpr):
    """Where a warpgroup's pieces of dq wait, in what room there is for it to leave through."""
    SHAPE: gl.constexpr = [1, 1, C.PIECE, 32]
    return recast(room.index(MINE), gl.float32, SHAPE, in_memory(C.PIECE, 32, gl.float32))
