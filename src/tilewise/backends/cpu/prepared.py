"""All of a call but the addresses of its tensors, worked out once for each layout: the others fill addresses in."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from . import threads
from .arguments import Block

LINE = 64
"""Bytes that tiles in scratch memory are aligned to."""

ALONE = 2**22
"""Operations of a call that one thread does sooner than several are woken."""


class Prepared(NamedTuple):
    """All of a call but addresses."""

    address: int
    """Of the kernel."""
    template: bytes
    block: Block
    pointers: tuple[tuple[str, int], ...]
    """Names of tensors, and the words that hold their addresses."""
    scratch_bytes: int
    """Of one thread."""
    threads: int
    held: tuple[Tensor, ...]
    """What the template has addresses of."""

    def run(self, tensors: dict[str, Tensor]) -> None:
        """Fill the addresses in and go."""
        words = self.block.make.from_buffer_copy(self.template)
        scratch = torch.empty(self.scratch_bytes * self.threads + LINE, dtype=torch.uint8, device="cpu")
        for name, at in self.pointers:
            words[at] = tensors[name].data_ptr()
        words[self.block.place["scratch_ptr"] // 8] = -(-scratch.data_ptr() // LINE) * LINE
        threads.run(self.address, ctypes.addressof(words), self.threads)


def rowwise(x: Tensor) -> Tensor:
    """A tensor whose rows are contiguous, itself where they are."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def float32(name: str, x: Tensor) -> Tensor:
    """Bias, slopes or sink as kernels read them: float32, and a bias of whole rows with neighbouring keys side by side."""
    x = x.detach().to(torch.float32)
    if name != "bias":
        return rowwise(x)
    n_step, s_step = (x.stride(axis) if x.dim() >= -axis and x.shape[axis] > 1 else 0 for axis in (-2, -1))
    return x.contiguous() if n_step and s_step not in (0, 1) else x


def steps(name: str, x: Tensor, axes: str) -> dict[str, int]:
    """A tensor's words: no address yet, and the bytes from one index of each axis to the next; a
    blank stands for an axis that does not matter."""
    places = {f"{name}_{axis}": step * x.itemsize for axis, step in zip(axes, x.stride(), strict=False) if axis != " "}
    return {f"{name}_ptr": 0, **places}
