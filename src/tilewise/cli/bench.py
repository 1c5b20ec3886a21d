"""`tilewise bench`: the benchmark table, wins and losses alike."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import torch
import typer
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
    seconds: float | None = typer.Option(None, min=0.0, help="a regime of a pass  [default: 1, quick 0.5]", show_default=False),
    backend: str | None = typer.Option(None, help="measure this backend of tilewise"),
) -> None:
    """Measure tilewise and its peers, taking turns, after checking every result. Exit status 1 if a case is refused."""
    check_device(device)
    cases = choose(device, case, quick)
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
    names = "case", "pass", "regime", "unit", "tilewise", *peers, *(f"vs {p}" for p in peers), "spread", "error/budget"
    rows = table(*names, right=" ".join(names[4:]))
    for column, name in zip(rows.columns, names, strict=True):
        column.justify = "left" if name in names[:4] else "right"
    for row in report.rows:
        rows.add_row(*cells(row, peers))
    console.print(rows)
    for peer in peers:
        won, lost = report.score(peer)
        console.print(f"against {peer}: faster in {won}, slower in {lost} of {won + lost} rows")
    console.print(
        "[dim]vs: our speed over theirs, above 1 is faster · spread: of the middle half of calls, widest contender[/]"
    )
    for line in report.footnotes():
        console.print(Text(line, style="dim"))
    for name in dict.fromkeys(row.case for row in report.rows if row.refused):
        err().print(f"[bold red]refused:[/] {name}: the result is wrong, so its speed means nothing", soft_wrap=True)


def cells(row: Row, peers: list[str]) -> list[Text]:
    """One line of the table."""
    head = [Text(x) for x in (row.case, row.name, row.regime, row.unit)]
    accuracy = Text(f"{row.error:.1e}/{row.budget:.1e}", style="bold red" if row.refused else "")
    if row.refused:
        return [*head, Text("refused", style="bold red"), *(Text("") for _ in (*peers, *peers)), Text(""), accuracy]
    rates = [Text(f"{x:.3g}" if x is not None else "–") for x in (row.ours, *map(row.peers.get, peers))]
    return [*head, *rates, *(_ratio(row.ratio(p)) for p in peers), Text(f"{row.spread:.0%}"), accuracy]


def _ratio(ratio: float | None) -> Text:
    if ratio is None:
        return Text("–")
    return Text(f"{ratio:.2f}×", style="green" if ratio >= 1 else "red")
