"""From tensors to a running kernel: descriptors of rows, and launches that cost the host little."""

# Kernels are in Triton's language, not Python's:
# pyright: reportAttributeAccessIssue=false, reportInvalidTypeForm=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..tape import Rows, Tape, start
from .refusals import interpreting
from .sizes import Launch
from .variant import slabs


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
    options = {"num_warps": sizes.warps, "num_stages": sizes.stages, "enable_fp_fusion": True}
    start(kernel, grid, (*args, *constants), options, key, device, tape)
