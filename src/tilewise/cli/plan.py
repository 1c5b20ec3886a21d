"""`tilewise plan`: what would run, why, and what it costs."""

from __future__ import annotations

import torch
import typer
from rich.table import Table

from .. import api
from .._errors import DtypeError
from ..mask import parse
from ..problem import DTYPES
from .console import check_device, out


def plan(
    b: int = typer.Option(1, "--b", min=0, help="batch"),
    n: int = typer.Option(4096, "--n", min=0, help="query rows"),
    s: int | None = typer.Option(None, "--s", min=0, help="key rows (default: n)", show_default=False),
    h: int = typer.Option(8, "--h", min=1, help="query heads"),
    g: int | None = typer.Option(None, "--g", min=1, help="key heads (default: h)", show_default=False),
    d: int = typer.Option(64, "--d", min=1, help="head size of queries and keys"),
    e: int | None = typer.Option(None, "--e", min=1, help="head size of values (default: d)", show_default=False),
    dtype: str = typer.Option("float32", help=" | ".join(DTYPES)),
    mask: str = typer.Option("full", help="such as 'causal & window(left=1023)'"),
    softcap: float | None = typer.Option(None, help="logits become softcap·tanh(logit / softcap)"),
    dropout: float = typer.Option(0.0, help="chance by which a probability is dropped"),
    backend: str | None = typer.Option(None, help="ask for this one by name"),
    device: str = typer.Option("cpu", help="where the tensors are"),
) -> None:
    """Print what `attention` would run on tensors of these sizes, why, and what it costs. Computes nothing."""
    s, g, e = n if s is None else s, g or h, e or d
    q, k, v = (nothing(shape, dtype, device) for shape in ((b, n, h, d), (b, s, g, d), (b, s, g, e)))
    made = api.plan(q, k, v, mask=parse(mask), softcap=softcap, dropout=dropout, backend=backend)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for line in str(made).splitlines():
        name, _, value = line.partition(" ")
        table.add_row(name, value.strip())
    out().print(table)


def nothing(shape: tuple[int, ...], dtype: str, device: str) -> torch.Tensor:
    """A tensor of any shape over the memory of one element."""
    if dtype not in DTYPES:
        raise DtypeError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    check_device(device)
    return torch.empty((), dtype=getattr(torch, dtype), device=device).expand(shape)
