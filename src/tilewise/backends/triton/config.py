"""Sizes apart from mathematics: how many rows and columns a tile has, how many warps work on it and how deep its loads are
pipelined. They change speed and memory, never the result beyond rounding."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from ...problem import Problem
from ...tiles import TileShape
from ..sight import kind_of
from .fit import all_fitted
from .sizes import CAREFUL, SIZES, TABLE, Launch, Machine
from .store import preferred
from .variant import padded


@dataclass(frozen=True)
class Config:
    """The sizes of every pass."""

    forward: Launch
    dq: Launch
    dk_dv: Launch
    dbias: Launch
    careful: Launch
    """Of every kernel's second run, whose blocks divide the others'."""
    workspace_bytes: int = 0
    """In backward, which needs more than forward: delta, and per-row or per-split parts of the small gradients."""

    hides: bool = True
    """Whether a tile that is visited may hold a hidden pair."""
    known: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """What a first call has found out that holds for all calls of the plan."""

    @property
    def shape(self) -> TileShape:
        return self.forward.shape


def configure(problem: Problem) -> Config:
    """The sizes for a problem on its device."""
    p = problem
    here = machine(p.device)
    sizes = preferred(p, here.name, sizes_of(here, p.itemsize, p.d, p.e, p.mask.kind, bias_itemsize(p)))
    rows = p.b * p.h * p.n * p.lse_itemsize
    hides = kind_of(p) != "NONE" or p.score.bias is not None
    return Config(*sizes, workspace_bytes=rows * (3 if p.score.alibi is not None else 2), hides=hides)


def bias_itemsize(problem: Problem) -> int:
    """Bytes that an element of a bias takes at most where it is loaded in tiles; nothing where it is not."""
    p, shape = problem, problem.score.bias
    return max(p.itemsize, 4) if shape is not None and shape[-2:] == (p.n, p.s) else 0


@lru_cache
def machine(device: str) -> Machine:
    """The device's own numbers; those of a Hopper where the interpreter runs."""
    if not device.startswith("cuda"):
        return Machine("cuda90", 232448)
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", 65536)
    if torch.version.hip:
        return Machine("hip" + properties.gcnArchName.split(":")[0].removeprefix("gfx"), shared)
    return Machine(f"cuda{properties.major}{properties.minor}", shared)


@lru_cache(maxsize=1024)
def sizes_of(machine: Machine, itemsize: int, d: int, e: int, kind: str, bias: int = 0) -> tuple[Launch, ...]:
    """forward, dq, dk_dv, dbias and careful, for a mask of this kind and a bias of so many bytes an element."""
    width = max(padded(d), padded(e))
    careful = Launch(*next(sizes for most, sizes in CAREFUL[itemsize] if width <= most), apart=False)
    if kind == "TABLE":  # one list of tiles serves every pass
        one = Launch(*next(sizes for most, sizes in TABLE[itemsize] if width <= most))
        return all_fitted((one, one, one, one, careful), machine, itemsize, (d, e), bias)
    rows = SIZES[itemsize, "masked" if kind == "INTERVAL" else "plain"]
    mains = [Launch(*one) for one in next(sizes for most, sizes in rows if width <= most)]
    return all_fitted((*mains, careful), machine, itemsize, (d, e), bias)
