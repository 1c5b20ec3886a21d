"""Kernels in Triton, for every GPU that it supports: any head size, mask and score, every gradient, no atomics. Triton itself
is imported only by what runs or plans."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...problem import Inputs, Partial, Problem
from ..made import on_device
from .refusals import installed, interpreting
from .refusals import why_not as why_not


def configure(problem: Problem):
    """The sizes of every pass; see `config`."""
    from .config import configure

    return configure(problem)


def forward(problem: Problem, x: Inputs[Tensor], config) -> Partial:
    """o and lse; see `forward_pass`."""
    from .forward_pass import forward

    with on_device(x.q):
        return forward(problem, x, config)


def backward(
    problem: Problem, x: Inputs[Tensor], saved: Partial, grads: Partial, config, needs: Sequence[str]
) -> Inputs[Tensor]:
    """The gradients named in `needs`; see `backward_pass`."""
    from .backward_pass import backward

    with on_device(x.q):
        return backward(problem, x, saved, grads, config, needs)


def warm(problem: Problem, x: Inputs[Tensor], config, needs: Sequence[str]) -> list[str]:
    """Every kernel that `forward` needs, and `backward` for the gradients named in `needs`; see `ready`."""
    from .ready import warm

    with on_device(x.q):
        return warm(problem, x, config, needs)


def absorb(into: Partial, part: Partial) -> bool:
    """into ← merge(into, part), in place; see `merging`. False where these tensors are none for it."""
    if not installed() or not (interpreting() or into.o.is_cuda) or into.o.stride(-1) != 1 or part.o.stride(-1) != 1:
        return False
    from .merging import absorb

    with on_device(into.o):
        absorb(into, part)
    return True
