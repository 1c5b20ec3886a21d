"""The numbers and tensors of a Gluon kernel that runs on numpy: see `gluon_on_numpy`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch

HALVES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class Number(int):
    """An integer that a kernel computes with."""

    def to(self, dtype: Any) -> Any:
        return float(self) if str(dtype) == "fp32" else self


def _lift(name: str) -> Callable[[Any, Any], Any]:
    right = getattr(int, name)

    def lifted(self: int, other: Any) -> Any:
        found = right(int(self), int(other)) if isinstance(other, int | np.integer) else NotImplemented
        return found if found is NotImplemented else Number(found)

    return lifted


for _name in "add radd sub rsub mul rmul floordiv rfloordiv mod rmod and or lt le gt ge eq ne".split():
    setattr(Number, f"__{_name}__", _lift(f"__{_name}__"))
Number.__hash__ = int.__hash__  # type: ignore[method-assign]


class Real(float):
    """A floating-point number that a kernel computes with."""

    def to(self, dtype: Any) -> Any:
        return self


class Array(np.ndarray):
    """A tensor. Half types are float32 that has been rounded."""

    @property
    def type(self) -> Any:
        return mock.Mock(layout=None)

    def to(self, dtype: Any) -> Array:
        return rounded(self, dtype)


def array(x: Any) -> Array:
    return np.asarray(x).view(Array)


def rounded(x: np.ndarray, dtype: Any) -> Array:
    """x in a type of Gluon."""
    name = str(dtype)
    if name in ("bf16", "fp16"):
        half = torch.bfloat16 if name == "bf16" else torch.float16
        return array(torch.from_numpy(np.array(x, np.float32)).to(half).float().numpy())
    return array(x.astype({"fp32": np.float32, "int32": np.int64, "int64": np.int64}[name]))


class Pointer:
    """An address in a tensor in memory, or many."""

    def __init__(self, flat: torch.Tensor, offset: Any = 0) -> None:
        self.flat, self.offset = flat, offset
        self.dtype = mock.Mock(element_ty=dtype_of(flat))

    @classmethod
    def to(cls, x: torch.Tensor) -> Pointer:
        whole = torch.as_strided(x.detach(), (x.untyped_storage().nbytes() // x.element_size() - x.storage_offset(),), (1,))
        return cls(whole)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.flat, self.offset + more)


def load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Any:
    if isinstance(pointer.offset, int | np.integer):
        found = pointer.flat[int(pointer.offset)].item()
        return Real(found) if isinstance(found, float) else Number(found)
    at = np.asarray(pointer.offset)
    keep = np.ones(at.shape, bool) if mask is None else np.broadcast_to(mask, at.shape)
    got = pointer.flat[torch.from_numpy(np.where(keep, at, 0))].to(_wide(pointer.flat)).numpy()
    return array(np.where(keep, got, other))


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    at = np.broadcast_to(np.asarray(pointer.offset), np.shape(value))
    keep = np.ones(at.shape, bool) if mask is None else np.broadcast_to(mask, at.shape)
    pointer.flat[torch.from_numpy(at[keep])] = torch.from_numpy(np.ascontiguousarray(value)[keep]).to(pointer.flat.dtype)


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in HALVES else x.dtype


def dtype_of(x: torch.Tensor) -> Any:
    from triton.experimental.gluon import language as gl

    return {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}.get(x.dtype, gl.int32)
