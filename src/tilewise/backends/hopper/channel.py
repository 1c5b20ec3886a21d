"""Tiles on their way from memory to the warps that multiply: the only file that knows barriers and their phases.

A ring is a pair (tiles, full), described by R, a `scratch.Ring`: STAGES × PARTS tiles in shared memory; one mbarrier a stage,
which the copy engine completes when the parts of a stage have come; and named barriers FIRST to FIRST + STAGES − 1, on which
READERS threads tell the warp that fills the ring that they are done with a stage. `at` counts what has gone through the ring,
from 0 on: it lies in stage at % STAGES, and every STAGES the mbarrier's phase flips.

    the warp that fills     claim(ring, at, R), then send(ring, descriptor, b, head, row, at, part, R) for each part
    those who read          arrived(ring, at, R), tile(ring, at, part, R) …, release(ring, at, R)

Who describes a kernel numbers its named barriers; see `scratch`."""

# Kernels are in Gluon's language, not Python's:
# pyright: reportAttributeAccessIssue=false, reportInvalidTypeForm=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .inline import meet, signal
from .layouts import in_memory
from .versions import barrier, load_tile

WARP, WARPGROUP = gl.constexpr(32), gl.constexpr(128)
"""Threads."""


@gluon.jit
def open_ring(DTYPE: gl.constexpr, R: gl.constexpr):
    """Shared memory for a ring, with nothing in it."""
    tiles = gl.allocate_shared_memory(DTYPE, R.SHAPE, in_memory(R.ROWS, R.COLUMNS, DTYPE))
    full = gl.allocate_shared_memory(gl.int64, [R.STAGES, 1], mbarrier.MBarrierLayout())
    STAGES: gl.constexpr = R.STAGES
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    return tiles, full


@gluon.jit
def claim(ring, at, R: gl.constexpr):
    """Wait until everybody is done with what the stage of `at` held before, and announce what is about to come."""
    if at >= R.STAGES:
        meet(R.FIRST + at % R.STAGES, R.READERS + WARP)
    mbarrier.expect(ring[1].index(at % R.STAGES), R.STAGE_BYTES)


@gluon.jit
def send(ring, descriptor, b, head, row, at, part, R: gl.constexpr):
    """Let the copy engine bring the tile of `descriptor` that starts at a row of a head."""
    stage = at % R.STAGES
    load_tile(descriptor, [b, head, row, 0], ring[1].index(stage), ring[0].index(stage * R.PARTS + part))


@gluon.jit
def send_to(ring, descriptor, place, at, to, R: gl.constexpr):
    """Let the copy engine bring what belongs to a stage to where it is kept, beside the ring's own tiles."""
    load_tile(descriptor, place, ring[1].index(at % R.STAGES), to)


@gluon.jit
def arrived(ring, at, R: gl.constexpr):
    """Wait until all parts of `at` are there."""
    mbarrier.wait(ring[1].index(at % R.STAGES), (at // R.STAGES) & 1)


@gluon.jit
def tile(ring, at, part, R: gl.constexpr):
    """One part of `at`, rows × columns, in shared memory."""
    return ring[0].index(at % R.STAGES * R.PARTS + part).reshape([R.ROWS, R.COLUMNS])


@gluon.jit
def release(ring, at, R: gl.constexpr):
    """Say that this thread is done with `at`."""
    signal(R.FIRST + at % R.STAGES, R.READERS + WARP)


# ---- a door: one mbarrier of those who bring what they read themselves, and wait for it


@gluon.jit
def open_door():
    """A door that nothing has come through."""
    door = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(door, count=1)
    return door


@gluon.jit
def fetch(door, descriptor, b, head, row, to, count, BYTES: gl.constexpr):
    """Bring the tile of `descriptor` that starts at a row of a head to where nobody reads any more; `count` have come
    before."""
    barrier()
    mbarrier.expect(door, BYTES)
    load_tile(descriptor, [b, head, row, 0], door, to)
    mbarrier.wait(door, count & 1)
    return count + 1


# ---- turns: warpgroups whose products take turns, so that one multiplies while another computes weights


@gluon.jit
def open_turns(MINE: gl.constexpr, FIRST: gl.constexpr, GROUPS: gl.constexpr):
    """Give warpgroup 0 the first turn; named barriers FIRST to FIRST + GROUPS − 1."""
    if MINE == GROUPS - 1:
        signal(FIRST, 2 * WARPGROUP)


@gluon.jit
def take_turn(MINE: gl.constexpr, FIRST: gl.constexpr):
    """Wait for this warpgroup's turn."""
    meet(FIRST + MINE, 2 * WARPGROUP)


@gluon.jit
def pass_turn(MINE: gl.constexpr, FIRST: gl.constexpr, GROUPS: gl.constexpr):
    """Let the next warpgroup have its turn."""
    signal(FIRST + (MINE + 1) % GROUPS, 2 * WARPGROUP)
