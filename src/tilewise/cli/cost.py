"""`tilewise cost`: bytes at every level, operations and the least time, of each order of going through the scores."""

from __future__ import annotations

import json as text
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from .. import cost as model
from .._errors import OptionError
from ..cost import Order, Passes
from ..cost.keys_outside import LEAN, LITERAL, RELEASED
from ..cost.orders import decode
from ..cost.roofline import MEMORY
from ..dropout import Dropout
from ..machine import Machine, find
from ..mask import parse
from ..problem import DTYPES, Inputs, Options, Problem
from ..tiles import TileShape
from .console import out, table
from .plan import nothing

ACCOUNTINGS = {"lean": LEAN, "literal": LITERAL, "released": RELEASED}
"""Of FlashAttention-1: nothing twice, the paper's algorithms word for word, the kernels of May 2022."""

PARTS = ("matrix", "exp", *MEMORY)

NOTES = (
    "Standard attention computes every pair; a mask, a scale or dropout costs it nothing unless --passes names it.",
    "HBM: every tensor of every kernel once, as if caches never evict. L2→SM: all that tiles ask for; the papers call it HBM",
    "accesses, and where re-reads miss L2 (uncached), HBM moves as much. Shared memory: by a model of which warps read what.",
    "Times are bounds from the data sheet: parts of a kernel overlap, kernels follow one another; no launch, no latency.",
)


def cost(
    b: int = typer.Option(1, "--b", min=1, help="batch"),
    n: int = typer.Option(8192, "--n", min=1, help="query rows"),
    s: int | None = typer.Option(None, "--s", min=1, help="key rows (default: n)", show_default=False),
    h: int = typer.Option(16, "--h", min=1, help="query heads"),
    g: int | None = typer.Option(None, "--g", min=1, help="key heads (default: h)", show_default=False),
    d: int = typer.Option(128, "--d", min=1, help="head size of queries and keys"),
    e: int | None = typer.Option(None, "--e", min=1, help="head size of values (default: d)", show_default=False),
    dtype: str = typer.Option("bfloat16", help=" | ".join(DTYPES)),
    mask: str = typer.Option("full", help="such as 'causal & window(left=1023)'"),
    dropout: float = typer.Option(0.0, help="chance by which a probability is dropped"),
    machine: str = typer.Option("h100", help="t4, a100, rtx4090, h100, h200, b200, mi300x, ... or cpu, which is measured"),
    block_m: int = typer.Option(128, min=1, help="query rows of a tile"),
    block_n: int = typer.Option(64, min=1, help="key rows of a tile"),
    passes: str = typer.Option(
        "", help="kernels of standard attention: 'scale,mask-add|mask-fill|mask-torch,dropout,product,copies'"
    ),
    accounting: str = typer.Option("lean", help="of FlashAttention-1: lean, literal or released"),
    splits: int = typer.Option(1, min=1, help="also the keys split among so many programs (decode)"),
    ranks: int = typer.Option(1, min=1, help="also what a ring of so many ranks sends"),
    json: Path | None = typer.Option(None, help="also write every number into this file"),
) -> None:
    """Print what attention costs on a machine: standard, FlashAttention-1 and FlashAttention-2, forward and backward."""
    options = Options(parse(mask), dropout=Dropout(dropout, seed=0) if dropout else None)
    problem = describe((b, n, n if s is None else s), (h, g or h), (d, e or d), dtype, options)
    device = find(machine)
    device.rate(dtype)
    if accounting not in ACCOUNTINGS:
        raise OptionError(f"accounting {accounting!r} is unknown; there are {', '.join(ACCOUNTINGS)}")
    shape, chosen = TileShape(block_m, block_n), Passes.parse(passes)
    found = model.orders(problem, device, shape, chosen, ACCOUNTINGS[accounting])
    if splits > 1 or problem.n == 1:
        found.append(decode(problem, block_n, splits))
    console = out()
    head(console, problem, device, mask)
    for way in ("forward", "backward"):
        show(console, problem, device, way, [order for order in found if way in order.kernels])
    if ranks > 1:
        show_ring(console, problem, device, ranks)
    for note in NOTES:
        console.print(f"[dim]{note}[/]", soft_wrap=True)
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
        json.write_text(text.dumps(record(problem, device, mask, found, ranks), indent=1, ensure_ascii=False) + "\n")
        console.print(f"wrote {json}", soft_wrap=True)


def describe(rows: tuple, heads: tuple, sizes: tuple, dtype: str, options: Options) -> Problem:
    """The problem of (b, n, s) rows, (h, g) heads and sizes (d, e), without any memory behind it."""
    (b, n, s), (h, g), (d, e) = rows, heads, sizes
    q, k, v = (nothing(shape, dtype, "cpu") for shape in ((b, n, h, d), (b, s, g, d), (b, s, g, e)))
    problem = Problem.describe(Inputs(q, k, v), options)
    problem.check_values()
    return problem


def head(console: Console, problem: Problem, device: Machine, mask: str) -> None:
    """What is asked, and what of it is useful."""
    p = problem
    sizes = f"b={p.b} n={p.n} s={p.s} h={p.h} g={p.g} d={p.d} e={p.e}"
    console.print(Text.assemble((sizes, "bold"), f", {p.dtype}, {mask}, on ", (device.name, "bold")))
    useful = [model.useful_flops(problem, way) for way in (False, True)]
    line = f"useful: {number(useful[0])} FLOP forward, {number(useful[1])} backward (visible pairs; two products and five); "
    line += f"ridge {device.ridge(p.dtype):.0f} FLOP/B of HBM"
    console.print(f"[dim]{line}[/]\n", soft_wrap=True)


def show(console: Console, problem: Problem, device: Machine, way: str, found: list[Order]) -> None:
    """Two tables of one direction: what is done and moved, and in what time it could be."""
    moved = table("order", "tiles", "FLOP", "exp", "HBM", "L2→SM", "shared", "FLOP/B", title=way)
    taken = table("order", *PARTS, "at least", "uncached")
    for made in (moved, taken):
        for column in made.columns[1:]:
            column.justify, column.no_wrap = "right", True
    for order in found:
        bound, bare = (order.roofline(way, device, problem.dtype, cached) for cached in (True, False))
        moved.add_row(order.name, *cells(order, way, device))
        parts = [seconds(bound.seconds.get(part)) for part in PARTS]
        taken.add_row(order.name, *parts, *(f"{seconds(one.bound)} {one.binds}" for one in (bound, bare)))
    console.print(moved)
    console.print(taken)


def cells(order: Order, way: str, device: Machine) -> list[str]:
    """What is done and moved, for the eye."""
    price, (r, c) = order.cost(way), order.shape
    intensity = number(price.flops / price.least_bytes) if price.least_bytes else "–"
    moved = [f"{number(x)}B" for x in (price.least_bytes, price.bytes, order.on_chip(way, device))]
    return [f"{r} × {c}", number(price.flops), number(price.exponentials), *moved, intensity]


def show_ring(console: Console, problem: Problem, device: Machine, ranks: int) -> None:
    """What each rank of a ring sends, and how long its link needs."""
    one = model.ring(problem, ranks)
    rows = table("ring", "hops", "sent by a rank", "link", title=f"a ring of {ranks}", right="hops")
    for name, hops, sent in (
        ("forward: k, v", one.hops, one.sent_bytes),
        ("backward: k, v, dk, dv", one.backward_hops, one.backward_sent_bytes),
    ):
        rows.add_row(name, str(hops), f"{number(sent)}B", seconds(sent / device.link if device.link else None))
    rows.add_row("o and lse between steps, own memory", "–", f"{number(one.state_bytes)}B", "–")
    console.print(rows)


def record(problem: Problem, device: Machine, mask: str, found: list[Order], ranks: int) -> dict[str, Any]:
    """Every number, as JSON names it."""
    p = problem
    rows = []
    for order in found:
        for way in order.kernels:
            price, (bound, bare) = order.cost(way), (order.roofline(way, device, p.dtype, cached) for cached in (True, False))
            rows.append(
                {
                    "order": order.name, "pass": way, "block_m": order.shape.block_m, "block_n": order.shape.block_n,
                    "flops": price.flops, "exponentials": price.exponentials, "least_bytes": price.least_bytes,
                    "read_bytes": price.read_bytes, "write_bytes": price.write_bytes,
                    "on_chip_bytes": order.on_chip(way, device),
                    "tensors": {name: moved._asdict() for name, moved in price.tensors.items()},
                    "seconds": bound.seconds, "bound_s": bound.bound, "binds": bound.binds, "uncached_bound_s": bare.bound,
                }
            )  # fmt: skip
    sizes = {name: getattr(p, name) for name in ("b", "n", "s", "h", "g", "d", "e", "dtype")}
    useful = {way: model.useful_flops(p, way == "backward") for way in ("forward", "backward")}
    ring = {"ring": {"ranks": ranks, **model.ring(p, ranks)._asdict()}} if ranks > 1 else {}
    return {"problem": {**sizes, "mask": mask}, "machine": device.name, "useful_flops": useful, "orders": rows, **ring}


def seconds(x: float | None) -> str:
    """A time for the eye; a dash where it is not known."""
    if x is None:
        return "–"
    for unit, scale in (("s", 1), ("ms", 1e3), ("µs", 1e6)):
        if x * scale >= 0.9995:
            return f"{x * scale:.3g} {unit}"
    return f"{x * 1e9:.3g} ns"


def number(x: float) -> str:
    """Three digits and a decimal prefix."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(x) < 999.5:
            return f"{x:.3g} {prefix}"
        x /= 1000
    return f"{x:.3g} P"
