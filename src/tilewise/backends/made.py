"""What a pass fills, in which dtype and on which device."""

from __future__ import annotations

import torch
from torch import Tensor

from ..problem import Inputs, Partial, Problem


def wide(q: Tensor) -> torch.dtype:
    """The dtype of sums: float32, or float64 for float64."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def made_of(problem: Problem, q: Tensor) -> torch.dtype:
    """The dtype of o and of the gradients of q, k and v."""
    return wide(q) if problem.wide else q.dtype


def unseen(problem: Problem, x: Inputs[Tensor]) -> Partial:
    """o and lse where there is no pair at all: some axis has no entry."""
    p = problem
    o, lse = x.q.new_zeros(p.b, p.n, p.h, p.e, dtype=made_of(p, x.q)), x.q.new_empty(p.b, p.h, p.n, dtype=wide(x.q))
    return Partial(o, lse.fill_(-torch.inf) if x.sink is None else lse.copy_(x.sink[:, None]))


class on_device:
    """Makes the device of a tensor the current one where it is not: Triton launches there. Cheaper than torch's own guard where
    there is nothing to do."""

    def __init__(self, x: Tensor) -> None:
        away = x.is_cuda and x.device.index != torch.cuda.current_device()
        self.guard = torch.cuda.device(x.device) if away else None

    def __enter__(self) -> None:
        if self.guard is not None:
            self.guard.__enter__()

    def __exit__(self, *error: object) -> None:
        if self.guard is not None:
            self.guard.__exit__(*error)
