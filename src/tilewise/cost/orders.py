"""The same problem in every order: standard attention, key tiles outside, query tiles outside."""

from __future__ import annotations

from typing import NamedTuple

from ..machine import Machine
from ..problem import Problem
from ..tiles import TileShape
from . import flash, keys_outside
from .blocks import paper_blocks
from .count import Cost
from .keys_outside import ATOMIC, LEAN, Accounting
from .roofline import Roofline, in_turn, roofline
from .stored import Passes, price, steps

WAYS = ("forward", "backward")

PRODUCT = TileShape(128, 128)
"""Output tile of a product of standard attention, as libraries choose for large matrices."""


class Kernel(NamedTuple):
    """One kernel, and the rows of its tiles that warps share."""

    cost: Cost
    rows: int


class Order(NamedTuple):
    """One way to go through the scores: its tile, and its kernels "forward" and "backward"."""

    name: str
    shape: TileShape
    kernels: dict[str, list[Kernel]]

    def cost(self, way: str) -> Cost:
        """All kernels of one direction."""
        return sum((kernel.cost for kernel in self.kernels[way]), Cost())

    def on_chip(self, way: str, machine: Machine) -> int:
        """Bytes through shared memory."""
        return sum(kernel.cost.on_chip(machine.readers(kernel.rows)) for kernel in self.kernels[way])

    def roofline(self, way: str, machine: Machine, dtype: str, cached: bool = True) -> Roofline:
        """The least time of one direction, its kernels one after another."""
        return in_turn(roofline(k.cost, machine, dtype, machine.readers(k.rows), cached) for k in self.kernels[way])


def orders(
    problem: Problem, machine: Machine, shape: TileShape, passes: Passes = Passes(), accounting: Accounting = LEAN
) -> list[Order]:
    """Standard attention with `passes`; FlashAttention-1 with the tile that its rule gives for this machine's shared memory;
    FlashAttention-2 with tiles of `shape`, its backward in three kernels and with atomics."""
    p, (r, c) = problem, shape
    theirs = paper_blocks(machine.shared_bytes // p.itemsize, p.d)
    stored = {way: [Kernel(price(p, s, PRODUCT), PRODUCT.block_m) for s in steps(p, passes, way == WAYS[1])] for way in WAYS}
    first = {
        "forward": [Kernel(keys_outside.forward(p, theirs, accounting), theirs.block_n)],
        "backward": [Kernel(keys_outside.backward(p, theirs, accounting), theirs.block_n)],
    }
    three = [Kernel(flash.delta(p), r), Kernel(flash.dq(p, shape), r), Kernel(flash.dk_dv(p, shape), c)]
    return [
        Order("standard", PRODUCT, stored),
        Order("FlashAttention-1", theirs, first),
        Order("FlashAttention-2", shape, {"forward": [Kernel(flash.forward(p, shape), r)], "backward": three}),
        Order("FlashAttention-2, atomic", shape, {"backward": [Kernel(keys_outside.backward(p, shape, ATOMIC), c)]}),
    ]


def decode(problem: Problem, block_n: int, splits: int) -> Order:
    """Few query rows: all of a group in one tile, the keys split among programs."""
    kernel = Kernel(flash.decode(problem, block_n, splits), problem.n * problem.group)
    name = f"decode, {splits} splits" if splits > 1 else "decode"
    return Order(name, TileShape(problem.n, block_n), {"forward": [kernel]})
