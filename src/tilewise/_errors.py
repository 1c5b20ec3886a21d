"""What can go wrong, as types. Every message names the axis and shows both shapes."""

from __future__ import annotations

from collections.abc import Sequence


class ShapeError(ValueError):
    """An axis of one argument does not fit the same axis of another."""


class DtypeError(TypeError):
    """An argument has a type, dtype or device that attention is not defined on."""


class OptionError(ValueError):
    """A number or a choice lies outside its range."""


class Unsupported(ValueError):
    """A backend was named and refuses; `reasons` holds every reason it gave."""

    def __init__(self, backend: str, reasons: Sequence[str]) -> None:
        self.backend = backend
        self.reasons = tuple(reasons)
        super().__init__(f"backend {backend!r} cannot run this: " + "; ".join(self.reasons))

    def __reduce__(self) -> tuple:
        return Unsupported, (self.backend, self.reasons)


class PeerLost(RuntimeError):
    """Another rank died, fell silent or gave up while this one was waiting; every rank of the group raises the same.

    `rank` counts within the group, `step` within the plan (−1: while ranks still compare what they are about to do)."""

    def __init__(self, rank: int, step: int, why: str) -> None:
        self.rank, self.step, self.why = rank, step, why
        super().__init__(f"rank {rank} of the group was lost at step {step}: {why}")

    def __reduce__(self) -> tuple:
        return PeerLost, (self.rank, self.step, self.why)
