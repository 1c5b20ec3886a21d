"""Attention by tiles, forward and backward, in the words every kernel uses. Each output tile is a fold over its visits:
o and lse, and dq, over a block of query rows; dk and dv over a block of key rows.

Source: Dao 2023, FlashAttention-2, algorithms 1 and 2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..cost import Meter
from ..mask import Tile
from ..problem import Inputs, Partial, Problem
from ..softmax import State, absorb, empty, finish, merge, pivot, weigh
from ..tiles import TileShape, Visit, blocks, walk, walk_keys

Watch = Callable[[Visit, int, State], None]
"""Called after each absorbed tile with the visit, the query head and the state so far."""


@dataclass(frozen=True)
class Head:
    """One query head x of one batch entry b: what a program of a kernel knows."""

    problem: Problem
    inputs: Inputs[np.ndarray]
    meter: Meter
    b: slice
    x: int

    def rows(self, name: str, part: slice) -> np.ndarray:
        """Rows of q, k or v, brought on chip."""
        head = self.x if name == "q" else self.x // self.problem.group
        x = np.asarray(getattr(self.inputs, name), np.float64)[self.b.start, part, head]
        return self.meter.read(x, name, (self.b.start, head, part.start))

    def logits(self, q: np.ndarray, k: np.ndarray, visit: Visit) -> np.ndarray:
        """s "rows cols": scaled, biased, capped, and -inf where hidden."""
        self.meter.product(len(q), q.shape[1], len(k))
        s = self.problem.score.value(q @ k.T, self._bias(visit) + self._alibi(visit))
        return s if visit.kind == Tile.FULL else np.where(self._keep(visit), s, -np.inf)

    def distance(self, visit: Visit) -> np.ndarray:
        """|i − j| in positions."""
        i, j = self.problem.layout.queries(self.b, visit.i).position[0], self.problem.layout.keys(self.b, visit.j).position[0]
        return np.abs(i[:, None] - j)

    def drop(self, visit: Visit) -> np.ndarray | float:
        """What dropout multiplies the weights by."""
        if self.problem.dropout is None:
            return 1.0
        q, kv = self.problem.layout.queries(self.b, visit.i), self.problem.layout.keys(self.b, visit.j)
        keep = self.problem.dropout.keep(q.sequence[0][:, None], self.x, q.position[0][:, None], kv.position[0])
        return keep * self.problem.dropout.scale

    def alibi(self) -> float:
        """This head's slope."""
        slopes = np.asarray(self.inputs.alibi, np.float64)
        return slopes[self.x] if slopes.ndim == 1 else slopes[self.b.start % len(slopes), self.x]

    def _keep(self, visit: Visit) -> np.ndarray:
        keep = self.problem.mask.grid(self.problem.layout, self.b, visit.i, visit.j)[0]
        return keep[self.x % len(keep)]

    def _bias(self, visit: Visit) -> np.ndarray | float:
        if self.inputs.bias is None:
            return 0.0
        bias = np.asarray(self.inputs.bias, np.float64)
        bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
        whole = (self.b, slice(self.x, self.x + 1), visit.i, visit.j)
        at = tuple(part if size > 1 else slice(0, 1) for part, size in zip(whole, bias.shape, strict=True))
        return self.meter.read(bias[at], "bias", tuple(part.start for part in at))[0, 0]

    def _alibi(self, visit: Visit) -> np.ndarray | float:
        return 0.0 if self.inputs.alibi is None else -self.alibi() * self.distance(visit)


def forward(
    problem: Problem, x: Inputs[np.ndarray], shape: TileShape, meter: Meter | None = None, watch: Watch | None = None
) -> Partial:
    """o "b n h e" and lse "b h n": for each block of query rows a fold of `absorb` over the tiles it visits."""
    meter = meter or Meter.of(problem)
    o, lse = np.zeros((problem.b, problem.n, problem.h, problem.e)), np.zeros((problem.b, problem.h, problem.n))
    for head in heads(problem, x, meter):
        for i, visits in walk(problem, shape, head.b):
            q, state = head.rows("q", i), empty(i.stop - i.start, problem.e)
            for visit in visits:
                s = head.logits(q, head.rows("k", visit.j), visit)
                v = head.rows("v", visit.j)
                state = absorb(state, s, v, head.drop(visit))
                meter.product(len(q), s.shape[1], problem.e)
                meter.exponential(s.size + len(s))
                if watch is not None:
                    watch(visit, head.x, state)
            if x.sink is not None:
                state = merge(state, sink_state(len(q), problem.e, x.sink[head.x]))
                meter.exponential(2 * len(q))
            tile, at = finish(state), (head.b.start, head.x, i.start)
            o[head.b.start, i, head.x] = meter.write(tile[0], "o", at)
            lse[head.b.start, head.x, i] = meter.write(tile[1], "lse", at)
    return Partial(o, lse)


def backward(
    problem: Problem, x: Inputs[np.ndarray], saved: Partial, grads: Partial, shape: TileShape, meter: Meter | None = None
) -> Inputs[np.ndarray]:
    """Gradients of Σ do∘o + Σ dlse∘lse, with s and p recomputed tile by tile from lse; `grads` is (do, dlse).

    dv = pᵀ·do    dp = do·vᵀ    ds = p∘(dp − delta + dlse)    dq = scale·ds·k    dk = scale·dsᵀ·q    delta = rowsum(do∘o)
    """
    meter = meter or Meter.of(problem)
    do = np.asarray(grads.o, np.float64)
    delta = np.einsum("bnhe,bnhe->bhn", meter.read(do, "do"), meter.read(saved.o, "o"))
    meter.write(delta, "delta")
    out = Inputs(
        *(np.zeros(a.shape) for a in (x.q, x.k, x.v)),
        *(None if a is None else np.zeros(a.shape) for a in (x.bias, x.alibi, x.sink)),
    )
    rows = Rows(problem, do, np.asarray(saved.lse), delta - np.asarray(grads.lse))
    meter.kernel()
    for head in heads(problem, x, meter):
        _dq(head, rows, shape, out)
    meter.kernel()
    for head in heads(problem, x, meter):
        _dk_dv(head, rows, shape, out)
        add_sink(out, head, rows)
    return out


@dataclass(frozen=True)
class Rows:
    """What backward keeps of each query row: do, lse, and total = delta − dlse, which is all ds needs of the row."""

    problem: Problem
    do: np.ndarray
    lse: np.ndarray
    total: np.ndarray

    def load(self, head: Head, i: slice) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        b, at = head.b.start, (head.b.start, head.x, i.start)
        lse = head.meter.read(self.lse[b, head.x, i], "lse", at)
        total = head.meter.read(self.total[b, head.x, i], "delta", at)
        return head.meter.read(self.do[b, i, head.x], "do", at), lse, total


def recompute(head: Head, visit: Visit, q: np.ndarray, k: np.ndarray, v: np.ndarray, row: tuple) -> tuple[np.ndarray, ...]:
    """Of one tile: the weights p after dropout, ds by q·k + extra, and which pairs are seen."""
    do, lse, total = row
    s = head.logits(q, k, visit)
    seen = ~np.isneginf(s)
    p = np.where(seen, np.exp(s - pivot(lse)[:, None]), 0)
    drop = head.drop(visit)
    ds = np.where(seen, p * (do @ v.T * drop - total[:, None]), 0)
    head.meter.product(len(q), v.shape[1], len(k))
    head.meter.exponential(p.size)
    return p * drop, np.where(seen, ds * head.problem.score.slope(np.where(seen, s, 0)), 0), seen


def _dq(head: Head, rows: Rows, shape: TileShape, out: Inputs[np.ndarray]) -> None:
    """dq, and the gradients of bias and alibi, of one head: a fold over each block of query rows."""
    b = head.b.start
    for i, visits in walk(head.problem, shape, head.b):
        q, row = head.rows("q", i), rows.load(head, i)
        dq = np.zeros_like(q)
        for visit in visits:
            k, v = head.rows("k", visit.j), head.rows("v", visit.j)
            _, ds, seen = recompute(head, visit, q, k, v, row)
            dq += head.problem.score.scale * weigh(ds, k, seen)
            head.meter.product(len(q), len(k), k.shape[1])
            add_extras(out, ds, head, visit)
        out.q[b, i, head.x] = head.meter.write(dq, "dq", (b, head.x, i.start))


def _dk_dv(head: Head, rows: Rows, shape: TileShape, out: Inputs[np.ndarray]) -> None:
    """dk and dv of one head's share of its key head: a fold over each block of key rows. The first head of a group brings
    k and v on chip, the last one writes the sums."""
    b, g, group = head.b.start, head.x // head.problem.group, head.x % head.problem.group
    idle = Head(head.problem, head.inputs, Meter.of(head.problem), head.b, head.x)
    for j, visits in walk_keys(head.problem, shape, head.b):
        source = head if group == 0 else idle
        k, v = source.rows("k", j), source.rows("v", j)
        dk, dv = np.zeros_like(k), np.zeros_like(v)
        for visit in visits:
            q, row = head.rows("q", visit.i), rows.load(head, visit.i)
            p, ds, seen = recompute(head, visit, q, k, v, row)
            dk += head.problem.score.scale * weigh(ds.T, q, seen.T)
            dv += weigh(p.T, row[0], seen.T)
            head.meter.product(len(k), len(q), k.shape[1] + v.shape[1])
        out.k[b, j, g] += dk
        out.v[b, j, g] += dv
        if group == head.problem.group - 1:
            head.meter.write(dk, "dk", (b, g, j.start))
            head.meter.write(dv, "dv", (b, g, j.start))


def heads(problem: Problem, x: Inputs[np.ndarray], meter: Meter) -> list[Head]:
    return [Head(problem, x, meter, b, h) for b in blocks(problem.b, 1) for h in range(problem.h)]


def sink_state(rows: int, e: int, sink: float) -> State:
    """The state of a key whose logit is `sink` and whose value is nothing."""
    return State(np.full(rows, float(sink)), np.ones(rows), np.zeros((rows, e)))


def add_extras(out: Inputs[np.ndarray], ds: np.ndarray, head: Head, visit: Visit) -> None:
    """Add a tile's ds to the gradients of bias and alibi."""
    b = head.b.start
    if out.bias is not None:
        _add_bias(out.bias, ds, (b, head.x, visit.i, visit.j))
    if out.alibi is not None:
        slopes = out.alibi if out.alibi.ndim == 2 else out.alibi[None]
        slopes[b % len(slopes), head.x] -= (ds * head.distance(visit)).sum()


def add_sink(out: Inputs[np.ndarray], head: Head, rows: Rows) -> None:
    """Add a head's share to the gradient of its sink, which is a key whose value is nothing."""
    if out.sink is not None and head.inputs.sink is not None:
        lse, total = rows.lse[head.b.start, head.x], rows.total[head.b.start, head.x]
        out.sink[head.x] += (np.exp(head.inputs.sink[head.x] - pivot(lse)) * -total)[~np.isneginf(lse)].sum()


def _add_bias(total: np.ndarray, ds: np.ndarray, at: tuple[int, int, slice, slice]) -> None:
    """Add a tile's ds to the bias gradient, summing along every axis that the bias was broadcast over."""
    whole = total.reshape((1,) * (4 - total.ndim) + total.shape)
    for axis in (0, 1):
        if whole.shape[2 + axis] == 1:
            ds = ds.sum(axis, keepdims=True)
    index = tuple(slice(None) if size == 1 else a for a, size in zip(at, whole.shape, strict=True))
    whole[index] += ds.reshape(whole[index].shape)
