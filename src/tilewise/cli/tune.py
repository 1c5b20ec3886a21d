"""`tilewise tune`: the fastest tile sizes of this GPU, kept for later calls."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
import typer
from rich.text import Text

from .. import backends
from .._errors import OptionError
from ..bench.timing import Clock, burst
from .console import check_device, out, progress, table

if TYPE_CHECKING:
    from ..backends.triton.store import Found, Key
    from ..backends.triton.tune import Outcome, Workload

COLUMNS = ("pass", "dtype", "d", "e", "mask", "sizes", "µs", "built-in µs", "gain")


def tune(
    d: list[int] = typer.Option([64, 128], "--d", min=1, max=512, help="head size; may be given several times"),
    e: int | None = typer.Option(None, "--e", min=1, max=512, help="head size of values (default: d)", show_default=False),
    dtype: list[str] = typer.Option(["bfloat16"], help="may be given several times"),
    mask: list[str] = typer.Option(["full", "causal"], help="may be given several times; 'table' is a table of pairs"),
    b: int = typer.Option(2, "--b", min=1, help="batch"),
    n: int = typer.Option(4096, "--n", min=1, help="query and key rows"),
    h: int = typer.Option(16, "--h", min=1, help="query heads"),
    g: int | None = typer.Option(None, "--g", min=1, help="key heads (default: h)", show_default=False),
    bias: bool = typer.Option(False, "--bias", help="with a bias, and its gradient"),
    alibi: bool = typer.Option(False, "--alibi", help="with slopes"),
    softcap: float | None = typer.Option(None, help="with a softcap"),
    dropout: float = typer.Option(0.0, help="with dropout"),
    passes: list[str] = typer.Option([], "--pass", help="only this pass: forward, dq, dk_dv or dbias"),
    device: str = typer.Option("cuda", help="which GPU"),
    seconds: float = typer.Option(1.0, min=0.0, help="of timing, each group of choices"),
    processes: int = typer.Option(0, min=0, help="that compile at a time (default: one a core)", show_default=False),
    show: bool = typer.Option(False, "--show", help="instead: print what is kept, of all machines"),
    clear: bool = typer.Option(False, "--clear", help="instead: forget it all"),
) -> None:
    """Search for the tile sizes that are fastest on this GPU, and keep them in $TILEWISE_CACHE or the user's cache. Later calls
    with such head sizes, dtype, sort of mask and options use them; nothing is ever searched for in a call."""
    from ..backends.triton import store

    if show or clear:
        (_show if show else _clear)()
        return
    _check(device)
    try:
        out().print(f"keeping what is found in {store.add({})}", soft_wrap=True)
    except (OSError, RuntimeError) as error:
        raise OptionError(f"what is found could not be kept: {error}; set TILEWISE_CACHE to a folder") from None
    from ..backends.triton.tune import Workload

    extras: dict[str, Any] = {"bias": bias, "alibi": alibi, "softcap": softcap, "dropout": dropout}
    sizes: dict[str, Any] = {"b": b, "n": n, "h": h, "g": g or h}
    works = [Workload(one, e or one, kind, what, **sizes, **extras) for one, kind, what in product(d, dtype, mask)]
    search(works, passes, device, seconds, processes)


def search(works: Iterable[Workload], passes: list[str], device: str, seconds: float, processes: int) -> None:
    """Tune workload after workload; what was found is kept pass by pass, so that an interrupt loses little."""
    from ..backends.triton import store
    from ..backends.triton.tune import tune as outcomes

    clock = Clock(device)
    for work in works:
        found: list[Outcome] = []
        try:
            with progress(None) as step:
                names = passes or list(work.passes)
                timer = lambda calls, seconds: burst(calls, clock, seconds)  # noqa: E731
                for outcome in outcomes(work, names, device, timer, seconds, processes, step):
                    store.add({outcome.key: outcome.found})
                    found.append(outcome)
        finally:
            if found:
                _report(work, found)


def _report(work: Workload, found: list[Outcome]) -> None:
    rows = table(*COLUMNS, title=str(work), right="d e µs gain")
    for outcome in found:
        rows.add_row(*_cells(outcome.key, outcome.found))
    out().print(rows)
    for outcome in found:
        count = len(outcome.tried) + len(outcome.skipped)
        out().print(f"[dim]{outcome.key.name}: {count} choices, {len(outcome.skipped)} of them do not run[/]")


def _cells(key: Key, found: Found) -> list[Text]:
    gain = found.builtin_microseconds / found.microseconds if found.microseconds else 1.0
    loop = "" if found.apart else ", one loop"
    sizes = f"{found.block_m} × {found.block_n}, {found.warps} warps, {found.stages} stages{loop}"
    mask = key.mask + (f" + {key.score}" if key.score else "")
    cells = [key.name, key.dtype, str(key.d), str(key.e), mask, sizes]
    cells += [f"{found.microseconds:.1f}", f"{found.builtin_microseconds:.1f}"]
    return [*map(Text, cells), Text(f"{gain:.2f}×", style="green" if gain > 1 else "")]


def _show() -> None:
    """Print the whole file; sizes of other kernels than this version's are dimmed, for they are not used."""
    from ..backends.triton import store

    kept, now = store.entries(), store.digest()
    out().print(f"{store.path()}: {len(kept)} entries" if kept else f"{store.path()}: nothing is kept", soft_wrap=True)
    for gpu, version in dict.fromkeys((key.gpu, key.triton) for key in kept):
        rows = table(*COLUMNS, "tuned", title=f"{gpu}, Triton {version}", right="d e µs gain")
        for key, found in kept.items():
            if (key.gpu, key.triton) == (gpu, version):
                stale = key.kernels != now
                day = found.date + (", of other kernels: not used" if stale else "")
                rows.add_row(*_cells(key, found), Text(day), style="dim" if stale else "")
        out().print(rows)


def _clear() -> None:
    from ..backends.triton import store

    there = store.clear()
    out().print(f"{'removed' if there else 'there was no'} {store.path()}", soft_wrap=True)


def _check(device: str) -> None:
    """Refuse a device that has nothing to tune."""
    from ..backends.triton.refusals import interpreting

    backends.load("triton")
    check_device(device)
    if torch.device(device).type != "cuda":
        raise OptionError(f"device {device!r} has no sizes to tune: GPUs have")
    if interpreting():
        raise OptionError("Triton's interpreter is on (TRITON_INTERPRET=1): it says nothing of speed")
