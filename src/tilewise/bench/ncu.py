"""Hardware counters of kernels, by Nsight Compute: `ncu` runs a command and writes a table, which is read here.

Source: Nsight Compute CLI manual, output pages and metric names."""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

DRAM = ("dram__bytes_read.sum", "dram__bytes_write.sum")
L2 = "lts__t_bytes.sum"
TIME = "gpu__time_duration.sum"

NEEDED = (*DRAM, L2, TIME)
"""Without these there is nothing to say."""

WANTED = (
    "l1tex__m_xbar2l1tex_read_bytes.sum",
    "lts__t_sectors_srcunit_tex_op_read.sum",
    "lts__t_sectors_srcunit_tex_op_write.sum",
    "sm__ops_path_tensor_src_fp16_dst_fp32.sum",
    "sm__ops_path_tensor_src_bf16_dst_fp32.sum",
)
"""Asked for where this chip and version has them: what multiprocessors read from L2, sectors of 32 bytes, operations of the
matrix units."""

LIMIT_S = 300
"""Seconds after which a run under the profiler is given up."""

UNITS = {
    "": 1, "byte": 1, "kbyte": 1e3, "mbyte": 1e6, "gbyte": 1e9, "tbyte": 1e12,
    "second": 1, "s": 1, "msecond": 1e-3, "ms": 1e-3, "usecond": 1e-6, "us": 1e-6, "nsecond": 1e-9, "ns": 1e-9,
    "sector": 1, "inst": 1, "op": 1, "ops": 1, "request": 1, "cycle": 1, "%": 1,
}  # fmt: skip
"""What one of a unit is in bytes, seconds or ones."""

REFUSALS = (
    ("ERR_NVGPUCTRPERM", "the driver lets only administrators read performance counters (ERR_NVGPUCTRPERM)"),
    ("LibraryNotLoaded", "ncu cannot load the library that reads counters: this machine does not hand them through"),
    ("Failed to initialize the profiler", "ncu cannot start its profiler on this machine"),
    ("Failed to find metric", "this chip or version of ncu lacks a metric that was asked for"),
    ("No kernels were profiled", "no kernel ran while counting was on"),
    ("Profiling is not supported on device", "ncu does not support this device"),
)
"""What ncu says, and what that means."""


class Refused(RuntimeError):
    """Counters cannot be read; the message is a sentence that says why."""


class Kernel(NamedTuple):
    """One launch, and its metrics in bytes, seconds and ones."""

    name: str
    metrics: dict[str, float]


def count(command: Sequence[str], metrics: Sequence[str]) -> list[Kernel]:
    """Every kernel that `command` launches between the start and the stop of CUDA's profiler, with its metrics; `Refused` where
    there are none to be had. Clocks are left alone, caches are emptied before each kernel."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ncu.csv"
        options = ["--csv", "--print-units", "base", "--clock-control", "none", "--profile-from-start", "off"]
        options += ["--target-processes", "all", "--metrics", ",".join(metrics), "--log-file", str(path)]
        done = _run([ncu(), *options, *command])
        written = path.read_text(errors="replace") if path.exists() else ""
    said = "\n".join((written, done.stdout, done.stderr))
    for sign, meaning in REFUSALS:
        if sign in said:
            raise Refused(meaning)
    if done.returncode:
        last = [line for line in (done.stderr or said).strip().splitlines() if line.strip()]
        raise Refused(f"the command failed under ncu, with status {done.returncode}: {last[-1].strip() if last else 'no word'}")
    return parse(written if '"ID"' in written else said)


def ncu() -> str:
    """Where ncu is, or `Refused`."""
    found = shutil.which("ncu")
    if found is None:
        raise Refused("Nsight Compute's command ncu is not on the PATH")
    return found


def metrics() -> list[str]:
    """What to ask for: all that is needed, and what else this machine's ncu knows."""
    said = _run([ncu(), "--query-metrics"]).stdout
    known = set(re.findall(r"^\s*(\w+__\w+)", said, re.MULTILINE))
    return [*NEEDED, *(name for name in WANTED if name.partition(".")[0] in known)]


def parse(text: str) -> list[Kernel]:
    """The kernels in what `ncu --csv` printed: a line a metric, whatever the program wrote before and between. `Refused` where
    there is no table in it, or a number that cannot be read."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        last = [line.strip() for line in text.splitlines() if line.strip()]
        raise Refused(f"ncu printed no table: {last[-1] if last else 'nothing at all'}")
    found: dict[str, Kernel] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        name, value = row.get("Metric Name"), row.get("Metric Value")
        if not name or row["ID"] == "ID":  # a line without a metric, or a second header
            continue
        kernel = found.setdefault(f"{row.get('Process ID')} {row['ID']}", Kernel(row.get("Kernel Name") or "", {}))
        kernel.metrics[name] = _number(name, value or "", row.get("Metric Unit") or "")
    if not found:
        raise Refused("no kernel ran while counting was on")
    return list(found.values())


def _number(name: str, value: str, unit: str) -> float:
    """ "1,234.5" Kbyte → 1234500."""
    scale = UNITS.get(unit.lower())
    try:
        number = float(value.replace(",", ""))
    except ValueError:
        raise Refused(f"ncu gives no number for {name}: {value!r}") from None
    if scale is None:
        raise Refused(f"ncu gives {name} in {unit!r}, which is no unit known here")
    return number * scale


def total(kernels: list[Kernel], pick: Callable[[dict[str, float]], float]) -> float:
    """A sum over kernels."""
    return sum(pick(kernel.metrics) for kernel in kernels)


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """The command in the C locale, where numbers have points; `Refused` where it takes too long or does not start."""
    try:
        environment = {**os.environ, "LC_ALL": "C"}
        return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment, errors="replace")
    except subprocess.TimeoutExpired:
        raise Refused(f"ncu took longer than {LIMIT_S} s") from None
    except OSError as error:
        raise Refused(f"ncu does not start: {error.strerror}") from None
