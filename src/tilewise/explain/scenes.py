"""Where things stand in the page's pictures: geometry only, worked out once here and drawn by the templates."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..mask import Tile
from ..problem import Problem
from ..softmax import pivot
from ..tiles import blocks
from .facts import SIGNS, exactly
from .trace import Trace

SIDE = 320.0
"""The longer side of the score matrix in a picture."""

LEAST = 84.0
"""The shorter side at least."""


class Box(NamedTuple):
    x: float
    y: float
    w: float
    h: float


class Block(NamedTuple):
    """A block of rows along its axis."""

    at: float
    size: float
    rows: int


def loops(trace: Trace) -> dict[str, Any]:
    """Figure 1: Q on the left, Kᵀ on top, V below and O on the right of the score tiles, to scale."""
    p = trace.problem
    unit = SIDE / max(p.n, p.s)
    high, wide = max(p.n * unit, LEAST), max(p.s * unit, LEAST)
    d, e = (_round(min(max(size * unit, 30), 84)) for size in (p.d, p.e))
    s = Box(52 + d + 16, 46 + d + 16, _round(wide), _round(high))
    rows = _along(s.y, s.h, p.n, trace.shape.block_m)
    cols = _along(s.x, s.w, p.s, trace.shape.block_n)
    return {
        "q": Box(52, s.y, d, s.h),
        "o": Box(s.x + s.w + 16, s.y, e, s.h),
        "k": Box(s.x, 46, s.w, d),
        "v": Box(s.x, s.y + s.h + 16, s.w, e),
        "s": s,
        "rows": rows,
        "cols": cols,
        "tiles": [[_tile(trace, i, j, row, col) for j, col in enumerate(cols)] for i, row in enumerate(rows)],
        "width": _round(s.x + s.w + 16 + e + 8),
        "height": _round(s.y + s.h + 16 + e + 8),
    }


def _tile(trace: Trace, i: int, j: int, row: Block, col: Block) -> dict[str, Any]:
    kind = Tile(trace.kinds[i, j]).name
    return {"i": i, "j": j, "kind": kind, "x": col.at, "y": row.at, "w": col.size, "h": row.size}


def _along(start: float, length: float, rows: int, block: int) -> list[Block]:
    """Blocks of an axis of `rows` that begins at `start`, to scale."""
    unit = length / rows
    parts = blocks(rows, block)
    return [Block(_round(start + x.start * unit), _round((x.stop - x.start) * unit), x.stop - x.start) for x in parts]


def _round(x: float) -> float:
    """Two digits at most, none where the number is whole."""
    return int(x) if x == int(x) else round(x, 2)


KEPT, LATE = ("q", "k", "v", "o", "lse"), ("do", "delta", "dq", "dk", "dv")
"""Tensors in memory, and those that only backward has."""

STORED, STORED_LATE = ("s", "p"), ("dp", "ds")
"""What only standard attention has there."""

OF_KEYS = ("k", "v", "dk", "dv")


def bars(trace: Trace, names: tuple[str, ...], late: tuple[str, ...]) -> list[dict[str, Any]]:
    """Tensors in memory, all to one scale, cut into their blocks; `late` are those of backward."""
    p = trace.problem
    most = max(size_of(p, name) for name in (*KEPT, *STORED))
    made = []
    for name in names + late:
        axis, block = ("s", trace.shape.block_n) if name in OF_KEYS else ("n", trace.shape.block_m)
        size = size_of(p, name)
        cut = [] if name in STORED + STORED_LATE else [x.stop - x.start for x in blocks(getattr(p, axis), block)]
        bar = {"tensor": name.upper() if name in STORED else name, "sign": SIGNS[name], "side": axis, "blocks": cut}
        made.append(bar | {"share": _round(max(100 * size / most, 0.6)), "bytes": exactly(size), "late": name in late})
    return made


def size_of(p: Problem, name: str) -> int:
    """Bytes of a whole tensor, over all heads."""
    if name in ("lse", "delta"):
        return p.h * p.n * p.lse_itemsize
    if name in STORED + STORED_LATE:
        return p.h * p.n * p.s * p.itemsize
    wide = p.e if name in ("v", "o", "do", "dv") else p.d
    return (p.g * p.s if name in OF_KEYS else p.h * p.n) * wide * p.itemsize


def runs(keep: np.ndarray, block: int = 1) -> str:
    """The true cells of a matrix as a path: a rectangle for each run of neighbours in a row; equal neighbouring rows share it.
    Cells are `block` wide and high."""
    path, i = [], 0
    while i < len(keep):
        stop = i + 1
        while stop < len(keep) and (keep[stop] == keep[i]).all():
            stop += 1
        edges = np.flatnonzero(np.diff(np.concatenate([[0], keep[i].astype(int), [0]])))
        path += [f"M{a} {i * block}H{b}V{stop * block}H{a}z" for a, b in (block * edges).reshape(-1, 2).tolist()]
        i = stop
    return "".join(path)


LEVELS = 6
"""Shades of a heat map that is drawn without the script."""


def shades(x: np.ndarray) -> list[dict[str, Any]]:
    """A matrix as a few paths, one a shade, from its least to its largest number; hidden pairs (−inf) are left out."""
    seen = np.isfinite(x)
    if not seen.any():
        return []
    low, high = x[seen].min(), x[seen].max()
    level = np.where(seen, np.ceil(LEVELS * (np.where(seen, x, low) - low) / ((high - low) or 1)), -1)
    made = []
    for shade in range(LEVELS + 1):
        path = runs(level == shade)
        if path:
            made.append({"level": 20 * shade // LEVELS, "d": path})
    return made


def last_tile(trace: Trace) -> dict[str, Any]:
    """The last tile that was visited: its scores, and its weights before they are divided by ℓ."""
    step = next((x for x in reversed(trace.steps) if x.after is not None), None)
    if step is None or step.after is None:
        return {"name": "–", "rows": 1, "cols": 1, "S": [], "P": []}
    p, shape = trace.problem, trace.shape
    i, j = blocks(p.n, shape.block_m)[step.i], blocks(p.s, shape.block_n)[step.j]
    s = trace.s[step.head, i, j]
    weights = np.where(np.isneginf(s), -np.inf, np.exp(s - pivot(step.after.m)[:, None]))
    return {
        "name": f"({step.i}, {step.j}) {step.kind.name}",
        "rows": s.shape[0],
        "cols": s.shape[1],
        "S": shades(s),
        "P": shades(weights),
    }
