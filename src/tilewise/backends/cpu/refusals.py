"""What these kernels do not run, and why."""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import numpy as np

from ...arrays import host, is_number
from ...positions import Dense, Positions
from ...problem import Problem

OLDEST = (0, 44)
"""The first llvmlite with LLVM's pass builder."""

LONGEST = 2**31 - 2**16
"""Rows that can be counted in 32 bits, those of a block beyond the last included."""


@lru_cache
def missing() -> str:
    """Why there is no LLVM for us; empty where there is."""
    if find_spec("llvmlite") is None:
        return "llvmlite is not installed"
    found = version("llvmlite")
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
        return f"llvmlite {found} is older than {'.'.join(map(str, OLDEST))}"
    return ""


def why_not(problem: Problem, named: bool) -> tuple[str, ...]:
    """The reasons, as sentences; empty where it runs."""
    p = problem
    if p.device != "cpu":
        return (f"it runs on the CPU, and these tensors are on {p.device}",)
    if missing():
        return (missing(),)
    reasons = []
    if p.dtype == "float64":
        reasons.append("it computes in float32, and float64 is asked for")
    for axis, size in (("n", p.n), ("s", p.s)):
        if size > LONGEST:
            reasons.append(f"axis {axis}: {size} is more than {LONGEST}")
    if (p.score.alibi is not None or p.dropout is not None) and not _near(p):
        reasons.append("slopes and dropout depend on positions, and these do not fit 32 bits")
    return tuple(reasons) or _machine(p)


def _machine(problem: Problem) -> tuple[str, ...]:
    """What this computer refuses, or a table that would be too large: asked only where all else is in order."""
    from .selfcheck import broken
    from .sight import LARGEST_TABLE, pairs

    reason = broken(problem.dtype)
    if reason:
        return (reason,)
    written = pairs(problem)
    if written > LARGEST_TABLE:
        return (f"the point test of {written} pairs would be written down, and {LARGEST_TABLE} is the most",)
    return ()


def _near(problem: Problem) -> bool:
    """Whether every position of a dense problem fits 32 bits, and so does every distance; those of packed ones do."""
    layout = problem.layout
    return not isinstance(layout, Dense) or all(_within(side) for side in (layout.q, layout.kv))


def _within(side: Positions) -> bool:
    if side.count == 0:
        return True
    if side.rows is not None:
        rows: Any = host(side.rows)
        return bool((np.abs(rows.astype(np.float64)) < 2**30).all())
    starts = [side.start] if is_number(side.start) else host(side.start).tolist()
    return all(abs(start) + side.step * side.count < 2**30 for start in starts)
