"""A mask as kernels read it: an interval of keys for each query row, in closed form or as two arrays, and a table of single
pairs if there is a point test. All of it is computed on the device, and nothing waits for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..arrays import placed
from ..mask import Both, Causal, Full, Mask, Where, Window
from ..positions import Dense
from ..problem import Problem

LONGEST = 2**29
"""Rows that can be counted in 32 bits, sums of two and of a block included."""

FAR = LONGEST
"""Further than any row of a tensor can be: a limit that is none."""

AT_ONCE = 2**24
"""Pairs asked of a point test in one go."""


@dataclass(frozen=True)
class Sight:
    """Which keys a query row sees. `first` and `past` "b n" (b may be 1), or a band: row r sees [r + left, r + right)."""

    kind: str
    left: int = -FAR
    right: int = FAR
    first: Tensor | None = None
    past: Tensor | None = None
    table: Tensor | None = None
    """Booleans "b h n s", expanded, or None."""


def kind_of(problem: Problem) -> str:
    """The mask as kernels see it; packed sequences are intervals."""
    kind = problem.mask.kind
    return kind if kind != "NONE" or isinstance(problem.layout, Dense) else "INTERVAL"


def look(problem: Problem, like: Tensor) -> Sight:
    """What the mask of a problem hides, where `like` is."""
    p = problem
    if kind_of(p) == "NONE":
        return Sight("NONE")
    starts = p.layout.starts if isinstance(p.layout, Dense) else None
    if starts is not None and banded(p.mask):
        return Sight("INTERVAL", *band(p.mask, starts))
    whole_b, whole_n = slice(0, p.b), slice(0, p.n)
    first, past = (x.expand(-1, p.n).to(torch.int32).contiguous() for x in p.mask.bounds(p.layout, whole_b, whole_n, like))
    if not p.mask.pointwise:
        return Sight("INTERVAL", first=first, past=past)
    table = tabulate(p, like)
    if p.dtype == "float64":  # Triton 3.6 cannot compile a float64 product of a tile that narrower loads went into
        table = table.double()
    return Sight("TABLE", first=first, past=past, table=table.expand(p.b, p.h, p.n, p.s))


def banded(mask: Mask) -> bool:
    """Whether a row's interval is a fixed distance from its own position."""
    return all(banded(part) for part in mask.parts) if isinstance(mask, Both) else isinstance(mask, Full | Causal | Window)


def band(mask: Mask, starts: tuple[int, int]) -> tuple[int, int]:
    """The keys [r + left, r + right) that row r sees, from what a row at position 0 does."""
    zero = np.zeros((1, 1), np.int64)
    shift = starts[0] - starts[1]
    left, right = (int(x[0, 0]) + shift for x in mask.interval(zero, zero))
    return max(min(left, FAR), -FAR), max(min(right, FAR), -FAR)


def tabulate(problem: Problem, like: Tensor) -> Tensor:
    """The point test of every pair, bool "b h n s" up to broadcasting: the caller's own table where it has this shape."""
    p, own = problem, own_table(problem, like)
    if own is not None:
        return own
    whole_b, whole_h = slice(0, p.b), slice(0, p.h)
    keys = p.layout.keys(whole_b, slice(0, p.s), like).position[:, None, None, :]
    parts = []
    rows = max(1, AT_ONCE // max(1, p.b * p.h * p.s))
    for at in range(0, p.n, rows):
        q = p.layout.queries(whole_b, slice(at, min(at + rows, p.n)), like)
        i, b = q.position[:, None, :, None], q.sequence[:, None, :, None]
        part = p.mask.points(i, keys, b, whole_h)
        parts.append(part.expand(part.shape[0], part.shape[1], i.shape[2], p.s))
    return torch.cat(parts, 2) if parts else like.new_zeros(1, 1, p.n, p.s, dtype=torch.bool)


def own_table(problem: Problem, like: Tensor) -> Tensor | None:
    """The caller's own table with all four axes, where it says of each pair of rows what the mask does."""
    p = problem
    if not isinstance(p.mask, Where) or callable(p.mask.test) or not isinstance(p.layout, Dense):
        return None
    shape = (1,) * (4 - len(p.mask.test.shape)) + tuple(p.mask.test.shape)
    fits = shape[2] in (1, p.n) and shape[3] in (1, p.s) and (p.mask.start, p.mask.column) == p.layout.starts
    return placed(p.mask.test, like).reshape(shape) if fits else None
