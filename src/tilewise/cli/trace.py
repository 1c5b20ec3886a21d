"""`tilewise trace`: a run of the reference, tile by tile: what each step loads and stores, and m and ℓ after it."""

from __future__ import annotations

import json as text
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .._errors import OptionError, ShapeError
from ..explain import tour
from ..explain.encode import Arrays, encode
from ..explain.facts import SIGNS, exactly, number, tiny
from ..explain.scenes import KEPT, size_of
from ..explain.tilemap import count
from ..explain.tour import Run, Sizes
from ..explain.trace import Step, Trace, run
from ..mask import Tile, parse
from ..problem import DTYPES, Inputs, Options
from ..tiles import TileShape
from .console import out, table
from .mask import STYLES

SHOWN = 4
"""Rows of a block whose m and ℓ are printed."""


def trace(
    mask: str = typer.Argument("full", help="such as 'causal & window(left=3)'", metavar="[MASK]"),
    n: int = typer.Option(8, "--n", min=1, help="query rows"),
    s: int | None = typer.Option(None, "--s", min=1, help="key rows (default: n)", show_default=False),
    h: int = typer.Option(1, "--h", "--heads", min=1, help="query heads"),
    g: int | None = typer.Option(None, "--g", "--kv-heads", min=1, help="key heads (default: h)", show_default=False),
    d: int = typer.Option(4, "--d", min=1, help="head size of queries and keys"),
    e: int | None = typer.Option(None, "--e", min=1, help="head size of values (default: d)", show_default=False),
    block_m: int = typer.Option(4, "--block-m", "--br", min=1, help="query rows of a tile"),
    block_n: int = typer.Option(4, "--block-n", "--bc", min=1, help="key rows of a tile"),
    dtype: str = typer.Option("float16", help=f"whose bytes are counted: {' | '.join(DTYPES)}"),
    seed: int = typer.Option(0, min=0, help="of the random numbers"),
    npz: Path | None = typer.Option(None, help="take q 'n h d', k 's g d' and v 's g e' from this file instead"),
    row: str | None = typer.Option(None, help="one row of logits instead, such as '1, 3, 2, 5'; v is 10, 20, 30, ..."),
    show: bool = typer.Option(True, "--text/--no-text", help="print tables"),
    json: Path | None = typer.Option(None, help="also write every number into this file"),
) -> None:
    """Run the reference on real numbers and print the shapes, and for each tile what it moved and m, ℓ and α after it."""
    sizes, shape = Sizes(n, n if s is None else s, h, g or h, d, e or d), TileShape(block_m, block_n)
    made = ask(mask, (sizes, seed, npz), shape, dtype) if row is None else tour.row(logits(row), block_n)
    if show:
        tabulate(out(), made)
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
        arrays = Arrays()
        whole = encode(made.trace, arrays) | {"mask": made.mask, "numbers": made.source}
        json.write_text(text.dumps(whole | {"matrices": list(arrays.texts)}, ensure_ascii=False, sort_keys=True) + "\n")
        out().print(f"wrote {json}", soft_wrap=True)


def ask(mask: str, numbers: tuple[Sizes, int, Path | None], shape: TileShape, dtype: str, backward: bool = False) -> Run:
    """The run that a command line asks for: a mask, which is parsed, on random numbers or on those of a file."""
    sizes, seed, npz = numbers
    inputs, source = (tour.draw(sizes, seed), f"seed {seed}") if npz is None else (load(npz), npz.name)
    return Run(mask, mask, source, run(inputs, Options(parse(mask)), shape, dtype, backward))


def logits(given: str) -> list[float]:
    """The numbers of '1, 3, 2, 5'."""
    try:
        return [float(x) for x in given.replace(",", " ").split()]
    except ValueError:
        raise OptionError(f"row: {given!r} is not a list of numbers such as '1, 3, 2, 5'") from None


def load(path: Path) -> Inputs[np.ndarray]:
    """q, k and v of an .npz file; one that has no axis of heads has one head."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, BadZipFile, AttributeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no .npz file of numbers"
        raise OptionError(f"npz: {path} cannot be read: {why}") from None
    if missing := [name for name in "qkv" if name not in arrays]:
        raise OptionError(f"npz: {path} holds {', '.join(arrays) or 'nothing'}, and no {', '.join(missing)}")
    return Inputs(*(_whole(name, arrays[name]) for name in "qkv"))


def _whole(name: str, x: np.ndarray) -> np.ndarray:
    """An array with axes of batch and heads."""
    if x.ndim not in (2, 3, 4):
        raise ShapeError(f"npz: {name} must have axes 'rows d', 'rows heads d' or '1 rows heads d', got {x.shape}")
    if not np.isfinite(x).all():
        raise OptionError(f"npz: {name} {x.shape} holds numbers that are not finite, which a trace cannot show")
    return x[None, :, None] if x.ndim == 2 else x[None] if x.ndim == 3 else x


def tabulate(console: Console, made: Run) -> None:
    """The shapes, then a line for each step."""
    p, shape, counts = made.trace.problem, made.trace.shape, count(made.trace.kinds)
    title = Text.assemble((made.mask, "bold"), f"  n={p.n} s={p.s} h={p.h} g={p.g} d={p.d} e={p.e}, {p.dtype}, {made.source}\n")
    console.print(title)
    console.print(shapes(made.trace))
    console.print(steps(made.trace))
    loads, stores = (sum(sum(getattr(step, side).values()) for step in made.trace.steps) for side in ("load", "store"))
    console.print(
        f"{counts.full} FULL, {counts.partial} PARTIAL, {counts.empty} EMPTY tiles of {shape.block_m} × {shape.block_n}"
    )
    console.print(
        f"{exactly(loads)} read, {exactly(stores)} written; o differs from the definition by {tiny(made.trace.error)}"
    )


def shapes(made: Trace) -> Table:
    """Every tensor: its shape, its blocks, what lies in memory of it."""
    p, (r, c) = made.problem, made.shape
    rows = table("", "shape", "block", "bytes", right="bytes")
    wholes = {"q": (p.h, p.n, p.d), "k": (p.g, p.s, p.d), "v": (p.g, p.s, p.e), "o": (p.h, p.n, p.e), "lse": (p.h, p.n)}
    cut = {"q": (r, p.d), "k": (c, p.d), "v": (c, p.e), "o": (r, p.e), "lse": (r,)}
    for name in KEPT:
        rows.add_row(SIGNS[name], by(wholes[name]), by(cut[name]), exactly(size_of(p, name)))
    rows.add_row("S, P", by((p.h, p.n, p.s)), by((r, c)), "never stored")
    rows.add_row("m, ℓ", "–", by((r,)), "never stored")
    return rows


def steps(made: Trace) -> Table:
    """A line a step."""
    heads = ["head"] if made.problem.h > 1 else []
    lines = table("step", *heads, "tile", "kind", "loads", "stores", "m", "ℓ", "α", right="step")
    for index, step in enumerate(made.steps):
        kind = Text(step.kind.name, style=STYLES[step.kind])
        moved = [" ".join(f"{SIGNS[name]} {size}" for name, size in side.items()) for side in (step.load, step.store)]
        cells = [str(index), *(str(step.head) for _ in heads), f"{step.i}, {step.j}", kind, *moved, *_states(step)]
        lines.add_row(*cells, style="dim" if step.kind == Tile.EMPTY else "")
    return lines


def _states(step: Step) -> list[str]:
    """m, ℓ and α of the first rows of a block."""
    if step.after is None:
        return ["", "", ""]
    return [" ".join(number(x) for x in side[:SHOWN]) + (" …" if len(side) > SHOWN else "") for side in step.after]


def by(sizes: tuple[int, ...]) -> str:
    return " × ".join(map(str, sizes))
