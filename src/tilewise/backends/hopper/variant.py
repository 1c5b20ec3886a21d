"""What a kernel is compiled for, as one value: nothing else of a problem leads to another compilation."""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass
from typing import Any

from triton.language import constexpr

from .config import GROUP_ROWS, Forward
from .scratch import FIRST_BARRIER, OWN, Ring


class Known:
    """A description as kernels see it: each of its fields and properties is a constexpr, descriptions within it too."""

    def __init__(self, described: Any) -> None:
        self.described = described

    def __getattr__(self, name: str) -> constexpr:
        if name.startswith("_") or name == "described":
            raise AttributeError(name)
        value = getattr(self.described, name)
        return constexpr(Known(value) if is_dataclass(value) else value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Known) and self.described == other.described

    def __hash__(self) -> int:
        return hash(self.described)

    def __repr__(self) -> str:
        return repr(self.described)


@dataclass(frozen=True)
class Variant:
    """Compile-time facts of the forward kernel, which sees them as `Known`."""

    sizes: Forward
    D: int
    """Columns of tiles of q and k, and with E of v and o."""
    E: int
    COLUMNS: int
    """Of v and o, as tensors."""
    DTYPE: str
    MASK: str
    """NONE; BAND, an interval at a fixed distance from the diagonal; or ROWS, an interval for each row."""
    LATE: bool = True
    """Some row sees a key but not the first."""
    PLAIN: bool = True
    """Logits are q·k times a positive scale and nothing else."""
    CAPPED: bool = False
    ALIBI: bool = False
    SINK: bool = False
    WIDE: bool = False
    """o in float32."""
    ONTO: bool = False
    """What rows have seen of other keys before is merged in."""

    @property
    def GROUPS(self) -> int:
        return self.sizes.groups

    @property
    def BLOCK_M(self) -> int:
        return self.sizes.block_m

    @property
    def BLOCK_N(self) -> int:
        return self.sizes.block_n

    @property
    def TURNS(self) -> bool:
        return self.sizes.turns

    @property
    def PERSISTENT(self) -> bool:
        return self.sizes.persistent

    @property
    def LISTED(self) -> bool:
        """Programs that stay are told which blocks are theirs, since these differ in length."""
        return self.sizes.persistent and self.MASK == "BAND"

    @property
    def FIXED(self) -> bool:
        return self.sizes.fixed

    @property
    def APART(self) -> bool:
        """o does not leave through the shared memory of q."""
        return self.sizes.apart or self.E > self.D

    @property
    def WORKERS(self) -> list[int]:
        """Registers of each partition of a program but the first."""
        mine, producer = self.sizes.registers
        return [*[mine] * (self.sizes.groups - 1), producer]

    @property
    def CHUNK(self) -> int:
        """Columns whose weights are computed at a time. Where all of a tile has to be known before, all of them."""
        return 32 if self.sizes.fixed else self.sizes.block_n

    @property
    def WIDTH(self) -> int:
        """Sums of weights a row, so that few are added to one another before the end. Chains of additions keep the order of the
        exponentials; a tree would make the assembler compute all of these first."""
        return 32 if self.sizes.fixed else 8

    @property
    def FEW(self) -> int:
        """Keys that are taken at a time where a block is done again: registers are few then."""
        return self.sizes.block_n // 2

    @property
    def LIMIT(self) -> int:
        """Where sums of weights end, as a power of two, that a FIXED reference can hold: with room for values in bf16, within
        what fp16 can write."""
        return 15 if self.DTYPE == "float16" and self.sizes.fixed else 63

    @property
    def ROOM(self) -> float:
        """How far below 1 in base 2 careful weights start, so that not even values at the end of bf16 sum up to infinity."""
        return 30.0 if self.DTYPE == "bfloat16" else 0.0

    @property
    def READERS(self) -> int:
        """Threads that multiply."""
        return 128 * self.sizes.groups

    @property
    def Q(self) -> Ring:
        """What q comes through, and where not APART o leaves through."""
        return Ring(GROUP_ROWS, self.D, self.READERS, FIRST_BARRIER, self.sizes.ahead, self.sizes.groups)

    @property
    def K(self) -> Ring:
        return Ring(self.sizes.block_n, self.D, self.READERS, self.Q.NEXT, self.sizes.stages)

    @property
    def V(self) -> Ring:
        return Ring(self.sizes.block_n, self.E, self.READERS, self.K.NEXT, self.sizes.stages)

    @property
    def O(self) -> Ring:  # noqa: E743
        """The tiles through which o leaves where APART: nobody waits for them."""
        return Ring(GROUP_ROWS, self.E, 0, 0, 1, self.sizes.groups)

    @property
    def VERDICT(self) -> int:
        """The named barrier at which a program decides whether to start again."""
        return self.V.NEXT

    @property
    def TURN(self) -> int:
        """The first of the named barriers of turns, one a warpgroup."""
        return self.VERDICT + 1

    @property
    def LAST(self) -> int:
        """The last named barrier that it uses."""
        return self.VERDICT + (self.sizes.groups if self.sizes.turns else 0)

    @property
    def scratch_bytes(self) -> int:
        """Shared memory of a program, with what Triton takes."""
        return self.Q.BYTES + self.K.BYTES + self.V.BYTES + (self.O.BYTES if self.APART else 0) + OWN

    @property
    def products(self) -> int:
        """Instructions of the tensor cores: each warpgroup has three products with k and three with v, alone at the start and
        the end and together in two loops; and there are those of `careful`."""
        k, v, few = self.D // 16, self.sizes.block_n // 16, self.sizes.block_n // self.FEW
        return 3 * self.sizes.groups * (k + v) + few * k + v
