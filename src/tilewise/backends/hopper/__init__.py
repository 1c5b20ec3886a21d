"""Kernels in Triton's Gluon for Hopper: warpgroups that multiply, a warp that brings tiles, and no waiting but for the tensor
cores. Half types and intervals of keys; what else is asked runs on other backends. Triton itself is imported only by what
runs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...problem import Inputs, Partial, Problem
from ..made import on_device
from .config import configure as configure
from .refusals import why_not as why_not


def forward(problem: Problem, x: Inputs[Tensor], config) -> Partial:
    """o and lse; see `forward_pass`."""
    from .forward_pass import forward

    with on_device(x.q):
        return forward(problem, x, config)


def forward_onto(problem: Problem, x: Inputs[Tensor], onto: Partial, config) -> Partial | None:
    """merge(onto, o and lse), where the kernel can; see `forward_pass`."""
    from .forward_pass import forward_onto

    with on_device(x.q):
        return forward_onto(problem, x, onto, config)


def backward(
    problem: Problem, x: Inputs[Tensor], saved: Partial, grads: Partial, config, needs: Sequence[str]
) -> Inputs[Tensor]:
    """The gradients named in `needs`; see `backward_pass`."""
    from .backward_pass import backward

    with on_device(x.q):
        return backward(problem, x, saved, grads, config, needs)
