"""Which instruction set a problem's kernels are made for: this computer's vectors, or its tiles where inputs are bfloat16."""

from __future__ import annotations

import ctypes
import platform
import sys
from dataclasses import replace
from functools import lru_cache

import llvmlite.binding as llvm

from ...problem import Problem
from .target import AMX, Target, host

FEATURES = ("amx-tile", "amx-bf16", "avx512bf16")
"""What a processor with tiles of bfloat16 has, in LLVM's words."""

OLDEST = (17, 0, 0)
"""The first LLVM whose instructions for bfloat16 take numbers that are called so."""

ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18
"""Linux, Documentation/arch/x86/xstate.rst: how a process asks for the memory that tiles take when threads change places."""


def choose(problem: Problem) -> Target | None:
    """The target of all kernels of a problem; None where this computer has none. What is made in float32 of bfloat16 inputs is
    to be more exact than weights in bfloat16 allow, so tiles are not for it."""
    return host() if problem.wide else best(problem.dtype)


def best(dtype: str) -> Target | None:
    """The target for inputs and outputs of this dtype."""
    return (tiled() if dtype == "bfloat16" else None) or host()


@lru_cache
def tiled() -> Target | None:
    """This computer as one that multiplies tiles; None if it does not, or if this process may not."""
    found, features = host(), llvm.get_host_cpu_features()
    if (
        llvm.llvm_version_info < OLDEST
        or found is None
        or found.lanes != AMX.lanes
        or not all(features.get(name) for name in FEATURES)
    ):
        return None
    return replace(found, amx=True) if permitted() else None


@lru_cache
def permitted() -> bool:
    """Whether this process may use tiles: asked once, and good for all its threads, those that are there too, and children."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return False
    try:
        return ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0
    except (OSError, AttributeError):
        return False
