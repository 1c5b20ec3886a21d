"""What a program keeps on chip: one description of its shared memory, by which kernels allocate and everybody else counts."""

from __future__ import annotations

from dataclasses import dataclass

SHARED = 232448
"""Bytes of shared memory that one program of a Hopper may have."""

FIRST_BARRIER, LAST_BARRIER = 5, 15
"""Named barriers that are ours; those before belong to Triton's partitions."""

BARRIER_BYTES = 8
"""Of an mbarrier."""

OWN = 2048
"""Bytes that Triton keeps for itself at most: what it tells the partitions of a kernel, and alignment."""


@dataclass(frozen=True)
class Ring:
    """STAGES × PARTS tiles of ROWS × COLUMNS, filled by one warp and read by READERS threads; see `channel`. In kernels every
    field and property is a constexpr."""

    ROWS: int
    COLUMNS: int
    READERS: int
    FIRST: int
    """Its first named barrier; it takes one a stage."""
    STAGES: int = 1
    PARTS: int = 1
    ITEMSIZE: int = 2
    BESIDE: int = 0
    """Bytes that come to a stage beside its tiles; see `channel.send_to`."""

    @property
    def SHAPE(self) -> list[int]:
        """Of all its tiles in shared memory: each is a box of descriptors "b heads rows columns"."""
        return [self.STAGES * self.PARTS, 1, 1, self.ROWS, self.COLUMNS]

    @property
    def STAGE_BYTES(self) -> int:
        """What comes to a stage. Rows and columns past the ends of a tensor count: they come as zeros."""
        return self.PARTS * self.ROWS * self.COLUMNS * self.ITEMSIZE + self.BESIDE

    @property
    def BYTES(self) -> int:
        """Of shared memory, mbarriers included."""
        return self.STAGES * (self.STAGE_BYTES + BARRIER_BYTES)

    @property
    def NEXT(self) -> int:
        """The first named barrier after its own."""
        return self.FIRST + self.STAGES
