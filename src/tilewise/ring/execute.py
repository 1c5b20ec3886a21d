"""Runs one rank's program on tensors. All that it knows of the other ranks is `post`, so the same few lines run on threads of
one process, on Gloo and on NCCL.

A buffer is "b rows heads columns" (`program`); a part and its lse, or the two statistics of a row, are kept as two tensors
and packed only for a message."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._errors import DtypeError, ShapeError
from ..api import merge
from ..ops import lse_dtype
from ..problem import Partial
from .kernel import Kernel
from .program import (
    ACCUMULATED,
    Add,
    Backward,
    Buffer,
    Copy,
    Finish,
    Forward,
    Free,
    Heads,
    Make,
    Merge,
    Op,
    Plan,
    Post,
    Program,
    View,
    Wait,
)
from .runs import Runs

Given = dict[str, list[Tensor]]
"""By name the planes of buffers."""

Message = tuple[int, Tensor]
"""A peer, and the contiguous tensor that goes to it or that what comes from it is written into."""

Poster = Callable[[Post, list[Message], list[Message]], Any]
"""Starts the messages of a step and returns a handle. Those between two ranks arrive in the order in which they are listed.
Until the step is waited for, what is sent does not change and what is received is not looked at."""

WIRE = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
"""What accumulated kinds travel as, by the bytes of an element: a half type must have float32's range."""


def run(plan: Plan, rank: int, given: Given, kernel: Kernel, post: Poster) -> Generator[Any, None, dict[str, Tensor]]:
    """A rank's results by name. Yields the handle of each step that it waits for: whoever drives it waits, and resumes it when
    the step is done. Thrown into, it lets go of everything: results are new tensors, returned when all are finished."""
    program = plan.programs[rank]
    memory = Memory(plan, program, given)
    flights: dict[int, tuple[Any, Flight]] = {}
    for op in program.ops:
        if isinstance(op, Post | Wait):
            memory.keep()
        if isinstance(op, Post):
            flight = memory.depart(op)
            flights[op.step] = post(op, flight.sends, [(peer, room) for peer, room, _ in flight.arrivals]), flight
        elif isinstance(op, Wait):
            handle, flight = flights.pop(op.step)
            yield handle
            memory.arrive(flight)
        else:
            memory.do(op, kernel)
    memory.keep()
    return {name: memory.whole(name) for name in program.results}


def forward_given(plan: Plan, rank: int, q: Tensor, k: Tensor, v: Tensor) -> Given:
    """What forward is given: a rank's shards q "b n h d", k "b s g d", v "b s g e"."""
    _check(plan, rank, q.dtype, q=(q, "b n h d"), k=(k, "b s g d"), v=(v, "b s g e"))
    return {"q": [q.detach()], "kv": [_packed(k.detach(), v.detach())]}


def backward_given(plan: Plan, rank: int, qkv: tuple[Tensor, Tensor, Tensor], do: Tensor, lse: Tensor, total: Tensor) -> Given:
    """What backward is given: a rank's shards, do "b n h e", and of each of its rows the global lse and total = delta − dlse,
    both "b h n", where delta = rowsum(do∘o)."""
    q, k, v = qkv
    _check(plan, rank, q.dtype, q=(q, "b n h d"), k=(k, "b s g d"), v=(v, "b s g e"))
    _check(plan, rank, q.dtype, do=(do, "b n h e"), lse=(lse, "b h n"), total=(total, "b h n"))
    q, k, v, do, *stats = (x.detach() for x in (q, k, v, do, lse, total))
    return {"q": [q], "kv": [_packed(k, v)], "do": [do], "stats": [x.transpose(1, 2)[..., None] for x in stats]}


def forward_results(results: dict[str, Tensor]) -> Partial:
    """o "b n h e" and lse "b h n" of a rank's rows, from what forward returned."""
    return Partial(results["out"], results["lse"][..., 0].transpose(1, 2))


def backward_results(plan: Plan, results: dict[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of a rank's rows, rounded once to `dtype`, from what backward returned."""
    dk, dv = results["dkv"].split([plan.problem.d, plan.problem.e], -1)
    return results["dq"].to(dtype), dk.to(dtype), dv.to(dtype)


FEW = 8
"""So many runs of rows are copied one by one; more, row by row."""


class Flight(NamedTuple):
    """A step under way: what is sent must stay alive, and where what arrives belongs (None: it lands there)."""

    sends: list[Message]
    arrivals: list[tuple[int, Tensor, View | None]]


class Fresh(NamedTuple):
    """What an operation gives, not put where it belongs yet, for whatever comes next may take it from here. `values`: planes;
    or a block that is not even computed yet, `attend(onto, wide)`, for a kernel may also merge it with what was there before,
    `onto`, and give the output in its final dtype."""

    view: View
    values: Sequence[Tensor] = ()
    attend: Callable[[Partial | None, bool], Partial] | None = None
    onto: Partial | None = None


class Memory:
    """The buffers of one rank, each as one tensor or two (`widths`). No gradient flows. A buffer has no memory before something
    is put there or looked for: what fills all of it is it."""

    def __init__(self, plan: Plan, program: Program, given: Given) -> None:
        self.plan = plan
        (q,) = given["q"]
        self.dtype, self.device = q.dtype, q.device
        self.buffers: dict[str, Buffer] = {buffer.name: buffer for buffer in program.given}
        self._planes: dict[str, list[Tensor]] = {buffer.name: list(given[buffer.name]) for buffer in program.given}
        self._fresh: Fresh | None = None
        self._zeros: Tensor | None = None

    def widths(self, kind: str) -> list[int]:
        """Columns of the tensors that a buffer of a kind is kept as."""
        return {"part": [self.plan.problem.e, 1], "stats": [1, 1]}.get(kind, [self.plan.columns(kind)])

    def dtype_of(self, kind: str, wire: bool = False) -> torch.dtype:
        """What a kind is kept as, or travels as."""
        kept = lse_dtype(self.dtype) if kind in ACCUMULATED else self.dtype
        size = self.plan.wire.get(kind, kept.itemsize) if wire else kept.itemsize
        return kept if size == kept.itemsize else WIRE[size]

    def whole(self, name: str) -> Tensor:
        """All of a buffer that is kept as one tensor."""
        (plane,) = self.planes(name)
        return plane

    def planes(self, name: str) -> list[Tensor]:
        """A buffer. Rows that others send are not cleared first: nothing reads one that has not come."""
        if name in self._planes:
            return self._planes[name]
        buffer = self.buffers[name]
        fill = torch.zeros if buffer.kind in ACCUMULATED else torch.empty
        size, dtype = (self.plan.problem.b, buffer.rows, buffer.heads), self.dtype_of(buffer.kind)
        planes = [fill(*size, width, dtype=dtype, device=self.device) for width in self.widths(buffer.kind)]
        if buffer.kind == "part":
            planes[1].fill_(-torch.inf)
        self._planes[name] = planes
        return planes

    def do(self, op: Op, kernel: Kernel) -> None:
        """Any operation that is about this rank alone."""
        if isinstance(op, Make):
            self.buffers[op.buffer.name] = op.buffer
        elif isinstance(op, Free):
            self._planes.pop(op.buffer, None)
        elif isinstance(op, Merge):
            self._merge(op)
        elif isinstance(op, Add):
            self._add(op)
        elif isinstance(op, Finish):
            self._finish(op, kernel)
        else:
            self.keep()
            if isinstance(op, Forward):
                (q,), (k, v) = self.read(op.q), self._keys(op.kv)
                self._fresh = Fresh(op.into, attend=partial(kernel.attend, op.block, q, k, v))
            elif isinstance(op, Backward):
                self._backward(op, kernel)
            elif isinstance(op, Copy):
                self.write(op.into, self.read(op.source))

    def keep(self) -> None:
        """Put what is fresh where it belongs."""
        fresh, self._fresh = self._fresh, None
        if fresh is None:
            return
        values = fresh.values
        if fresh.attend is not None:
            done = fresh.attend(fresh.onto, True)
            if done is fresh.onto and len(fresh.view.rows.ranges) == 1:
                return  # it was merged in its place
            values = _planes(done)
        self.write(fresh.view, values, own=True)

    def _taken(self, view: View) -> Fresh | None:
        """What is fresh if it belongs there; else it is put where it belongs."""
        if self._fresh is None or self._fresh.view != view:
            self.keep()
        fresh, self._fresh = self._fresh, None
        return fresh

    def read(self, view: View) -> list[Tensor]:
        """The tensors of a view; copies where it has several runs of rows."""
        return [_rows(plane, view) for plane in self.planes(view.buffer)]

    def write(self, view: View, values: Sequence[Tensor], own: bool = False) -> None:
        """Put values where a view is. `own`: nobody else holds them, so they may become the buffer."""
        buffer = self.buffers[view.buffer]
        everything, kept = (view.rows.count, view.heads.count) == (buffer.rows, buffer.heads), self.dtype_of(buffer.kind)
        if everything and all(own or value.dtype != kept for value in values):
            self._planes[view.buffer] = [value.to(kept) for value in values]
            return
        for plane, value in zip(self.planes(view.buffer), values, strict=True):
            if len(view.rows.ranges) > FEW:
                index = _index(view.rows, str(plane.device))
                plane[:, :, view.heads.first : view.heads.past].index_copy_(1, index, value.to(plane.dtype))
            else:
                at = 0
                for run in view.rows.ranges:
                    _run(plane, run, view.heads).copy_(value[:, at : at + len(run)])
                    at += len(run)

    def depart(self, op: Post) -> Flight:
        """What a step sends, contiguous and in the dtype of the wire, and room for what it receives: in its place where that
        is as it comes."""
        sends = []
        for send in op.sends:
            kind, values = self.buffers[send.view.buffer].kind, self.read(send.view)
            sends.append((send.peer, _packed(*values).to(self.dtype_of(kind, wire=True)).contiguous()))
        return Flight(sends, [self._room(recv.peer, recv.view) for recv in op.recvs])

    def _room(self, peer: int, view: View) -> tuple[int, Tensor, View | None]:
        kind, planes = self.buffers[view.buffer].kind, self.planes(view.buffer)
        dtype = self.dtype_of(kind, wire=True)
        if len(planes) == 1 and len(view.rows.ranges) == 1 and planes[0].dtype == dtype:
            place = _rows(planes[0], view)
            if place.is_contiguous():
                return peer, place, None
        size = self.plan.problem.b, view.rows.count, view.heads.count, self.plan.columns(kind)
        return peer, torch.empty(size, dtype=dtype, device=self.device), view

    def arrive(self, flight: Flight) -> None:
        """Put what has come where it belongs."""
        for _, room, view in flight.arrivals:
            if view is not None:
                self.write(view, room.split_with_sizes(self.widths(self.buffers[view.buffer].kind), -1))

    def _backward(self, op: Backward, kernel: Kernel) -> None:
        (q,), (k, v), (do,) = self.read(op.q), self._keys(op.kv), self.read(op.do)
        lse, total = (x[..., 0].transpose(1, 2) for x in self.read(op.stats))
        dq, dk, dv = kernel.backward(op.block, (q, k, v), do, lse, total, self._nothing(do))
        self.write(op.dkv, [_packed(dk, dv)], own=True)
        self._fresh = Fresh(op.dq, [dq])

    def _nothing(self, like: Tensor) -> Tensor:
        """Zeros of a shape, which all blocks share; rows lie on top of each other, 16 bytes apart, for zeros are read from
        memory, too."""
        step, (*sizes, e) = 16 // like.element_size(), like.shape
        many = step * (sum(sizes) - len(sizes)) + e
        if self._zeros is None or self._zeros.numel() < many:
            self._zeros = torch.zeros(many, dtype=like.dtype, device=like.device)
        return self._zeros.as_strided(like.shape, (step, step, step, 1))

    def _keys(self, view: View) -> tuple[Tensor, Tensor]:
        (kv,) = self.read(view)
        k, v = kv.split_with_sizes([self.plan.problem.d, self.plan.problem.e], -1)
        return k, v

    def _merge(self, op: Merge) -> None:
        fresh, into = self._taken(op.source), _partial(self.read(op.into))
        if fresh is None:
            self.write(op.into, _planes(merge(into, _partial(self.read(op.source)))), own=True)
        else:
            self._fresh = fresh._replace(view=op.into, onto=into)

    def _finish(self, op: Finish, kernel: Kernel) -> None:
        """Rows that are being attended to get their final dtype at once, the others now."""
        fresh, every = self._fresh, op.part.rows
        at_once = fresh is not None and (fresh.view.buffer, fresh.view.heads) == (op.part.buffer, op.part.heads)
        if fresh is None or fresh.attend is None or kernel.sink is not None or not at_once:
            self.keep()
            done = {every: kernel.finish(_partial(self.read(op.part)), op.heads)}
        else:
            self._fresh, rest = None, _others(every, fresh.view.rows)
            done = {fresh.view.rows: fresh.attend(fresh.onto, False)}
            if rest.count:
                done[rest] = _partial(self.read(op.part._replace(rows=rest)))
        for rows, part in done.items():
            for view, plane in zip((op.out, op.lse), _planes(part), strict=True):
                self.write(view._replace(rows=rows), [plane], own=True)

    def _add(self, op: Add) -> None:
        fresh = self._taken(op.source)
        source = self.read(op.source) if fresh is None else fresh.values
        if len(op.into.rows.ranges) > 1:
            self.write(op.into, [a + b for a, b in zip(self.read(op.into), source, strict=True)])
            return
        for plane, value in zip(self.read(op.into), source, strict=True):
            plane += value


def _rows(plane: Tensor, view: View) -> Tensor:
    """A view of a tensor; a copy of it where it has several runs of rows."""
    runs, heads = view.rows.ranges or (range(0),), view.heads
    if len(runs) == 1:
        return _run(plane, runs[0], heads)
    if len(runs) <= FEW:
        return torch.cat([_run(plane, run, heads) for run in runs], 1)
    return plane[:, :, heads.first : heads.past].index_select(1, _index(view.rows, str(plane.device)))


def _run(plane: Tensor, run: range, heads: Heads) -> Tensor:
    return plane[:, run.start : run.stop : run.step, heads.first : heads.past]


_others = lru_cache(maxsize=4096)(Runs.without)
"""Rows of a view that are not of another one, which to find out takes longer than to start a kernel."""


@lru_cache(maxsize=4096)
def _index(rows: Runs, device: str) -> Tensor:
    """Rows one by one, where they are needed."""
    return torch.from_numpy(rows.array()).to(device)


def _packed(*columns: Tensor) -> Tensor:
    return columns[0] if len(columns) == 1 else torch.cat(columns, -1)


def _partial(planes: Sequence[Tensor]) -> Partial:
    o, lse = planes
    return Partial(o, lse[..., 0].transpose(1, 2))


def _planes(part: Partial) -> list[Tensor]:
    return [part.o, part.lse.transpose(1, 2)[..., None]]


def _check(plan: Plan, rank: int, dtype: torch.dtype, **named: tuple[Tensor, str]) -> None:
    """Raise where a rank's tensors, with the names of their axes, are not those that its program speaks of."""
    p = plan.problem
    sizes = {"b": p.b, "n": plan.q.counts[rank], "s": plan.kv.counts[rank], "h": p.h, "g": p.g, "d": p.d, "e": p.e}
    for name, (x, axes) in named.items():
        want = tuple(sizes[axis] for axis in axes.split())
        if x.dim() != len(want):
            raise ShapeError(f"{name} of rank {rank} must have the axes '{axes}', got {tuple(x.shape)}")
        for axis, have, size in zip(axes.split(), x.shape, want, strict=True):
            if have != size:
                raise ShapeError(f"axis {axis}: {name} {tuple(x.shape)} of rank {rank} should be {want} '{axes}' in this plan")
        kept = lse_dtype(dtype) if name in ("lse", "total") else dtype
        if x.dtype != kept:
            raise DtypeError(f"{name} {tuple(x.shape)} of rank {rank} is {x.dtype} where q is {dtype}: it should be {kept}")
