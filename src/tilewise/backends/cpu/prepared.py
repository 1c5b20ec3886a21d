"""All of a call but the addresses of its tensors, worked out once for each layout: the others fill addresses in."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from . import threads
from .arguments import LINE, Block

ALONE = 2**22
"""Operations of a call that one thread does sooner than several are woken."""

KEPT = 2**18
"""Bytes of scratch memory that every thread of Python keeps: handing so much back and asking for it anew takes longer than a
small call."""


class Kept(threading.local):
    """The scratch memory that a thread of Python keeps. What it holds is of no meaning once a kernel has returned, and a thread
    waits for the kernel that it has called."""

    def __init__(self) -> None:
        self.memory = (ctypes.c_char * (KEPT + LINE))()
        self.address = aligned(ctypes.addressof(self.memory))


class Prepared(NamedTuple):
    """All of a call but addresses."""

    address: int
    """Of the kernel."""
    template: bytes
    block: Block
    pointers: tuple[int, ...]
    """The words that hold the addresses of tensors."""
    scratch_bytes: int
    """Of one thread."""
    threads: int
    held: tuple[Tensor, ...]
    """What the template has addresses of."""

    def run(self, tensors: Iterable[Tensor]) -> None:
        """Fill the addresses in, those of the tensors in the order of `pointers`, and go."""
        words, size, memory = self.block.make.from_buffer_copy(self.template), self.scratch_bytes * self.threads, None
        for at, tensor in zip(self.pointers, tensors, strict=True):
            words[at] = tensor.data_ptr()
        if size > KEPT:
            memory = torch.empty(size + LINE, dtype=torch.uint8, device="cpu")
        words[self.block.place["scratch_ptr"] // 8] = _kept.address if memory is None else aligned(memory.data_ptr())
        threads.run(self.address, ctypes.addressof(words), self.threads)


def aligned(address: int) -> int:
    """The first address from this one on at which a tile may begin."""
    return -(-address // LINE) * LINE


_kept = Kept()


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
