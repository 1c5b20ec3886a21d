"""What FlashAttention's paper publishes, and what this model says of the same settings. The two stand side by side and neither
is ever scaled to meet the other.

Source: Dao et al. 2022, FlashAttention, theorem 2 and figure 2."""

from __future__ import annotations

from math import log2
from typing import NamedTuple

import numpy as np

from ..machine import KB, Machine
from ..mask import Causal, Full, Mask
from ..problem import Inputs, Options, Problem
from ..tiles import TileShape
from . import keys_outside
from .blocks import footprint, least_traffic, paper_blocks
from .count import STATISTICS, Cost
from .flash import forward
from .keys_outside import LEAN, LITERAL, RELEASED, Accounting
from .roofline import roofline
from .stored import Passes, score_passes, standard


class Published(NamedTuple):
    """Figure 2, left, of an A100: GPT-2 medium, sequence 1024, head size 64, 16 heads, batch 64, forward and backward."""

    gflop: float
    gb: float
    ms: float


FIGURE2 = {"standard": Published(66.6, 40.3, 41.7), "flash": Published(75.2, 4.4, 7.3)}

STANDARD = {
    "": "algorithm 0 and its backward",
    "mask-add": "additive mask",
    "dropout": "dropout",
    "mask-add,dropout": "additive mask, dropout",
    "mask-fill,dropout": "masked_fill in one kernel, dropout",
    "mask-torch,dropout": "masked_fill as torch does it, dropout",
    "copies,mask-torch,dropout": "the same and einsum's copies",
}
"""Ways to count standard attention, by the text of their `Passes`. One of them comes to the published bytes, which is a fit to
one number and no proof of what was run."""

FLASH: dict[str, tuple[Accounting, int, Mask]] = {
    "two-byte o and dq, o read once": (LEAN, 256, Full()),
    "algorithms 1 and 4 word for word": (LITERAL, 256, Full()),
    "released kernels, float32 o and dq": (RELEASED, 256, Full()),
    "released kernels, causal": (RELEASED, 256, Causal()),
    "B_c = 128, two bytes": (LEAN, 128, Full()),
}
"""Ways to count FlashAttention-1: accounting, B_c, mask. B_r is 16, as in the released kernels; bytes do not depend on it."""

ROWS = 16

HEAD_SIZES, KILOBYTES = (64, 128, 256), (48, 100, 164, 228)
"""Of the table of theorem 2: shared memory from V100's least to H100's most."""

LONG = 8192


class Counted(NamedTuple):
    """One way of counting, over forward and backward: its cost, and `parts`, forward and backward in units of N·d elements or,
    of standard attention, in passes over the scores."""

    name: str
    cost: Cost
    parts: tuple[float, float]


class Ratio(NamedTuple):
    """Theorem 2 for one head size and memory: M numbers of two bytes; how many times fewer accesses than standard attention
    key tiles outside make, query tiles outside with the same tile, and with the tile `best` for them."""

    d: int
    kilobytes: int
    elements: int
    shape: TileShape
    four: float
    whole: float
    outside: float
    same: float
    best: TileShape | None
    least: float | None


class Middle(NamedTuple):
    """Figure 2, middle: forward with blocks of `block_n` keys: bytes by accounting, seconds that HBM and arithmetic take, and
    KB on chip."""

    block_n: int
    lean: int
    literal: int
    released: int
    hbm_s: float
    matrix_s: float
    kilobytes: float


def problem_of(n: int, d: int, heads: tuple[int, int] = (1, 1), mask: Mask = Full()) -> Problem:
    """Float16 self-attention of b and h heads, without any memory behind it."""
    x = np.broadcast_to(np.float16(0), (heads[0], n, heads[1], d))
    return Problem.describe(Inputs(x, x, x), Options(mask))


def setting(mask: Mask = Full()) -> Problem:
    """That of figure 2."""
    return problem_of(1024, 64, (64, 16), mask)


def standard_ways() -> dict[str, Counted]:
    """Figure 2's setting by every way of `STANDARD`."""
    problem, found = setting(), {}
    for names, title in STANDARD.items():
        one, two = (standard(problem, way, Passes.parse(names)) for way in (False, True))
        found[names] = Counted(title, one + two, (score_passes(one, problem), score_passes(two, problem)))
    return found


def flash_ways() -> list[Counted]:
    """Figure 2's setting by every way of `FLASH`, and with each tensor moved once by each direction."""
    found = []
    unit = setting().b * setting().h * 1024 * 64 * 2
    for title, (accounting, block_n, mask) in FLASH.items():
        problem, shape = setting(mask), TileShape(ROWS, block_n)
        one = keys_outside.forward(problem, shape, accounting)
        two = keys_outside.backward(problem, shape, accounting)
        found.append(Counted(title, one + two, (one.bytes / unit, two.bytes / unit)))
    return found


COMPULSORY = (4, 8)
"""N·d elements that any method moves: q, k, v, o; and q, k, v, o, do, dq, dk, dv."""


class Bound(NamedTuple):
    """Operations of products, and the least time on one machine, with what takes it."""

    flops: int
    seconds: float
    binds: str


def bounds(machine: Machine) -> dict[str, Bound]:
    """Figure 2's setting on `machine`, every byte that is counted coming from HBM: standard attention with additive mask and
    dropout, and FlashAttention-1 with nothing twice."""
    ways = {"standard": standard_ways()["mask-add,dropout"], "flash": flash_ways()[0]}
    found = {}
    for who, way in ways.items():
        times = roofline(way.cost, machine, setting().dtype, cached=False).seconds
        times = {part: times[part] for part in ("matrix", "HBM", "exp")}
        slowest = max(times, key=lambda part: times[part])
        found[who] = Bound(way.cost.flops, times[slowest], slowest)
    return found


def middle(machine: Machine) -> list[Middle]:
    """Figure 2's middle, by block size."""
    problem, found = setting(), []
    for block_n in (64, 128, 256, 512, 1024):
        shape = TileShape(ROWS, block_n)
        lean, literal, released = (keys_outside.forward(problem, shape, one) for one in (LEAN, LITERAL, RELEASED))
        times = roofline(lean, machine, problem.dtype, cached=False).seconds
        size = sum(footprint(shape, problem.d, problem.e).values()) * problem.itemsize / KB
        found.append(Middle(block_n, lean.bytes, literal.bytes, released.bytes, times["HBM"], times["matrix"], size))
    return found


def accesses(price: Cost, problem: Problem) -> float:
    """Numbers that cross the edge of the chip, a statistic counted as one like any other: the "HBM accesses" of theorem 2."""
    size = {name: problem.lse_itemsize if name in STATISTICS else problem.itemsize for name in price.tensors}
    return sum((moved.read + moved.write) / size[name] for name, moved in price.tensors.items())


def traffic(order: str, n: int, d: int, elements: int) -> float:
    """Accesses of one head, forward: "standard", "keys outside" with the paper's tile, "queries outside" with the same tile or
    with "the best tile" for M numbers on chip."""
    problem, shape = problem_of(n, d), paper_blocks(elements, d)
    if order == "standard":
        return accesses(standard(problem), problem)
    if order == "keys outside":
        return accesses(keys_outside.forward(problem, shape, Accounting()), problem)
    best = least_traffic(elements, problem) if order == "the best tile" else shape
    return float("nan") if best is None else accesses(forward(problem, best), problem)


ORDERS = ("standard", "keys outside", "queries outside", "the best tile")


def slopes(order: str, n: int = LONG, d: int = 64, elements: int = 50_000) -> tuple[float, float, float]:
    """log₂ of what accesses grow by when N, d or M doubles. Theorem 2 says 2, 2, −1 of keys outside: Θ(N²d²/M)."""
    base = traffic(order, n, d, elements)
    grown = (traffic(order, 2 * n, d, elements), traffic(order, n, 2 * d, elements), traffic(order, n, d, 2 * elements))
    return tuple(log2(x / base) for x in grown)  # type: ignore[return-value]


def ratios() -> list[Ratio]:
    """Theorem 2 at N = 8192, over head sizes and shared memory."""
    found = []
    for d in HEAD_SIZES:
        for kilobytes in KILOBYTES:
            elements, problem = kilobytes * KB // 2, problem_of(LONG, d)
            parts, shape = footprint(paper_blocks(elements, d), d, d), paper_blocks(elements, d)
            stored, outside, same, least = (traffic(order, LONG, d, elements) for order in ORDERS)
            four = sum(parts[name] for name in ("q", "k", "v", "o")) / elements
            sizes = (four, sum(parts.values()) / elements)
            best = least_traffic(elements, problem)
            found.append(Ratio(d, kilobytes, elements, shape, *sizes, stored / outside, stored / same, best, stored / least))
    return found
