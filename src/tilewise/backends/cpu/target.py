"""What machine code is made for: an instruction set, and how many numbers a register of it holds."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import llvmlite.binding as llvm

LEAST_L2 = 2**19
"""Bytes of a core's second-level cache where nobody says."""


@dataclass(frozen=True)
class Target:
    """An instruction set. `lanes`: float32 numbers in a register; `registers`: how many vector registers there are; `amx`:
    whether products are made of tiles of bfloat16, see `amx`."""

    triple: str
    cpu: str
    features: str
    lanes: int
    registers: int
    amx: bool = False

    @property
    def rows(self) -> int:
        """Rows of the tile that one step of a product keeps in registers; with `vectors` of columns they fill most of them."""
        return 8 if self.registers >= 32 else 4

    @property
    def vectors(self) -> int:
        """Vectors in a row of that tile: the queries of a full panel."""
        return 2 if self.amx else 3

    @property
    def depth(self) -> int:
        """Numbers of a row that a product takes at once."""
        return 32 if self.amx else self.lanes

    @property
    def step(self) -> int:
        """What a panel looks at begins at a multiple of so many keys."""
        return 32 if self.amx else 1

    @property
    def panel(self) -> int:
        """Queries of a full panel."""
        return self.vectors * self.lanes

    def machine(self) -> llvm.TargetMachine:
        """LLVM's generator of code for this target. All instruction sets are initialized, whichever are there."""
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        found = llvm.Target.from_triple(self.triple)
        return found.create_target_machine(self.cpu, self.features, opt=3, reloc="pic", codemodel="small")


AVX2 = Target("x86_64-unknown-linux-gnu", "haswell", "+avx2,+fma,+f16c", 8, 16)
AVX512 = Target(
    "x86_64-unknown-linux-gnu", "skylake-avx512", "+avx512f,+avx512bw,+avx512vl,+avx512dq,+f16c,-prefer-256-bit", 16, 32
)
AMX = Target("x86_64-unknown-linux-gnu", "sapphirerapids", "+amx-tile,+amx-bf16,+avx512bf16,-prefer-256-bit", 16, 32, amx=True)
NEON = Target("aarch64-unknown-linux-gnu", "generic", "+neon", 4, 32)


@lru_cache
def host() -> Target | None:
    """The widest of these that this computer has, with all its other features; None if it has none of them."""
    triple, cpu = llvm.get_process_triple(), llvm.get_host_cpu_name()
    found = llvm.get_host_cpu_features()
    flags = ",".join(f"{'+' if on else '-'}{name}" for name, on in sorted(found.items()))
    if platform.machine().lower() in ("aarch64", "arm64"):
        return Target(triple, cpu, flags, NEON.lanes, NEON.registers)
    if all(found.get(name) for name in ("avx512f", "avx512bw", "avx512vl", "avx512dq", "fma", "f16c")):
        return Target(triple, cpu, f"{flags},-prefer-256-bit", AVX512.lanes, AVX512.registers)
    if all(found.get(name) for name in ("avx2", "fma", "f16c")):
        return Target(triple, cpu, flags, AVX2.lanes, AVX2.registers)
    return None


@lru_cache
def l2_bytes() -> int:
    """The second-level cache of a core, as Linux tells it."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text().strip()
        size = int(text.removesuffix("K")) * 1024 if text.endswith("K") else int(text)
    except (OSError, ValueError):
        return LEAST_L2
    return max(size, LEAST_L2)


@lru_cache
def name() -> str:
    """What the computer is called in the names of files that hold its code."""
    return f"{llvm.get_host_cpu_name()}-{os.uname().machine if hasattr(os, 'uname') else platform.machine()}"
