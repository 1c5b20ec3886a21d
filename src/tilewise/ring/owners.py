"""Which token sits on which rank. A layout is a list of shards, each a set of rows in increasing order; any length, any
number of ranks, and a rank without rows is a rank like any other."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from .._errors import OptionError, ShapeError
from ..mask import Documents, Mask
from ..mask.base import Both
from ..positions import Positions
from ..problem import Problem
from .runs import Runs
from .sight import area, take_positions

CHUNKS_A_RANK = 8
"""Into how many pieces a rank's share is cut where rows are dealt out by area."""

ROOM = 1.25
"""How many times its even share of rows a rank may hold where rows are dealt out by area."""


class Exchange(NamedTuple):
    """Rows that move between two shards: `rows` of one rank's shard end up at `into` of the other's. Both int64."""

    rows: np.ndarray
    into: np.ndarray


@dataclass(frozen=True)
class Owners:
    """The rows 0 … length − 1 of one side, shared out among ranks; or all of them on every rank (`replicated`).

    >>> zigzag(8, 2).shards[0].array(), zigzag(8, 2).shards[1].array()
    (array([0, 1, 6, 7]), array([2, 3, 4, 5]))
    """

    length: int
    shards: tuple[Runs, ...]
    replicated: bool = False

    def __post_init__(self) -> None:
        if not self.shards:
            raise OptionError("owners: at least one rank must hold the rows")
        every = range(self.length)
        if self.replicated and any(shard != Runs((every,)) for shard in self.shards):
            raise OptionError(f"owners: a replicated side has all {self.length} rows on every rank")
        if not self.replicated and not self._is_partition():
            raise OptionError(f"owners: {len(self.shards)} shards do not hold each of {self.length} rows exactly once")

    def _is_partition(self) -> bool:
        """Whether each row is in one shard: from the ends of runs where they all have step 1."""
        runs = sorted((x for shard in self.shards for x in shard.ranges), key=lambda x: x.start)
        if all(x.step == 1 for x in runs):
            ends = [0, *(x.stop for x in runs)]
            return [x.start for x in runs] == ends[:-1] and ends[-1] == self.length
        return np.array_equal(np.sort(self.order), np.arange(self.length))

    @property
    def world(self) -> int:
        return len(self.shards)

    @property
    def counts(self) -> list[int]:
        """How many rows each rank holds."""
        return [shard.count for shard in self.shards]

    @cached_property
    def order(self) -> np.ndarray:
        """All rows, rank after rank: entry i of the shards laid end to end is row `order[i]`. `x[order]` shards everything."""
        return np.concatenate([shard.array() for shard in self.shards])

    @cached_property
    def inverse(self) -> np.ndarray:
        """Where each row is in the shards laid end to end: `gathered[inverse]` is the sequence again."""
        return np.argsort(self.order[: self.length], kind="stable")

    def positions(self, rank: int, of: Positions | None = None) -> Positions:
        """Where a rank's rows sit in the sequence: those `of` the whole side (0, 1, 2, ... if not given)."""
        return take_positions(Positions(self.length) if of is None else of, self.shards[rank])

    def locate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The rank that holds each row and its index there."""
        at, ends = self.inverse[rows], np.cumsum(self.counts)
        rank = np.searchsorted(ends, at, "right")
        return rank, at - (ends - self.counts)[rank]

    def roll(self, rank: int, shift: int) -> tuple[list[Exchange], list[Exchange]]:
        """What `rank` sends to and gets from each rank, itself included, so that row i becomes row i − shift of the whole,
        around the end (`numpy.roll`). Labels of a language model are a roll by −1."""
        mine = self.shards[rank].array()
        target, source = ((mine + s) % max(self.length, 1) for s in (shift, -shift))
        (to, into), (of, rows) = self.locate(target), self.locate(source)
        ranks, index = range(self.world), np.arange(len(mine))
        sends = [_sorted(index[to == r], into[to == r]) for r in ranks]
        return sends, [_sorted(rows[of == r], index[of == r]) for r in ranks]


def _sorted(rows: np.ndarray, into: np.ndarray) -> Exchange:
    """Both ends of an exchange list it in the order of the sender's rows."""
    order = np.argsort(rows, kind="stable")
    return Exchange(rows[order], into[order])


def contiguous(length: int, world: int) -> Owners:
    """Rank r holds the r-th of `world` nearly equal stretches."""
    return Owners(_length(length), tuple(Runs.span(*c) for c in _cut(length, _ranks(world))))


def zigzag(length: int, world: int) -> Owners:
    """Of 2N nearly equal chunks rank r holds the r-th from each end: a causal mask then gives every rank equal work at every
    step. Source: Zhu 2024, ring-flash-attention; Brandon et al. 2023, Striped Attention, for the imbalance."""
    chunks = _cut(_length(length), 2 * _ranks(world))
    pairs = [(chunks[r], chunks[2 * world - 1 - r]) for r in range(world)]
    return Owners(length, tuple(Runs.spans(*zip(*pair, strict=True)) for pair in pairs))


def striped(length: int, world: int, block: int = 1) -> Owners:
    """Rows are dealt out `block` at a time: row t sits on rank (t // block) mod N."""
    if block < 1:
        raise OptionError(f"owners: a stripe must hold at least one row, got {block}")
    stride = block * _ranks(world)
    if block == 1:
        return Owners(_length(length), tuple(Runs((range(r, length, world),)) for r in range(world)))
    starts = [range(r * block, length, stride) for r in range(world)]
    return Owners(_length(length), tuple(Runs.spans(x, [min(a + block, length) for a in x]) for x in starts))


BY_NAME: dict[str, Callable[[int, int], Owners]] = {"contiguous": contiguous, "zigzag": zigzag, "striped": striped}
"""Layouts that a length and a number of ranks settle."""


def replicated(length: int, world: int) -> Owners:
    """Every rank holds every row: the queries of a decoding step over sharded keys."""
    return Owners(_length(length), (Runs.span(0, length),) * _ranks(world), replicated=True)


def balanced(problem: Problem, world: int, chunk: int | None = None) -> Owners:
    """Query rows in pieces, each dealt to the rank with the least visible area so far that still has room for its rows.

    A document that fits an even share of the rows stays whole; longer ones are cut into chunks (an eighth of a share, unless
    `chunk` says otherwise), as are masks without documents. Largest area first; ties go to the lowest rank.

    Source: Graham 1969, "Bounds on multiprocessing timing anomalies" (largest first, least loaded)."""
    p, share = problem, -(-problem.n // _ranks(world))
    size = max(1, -(-share // CHUNKS_A_RANK)) if chunk is None else chunk
    if size < 1:
        raise OptionError(f"owners: a chunk must hold at least one row, got {size}")
    pieces = [piece for lo, hi in _stretches(p) for piece in _pieces(lo, hi, share, size)]
    every, room = Runs.span(0, p.s), max(share, int(ROOM * share))
    weighed = sorted(((area(p, Runs.span(*piece), every), piece) for piece in pieces), key=lambda x: (-x[0], x[1]))
    loads = [(0, 0, r) for r in range(world)]
    hands: list[list[tuple[int, int]]] = [[] for _ in range(world)]
    for weight, (lo, hi) in weighed:
        full = []
        while loads and loads[0][1] + hi - lo > room:
            full.append(heapq.heappop(loads))
        if not loads:  # nobody has room: whoever holds the fewest rows
            full.sort(key=lambda x: (x[1], x[2]))
            loads.append(full.pop(0))
        load, rows, rank = heapq.heappop(loads)
        hands[rank].append((lo, hi))
        for entry in (*full, (load + weight, rows + hi - lo, rank)):
            heapq.heappush(loads, entry)
    return Owners(p.n, tuple(Runs.spans(*zip(*sorted(hand), strict=True)) if hand else Runs() for hand in hands))


def check_sides(problem: Problem, q: Owners, kv: Owners) -> None:
    """Raise unless both sides are shared among the same ranks and fit the problem."""
    for axis, side, owners, want in (("n", "q", q, problem.n), ("s", "k", kv, problem.s)):
        if owners.length != want:
            raise ShapeError(f"axis {axis}: owners of {side} share {owners.length} rows where the problem has {want}")
    if q.world != kv.world:
        raise ShapeError(f"owners: queries are shared among {q.world} ranks and keys among {kv.world}")
    if kv.replicated:
        raise OptionError("owners: keys that every rank holds need no schedule: only queries can be replicated")


def _stretches(problem: Problem) -> list[tuple[int, int]]:
    """The rows of each document, or all rows where the mask tells no documents apart or entries differ."""
    p, parts = problem, parts_of(problem.mask)
    edges = {0, p.n}
    if not p.b:
        return [(0, p.n)]
    for part in parts:
        if isinstance(part, Documents):
            first, past = part.bounds(p.layout, slice(0, p.b), slice(0, p.n))
            change = (np.diff(first, axis=1) != 0) | (np.diff(past, axis=1) != 0)
            edges |= set((np.flatnonzero(change.any(0)) + 1).tolist())
    ends = sorted(edges)
    return list(pairwise(ends))


def parts_of(mask: Mask) -> tuple[Mask, ...]:
    return mask.parts if isinstance(mask, Both) else (mask,)


def _pieces(lo: int, hi: int, share: int, size: int) -> list[tuple[int, int]]:
    """A stretch whole where it fits a share of the rows and is not all there is, else in chunks."""
    if hi - lo <= share:
        return [(lo, hi)]
    return [(lo + a, lo + b) for a, b in _cut(hi - lo, -(-(hi - lo) // size))]


def _cut(length: int, parts: int) -> list[tuple[int, int]]:
    """`length` rows in stretches whose sizes differ by at most one."""
    edges = [length * x // parts for x in range(parts + 1)]
    return list(pairwise(edges))


def _length(length: int) -> int:
    if length < 0:
        raise OptionError(f"owners: a side cannot have {length} rows")
    return length


def _ranks(world: int) -> int:
    if world < 1:
        raise OptionError(f"owners: there must be at least one rank, got {world}")
    return world
