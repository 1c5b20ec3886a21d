"""Words for types. Axis letters: b batch, h query heads, g key heads, n query rows, s key rows,
t packed tokens, d head size, e value head size."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias, TypeVar

Array: TypeAlias = Any
"""An array of NumPy or of torch: descriptions keep what they are given and ask only for shape and dtype."""

A = TypeVar("A")
"""One array type throughout a value: all NumPy, or all torch."""


class Shaped(Protocol):
    """What validation needs to know of a tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...
