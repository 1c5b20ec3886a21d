"""What there is to do with rows of partial results, each in a single pass over memory: two become one, which every hop of a
ring and every split of the keys ends in; and before their gradients, delta."""

# Kernels are in Triton's language, not Python's:
# pyright: reportAttributeAccessIssue=false, reportInvalidTypeForm=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...problem import Partial
from ..reads import blocks
from .launch import launch
from .sizes import Launch

ELEMENTS = 4096
"""Of o that one program merges."""


def absorb(into: Partial, part: Partial) -> None:
    """into ← merge(into, part), in place.

        L = log(exp(L_into) + exp(L_part))        o = exp(L_into − L)·o_into + exp(L_part − L)·o_part

    Shapes      o "b n h e" · lse "b h n", of any strides but o's last, 1; sums in the dtype of lse
    Memory      o and lse are read from both and written once; what a partial with lse = −inf holds in o is not read
    Source      Dao 2023, FlashAttention-2, section 3.1"""
    b, n, h, e = into.o.shape
    width = triton.next_power_of_2(max(e, 1))
    lines = max(1, ELEMENTS // width)
    step = aligned(into.o, part.o)
    tensors = (into.o, into.lse, part.o, part.lse)
    strides = (*(x // step for t in (into.o, part.o) for x in t.stride()[:3]), *into.lse.stride(), *part.lse.stride())
    grid = b * blocks(n * h, lines)
    sizes = Launch(lines, width, warps=4, stages=1)
    launch(merge_kernel, grid, (*tensors, *strides, n, h), (e, width, lines, step), sizes, [x.dtype for x in tensors])


def total(o: Tensor, do: Tensor, dlse: Tensor) -> Tensor:
    """delta − dlse "b h n" of each row, delta = rowsum(do∘o), in the dtype of dlse.

    Shapes      o, do "b n h e", of any strides but the last, 1 · dlse "b h n" of any strides"""
    b, n, h, e = o.shape
    width, made = triton.next_power_of_2(max(e, 1)), torch.empty(b, h, n, dtype=dlse.dtype, device=o.device)
    lines = max(1, ELEMENTS // width)
    step = aligned(o, do)
    strides = (*(x // step for t in (o, do) for x in t.stride()[:3]), *dlse.stride())
    sizes = Launch(lines, width, warps=4, stages=1)
    tensors = (o, do, dlse, made)
    launch(
        total_kernel,
        b * blocks(n * h, lines),
        (*tensors, *strides, n, h),
        (e, width, lines, step),
        sizes,
        [x.dtype for x in tensors],
    )
    return made


def aligned(*tensors: Tensor) -> int:
    """Elements that every row of each tensor starts at a multiple of, as far as 16 bytes can be loaded at once."""
    steps = {16 // x.element_size() for x in tensors}
    whole = len(steps) == 1 and all(x.data_ptr() % 16 == 0 for x in tensors)
    step = steps.pop()
    return step if whole and all(stride % step == 0 for x in tensors for stride in x.stride()[:3]) else 1


kernel = triton.jit(
    do_not_specialize=(
        "o_b o_n o_h p_b p_n p_h lse_b lse_h lse_n plse_b plse_h plse_n do_b do_n do_h dlse_b dlse_h dlse_n n h"
    ).split()
)
"""What makes a kernel of a function: no number is specialised on, so that a new shape needs no new compilation."""


@triton.jit
def lines_of(n, h, LINES: tl.constexpr):
    """A program's batch entry, and rows and heads of its LINES lines of it, some of which may be past the end."""
    parts = tl.cdiv(n * h, LINES)
    line = (tl.program_id(0) % parts).to(tl.int64) * LINES + tl.arange(0, LINES)
    return (tl.program_id(0) // parts).to(tl.int64), line // h, line % h, line < n * h


@kernel
def merge_kernel(
    o_ptr, lse_ptr, p_ptr, plse_ptr, o_b, o_n, o_h, p_b, p_n, p_h, lse_b, lse_h, lse_n, plse_b, plse_h, plse_n,
    n, h, E: tl.constexpr, WIDTH: tl.constexpr, LINES: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """LINES rows of all heads of one batch entry, one after the other; strides of o and of the part in units of STEP."""
    b, row, head, inside = lines_of(n, h, LINES)
    column = tl.arange(0, WIDTH)
    lse_at = lse_ptr + b * lse_b + head * lse_h + row * lse_n
    mine = tl.load(lse_at, mask=inside, other=-float("inf"))
    other = tl.load(plse_ptr + b * plse_b + head * plse_h + row * plse_n, mask=inside, other=-float("inf"))
    top = tl.maximum(mine, other)
    pivot = tl.where(top == -float("inf"), 0.0, top)
    mine, other = tl.exp(mine - pivot), tl.exp(other - pivot)
    total = mine + other
    some = tl.where(total > 0, total, 1.0)
    o_at = o_ptr + ((b * o_b + row * o_n + head * o_h) * STEP)[:, None] + column
    p_at = p_ptr + ((b * p_b + row * p_n + head * p_h) * STEP)[:, None] + column
    held = inside[:, None] & (column < E)
    o = tl.load(o_at, mask=held & (mine > 0)[:, None], other=0.0).to(total.dtype)
    part = tl.load(p_at, mask=held & (other > 0)[:, None], other=0.0).to(total.dtype)
    o = o * (mine / some)[:, None] + part * (other / some)[:, None]
    tl.store(o_at, o.to(o_ptr.dtype.element_ty), mask=held)
    tl.store(lse_at, tl.where(total > 0, pivot + tl.log(some), -float("inf")), mask=inside)


@kernel
def total_kernel(
    o_ptr, do_ptr, dlse_ptr, out_ptr, o_b, o_n, o_h, do_b, do_n, do_h, dlse_b, dlse_h, dlse_n,
    n, h, E: tl.constexpr, WIDTH: tl.constexpr, LINES: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """LINES rows of all heads of one batch entry, as `merge_kernel`."""
    b, row, head, inside = lines_of(n, h, LINES)
    column = tl.arange(0, WIDTH)
    held = inside[:, None] & (column < E)
    o = tl.load(o_ptr + ((b * o_b + row * o_n + head * o_h) * STEP)[:, None] + column, mask=held, other=0.0)
    do = tl.load(do_ptr + ((b * do_b + row * do_n + head * do_h) * STEP)[:, None] + column, mask=held, other=0.0)
    dlse = tl.load(dlse_ptr + b * dlse_b + head * dlse_h + row * dlse_n, mask=inside, other=0.0)
    delta = tl.sum(o.to(dlse.dtype) * do.to(dlse.dtype), 1)
    tl.store(out_ptr + (b * h + head) * n + row, delta - dlse, mask=inside)
