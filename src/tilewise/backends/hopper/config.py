"""Sizes apart from mathematics: how many warpgroups share a program, how many keys a tile has and how many tiles wait on chip.
They change speed and memory, never the result beyond rounding."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import gcd
from typing import Any

import torch

from ...positions import Dense
from ...problem import Problem
from ...tiles import TileShape
from ..sight import band, banded, kind_of

GROUP_ROWS = 64
"""Query rows of a warpgroup."""


@dataclass(frozen=True)
class Forward:
    """Of the forward pass."""

    groups: int
    """Warpgroups that multiply; one warp more brings tiles."""
    block_n: int
    stages: int
    turns: bool = False
    """Warpgroups take turns at the tensor cores."""
    persistent: bool = False
    """One program a multiprocessor, which goes from tile to tile."""
    apart: bool = False
    """o leaves through shared memory of its own, so that the next q can come meanwhile; else through that of q."""
    ahead: int = 1
    """Tiles of q on chip, the one in use included."""
    fixed: bool = False
    """Weights are taken relative to the largest of the first tile, and a row that outgrows what this can hold is done again;
    else the reference follows the largest so far whenever a row outgrows it by much. The time of the first depends on data."""

    @property
    def block_m(self) -> int:
        return self.groups * GROUP_ROWS

    @property
    def shape(self) -> TileShape:
        return TileShape(self.block_m, self.block_n)

    @property
    def registers(self) -> tuple[int, int]:
        """Of each thread: of those that multiply, and of the warp that brings tiles."""
        return (240, 24) if self.groups == 2 else (160, 32)

    @property
    def entry(self) -> int:
        """Registers of every thread when a program starts, before warpgroups trade them."""
        return 168 if self.groups == 2 else 128


FORWARD = {
    64: Forward(groups=3, block_n=128, stages=2, turns=True),
    128: Forward(groups=2, block_n=128, stages=2, turns=True),
    256: Forward(groups=2, block_n=64, stages=2),
}
"""By the columns of the wider of q and v, padded."""

SHORT = 1024
"""Query rows up to which narrow heads have two warpgroups: a third makes blocks so long that few fit."""


@dataclass(frozen=True)
class Config:
    """The sizes of every pass."""

    forward: Forward
    span: int = 1
    """Heads whose blocks of query rows are done together, the longest first; it divides all heads of the batch."""
    programs: int = 132
    """Multiprocessors: programs of a persistent kernel."""
    workspace_bytes: int = 0
    known: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """What a first call has found out that holds for all calls of the plan."""

    @property
    def shape(self) -> TileShape:
        return self.forward.shape


def padded(size: int) -> int:
    """Columns that a head size takes in a tile.

    >>> padded(8), padded(96), padded(128), padded(192)
    (64, 128, 128, 256)
    """
    return next(columns for columns in FORWARD if size <= columns)


L2_BYTES = 32 * 2**20
"""Of keys and values that heads which go together may hold: what stays in a Hopper's 50 MiB of L2 beside everything else."""


def configure(problem: Problem) -> Config:
    """The sizes for a problem on its device."""
    return Config(forward_of(problem), span_of(problem), processors(problem.device))


def forward_of(problem: Problem) -> Forward:
    """The sizes of the forward pass. Programs stay where it is known beforehand how long blocks are, but not where results are
    partial: then messages travel meanwhile, and need a place on the device, too. Narrow heads whose logits are capped or have
    something added leave out the third warpgroup, for it has not the registers; so do short ones."""
    p, columns, band = problem, max(padded(problem.d), padded(problem.e)), band_of(problem)
    sizes = FORWARD[columns]
    plain = p.score.alibi is None and p.score.softcap is None
    if columns == 64 and not (plain and p.n > SHORT):
        sizes = replace(sizes, groups=2, turns=plain)
    if kind_of(p) != "NONE" and band is None:
        return sizes
    fixed = not p.deterministic and (band is None or (p.dtype != "float16" and shows(band, p, sizes)))
    if columns < 256 and not p.wide:
        sizes = replace(sizes, apart=True, ahead=2)
    return replace(sizes, persistent=not p.wide, fixed=fixed)


def band_of(problem: Problem) -> tuple[int, int] | None:
    """The mask as a band around the diagonal, as kernels see it; None where it is none."""
    starts = problem.layout.starts if isinstance(problem.layout, Dense) else None
    return None if starts is None or kind_of(problem) == "NONE" or not banded(problem.mask) else band(problem.mask, starts)


def shows(band: tuple[int, int], problem: Problem, sizes: Forward) -> bool:
    """Whether under a band every row that sees anything sees some of its block's first tile, that with the last key of the
    block's first row: the tile does not start after that key, and no row begins to see after the tile; which is another one
    where the keys end first."""
    (left, right), p, m, n = band, problem, sizes.block_m, sizes.block_n
    reaches = left + p.n <= 1 or (right - left >= m + n - 1 and (p.n - 1) // m * m + right < p.s)
    return reaches and right % gcd(m, n) != 0


def span_of(problem: Problem) -> int:
    """As many heads as the L2 holds the keys and values of, where blocks differ in length; else one after the other."""
    p, heads = problem, problem.b * problem.h
    if kind_of(p) == "NONE":
        return 1
    most = max(1, L2_BYTES * p.group // max(1, p.s * (p.d + p.e) * p.itemsize))
    return max(n for n in range(1, min(most, heads) + 1) if heads % n == 0)


@lru_cache
def processors(device: str) -> int:
    """Multiprocessors of a GPU; those of an H200 where it is none."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.startswith("cuda") else 132
