"""What these kernels cannot run, and why."""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

import torch

from ...positions import Dense
from ...problem import Problem
from ..sight import LONGEST

WIDEST = 256
"""Columns of q, k or v that fit on chip."""

STEP = 8
"""Columns of a half type in 16 bytes, the copy engine's step."""

KNOWN = ((3, 6), (3, 9))
"""The first and the last Triton whose Gluon these kernels have been compiled with and looked at."""


def why_not(problem: Problem, named: bool) -> tuple[str, ...]:
    """The reasons, as sentences; empty where it runs."""
    reasons = (*_device(problem.device), *reasons_of(problem))
    return reasons or _checked(problem.device)


def reasons_of(problem: Problem) -> list[str]:
    """What speaks against a problem, wherever it is."""
    return [*_shape(problem), *_features(problem)]


@lru_cache
def _device(device: str) -> tuple[str, ...]:
    """What speaks against the GPU and the compiler."""
    if not device.startswith("cuda") or torch.version.hip:
        return (f"it runs on Hopper GPUs, and these tensors are on {device}",)
    found = torch.cuda.get_device_capability(device)
    if found != (9, 0):
        return (f"it runs on GPUs of compute capability 9.0, and {device} has {found[0]}.{found[1]}",)
    try:
        triton = version("triton")
    except PackageNotFoundError:
        return ("triton is not installed",)
    if not KNOWN[0] <= tuple(int(part) for part in triton.split(".")[:2]) <= KNOWN[1]:
        first, last = (f"{major}.{minor}" for major, minor in KNOWN)
        return (f"its kernels are tested with triton {first} to {last}, and this is {triton}",)
    return ()


def _checked(device: str) -> tuple[str, ...]:
    """What speaks against the kernels themselves, once nothing else does: this runs them."""
    from .selfcheck import broken

    found = broken(device)
    return (found,) if found else ()


def _shape(p: Problem) -> list[str]:
    """What speaks against sizes and types."""
    reasons = []
    if p.dtype not in ("bfloat16", "float16"):
        reasons.append(f"dtype: it multiplies bfloat16 and float16, not {p.dtype}")
    for axis, size in (("d", p.d), ("e", p.e)):
        if size > WIDEST:
            reasons.append(f"axis {axis}: {size} is more than {WIDEST}")
        if size % STEP:
            reasons.append(f"axis {axis}: {size} is not a multiple of {STEP}")
    reasons += [f"axis {axis}: {size} is more than {LONGEST}" for axis, size in (("n", p.n), ("s", p.s)) if size > LONGEST]
    return reasons


def _features(p: Problem) -> list[str]:
    """What speaks against what is asked."""
    reasons = []
    if p.mask.pointwise:
        reasons.append("mask: it reads intervals of keys, not tests of single pairs")
    if p.score.bias is not None:
        reasons.append("bias: it adds none")
    if p.dropout is not None:
        reasons.append("dropout: it drops nothing")
    if p.score.alibi is not None and not (isinstance(p.layout, Dense) and p.layout.starts is not None):
        reasons.append("alibi: it counts positions, and these rows do not follow each other")
    return reasons
