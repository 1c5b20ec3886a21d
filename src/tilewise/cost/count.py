"""What is counted: a `Cost` is a sum worked out beforehand, a `Meter` counts the same things while the reference runs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from ..problem import Problem

STATISTICS = ("lse", "delta", "m", "l")
"""What is kept of a row in float32, or in float64 for float64 inputs."""

PARTIAL_BYTES = 4
"""Bytes of a number of the parts that splits of keys leave behind, and of dk and dv on their way round a ring."""


class Moved(NamedTuple):
    """Bytes of one tensor: what the walk asks for, and the least that has to come from memory and go there: `least` is the
    traffic behind a cache that keeps everything as long as a kernel runs, and is empty when one begins."""

    read: int = 0
    write: int = 0
    least: int = 0


@dataclass(frozen=True)
class Cost:
    """Units: flops count a multiply and an add as two, in matrix products only, over every pair of the tiles visited.

    read_bytes, write_bytes  what crosses the edge of the chip's own memory: "HBM accesses" of the papers, who know no other
                             level; on a GPU the traffic between L2 and the multiprocessors
    least_bytes              the part of it that HBM must serve, however good the caches are: see `Moved`
    on_chip(readers)         through the chip's own memory: see `chip_bytes` and `reader_bytes`
    """

    flops: int = 0
    exponentials: int = 0
    tensors: Mapping[str, Moved] = field(default_factory=dict)
    empty_tiles: int = 0
    partial_tiles: int = 0
    full_tiles: int = 0
    chip_bytes: int = 0
    """Filled into shared memory, and read from it once a tile."""
    reader_bytes: int = 0
    """Read from shared memory by each of the warps that share a tile's rows: what streams past them."""

    @property
    def read_bytes(self) -> int:
        return sum(moved.read for moved in self.tensors.values())

    @property
    def write_bytes(self) -> int:
        return sum(moved.write for moved in self.tensors.values())

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return self.read_bytes + self.write_bytes

    @property
    def least_bytes(self) -> int:
        return sum(moved.least for moved in self.tensors.values())

    def on_chip(self, readers: int) -> int:
        """Bytes through shared memory when `readers` warps, or groups of warps, share the rows of a tile."""
        return self.chip_bytes + readers * self.reader_bytes

    def __add__(self, other: Cost) -> Cost:
        tensors = dict(self.tensors)
        for name, moved in other.tensors.items():
            tensors[name] = Moved(*map(sum, zip(tensors.get(name, Moved()), moved, strict=True)))
        mine, theirs = self._numbers(), other._numbers()
        return Cost(tensors=tensors, **{name: number + theirs[name] for name, number in mine.items()})

    def __mul__(self, times: int) -> Cost:
        tensors = {name: Moved(*(times * x for x in moved)) for name, moved in self.tensors.items()}
        return Cost(tensors=tensors, **{name: times * number for name, number in self._numbers().items()})

    def __str__(self) -> str:
        tiles = f"{self.full_tiles} full, {self.partial_tiles} partial, {self.empty_tiles} skipped tiles"
        moved = f"{self.read_bytes / 1e6:.3f} MB read, {self.write_bytes / 1e6:.3f} MB written"
        return f"{self.flops / 1e9:.3f} GFLOP, {moved}, {tiles}"

    def _numbers(self) -> dict[str, int]:
        return {name: value for name, value in vars(self).items() if name != "tensors"}


def tidy(cost: Cost) -> Cost:
    """Without tensors of which nothing is moved."""
    return replace(cost, tensors={name: moved for name, moved in cost.tensors.items() if moved != Moved()})


@dataclass
class Meter:
    """Counts what passes through it: `read` and `write` hand their array back, `product` counts a matrix product."""

    itemsize: int
    lse_itemsize: int
    flops: int = 0
    exponentials: int = 0
    tensors: dict[str, Moved] = field(default_factory=dict)
    held: dict[Hashable, int] = field(default_factory=dict)
    """The blocks that a perfect cache holds, and how many bytes of each memory does not have yet."""

    @classmethod
    def of(cls, problem: Problem) -> Meter:
        return cls(problem.itemsize, problem.lse_itemsize)

    def read(self, x: np.ndarray, name: str, at: tuple = (), itemsize: int | None = None) -> np.ndarray:
        """The block `x` of the tensor `name` comes on chip. `at` says which block it is: entry, head, first row; `itemsize`
        its bytes a number where they are not the tensor's own."""
        size = x.size * (itemsize or self.size_of(name))
        least = 0 if (name, at) in self.held else size
        self.held.setdefault((name, at), 0)
        self._add(name, Moved(size, 0, least))
        return x

    def write(self, x: np.ndarray, name: str, at: tuple = (), itemsize: int | None = None) -> np.ndarray:
        """The block leaves the chip; written again before the kernel ends, it reaches memory once."""
        size = x.size * (itemsize or self.size_of(name))
        least = size - self.held.get((name, at), 0)
        self.held[name, at] = size
        self._add(name, Moved(0, size, least))
        return x

    def kernel(self) -> None:
        """A kernel begins: caches are empty."""
        self.held.clear()

    def product(self, rows: int, inner: int, cols: int) -> None:
        """A rows × inner matrix times an inner × cols matrix."""
        self.flops += 2 * rows * inner * cols

    def exponential(self, count: int) -> None:
        self.exponentials += count

    def size_of(self, name: str) -> int:
        """Bytes of one number of a tensor."""
        return self.lse_itemsize if name in STATISTICS else self.itemsize

    @property
    def cost(self) -> Cost:
        """What has been counted so far; of tiles and of the chip's own memory a meter knows nothing."""
        return Cost(self.flops, self.exponentials, dict(self.tensors))

    def _add(self, name: str, moved: Moved) -> None:
        self.tensors[name] = Moved(*map(sum, zip(self.tensors.get(name, Moved()), moved, strict=True)))
