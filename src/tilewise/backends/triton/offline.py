"""Kernels compiled without being run, for the GPU that is here or for one that is not: what `tilewise tune` does in processes
of its own, and what the tests do where there is no GPU."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from ..tape import Tape
from . import backward_pass, dbias, forward_pass, parts, visits  # noqa: F401  # all that launch: loaded before any is watched
from . import launch as launching


@dataclass(frozen=True)
class Job:
    """One launch: what `launch.launch` was called with."""

    kernel: Any
    rest: tuple[Any, ...]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__

    def run(self) -> None:
        """Do it, or do it again."""
        launching.launch(self.kernel, *self.rest)

    def compile(self) -> Any:
        """Triton's compiled kernel, for the target of Triton's driver; raises what the compiler raises."""
        compiler = Compiler(self.kernel)
        launching.launch(compiler, *self.rest)
        return compiler.found


class Compiler:
    """Stands for a kernel that is launched, and compiles it for the same arguments and options."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.fn, self.found = kernel, object(), None

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile(*args: Any, **options: Any) -> Any:
            self.found = self.kernel.warmup(*args, grid=grid, **options)
            return self.found

        return compile


@contextmanager
def recorded(run: bool = False) -> Iterator[list[Job]]:
    """Within, this backend's launches are collected; and done only with `run`, so that else what they would have filled holds
    nothing of meaning."""
    jobs: list[Job] = []
    right = launching.launch
    mine = [m for name, m in sys.modules.items() if name.startswith(f"{__package__}.") and m is not launching]
    users = [m for m in mine if getattr(m, "launch", None) is right]

    def collect(kernel: Any, grid: int, *rest: Any) -> None:
        if grid > 0:
            jobs.append(Job(kernel, (grid, *[x for x in rest if not isinstance(x, Tape)])))
        if run:
            right(kernel, grid, *rest)

    for module in users:
        module.launch = collect
    try:
        yield jobs
    finally:
        for module in users:
            module.launch = right


class Absent:
    """Triton's driver of a GPU that is not there: it names its target, and that is all that compiling asks."""

    def __init__(self, target: GPUTarget, device: int = 0) -> None:
        self.target, self.device = target, device

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def pretend(target: GPUTarget, device: int = 0) -> None:
    """From here on this process compiles for `target`; another target needs another number of a device."""
    triton.runtime.driver.set_active(Absent(target, device))
    torch.cuda.current_device = lambda: device
    torch.version.hip = "0" if target.backend == "hip" else None  # type: ignore[assignment]
