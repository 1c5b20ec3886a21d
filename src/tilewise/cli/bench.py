"""`tilewise bench`: the benchmark tables, wins and losses alike."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .._errors import OptionError
from ..bench import Report, Setting, host, run
from ..bench.cases import Case
from ..bench.catalog import CASES, QUICK, tiny
from ..bench.host import HostRow, StartRow
from ..bench.machine import busy, machine, versions
from ..bench.peers import PEERS, choose
from ..bench.report import Note, Record, Row, peers
from .console import check_device, err, out, progress, table

SECONDS, QUICK_SECONDS = 1.0, 0.5
FIRST = ("ready after s", "forward s", "backward s")


def bench(
    device: str = typer.Option("cpu", help="where to measure"),
    case: list[str] = typer.Option([], help="only this case; may be given several times"),
    group: list[str] = typer.Option([], help="only cases of this group; may be given several times"),
    peer: str | None = typer.Option(None, "--peers", help="'sdpa,flex', 'all' or 'none' (default: all that are here)"),
    quick: bool = typer.Option(False, "--quick", help="few cases, short turns, and no peers that compile first"),
    on_host: bool = typer.Option(False, "--host", help="instead: what a call costs the host, and the first call of a process"),
    json: Path | None = typer.Option(None, help="also write rows and provenance into this file, after every case"),
    seconds: float | None = typer.Option(None, min=0.0, help="a regime of a pass (default: 1, quick 0.5)", show_default=False),
    minutes: float | None = typer.Option(None, min=0.0, help="begin no further case after so many", show_default=False),
    backend: str | None = typer.Option(None, help="measure this backend of tilewise"),
) -> None:
    """Measure tilewise and its peers, taking turns, after checking every result. Exit status 1 if a case is refused."""
    check_device(device)
    turn = seconds if seconds is not None else QUICK_SECONDS if quick else SECONDS
    cases = select(device, case, group, quick)
    setting = Setting(device, turn, backend, choose(peer, torch.device(device).type, quick))
    disturbed = busy()
    if disturbed:
        err().print(f"[yellow]{disturbed}[/]", soft_wrap=True)
    command = shlex.join(["tilewise", *sys.argv[1:]])
    if on_host:
        raise typer.Exit(measure_host(setting, Record(command, asked=1), json))
    report = Report(command, asked=len(cases))
    measure(cases, setting, report, json, None if minutes is None else 60 * minutes)
    show(report)
    if quick and peer is None:
        left = ", ".join(peer.name for peer in PEERS if peer.slow_start)
        out().print(f"[dim]--quick leaves out {left}, which compiles for longer than this takes[/]")
    raise typer.Exit(0 if report.ok else 1)


def select(device: str, names: list[str], groups: list[str], quick: bool) -> list[Case]:
    """The cases asked for, or all of this kind of device."""
    known = CASES.get(torch.device(device).type, CASES["cpu"])
    for kind, asked, there in (("case", names, known), ("group", groups, {case.group: 0 for case in known.values()})):
        for name in asked:
            if name not in there:
                raise OptionError(f"{kind} {name!r} is unknown; there are {', '.join(there)}")
    names = names or [name for name in known if not quick or groups or name in QUICK]
    found = [known[name] for name in names if not groups or known[name].group in groups]
    if not found:
        raise OptionError(f"no case is both in {', '.join(groups)} and one of {', '.join(names)}")
    return found


def measure(cases: list[Case], setting: Setting, report: Report, json: Path | None, limit_s: float | None) -> None:
    """Fill the report case by case, written after each; an interrupt or the limit ends it early."""
    start = time.monotonic()
    try:
        with progress(len(cases)) as step:
            for case in cases:
                if limit_s is not None and time.monotonic() - start > limit_s:
                    err().print(f"[yellow]out of time after {report.done} of {report.asked} cases[/]", soft_wrap=True)
                    break
                outcome = run(case, setting, lambda text: step(text, 0))
                report.rows += outcome.rows
                report.notes += outcome.notes
                report.done += 1
                keep(report, json)
                step(case.name, 1)
    except KeyboardInterrupt:
        err().print(f"[yellow]interrupted after {report.done} of {report.asked} cases[/]", soft_wrap=True)
    if json is not None and report.done:
        out().print(f"wrote {json}", soft_wrap=True)


def measure_host(setting: Setting, record: Record[HostRow | StartRow], json: Path | None) -> int:
    """Fill, show and write a record of what calls cost the host; the exit status."""
    case = tiny(setting.device)
    try:
        with progress(None) as step:

            def tell(text: str) -> None:
                step(text, 0)

            for found in chain(host.calls(case, setting, tell), host.starts(setting, tell)):
                (record.notes if isinstance(found, Note) else record.rows).append(found)  # type: ignore[arg-type]
                keep(record, json)
            record.done = 1
            keep(record, json)
    except KeyboardInterrupt:
        err().print("[yellow]interrupted[/]")
    head(record)
    out().print(pivot("microseconds of one call", [r for r in record.rows if isinstance(r, HostRow)]))
    firsts = table("who", "cache", *FIRST, title="first call of a process")
    for row in record.rows:
        if isinstance(row, StartRow):
            rest = "–" if row.backward_s is None else f"{row.backward_s:.2f}"
            firsts.add_row(row.who, row.cache, f"{row.ready_s:.2f}", f"{row.forward_s:.2f}", rest)
    out().print(firsts)
    foot(record)
    return 0 if any(isinstance(row, HostRow) for row in record.rows) else 1


def pivot(title: str, rows: Sequence[HostRow]) -> Table:
    """One line a pass and way of calling, one column for everybody who was measured."""
    names = list(dict.fromkeys(row.who for row in rows))
    made = table("pass", "how", *names, title=title, right=" ".join(names))
    found = {(row.name, row.how, row.who): f"{row.us:.1f} ± {row.spread:.0%}" for row in rows}
    for name, how in dict.fromkeys((row.name, row.how) for row in rows):
        made.add_row(name, how, *(found.get((name, how, who), "–") for who in names))
    return made


def keep(record: Record, json: Path | None) -> None:
    """Write what there is, where that was asked for."""
    if json is not None:
        record.write(json)


def show(report: Report) -> None:
    """Print a table a group, the score against each peer, and who was not measured and why."""
    console = out()
    head(report)
    for group, rows in report.groups().items():
        console.print(fit(rows, console, group))
    measured = peers(report.rows)
    for peer in measured:
        won, lost = report.score(peer)
        console.print(f"against {peer}: faster in {won}, slower in {lost} of {won + lost} rows")
    if measured:
        console.print(
            "[dim]vs: our speed over theirs, above 1 is faster; spread: of the middle half of calls, widest contender[/]"
        )
    foot(report)
    for name in dict.fromkeys(row.case for row in report.rows if row.refused):
        err().print(f"[bold red]refused:[/] {name}: the result is wrong, so its speed means nothing", soft_wrap=True)


def head(record: Record) -> None:
    """What was measured on."""
    console, facts, found = out(), machine(), versions()
    gpus = facts["gpus"] if isinstance(facts["gpus"], list) else []
    console.print(f"[bold]{', '.join([str(facts['processor']), *gpus])}[/], {facts['threads']} threads")
    console.print(
        "[dim]" + " · ".join(f"{name} {version}" for name, version in found.items() if version) + f" · {record.date}[/]"
    )


def foot(record: Record) -> None:
    """Who was not measured and why."""
    for line in record.footnotes():
        out().print(Text(line, style="dim"))


def fit(rows: list[Row], console: Console, title: str | None = None) -> Table:
    """The table of some rows, without the columns that matter least where it would be too wide."""
    others = peers(rows)
    names = ["case", "pass", "regime", "unit", "tilewise", *others, *(f"vs {p}" for p in others), "spread", "error/budget"]
    for dropped in ("", "error/budget", "spread", "unit", *others):
        names = [name for name in names if name != dropped]
        made = table(*names, title=title)
        for column, name in zip(made.columns, names, strict=True):
            column.no_wrap, column.justify = True, "left" if name in ("case", "pass", "regime", "unit") else "right"
        for row in rows:
            found = cells(row, others)
            made.add_row(*(found[name] for name in names))
        if console.measure(made, options=console.options.update(width=1000)).maximum <= console.width:
            break
    return made


def cells(row: Row, others: list[str]) -> dict[str, Text]:
    """One line of the table, by column."""
    bad = "bold red" if row.refused else ""
    rates = {"tilewise": row.ours, **{p: row.peers.get(p) for p in others}}
    return {
        "case": Text(row.case),
        "pass": Text(row.name),
        "regime": Text(row.regime),
        "unit": Text(row.unit),
        **{name: Text("–" if rate is None else f"{rate:.3g}") for name, rate in rates.items()},
        **({"tilewise": Text("refused", style=bad)} if row.refused else {}),
        **{f"vs {p}": _ratio(row.ratio(p)) for p in others},
        "spread": Text("–" if row.spread is None else f"{row.spread:.0%}"),
        "error/budget": Text(f"{row.error:.1e}/{row.budget:.1e}", style=bad),
    }


def _ratio(ratio: float | None) -> Text:
    if ratio is None:
        return Text("–")
    return Text(f"{ratio:.2f}×", style="green" if ratio >= 1 else "red")
