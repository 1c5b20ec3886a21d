"""`tilewise demo`: three demonstrations and a picture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich.text import Text

from .. import cost
from .. import demo as shows
from ..demo import Long, Measured
from ..explain import tilemap
from . import console

TOLERANCE = 1e-5
"""How far embeddings may lie apart: float32 rounding through six layers is ten times less."""


def demo(
    quick: bool = typer.Option(False, "--quick", help="4,096 tokens instead of 16,384"),
    out: Path = typer.Option(Path("out/demo"), help="where the picture goes"),
) -> None:
    """Show the algorithm on four numbers, a pretrained model running on it, and what it saves on a long sequence."""
    long = Long(4096 if quick else 16384)
    right = [fold(), sentences(), compare(long)]
    picture(long, out)
    raise typer.Exit(0 if all(right) else 1)


def fold() -> bool:
    """Part 1: one row in two blocks, by `tilewise.softmax`."""
    steps = shows.fold()
    rows = console.table("logits seen", "m", "ℓ", "o", title="1  A row of logits, two at a time", right="m ℓ o")
    for step in steps:
        rows.add_row(step.keys, f"m={step.m:.0f}", f"ℓ={step.l:.3f}", f"{step.o:.3f}")
    console.out().print(rows)
    two, one = np.array(steps[-2][1:]), np.array(steps[-1][1:])
    same = bool((np.abs(two - one) <= 4 * np.finfo(np.float64).eps * one).all())
    console.out().print(
        "Two blocks give what the whole row gives.\n" if same else "[red]Two blocks differ from the whole row.[/]\n"
    )
    return same


def sentences() -> bool:
    """Part 2: sentence embeddings of a pretrained model, on torch's attention and on tilewise."""
    say(f"loading MiniLM and embedding {len(shows.SENTENCES)} sentences, twice")
    theirs, ours = shows.embed("sdpa"), shows.embed("tilewise")
    title = "2  all-MiniLM-L6-v2, pretrained: the nearest sentence to each"
    rows = console.table("sentence", "nearest", "sdpa", "tilewise", title=title, right="sdpa tilewise")
    for column in rows.columns[:2]:
        column.overflow, column.no_wrap, column.max_width = "ellipsis", True, max(12, (console.out().width - 32) // 2)
    found = zip(shows.SENTENCES, shows.neighbours(theirs), shows.neighbours(ours), strict=True)
    for sentence, (_, theirs_cosine), (nearest, cosine) in found:
        rows.add_row(sentence, shows.SENTENCES[nearest], f"{theirs_cosine:.4f}", f"{cosine:.4f}")
    console.out().print(rows)
    difference = float(np.abs(theirs - ours).max())
    close = difference <= TOLERANCE
    verdict = Text("same embeddings" if close else "DIFFERENT embeddings", style="green" if close else "bold red")
    console.out().print(
        verdict.append(f": they differ by at most {difference:.1e} (limit {TOLERANCE:.0e})\n", style="default not bold")
    )
    return close


def compare(long: Long) -> bool:
    """Part 3: time, memory, error and traffic over one long sequence, storing the scores and not; whether tilewise is right:
    no further from the exact answer than twice standard attention, give or take a rounding of the largest value."""
    say(f"the exact answer of {len(long.rows())} sampled rows, in float64")
    exact = long.exact()
    free = shows.available_bytes()
    measured: dict[str, Measured] = {}
    for name in shows.CONTENDERS:
        if name == "standard" and free is not None and free < 1.3 * long.standard_bytes:
            say(f"leaving out standard attention: it needs {size(long.standard_bytes)} and {size(free)} is free")
            continue
        say(f"{name} attention over {long.n:,} tokens, in a process of its own")
        measured[name] = shows.measure(name, long.n)
    plan = long.plan()
    tiles, stored = plan.forward_cost, cost.standard(plan.problem)
    title = f"3  {long.n:,} tokens, causal, one head of size {shows.HEAD_SIZE}, float32, forward"
    rows = console.table("", "standard", "tilewise", "ratio", title=title, right="standard tilewise ratio")
    for name, field, show in (
        ("time", "seconds", lambda x: f"{x:.3f} s"),
        ("peak memory of the process", "peak_bytes", size),
        ("  added by attention", "added_bytes", size),
    ):
        rows.add_row(name, *both([getattr(measured[c], field) if c in measured else None for c in shows.CONTENDERS], show))
    rows.add_row("bytes to and from memory, counted", *both([stored.bytes, tiles.bytes], size))
    rows.add_row("multiply-adds", *both([stored.flops / 2, tiles.flops / 2], lambda x: f"{x / 1e9:.1f} G"))
    errors = [measured[c].error(exact) if c in measured else None for c in shows.CONTENDERS]
    rows.add_row("largest error against float64", *both(errors, lambda x: f"{x:.1e}"))
    console.out().print(rows)
    shape, visited = plan.config.shape, tiles.full_tiles + tiles.partial_tiles
    console.out().print(
        f"tiles of {shape.block_m} × {shape.block_n}: {visited:,} visited "
        f"({tiles.full_tiles:,} FULL, {tiles.partial_tiles:,} PARTIAL), {tiles.empty_tiles:,} skipped\n"
    )
    allowed = 2 * (errors[0] or 0.0) + float(np.abs(exact).max() * np.finfo(np.float32).eps)
    right = errors[1] is not None and errors[1] <= allowed
    if not right:
        console.out().print(f"[bold red]WRONG[/]: an error of at most {allowed:.1e} was allowed\n")
    return right


def picture(long: Long, folder: Path) -> None:
    """Part 4: the tile map of that problem."""
    say("drawing the tile map")
    folder.mkdir(parents=True, exist_ok=True)
    plan, path = long.plan(), folder / "tiles.png"
    shape = plan.config.shape
    tilemap.save(plan.problem, shape, path, f"causal, {long.n:,} tokens, tiles of {shape.block_m} × {shape.block_n}")
    console.out().print(f"wrote {path}", soft_wrap=True)


def both(values: list, show: Callable[[Any], str]) -> list[str]:
    """Two cells and the first over the second; a dash where one was not measured."""
    shown = ["–" if x is None else show(x) for x in values]
    known = None not in values and values[1] > 0
    return [*shown, f"{values[0] / values[1]:.1f}×" if known else "–"]


def size(count: float) -> str:
    """Bytes for the eye."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit != "MiB" else f"{count:.1f} MiB"
        count /= 1024
    return f"{count:.2f} GiB"


def say(text: str) -> None:
    """A line of progress."""
    console.err().print(f"[dim]… {text}[/]")
