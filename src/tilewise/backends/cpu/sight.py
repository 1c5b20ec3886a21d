"""A mask as kernels read it: an interval of keys for each query row, and a table of single pairs if there is a point test; and
where rows sit, for what depends on positions. Found out once a plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...problem import Problem
from .. import sight

LARGEST_TABLE = 2**28
"""Pairs of a point test that are written down, a byte each; more is for others."""

ON_HOST = torch.zeros(0, device="cpu")
"""What an answer in torch on the host is `like`."""


@dataclass(frozen=True)
class Sight:
    """Which keys a query row sees. first, past: int32 "b n", b = 1 where batch entries agree: row i sees keys [first, past) but
    for those that `table`, bool "b h n s", hides. Positions of query rows, `i`, and of keys, `j`, and the `sequence` of a query
    row: int32 "b n" and "b s", None where nothing depends on them."""

    first: Tensor
    past: Tensor
    table: Tensor | None = None
    i: Tensor | None = None
    j: Tensor | None = None
    sequence: Tensor | None = None

    @property
    def held(self) -> tuple[Tensor, ...]:
        """What a kernel is given addresses of."""
        every = (self.first, self.past, self.table, self.i, self.j, self.sequence)
        return tuple(t for t in every if t is not None)


def look(problem: Problem) -> Sight:
    """What the mask of a problem hides, and where its rows sit."""
    p = problem
    whole_b, whole_n = slice(0, p.b), slice(0, p.n)
    first, past = (np.broadcast_to(x.clip(0, p.s), (len(x), p.n)) for x in p.mask.bounds(p.layout, whole_b, whole_n))
    if len(first) > 1 and (first == first[:1]).all() and (past == past[:1]).all():
        first, past = first[:1], past[:1]
    table = tabulate(p).expand(p.b, p.h, p.n, p.s) if p.mask.pointwise else None
    if p.score.alibi is None and p.dropout is None:
        return Sight(_int32(first), _int32(past), table)
    q, k = p.layout.queries(whole_b, whole_n), p.layout.keys(whole_b, slice(0, p.s))
    sides = (q.position, p.n), (k.position, p.s), (q.sequence, p.n)
    return Sight(_int32(first), _int32(past), table, *(_int32(np.broadcast_to(x, (p.b, size))) for x, size in sides))


def _int32(x: np.ndarray) -> Tensor:
    """The lowest 32 bits, which are all that a kernel takes of a position."""
    return torch.from_numpy(np.ascontiguousarray(x.astype(np.int64).astype(np.uint32).view(np.int32)))


def pairs(problem: Problem) -> int:
    """Pairs that `tabulate` writes down: none where the caller's own table serves."""
    p = problem
    if not p.mask.pointwise or 0 in (p.b, p.h, p.n, p.s) or sight.own_table(p, ON_HOST) is not None:
        return 0
    whole, one = slice(0, p.b), slice(0, 1)
    q, k = p.layout.queries(whole, one, ON_HOST), p.layout.keys(whole, one, ON_HOST)
    i, b, j = q.position[:, None, :, None], q.sequence[:, None, :, None], k.position[:, None, None, :]
    shape = p.mask.points(i, j, b, slice(0, p.h)).shape
    return shape[0] * shape[1] * p.n * p.s


def tabulate(problem: Problem) -> Tensor:
    """The point test of every pair, bool "b h n s" up to broadcasting along b and h, keys next to each other."""
    p = problem
    table = sight.tabulate(p, ON_HOST).expand(-1, -1, p.n, p.s)
    return table if table.stride(-1) == 1 or p.s < 2 else table.contiguous()
