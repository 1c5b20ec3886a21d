"""`tilewise check`: the conformance suite as a table."""

from __future__ import annotations

import typer
from rich.text import Text

from .. import backends
from .._errors import DtypeError, OptionError
from ..problem import DTYPES
from .console import check_device, err, out, progress, table


def check(
    backend: str = typer.Option("torch", help="which backend to check"),
    device: str = typer.Option("cpu", help="where to run it"),
    dtype: list[str] = typer.Option([], help="only this dtype; may be given several times"),
    case: str = typer.Option("", help="only cases whose name holds this"),
    failures: bool = typer.Option(False, "--failures", help="list failures only"),
) -> None:
    """Compare a backend with the float64 definition, case by case. Exit status 1 if anything fails."""
    from ..testing import conformance, count, dtypes_of

    check_device(device)
    backends.load(backend)
    unknown = [name for name in dtype if name not in DTYPES]
    if unknown:
        raise DtypeError(f"dtype must be one of {', '.join(DTYPES)}, got {unknown[0]!r}")
    dtypes, results = dtype or dtypes_of(backend, device), []
    with progress(count(dtypes, case)) as step:
        for result in conformance(backend, device, dtypes, case):
            results.append(result)
            step(result.case, 1)
    if not results:
        raise OptionError(f"no case of backend {backend!r} matches {case!r}" + (f" in {', '.join(dtype)}" if dtype else ""))
    failed = [r for r in results if not r.ok]
    shown = failed if failures else results
    if shown:
        rows = table("case", "dtype", "quantity", "error", "budget", "", right="error budget")
        for r in shown:
            verdict = Text("ok", style="green") if r.ok else Text("FAIL", style="bold red")
            rows.add_row(r.case, r.dtype, r.quantity, f"{r.error:.1e}", f"{r.budget:.1e}", verdict)
        out().print(rows)
    for r in failed:
        err().print(Text(f"{r.case} {r.dtype} {r.quantity}: {r.detail}", style="red"), soft_wrap=True)
    out().print(f"{backend} on {device}: {len(results) - len(failed)} of {len(results)} within budget")
    raise typer.Exit(1 if failed else 0)
