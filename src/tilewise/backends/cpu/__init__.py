"""Kernels for CPUs: machine code that LLVM makes of Python, for any head size, mask and score, in float32 arithmetic or, for
bfloat16 where a processor has them, in tiles, on the threads of torch. LLVM is imported only by what runs or plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from torch import Tensor

from ...problem import Inputs, Partial, Problem
from .refusals import why_not as why_not


def configure(problem: Problem):
    """The sizes of every pass, see `config`, and what all threads together keep in the one that needs more."""
    from . import backward_call, config, forward_call, threads

    sizes = config.configure(problem)
    most = max(forward_call.workspace_bytes(problem, sizes), backward_call.workspace_bytes(problem, sizes.target))
    return replace(sizes, workspace_bytes=threads.available() * most)


@cache
def _forward_call() -> Any:
    """The module of that name, imported when something runs."""
    from . import forward_call

    return forward_call


def forward(problem: Problem, x: Inputs[Tensor], config) -> Partial:
    """o and lse; see `forward_call`."""
    return _forward_call().forward(problem, x, config)


def backward(
    problem: Problem, x: Inputs[Tensor], saved: Partial, grads: Partial, config, needs: Sequence[str]
) -> Inputs[Tensor]:
    """The gradients named in `needs`; see `backward_call`."""
    from .backward_call import backward

    return backward(problem, x, saved, grads, config, needs)


def warm(problem: Problem, x: Inputs[Tensor], config, needs: Sequence[str]) -> list[str]:
    """Every kernel that `forward` needs, and `backward` with `needs`; see `kernels`."""
    from .kernels import warm

    del x
    return warm(problem, config.target, needs)
