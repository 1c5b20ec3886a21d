"""Kernels compile without a GPU, for every sort of GPU, in processes where Triton is not the interpreter: all of them, into no
more shared memory than there is, and on a Hopper with the tensor cores and without losses that the assembler warns of.

`TILEWISE_TRITON=<folder>` tests another Triton, installed with `pip install --target`. `TILEWISE_KERNELS=few` compiles every
case for one GPU, `TILEWISE_KERNELS=every` every case for every GPU: see `make kernels`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from compiling import told_by
from triton_targets import CASES, FAILS, SERIAL, SHARED, chosen

EFFORT = os.environ.get("TILEWISE_KERNELS", "some")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is there for Linux")


def compiled(folder: Path, *arguments: str) -> dict[str, Any]:
    """What `triton_targets.py` says."""
    return told_by("triton_targets.py", folder, *arguments)


def problems(told: dict[str, Any]) -> list[str]:
    """What is wrong with what was compiled."""
    found = []
    for row in told["rows"]:
        what = f"{row['target']} {row['case']} {row['kernel']} [{row['sizes']}]"
        if row["error"]:
            found.append(f"{what}: {row['error']}")
        if row["shared"] > SHARED[row["target"]]:
            found.append(f"{what}: {row['shared']} bytes of shared memory where there are {SHARED[row['target']]}")
        if row["case"].endswith(("bfloat16 64", "bfloat16 128")):
            found += [f"{what}: {line}" for line in row["warnings"]]
    return found


@pytest.mark.parametrize("target", SHARED)
def test_every_kernel_compiles_and_fits(target: str, tmp_path: Path, record_property: Any) -> None:
    told = compiled(tmp_path, "--target", target, "--effort", EFFORT)
    record_property("kernels", told)
    assert {row["case"] for row in told["rows"]} == {CASES[at].name for at in chosen(target, EFFORT)}
    known = tuple(f"{where} {what}" for where, what in (*FAILS, *SERIAL))
    assert [line for line in problems(told) if not line.startswith(known)] == []
    if target == "sm_90":
        multiplies_on_its_tensor_cores(told)


def multiplies_on_its_tensor_cores(told: dict[str, Any]) -> None:
    """A Hopper's main kernels in bf16 do, and what the assembler says of registers is known."""
    for d in (64, 128):
        mine = [row for row in told["rows"] if row["case"] == f"plain bfloat16 {d}"]
        rows = {row["kernel"]: row for row in mine if not row["sizes"].endswith("careful")}
        assert set(rows) == {"forward_kernel", "delta_kernel", "dq_kernel", "dk_dv_kernel"}
        assert all((row["products"] > 0) == (kernel != "delta_kernel") for kernel, row in rows.items())
        assert all(row["registers"] <= 255 and row["spills"] is not None for row in rows.values())


def test_a_planted_error_is_found(tmp_path: Path) -> None:
    told = compiled(tmp_path, "--target", "sm_90", "--case", "plain bfloat16 64", "--plant", "error")
    [line] = problems(told)
    assert line.startswith("sm_90 plain bfloat16 64 wrong_kernel [") and "]: CompilationError" in line


def test_planted_sizes_that_do_not_fit_are_found(tmp_path: Path) -> None:
    told = compiled(tmp_path, "--target", "sm_120", "--case", "band bfloat16 128", "--plant", "large")
    [line] = problems(told)
    assert "forward_kernel [128×128, 8 warps, 6 stages]" in line and "where there are 101376" in line
