"""`tilewise paper`: claims about memory traffic, counted: published, model and measured, none scaled to another."""

from __future__ import annotations

import json as text
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table

from .. import demo
from .._errors import OptionError
from ..bench.report import Note, Record
from ..bench.traffic import WORKLOADS, TrafficRow, Workload, measure, predict
from ..cost import paper as model
from ..explain import iomodel, ioplot
from ..machine import find
from .console import check_device, err, out, progress, table
from .cost import seconds

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
"""Where a checkout keeps what was measured."""

PAPERS = "a100-40gb"
"""What figure 2 was measured on."""


class Measured(NamedTuple):
    """What one machine gave."""

    device: str
    rows: list[dict[str, Any]]
    date: str = ""

    def find(self, case: str, who: str, passes: str = "") -> list[dict[str, Any]]:
        """Both directions of one workload, or nothing."""
        rows = [row for row in self.rows if (row["case"], row["who"], row["passes"]) == (case, who, passes)]
        return rows if len(rows) == 2 else []


def paper(
    plot: Path | None = typer.Option(None, help="also draw the figures into this file"),
    measured: list[Path] = typer.Option([], help="records to show (default: those of the checkout)", show_default=False),
    run: bool = typer.Option(False, "--measure", help="instead: measure on a GPU, with the counters of Nsight Compute"),
    device: str = typer.Option("cuda", help="where to measure"),
    only: str = typer.Option("", help="measure only workloads whose name contains this"),
    json: Path | None = typer.Option(None, help="write what is measured into this file"),
) -> None:
    """Show theorem 2's exponents, from counters of runs and from the model, and figure 2: published, model, measured."""
    if run:
        raise typer.Exit(measure_all(device, only, json))
    records = by_device(load(path) for path in measured or sorted(RESULTS.glob("*-paper.json")))
    console = out()
    console.print(fold())
    with progress(None) as step:
        runs = iomodel.sweep(lambda line: step(line, 1))
    show_theorem(console, runs)
    show_bytes(console, records)
    show_work(console, records)
    show_middle(console)
    for record in records:
        show_kernels(console, record)
    if not records:
        console.print("[dim]measured: nothing yet; `tilewise paper --measure --device cuda --json FILE` fills the column[/]")
    if plot is not None:
        plot.parent.mkdir(parents=True, exist_ok=True)
        ioplot.save(plot, runs, {record.device: totals(record) for record in records})
        console.print(f"wrote {plot}", soft_wrap=True)


def fold() -> Table:
    """The row of the beginning, in two blocks."""
    rows = table("logits seen", "m", "ℓ", title="1, 3 | 2, 5 in two blocks", right="m ℓ")
    for step in demo.fold():
        rows.add_row(step.keys, f"{step.m:.0f}", f"{step.l:.3f}")
    return rows


def show_theorem(console: Console, runs: dict[str, list[iomodel.Point]]) -> None:
    """The exponents, and what they are worth at several head sizes."""
    rows = table("exponent of", "theory", "counted runs", *(f"model: {order}" for order in model.ORDERS))
    rows.title = "Theorem 2: accesses of one forward head are Θ(N²d²/M) with key tiles outside"
    modelled = {order: model.slopes(order) for order in model.ORDERS}
    for at, name in enumerate(iomodel.THEORY):
        counted = f"{iomodel.fitted(name, runs[name]):+.3f}"
        rows.add_row(name, f"{iomodel.THEORY[name]:+d}", counted, *(f"{slopes[at]:+.3f}" for slopes in modelled.values()))
    right(rows)
    console.print(rows)
    console.print(
        "[dim]counted: least squares through runs of the reference, N to 4,096, d to 128, M to 131,072; model: doubling from"
        " N = 8,192, d = 64, M = 50,000.\nQuery tiles outside with the same tile ask for 2N² + 2N·d whatever M is: B_r stays"
        " at d; with B_r as large as M allows they too fall as 1/M.[/]\n"
    )
    names = ("q+k+v+o / M", "whole / M", "keys outside", "queries outside", "best tile", "and with it")
    rows = table("d", "M, KB", "B_r × B_c", *names)
    rows.title = "How many times fewer accesses than standard attention, N = 8,192, two-byte numbers"
    for one in model.ratios():
        best = "–" if one.best is None else f"{one.best.block_m} × {one.best.block_n}"
        rows.add_row(
            str(one.d), str(one.kilobytes), f"{one.shape.block_m} × {one.shape.block_n}", f"{one.four:.2f}", f"{one.whole:.2f}",
            f"{one.outside:.2f}", f"{one.same:.2f}", best, f"{one.least:.2f}",
        )  # fmt: skip
    right(rows, first=0)
    console.print(rows)


def show_bytes(console: Console, records: list[Measured]) -> None:
    """Figure 2, left: bytes."""
    names = [f"measured, {record.device}" for record in records] or ["measured"]
    rows = table("how it is counted", "forward + backward", "published", "model", *names)
    rows.title = "Figure 2, HBM bytes of forward and backward, GB (batch 64, 16 heads, N = 1024, d = 64, float16)"
    rows.add_row("[bold]standard attention[/]", "passes over n×s", f"{model.FIGURE2['standard'].gb}", "", *[""] * len(names))
    for passes, one in model.standard_ways().items():
        cells = [_gb(_sum(record.find("figure 2", "standard", passes), "dram_bytes")) for record in records] or ["–"]
        rows.add_row(f"  {one.name}", _parts(one.parts, 1), "", _gb(one.cost.bytes), *cells)
    rows.add_row("[bold]FlashAttention[/]", "N·d", f"{model.FIGURE2['flash'].gb}", "", *[""] * len(names))
    for one in model.flash_ways():
        rows.add_row(f"  {one.name}", _parts(one.parts, 2), "", _gb(one.cost.bytes), *["–"] * len(names))
    unit = model.setting().b * model.setting().h * 1024 * 64 * 2
    rows.add_row("  each tensor once", _parts(model.COMPULSORY, 2), "", _gb(sum(model.COMPULSORY) * unit), *["–"] * len(names))
    for record in records:
        found = record.find("figure 2", "tilewise")
        least, asked = (_gb(_sum([row["model"] for row in found], name)) for name in ("least_bytes", "asked_bytes"))
        dram, l2 = (_gb(_sum(found, name)) for name in ("dram_bytes", "l2_bytes"))
        others = ["–" if other is not record else None for other in records]
        rows.add_row(f"  tilewise on {record.device}, DRAM", "least", "", least, *(cell or dram for cell in others))
        rows.add_row(f"  tilewise on {record.device}, L2", "all asked for", "", asked, *(cell or l2 for cell in others))
    right(rows)
    console.print(rows)
    console.print(
        "[dim]Additive mask and dropout come to the published 40.3 GB, and two-byte o and dq to 4.4 GB within 2 %: fits to one"
        " number each, no proof of what was run.[/]\n"
    )


def show_work(console: Console, records: list[Measured]) -> None:
    """Figure 2, left: operations and time."""
    machine = find(PAPERS)
    bounds = model.bounds(machine)
    names = [f"measured, {record.device}" for record in records] or ["measured"]
    rows = table("", "published, A100", "model", *names, title="Figure 2, operations and time of forward and backward")
    for who, title, passes in (("standard", "standard attention", "mask-add,dropout"), ("flash", "FlashAttention", "")):
        ours = "tilewise" if who == "flash" else who
        found = [record.find("figure 2", ours, passes) for record in records]
        flops = [f"{_sum(one, 'matrix_flops') / 1e9:.1f}" if _sum(one, "matrix_flops") else "–" for one in found] or ["–"]
        times = [f"{_sum(one, 'ms'):.1f}" if one else "–" for one in found] or ["–"]
        bound, published = bounds[who], model.FIGURE2[who]
        rows.add_row(f"{title}, GFLOP of products", f"{published.gflop}", f"{bound.flops / 1e9:.1f}", *flops)
        low = f"at least {seconds(bound.seconds)} ({bound.binds})"
        rows.add_row(f"{title}, ms", f"{published.ms}", f"{low} on {machine.name}", *times)
    right(rows)
    console.print(rows)
    one, two = model.FIGURE2["standard"].gflop, model.FIGURE2["flash"].gflop
    times = [bounds[who].flops / 1e9 / x for who, x in (("standard", one), ("flash", two))]
    console.print(
        f"[dim]The published operations are not reproduced: ours, six and seven products, are {times[0]:.1f} and {times[1]:.1f}"
        f" times as many; their difference, {two - one:.1f}, is a sixteenth of one product.\nRecomputation adds a product, as"
        " published. A bound is no prediction: launch, latency and all that is not a product are outside it.[/]\n"
    )


def show_middle(console: Console) -> None:
    """Figure 2, middle: forward by block size."""
    machine = find(PAPERS)
    rows = table("B_c", "two-byte o, GB", "word for word, GB", "float32 o, GB", "HBM", "arithmetic", "takes", "on chip, KB")
    rows.title = f"Figure 2, forward by block size: model, on {machine.name}; the paper's bars are not printed as numbers"
    for one in model.middle(machine):
        takes = "HBM" if one.hbm_s > one.matrix_s else "arithmetic"
        fits = "" if one.kilobytes * 1024 <= machine.block_bytes else ", too big"
        rows.add_row(
            str(one.block_n), *(_gb(x) for x in (one.lean, one.literal, one.released)),
            seconds(one.hbm_s), seconds(one.matrix_s), takes, f"{one.kilobytes:.0f}{fits}",
        )  # fmt: skip
    right(rows, first=0)
    console.print(rows)


def show_kernels(console: Console, record: Measured) -> None:
    """What was measured of every workload, beside the model."""
    rows = table("workload", "pass", "ms", "HBM least", "DRAM", "DRAM/least", "all asked", "L2", "L2/asked")
    rows.title = f"Bytes on {record.device}, GB: model and counters"
    for row in record.rows:
        who = " ".join(filter(None, (row["case"], row["who"], row["passes"])))
        least, asked = (row["model"][name] for name in ("least_bytes", "asked_bytes"))
        dram, l2 = row["dram_bytes"], row["l2_bytes"]
        memory, caches = (_gb(least), _gb(dram), _times(dram, least)), (_gb(asked), _gb(l2), _times(l2, asked))
        rows.add_row(who, row["pass"], f"{row['ms']:.2f}", *memory, *caches)
    right(rows, first=2)
    console.print(rows)


def measure_all(device: str, only: str, path: Path | None) -> int:
    """Measure every workload, written after each; the exit status."""
    check_device(device)
    if torch.device(device).type != "cuda":
        raise OptionError(f"device {device!r} has no hardware counters that are read here: GPUs have")
    works = [work for work in WORKLOADS if only in work.name]
    if not works:
        raise OptionError(f"no workload contains {only!r}; there are {', '.join(work.name for work in WORKLOADS)}")
    record = Record[TrafficRow](shlex.join(["tilewise", *sys.argv[1:]]), asked=len(works))
    collect(works, device, record, path)
    console = out()
    if record.rows:
        show_kernels(console, Measured(torch.cuda.get_device_name(device), [row.json() for row in record.rows]))
    for line in record.footnotes():
        console.print(f"[dim]{line}[/]", soft_wrap=True)
    return 0 if record.rows else 1


def collect(works: Iterable[Workload], device: str, record: Record[TrafficRow], path: Path | None) -> None:
    """Fill a record workload by workload; an interrupt ends it early."""
    try:
        with progress(None) as step:
            for work in works:
                for found in measure([work], device, lambda line: step(line, 0)):
                    (record.notes if isinstance(found, Note) else record.rows).append(found)  # type: ignore[arg-type]
                record.done += 1
                step(work.name, 1)
                if path is not None:
                    record.write(path)
    except KeyboardInterrupt:
        err().print("[yellow]interrupted[/]")
    if path is not None and record.done:
        out().print(f"wrote {path}", soft_wrap=True)


def load(path: Path) -> Measured:
    """A record that `--measure` wrote."""
    try:
        found = text.loads(path.read_text())
        rows = [row for row in found["rows"] if {"case", "pass", "who", "passes", "model"} <= set(row)]
        rows = [row | {"model": modelled(row)} for row in rows]
        return Measured(", ".join(dict.fromkeys(found["machine"]["gpus"])), rows, found["date"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptionError(f"{path} is no record of `tilewise paper --measure`: {type(error).__name__}: {error}") from None


def modelled(row: dict[str, Any]) -> dict[str, Any]:
    """What the model says of a row: of standard attention what it says now, of ours what it said of the tiles that were run."""
    named = tuple(row[key] for key in ("case", "who", "passes"))
    known = (work for work in WORKLOADS if work.who == "standard" and (work.case, work.who, work.passes) == named)
    return next((predict(work, row["pass"], "cpu") for work in known), row["model"])


def by_device(records: Iterable[Measured]) -> list[Measured]:
    """One record for each device: of what it measured several times, the latest."""
    found: dict[str, dict[tuple[str, ...], dict[str, Any]]] = {}
    for record in sorted(records, key=lambda record: record.date):
        named = {tuple(row[key] for key in ("case", "who", "passes", "pass")): row for row in record.rows}
        found[record.device] = found.get(record.device, {}) | named
    return [Measured(device, list(rows.values())) for device, rows in found.items()]


def totals(record: Measured) -> dict[str, float]:
    """GB that figure 2's setting moved, standard and ours."""
    found = {
        "standard": record.find("figure 2", "standard", "mask-add,dropout"),
        "flash": record.find("figure 2", "tilewise"),
    }
    return {who: _sum(rows, "dram_bytes") / 1e9 for who, rows in found.items() if _sum(rows, "dram_bytes")}


def right(rows: Table, first: int = 1) -> None:
    """Numbers to the right."""
    for column in rows.columns[first:]:
        column.justify = "right"


def _sum(rows: list[dict[str, Any]], name: str) -> float:
    """Of both directions; 0 where one is missing."""
    found = [row[name] for row in rows]
    return 0.0 if None in found else float(sum(found))


def _gb(size: float | None) -> str:
    return f"{size / 1e9:.2f}" if size else "–"


def _times(x: float | None, y: float) -> str:
    return f"{x / y:.2f}" if x and y else "–"


def _parts(parts: tuple[float, float], digits: int) -> str:
    return " + ".join(f"{part:.{digits}f}" for part in parts)
