"""`tilewise info`: versions, the computer, and which backends can run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from rich.table import Table
from rich.text import Text

from .. import backends
from ..bench.machine import machine, versions
from ..mask import Causal
from ..problem import Inputs, Options, Problem
from .console import out


def info() -> None:
    """Print versions, the computer, and for each backend whether it can run a simple problem here, or why not."""
    facts = machine()
    gpus = facts["gpus"] if isinstance(facts["gpus"], list) else []
    console = out()
    console.print(_section("versions", [(name, version or "not installed") for name, version in versions().items()]))
    console.print(
        _section(
            "computer",
            [
                ("processor", f"{facts['processor']}, {facts['cores']} cores, {facts['threads']} threads"),
                ("memory", f"{facts['memory_gib']} GiB"),
                ("system", str(facts["system"])),
                *((f"gpu {i}", str(name)) for i, name in enumerate(gpus)),
            ],
        )
    )
    devices = ["cpu"] + (["cuda"] if gpus else [])
    rows = [(f"{name} on {device}", _state(name, device)) for name in backends.ORDER for device in devices]
    console.print(_section("backends", rows))


def _section(title: str, rows: list) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True, min_width=12)
    table.add_column(overflow="fold")
    table.add_row(Text(title, style="bold not dim"))
    for name, value in rows:
        table.add_row(f"  {name}", value if isinstance(value, Text) else Text(value))
    return table


def _state(name: str, device: str) -> Text:
    """Ready, or every reason why this backend cannot run eight causal heads in float32 on `device`."""
    x = np.broadcast_to(np.float32(0), (1, 1024, 8, 64))
    problem = replace(Problem.describe(Inputs(x, x, x), Options(Causal())), device=device)
    try:
        reasons = backends.load(name).why_not(problem, True)
    except ImportError as error:
        reasons = (f"needs {error.name}, which is not installed",)
    return Text("; ".join(reasons), style="yellow") if reasons else Text("ready", style="green")
