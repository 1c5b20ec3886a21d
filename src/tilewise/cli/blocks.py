"""`tilewise blocks`: which tile the model would choose for a machine and a head size, and why."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.text import Text

from ..cost import keys_outside
from ..cost.blocks import FRUGAL, STAGES, Choice, choices, fit, footprint, paper_blocks, weigh
from ..machine import Machine, find
from ..mask import parse
from ..problem import DTYPES, Options, Problem
from ..tiles import TileShape
from .console import out, table
from .cost import describe, number, seconds

SHOWN = 5
"""Tiles printed, best first."""


def blocks(
    machine: str = typer.Argument("h100", help="t4, a100, rtx4090, h100, h200, b200, mi300x, ... or cpu, which is measured"),
    d: int = typer.Option(128, "--d", min=1, help="head size of queries and keys"),
    e: int | None = typer.Option(None, "--e", min=1, help="head size of values (default: d)", show_default=False),
    n: int = typer.Option(4096, "--n", min=1, help="query and key rows of the problem that tiles are weighed on"),
    dtype: str = typer.Option("bfloat16", help=" | ".join(DTYPES)),
    mask: str = typer.Option("full", help="such as 'causal & window(left=1023)'"),
) -> None:
    """Choose B_r and B_c for a machine and a head size by the cost model, and say what fits, what it moves and what takes the
    time; beside it what the paper's B_c = ⌈M/4d⌉ gives."""
    device = find(machine)
    device.rate(dtype)
    problem = describe((1, n, n), (1, 1), (d, e or d), dtype, Options(parse(mask)))
    found = choices(problem, device)
    console = out()
    console.print(Text.assemble((device.name, "bold"), f", d={d} e={e or d}, {dtype}, {mask}, forward, one head of {n} rows\n"))
    if not found:
        console.print(f"[yellow]no tile of {device.rows} query rows or more fits {device.name} at this head size[/]")
        raise typer.Exit(1)
    powers = [one for one in found if all(x & (x - 1) == 0 for x in one.shape)]
    theirs = paper_blocks(device.shared_bytes // problem.itemsize, d)
    rows = [("chosen", found[0]), *(("powers of two", one) for one in powers[:1])]
    rows += [("next", one) for one in found[1:SHOWN]]
    rows.append(("paper's rule", weigh(theirs, fit(theirs, device, problem), problem, device)))
    tabulate(console, rows, device)
    for line in (*why(found[0], device), *paper(theirs, found[0], problem, device)):
        console.print(line, soft_wrap=True)


def tabulate(console: Console, rows: list[tuple[str, Choice]], device: Machine) -> None:
    """A line a tile: what it takes of a multiprocessor, what it moves, in what time."""
    made = table("", "B_r × B_c", "shared", "registers", "fit", "L2→SM", "arithmetic", "memory")
    for column in made.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for name, one in rows:
        style = "bold" if name == "chosen" else "yellow" if not one.fit.at_once else ""
        made.add_row(
            name, f"{one.shape.block_m} × {one.shape.block_n}",
            share(one.fit.shared_bytes, device.block_bytes), share(one.fit.register_bytes, device.register_bytes),
            str(one.fit.at_once or "none"), f"{number(one.cost.bytes)}B",
            seconds(one.arithmetic), f"{seconds(one.memory[one.slowest])} {one.slowest}",
            style=style,
        )  # fmt: skip
    console.print(made)


def share(taken: int, there: int) -> str:
    """KB of what there is."""
    return f"{taken / 1024:.0f} KB {taken / there:>4.0%}" if there else "–"


def why(one: Choice, device: Machine) -> list[str]:
    """What decided."""
    (r, c), slack = one.shape, one.arithmetic / one.memory[one.slowest]
    asked = f"{number(one.cost.bytes)}B, {one.cost.flops / max(1, one.cost.bytes):.0f} FLOP/B"
    level = "shared memory" if one.slowest == "shared" else one.slowest
    verdict = f"{level} is {slack:.1f} times as fast as arithmetic needs" if slack >= 1 else f"still, {level} takes longest"
    places = (
        f"q and {STAGES} tiles of k and v lie in shared memory, o, s and p in registers, of which an eighth is spare"
        if device.register_bytes
        else f"q, {STAGES} tiles of k and v, o and s lie together in a core's own cache"
    )
    return [
        f"[bold]B_r = {r}[/]: each block of B_r rows asks for all of k and v, so bytes fall as 1/B_r: {asked}; {verdict}.",
        f"[bold]B_c = {c}[/]: o is rescaled once a tile, so wide tiles do it less often. Of tiles within {FRUGAL - 1:.0%} of"
        " the fastest, the one that asks for fewest bytes.",
        f"[bold]Fit[/]: so many tiles at once on a multiprocessor; {places}.",
    ]


def paper(theirs: TileShape, ours: Choice, problem: Problem, device: Machine) -> list[str]:
    """The paper's rule: what it leaves out, and what it is for."""
    p, room = problem, device.shared_bytes // problem.itemsize
    parts = footprint(theirs, p.d, p.e)
    four, whole = (sum(v for k, v in parts.items() if k in names) / room for names in ("q k v o".split(), list(parts)))
    first, second = keys_outside.forward(p, theirs).bytes, weigh(theirs, ours.fit, p, device).cost.bytes
    return [
        f"[bold]Paper's rule[/]: B_c = ⌈M/4d⌉ = {theirs.block_n}, B_r = min(⌈M/4d⌉, d) = {theirs.block_m} for M = {room:,}"
        f" numbers; q, k, v and o take {four:.2f} M, with s and the statistics {whole:.2f} M.",
        f"  It is made for key tiles outside, where it asks for {number(first)}B; query tiles outside, {number(second)}B,"
        f" because there B_r alone counts, and it is at most d. {ours.shape.block_m} rows ask for {number(ours.cost.bytes)}B.",
    ]
