"""What the copy engines of GPUs can read of a tensor "b rows heads columns"."""

from __future__ import annotations

from torch import Tensor


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


def axes_of(x: Tensor) -> tuple[list[int], list[int]]:
    """Sizes and strides of a `legal` tensor as "b heads rows columns"."""
    step = 16 // x.element_size()  # any legal stride does along an axis of one
    strides = [stride if size > 1 else step for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True)]
    return [x.shape[0], x.shape[2], x.shape[1], x.shape[3]], [strides[0], strides[2], strides[1], 1]
