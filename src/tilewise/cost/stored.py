"""Standard attention, which stores the n×s scores: one kernel after another, each with what it reads and writes.

Source: Dao et al. 2022, FlashAttention, algorithms 0 and 3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from .._errors import OptionError
from ..problem import Problem
from ..tiles import TileShape
from .count import Cost, Moved, tidy


@dataclass(frozen=True)
class Passes:
    """The elementwise operations that are kernels of their own; what is not named costs nothing, as in algorithm 0.

    mask   "add": scores read and written, nothing backward · "fill": in both directions · "torch": as `masked_fill` and its
           derivative do it, backward a copy and a fill in place
    product  dp∘p by a kernel of its own before the rest of softmax's derivative, as eager torch computes it
    """

    scale: bool = False
    mask: Literal["", "add", "fill", "torch"] = ""
    dropout: bool = False
    product: bool = False
    copies: bool = False
    """k / √d, and contiguous copies of q, k, v and of the gradients, which einsum makes of "b s h d"."""

    def __post_init__(self) -> None:
        if self.mask not in ("", "add", "fill", "torch"):
            raise OptionError(f"passes: mask is '', 'add', 'fill' or 'torch', got {self.mask!r}")
        if self.scale and self.copies:
            raise OptionError("passes: copies= scales k already, so scale= would do it twice")

    @classmethod
    def parse(cls, names: str) -> Passes:
        """The passes that a text names.

        >>> Passes.parse("mask-add,dropout")
        Passes(scale=False, mask='add', dropout=True, product=False, copies=False)
        """
        chosen: dict[str, Any] = {}
        for name in filter(None, (part.strip() for part in names.split(","))):
            kind, _, how = name.partition("-")
            if kind not in ("scale", "mask", "dropout", "product", "copies") or (kind == "mask") != bool(how):
                known = "scale, mask-add, mask-fill, mask-torch, dropout, product, copies"
                raise OptionError(f"pass {name!r} is unknown; there are {known}")
            chosen[kind] = how or True
        return cls(**chosen)


SHARED = ("k", "v", "dk", "dv")
"""Tensors of which a group of query heads has one."""


class Step(NamedTuple):
    """One kernel: the tensors it reads and writes, parted by spaces; of a product, the axes of rows, inner and columns."""

    name: str
    reads: str
    writes: str
    product: str = ""


def steps(problem: Problem, passes: Passes = Passes(), backward: bool = False) -> list[Step]:
    """The kernels of one direction, in order. s, p, dp and ds are "h n s"; "keep" says which weights dropout kept."""
    fill = {"": 0, "add": 0, "fill": 1, "torch": 2}[passes.mask]
    p = "pd" if passes.dropout else "p"
    if not backward:
        optional = [
            (passes.copies, Step("k/√d", "k", "k")),
            (passes.copies, Step("contiguous", "q k v", "q k v")),
            (True, Step("s = q·kᵀ", "q k", "s", "n d s")),
            (passes.scale, Step("scale", "s", "s")),
            (problem.score.bias is not None, Step("bias", "s bias", "s")),
            (passes.mask != "", Step("mask", "s", "s")),
            (True, Step("p = softmax(s)", "s", "p")),
            (passes.dropout, Step("dropout", "p", "pd keep")),
            (True, Step("o = p·v", f"{p} v", "o", "n s e")),
        ]
    else:
        optional = [
            (True, Step("dv = pᵀ·do", f"{p} do", "dv", "s n e")),
            (True, Step("dp = do·vᵀ", "do v", "dp", "n e s")),
            (passes.dropout, Step("dropout backward", "dp keep", "dp")),
            (passes.product, Step("dp∘p", "p dp", "dp")),
            (True, Step("ds = p∘(dp − Σ dp∘p)", "p dp", "ds")),
            *[(True, Step("mask backward", "ds", "ds"))] * fill,
            (passes.scale, Step("scale backward", "ds", "ds")),
            (True, Step("dq = ds·k", "ds k", "dq", "n s d")),
            (True, Step("dk = dsᵀ·q", "ds q", "dk", "s n d")),
            (passes.copies, Step("gradients back", "dq dk dv", "dq dk dv")),
        ]
    return [step for present, step in optional if present]


def standard(problem: Problem, backward: bool = False, passes: Passes = Passes(), shape: TileShape | None = None) -> Cost:
    """Attention that stores the n×s scores s and weights p. Every pair is computed: no mask skips any.

    `shape`: the tiles of its products' outputs, each of which reads its rows of one factor and columns of the other; without
    it each factor is read once, as the papers count. Elementwise kernels and `least_bytes` move each tensor once.
    """
    return tidy(sum((price(problem, step, shape) for step in steps(problem, passes, backward)), Cost()))


def price(problem: Problem, step: Step, shape: TileShape | None = None) -> Cost:
    """One kernel."""
    p, sizes = problem, _sizes(problem)
    reads, writes = ({name: sizes[name] for name in names.split()} for names in (step.reads, step.writes))
    tensors = {}
    for name in dict.fromkeys((*reads, *writes)):
        read, write = reads.get(name, 0), writes.get(name, 0)
        tensors[name] = Moved(read, write, read + write)
    exponentials = p.b * p.h * p.n * p.s if "softmax" in step.name else 0
    if not step.product:
        return Cost(0, exponentials, tensors)
    rows, inner, cols = ({"n": p.n, "s": p.s, "d": p.d, "e": p.e}[axis] for axis in step.product.split())
    heads, z = p.b * p.h, p.itemsize
    chip = reader = 0
    if shape is not None:
        left, right = step.reads.split()
        across, down = -(-cols // shape.block_n), -(-rows // shape.block_m)
        asked = {left: heads * z * rows * inner * across, right: heads * z * inner * cols * down}
        for name, size in asked.items():
            tensors[name] = Moved(size, 0, min(size, tensors[name].least))
        chip, reader = sum(asked.values()) + asked[left], asked[right]
    return Cost(2 * heads * rows * inner * cols, 0, tensors, chip_bytes=chip, reader_bytes=reader)


def score_passes(cost: Cost, problem: Problem) -> float:
    """How often the whole n×s matrix is read or written: what is kept of a weight in one byte counts as a part of it."""
    moved = sum(x.read + x.write for name, x in cost.tensors.items() if name in ("s", "p", "pd", "dp", "ds", "keep"))
    return moved / (problem.b * problem.h * problem.n * problem.s * problem.itemsize)


def _sizes(p: Problem) -> dict[str, int]:
    """Bytes of each tensor over batch and heads."""
    q, k = {"d": p.b * p.h * p.n * p.d, "e": p.b * p.h * p.n * p.e}, {"d": p.b * p.g * p.s * p.d, "e": p.b * p.g * p.s * p.e}
    pairs = p.b * p.h * p.n * p.s
    sizes = {"q": q["d"], "dq": q["d"], "o": q["e"], "do": q["e"], "k": k["d"], "dk": k["d"], "v": k["e"], "dv": k["e"]}
    sizes |= dict.fromkeys(("s", "p", "pd", "dp", "ds"), pairs)
    bias = 1
    for size in p.score.bias or ():
        bias *= size
    return {name: size * p.itemsize for name, size in (sizes | {"bias": bias}).items()} | {"keep": pairs}
