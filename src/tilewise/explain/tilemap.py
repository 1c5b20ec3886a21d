"""The tile map of a problem: which tiles of the score matrix are skipped, tested pair by pair, or taken whole."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from typing import Any, NamedTuple

import numpy as np

from .._errors import OptionError
from ..mask import Tile
from ..problem import Problem
from ..tiles import TileShape, blocks, table

COLOURS = {Tile.EMPTY: "#f3f1ec", Tile.PARTIAL: "#f2b35e", Tile.FULL: "#1f6f8b"}
"""What each kind of tile is filled with."""

PAIRS = 64 * 64
"""Up to this many pairs, each visible pair gets a dot of its own."""

TICKS = 16
"""At most this many labels along an axis."""

LABELS = 64
"""Characters that the labels along an axis have in all, with room between them."""


class Counts(NamedTuple):
    """How many tiles of one head there are of each kind."""

    full: int
    partial: int
    empty: int

    @property
    def visited(self) -> int:
        """Tiles that are computed."""
        return self.full + self.partial

    @property
    def total(self) -> int:
        return self.full + self.partial + self.empty


def count(kinds: np.ndarray) -> Counts:
    """The tiles of each kind in a `tiles.table`."""
    return Counts(*(int((kinds == kind).sum()) for kind in (Tile.FULL, Tile.PARTIAL, Tile.EMPTY)))


def save(problem: Problem, shape: TileShape, path: str | PathLike[str], title: str = "", format: str | None = None) -> Counts:
    """Draw the tile map of batch entry 0 into `path` and return its counts. `format`: "png", "svg", ...; by default what
    the file's name ends in. Small problems also show each visible pair. Needs matplotlib."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    if problem.n == 0 or problem.s == 0:
        raise OptionError(f"a problem of {problem.n} query rows and {problem.s} key rows has no tiles to draw")
    kinds = table(problem, shape, slice(0, 1))
    counts = count(kinds)
    figure = Figure(figsize=_size(problem), layout="constrained")
    axes = figure.add_subplot()
    _cells(axes, problem, shape, kinds)
    if problem.n * problem.s <= PAIRS:
        _pairs(axes, problem)
    number = {Tile.FULL: counts.full, Tile.PARTIAL: counts.partial, Tile.EMPTY: counts.empty}
    key = [Patch(facecolor=COLOURS[k], edgecolor="#888888", label=f"{k.name}  {number[k]}") for k in reversed(Tile)]
    figure.legend(handles=key, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, format=format, dpi=150)
    return counts


def _size(problem: Problem) -> tuple[float, float]:
    """Width and height in inches: cells keep the proportions of the matrix as far as a page allows."""
    ratio = float(np.clip(problem.n / problem.s, 0.25, 2.5))
    return (6.4, 1.5 + 5.2 * ratio) if ratio <= 1 else (1.5 + 5.2 / ratio, 6.4)


def _cells(axes: Any, problem: Problem, shape: TileShape, kinds: np.ndarray) -> None:
    """Every tile as a cell, to scale, with rows and columns labelled by their positions."""
    from matplotlib.colors import ListedColormap

    rows = np.array([0, *(i.stop for i in blocks(problem.n, shape.block_m))])
    columns = np.array([0, *(j.stop for j in blocks(problem.s, shape.block_n))])
    colours = ListedColormap([COLOURS[kind] for kind in Tile])
    line = 1.2 if kinds.size <= 1024 else 0.3 if kinds.size <= 16384 else 0
    axes.pcolormesh(columns, rows, kinds, cmap=colours, vmin=-0.5, vmax=2.5, edgecolors="white", linewidth=line)
    axes.invert_yaxis()
    q = problem.layout.queries(slice(0, 1), slice(0, problem.n)).position[0]
    kv = problem.layout.keys(slice(0, 1), slice(0, problem.s)).position[0]
    axes.set_xticks(*_ticks(columns, kv))
    axes.set_yticks(*_ticks(rows, q))
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.set_xlabel("key position")
    axes.set_ylabel("query position")
    axes.tick_params(length=0, labelsize=8)
    for side in axes.spines.values():
        side.set_visible(False)
    if 0.25 <= problem.n / problem.s <= 2.5:
        axes.set_aspect("equal")


def _ticks(edges: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """Where tiles begin, thinned out, in the middle of their first row, and the position that is there."""
    most = max(2, min(TICKS, LABELS // (len(str(positions[-1])) + 2)))
    first = edges[:-1][:: -(-(len(edges) - 1) // most)]
    return first + (0.5 if edges[-1] <= 64 else 0), [str(p) for p in positions[first]]


def _pairs(axes: Any, problem: Problem) -> None:
    """A dot for each visible pair of batch entry 0 and head 0."""
    points = list(_visible(problem))
    if points:
        i, j = np.array(points).T
        axes.scatter(j + 0.5, i + 0.5, s=2600 / max(problem.n, problem.s) ** 1.5, c="#222222", linewidths=0)


def _visible(problem: Problem) -> Iterator[tuple[int, int]]:
    for i, j in np.argwhere(np.broadcast_to(problem.keep(), (problem.b, problem.h, problem.n, problem.s))[0, 0]):
        yield int(i), int(j)
