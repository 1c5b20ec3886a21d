"""Masks in the words of others: as a function of row and column numbers, as a boolean tensor, as a band."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...mask import Both, Causal, Chunked, Documents, Full, Mask, Prefix, Window
from ...positions import Dense
from ...problem import Problem
from ...ragged import Packed

PointTest = Callable[[Tensor, Tensor], Tensor]


class Band(NamedTuple):
    """Keys that a query sees before and after itself, None without a limit."""

    left: int | None
    right: int | None

    @property
    def causal(self) -> bool:
        return self.right == 0


def band(problem: Problem) -> Band | None:
    """The mask as a band that ends at the last key (bottom-right); None where it is something else."""
    parts = problem.mask.parts if isinstance(problem.mask, Both) else (problem.mask,)
    if isinstance(problem.layout, Dense) and problem.layout.starts != (problem.s - problem.n, 0):
        return None
    limits: list[tuple[int | None, int | None]] = []
    for part in parts:
        if not isinstance(part, Full | Causal | Window):
            return None
        limits.append((part.left, part.right) if isinstance(part, Window) else (None, 0 if isinstance(part, Causal) else None))
    left, right = (min((x for x in side if x is not None), default=None) for side in zip(*limits, strict=True))
    return Band(left, right)


def point_test(problem: Problem) -> PointTest | None:
    """The mask as a function of row and column numbers in torch, as a user of FlexAttention would write it; None where there
    is none."""
    p, layout = problem, problem.layout
    keep = _positions_test(p.mask, p.device)
    if keep is None:
        return None
    if isinstance(layout, Packed):
        q, kv = layout.queries(slice(0, 1), slice(0, p.n)), layout.keys(slice(0, 1), slice(0, p.s))
        mine, i, theirs, j = (torch.as_tensor(x[0]).to(p.device) for x in (*q, *kv))
        return lambda row, column: (mine[row] == theirs[column]) & keep(i[row], j[column])
    if not isinstance(layout, Dense) or layout.starts is None:
        return None
    start, first = layout.starts
    return keep if (start, first) == (0, 0) else lambda row, column: keep(row + start, column + first)


def _positions_test(mask: Mask, device: str) -> PointTest | None:
    if isinstance(mask, Both):
        tests = [_positions_test(part, device) for part in mask.parts]
        return None if None in tests else lambda i, j: _all([test(i, j) for test in tests if test is not None])
    if isinstance(mask, Documents) and len(mask.ids.shape) == 1:
        ids = torch.as_tensor(mask.ids).to(device)
        return lambda i, j: ids[i] == ids[j]
    if isinstance(mask, Full | Causal | Window | Chunked) or (isinstance(mask, Prefix) and isinstance(mask.length, int)):
        return mask.keep
    return None


def visible(problem: Problem) -> Tensor | None:
    """The visible pairs as a boolean tensor that broadcasts to "b h n s", on the device; None where nothing is hidden."""
    p, test = problem, point_test(problem)
    if isinstance(p.mask, Full) and isinstance(p.layout, Dense):
        return None
    if test is None:
        keep = torch.as_tensor(p.keep()).to(p.device)
    else:
        keep = test(torch.arange(p.n, device=p.device)[:, None], torch.arange(p.s, device=p.device))
    return None if bool(keep.all()) else keep


def _all(tests: list[Tensor]) -> Tensor:
    keep = tests[0]
    for test in tests[1:]:
        keep = keep & test
    return keep
