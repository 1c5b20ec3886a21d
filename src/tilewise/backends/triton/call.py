"""One call's tensors and options as the arguments that every kernel takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ...positions import Dense
from ...problem import Inputs, Problem
from ..reads import blocks, legal, readable
from ..remember import remember
from ..sight import FAR, Sight, look
from .config import Config
from .launch import rows, tiles
from .refusals import interpreting
from .sizes import Launch
from .variant import Variant, slabs, variant
from .visits import Lists, lists

LOG2_E = 1.4426950408889634

LEAST = 2.0**-100
"""The smallest scale that is multiplied after the fact: one that float32 took for 0 would make NaN of -inf."""

WORD = 2**32

PROGRAMS = 264
"""Programs that look through the notes."""


@dataclass(frozen=True)
class Call:
    """A problem on its tensors, q, k and v in a form that descriptors can read."""

    problem: Problem
    x: Inputs[Tensor]
    config: Config
    sight: Sight

    @classmethod
    def of(cls, problem: Problem, x: Inputs[Tensor], config: Config) -> Call:
        q, k, v = readable(x.q), readable(x.k), readable(x.v)
        sight = remember(config.known, "sight", x.q, lambda: look(problem, x.q))
        return cls(problem, Inputs(q, k, v, x.bias, x.alibi, x.sink), config, sight)

    def passes(self, sizes: Launch, heads: int, length: int, own: str, again: bool) -> list[tuple[Launch, int]]:
        """Sizes and grid of a kernel whose programs own blocks of `length` rows of each head ("M": query rows, "N": keys).
        If `again`, it runs a second time, CAREFUL, for those blocks into which what hidden pairs hold has leaked."""
        block = sizes.block_m if own == "M" else sizes.block_n
        main = sizes, heads * blocks(length, block)
        return [main, self.careful(heads * blocks(length, block), block)] if again else [main]

    def careful(self, count: int, block: int) -> tuple[Launch, int]:
        """Sizes and grid of a CAREFUL kernel that looks through the notes of `count` blocks of so many rows or keys."""
        return replace(self.config.careful, noted=block), min(count, PROGRAMS)

    def slabs(self, do: Tensor, sizes: Launch) -> tuple[Any, ...]:
        """Descriptors of q, k, v and do."""
        m, n = sizes.block_m, sizes.block_n
        return (*rows(self.x.q, m), *rows(self.x.k, n), *rows(self.x.v, n), *rows(do, m))

    @cached_property
    def kinds(self) -> tuple[Any, ...]:
        """What compilations depend on beside variants: dtypes."""
        x = self.x
        return x.q.dtype, self.problem.wide, *[None if t is None else t.dtype for t in (x.bias, x.alibi, x.sink)]

    def variant(self, sizes: Launch, hides: bool) -> Variant:
        """What a kernel with these sizes is compiled for; `hides` as in `Variant`."""
        p, x, sight = self.problem, self.x, self.sight
        added = x.bias is not None or x.alibi is not None or p.score.softcap is not None
        double = p.dtype == "float64"
        return variant(
            *slabs(p.d), *slabs(p.e), p.d, p.e, sight.kind, sight.kind == "INTERVAL" and sight.first is None,
            bias_kind(p, x.bias), x.alibi is not None, p.dropout is not None, self.lines is not None,
            not (added or double) and p.score.scale >= LEAST,
            p.score.softcap is not None, hides, sizes.noted > 0, sizes.apart, sizes.noted,
            1.0 if double else LOG2_E, tl.float64 if double else tl.float32, precision(p.dtype),
            p.dtype == "bfloat16" and interpreting(), sizes.block_m, sizes.block_n, sizes.stages,
        )  # fmt: skip

    def options(self, sizes: Launch) -> tuple[Any, ...]:
        """scale … table_s in the kernels' parameter lists; None for pointers that there are not."""
        p, x, sight = self.problem, self.x, self.sight
        cap = 0.0 if p.score.softcap is None else float(p.score.softcap)
        alibi = x.alibi if x.alibi is None or x.alibi.stride(-1) == 1 else x.alibi.contiguous()
        alibi_b = 0 if alibi is None or alibi.dim() == 1 else alibi.stride(0)
        return (
            float(p.score.scale), cap, *self._bias(sizes), alibi, alibi_b, *self._dropout(),
            *self._positions(), sight.first, sight.past, p.n if sight.first is not None and len(sight.first) > 1 else 0,
            sight.left, sight.right, sight.table, *(sight.table.stride() if sight.table is not None else (0,) * 4),
        )  # fmt: skip

    def _bias(self, sizes: Launch) -> tuple[Any, ...]:
        """A descriptor of tiles and how far to go in it from one batch entry or head to the next; or a pointer and strides."""
        p, bias = self.problem, self.x.bias
        if bias is None:
            return None, 0, 0, 0, 0
        if bias_kind(p, bias) == "POINTS":
            return bias, *bias.expand(p.b, p.h, p.n, p.s).stride()
        four = _four_axes(bias)
        b, h = (int(size > 1) for size in four.shape[:2])
        return tiles(bias, (tuple(four.shape), four.stride()[:3]), (sizes.block_m, sizes.block_n)), b, h, 0, 0

    def _dropout(self) -> tuple[Tensor | None, int, float]:
        """The seed and the first head where kernels can read them, the threshold, and what kept weights grow by."""
        drop = self.problem.dropout
        if drop is None:
            return None, 0, 1.0
        seed = torch.full((2,), drop.head, dtype=torch.int64, device=self.x.q.device)
        if isinstance(drop.seed, Tensor):
            seed[0].copy_(drop.seed.reshape(()))
        else:
            seed[0].fill_((drop.seed + WORD**2 // 2) % WORD**2 - WORD**2 // 2)
        return seed, min(drop.threshold, WORD - 1), drop.scale

    @cached_property
    def lines(self) -> tuple[int, int] | None:
        """The positions of the first query and the first key where the others follow them and fit 32 bits; with dropout, where
        keys start with a whole quad, too."""
        p = self.problem
        starts = p.layout.starts if isinstance(p.layout, Dense) else None
        if starts is None or (self.x.alibi is None and p.dropout is None):
            return None
        near = max(abs(starts[0]) + p.n, abs(starts[1]) + p.s) < FAR
        return starts if near and (p.dropout is None or starts[1] % 4 == 0) else None

    def _positions(self) -> tuple[Any, ...]:
        """Positions of query rows and of key rows, sequences, and the strides along b; or, where `lines`, nothing and the first
        positions. Only slopes and dropout need them."""
        p = self.problem
        if self.lines is not None:
            return None, None, None, *self.lines
        if self.x.alibi is None and p.dropout is None:
            return None, None, None, 0, 0
        whole = slice(0, p.b)
        q, k = p.layout.queries(whole, slice(0, p.n), self.x.q), p.layout.keys(whole, slice(0, p.s), self.x.q)
        i, sequence = (t.expand(p.b, p.n).contiguous() for t in (q.position, q.sequence))
        j = k.position.expand(p.b, p.s).contiguous()
        return i, j, sequence, p.n, p.s

    def lists(self, sizes: Launch) -> tuple[Lists, Lists]:
        """The visits of blocks of query rows and of blocks of keys."""
        make = partial(lists, self.problem, self.sight, sizes.shape)
        return remember(self.config.known, sizes.shape, self.x.q, make)

    def kept(self, lists: Lists) -> tuple[Tensor | None, ...]:
        """The tensors of a launch that are the plan's own."""
        return self.sight.first, self.sight.past, self.sight.table, lists.order, lists.count

    def tail(self, lists: Lists) -> tuple[Any, ...]:
        """order_ptr … group: the visits of each block, and the axes."""
        p, count, order = self.problem, lists.count, lists.order
        b, h = (0, 0) if count is None else (count.stride(0) // 4 * (len(count) > 1), count.shape[2] * (count.shape[1] > 1))
        return order, count, b, h, 0 if order is None else order.shape[3], p.n, p.s, p.h, p.group


def bias_kind(problem: Problem, bias: Tensor | None) -> str | None:
    """How kernels read a bias; see `Variant.BIAS`."""
    if bias is None:
        return None
    n, s = problem.n, problem.s
    whole = bias.shape[-2:] == (n, s) and min(n, s) > 1
    return "TILES" if whole and legal(_four_axes(bias)) else "POINTS"


def _four_axes(bias: Tensor) -> Tensor:
    """A bias with all its axes, "b h n s", of which those that it is broadcast along have one entry."""
    return bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape))


def precision(dtype: str) -> str:
    """How float32 operands are multiplied: each as three products of tf32 numbers on the tensor cores, which keeps float32's
    accuracy; in one of them where torch.backends.cuda.matmul.fp32_precision (or `torch.set_float32_matmul_precision`) says
    that fewer bits will do; and without tensor cores where it says "ieee", or where there is nothing else."""
    if dtype != "float32" or torch.version.hip:
        return "ieee"
    return {"none": "tf32x3", "ieee": "ieee"}.get(str(torch.backends.cuda.matmul.fp32_precision), "tf32")
