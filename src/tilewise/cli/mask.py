"""`tilewise mask`: the 0/1 grid of a mask and its tiles."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import typer
from rich.console import Console
from rich.text import Text

from ..explain import tilemap
from ..mask import Tile, parse
from ..problem import Inputs, Options, Problem
from ..tiles import TileShape, table, visible_pairs
from .console import out

SIDE = 32
"""Tiles a side at most, where no block size is given."""

TALL = 128
"""Rows a printed grid has at most."""

ON, OFF = "bold cyan", "bright_black"
STYLES = {Tile.EMPTY: "bright_black", Tile.PARTIAL: "yellow", Tile.FULL: "bold cyan"}


def mask(
    text: str = typer.Argument(..., help="such as 'causal & window(left=3)'", metavar="MASK"),
    n: int = typer.Argument(8, min=1, help="query rows"),
    s: int | None = typer.Argument(None, min=1, help="key rows (default: N)", show_default=False),
    block_m: int | None = typer.Option(None, min=1, help="query rows of a tile (default: at most 32 tiles a side)"),
    block_n: int | None = typer.Option(None, min=1, help="key rows of a tile"),
    png: Path | None = typer.Option(None, help="also draw the tile map into this file"),
    svg: Path | None = typer.Option(None, help="also draw the tile map into this file"),
) -> None:
    """Print a mask's 0/1 grid and its tile map: EMPTY tiles are skipped, PARTIAL ones tested, FULL ones taken whole."""
    console = out()
    problem = describe(text, n, n if s is None else s)
    shape = TileShape(block_m or block_for(problem.n), block_n or block_for(problem.s))
    console.print(Text.assemble((text, "bold"), f"  {problem.n} query rows × {problem.s} key rows\n"))
    lines = grid(problem, console.width)
    if lines:
        console.print(Text("\n").join(lines), no_wrap=True)
        console.print()
    else:
        console.print(f"[dim]the {problem.n} × {problem.s} grid does not fit here; its tiles:[/]\n")
    tiles(console, problem, shape)
    for path, kind in ((png, "png"), (svg, "svg")):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            tilemap.save(problem, shape, path, f"{text}, tiles of {shape.block_m} × {shape.block_n}", kind)
            console.print(f"wrote {path}", soft_wrap=True)


def describe(text: str, n: int, s: int) -> Problem:
    """One head of n query rows and s key rows under a mask given as text, without any memory behind it."""
    q, k = (np.broadcast_to(np.float32(0), (1, rows, 1, 1)) for rows in (n, s))
    problem = Problem.describe(Inputs(q, k, k), Options(parse(text)))
    problem.check_values()
    return problem


def block_for(rows: int) -> int:
    """The smallest power of two, from 4 up, that cuts `rows` into at most `SIDE` blocks."""
    return max(4, 2 ** int(np.ceil(np.log2(rows / SIDE))))


def grid(problem: Problem, width: int) -> list[Text]:
    """The 0/1 grid, a line for each query row, with positions as headers; no line at all where `width` cannot hold it."""
    q = problem.layout.queries(slice(0, 1), slice(0, problem.n)).position[0]
    kv = problem.layout.keys(slice(0, 1), slice(0, problem.s)).position[0]
    cell, margin = len(str(kv[-1])), max(3, len(str(q[0])), len(str(q[-1])))
    if problem.n > TALL or margin + 1 + (cell + 1) * problem.s > width:
        return []
    keep = np.broadcast_to(problem.keep(), (1, 1, problem.n, problem.s))[0, 0].astype(int)
    head = Text(" ".join(["q\\k".rjust(margin) + " ", *(str(j).rjust(cell) for j in kv)]), style="dim")
    rows = [
        Text(" ").join(
            [Text(str(i).rjust(margin) + " ", style="dim"), *(Text(str(x).rjust(cell), style=ON if x else OFF) for x in row)]
        )
        for i, row in zip(q, keep, strict=True)
    ]
    return [head, *rows]


def tiles(console: Console, problem: Problem, shape: TileShape) -> None:
    """Print the tile map where it fits, and its counts."""
    kinds = table(problem, shape, slice(0, 1))
    signs = marks(console)
    if kinds.shape[1] * 2 <= console.width and kinds.shape[0] <= TALL:
        for row in kinds:
            console.print(Text.assemble(*((signs[Tile(kind)], STYLES[Tile(kind)]) for kind in row)), no_wrap=True)
        console.print()
    else:
        console.print(f"[dim]{kinds.shape[0]} × {kinds.shape[1]} tiles do not fit here; larger blocks or --png show them[/]")
    counts = tilemap.count(kinds)
    pairs, everything = visible_pairs(problem), problem.n * problem.s
    line = Text(f"tiles of {shape.block_m} × {shape.block_n}: ")
    for kind, number in ((Tile.FULL, counts.full), (Tile.PARTIAL, counts.partial), (Tile.EMPTY, counts.empty)):
        line.append(signs[kind], STYLES[kind]).append(f" {number} {kind.name}   ")
    console.print(line)
    share = f"{pairs:,} of {everything:,} pairs ({pairs / everything:.1%})"
    console.print(f"visits {counts.visited} of {counts.total} tiles; visible: {share}")


def marks(console: Console) -> dict[Tile, str]:
    """Two characters a tile, in letters every terminal has where it must be."""
    plain = not console.encoding.lower().startswith("utf")
    return dict(zip(Tile, (". ", "//", "##") if plain else ("· ", "▒▒", "██"), strict=True))
