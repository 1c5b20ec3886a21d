"""Who does which blocks of query rows, where programs stay and blocks differ in length: settled beforehand as if each program
took the next block whenever it is free, so that all of them end together and nobody has to ask."""

from __future__ import annotations

from heapq import heapreplace

import numpy as np

from .config import Forward

CHANGE = 0.5
"""What going from block to block takes, in tiles of keys."""


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


def roster(found: np.ndarray, programs: int) -> np.ndarray:
    """int32 "2 + rounds programs": how many blocks a program does, which ones, and a row that is looked at but not done.
    `found`: lengths of blocks, in the order in which they are taken."""
    free = [(0.0, program) for program in range(programs)]
    lists: list[list[int]] = [[] for _ in free]
    for block, length in enumerate(found.tolist()):
        busy, program = free[0]
        lists[program].append(block)
        heapreplace(free, (busy + length + CHANGE, program))
    table = np.zeros((2 + max(map(len, lists)), programs), np.int32)
    for program, mine in enumerate(lists):
        table[0, program], table[1 : 1 + len(mine), program] = len(mine), mine
    return table
