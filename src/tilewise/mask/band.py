"""Masks that are a band around the diagonal: their interval is arithmetic on the query's own position."""

from __future__ import annotations

from dataclasses import dataclass

from .._errors import OptionError
from .._typing import Array
from ..arrays import FOREVER, integers, is_number, library
from .base import Align, Encoded, Mask


@dataclass(frozen=True, eq=False)
class Full(Mask):
    """Every query sees every key."""

    def keep(self, i: Array, j: Array, b: Array = 0, h: Array = 0) -> Array:
        return (i == i) & (j == j)

    @property
    def kind(self) -> str:
        return "NONE"

    def encode(self) -> Encoded:
        return Encoded("full()", [], [])


@dataclass(frozen=True, eq=False)
class Causal(Mask):
    """Query at position i sees keys at positions j ≤ i.

    `align` says where the query rows sit when n ≠ s. "bottom-right": the last query is at the last key; "top-left": the
    first query is at the first key. For n = 2, s = 4:

        bottom-right  1 1 1 0      top-left  1 0 0 0
                      1 1 1 1                1 1 0 0
    """

    align: Align = "bottom-right"

    def __post_init__(self) -> None:
        if self.align not in ("bottom-right", "top-left"):
            raise OptionError(f"Causal: align must be 'bottom-right' or 'top-left', got {self.align!r}")

    def keep(self, i: Array, j: Array, b: Array = 0, h: Array = 0) -> Array:
        return j <= i

    def interval(self, b: Array, i: Array) -> tuple[Array, Array]:
        return library(i).full_like(i, -FOREVER), i + 1

    def encode(self) -> Encoded:
        return Encoded("causal()" if self.align == "bottom-right" else "causal('top-left')", [], [])


@dataclass(frozen=True, eq=False)
class Window(Mask):
    """Query at position i sees `left` other keys before it, itself, and `right` other keys after it. None: no limit.

    Window(left=1, right=0) for n = s = 4:      1 0 0 0
                                                1 1 0 0
                                                0 1 1 0
                                                0 0 1 1
    """

    left: int | None = None
    right: int | None = None

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            if getattr(self, name) is None:
                continue
            size = integers(f"Window: {name}", getattr(self, name))
            object.__setattr__(self, name, size)
            if not is_number(size) or size < 0:
                raise OptionError(
                    f"Window: {name} counts other visible keys and cannot be negative, got {size} (None: no limit)"
                )

    def keep(self, i: Array, j: Array, b: Array = 0, h: Array = 0) -> Array:
        after = (j >= i - min(self.left, FOREVER)) if self.left is not None else (j == j)
        return after & ((j <= i + min(self.right, FOREVER)) if self.right is not None else (i == i))

    def interval(self, b: Array, i: Array) -> tuple[Array, Array]:
        xp = library(i)
        lo = xp.full_like(i, -FOREVER) if self.left is None else i - min(self.left, FOREVER)
        return lo, xp.full_like(i, FOREVER) if self.right is None else i + min(self.right, FOREVER) + 1

    def encode(self) -> Encoded:
        sizes = [min(size, FOREVER) for size in (self.left, self.right) if size is not None]
        left, right = ("None" if size is None else "INT" for size in (self.left, self.right))
        return Encoded(f"window({left}, {right})", sizes, [])
