"""What a kernel is compiled for, as one value: nothing else of a problem leads to another compilation."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import triton.language as tl

LEAST = 16
"""Columns that a matrix product has at least."""


@dataclass(frozen=True, eq=False)
class Variant:
    """Compile-time facts, in the kernels' spelling. Inside a kernel each field is a constexpr. `variant` makes each only once,
    so that identity tells them apart."""

    D0: Any
    """The slabs of q and k, and with E of v and o; see `slabs`."""
    D1: Any
    E0: Any
    E1: Any
    D: Any
    """Columns of q and k, and with E of v and o."""
    E: Any
    MASK: Any
    """NONE, INTERVAL or TABLE."""
    BAND: Any
    """An INTERVAL that is a band around the diagonal."""
    BIAS: Any
    """None; TILES, read by the copy engine; or POINTS, read one by one."""
    ALIBI: Any
    DROPOUT: Any
    LINES: Any
    """Rows follow each other: their positions are those of the first ones and counting, and no arrays."""
    PLAIN: Any
    """Logits are q·k times a positive scale and nothing else."""
    CAPPED: Any
    """There is a softcap."""
    HIDES: Any
    """Some pair of a visited tile may be hidden, so blocks whose sums are not finite are noted for a CAREFUL kernel."""
    CAREFUL: Any
    """What hidden pairs hold is kept out at any price; see `steps.weigh`."""
    APART: Any
    """FULL tiles have a loop of their own."""
    NOTED: Any
    """Rows, or keys, of the blocks that are noted."""
    LOG: Any
    """log₂ e, or 1 where the base of weights is e."""
    ACC: Any
    """The dtype of scores and sums."""
    PRECISION: Any
    WIDEN: Any
    """Operands become float32 before a product."""
    BLOCK_M: Any
    BLOCK_N: Any
    STAGES: Any

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, tl.constexpr(getattr(self, field.name)))


@lru_cache(maxsize=4096)
def variant(*facts: Any) -> Variant:
    """The variant with these fields, in order."""
    return Variant(*facts)


@lru_cache(maxsize=4096)
def slabs(size: int) -> tuple[int, int]:
    """A head size as one power of two, or as two where that covers it with less.

    >>> slabs(128), slabs(80), slabs(72), slabs(200), slabs(7)
    ((128, 0), (64, 16), (64, 16), (256, 0), (16, 0))
    """
    whole = max(LEAST, 1 << (size - 1).bit_length())
    rest = size - whole // 2
    second = max(LEAST, 1 << max(rest - 1, 0).bit_length())
    return (whole // 2, second) if whole // 2 >= LEAST and whole // 2 + second < whole else (whole, 0)


def padded(size: int) -> int:
    """Columns that a head size takes in a tile."""
    return sum(slabs(size))
