"""A mask as kernels read it: an interval of keys for each query row, in closed form or as two arrays; a table of single pairs
if there is a point test; and which tiles a block visits, where a kernel cannot tell by itself. All of it is computed on the
device, and nothing waits for it."""

# Kernels are in Triton's language, not Python's:
# pyright: reportAttributeAccessIssue=false, reportInvalidTypeForm=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from ...mask import Tile
from ...problem import Problem
from ...tiles import TileShape
from ..reads import blocks
from ..sight import Sight
from .launch import launch
from .sizes import Launch
from .steps import kernel

SURVEY = Launch(0, 0, warps=4, stages=2)
"""What surveys run on; the tiles that they look at are those of another kernel."""


@dataclass(frozen=True)
class Lists:
    """The visits of each block: `count` "b h blocks 4" = (lo, full_lo, full_hi, hi), along `order` "b h blocks width"."""

    order: Tensor | None = None
    count: Tensor | None = None


def lists(problem: Problem, sight: Sight, shape: TileShape) -> tuple[Lists, Lists]:
    """The visits of blocks of query rows and of blocks of keys, as far as kernels do not count them themselves."""
    if sight.kind == "TABLE":
        kinds = survey(problem, sight, shape)
        return _listed(kinds), _listed(kinds.transpose(-1, -2).contiguous())
    return Lists(), Lists() if sight.first is None else Lists(count=survey_cols(problem, sight, shape))


def _listed(kinds: Tensor) -> Lists:
    """FULL tiles first, then PARTIAL ones, each in order."""
    order = torch.sort(kinds, dim=-1, descending=True, stable=True).indices.to(torch.int32)
    full, some = (kinds == Tile.FULL).sum(-1), (kinds != Tile.EMPTY).sum(-1)
    none = torch.zeros_like(full)
    return Lists(order, torch.stack([none, none, full, some], -1).to(torch.int32))


def survey(problem: Problem, sight: Sight, shape: TileShape) -> Tensor:
    """The kind of every tile, int32 "b h row-blocks key-blocks" with b = 1, h = 1 where the table does not differ by them."""
    assert sight.table is not None and sight.first is not None and sight.past is not None
    p, table = problem, sight.table
    rows, cols = blocks(p.n, shape.block_m), blocks(p.s, shape.block_n)
    b = 1 if len(sight.first) == 1 and table.stride(0) == 0 else p.b
    h = 1 if table.stride(1) == 0 else p.h
    kinds = table.new_empty(b, h, rows, cols, dtype=torch.int32)
    row_b = 0 if len(sight.first) == 1 else p.n
    args = (sight.first, sight.past, row_b, table, *table.stride(), kinds, p.n, p.s, h)
    launch(survey_kernel, kinds.numel(), args, shape, SURVEY, (table.dtype,))
    return kinds


def survey_cols(problem: Problem, sight: Sight, shape: TileShape) -> Tensor:
    """For each block of keys the row blocks (lo, full_lo, full_hi, hi) that visit it: int32 "b 1 key-blocks 4", b = 1 where
    batch entries agree."""
    assert sight.first is not None and sight.past is not None
    b, cols = len(sight.first), blocks(problem.s, shape.block_n)
    count = sight.first.new_empty(b, 1, cols, 4)
    launch(survey_cols_kernel, b * cols, (sight.first, sight.past, count, problem.n, problem.s), shape, SURVEY)
    return count


@kernel
def survey_kernel(
    first_ptr, past_ptr, row_b: tl.int64, table_ptr, table_b: tl.int64, table_h: tl.int64, table_n: tl.int64, table_s: tl.int64,
    kind_ptr, n: tl.int32, s: tl.int32, h: tl.int32, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program a tile."""
    rows, cols = tl.cdiv(n, BLOCK_M), tl.cdiv(s, BLOCK_N)
    pid = tl.program_id(0)
    col, row, at = pid % cols, pid // cols % rows, pid // cols // rows
    b, head = (at // h).to(tl.int64), at % h
    i, j = row * BLOCK_M + tl.arange(0, BLOCK_M), (col * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    first = tl.load(first_ptr + b * row_b + i, mask=i < n, other=0)[:, None]
    past = tl.load(past_ptr + b * row_b + i, mask=i < n, other=0)[:, None]
    i = i[:, None]
    inside = (i < n) & (j < s)
    ptr = table_ptr + b * table_b + head * table_h + i * table_n + j * table_s
    seen = (first <= j) & (j < past) & (tl.load(ptr, mask=inside, other=0) != 0) & inside
    some = tl.max(seen.to(tl.int32))
    every = tl.min(seen.to(tl.int32))
    tl.store(kind_ptr + pid, some + some * every)


@kernel
def survey_cols_kernel(
    first_ptr, past_ptr, count_ptr, n: tl.int32, s: tl.int32, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """One program a block of keys, which looks at all rows. FULL ones count as such if they follow each other."""
    cols = tl.cdiv(s, BLOCK_N)
    b, col = (tl.program_id(0) // cols).to(tl.int64), tl.program_id(0) % cols * BLOCK_N
    end = tl.minimum(col + BLOCK_N, s)
    far = tl.cdiv(n, BLOCK_M)
    lo, hi, full_lo, full_hi, full = far, 0, far, 0, 0
    for block in range(far):
        i = block * BLOCK_M + tl.arange(0, BLOCK_M)
        first = tl.load(first_ptr + b * n + i, mask=i < n, other=0)
        past = tl.load(past_ptr + b * n + i, mask=i < n, other=s)
        sees = (i < n) & (tl.maximum(first, col) < tl.minimum(past, end))
        some = tl.max(sees.to(tl.int32))
        every = tl.min(((i < n) & (first <= col) & (past >= end)).to(tl.int32))
        lo, hi = tl.where(some > 0, tl.minimum(lo, block), lo), tl.where(some > 0, block + 1, hi)
        full_lo = tl.where(every > 0, tl.minimum(full_lo, block), full_lo)
        full_hi, full = tl.where(every > 0, block + 1, full_hi), full + every
    lo = tl.minimum(lo, hi)
    run = (full > 0) & (full_hi - full_lo == full)
    at = count_ptr + tl.program_id(0) * 4
    tl.store(at, lo)
    tl.store(at + 1, tl.where(run, full_lo, hi))
    tl.store(at + 2, tl.where(run, full_hi, hi))
    tl.store(at + 3, hi)
