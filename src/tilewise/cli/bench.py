"""`tilewise bench`: the benchmark table, wins and losses alike."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .._errors import OptionError
from ..bench import Report, Setting, run
from ..bench.cases import CASES, QUICK, Case
from ..bench.machine import busy, machine, versions
from ..bench.peers import PEERS
from ..bench.report import Row
from .console import check_device, err, out, progress, table

SECONDS, QUICK_SECONDS = 1.0, 0.5


def bench(
    device: str = typer.Option("cpu", help="where to measure"),
    case: list[str] = typer.Option([], help="only this case; may be given several times"),
    quick: bool = typer.Option(False, "--quick", help="few cases, short turns, and no peers that compile first"),
    json: Path | None = typer.Option(None, help="also write rows and provenance into this file"),
    seconds: float | None = typer.Option(None, min=0.0, help="a regime of a pass (default: 1, quick 0.5)", show_default=False),
    backend: str | None = typer.Option(None, help="measure this backend of tilewise"),
) -> None:
    """Measure tilewise and its peers, taking turns, after checking every result. Exit status 1 if a case is refused."""
    check_device(device)
    cases = choose(device, case, quick)
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
    peers = tuple(peer for peer in PEERS if not (quick and peer.slow_start))
    setting = Setting(device, seconds if seconds is not None else QUICK_SECONDS if quick else SECONDS, backend, peers)
    disturbed = busy()
    if disturbed:
        err().print(f"[yellow]{disturbed}[/]", soft_wrap=True)
    report = Report(shlex.join(["tilewise", *sys.argv[1:]]))
    with progress(len(cases)) as step:
        for one in cases:
            outcome = run(one, setting, lambda text: step(text, 0))
            report.rows += outcome.rows
            report.notes += outcome.notes
            step(one.name, 1)
    show(report)
    if quick:
        left = ", ".join(peer.name for peer in PEERS if peer.slow_start)
        out().print(f"[dim]--quick leaves out {left}, which compiles for longer than this takes[/]")
    if json is not None:
        json.write_text(report.json() + "\n")
        out().print(f"wrote {json}", soft_wrap=True)
    raise typer.Exit(0 if report.ok else 1)


def choose(device: str, names: list[str], quick: bool) -> list[Case]:
    """The cases asked for, or all of this kind of device."""
    known = CASES.get(torch.device(device).type, CASES["cpu"])
    for name in names:
        if name not in known:
            raise OptionError(f"case {name!r} is unknown; there are {', '.join(known)}")
    return [known[name] for name in names or (QUICK if quick else known)]


def show(report: Report) -> None:
    """Print the table, the score against each peer, and who was not measured and why."""
    console = out()
    facts, found = machine(), versions()
    gpus = facts["gpus"] if isinstance(facts["gpus"], list) else []
    console.print(f"[bold]{', '.join([str(facts['processor']), *gpus])}[/], {facts['threads']} threads")
    console.print(
        "[dim]" + " · ".join(f"{name} {version}" for name, version in found.items() if version) + f" · {report.date}[/]"
    )
    peers = report.peers()
    console.print(fit(report, console))
    for peer in peers:
        won, lost = report.score(peer)
        console.print(f"against {peer}: faster in {won}, slower in {lost} of {won + lost} rows")
    if peers:
        console.print(
            "[dim]vs: our speed over theirs, above 1 is faster; spread: of the middle half of calls, widest contender[/]"
        )
    for line in report.footnotes():
        console.print(Text(line, style="dim"))
    for name in dict.fromkeys(row.case for row in report.rows if row.refused):
        err().print(f"[bold red]refused:[/] {name}: the result is wrong, so its speed means nothing", soft_wrap=True)


def fit(report: Report, console: Console) -> Table:
    """The table of all rows, without the columns that matter least where it would be too wide."""
    peers = report.peers()
    names = ["case", "pass", "regime", "unit", "tilewise", *peers, *(f"vs {p}" for p in peers), "spread", "error/budget"]
    for dropped in ("", "error/budget", "spread", "unit", *peers):
        names = [name for name in names if name != dropped]
        rows = table(*names)
        for column, name in zip(rows.columns, names, strict=True):
            column.no_wrap, column.justify = True, "left" if name in ("case", "pass", "regime", "unit") else "right"
        for row in report.rows:
            found = cells(row, peers)
            rows.add_row(*(found[name] for name in names))
        if console.measure(rows, options=console.options.update(width=1000)).maximum <= console.width:
            break
    return rows


def cells(row: Row, peers: list[str]) -> dict[str, Text]:
    """One line of the table, by column."""
    bad = "bold red" if row.refused else ""
    rates = {"tilewise": row.ours, **{p: row.peers.get(p) for p in peers}}
    return {
        "case": Text(row.case),
        "pass": Text(row.name),
        "regime": Text(row.regime),
        "unit": Text(row.unit),
        **{name: Text("–" if rate is None else f"{rate:.3g}") for name, rate in rates.items()},
        **({"tilewise": Text("refused", style=bad)} if row.refused else {}),
        **{f"vs {p}": _ratio(row.ratio(p)) for p in peers},
        "spread": Text("–" if row.spread is None else f"{row.spread:.0%}"),
        "error/budget": Text(f"{row.error:.1e}/{row.budget:.1e}", style=bad),
    }


def _ratio(ratio: float | None) -> Text:
    if ratio is None:
        return Text("–")
    return Text(f"{ratio:.2f}×", style="green" if ratio >= 1 else "red")
