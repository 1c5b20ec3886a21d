"""How long a machine needs at least, and for what: the slowest of its parts, each as fast as its data sheet says.

Source: Williams, Waterman & Patterson 2009, Roofline."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..machine import Machine
from .count import Cost

MEMORY = ("HBM", "L2", "shared")
"""The parts that move bytes."""


class Roofline(NamedTuple):
    """Seconds that each part of a machine needs for its share alone: "matrix", "exp", "HBM", "L2" and "shared" memory, where
    its rate is known. `bound`: seconds under which nothing can be, as if all parts of a kernel overlapped perfectly."""

    seconds: dict[str, float]
    bound: float

    @property
    def binds(self) -> str:
        """The part that needs longest."""
        return max(self.seconds, key=lambda name: self.seconds[name])


def roofline(price: Cost, machine: Machine, dtype: str, readers: int = 1, cached: bool = True) -> Roofline:
    """Lower bounds on the time of one kernel. `readers`: see `Cost.on_chip` and `Machine.readers`. `cached`: L2 serves whatever
    is asked for again while a kernel runs, so that HBM moves `least_bytes`; else HBM moves every byte that the walk asks for,
    as the papers count."""
    seconds = {
        "matrix": price.flops / machine.rate(dtype),
        "exp": price.exponentials / machine.exponentials,
        "HBM": (price.least_bytes if cached else price.bytes) / machine.hbm,
    }
    if machine.l2 is not None:
        seconds["L2"] = price.bytes / machine.l2
    if machine.shared is not None:
        seconds["shared"] = price.on_chip(readers) / machine.shared
    return Roofline(seconds, max(seconds.values()))


def in_turn(kernels: Iterable[Roofline]) -> Roofline:
    """Kernels one after another: what each part needs in all, and the sum of the bounds."""
    total: dict[str, float] = {}
    bound = 0.0
    for one in kernels:
        total = {part: total.get(part, 0.0) + seconds for part, seconds in one.seconds.items()}
        bound += one.bound
    return Roofline(total, bound)
