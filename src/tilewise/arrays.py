"""What descriptions do with the numbers and arrays they are given: keep them as they come, check that they are integers,
answer in the library and on the device of whoever asks, and compare by what they hold."""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import Any

import numpy as np

from ._errors import DtypeError, OptionError
from ._typing import Array

FOREVER = 1 << 60
"""Further than any position: a limit that is none."""

HOST = np.zeros(0, np.int64)
"""What an answer in NumPy on the host is `like`."""


def library(x: Array) -> Any:
    """The module whose functions take `x`: torch for a tensor, NumPy for everything else.

    The two share most names, so descriptions are written once. What they spell apart is below.
    """
    return sys.modules["torch"] if hasattr(x, "detach") else np


def placed(x: Array, like: Array) -> Array:
    """`x` in the library and on the device of `like`. Only the way to the host waits for a device. The way from it does not:
    pageable memory is read before the call returns, and pinned memory, which its owner may change any time, is copied first."""
    if library(like) is np:
        return host(x)
    if library(x) is np:
        x = library(like).as_tensor(np.array(x), device="cpu")
    on_host = x.device.type == "cpu"
    x = x.clone() if on_host and x.is_pinned() else x
    return x.to(like.device, non_blocking=on_host)


def indices(part: slice, size: int, like: Array = HOST) -> Array:
    """The indices that `part` takes of `size` rows, int64."""
    xp = library(like)
    return np.arange(*part.indices(size), dtype=np.int64) if xp is np else xp.arange(*part.indices(size), device=like.device)


def search(rows: Array, x: Array) -> Array:
    """The index of the first of `rows` "b count", which increase, at or after each x "b n"; either b may be 1."""
    xp, shared = library(x), len(rows) == 1
    rows, x = (rows[0], x) if shared else (rows, xp.broadcast_to(x, (len(rows), x.shape[1])))
    if xp is not np:
        return xp.searchsorted(rows.contiguous(), x.contiguous())
    if shared:
        return np.searchsorted(rows, x)
    found = [np.searchsorted(row, of_row) for row, of_row in zip(rows, x, strict=True)]
    return np.array(found, dtype=np.int64).reshape(x.shape)


def running_maximum(x: Array) -> Array:
    """The largest entry of each row "b n" up to each place."""
    return np.maximum.accumulate(x, axis=1) if library(x) is np else x.cummax(1).values


def host(x: Array) -> np.ndarray:
    """`x` as a NumPy array on the host, whatever library holds it."""
    return x.detach().cpu().numpy() if hasattr(x, "detach") else np.asarray(x)


def is_number(x: Array) -> bool:
    """True for one number, a plain int or a symbolic one; False for an array or a list."""
    return isinstance(x, int) or not (hasattr(x, "shape") or isinstance(x, (list, tuple)))


def integers(name: str, value: Array) -> Array:
    """`value` as one integer (a symbolic one stays symbolic) or as an array with at least one axis, whose dtype
    `check_integers` looks at later: a description may be made inside a graph, where an array has no dtype yet.

    >>> integers("sizes", [3, 4]), integers("size", np.int64(5))
    (array([3, 4]), 5)
    """
    if isinstance(value, int):
        return value
    if isinstance(value, (list, tuple)):
        return np.asarray(value) if len(value) else np.zeros(0, np.int64)
    if is_number(value):
        if not type(value).__name__.startswith("Sym"):
            raise DtypeError(f"{name} must be an integer or an array of integers, got {type(value).__name__}")
        return value
    if len(value.shape) == 0:
        check_integers(name, value)
        return int(value) if isinstance(value, (np.generic, np.ndarray)) else value.reshape(1)
    return value


def check_number(name: str, value: Any) -> None:
    """Raise unless `value` is one real number, plain or NumPy's."""
    if not isinstance(value, (int, float, np.integer, np.floating)):
        raise DtypeError(f"{name} must be a number, got {type(value).__name__}")


def check_integers(name: str, value: Array | None) -> None:
    """Raise unless an array holds integers."""
    kind = str(getattr(value, "dtype", "int")).removeprefix("torch.")
    if value is not None and not kind.startswith(("int", "uint")):
        raise DtypeError(f"{name} must hold integers, got {kind}")


def bounded(name: str, value: Array) -> Array:
    """`integers`, where one number must also lie within ±2⁶⁰ so that sums with positions cannot overflow."""
    value = integers(name, value)
    if is_number(value) and not -FOREVER <= value <= FOREVER:
        raise OptionError(f"{name} must lie within ±2**60, got {value}")
    return value


def wide(x: Array, like: Array = HOST) -> Array:
    """Integers as int64 within ±2⁶⁰, where `like` is: unsigned ones must not wrap, nor sums overflow."""
    xp, x = library(like), placed(x, like)
    if x.dtype == xp.uint64:
        x = x.view(xp.int64)
        x = xp.where(x < 0, FOREVER, x)  # from 2⁶³ on, the bits are those of a negative number
    return xp.clip(x.astype(np.int64) if xp is np else x.long(), -FOREVER, FOREVER)


class Value:
    """A frozen dataclass that compares by what it holds, arrays of any library included."""

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(_alike(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))  # type: ignore[arg-type]

    def __hash__(self) -> int:
        held = (getattr(self, f.name) for f in fields(self))  # type: ignore[arg-type]
        return hash((type(self).__name__, *(tuple(x.shape) if hasattr(x, "shape") else x for x in held)))


def _alike(a: Any, b: Any) -> bool:
    if hasattr(a, "shape") or hasattr(b, "shape"):
        return hasattr(a, "shape") and hasattr(b, "shape") and np.array_equal(host(a), host(b))
    return a == b
