"""The hopper backend on a CPU: its Gluon kernels on numpy, what it has in Triton's own language in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import gluon_on_numpy as emulator
import pytest

from tilewise.backends import hopper
from tilewise.backends.hopper import backward_pass, forward_pass, refusals

PACKAGE = "tilewise.backends.hopper"


def emulate(
    kernel: Any, grid: int, args: Any, variant: Any, registers: int, kinds: Any = (), tape: Any = None, together: bool = False
) -> None:
    """A launch of a Gluon kernel."""
    with emulator.emulated(PACKAGE):
        emulator.run(kernel, grid, args, variant, together=together)


def interpret(kernel: Any, grid: int, args: Any, *rest: Any) -> None:
    """A launch of a Triton kernel."""
    kernel[(grid,)](*args)


def put_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on the backend takes whatever its kernels can do, and makes gradients by them alone."""
    monkeypatch.setattr(hopper, "why_not", lambda problem, named: tuple(refusals.reasons_of(problem)))
    for module in (forward_pass, backward_pass):
        monkeypatch.setattr(module, "launch", emulate)
    monkeypatch.setattr(backward_pass, "launch_plain", interpret)
