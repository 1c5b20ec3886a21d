"""What these kernels cannot run, and why."""

from __future__ import annotations

import os
from functools import lru_cache
from importlib.util import find_spec

from ...problem import Problem
from ..sight import LONGEST

WIDEST = 512
"""Columns of q, k or v that fit on chip."""

WIDEST_DOUBLE = 128
"""The same for float64 on a GPU: Triton 3.6 made wrong gradients of k and v of wider heads, on a H200."""


def interpreting() -> bool:
    """Whether Triton's interpreter stands in for a GPU."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


@lru_cache
def installed() -> bool:
    """Whether there is a Triton."""
    return find_spec("triton") is not None


def why_not(problem: Problem, named: bool) -> tuple[str, ...]:
    """The reasons, as sentences; empty where it runs. The interpreter runs only what names this backend."""
    p = problem
    reasons = []
    if interpreting():
        if not named:
            reasons.append("Triton's interpreter is for tests: it runs only where backend='triton' is asked for")
        if p.device != "cpu":
            reasons.append(f"Triton's interpreter is on (TRITON_INTERPRET=1), which runs on the CPU, not on {p.device}")
    elif not p.device.startswith("cuda"):
        reasons.append(f"it runs on GPUs, and these tensors are on {p.device}")
    if not reasons and not installed():
        reasons.append("triton is not installed")
    widest = WIDEST_DOUBLE if p.dtype == "float64" and not interpreting() else WIDEST
    for axis, size, most in (("d", p.d, widest), ("e", p.e, widest), ("n", p.n, LONGEST), ("s", p.s, LONGEST)):
        if size > most:
            reasons.append(f"axis {axis}: {size} is more than {most}")
    return tuple(reasons)
