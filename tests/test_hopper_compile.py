"""The kernels of the Hopper backend compile without a GPU, in a process where Triton is not the interpreter: into no more
shared memory than their descriptions say, with as many products, and none that waits for another because registers ran out.

`TILEWISE_TRITON=<folder>` tests another Triton, installed with `pip install --target`, and `TILEWISE_KERNELS=every` compiles
the kernels that take longest, too."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from compiling import told_by
from hopper_targets import CASES, local_accesses
from triton_targets import SHARED

WARPGROUPS = 2
"""That multiply, at least; each has a loop of its own."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is there for Linux")


def compiled(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """What `hopper_targets.py` says."""
    return told_by("hopper_targets.py", folder, *arguments)["rows"]


def problems(row: dict[str, Any]) -> list[str]:
    """What is wrong with a kernel."""
    found = list(row["warnings"])
    if row["products"] != row["expected"]:
        found.append(f"{row['products']} products where there should be {row['expected']}")
    if row["shared"] > min(row["priced"] or SHARED["sm_90"], SHARED["sm_90"]):
        found.append(f"{row['shared']} bytes of shared memory where {row['priced']} are described")
    if row["products"] and len(row["loops"]) < WARPGROUPS:
        found.append(f"{len(row['loops'])} loops that multiply, and {WARPGROUPS} warpgroups at least")
    if any(count > row["most"] for count in row["loops"]):
        found.append(f"loops that multiply go to local memory: {row['loops']} times an iteration")
    return [f"{row['case']} {row['kernel']}: {one}" for one in found]


def test_every_kernel_compiles_as_it_is_described(tmp_path: Path, record_property: Any) -> None:
    rows = compiled(tmp_path)
    record_property("kernels", rows)
    assert {row["case"] for row in rows} >= {name for name, made in CASES.items() if made.passes}
    assert [line for row in rows for line in problems(row)] == []


def test_a_planted_lack_of_registers_is_found(tmp_path: Path) -> None:
    """Three warpgroups where there are registers for two."""
    [row] = compiled(tmp_path, "--case", "128 causal", "--plant", "spill")
    assert any("local memory" in line or "C75" in line for line in problems(row))


def test_loops_are_found_in_machine_code() -> None:
    lines = ["MUFU R0", "HGMMA R1", "LDL R2", "BRA 0x10", "STL R3", "BRA 0x0", "LDL R4", "BRA 0x60"]
    code = "\n".join(f"        /*{16 * at:04x}*/                   {line} ;" for at, line in enumerate(lines))
    assert local_accesses(code) == [1]
