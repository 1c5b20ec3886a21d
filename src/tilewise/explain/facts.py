"""A run's numbers as the page says them: from its trace and from the cost model, made into text here and nowhere else."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import cost
from ..cost import Moved
from ..cost.blocks import footprint as blocks_on_chip
from ..tiles import TileShape, blocks
from .tilemap import count
from .trace import Trace

SIGNS = {
    "q": "Q", "k": "K", "v": "V", "o": "O", "lse": "L", "m": "m", "l": "ℓ", "s": "S", "p": "P",
    "do": "dO", "delta": "D", "dq": "dQ", "dk": "dK", "dv": "dV", "dp": "dP", "ds": "dS", "bias": "bias",
}  # fmt: skip
"""What the page calls a tensor."""


def exactly(size: int) -> str:
    """Bytes, every one of them."""
    return f"{size:,} B"


def traffic(size: float) -> str:
    """Bytes of traffic for the eye: MB and GB are powers of ten."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.{1 if size < 1000 * scale else 0}f} {unit}"
    return f"{size:.0f} B"


def operations(flops: float) -> str:
    """Floating-point operations for the eye."""
    for unit, scale in (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("kFLOP", 1e3)):
        if flops >= scale:
            return f"{flops / scale:.1f} {unit}"
    return f"{flops:.0f} FLOP"


def tiny(x: float) -> str:
    """A small error: 4.4·10⁻¹⁶."""
    if x == 0:
        return "0"
    digits, power = f"{x:.1e}".split("e")
    return f"{digits}·10{str(int(power)).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"


def of(trace: Trace, mask: str, source: str) -> dict[str, str]:
    """What texts have slots for."""
    p, shape, counts = trace.problem, trace.shape, count(trace.kinds)
    flash, standard = cost.forward(p, shape), cost.standard(p)
    return {
        **{axis: str(getattr(p, axis)) for axis in ("n", "s", "d", "e")},
        "heads": str(p.h) if p.h == p.g else f"{p.h} : {p.g}",
        "mask": mask,
        "br": str(shape.block_m),
        "bc": str(shape.block_n),
        "dtype": p.dtype,
        "source": source,
        "flash_bytes": exactly(flash.bytes),
        "std_bytes": exactly(standard.bytes),
        "least_bytes": exactly(flash.least_bytes),
        "ratio": f"{standard.bytes / flash.bytes:.1f}×",
        "flash_flops": operations(flash.flops),
        "std_flops": operations(standard.flops),
        "lse_bytes": exactly(p.h * p.n * p.lse_itemsize),
        "p_bytes": exactly(p.h * p.n * p.s * p.itemsize),
        "err": tiny(trace.error),
        "tiles": f"{counts.full} FULL, {counts.partial} PARTIAL, {counts.empty} EMPTY",
    }


def tensors(moved: dict[str, Moved]) -> list[dict[str, Any]]:
    """A row for each tensor of a cost: read and written bytes."""
    return [{"sign": SIGNS[name], "read": exactly(x.read), "write": exactly(x.write)} for name, x in moved.items()]


def footprint(trace: Trace) -> dict[str, dict[str, int]]:
    """What a visit holds on chip, in bytes, by the size of its tile: the inputs in their dtype, all else in float32."""
    p, shape = trace.problem, trace.shape
    sizes = {}
    for i in blocks(p.n, shape.block_m):
        for j in blocks(p.s, shape.block_n):
            tile = TileShape(i.stop - i.start, j.stop - j.start)
            numbers = blocks_on_chip(tile, p.d, p.e)
            q, k, v = (numbers[name] * p.itemsize for name in "qkv")
            s, o, ml = (numbers[name] * 4 for name in ("s", "o", "m, l"))
            sizes[f"{tile.block_m}×{tile.block_n}"] = {"q": q, "k": k, "v": v, "S": s, "P": s, "O": o, "ml": ml}
    return sizes


def peak(trace: Trace) -> int:
    """The most a visit holds: scores or weights, never both, since the weights take the scores' place."""
    return max(sum(size.values()) - size["P"] for size in footprint(trace).values())


def number(x: float, digits: int = 3) -> str:
    """As the script writes numbers: whole ones without digits after the point, a true minus, −∞."""
    if np.isinf(x):
        return "∞" if x > 0 else "−∞"
    text = str(int(x)) if x == int(x) else f"{x:.{digits}f}"
    return text.replace("-", "−")
