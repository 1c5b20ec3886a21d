"""`tilewise page`: a run of the reference as one HTML file that explains itself, with no network."""

from __future__ import annotations

from pathlib import Path

import typer

from .._errors import OptionError
from ..explain import tour
from ..explain.facts import exactly
from ..explain.limits import Measured
from ..explain.tour import Run, Sizes
from ..explain.words import LANGUAGES
from ..problem import DTYPES
from ..tiles import TileShape
from .console import out
from .paper import load
from .trace import ask

SETTING = {"standard": ("standard", "mask-add,dropout"), "flash": ("tilewise", "")}
"""Whose rows of a record stand beside the paper's figure 2."""


def page(
    mask: str | None = typer.Argument(None, help="such as 'causal & window(left=3)'; none, and no sizes: a tour of four runs"),
    also: list[str] = typer.Option([], help="one more mask on the same numbers, as often as wanted", show_default=False),
    n: int | None = typer.Option(None, "--n", min=1, help="query rows (default: 64)", show_default=False),
    s: int | None = typer.Option(None, "--s", min=1, help="key rows (default: n)", show_default=False),
    h: int = typer.Option(1, "--h", "--heads", min=1, help="query heads"),
    g: int | None = typer.Option(None, "--g", "--kv-heads", min=1, help="key heads (default: h)", show_default=False),
    d: int = typer.Option(16, "--d", min=1, help="head size of queries and keys"),
    e: int | None = typer.Option(None, "--e", min=1, help="head size of values (default: d)", show_default=False),
    block_m: int = typer.Option(16, "--block-m", "--br", min=1, help="query rows of a tile"),
    block_n: int = typer.Option(16, "--block-n", "--bc", min=1, help="key rows of a tile"),
    dtype: str = typer.Option("float16", help=f"whose bytes are counted: {' | '.join(DTYPES)}"),
    seed: int = typer.Option(0, min=0, help="of the random numbers"),
    npz: Path | None = typer.Option(None, help="take q 'n h d', k 's g d' and v 's g e' from this file instead"),
    backward: bool = typer.Option(True, help="trace the gradients of the first run too"),
    device: str = typer.Option("h200", help="whose roofline it opens with: t4, a100, rtx4090, h100, h200, b200, mi300x, ..."),
    measured: list[Path] = typer.Option([], help="records of `tilewise paper --measure` to show", show_default=False),
    lang: str = typer.Option("en", help="the language it opens in: en or zh"),
    output: Path = typer.Option(Path("out/page.html"), "--output", "-o", help="the file to write"),
) -> None:
    """Write the explainer page: your shapes, mask and numbers, folded tile by tile, every byte counted. It needs no network."""
    from ..explain.page import render  # needs jinja2

    if lang not in LANGUAGES:
        raise OptionError(f"lang must be one of {', '.join(LANGUAGES)}, got {lang!r}")
    if mask is None and n is None and npz is None and not also:
        runs = tour.default()
    else:
        rows = n or 64
        sizes, shape = Sizes(rows, s or rows, h, g or h, d, e or d), TileShape(block_m, block_n)
        texts = list(dict.fromkeys(["causal" if mask is None else mask, *also]))
        numbers = (sizes, seed, npz)
        runs: list[Run] = [ask(text, numbers, shape, dtype, backward and not i) for i, text in enumerate(texts)]
        runs.append(tour.row(tour.ROW))
    text = render(runs, lang, device, [record(path) for path in measured])
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
    out().print(f"wrote {output}, {exactly(len(text.encode()))}: open it in any browser", soft_wrap=True)


def record(path: Path) -> Measured:
    """What a record says of the setting of figure 2, forward and backward together."""
    found, gb, ms = load(path), {}, {}
    for who, (name, passes) in SETTING.items():
        rows = found.find("figure 2", name, passes)
        if rows:
            ms[who] = sum(row["ms"] for row in rows)
        if rows and all(row["dram_bytes"] is not None for row in rows):
            gb[who] = sum(row["dram_bytes"] for row in rows) / 1e9
    return Measured(found.device, gb, ms)
