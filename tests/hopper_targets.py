"""Compiles the kernels of the Hopper backend where there is no Hopper, and says what the assembler and its machine code say,
as JSON: one row a kernel. A program of its own, for Triton must not be the interpreter:

    python tests/hopper_targets.py [--case NAME] [--plant spill] [--processes 2] [--json FILE]
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from triton_targets import assembly, gpu

from tilewise.cases import Case
from tilewise.mask import Causal, Documents, Window
from tilewise.problem import Inputs, Options, Partial, Problem


@dataclass(frozen=True)
class Kernels:
    """One problem whose kernels are compiled, forward and backward."""

    case: Case
    dtype: str = "bfloat16"
    wide: bool = False
    """o and gradients in float32."""
    passes: tuple[str, ...] = ("forward", "backward")
    """That are always compiled."""
    seldom: tuple[str, ...] = ()
    """That are compiled on demand."""
    programs: int = 0
    """Multiprocessors that are taken to be there, so that programs stay; 0 as there are."""
    most: int = 48
    """Accesses to local memory that an iteration of a loop with products may make."""


def _case(d: int, e: int = 0, mask: Any = None, **options: Any) -> Case:
    extras = {name: options.pop(name) for name in ("alibi", "sink") if name in options}
    return Case("", n=300, s=300, h=4, g=2, d=d, e=e or d, options=Options(mask, **options), **extras)


_IDS = np.repeat([0, 1, 2], [97, 61, 142])
_SCORE = {"softcap": 5.0, "alibi": "h", "sink": True}

CASES = {
    "64": Kernels(_case(64)),
    "128 causal": Kernels(_case(128, mask=Causal()), programs=2),
    "256 causal": Kernels(_case(256, mask=Causal()), passes=("forward",), seldom=("backward",)),
    "128 documents": Kernels(_case(128, mask=Documents(_IDS) & Causal()), passes=(), seldom=("backward",)),
    "192/128": Kernels(_case(192, 128), passes=("forward",)),
    "everything": Kernels(_case(80, 48, Window(40, 3), **_SCORE), "float16", True, ("forward",), ("backward",), most=160),
}
"""What covers every piece of the kernels: widths, kinds of masks, scores, both dtypes and float32 results."""


@dataclass
class Row:
    """What came of one kernel."""

    case: str
    kernel: str
    shared: int = 0
    priced: int = 0
    """Bytes of shared memory: that the kernel takes, and that its description says."""
    most: int = 0
    spills: int = 0
    """Bytes."""
    products: int = 0
    """Instructions of the tensor cores, HGMMA."""
    expected: int = 0
    """How many there should be."""
    loops: list[int] = field(default_factory=list)
    """Of each innermost loop with products: how often an iteration goes to local memory."""
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0


def compile_case(name: str, plant: str = "") -> list[Row]:
    """Every kernel of one case."""
    offline = import_module("tilewise.backends.triton.offline")
    offline.pretend(gpu("sm_90"))
    return [compile_one(name, *job) for job in jobs(CASES[name], plant)]


def jobs(made: Kernels, plant: str) -> Iterator[tuple[Any, int, tuple[Any, ...], dict[str, Any]]]:
    """What the passes of a case launch: kernel, grid, arguments and options."""
    hopper, launching = (import_module(f"tilewise.backends.hopper{name}") for name in ("", ".launch"))
    found: list[Any] = []
    start = lambda kernel, grid, args, options, *rest: found.append((kernel, grid, args, options))  # noqa: E731
    for module in (launching, import_module("tilewise.backends.triton.launch")):
        setattr(module, "start", start)  # noqa: B010
    x = made.case.inputs().map(lambda a: torch.from_numpy(np.ascontiguousarray(a)).to(getattr(torch, made.dtype)))
    problem = replace(Problem.describe(x, made.case.options), wide=made.wide)
    assert hopper.refusals.reasons_of(problem) == []
    config = hopper.configure(problem)
    config = replace(config, programs=made.programs or config.programs)
    if made.programs:
        setattr(import_module("tilewise.backends.hopper.backward_pass"), "STAY", True)  # noqa: B010  # whatever Triton this is
    if plant == "spill":
        config = replace(config, forward=replace(config.forward, groups=3, apart=False, ahead=1))
    out = hopper.forward(problem, x, config)
    passes = made.passes + (made.seldom if os.environ.get("TILEWISE_KERNELS", "some") != "some" else ())
    if "forward" not in passes:
        found.clear()
    if "backward" in passes and not plant:
        do = torch.from_numpy(made.case.upstream()[0]).to(x.q)
        hopper.backward(problem, Inputs(**dict(x.present())), out, Partial(do, None), config, "qkv")
    yield from (job for job in found if job[0].fn.__module__.startswith("tilewise.backends.hopper"))


def compile_one(case: str, kernel: Any, grid: int, args: tuple[Any, ...], options: dict[str, Any]) -> Row:
    """Compile one kernel, and read what the assembler says of it."""
    row, start, said = Row(case, kernel.fn.__name__), time.perf_counter(), io.StringIO()
    with redirect_stdout(said):
        made = kernel.warmup(*args, grid=(grid,), **options)
    log, code = said.getvalue(), assembly(made.asm["cubin"])
    row.spills = sum(map(int, re.findall(r"(\d+) bytes spill", log)))
    row.warnings = [line.strip() for line in log.splitlines() if re.search(r"\(C75\d\d\)", line)]
    row.products, row.loops, row.shared = len(re.findall(r"\bHGMMA\b", code)), local_accesses(code), made.metadata.shared
    row.priced, row.expected = described(args)
    row.most = CASES[case].most
    row.seconds = round(time.perf_counter() - start, 1)
    return row


def described(args: tuple[Any, ...]) -> tuple[int, int]:
    """Shared memory and products that a kernel's variant says it has; 0 where it has none."""
    variant = getattr(args[-1], "described", None)
    return getattr(variant, "scratch_bytes", 0), getattr(variant, "products", 0)


_CODE = re.compile(r"^\s+/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9_.]+)([^;]*);", re.MULTILINE)


def local_accesses(code: str) -> list[int]:
    """Loads from and stores to local memory in each innermost loop that multiplies."""
    lines = [(int(at, 16), name, rest) for at, name, rest in _CODE.findall(code)]
    ends = [(int(to[1], 16), at) for at, name, rest in lines if name == "BRA" and (to := re.search(r"0x([0-9a-f]+)", rest))]
    loops = [(first, last) for first, last in ends if first < last]
    body = {loop: [name for at, name, _ in lines if loop[0] <= at <= loop[1]] for loop in loops}
    inner = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    inner = [loop for loop in inner if any(name.startswith("HGMMA") for name in body[loop])]
    return [sum(name.startswith(("LDL", "STL")) for name in body[loop]) for loop in inner]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", action="append", choices=list(CASES))
    parser.add_argument("--plant", default="", choices=("spill",))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET"):
        sys.exit("TRITON_INTERPRET must not be set: it puts the interpreter in the compiler's place")
    os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"  # read by the processes that compile
    import triton

    names = asked.case or list(CASES)
    with ProcessPoolExecutor(asked.processes, get_context("spawn")) as pool:
        rows = [row for rows in pool.map(compile_case, names, [asked.plant] * len(names)) for row in rows]
    if asked.json:
        told = {"triton": triton.__version__, "from": str(Path(triton.__file__).parents[1])}
        asked.json.write_text(json.dumps({**told, "rows": [asdict(row) for row in rows]}, indent=1))
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
