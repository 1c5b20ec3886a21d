"""Sizes cut down to a machine's shared memory, by an estimate of what Triton's pipelines take of it. Sizes were measured on a
Hopper; there they are known to fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .sizes import Launch, Machine
from .variant import padded

PASSES = ("forward", "dq", "dk_dv", "dbias")
LEAST = 16
"""Rows and keys that a block has at least."""

ASIDE = 2048
"""Bytes for barriers, and for sums across warps."""


def fitted(launch: Launch, name: str, machine: Machine, itemsize: int, head: tuple[int, int], bias: int = 0) -> Launch:
    """A pass's sizes with as many stages, then as large blocks, as fit in the machine's shared memory. `head`: d and e. `bias`:
    bytes of an element of a bias, if there is one."""
    if machine.hopper and not bias:
        return launch
    launch = relieved(launch, name, machine, itemsize, head)
    while shared_bytes(launch, name, machine, itemsize, head, bias) > machine.shared_bytes:
        m, n = launch.block_m, launch.block_n
        if launch.stages > 1:
            launch = replace(launch, stages=launch.stages - 1)
        elif max(m, n) == LEAST:
            break
        elif (n > m or m == LEAST) and n > LEAST:
            launch = replace(launch, block_n=n // 2)
        else:
            launch = replace(launch, block_m=m // 2)
    few = launch.block_m * launch.block_n <= 256  # elements, for which many warps would do the same work twice
    return replace(launch, warps=min(launch.warps, 4)) if few else launch


def relieved(launch: Launch, name: str, machine: Machine, itemsize: int, head: tuple[int, int]) -> Launch:
    """A pass's sizes with more warps, then fewer own rows, until its sums, weights and operands take half the registers, where
    products take them from there. (Newer ones read shared memory, and a Blackwell's add up in a memory of their own.)"""
    if itemsize > 2 or machine.name in ("cuda90", "cuda100", "cuda103") or machine.name.startswith("hip"):
        return launch
    while True:
        m, n, d, e = launch.block_m, launch.block_n, padded(head[0]), padded(head[1])
        sums = {"forward": m * e, "dq": m * d, "dk_dv": n * (d + e), "dbias": m * n}[name]
        own = {"forward": m * d, "dq": m * (d + e), "dk_dv": n * (d + e), "dbias": 0}[name]
        weights = m * n * (3 if name == "forward" else 6)  # halves: a score and a weight; two of each in backward
        if (sums + own // 2 + weights // 2) // (32 * launch.warps) <= 128:
            return launch
        if launch.warps < 8:
            launch = replace(launch, warps=2 * launch.warps)
        elif (n if name == "dk_dv" else m) > LEAST:
            launch = replace(launch, block_n=n // 2) if name == "dk_dv" else replace(launch, block_m=m // 2)
        else:
            return launch


def all_fitted(
    sizes: Sequence[Launch], machine: Machine, itemsize: int, head: tuple[int, int], bias: int
) -> tuple[Launch, ...]:
    """forward, dq, dk_dv and dbias, and careful, whose blocks go on dividing the others'."""
    *mains, careful = sizes
    mains = [fitted(one, name, machine, itemsize, head, bias) for one, name in zip(mains, PASSES, strict=True)]
    for name in PASSES[:3]:
        careful = fitted(careful, name, machine, itemsize, head, bias)
    m, n = min(one.block_m for one in mains), min(one.block_n for one in mains)
    return *mains, replace(careful, block_m=min(careful.block_m, m), block_n=min(careful.block_n, n))


def shared_bytes(launch: Launch, name: str, machine: Machine, itemsize: int, head: tuple[int, int], bias: int = 0) -> int:
    """About what a pass takes: the rows that a program owns, as many of the others and tiles of a bias as are loaded ahead, and
    tiles of weights on their way into a product. Never much less than Triton 3.5 to 3.9 take."""
    m, n, stages = launch.block_m, launch.block_n, launch.stages
    d, e = padded(head[0]), padded(head[1])
    rows, keys = m * (d if name == "forward" else d + e), n * (d + e)
    own, other = (keys, rows) if name == "dk_dv" else (rows, keys)
    weights = m * n * (1 if name == "forward" else 2)
    if machine.name in ("cuda90", "cuda100", "cuda103"):  # products read shared memory; a Blackwell's want some of it turned
        turned = other if machine.name != "cuda90" and name != "forward" else 0
        count = own + stages * other + turned
    elif itemsize == 2 or machine.name.startswith("hip"):  # what a program owns is in registers by the time it loads ahead
        count = max(own, (stages - 1) * other) + weights
    else:
        count = own + max(stages - 1, 1) * other + weights
    if itemsize == 4 and not machine.name.startswith("hip"):  # in two parts, for products of three
        count = count * 3 // 2
    return count * itemsize + stages * m * n * bias + ASIDE
