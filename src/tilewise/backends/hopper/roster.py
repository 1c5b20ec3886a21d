"""Who does which blocks, of query rows in forward and of keys in backward, where programs stay and blocks differ in length:
settled beforehand as if each program took the next block whenever it is free, so that all of them end together and nobody has
to ask."""

from __future__ import annotations

from heapq import heapreplace

import numpy as np

from ...tiles import TileShape
from .config import Forward

CHANGE = 0.5
"""What going from block to block takes, in tiles of keys."""

CHANGE_OF_KEYS = 1.0
"""And in backward, in steps."""


def lengths(n: int, s: int, band: tuple[int, int], sizes: Forward) -> np.ndarray:
    """How many tiles of keys each block of query rows visits under a band: what `visits.visits_of` counts."""
    left, right = band
    row = np.arange(0, n, sizes.block_m)
    last, tiles = np.minimum(row + sizes.block_m, n) - 1, -(-s // sizes.block_n)
    lo = np.minimum(np.clip(row + left, 0, s) // sizes.block_n, tiles - 1)
    hi = -(-np.clip(last + right, 0, s) // sizes.block_n)
    return np.maximum(hi - lo, 1)


def in_order(found: np.ndarray, heads: int, span: int) -> np.ndarray:
    """The lengths of all blocks of all heads, in the order of `visits.place`."""
    return np.tile(np.repeat(found[::-1], span), heads // span)


def steps(n: int, s: int, band: tuple[int, int], shape: TileShape) -> np.ndarray:
    """How many blocks of query rows see each block of keys under a band: what `backward_walk.visits_of` counts."""
    left, right = band
    start, many = np.arange(0, s, shape.block_n), -(-n // shape.block_m)
    end = np.minimum(start + shape.block_n, s)
    lo = np.minimum(np.maximum(start + 1 - right, 0) // shape.block_m, many)
    return np.maximum(-(-np.clip(end - left, 0, n) // shape.block_m) - lo, 0)


def in_turn(found: np.ndarray, heads: int, span: int, turns: int) -> np.ndarray:
    """The lengths of all blocks of keys of all heads, in the order of `backward_walk.place_of`."""
    sections = -(-heads // span)
    widths = [min(span, heads - section * span) for section in range(sections)]
    up = [(sections - section + 1) & turns for section in range(sections)]
    return np.concatenate([np.repeat(found[:: -1 if one else 1], width) for one, width in zip(up, widths, strict=True)])


def roster(found: np.ndarray, programs: int, change: float = CHANGE) -> np.ndarray:
    """int32 "2 + rounds programs": how many blocks a program does, which ones, and a row that is looked at but not done.
    `found`: lengths of blocks, in the order in which they are taken. Every program does its own in that order, too."""
    free = [(0.0, program) for program in range(programs)]
    lists: list[list[int]] = [[] for _ in free]
    for block, length in enumerate(found.tolist()):
        busy, program = free[0]
        lists[program].append(block)
        heapreplace(free, (busy + length + change, program))
    table = np.zeros((2 + max(map(len, lists)), programs), np.int32)
    for program, mine in enumerate(lists):
        table[0, program], table[1 : 1 + len(mine), program] = len(mine), mine
    return table
