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
    """into ← merge(into, part), in place; see `parts`. False where these tensors are none for it."""
    if not _reads(into.o, part.o):
        return False
    from .parts import absorb

    with on_device(into.o):
        absorb(into, part)
    return True


def total(o: Tensor, do: Tensor, dlse: Tensor) -> Tensor | None:
    """delta − dlse of each row; see `parts`. None where these tensors are none for it."""
    if not _reads(o, do):
        return None
    from .parts import total

    with on_device(o):
        return total(o, do, dlse)


def _reads(*rows: Tensor) -> bool:
    """Whether kernels can run here, and read such rows as they lie."""
    return installed() and all(x.stride(-1) == 1 and (interpreting() or x.is_cuda) for x in rows)
