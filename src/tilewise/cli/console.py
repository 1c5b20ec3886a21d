"""Where text goes: results to stdout, progress and errors to stderr; colour and moving bars on terminals only."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .._errors import OptionError

PIPE_WIDTH = 160
"""Columns of a pipe or a file, which have none of their own."""


LINE_S = 5.0
"""Seconds between lines of progress in a pipe."""


def out() -> Console:
    """The console of results."""
    return _console(stderr=False)


def err() -> Console:
    """The console of progress and errors."""
    return _console(stderr=True)


def table(*columns: str, title: str | None = None, right: str = "") -> Table:
    """An empty table with these headings; those named in `right`, parted by spaces, hold numbers."""
    made = Table(box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", header_style="dim", pad_edge=False)
    for column in columns:
        made.add_column(column, justify="right" if column in right.split() else "left", overflow="fold")
    return made


@contextmanager
def progress(total: int | None) -> Iterator[Callable[[str, int], None]]:
    """A bar on a terminal, a line every few seconds in a pipe: call it with what is going on and how many steps are done
    since."""
    console = err()
    if not console.is_terminal:
        yield _lines(console, total)
        return
    columns = TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=total)
        yield lambda text, steps: bar.update(task, description=escape(text), advance=steps)


def _lines(console: Console, total: int | None) -> Callable[[str, int], None]:
    """Progress as lines, `LINE_S` seconds apart."""
    done, last = 0, time.monotonic()

    def step(text: str, steps: int) -> None:
        nonlocal done, last
        done += steps
        if time.monotonic() - last >= LINE_S:
            last = time.monotonic()
            console.print(f"… {done}{f'/{total}' if total else ''} {text}", markup=False, soft_wrap=True)

    return step


def _console(stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    return Console(stderr=stderr, width=width, highlight=False)


def check_device(name: str) -> None:
    """Raise `OptionError` unless torch can put a tensor on the device called `name`."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
        raise OptionError(f"device {name!r} cannot be used: {reason}") from None
