"""The kernels of a problem: which there are, what they are compiled for, and that they are ready before they are needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...problem import Problem
from . import amx_backward, amx_forward, backward_kernel, decode_kernel, forward_kernel
from .machinecode import Library
from .store import library
from .target import Target
from .vector import BF16, F16, F32, Module

KINDS = {"float32": F32, "bfloat16": BF16, "float16": F16}
"""How the dtypes of inputs are called where they are loaded."""

WRITE: dict[str, Callable[[Target, Any, Any], Module]] = {
    "forward": lambda target, given, made: (amx_forward if target.amx else forward_kernel).write(target, given, made),
    "decode": decode_kernel.write,
    "backward": lambda target, given, made: (amx_backward if target.amx else backward_kernel).write(
        target, backward_kernel.Kinds(given, made)
    ),
}
"""What writes each kernel, from the kind of its inputs and that of what it makes. Everything else, head sizes, masks and scores
included, is for a kernel to look at when it runs."""


def kernel(name: str, problem: Problem, target: Target) -> Library:
    """The kernel of that name for a problem's dtypes."""
    given = KINDS[problem.dtype]
    made = F32 if problem.wide else given
    return library(full_name(name, problem), target, lambda: WRITE[name](target, given, made))


def full_name(name: str, problem: Problem) -> str:
    return f"{name}-{problem.dtype}" + ("-wide" if problem.wide and problem.dtype != "float32" else "")


def warm(problem: Problem, target: Target, needs: Sequence[str]) -> list[str]:
    """Load, and compile where there is nothing to load, every kernel that calls like this may need, with `needs` those of the
    backward pass too; their names."""
    names = [name for name in WRITE if needs or name != "backward"]
    for name in names:
        kernel(name, problem, target)
    return [full_name(name, problem) for name in names]
