"""Standard attention as it is usually run: one operation after another, every score in memory between them. `cost.standard`
has the same counts.

Source: Dao et al. 2022, FlashAttention, algorithms 0 and 3."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .._errors import OptionError
from ..cost import Meter, Passes, steps
from ..cost.stored import SHARED, Step
from ..problem import Inputs, Problem
from ..tiles import TileShape, blocks
from .plain import dropout_factor


class Meters(NamedTuple):
    """One for each direction."""

    forward: Meter
    backward: Meter


class Answer(NamedTuple):
    """o "b n h e" and the gradients of Σ do∘o by q, k and v."""

    o: np.ndarray
    grads: Inputs[np.ndarray]


def attention(
    problem: Problem,
    x: Inputs[np.ndarray],
    do: np.ndarray,
    passes: Passes = Passes(),
    shape: TileShape | None = None,
    meters: Meters | None = None,
) -> Answer:
    """Forward and backward, kernel by kernel; products in tiles of `shape`, or whole. Where `passes` names no kernel for the
    scale or the mask, the product and the softmax beside it do that."""
    if problem.score.softcap is not None or problem.score.alibi is not None or problem.score.sink:
        raise OptionError("standard attention is written down here without softcap, alibi and sink")
    if problem.dropout is not None and not passes.dropout:
        raise OptionError("standard attention is written down here with dropout as a pass of its own: passes.dropout")
    forward, backward = meters or Meters(Meter.of(problem), Meter.of(problem))
    memory = _Memory(problem, passes, shape, forward, {name: _by_head(problem, a) for name, a in x.present() if name in "qkv"})
    memory.tensors |= {"do": np.asarray(do, np.float64).transpose(0, 2, 1, 3)}
    memory.tensors |= {} if x.bias is None else {"bias": np.asarray(x.bias, np.float64)}
    for memory.meter, way in ((forward, False), (backward, True)):
        for step in steps(problem, passes, backward=way):
            memory.meter.kernel()
            memory.run(step)
    o, dq, dk, dv = (memory.tensors[name].transpose(0, 2, 1, 3) for name in ("o", "dq", "dk", "dv"))
    return Answer(o, Inputs(dq, dk[:, :, :: problem.group], dv[:, :, :: problem.group]))


@dataclass
class _Memory:
    """Every tensor by name, "b h rows cols"; of k, v and their gradients each key head stands once for every query head that
    shares it, and is counted once."""

    problem: Problem
    passes: Passes
    shape: TileShape | None
    meter: Meter
    tensors: dict[str, np.ndarray]

    def run(self, step: Step) -> None:
        """One kernel: read, compute, write."""
        if step.product:
            left, right = step.reads.split()
            self.tensors[step.writes] = self.product(step.writes, left, right)
        else:
            for name in step.reads.split():
                self.count(name, self.meter.read)
            self.tensors |= _ELEMENTWISE[step.name](self, *(self.tensors[name] for name in step.reads.split()))
        for name in step.writes.split():
            self.count(name, self.meter.write)

    def count(self, name: str, move: Callable) -> None:
        """A whole tensor goes one way."""
        x = self.tensors[name]
        move(x[:, :: self.problem.group] if name in SHARED else x, name, itemsize=1 if name == "keep" else None)

    def product(self, out: str, left: str, right: str) -> np.ndarray:
        """Of each head "rows inner" by "inner cols", tile by tile of the output; dk and dv are sums over the group."""
        a, b = self.tensors[left], self.tensors[right]
        a = a.swapaxes(-1, -2) if out in ("dv", "dk") else a
        b = b.swapaxes(-1, -2) if out in ("s", "dp") else b
        if self.shape is None:
            self.count(left, self.meter.read)
            self.count(right, self.meter.read)
        shape = self.shape or TileShape(max(a.shape[2], 1), max(b.shape[3], 1))
        x = np.zeros((*a.shape[:2], a.shape[2], b.shape[3]))
        for entry, head in np.ndindex(*a.shape[:2]):
            mine, theirs = (head // self.problem.group if name in SHARED else head for name in (left, right))
            for i in blocks(a.shape[2], shape.block_m):
                for j in blocks(b.shape[3], shape.block_n):
                    rows, cols = a[entry, head, i], b[entry, head, :, j]
                    if self.shape is not None:
                        self.meter.read(rows, left, (entry, mine, "rows", i.start))
                        self.meter.read(cols, right, (entry, theirs, "cols", j.start))
                    self.meter.product(len(rows), rows.shape[1], cols.shape[1])
                    x[entry, head, i, j] = rows @ cols
        x = x * self.problem.score.scale if out in ("s", "dq", "dk") and not self.scaled else x
        return x if out not in ("dk", "dv") else _by_head(self.problem, _by_group(self.problem, x))

    @property
    def scaled(self) -> bool:
        """Whether a pass of its own scales."""
        return self.passes.scale or self.passes.copies

    @property
    def keep(self) -> np.ndarray:
        return np.broadcast_to(self.problem.keep(), self.tensors["s"].shape)


def _softmax(memory: _Memory, s: np.ndarray) -> dict[str, np.ndarray]:
    s = s if memory.passes.mask else np.where(memory.keep, s, -np.inf)
    top = s.max(-1, initial=-np.inf, keepdims=True)
    weights = np.exp(s - np.where(np.isneginf(top), 0, top))
    memory.meter.exponential(weights.size)
    total = weights.sum(-1, keepdims=True)
    return {"p": weights / np.where(total == 0, 1, total)}


def _dropout(memory: _Memory, p: np.ndarray) -> dict[str, np.ndarray]:
    factor = np.broadcast_to(dropout_factor(memory.problem), p.shape)
    return {"pd": p * factor, "keep": factor}


_ELEMENTWISE: dict[str, Callable[..., dict[str, np.ndarray]]] = {
    "k/√d": lambda memory, k: {"k": k * memory.problem.score.scale},
    "contiguous": lambda memory, q, k, v: {"q": q, "k": k, "v": v},
    "scale": lambda memory, s: {"s": s * memory.problem.score.scale},
    "bias": lambda memory, s, bias: {"s": s + bias},
    "mask": lambda memory, s: {"s": np.where(memory.keep, s, -np.inf)},
    "p = softmax(s)": _softmax,
    "dropout": _dropout,
    "dropout backward": lambda memory, dp, keep: {"dp": dp * keep},
    "ds = p∘(dp − Σ dp∘p)": lambda memory, p, dp: {"ds": p * (dp - (dp * p).sum(-1, keepdims=True))},
    "mask backward": lambda memory, ds: {"ds": np.where(memory.keep, ds, 0)},
    "scale backward": lambda memory, ds: {"ds": ds * memory.problem.score.scale},
    "gradients back": lambda memory, dq, dk, dv: {"dq": dq, "dk": dk * memory.problem.score.scale, "dv": dv},
}


def _by_head(problem: Problem, x: np.ndarray) -> np.ndarray:
    """ "b rows heads d" → "b h rows d" in float64, each key head once for every query head that shares it."""
    x = np.asarray(x, np.float64).transpose(0, 2, 1, 3)
    return x if x.shape[1] == problem.h else np.repeat(x, problem.group, axis=1)


def _by_group(problem: Problem, x: np.ndarray) -> np.ndarray:
    """ "b h rows d" → "b rows g d", summed over the query heads that share a key head."""
    b, _, rows, d = x.shape
    return x.reshape(b, problem.g, problem.group, rows, d).sum(2).transpose(0, 2, 1, 3)
