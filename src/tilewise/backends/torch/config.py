"""How many rows, columns and heads one step holds: memory and speed, never the result."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

from ...problem import Problem
from ...tiles import TileShape

SCORES = 2**19
"""Scores alive in one step, over all its heads: 2 MiB in float32, about what one core's L2 holds."""

LIVE = 6
"""Score-sized arrays alive at once at the worst moment of backward: s, p, dp, ds, keep and a temporary."""


@dataclass(frozen=True)
class Config:
    """`batch` entries × `key_heads` key heads (with their query heads) step together through tiles of `shape`."""

    shape: TileShape
    batch: int
    key_heads: int
    scores: int = 0
    """Scores of one step, over all its heads."""
    sums: int = 0
    """Elements of dk and dv that a step's heads add up."""
    itemsize: int = 4
    """Bytes of what accumulates."""

    @property
    def workspace_bytes(self) -> int:
        """Memory beside inputs, outputs and gradients in backward, which needs more than forward."""
        return (self.scores * LIVE + self.sums) * self.itemsize


def configure(problem: Problem) -> Config:
    """Square tiles, wider where there are few rows, and as many heads at once as `SCORES` allows: larger tiles for few heads,
    for fewer operations; smaller ones for many, which skip more of what a mask hides."""
    side = min(512 if problem.b * problem.h < 4 else 256, isqrt(SCORES // problem.group))
    side = max(side, 1)
    block_m = min(max(problem.n, 1), side)
    block_n = min(max(problem.s, 1), side * side // block_m)
    scores = block_m * block_n * problem.group
    together = max(1, SCORES // scores)
    key_heads = min(problem.g, together)
    batch = max(1, min(problem.b, together // key_heads))
    heads = batch * key_heads
    sums = heads * problem.s * (problem.d + problem.e)
    return Config(TileShape(block_m, block_n), batch, key_heads, scores * heads, sums, problem.lse_itemsize)
