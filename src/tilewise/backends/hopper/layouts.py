"""Who holds what: the layouts of tiles in shared memory and of their parts in registers. No other file knows any.

A warpgroup, four warps, multiplies 64 rows at a time. A thread holds two rows of a sum, and of each the two columns of eight
that are its own; four neighbouring lanes share a row."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS = gl.constexpr(64)
"""Rows of a warpgroup's tile."""


@gluon.constexpr_function
def in_memory(rows, columns, dtype):
    """A tile of `rows` × `columns` as the copy engine writes it and products read it, with the two axes of one that descriptors
    "b heads rows columns" add in front."""
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], dtype)


@gluon.constexpr_function
def of_sums(columns):
    """The accumulator of a product, ROWS × columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def of_operand(columns):
    """A left operand in registers, for sums of so many columns: made of an accumulator without moving anything."""
    return gl.DotOperandLayout(0, of_sums(columns), 2)


@gluon.constexpr_function
def of_rows(columns):
    """A number a row of such sums."""
    return gl.SliceLayout(1, of_sums(columns))


@gluon.constexpr_function
def of_columns(columns):
    """A number a column of such sums."""
    return gl.SliceLayout(0, of_sums(columns))


@gluon.jit
def beside(x, like):
    """A number a row, shaped to meet a tile of these rows in whatever layout; nothing moves between threads."""
    return gl.convert_layout(x, gl.SliceLayout(1, like.type.layout))[:, None]


@gluon.jit
def halves(x, COLUMNS: gl.constexpr):
    """The left and the right columns of a tile: registers get other names, nothing else."""
    return gl.split(gl.permute(gl.reshape(x, [ROWS, 2, COLUMNS // 2]), [0, 2, 1]))


@gluon.jit
def joined(left, right, COLUMNS: gl.constexpr):
    """What `halves` took apart."""
    return gl.reshape(gl.permute(gl.join(left, right), [0, 2, 1]), [ROWS, COLUMNS])


@gluon.jit
def folded(x, COLUMNS: gl.constexpr, WIDTH: gl.constexpr):
    """A tile as COLUMNS / WIDTH pieces of WIDTH columns side by side: a reduction along axis 1 stays within a thread, and
    leaves WIDTH columns."""
    return gl.reshape(x, [ROWS, COLUMNS // WIDTH, WIDTH])


@gluon.jit
def pieces(x, COLUMNS: gl.constexpr):
    """Sums, ROWS × COLUMNS, as rows of 32 such that four numbers of a thread lie side by side and eight lanes fill a row:
    registers get other names, stores meet no bank twice, and whoever reads them back undoes the order (`whole` in
    `backward_ends`)."""
    x = gl.reshape(x, [4, 2, 2, 2, 2, COLUMNS // 8, 4, 2])  # warp, half, three bits of the row in it, eighth, lane, column
    return gl.reshape(gl.permute(x, [0, 5, 2, 3, 4, 6, 1, 7]), [2 * COLUMNS, 32])
