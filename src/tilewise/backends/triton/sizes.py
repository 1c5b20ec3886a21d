"""Sizes that were found best, as data: (query rows, keys, warps, stages), by bytes of an element and columns of a tile.
Measured on one H200; other devices take them as far as they fit."""

from __future__ import annotations

from dataclasses import dataclass

from ...tiles import TileShape


@dataclass(frozen=True)
class Launch:
    """One kernel's sizes."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    apart: bool = True
    """FULL tiles have a loop of their own, without a mask; else all tiles share one, which takes fewer registers."""
    noted: int = 0
    """For a CAREFUL kernel: rows, or keys, of the blocks that were noted."""

    @property
    def shape(self) -> TileShape:
        return TileShape(self.block_m, self.block_n)


@dataclass(frozen=True)
class Machine:
    """What a choice of sizes depends on: "cuda90" or "hip942", and bytes of shared memory that one program may use."""

    name: str
    shared_bytes: int

    @property
    def hopper(self) -> bool:
        return self.name == "cuda90"


Sizes = tuple[int, int, int, int]
Table = tuple[tuple[int, tuple[Sizes, Sizes, Sizes, Sizes]], ...]

_HALF: Table = (
    (48, ((128, 64, 8, 3), (128, 64, 8, 2), (32, 64, 4, 2), (64, 64, 4, 2))),
    (64, ((64, 128, 4, 2), (128, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 2))),
    (96, ((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2))),
    (128, ((64, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 2))),
    (192, ((128, 64, 8, 3), (128, 64, 8, 2), (32, 64, 4, 2), (64, 64, 8, 1))),
    (256, ((128, 64, 8, 2), (128, 32, 8, 2), (64, 64, 8, 2), (64, 64, 8, 1))),
    (512, ((64, 64, 8, 1), (64, 32, 8, 1), (32, 32, 8, 1), (32, 32, 8, 1))),
)

_UNDER_A_MASK = {
    64: ((64, 128, 4, 2), (64, 64, 4, 3), (128, 64, 4, 2), (64, 64, 4, 2)),
    128: ((64, 64, 4, 3), (128, 64, 8, 3), (32, 64, 4, 3), (64, 64, 4, 2)),
}
_HALF_MASKED: Table = tuple((most, _UNDER_A_MASK.get(most, sizes)) for most, sizes in _HALF)

_FLOAT: Table = (
    (64, ((128, 64, 8, 2), (128, 32, 8, 3), (64, 128, 8, 1), (64, 32, 4, 2))),
    (128, ((128, 64, 8, 2), (128, 64, 8, 1), (64, 128, 8, 1), (64, 32, 4, 1))),
    (256, ((64, 32, 8, 1), (64, 32, 8, 1), (32, 32, 8, 1), (32, 32, 8, 1))),
    (512, ((16, 16, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1))),
)

_DOUBLE: Table = (
    (128, ((32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1))),
    (512, ((16, 16, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1))),
)

SIZES: dict[tuple[int, str], Table] = {
    (2, "plain"): _HALF,
    (2, "masked"): _HALF_MASKED,
    (4, "plain"): _FLOAT,
    (4, "masked"): _FLOAT,
    (8, "plain"): _DOUBLE,
    (8, "masked"): _DOUBLE,
}
"""forward, dq, dk_dv and dbias, without a mask and with intervals."""

TABLE: dict[int, tuple[tuple[int, Sizes], ...]] = {
    2: ((128, (64, 64, 4, 2)), (256, (32, 32, 4, 2)), (512, (16, 16, 4, 1))),
    4: ((128, (32, 32, 4, 2)), (256, (32, 32, 4, 1)), (512, (16, 16, 4, 1))),
    8: ((512, (16, 16, 4, 1)),),
}
"""Every pass, with a table of pairs."""

CAREFUL: dict[int, tuple[tuple[int, Sizes], ...]] = {
    2: ((128, (32, 32, 4, 1)), (256, (32, 32, 8, 1)), (512, (16, 16, 8, 1))),
    4: ((128, (32, 32, 4, 1)), (512, (16, 16, 4, 1))),
    8: ((512, (16, 16, 4, 1)),),
}
"""Every pass's second run."""
