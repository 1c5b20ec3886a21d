"""Which tile suits a machine: what fits on chip, what it moves, and how long that takes. The papers' rule for key tiles outside
beside a search for query tiles outside, where the rule is the wrong one: there traffic depends on B_r alone.

Source: Dao et al. 2022, FlashAttention, algorithm 1 (B_c = ⌈M/4d⌉, B_r = min(⌈M/4d⌉, d)) and theorem 2."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from ..machine import Machine
from ..problem import Problem
from ..tiles import TileShape
from .count import Cost
from .flash import forward
from .roofline import MEMORY, roofline

STAGES = 2
"""Tiles of k and v on chip at a time: one is used while the next one comes."""

SPARE = 8
"""One part in so many of the registers is left for everything that is not a tile."""

FRUGAL = 1.02
"""Tiles this close to the fastest count as equally fast; of them the one that asks for fewest bytes is chosen."""

COLUMNS = 16
"""Key rows of a tile come in steps of so many: what one matrix instruction takes."""

LARGEST = 512
"""Rows and columns of the largest tile looked at."""


class Fit(NamedTuple):
    """What one tile takes of a multiprocessor, and how many tiles it can work on at a time; 0: it does not fit."""

    shared_bytes: int
    register_bytes: int
    at_once: int


class Choice(NamedTuple):
    """One tile: what it takes on chip, what a whole forward pass counts, and how long that takes: `arithmetic`, for in a tile
    products, exponentials and what else is done to every score follow one another, and beside it `memory` of every level."""

    shape: TileShape
    fit: Fit
    cost: Cost
    arithmetic: float
    memory: dict[str, float]

    @property
    def slowest(self) -> str:
        """The level of memory that needs longest."""
        return max(self.memory, key=lambda name: self.memory[name])

    @property
    def seconds(self) -> float:
        return max(self.arithmetic, *self.memory.values())


def paper_blocks(elements: int, d: int) -> TileShape:
    """B_r = min(⌈M/4d⌉, d) and B_c = ⌈M/4d⌉ for M numbers on chip; made for key tiles outside."""
    cols = max(1, -(-elements // (4 * d)))
    return TileShape(min(cols, d), cols)


def footprint(shape: TileShape, d: int, e: int) -> dict[str, int]:
    """Numbers on chip at once, one tile of each; the papers' rule leaves s and the statistics out."""
    r, c = shape
    return {"q": r * d, "k": c * d, "v": c * e, "o": r * e, "s": r * c, "m, l": 2 * r}


def least_traffic(elements: int, problem: Problem, step: int = COLUMNS) -> TileShape | None:
    """The tile, in multiples of `step`, that asks for fewest bytes with query tiles outside and has its whole footprint among
    M numbers; None where none has. Traffic falls with B_r alone, so B_c is the least."""
    for r in range(-(-problem.n // step) * step, 0, -step):
        shape = TileShape(r, step)
        if sum(footprint(shape, problem.d, problem.e).values()) <= elements:
            return shape
    return None


def fit(shape: TileShape, machine: Machine, problem: Problem) -> Fit:
    """What a tile takes: q and stages of k and v in shared memory; o, s and p in registers, or in the same memory where a
    machine has no registers to speak of."""
    p, (r, c), z = problem, shape, problem.itemsize
    shared = z * (r * p.d + STAGES * c * (p.d + p.e))
    sums = 4 * (r * p.e + r * c + 2 * r) + (z * r * c if z < 4 else 0)
    if not machine.register_bytes:
        return Fit(shared + sums, 0, int(shared + sums <= machine.block_bytes))
    room = machine.register_bytes * (SPARE - 1) // SPARE
    if shared > machine.block_bytes or sums > room:
        return Fit(shared, sums, 0)
    return Fit(shared, sums, min(machine.shared_bytes // shared, room // sums))


def choices(problem: Problem, machine: Machine) -> list[Choice]:
    """Every tile that fits, best first: the fastest by the model and what is as good, fewest bytes first, then the rest."""
    found = []
    for r, c in product(range(machine.rows, LARGEST + 1, machine.rows), range(COLUMNS, LARGEST // 2 + 1, COLUMNS)):
        shape = TileShape(r, c)
        taken = fit(shape, machine, problem)
        if taken.at_once:
            found.append(weigh(shape, taken, problem, machine))
    fastest = min((one.seconds for one in found), default=0.0)
    return sorted(found, key=lambda one: (one.seconds > FRUGAL * fastest, one.cost.bytes, one.seconds))


def weigh(shape: TileShape, taken: Fit, problem: Problem, machine: Machine) -> Choice:
    """One tile on the scales."""
    price = forward(problem, shape)
    arithmetic = price.flops / machine.rate(problem.dtype) + price.exponentials / machine.exponentials
    arithmetic += elementwise(price, problem) / machine.elementwise
    seconds = roofline(price, machine, problem.dtype, machine.readers(shape.block_m)).seconds
    return Choice(shape, taken, price, arithmetic, {part: x for part, x in seconds.items() if part in MEMORY})


def elementwise(price: Cost, problem: Problem) -> int:
    """What a forward pass does to single numbers: scale, max, subtract, exp and sum of every score; of every row of every tile
    new m and l, and o rescaled; at the end o divided."""
    p, rows = problem, problem.b * problem.h * problem.n
    pairs = price.flops // (2 * (p.d + p.e))
    visits = price.exponentials - pairs - (2 * rows if p.score.sink else 0)
    return 5 * pairs + (p.e + 4) * visits + (p.e + 2) * rows
