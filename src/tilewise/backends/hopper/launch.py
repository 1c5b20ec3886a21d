"""From tensors to a running kernel: descriptors of tiles, and launches that cost the host little."""

# pyright: reportAttributeAccessIssue=false, reportMissingImports=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..reads import axes_of
from ..tape import Tape, start
from .layouts import in_memory
from .variant import Known

DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


class Tiles(TensorDescriptor):
    """A descriptor of tiles that is known to be legal: whoever makes it has looked."""

    def __init__(self, base: Tensor | None, shape: list[int], strides: list[int], block_shape: list[int], layout: Any) -> None:
        self.base, self.shape, self.strides, self.block_shape, self.layout = base, shape, strides, block_shape, layout
        self.padding, self.round_f32_to_tf32 = "zero", False

    def moved(self, base: Tensor | None) -> Tiles:
        """The same tiles of another tensor."""
        return Tiles(base, self.shape, self.strides, self.block_shape, self.layout)


def tiles(x: Tensor, rows: int, columns: int) -> Tiles:
    """A descriptor of tiles of `rows` rows of one head, of a `legal` tensor "b rows heads columns"; 0 past its ends."""
    return Tiles(x, *axes_of(x), [1, 1, rows, columns], in_memory(rows, columns, DTYPES[x.dtype]))


def launch(
    kernel: Any, grid: int, args: Sequence[Any], variant: Any, registers: int, kinds: Sequence[Any] = (),
    tape: Tape | None = None, together: bool = False,
) -> None:  # fmt: skip
    """Run `grid` programs of a kernel whose threads have so many registers at first. What is compiled depends on the variant
    and on `kinds`: of each argument that callers may give or not, or in several dtypes, its dtype or None. `together`, which
    depends on the variant, too: none starts before there is room for all, so that they may wait for each other beside whatever
    else runs."""
    device = torch.cuda.current_device()
    options = {"num_warps": 4, "maxnreg": registers, "enable_fp_fusion": True, "launch_cooperative_grid": together}
    start(kernel, grid, (*args, Known(variant)), options, (kernel.fn, device, variant, *kinds), device, tape)


def launch_plain(
    kernel: Any, grid: int, args: Sequence[Any], warps: int, kinds: Sequence[Any], tape: Tape | None = None
) -> None:
    """Run `grid` programs of a kernel that is Triton's own language; what is compiled depends on `kinds`."""
    device = torch.cuda.current_device()
    start(kernel, grid, tuple(args), {"num_warps": warps}, (kernel.fn, device, *kinds), device, tape)
