"""What the backward kernel is compiled for, as one value, and the shared memory that it takes."""

from __future__ import annotations

from dataclasses import dataclass

from .scratch import BARRIER_BYTES, OWN, Ring

BLOCK_N = 128
"""Keys that a program owns: 64 for each of its two warpgroups."""

PART = 64
"""Query rows that dq is stored in pieces of."""

READERS = 256
"""Threads that multiply."""

REGISTERS = 168
"""Of every thread when a program starts, before warpgroups trade them."""

FIRST_BARRIER = 6
"""The first named barrier that five partitions leave free; see `channel`."""


def block_m(width: int, light: bool) -> int:
    """Query rows of a step where tiles are so wide: as many as registers hold weights of. `light`: nothing but them takes many,
    no score and no bounds that are looked up."""
    return 128 if width == 64 and light else 64


@dataclass(frozen=True)
class Variant:
    """Compile-time facts, in the kernel's spelling. The kernel sees them as `variant.Known`."""

    WIDTH: int
    """Columns of every tile: the larger of d and e, padded to 64 or 128."""
    M: int
    """Query rows of a step; see `block_m`."""
    MASK: str
    """NONE; BAND, around the diagonal; or ROWS, an interval for each query row that is looked up."""
    PLAIN: bool = True
    """Logits are q·k times a positive scale and nothing else."""
    ALIBI: bool = False
    CAPPED: bool = False
    """There is a softcap."""
    WIDE: bool = False
    """dk and dv leave in float32."""
    STAGES: int = 2
    PERSISTENT: bool = False
    """One program a multiprocessor, which goes from one block of keys to the next."""

    @property
    def LISTED(self) -> bool:
        """Programs that stay are told which blocks of keys are theirs."""
        return self.PERSISTENT

    @property
    def N(self) -> int:
        """Keys of a program."""
        return BLOCK_N

    @property
    def SPLIT(self) -> bool:
        """The warpgroups share dq of a step by its columns; else by its rows."""
        return self.M == PART

    @property
    def COLUMNS(self) -> int:
        """Of a warpgroup's part of dq, which has PART rows."""
        return self.WIDTH // 2 if self.SPLIT else self.WIDTH

    @property
    def ROWS(self) -> Ring:
        """q and do of a step; with them come lse and delta − dlse."""
        return Ring(self.M, self.WIDTH, READERS, FIRST_BARRIER, self.STAGES, 2, BESIDE=2 * 4 * self.M)

    @property
    def KEYS(self) -> Ring:
        """k and v of a block of keys, in a stage each."""
        return Ring(BLOCK_N, self.WIDTH, READERS, self.LEFT + 2, 2)

    @property
    def MET(self) -> int:
        """The first of four named barriers, of two warpgroups and of even and odd steps: ds is in shared memory."""
        return self.ROWS.NEXT

    @property
    def LEFT(self) -> int:
        """The first of two named barriers: a warpgroup's part of dq, or its dk or dv, lies ready to be carried away."""
        return self.MET + 4

    @property
    def LEAVES(self) -> int:
        """Columns of dk and dv that are carried away together."""
        return min(self.WIDTH, 128)

    @property
    def LEAVINGS(self) -> int:
        """Pieces in which a warpgroup's part of dq of a step leaves, one after the other."""
        return 1

    @property
    def PIECES(self) -> int:
        """Pieces that PART rows of dq consist of, side by side."""
        return self.WIDTH // self.COLUMNS

    @property
    def PIECE(self) -> int:
        """Rows of 32 numbers that a warpgroup's part of dq takes."""
        return PART * self.COLUMNS // 32

    @property
    def ROOM(self) -> int:
        """Rows of WIDTH that a piece's shared memory holds, in the dtype of q."""
        return self.PIECE * 32 * 2 // self.WIDTH

    @property
    def products(self) -> int:
        """Instructions of the tensor cores: of two warpgroups, once for the first or last step and once for those in
        between."""
        return 2 * 2 * ((2 * self.WIDTH + 2 * self.M + self.N) // 16)

    @property
    def scratch_bytes(self) -> int:
        """Shared memory of a program, with what Triton takes."""
        exchange, pieces = 2 * 2 * BLOCK_N * self.M, 2 * 128 * self.PIECE
        return self.ROWS.BYTES + self.KEYS.BYTES + exchange + pieces + 2 * BARRIER_BYTES + OWN

    def __repr__(self) -> str:
        """Part of the names of compiled functions, which hold letters only."""
        words = [name for name in ("PLAIN", "ALIBI", "CAPPED", "WIDE", "PERSISTENT") if getattr(self, name)]
        return "_".join([f"{self.MASK}{self.WIDTH}", f"M{self.M}", *words, f"S{self.STAGES}"])


@dataclass(frozen=True)
class Wide(Variant):
    """The same of the kernel for wide heads, whose two warpgroups share 64 keys and a step's work."""

    @property
    def N(self) -> int:
        return PART

    @property
    def COLUMNS(self) -> int:
        """Of a piece of dq."""
        return self.WIDTH // 4

    @property
    def LEAVINGS(self) -> int:
        return 2

    @property
    def Q(self) -> Ring:
        """q of a step, and lse with it."""
        return Ring(self.M, self.WIDTH, READERS, FIRST_BARRIER, 2, BESIDE=4 * self.M)

    @property
    def DO(self) -> Ring:
        """do of a step, and delta − dlse with it."""
        return Ring(self.M, self.WIDTH, READERS, self.Q.NEXT, 1, BESIDE=4 * self.M)

    @property
    def KEYS(self) -> Ring:
        return Ring(self.N, self.WIDTH, READERS, 0, 1, 2)

    @property
    def MET(self) -> int:
        """The first of four named barriers: p is there, ds is there, p is no longer needed, nor is ds."""
        return self.DO.NEXT

    @property
    def products(self) -> int:
        return 2 * ((self.WIDTH + 2 * self.M + 2 * self.N) // 16)

    @property
    def scratch_bytes(self) -> int:
        exchange, pieces = 2 * 2 * self.N * self.M, 2 * 128 * self.PIECE
        return self.Q.BYTES + self.DO.BYTES + self.KEYS.BYTES + exchange + pieces + 2 * BARRIER_BYTES + OWN
