"""What descriptions do with the numbers and arrays they are given: keep them as they come, check that they are integers,
bring them to the host when asked, and compare by what they hold."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

from ._errors import DtypeError, OptionError
from ._typing import Array

FOREVER = 1 << 60
"""Further than any position: a limit that is none."""


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


def wide(x: Array) -> np.ndarray:
    """Integers on the host as int64 within ±2⁶⁰: unsigned ones must not wrap, nor sums overflow."""
    x = host(x)
    x = np.minimum(x, np.uint64(FOREVER)) if x.dtype == np.uint64 else x
    return np.clip(x.astype(np.int64), -FOREVER, FOREVER)


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
