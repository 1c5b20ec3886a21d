"""FlashAttention-1's order: keys outside, query rows inside. A row's o, m and l lie in memory between its tiles, o divided by l
every time, and so does dq; a meter counts every trip. The fold itself, `absorb`, is the one that FlashAttention-2 makes.

Source: Dao et al. 2022, FlashAttention, algorithms 1 and 4 (appendix B.3, B.4); `cost.keys_outside` has the same counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

from ..cost import Accounting, Meter
from ..cost.keys_outside import LEAN
from ..problem import Inputs, Partial, Problem
from ..softmax import State, absorb, empty, pivot, weigh
from ..tiles import TileShape, Visit, blocks, walk_keys
from .flash import Head, Rows, add_extras, add_sink, heads, recompute, sink_state


class Kept(NamedTuple):
    """What forward leaves in memory: o "b n h e", and of each row m and l "b h n". With lse alone, m = lse and l = 1."""

    o: np.ndarray
    m: np.ndarray
    l: np.ndarray  # noqa: E741 - the paper's ℓ

    @property
    def partial(self) -> Partial:
        """o and lse = m + log l."""
        return Partial(self.o, _lse(self.m, self.l))


def forward(
    problem: Problem, x: Inputs[np.ndarray], shape: TileShape, accounting: Accounting = LEAN, meter: Meter | None = None
) -> Kept:
    """For each block of keys and each block of query rows that sees any of it: read o, m and l, absorb the tile, write them."""
    meter = meter or Meter.of(problem)
    each = (problem.b, problem.h, problem.n)
    kept = Kept(np.zeros((problem.b, problem.n, problem.h, problem.e)), np.full(each, -np.inf), np.zeros(each))
    memory = {(head.b.start, head.x): _Memory(head, kept, accounting) for head in heads(problem, x, meter)}
    if "o" in accounting.zeroed:
        for one in memory.values():
            one.fill(shape)
        meter.kernel()
    for column in _columns(problem, x, shape, meter):
        k, v = column.heads[0].rows("k", column.j), column.heads[0].rows("v", column.j)
        for head in column.heads:
            rows = memory[head.b.start, head.x]
            for visit in column.visits:
                q, state = head.rows("q", visit.i), rows.load(visit.i)
                s = head.logits(q, k, visit)
                state = absorb(state, s, v, head.drop(visit))
                meter.product(len(q), s.shape[1], problem.e)
                meter.exponential(s.size + len(s))
                rows.store(visit.i, state, last=column.j.start == column.last[visit.i.start])
    for one in memory.values():
        one.fill_unseen(shape)
    return kept


def backward(
    problem: Problem,
    x: Inputs[np.ndarray],
    saved: Kept,
    grads: Partial,
    shape: TileShape,
    accounting: Accounting = LEAN,
    meter: Meter | None = None,
) -> Inputs[np.ndarray]:
    """Gradients of Σ do∘o + Σ dlse∘lse in one pass over blocks of keys: dk and dv stay on chip, dq goes back and forth."""
    meter = meter or Meter.of(problem)
    work = _Backward(problem, x, saved, grads, shape, accounting, meter)
    work.begin()
    for column in _columns(problem, x, shape, meter):
        work.column(column)
    work.end()
    return work.out


class Column(NamedTuple):
    """One block of keys, the tiles that visit it, and the query heads that share these keys; `last`: where the last block of
    keys begins that a block of query rows visits."""

    j: slice
    visits: list[Visit]
    heads: list[Head]
    last: dict[int, int]


def _columns(problem: Problem, x: Inputs[np.ndarray], shape: TileShape, meter: Meter) -> Iterator[Column]:
    """Every block of keys of every key head that anybody visits."""
    for _, group in groupby(heads(problem, x, meter), lambda head: (head.b.start, head.x // problem.group)):
        same = list(group)
        columns = list(walk_keys(problem, shape, same[0].b))
        last = {visit.i.start: j.start for j, visits in columns for visit in visits}
        yield from (Column(j, visits, same, last) for j, visits in columns if visits)


@dataclass
class _Memory:
    """o, m and l of one head's rows, as they lie in memory."""

    head: Head
    kept: Kept
    accounting: Accounting

    def __post_init__(self) -> None:
        self.seen: set[int] = set()

    def start(self, rows: int) -> State:
        """A row before any key: empty, or its sink."""
        sink, e = self.head.inputs.sink, self.head.problem.e
        return empty(rows, e) if sink is None else sink_state(rows, e, sink[self.head.x])

    def load(self, i: slice) -> State:
        """The state so far; a row that was never written starts on chip."""
        if i.start not in self.seen:
            return self.start(i.stop - i.start)
        b, x, meter, at = self.head.b.start, self.head.x, self.head.meter, self._at(i)
        o = meter.read(self.kept.o[b, i, x], "o", at, self.accounting.accumulator(self.head.problem))
        m, l = self.kept.m[b, x, i], self.kept.l[b, x, i]  # noqa: E741
        for name in self.accounting.statistics:
            meter.read(m, name, at)
        return State(m, l, o * l[:, None])

    def store(self, i: slice, state: State, last: bool) -> None:
        """Write the state, o divided by l; m and l, or their lse."""
        b, x, meter, at = self.head.b.start, self.head.x, self.head.meter, self._at(i)
        self.seen.add(i.start)
        size = self.head.problem.itemsize if last else self.accounting.accumulator(self.head.problem)
        o = state.acc / np.where(state.l == 0, 1, state.l)[:, None]
        self.kept.o[b, i, x] = meter.write(o, "o", at, size)
        alone = self.accounting.statistics == ("lse",)
        m, l = (_lse(state.m, state.l), np.where(state.l == 0, 0, 1)) if alone else (state.m, state.l)  # noqa: E741
        for name in self.accounting.statistics:
            meter.write(m, name, at)
        self.kept.m[b, x, i], self.kept.l[b, x, i] = m, l

    def fill(self, shape: TileShape) -> None:
        """Zeros, and what the statistics start from, before anything is read."""
        for i in blocks(self.head.problem.n, shape.block_m):
            self.store(i, self.start(i.stop - i.start), last=False)

    def fill_unseen(self, shape: TileShape) -> None:
        """Rows that no tile visits."""
        for i in blocks(self.head.problem.n, shape.block_m):
            if i.start not in self.seen:
                self.store(i, self.start(i.stop - i.start), last=True)

    def _at(self, i: slice) -> tuple[int, int, int]:
        return self.head.b.start, self.head.x, i.start


@dataclass
class _Backward:
    """One backward pass: what it is given, and what lies in memory between its tiles."""

    problem: Problem
    inputs: Inputs[np.ndarray]
    saved: Kept
    grads: Partial
    shape: TileShape
    accounting: Accounting
    meter: Meter

    def __post_init__(self) -> None:
        x = self.inputs
        self.out = Inputs(
            *(np.zeros(a.shape) for a in (x.q, x.k, x.v)),
            *(None if a is None else np.zeros(a.shape) for a in (x.bias, x.alibi, x.sink)),
        )
        do, o, lse = np.asarray(self.grads.o, np.float64), self.saved.o, _lse(self.saved.m, self.saved.l)
        self.rows = Rows(self.problem, do, lse, np.einsum("bnhe,bnhe->bhn", do, o) - np.asarray(self.grads.lse))
        self.seen: set[tuple] = set()

    def begin(self) -> None:
        """delta, where it has a kernel of its own, and zeros."""
        p, meter, zeroed = self.problem, self.meter, self.accounting.zeroed
        if self.accounting.delta == "before":
            meter.read(self.rows.do, "do")
            meter.read(self.saved.o, "o")
            meter.write(self.rows.total, "delta")
        meter.kernel()
        for name, array in (("dk", self.out.k), ("dv", self.out.v)):
            if name in zeroed:
                meter.write(array, name)
        if "dq" in zeroed:
            meter.write(self.out.q, "dq", itemsize=self.accounting.accumulator(p))
            self.seen = {(b, h, i.start) for b in range(p.b) for h in range(p.h) for i in blocks(p.n, self.shape.block_m)}
        meter.kernel()

    def column(self, column: Column) -> None:
        """dk and dv of one block of keys, and what it adds to dq."""
        first, j, scale = column.heads[0], column.j, self.problem.score.scale
        k, v = first.rows("k", j), first.rows("v", j)
        dk, dv = np.zeros_like(k), np.zeros_like(v)
        for head in column.heads:
            for visit in column.visits:
                q, row = head.rows("q", visit.i), self._load(head, visit.i)
                p, ds, seen = recompute(head, visit, q, k, v, row)
                dk += scale * weigh(ds.T, q, seen.T)
                dv += weigh(p.T, row[0], seen.T)
                last = column.last[visit.i.start] == j.start
                self._add_dq(head, visit.i, scale * weigh(ds, k, seen), last)
                self.meter.product(len(k), len(q), 2 * k.shape[1] + v.shape[1])
                add_extras(self.out, ds, head, visit)
        b, g = first.b.start, first.x // self.problem.group
        self.out.k[b, j, g], self.out.v[b, j, g] = dk, dv

    def end(self) -> None:
        """dk and dv of every block, dq of rows that no tile visits, and dq converted."""
        p, meter, out = self.problem, self.meter, self.out
        meter.write(out.k, "dk")
        meter.write(out.v, "dv")
        size = self.accounting.accumulator(p) if self.accounting.atomic else p.itemsize
        for head in heads(p, self.inputs, meter):
            for i in blocks(p.n, self.shape.block_m):
                if (at := (head.b.start, head.x, i.start)) not in self.seen:
                    meter.write(out.q[head.b.start, i, head.x], "dq", at, size)
            add_sink(out, head, self.rows)
        meter.kernel()
        if self.accounting.atomic:
            meter.read(out.q, "dq", itemsize=size)
            meter.write(out.q, "dq")

    def _load(self, head: Head, i: slice) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """do, lse and total of some rows, from what memory holds of them."""
        b, at, meter = head.b.start, (head.b.start, head.x, i.start), self.meter
        lse, total, o = self.rows.lse[b, head.x, i], self.rows.total[b, head.x, i], self.saved.o[b, i, head.x]
        for name in self.accounting.statistics:
            meter.read(lse, name, at)
        fresh = ("delta", at) not in self.seen
        if self.accounting.delta == "every" or (self.accounting.delta == "first" and fresh):
            meter.read(o, "o", at)
        if self.accounting.delta == "first" and fresh:
            meter.write(total, "delta", at)
            self.seen.add(("delta", at))
        elif self.accounting.delta != "every":
            meter.read(total, "delta", at)
        return meter.read(self.rows.do[b, i, head.x], "do", at), lse, total

    def _add_dq(self, head: Head, i: slice, dq: np.ndarray, last: bool) -> None:
        """Add to dq in memory; before its first visit there is nothing there to read, unless it was filled with zeros."""
        at, unfinished = (head.b.start, head.x, i.start), self.accounting.accumulator(self.problem)
        whole = self.out.q[head.b.start, i, head.x]
        if at in self.seen:
            self.meter.read(whole, "dq", at, unfinished)
        self.seen.add(at)
        whole += dq
        done = last and not self.accounting.atomic
        self.meter.write(whole, "dq", at, self.problem.itemsize if done else unfinished)


def _lse(m: np.ndarray, l: np.ndarray) -> np.ndarray:  # noqa: E741
    """m + log l, −inf where a row has seen nothing."""
    return np.where(l == 0, -np.inf, pivot(m) + np.log(np.where(l == 0, 1, l)))
