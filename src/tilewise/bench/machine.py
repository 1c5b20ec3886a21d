"""What a measurement was made on: processor, memory, accelerators, and the versions of what ran."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

PACKAGES = ("torch", "numpy", "triton", "llvmlite")
"""Packages whose version a measurement depends on; those that are not installed have none."""


def machine() -> dict[str, object]:
    """Processor, cores, threads that torch uses, memory in GiB, and accelerators by name."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": memory_gib(),
        "system": f"{platform.system()} {platform.machine()}",
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def versions() -> dict[str, str | None]:
    """Of Python, tilewise and the packages it computes with; None where one is not installed."""
    from .. import __version__

    found: dict[str, str | None] = {"tilewise": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    found["cuda"] = torch.version.cuda
    return found


def commit() -> str | None:
    """The commit of the checkout this package runs from, with "-dirty" where files differ; None outside one."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    try:
        asked = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def processor() -> str:
    """The processor's own name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def busy() -> str | None:
    """What disturbs a measurement: a sentence where other programs keep the processor busy, else None."""
    try:
        load, cores = os.getloadavg()[0], os.cpu_count() or 1
    except (AttributeError, OSError):
        return None
    return f"load average {load:.1f} on {cores} cores: other programs disturb these timings" if load > 0.75 * cores else None


def memory_gib() -> float | None:
    """Physical memory, where the system tells."""
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None
