"""A decision, frozen: which backend runs a problem and how, and why the others do not."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from .. import cost
from ..cost import Cost
from ..mask import Tile
from ..problem import Problem
from ..tiles import TileShape


class Config(Protocol):
    """A backend's own sizes. All the rest of the library needs of them is the tile."""

    @property
    def shape(self) -> TileShape: ...

    @property
    def workspace_bytes(self) -> int: ...


@dataclass(frozen=True)
class Plan:
    """What would run. Print it: backend, tiles, cost, and every refusal with its reasons."""

    backend: str
    problem: Problem
    config: Config
    refused: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @cached_property
    def forward_cost(self) -> Cost:
        return cost.forward(self.problem, self.config.shape)

    @cached_property
    def backward_cost(self) -> Cost:
        return cost.backward(self.problem, self.config.shape)

    def __str__(self) -> str:
        p, c = self.problem, self.forward_cost
        visited, shape, standard = c.full_tiles + c.partial_tiles, self.config.shape, cost.standard(p)
        lines = [
            f"backend   {self.backend} on {p.device}, {p.dtype}",
            f"problem   b={p.b} n={p.n} s={p.s} h={p.h} g={p.g} d={p.d} e={p.e}, mask {p.mask.kind}",
            f"tiles     {shape.block_m} × {shape.block_n}: visits {visited} of {visited + c.empty_tiles}"
            f" ({c.full_tiles} {Tile.FULL.name}, {c.partial_tiles} {Tile.PARTIAL.name}, {c.empty_tiles} {Tile.EMPTY.name})",
            f"forward   {c.flops / 1e9:.3f} GFLOP, {c.bytes / 1e6:.2f} MB (storing the scores: {standard.bytes / 1e6:.2f} MB)",
            f"backward  {self.backward_cost.flops / 1e9:.3f} GFLOP, {self.backward_cost.bytes / 1e6:.2f} MB"
            f" (storing the scores: {cost.standard(p, backward=True).bytes / 1e6:.2f} MB)",
            f"workspace {self.config.workspace_bytes / 2**20:.1f} MiB beside inputs, outputs and gradients",
        ]
        lines += [f"refused   {name}: {reason}" for name, reasons in self.refused for reason in reasons]
        return "\n".join(lines)
