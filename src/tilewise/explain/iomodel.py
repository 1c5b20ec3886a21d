"""Theorem 2 by experiment: FlashAttention-1's order runs in the reference at several sizes, its accesses are counted, and a
line through the counts on logarithmic axes gives the exponents of N, d and M."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..cost import Accounting, Meter
from ..cost.blocks import paper_blocks
from ..cost.paper import accesses, problem_of
from ..problem import Inputs
from ..reference import flash1

BASE = {"N": 4096, "d": 64, "M": 65536}
"""Where one of them varies the others stay here: so that blocks divide rows, and the exponents are not those of ragged ends."""

VARIED = {"N": (1024, 2048, 4096), "d": (32, 64, 128), "M": (32768, 65536, 131072)}

THEORY = {"N": 2, "d": 2, "M": -1}
"""Exponents of Θ(N²d²/M)."""


class Point(NamedTuple):
    """One run: its sizes, and the numbers that went between memory and chip."""

    n: int
    d: int
    elements: int
    accesses: float


def counted(n: int, d: int, elements: int) -> Point:
    """Run one head of n rows with the paper's tile for M numbers on chip, and count."""
    problem, rng = problem_of(n, d), np.random.default_rng(0)
    x = Inputs(*(rng.normal(size=(1, n, 1, d)) for _ in range(3)))
    meter = Meter.of(problem)
    flash1.forward(problem, x, paper_blocks(elements, d), Accounting(), meter)
    return Point(n, d, elements, accesses(meter.cost, problem))


def sweep(tell: Callable[[str], None] = lambda text: None) -> dict[str, list[Point]]:
    """The runs in which each size varies, every run once."""
    found: dict[tuple[int, ...], Point] = {}
    lines: dict[str, list[Point]] = {}
    for name, values in VARIED.items():
        lines[name] = []
        for value in values:
            sizes = tuple((BASE | {name: value}).values())
            if sizes not in found:
                tell("running N = {:,}, d = {}, M = {:,}".format(*sizes))
                found[sizes] = counted(*sizes)
            lines[name].append(found[sizes])
    return lines


def fitted(name: str, points: list[Point]) -> float:
    """The exponent of one size: the slope of log accesses by least squares."""
    at = {"N": 0, "d": 1, "M": 2}[name]
    return float(np.polyfit(np.log([point[at] for point in points]), np.log([point.accesses for point in points]), 1)[0])
