"""From tensors to a running kernel: descriptors of rows, and launches that cost the host little."""

# Kernels are in Triton's language, not Python's:
# pyright: reportAttributeAccessIssue=false, reportInvalidTypeForm=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from .refusals import interpreting
from .sizes import Launch
from .tape import Rows, Tape, unwatched
from .variant import slabs

_compiled: dict[Any, Any] = {}
"""Compiled kernels by everything that another compilation would depend on."""

_runtime = triton.knobs.runtime


def blocks(length: int, size: int) -> int:
    """How many blocks of a size cover a length."""
    return -(-length // size)


def legal(x: Tensor) -> bool:
    """Whether the copy engine can read `x`, of four axes: it wants the last one side by side and everything else in steps of 16
    bytes."""
    step = 16 // x.element_size()
    sizes, strides = x.shape, x.stride()
    whole = all([n == 1 or (m > 0 and m % step == 0) for n, m in zip(sizes[:3], strides[:3], strict=True)])  # noqa: C419
    return whole and x.data_ptr() % 16 == 0 and (strides[3] == 1 or sizes[3] == 1)


def readable(x: Tensor) -> Tensor:
    """`x` "b rows heads columns" such that the copy engine can read it; a copy where it is not so."""
    if legal(x):
        return x
    step = 16 // x.element_size()
    room = x.new_empty(*x.shape[:3], blocks(x.shape[3], step) * step)
    return room[..., : x.shape[3]].copy_(x)


def rows(x: Tensor, count: int) -> list[Rows | None]:
    """Descriptors of blocks of `count` rows of one head, a slab of columns each, of a `readable` tensor."""
    b, n, h, cols = x.shape
    sb, sn, sh, _ = x.stride()
    first, second = slabs(cols)
    axes = (b, h, n, cols), (sb, sh, sn)
    return [tiles(x, axes, (count, first)), tiles(x, axes, (count, second)) if second else None]


def tiles(x: Tensor, axes: tuple[tuple[int, ...], tuple[int, ...]], shape: tuple[int, int]) -> Rows:
    """A descriptor of tiles of the last two of four axes of a tensor that is `legal`: their sizes, and all but the last one's
    strides."""
    step = 16 // x.element_size()  # any legal stride does along an axis of one
    strides = [stride if size > 1 else step for size, stride in zip(*axes, strict=False)]
    return Rows(x, list(axes[0]), [*strides, 1], [1, 1, *shape])


def launch(
    kernel: Any, grid: int, args: Sequence[Any], constants: Sequence[Any], sizes: Launch, kinds: Sequence[Any] = (),
    tape: Tape | None = None,
) -> None:  # fmt: skip
    """Run `grid` programs of a kernel. What is compiled depends on the constants, the sizes, and `kinds`: of each argument that
    callers may give or not, or in several dtypes, its dtype or None."""
    if grid == 0:
        return
    device = None if interpreting() else torch.cuda.current_device()
    key = (kernel.fn, device, sizes.warps, sizes.stages, *constants, *kinds)
    found = None if device is None else _compiled.get(key)
    if tape is not None:
        tape.add(found, grid, (*args, *constants))
    if found is None:
        options = {"num_warps": sizes.warps, "num_stages": sizes.stages, "enable_fp_fusion": True}
        _compiled[key] = kernel[(grid,)](*args, *constants, **options)
        return
    stream, data, enter, leave = torch._C._cuda_getCurrentRawStream(device), None, None, None
    if not unwatched():
        enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
        data = found.launch_metadata((grid, 1, 1), stream, *args, *constants)
    found.run(grid, 1, 1, stream, found.function, found.packed_metadata, data, enter, leave, *args, *constants)
