"""What the page shows beside its runs: a long problem, masks in blocks of several sizes, what backward costs, code, a ring."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import numpy as np

from .. import cost, softmax
from ..cost import keys_outside
from ..mask import Causal, Documents, Full, Mask, Prefix, Tile, Window
from ..positions import Positions
from ..problem import Inputs, Options, Problem
from ..reference import flash
from ..tiles import TileShape, table, visible_pairs
from .facts import exactly, operations, tiny, traffic
from .scenes import runs
from .tilemap import count
from .trace import BACKWARD1, BATCH, DKDV, DQ, PRODUCTS, Trace

LONG, WIDE, SIDE = 8192, 128, 128
"""The long problem that the page compares itself with: query and key rows, head size, rows of a block."""

BLOCKS = (8, 16, 32, 64)
"""Block sizes of the masks' maps."""

MOST = 1024
"""Tiles of a map, at most."""

BAR = 420
"""The longest of the bars that compare bytes."""


def describe(
    mask: Mask, n: int, s: int, d: int = 1, e: int = 1, positions: tuple[Positions, Positions] | None = None
) -> Problem:
    """One head in float16, with no memory behind it."""
    q, k, v = (np.broadcast_to(np.float16(0), (1, rows, 1, size)) for rows, size in ((n, d), (s, d), (s, e)))
    return Problem.describe(Inputs(q, k, v), Options(mask, positions=positions))


def long() -> dict[str, str]:
    """The long causal problem: bytes of both ways, the least, and tiles."""
    problem, shape = describe(Causal(), LONG, LONG, WIDE, WIDE), TileShape(SIDE, SIDE)
    tiled, standard = cost.forward(problem, shape), cost.standard(problem)
    visited = tiled.full_tiles + tiled.partial_tiles
    return {
        "long": str(LONG),
        "wide": str(WIDE),
        "side": str(SIDE),
        "flash": traffic(tiled.bytes),
        "standard": traffic(standard.bytes),
        "least": traffic(tiled.least_bytes),
        "times": f"{standard.bytes / tiled.bytes:.1f}×",
        "visited": f"{visited:,}",
        "tiles": f"{visited + tiled.empty_tiles:,}",
    }


def presets(trace: Trace, text: str) -> list[dict[str, Any]]:
    """Masks over the trace's sizes in blocks of several sizes: tiles to draw, and what skipping saves."""
    p = trace.problem
    third = max(1, p.s // 3)
    lengths = [third, max(1, third // 2), max(1, p.s - third - max(1, third // 2))]
    masks: dict[str, Mask] = {
        "causal": Causal(),
        "causal & window(left=3)": Causal() & Window(3),
        f"documents {', '.join(map(str, lengths))}": Documents.from_lengths(lengths),
        f"prefix({max(1, p.s // 4)})": Prefix(max(1, p.s // 4)),
    }
    one = {text: replace(p, h=1, g=1)}
    one |= {name: describe(mask, p.n, p.s, p.d, p.e) for name, mask in masks.items() if name != text}
    fits = [b for b in BLOCKS if -(-p.n // b) * -(-p.s // b) <= MOST] or [max(p.n, p.s)]
    return [preset(name, problem, fits) for name, problem in one.items()]


def preset(name: str, problem: Problem, sizes: list[int]) -> dict[str, Any]:
    """One mask of one head: its visible pairs, and its tiles in each block size."""
    p, exact = problem, visible_pairs(problem)
    keep = np.broadcast_to(p.keep(), (1, 1, p.n, p.s))[0, 0]
    return {"text": name, "n": p.n, "s": p.s, "pairs": runs(keep), "sizes": [_map(p, b, exact) for b in sizes]}


def _map(problem: Problem, b: int, exact: int) -> dict[str, Any]:
    """The tiles of one block size, of which `exact` pairs are visible."""
    shape = TileShape(b, b)
    kinds, price = table(problem, shape, BATCH), cost.forward(problem, shape)
    whole = cost.forward(replace(problem, mask=Full()), shape)
    counts, area = count(kinds), price.flops // (2 * (problem.d + problem.e))
    words = {
        "visited": f"{counts.visited} / {counts.total}",
        "skipped": str(counts.empty),
        "saved-bytes": exactly(whole.bytes - price.bytes),
        "saved-flops": operations(whole.flops - price.flops),
        "exact": f"{exact / (problem.n * problem.s):.1%}",
        "waste": f"{1 - exact / area if area else 0:.1%}",
    }
    paths = {kind.name: runs(kinds == kind, b) for kind in Tile}
    tiles = f"{counts.full} FULL, {counts.partial} PARTIAL, {counts.empty} EMPTY"
    return {"block": b, "counts": tiles, "words": words, **paths}


def backward(trace: Trace) -> dict[str, Any]:
    """What backward costs in each order, and what it keeps of forward."""
    p, shape = trace.problem, trace.shape
    visited, everything = count(trace.kinds).visited * p.h, count(trace.kinds).total * p.h
    each = {"flash2": PRODUCTS[DQ] + PRODUCTS[DKDV], "flash1": PRODUCTS[BACKWARD1], "standard": 4}
    prices = {
        "flash2": cost.backward(p, shape),
        "flash1": keys_outside.backward(p, shape),
        "standard": cost.standard(p, backward=True),
    }
    tiles = {"flash2": visited, "flash1": visited, "standard": everything}
    orders = [
        {"name": name, "each": str(each[name]), "products": str(each[name] * tiles[name]), "bytes": exactly(price.bytes)}
        for name, price in prices.items()
    ]
    weights, lse = p.h * p.n * p.s * p.itemsize, p.h * p.n * p.lse_itemsize
    kept = [
        {"name": "p", "bytes": exactly(weights), "width": BAR},
        {"name": "l", "bytes": exactly(lse), "width": round(BAR * lse / weights, 1)},
    ]
    error = "–" if trace.backward is None else tiny(trace.backward.error)
    return {"backward_orders": orders, "kept": kept, "gradient": {"error": error}}


PHASES = {
    'head.rows("v"': "load",
    "head.logits(": "scores",
    "np.maximum(state.m": "softmax",
    "alpha, p =": "softmax",
    "= absorb(": "output",
    "acc = alpha": "output",
    "return State(m, alpha": "output",
    "finish(state)": "done",
    "meter.write(": "done",
    "return state.acc": "done",
}
"""Which phase of a step a line of code belongs to, by what stands in it."""


def code() -> list[dict[str, Any]]:
    """The package's own source: the algorithm, and the loop around it; each line with its phase."""
    sources = {"softmax.py": inspect.getsource(softmax), "reference/flash.py": inspect.getsource(flash.forward)}
    return [
        {"name": name, "id": f"code-{x}", "lines": [_line(line) for line in text.splitlines()]}
        for x, (name, text) in enumerate(sources.items())
    ]


def _line(text: str) -> dict[str, str]:
    """A line of code and its phase."""
    return {"text": text, "phase": next((phase for part, phase in PHASES.items() if part in text), "")}


TOKENS, RANKS = 32, 4

HIGH, UNIT, HOPS, WORK = 40, 5, 196, 306
"""Of the ring's picture: from rank to rank, a token, and where the hops and the bars of work begin."""


def ring() -> dict[str, Any]:
    """Causal attention of 32 tokens on 4 ranks in 2 × 2 tiles: what each rank computes, and what it skips, by layout."""
    each, half = TOKENS // RANKS, TOKENS // RANKS // 2
    places = {
        "contiguous": [Positions(each, r * each) for r in range(RANKS)],
        "striped": [Positions(each, r, RANKS) for r in range(RANKS)],
        "zigzag": [
            Positions.of(np.r_[r * half : (r + 1) * half, TOKENS - (r + 1) * half : TOKENS - r * half]) for r in range(RANKS)
        ],
    }
    found = {name: [_rank(rows, r) for r in range(RANKS)] for name, rows in places.items()}
    most = max(work for ranks in found.values() for _, work in ranks)
    layouts = []
    for name, ranks in found.items():
        kinds = {kind.name: "".join(_hops(kinds, kind.name, r) for r, (kinds, _) in enumerate(ranks)) for kind in Tile}
        tokens = "".join(
            f"M{24 + UNIT * t} {HIGH * r + 10}h{UNIT}v22h-{UNIT}z" for r, x in enumerate(places[name]) for t in x.array()[0]
        )
        load = "".join(f"M{WORK} {HIGH * r + 10}h{84 * work / most:.0f}v22H{WORK}z" for r, (_, work) in enumerate(ranks))
        layouts.append({"name": name, "work": [work for _, work in ranks], "tokens": tokens, "load": load, **kinds})
    return {
        "layouts": layouts,
        "sizes": {"tokens": TOKENS, "ranks": RANKS},
        "high": HIGH,
        "hops": HOPS,
        "start": WORK,
        "height": HIGH * RANKS + 24,
    }


def _rank(rows: list[Positions], r: int) -> tuple[list[str], int]:
    """Of one rank, hop by hop, the kind of the keys that have come round; and how many tiles it visits in all."""
    kinds, work = [], 0
    for hop in range(RANKS):
        keys = rows[(r - hop) % RANKS]
        problem = describe(Causal(), rows[r].count, keys.count, positions=(rows[r], keys))
        work += count(table(problem, TileShape(2, 2), BATCH)).visited
        kinds.append(Causal().tile(rows[r], keys).name)
    return kinds, work


def _hops(kinds: list[str], kind: str, r: int) -> str:
    """The hops of one kind as squares, struck through where they are skipped."""
    strike = "l22 22" if kind == "EMPTY" else ""
    return "".join(f"M{HOPS + 26 * hop} {HIGH * r + 10}h22v22h-22z{strike}" for hop, name in enumerate(kinds) if name == kind)
