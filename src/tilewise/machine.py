"""What machines can do, as values: rates of the data sheets, dense and at boost clock, so that times worked out from them are
bounds. Names are found by `find`; `measure` asks the processor that this runs on.

Sources of every figure stand beside it. Bytes and rates are in units of one: bytes, bytes a second, operations a second."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ._errors import OptionError

KB, MB, GB = 1024, 1024**2, 1e9
TERA = 1e12


@dataclass(frozen=True)
class Machine:
    """One device. A multiprocessor is what one tile runs on: an SM, a compute unit, a core.

    flops             operations a second of matrix products, by dtype, sums in float32; float32 is the faster of IEEE steps and
                      of three tf32 products for one, which is what kernels here do
    elementwise       float32 additions, products or comparisons a second, beside the matrix units
    hbm, l2, shared   bytes a second: memory; L2 to all multiprocessors; all their own memories together. None: not known
    shared_bytes      of one multiprocessor's own memory, and block_bytes of that for one tile
    register_bytes    of one multiprocessor; 0 where sums lie in its memory
    rows              query rows of a tile come in steps of so many: what one matrix instruction takes
    link              bytes a second to a neighbour, one way
    """

    name: str
    flops: Mapping[str, float]
    exponentials: float
    elementwise: float
    hbm: float
    l2: float | None
    shared: float | None
    multiprocessors: int
    shared_bytes: int
    block_bytes: int
    register_bytes: int
    l2_bytes: int
    rows: int = 16
    link: float | None = None

    def rate(self, dtype: str) -> float:
        """Operations a second in this dtype; `OptionError` where the machine has none."""
        if dtype not in self.flops:
            raise OptionError(f"{self.name} has no matrix units for {dtype}: it has {', '.join(self.flops)}")
        return self.flops[dtype]

    def readers(self, rows: int) -> int:
        """Warps, or groups of them, that share a tile of so many rows: each takes 32, or one instruction's."""
        return -(-rows // max(self.rows, 32))

    def ridge(self, dtype: str) -> float:
        """Operations a byte of memory at which arithmetic takes as long as HBM."""
        return self.rate(dtype) / self.hbm


Tera = tuple[float, float | None, float, float | None, float]


def _gpu(name: str, tera: Tera, chip: tuple[int, float, int, int], memory: tuple, **more: Any) -> Machine:
    """A GPU from the figures of its data sheet.

    tera     float16, bfloat16, float32 (IEEE), tf32, float64: 10¹² operations a second, dense, sums in float32
    chip     multiprocessors, boost clock in GHz, KB of shared memory a multiprocessor has and a program may use
    memory   GB/s of HBM, bytes a clock of L2 (None: not published), MB of L2
    """
    half, brain, single, tf32, double = tera
    count, ghz, kilobytes, most = chip
    bandwidth, l2, megabytes = memory
    found = {"float16": half, "bfloat16": brain, "float32": max(single, (tf32 or 0) / 3), "float64": double}
    return Machine(
        name,
        {dtype: rate * TERA for dtype, rate in found.items() if rate},
        exponentials=count * EXP2_A_CLOCK * ghz * 1e9,
        elementwise=single * TERA / 2,
        hbm=bandwidth * GB,
        l2=None if l2 is None else l2 * ghz * 1e9,
        shared=count * SHARED_A_CLOCK * ghz * 1e9,
        multiprocessors=count,
        shared_bytes=kilobytes * KB,
        block_bytes=most * KB,
        l2_bytes=megabytes * MB,
        **{"register_bytes": 256 * KB, **more},
    )


EXP2_A_CLOCK = 16
"""Results that a multiprocessor's special function units give a clock, at compute capability 7.5 to 10.0: CUDA C++ programming
guide, table of arithmetic throughput. For a compute unit of MI300X (a quarter of its 64 lanes) an assumption."""

SHARED_A_CLOCK = 128
"""Bytes a clock of a multiprocessor's shared memory: 32 banks of 4 bytes (CUDA C++ programming guide, shared memory); of an LDS
128 bytes as well (AMD CDNA 3 white paper)."""

_HOPPER = (989.4, 989.4, 66.9, 494.7, 66.9)

MACHINES: dict[str, Machine] = {
    # NVIDIA T4 data sheet: 65 TFLOP/s mixed precision, 8.1 FP32, 320 GB/s; Turing white paper: 40 SMs, 1.59 GHz, FP64 1/32,
    # 4 MB; shared memory, compute capability 7.5. L2 1.27 TB/s = 800 B a clock: Jia et al. 2019, Dissecting the T4.
    "t4": _gpu("T4", (65, None, 8.1, None, 0.254), (40, 1.59, 64, 64), (320, 800, 4), link=15.75 * GB),
    # NVIDIA A100 data sheet: 312 dense FP16 and BF16, 156 TF32, 19.5 FP32, 19.5 FP64 tensor, 1,555 GB/s (40 GB) and 2,039
    # (80 GB SXM), NVLink 600 GB/s both ways; A100 white paper: 108 SMs, 1.41 GHz, 164 KB, L2 40 MB of 5,120 B a clock.
    "a100-40gb": _gpu("A100 40GB", (312, 312, 19.5, 156, 19.5), (108, 1.41, 164, 163), (1555, 5120, 40), link=300 * GB),
    "a100": _gpu("A100 80GB SXM", (312, 312, 19.5, 156, 19.5), (108, 1.41, 164, 163), (2039, 5120, 40), link=300 * GB),
    # NVIDIA Ada white paper: 128 SMs, 2.52 GHz, 165.2 FP16 and BF16 with FP32 sums (330.3 with FP16 sums), 82.6
    # FP32 and TF32, FP64 1/64, 1,008 GB/s, 72 MB; shared memory, compute capability 8.9. PCIe 4.0 x16.
    "rtx4090": _gpu("RTX 4090", (165.2, 165.2, 82.6, 82.6, 1.29), (128, 2.52, 100, 99), (1008, None, 72), link=31.5 * GB),
    # NVIDIA H100 data sheet, half of the figures with sparsity: 989.4, TF32 494.7, FP32 and FP64 tensor 66.9, 3,350 GB/s,
    # NVLink 900 GB/s; Hopper white paper: 132 SMs, 1.83 GHz, 228 KB, 50 MB. L2 taken as on the A100: measured 5.5 to 7 TB/s.
    "h100": _gpu("H100 SXM", _HOPPER, (132, 1.83, 228, 227), (3350, 5120, 50), rows=64, link=450 * GB),
    # NVIDIA H200 data sheet: the chip of the H100, 4,800 GB/s.
    "h200": _gpu("H200", _HOPPER, (132, 1.83, 228, 227), (4800, 5120, 50), rows=64, link=450 * GB),
    # NVIDIA HGX B200 data sheet, an eighth of eight, dense: 2,250 FP16 and BF16, TF32 1,125, FP32 75, FP64 37, 8,000 GB/s,
    # NVLink 1,800 GB/s; 148 SMs, 126 MB, compute capability 10.0: 228 KB. Sums lie in 256 KB of tensor memory, which stands
    # here as `register_bytes`.
    "b200": _gpu("B200", (2250, 2250, 75, 1125, 37), (148, 1.85, 228, 227), (8000, None, 126), rows=64, link=900 * GB),
    # AMD MI300X data sheet: 1,307.4 FP16 and BF16, FP32 and FP64 matrix 163.4, XF32 653.7, 5,300 GB/s, 304 CUs, 2.1 GHz; CDNA 3
    # white paper: LDS 64 KB, L2 4 MB and 2 KB a clock in each of 8 dies, 512 KB of vector registers, seven links of 64 GB/s.
    "mi300x": _gpu(
        "MI300X", (1307.4, 1307.4, 163.4, 653.7, 163.4), (304, 2.1, 64, 64), (5300, 16384, 32),
        register_bytes=512 * KB, link=448 * GB,
    ),
}  # fmt: skip
"""By the name that `find` takes."""


def find(name: str) -> Machine:
    """The machine of this name, however it is written ("RTX 4090", "h200"); "cpu" is measured. `OptionError` lists names."""
    key = re.sub(r"[^a-z0-9]", "", name.lower())
    known = {re.sub(r"[^a-z0-9]", "", known): machine for known, machine in MACHINES.items()}
    if key == "cpu":
        return measure()
    if key not in known:
        raise OptionError(f"machine {name!r} is unknown; there are {', '.join(MACHINES)} and cpu, which is measured")
    return known[key]


def measure() -> Machine:
    """This processor, as NumPy drives it in about a second: products of 768 × 768, copies of 64 MB, exponentials; caches as the
    system tells them: a core's L2 is what a tile lives in."""
    rng = np.random.default_rng(0)
    flops = {}
    for dtype in (np.float32, np.float64):
        a = rng.normal(size=(768, 768)).astype(dtype)
        flops[np.dtype(dtype).name] = 2 * 768**3 / _seconds(lambda a=a: a @ a)
    big, few = np.ones(8 * MB), rng.normal(size=2**16).astype(np.float32)
    other, small = np.empty_like(big), np.empty_like(few)
    caches = _caches()
    own, cores = caches.get(2, 512 * KB), os.cpu_count() or 1
    return Machine(
        f"{platform.machine()} processor of {cores} cores, measured",
        flops,
        exponentials=few.size / _seconds(lambda: np.exp(few, out=small)),
        elementwise=few.size / _seconds(lambda: np.add(few, few, out=small)),
        hbm=2 * big.nbytes / _seconds(lambda: np.copyto(other, big)),
        l2=None,
        shared=None,
        multiprocessors=cores,
        shared_bytes=own,
        block_bytes=own,
        register_bytes=0,
        l2_bytes=caches.get(3, own),
    )


def _seconds(call: Callable[[], object], times: int = 5) -> float:
    """The fastest of a few calls: what the machine can do."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)


def _caches(folder: str = "/sys/devices/system/cpu/cpu0/cache") -> dict[int, int]:
    """Bytes of each level of data cache; empty where the system does not tell."""
    found = {}
    for index in sorted(Path(folder).glob("index*")):
        try:
            level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        except OSError:
            continue
        scale = {"K": KB, "M": MB}.get(size[-1:])
        if kind != "Instruction" and scale and size[:-1].isdigit():
            found[int(level)] = int(size[:-1]) * scale
    return found
