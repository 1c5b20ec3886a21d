"""Seconds of everything a rank does on its own: attend, merge, copy, finish. What moves bytes costs them at the memory's rate,
what multiplies costs operations at the kernel's; both are arrays where what is asked about is.

Source: Williams et al. 2009, Roofline."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .links import SPLIT, TILE, Machine
from .program import Plan

Amount = float | np.ndarray


@dataclass(frozen=True)
class Prices:
    """Prices of a plan's operations on one kind of device. Only sizes of the plan are looked at, never its programs."""

    plan: Plan
    machine: Machine

    def attend(self, rows: Amount, pairs: Amount, heads: int, full: bool | np.ndarray) -> np.ndarray:
        """One block: query rows, visible pairs of a head over the batch, query heads, and whether no pair of it is hidden.

        launch + max(operations / rate, bytes / bandwidth), of pairs + rows · edge pairs, 2(d + e) operations each forward and
        2(3d + 2e) backward; slower where there are too few tiles for the processors (`_crowding`). 0 where no row sees
        anything."""
        p, m, backward = self.plan.problem, self.machine, self.plan.backward
        rates = m.rates(backward)
        rows, pairs = np.asarray(rows, float), np.asarray(pairs, float)
        lines = np.maximum(p.b * rows, 1)  # of a score matrix
        keys = pairs / lines
        worked = pairs + lines * np.where(full, rates.edge, rates.torn_edge)
        tiles = p.b * heads * np.maximum(rows / TILE, 1) * np.maximum(keys / SPLIT, 1)
        rate = rates.at(max(p.d, p.e)) * np.where(full, 1, rates.torn) * np.minimum(1, tiles / m.processors)
        operations = worked * heads * 2 * (3 * p.d + 2 * p.e if backward else p.d + p.e)
        if backward:
            operations = operations * self._crowding(keys, -(-heads // p.group), full)
        read = "q do stats dq" if backward else "q part"
        moved = heads * sum(rows * self.plan.row_bytes(kind) for kind in read.split())
        moved = moved + keys * -(-heads // p.group) * self.plan.row_bytes("kv") * (3 if backward else 1)
        seconds = m.launch_s + np.maximum(operations / rate, moved / m.hbm_bytes_s)
        return np.where(rows > 0, seconds, 0.0)

    def _crowding(self, keys: np.ndarray, heads: int, full: bool | np.ndarray) -> np.ndarray:
        """How many times as long backward takes because dk and dv, two thirds of it, have a tile for every `TILE` keys of a
        key head only: of unequal tiles, where something is hidden, a quarter of the last wave is empty."""
        seen = np.where(full, keys, 2 * keys)  # keys that any row sees, of a triangle
        waves = self.plan.problem.b * heads * np.maximum(seen / TILE, 1) / self.machine.processors
        return (1 + 2 * np.where(full, np.maximum(1, 1 / waves), 1 + 0.25 / waves)) / 3

    def begin(self, rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Before the first operation: keys and values are packed; backward also takes rowsum(do∘o)."""
        p, packed = self.plan.problem, self.copy("kv", keys, self.plan.problem.g)
        return packed + self._move(rows * p.h * 2 * self.plan.row_bytes("do")) if self.plan.backward else packed

    def end(self, rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """After the last: backward rounds its gradients."""
        p, size = self.plan.problem, self.plan.row_bytes
        if not self.plan.backward:
            return np.zeros(np.shape(rows))
        return self._move(rows * p.h * (size("dq") + size("q"))) + self._move(keys * p.g * (size("dkv") + size("kv")))

    def combine(self, kind: str, rows: Amount, heads: int) -> np.ndarray:
        """Merge or add: both are read, one is written."""
        return self._move(3 * self.plan.row_bytes(kind) * np.asarray(rows, float) * heads)

    def onto(self, kind: str, rows: Amount, heads: int) -> np.ndarray:
        """What a block has given joins what was there before: a part is read by the block's own kernel, gradients are added."""
        if kind != "part":
            return self.combine(kind, rows, heads)
        return np.asarray(rows, float) * heads * self.plan.row_bytes(kind) / self.machine.hbm_bytes_s

    def copy(self, kind: str, rows: Amount, heads: int) -> np.ndarray:
        return self._move(2 * self.plan.row_bytes(kind) * np.asarray(rows, float) * heads)

    def finish(self, rows: Amount, heads: int) -> np.ndarray:
        """The part is read, output and lse are written."""
        width = sum(self.plan.row_bytes(kind) for kind in ("part", "out", "lse"))
        return self._move(width * np.asarray(rows, float) * heads)

    def alone(self, rows: float, pairs: float) -> float:
        """The whole problem on one device, in one call: the measure of efficiency. `rows`: queries that see anything."""
        p = self.plan.problem
        return float(self.attend(rows, pairs, p.h, pairs == p.b * p.n * p.s))

    def _move(self, size: np.ndarray) -> np.ndarray:
        return np.where(size > 0, self.machine.launch_s + size / self.machine.hbm_bytes_s, 0.0)
