"""Compiles the kernels of the Triton backend for GPUs that are not here, with the sizes that it would choose there, and says
what came out, as JSON: one row a kernel. A program of its own, for Triton must not be the interpreter:

    python tests/triton_targets.py --target sm_90 --target gfx942 [--processes 2] [--effort every] [--case 128]
        [--plant large] [--json FILE]
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import torch

from tilewise.cases import Case
from tilewise.dropout import Dropout
from tilewise.mask import Causal, Lengths, Where, Window
from tilewise.problem import Inputs, Options, Partial, Problem

SHARED = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "sm_120": 101376, "gfx942": 65536}
"""Bytes of shared memory that one program may have."""

KEYS = Causal() & Window(9)
TABLE = Where(np.arange(37)[:, None] % 3 != np.arange(53) % 5)


HOPPER = ("sm_90",)

FAILS = (("gfx942", "table float16 32/48 dk_dv_kernel"), ("gfx942", "everything bfloat16 48/72 dk_dv_kernel"))
"""What Triton cannot compile: its passes for AMD want booleans in shared memory, where they need a whole number of bytes."""

SERIAL = (("sm_90", "band bfloat16 64 dk_dv_kernel"),)
"""Sizes that were measured to be the fastest although the assembler serialises their products."""


@dataclass(frozen=True)
class Kernels:
    """One problem whose kernels are compiled, forward and every gradient."""

    case: Case
    dtype: str = "bfloat16"
    targets: tuple[str, ...] = tuple(SHARED)
    """Where it is always compiled; elsewhere only on demand. No target at all: it takes long and says little more."""

    @property
    def name(self) -> str:
        return f"{self.case.name} {self.dtype} {self.case.d}" + (f"/{self.case.e}" if self.case.e != self.case.d else "")


def _case(name: str, d: int, e: int = 0, mask: Any = None, **options: Any) -> Case:
    extras = {key: options.pop(key) for key in ("bias", "alibi", "sink") if key in options}
    return Case(name, d=d, e=e or d, options=Options(mask, **options), **extras)


ALL = {"bias": "b 1 1 s", "alibi": "h", "sink": True, "softcap": 5.0, "dropout": Dropout(0.1, seed=3)}

CASES = (
    Kernels(_case("plain", 64), targets=HOPPER),
    Kernels(_case("plain", 128), targets=HOPPER),
    Kernels(_case("band", 64, mask=Causal()), targets=(*HOPPER, "sm_120")),
    Kernels(_case("band", 128, mask=Causal())),
    Kernels(_case("array", 80, mask=Causal() & Lengths([53, 17])), targets=(*HOPPER, "sm_100")),
    Kernels(_case("table", 32, 48, mask=TABLE), "float16", (*HOPPER, "sm_80", "gfx942")),
    Kernels(_case("bias", 64, bias="h n s"), "float16", (*HOPPER, "sm_120")),
    Kernels(_case("everything", 48, 72, KEYS, **ALL), targets=HOPPER),
    Kernels(_case("band", 256, mask=Causal()), targets=(*HOPPER, "sm_100", "sm_120")),
    Kernels(_case("plain", 512)),
    Kernels(_case("band", 32, mask=Causal()), "float32", (*HOPPER, "sm_80", "gfx942")),
    Kernels(_case("plain", 128, bias="s"), "float64", (*HOPPER, "sm_120", "gfx942")),
    Kernels(_case("plain", 200, 17), "float16", ()),
    Kernels(_case("band", 512, mask=Causal()), targets=()),
    Kernels(_case("bias", 128, mask=Causal(), bias="h n s"), targets=()),
    Kernels(_case("bias", 256, mask=Causal(), bias="h n s"), targets=()),
    Kernels(_case("bias", 512, mask=Causal(), bias="h n s"), targets=()),
    Kernels(_case("table", 128, mask=TABLE), targets=()),
    Kernels(_case("table", 512, mask=TABLE), targets=()),
    Kernels(_case("band", 64, mask=Causal()), "float32", ()),
    Kernels(_case("band", 128, mask=Causal()), "float32", ()),
    Kernels(_case("bias", 256, mask=Causal(), bias="h n s"), "float32", ()),
    Kernels(_case("bias", 512, mask=Causal(), bias="h n s"), "float32", ()),
    Kernels(_case("bias", 64, mask=Causal(), bias="h n s"), "float64", ()),
    Kernels(_case("bias", 256, mask=Causal(), bias="h n s"), "float64", ()),
    Kernels(_case("bias", 512, mask=Causal(), bias="h n s"), "float64", ()),
    Kernels(_case("table", 64, mask=TABLE), "float32", ()),
)
"""What covers every piece of the kernels: masks, scores, one slab and two, every dtype, careful kernels, the widest heads."""

EFFORTS = ("few", "some", "every", "more")


def dealt() -> list[str]:
    """For each case one of its targets, the one that has the fewest so far; "" where it has none."""
    given = dict.fromkeys(SHARED, 0)
    found = []
    for made in CASES:
        target = min(made.targets, key=lambda name: given[name], default="")
        found.append(target)
        given[target] = given.get(target, 0) + 1
    return found


def chosen(target: str, effort: str = "some", part: str = "") -> list[int]:
    """Cases whose name holds `part`: for few, each for one target and some for every target; those that are always compiled for
    a target; those that are for any; or more."""
    once = dealt()
    keep = {
        "few": lambda at: once[at] == target, "some": lambda at: target in CASES[at].targets,
        "every": lambda at: bool(CASES[at].targets), "more": lambda at: True,
    }[effort]  # fmt: skip
    return [at for at, made in enumerate(CASES) if keep(at) and part in made.name]


@dataclass
class Row:
    """What came of one kernel."""

    target: str
    case: str
    kernel: str
    sizes: str
    seconds: float = 0.0
    shared: int = 0
    error: str = ""
    registers: int | None = None
    spills: int | None = None
    """Bytes, stores and loads."""
    products: int | None = None
    """Instructions of the tensor cores of a Hopper, HGMMA."""
    warnings: list[str] = field(default_factory=list)
    """That the assembler makes products wait for each other."""


def compile_case(target: str, at: int, plant: str = "") -> list[Row]:
    """Every kernel of one case, for one target."""
    from tilewise.backends.triton import offline

    offline.pretend(gpu(target), list(SHARED).index(target))
    made = CASES[at]
    return [compile_one(job, Row(target, made.name, job.name, sizes_of(job))) for job in jobs(target, made, plant)]


def gpu(target: str) -> Any:
    """The target in Triton's words."""
    from triton.backends.compiler import GPUTarget

    kind, _, number = target.partition("_")
    return GPUTarget("cuda", int(number), 32) if kind == "sm" else GPUTarget("hip", target, 64)


def jobs(target: str, made: Kernels, plant: str) -> Iterator[Any]:
    """What forward and backward of a case launch on a target."""
    offline, config, backend = (import_module(f"tilewise.backends.triton{name}") for name in (".offline", ".config", ""))
    here = config.Machine(target.replace("sm_", "cuda").replace("gfx", "hip"), SHARED[target])
    config.machine = lambda device: here  # pyright: ignore[reportAttributeAccessIssue]
    x, (do, dlse) = made.case.inputs(), made.case.upstream()
    x = x.map(lambda array: torch.from_numpy(np.ascontiguousarray(array)).to(getattr(torch, made.dtype)))
    problem = Problem.describe(x, made.case.options)
    sizes = backend.configure(problem)
    if plant == "large":
        sizes = replace(sizes, forward=config.Launch(128, 128, 8, 6))
    with offline.recorded() as found:
        out = backend.forward(problem, x, sizes)
        dlse = torch.from_numpy(dlse).to(out.lse) if made.case.sink else None
        grads = Partial(torch.from_numpy(do).to(x.q), dlse)
        backend.backward(problem, Inputs(**dict(x.present())), out, grads, sizes, [name for name, _ in x.present()])
        if made.case.sink:  # one kernel for all cases, so one case has it
            parts = import_module("tilewise.backends.triton.parts")
            parts.absorb(out, out)
            parts.total(out.o, grads.o, dlse)
    if plant:  # nothing else is asked
        found[1:] = []
    if plant == "error":
        found.append(offline.Job(import_module("planted_kernel").wrong_kernel, (1, (), (16,), sizes.forward)))
    yield from found


def sizes_of(job: Any) -> str:
    """The sizes that a job is launched with, as text."""
    found = next((x for x in job.rest if hasattr(x, "warps")), None)
    if found is None:
        return ""
    kind = " careful" if found.noted else "" if found.apart else " one loop"
    return f"{found.block_m}×{found.block_n}, {found.warps} warps, {found.stages} stages{kind}"


def compile_one(job: Any, row: Row) -> Row:
    """Compile one kernel, and read what the assembler says of it."""
    start, said = time.perf_counter(), io.StringIO()
    try:
        with redirect_stdout(said):
            made = job.compile()
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        row.error = f"{type(error).__name__}: {lines[-1].strip() if lines else ''}"
        return row
    row.seconds, row.shared = round(time.perf_counter() - start, 2), made.metadata.shared
    log = said.getvalue()
    if "registers" in log:
        row.registers = max(map(int, re.findall(r"Used (\d+) registers", log)))
        row.spills = sum(map(int, re.findall(r"(\d+) bytes spill", log)))
        row.warnings = [line.strip() for line in log.splitlines() if re.search(r"\(C75\d\d\).* serialized", line)]
    if row.target == "sm_90" and "bfloat16" in row.case:
        row.products = len(re.findall(r"\bHGMMA\b", assembly(made.asm["cubin"])))
    return row


def assembly(cubin: bytes) -> str:
    """The machine code of an NVIDIA kernel, as text."""
    import triton

    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        return subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout


def all_rows(work: list[tuple[str, int]], processes: int, plant: str = "") -> Iterator[Row]:
    """Every kernel, in processes of their own; those that take longest first."""
    work = sorted(work, key=lambda one: -cost(CASES[one[1]]))
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        for done in as_completed([pool.submit(compile_case, *one, plant) for one in work]):
            yield from done.result()


def cost(made: Kernels) -> int:
    """Which cases take long to compile: those of wide numbers and much to do."""
    return {"float32": 40, "float64": 30}.get(made.dtype, 10) + len(made.case.bias) + 5 * (made.case.options.mask is not None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", action="append", choices=list(SHARED))
    parser.add_argument("--case", default="", help="only those whose name holds this")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--effort", choices=EFFORTS, default="some")
    parser.add_argument("--plant", default="", choices=("error", "large"))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET"):
        sys.exit("TRITON_INTERPRET must not be set: it puts the interpreter in the compiler's place")
    os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"  # read by the processes that compile
    import triton

    work = [(target, at) for target in asked.target or SHARED for at in chosen(target, asked.effort, asked.case)]
    start, rows = time.perf_counter(), []
    for row in all_rows(work, asked.processes, asked.plant):
        rows.append(asdict(row))
        said = row.error or f"{row.shared} bytes" + (", too many" if row.shared > SHARED[row.target] else "")
        print(f"{row.target} {row.case} {row.kernel} [{row.sizes}]: {said}, {row.seconds} s", flush=True)
    told = {"triton": triton.__version__, "from": triton.__file__, "seconds": time.perf_counter() - start, "rows": rows}
    if asked.json:
        asked.json.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
