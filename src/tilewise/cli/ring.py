"""`tilewise ring`: a schedule for many devices, what it would take, and why it was chosen."""

from __future__ import annotations

import json as json_
from dataclasses import asdict, replace
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .._errors import OptionError
from ..explain import ringplot
from ..mask import Documents, Mask, parse
from ..problem import DTYPES, Inputs, Options, Problem
from ..ring.choose import Candidate, Choice, choose, method_named
from ..ring.links import MACHINES, Cluster, Link, machine_named
from ..ring.program import Plan
from ..ring.runs import Runs
from ..ring.simulate import Forecast, simulate
from .console import out, table
from .plan import nothing

MOST = 16
"""Ranks, rounds or steps that are listed one by one; of more, the first and the last few are."""

DRAWN = (".svg", ".png", ".pdf")
"""How the name of a drawing may end."""


def ring(
    n: int = typer.Option(65536, "--n", min=1, help="query rows, over all ranks"),
    s: int | None = typer.Option(None, "--s", min=1, help="key rows (default: n)", show_default=False),
    b: int = typer.Option(1, "--b", min=1, help="batch"),
    h: int = typer.Option(64, "--h", min=1, help="query heads"),
    g: int = typer.Option(8, "--g", min=1, help="key heads"),
    d: int = typer.Option(128, "--d", min=1, help="head size of queries and keys"),
    e: int | None = typer.Option(None, "--e", min=1, help="head size of values (default: d)", show_default=False),
    dtype: str = typer.Option("bfloat16", help=" | ".join(DTYPES)),
    mask: str = typer.Option("causal", help="such as 'causal & window(left=1023)'"),
    documents: str | None = typer.Option(None, help="lengths of packed documents, such as '3000 500 8500'; they fill n"),
    ranks: int = typer.Option(8, min=1, help="devices"),
    node: int = typer.Option(8, min=1, help="devices of a node"),
    share: int = typer.Option(1, min=1, help="devices of a node that share one network card"),
    machine: str = typer.Option("h200", help=" | ".join(MACHINES)),
    near: float | None = typer.Option(None, help="GB/s between devices of a node (default: the machine's)", show_default=False),
    far: float | None = typer.Option(None, help="GB/s of a network card (default: the machine's)", show_default=False),
    forward_only: bool = typer.Option(False, "--forward-only", help="judge forward alone"),
    layout: str | None = typer.Option(None, help="only this one: contiguous, zigzag, striped, balanced or replicated"),
    method: str | None = typer.Option(None, help="only this one, such as 'ring+1' or 'direct by 4, heads over 2'"),
    memory: float | None = typer.Option(None, help="GiB that the buffers of a device may take"),
    draw: Path | None = typer.Option(None, help="draw the schedule into this .svg, .png or .pdf file"),
    json: Path | None = typer.Option(None, help="also write everything into this file"),
) -> None:
    """Choose who holds which rows and how keys travel, and print owners, work, bytes, times and memory. Runs nothing."""
    _check_options({"near": near, "far": far, "memory": memory}, ranks, node, draw)
    pieces = parse(mask)
    if documents is not None:
        pieces, mask = pieces & packed(documents, n), f"{mask} & documents"
    problem = describe((b, n, n if s is None else s, h, g, d, e or d), dtype, pieces)
    cluster = Cluster(_machine(machine, near, far), node, min(share, node))
    only = None if method is None else method_named(method)
    limit = None if memory is None else int(memory * 2**30)
    choice = choose(problem, ranks, cluster, not forward_only, layout, only, limit)
    console = out()
    console.print(f"[bold]{mask}[/], {problem.n} × {problem.s} rows, {h}/{g} heads of {d}, {dtype}; {ranks} ranks in {cluster}")
    console.print(f"[dim]rates: {cluster.machine.source}[/]\n")
    print_candidates(console, choice)
    print_owners(console, choice)
    print_work(console, choice.best)
    print_forecasts(console, choice)
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
        json.write_text(json_.dumps(report(choice, mask), indent=1) + "\n")
        console.print(f"wrote {json}", soft_wrap=True)
    if draw is not None:
        draw.parent.mkdir(parents=True, exist_ok=True)
        plan = Plan(problem, choice.q, choice.kv, choice.method, backward=False)
        ringplot.save(plan, simulate(plan, cluster, keep=True), draw, f"{mask}: {choice.layout}, {choice.method}")
        console.print(f"wrote {draw}", soft_wrap=True)


def _check_options(numbers: dict[str, float | None], ranks: int, node: int, draw: Path | None) -> None:
    """Raise for what no cluster has and no file can hold."""
    for name, x in numbers.items():
        if x is not None and not (isfinite(x) and x > 0):
            raise OptionError(f"{name} must be a finite number above 0, got {x}")
    if ranks > node and ranks % node:
        raise OptionError(f"node: {ranks} ranks do not form nodes of {node}")
    if draw is not None and draw.suffix.lower() not in DRAWN:
        raise OptionError(f"draw: a drawing ends in one of {', '.join(DRAWN)}, got {draw.name!r}")


def describe(sizes: tuple[int, ...], dtype: str, mask: Mask) -> Problem:
    """The problem of these sizes (b n s h g d e), without any memory behind it."""
    b, n, s, h, g, d, e = sizes
    q, k, v = (nothing(shape, dtype, "cpu") for shape in ((b, n, h, d), (b, s, g, d), (b, s, g, e)))
    problem = Problem.describe(Inputs(q, k, v), Options(mask))
    problem.check_values()
    return problem


def packed(text: str, n: int) -> Documents:
    """Documents of the lengths in `text`, which n rows hold exactly."""
    try:
        lengths = [int(x) for x in text.replace(",", " ").split()]
    except ValueError:
        raise OptionError(f"documents must be lengths such as '3000 500', got {text!r}") from None
    if min(lengths, default=0) < 1 or sum(lengths) != n:
        raise OptionError(f"documents: lengths must be positive and add up to n = {n}, got {sum(lengths)}")
    return Documents.from_lengths(lengths)


def _machine(name: str, near: float | None, far: float | None) -> Any:
    made = machine_named(name)
    links = {key: Link(getattr(made, key).alpha_s, 1e9 * x) for key, x in (("near", near), ("far", far)) if x is not None}
    return replace(made, **links)


def print_candidates(console: Console, choice: Choice) -> None:
    """Every candidate with its time, and why the first one was chosen."""
    columns = "layout", "method", "ms", "efficiency", "GiB", "what binds"
    made = _numbers(table(*columns, title="what was tried"), "layout", "method", "what binds")
    for x in (*choice.candidates, *choice.refused):
        style = "bold cyan" if x is choice.best else "dim" if x in choice.refused else ""
        made.add_row(*_cells(x, "too much memory" if x in choice.refused else x.binds), style=style)
    console.print(made)
    for line in choice.skipped:
        console.print(f"[dim]{line}[/]", soft_wrap=True)
    console.print(Text.assemble(("chosen: ", "bold"), choice.why, "\n"), soft_wrap=True)


def _cells(x: Candidate, last: str) -> list[str]:
    return [x.layout, str(x.method), f"{1e3 * x.total_s:.3f}", f"{x.efficiency:.1%}", f"{x.memory / 2**30:.2f}", last]


def print_owners(console: Console, choice: Choice) -> None:
    """Who holds what, and what that comes to."""
    best = choice.best
    work, mean = best.forward.work.sum(0), best.forward.work.sum(0).mean() or 1
    columns = "rank", "query rows", "which", "pairs / mean", "MB sent", "of them far", "GiB"
    made = _numbers(table(*columns, title="ranks"), "which")
    sent, far = (np.sum([getattr(x, name) for x in best.passes], axis=0) for name in ("sent_bytes", "far_bytes"))
    memory = np.max([x.memory for x in best.passes], axis=0)
    for r in listed(best.q.world):
        if r is None:
            made.add_row("…")
            continue
        rows = best.q.shards[r]
        figures = f"{work[r] / mean:.4f}", f"{sent[r] / 1e6:.1f}", f"{far[r] / 1e6:.1f}", f"{memory[r] / 2**30:.2f}"
        made.add_row(str(r), str(rows.count), spell(rows), *figures)
    console.print(made)


def print_work(console: Console, best: Candidate) -> None:
    """Visible pairs of each rank in each round, as multiples of an even share of all work."""
    work = best.forward.work
    share = work.sum() / work.shape[1] or 1
    few = best.q.world <= MOST
    names = [f"rank {r}" for r in range(best.q.world)] if few else ["least", "mean", "most"]
    made = _numbers(table("round", *names, title="forward: pairs of a rank by round, 1 = an even share of all"))
    for j in listed(len(work)):
        if j is None:
            made.add_row("…")
            continue
        row = work[j] / share
        figures = row if few else np.array([row.min(), row.mean(), row.max()])
        made.add_row(str(j), *(f"{x:.4f}" for x in figures))
    console.print(made)


def print_forecasts(console: Console, choice: Choice) -> None:
    """Time, efficiency and losses of each direction, and its steps."""
    for name, x in zip(("forward", "backward"), choice.best.passes, strict=False):
        losses = ", ".join(f"{key} {share:.1%}" for key, share in x.losses.items())
        alone = f"one device alone {1e3 * x.alone_s:.3f} ms"
        console.print(
            f"[bold]{name}[/] {1e3 * x.total_s:.3f} ms, efficiency [bold]{x.efficiency:.1%}[/] ({alone}); lost to: {losses}; "
            f"waiting {1e3 * x.waited_s.mean():.3f} ms a rank; {x.memory.max() / 2**30:.2f} GiB of buffers",
            soft_wrap=True,
        )
        columns = "step", "channel", "messages", "MB", "ms", "most waited ms"
        made = _numbers(table(*columns, title=f"{name}: what is sent"), "channel")
        for j in listed(len(x.steps)):
            made.add_row(*(["…"] if j is None else _step(x, j)))
        if x.steps:
            console.print(made)


def _step(x: Forecast, j: int) -> list[str]:
    step = x.steps[j]
    times = f"{1e3 * step.longest_s:.3f}", f"{1e3 * step.waited_s:.3f}"
    return [str(step.number), step.channel, str(step.messages), f"{step.bytes / 1e6:.1f}", *times]


def _numbers(made: Table, *words: str) -> Table:
    """The table with every column but `words` set flush right."""
    for column in made.columns:
        column.justify = "left" if column.header in words else "right"
    return made


def listed(count: int) -> list[int | None]:
    """Indices to list, with None for those that are left out."""
    if count <= MOST:
        return list(range(count))
    return [*range(MOST - 4), None, *range(count - 3, count)]


def spell(rows: Runs) -> str:
    """Rows as the runs that they are, the first few of them.

    >>> spell(Runs((range(0, 4), range(8, 16, 2))))
    '0–3, 8–14 by 2'
    """
    runs = [f"{x[0]}–{x[-1]}" + (f" by {x.step}" if x.step > 1 else "") for x in rows.ranges[:3]]
    return ", ".join(runs) + (f" and {len(rows.ranges) - 3} more" if len(rows.ranges) > 3 else "") or "none"


def report(choice: Choice, mask: str) -> dict[str, Any]:
    """Everything that is printed, for programs."""
    p, best = choice.problem, choice.best
    return {
        "problem": {name: getattr(p, name) for name in ("b", "n", "s", "h", "g", "d", "e", "dtype")} | {"mask": mask},
        "cluster": {"ranks": best.q.world, **asdict(choice.cluster)},
        "layout": choice.layout,
        "method": str(choice.method),
        "why": choice.why,
        "owners": [[[x.start, x.stop, x.step] for x in rows.ranges] for rows in best.q.shards],
        "passes": {name: _figures(x) for name, x in zip(("forward", "backward"), best.passes, strict=False)},
        "candidates": [
            {"layout": x.layout, "method": str(x.method), "seconds": x.total_s, "efficiency": x.efficiency,
             "memory_bytes": x.memory, "losses": x.losses, "fits": x not in choice.refused}
            for x in (*choice.candidates, *choice.refused)
        ],
        "skipped": list(choice.skipped),
    }  # fmt: skip


def _figures(x: Forecast) -> dict[str, Any]:
    return {
        "seconds": x.total_s,
        "alone_seconds": x.alone_s,
        "efficiency": x.efficiency,
        "balance": x.balance,
        "losses": x.losses,
        "work": x.work.tolist() if x.work.size <= 65536 else None,
        "waited_seconds": x.waited_s.tolist(),
        "sent_bytes": x.sent_bytes.tolist(),
        "far_bytes": x.far_bytes.tolist(),
        "memory_bytes": x.memory.tolist(),
        "steps": [step._asdict() for step in x.steps],
    }
