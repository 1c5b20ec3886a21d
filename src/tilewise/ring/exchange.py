"""Rows that change ranks outside attention: everything to everybody, and everything a few places on."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._errors import DtypeError
from ..arrays import check_number
from .agree import OWN, agree, fingerprint
from .layout import Named, lay_out_as_held, name_layout
from .owners import Owners
from .program import BATCH
from .transport import Handle, Transport, run_steps


def unsharded(x: Tensor, dim: int, transport: Transport, layout: Named, deadline_s: float) -> Tensor:
    """All rows on every rank, in order."""
    owners = _agree("unshard", x, dim, transport, layout, deadline_s)
    return _Unshard.apply(x, dim, owners, transport, deadline_s)  # type: ignore[return-value]


def rolled(
    x: Tensor, shift: int, dim: int, transport: Transport, layout: Named, fill: float | None, deadline_s: float
) -> Tensor:
    """Row i of the whole becomes row i + shift; `fill` where it would come around the end."""
    owners = _agree("roll", x, dim, transport, layout, deadline_s, (shift, fill))
    mine = torch.from_numpy(owners.shards[transport.rank].array()).to(x.device)
    sends, recvs = owners.roll(transport.rank, shift)
    rows = x.detach().movedim(dim, 0)
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    index = [(_index(a.rows, x), _index(b.into, x)) for a, b in zip(sends, recvs, strict=True)]
    rooms = [rows.new_empty(len(into), *rows.shape[1:]) for _, into in index]
    parts = [rows.index_select(0, taken) for taken, _ in index]
    rooms[transport.rank] = parts[transport.rank]
    run_steps(_swap(parts, rooms, transport), transport, deadline_s)
    for (_, into), room in zip(index, rooms, strict=True):
        out.index_copy_(0, into, room)
    if fill is not None:
        out[((mine - shift) < 0) | ((mine - shift) >= owners.length)] = fill  # type: ignore[call-overload]
    return out.movedim(0, dim)


class _Unshard(torch.autograd.Function):
    """Everything to everybody; back, what everybody has made of one's rows, added in the order of ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, owners: Owners, transport: Transport, deadline_s: float) -> Tensor:
        ctx.rest = dim, owners, transport, deadline_s
        rows = x.movedim(dim, 0).contiguous()
        rooms = [rows.new_empty(count, *rows.shape[1:]) for count in owners.counts]
        rooms[transport.rank] = rows
        run_steps(_swap([rows] * transport.world, rooms, transport), transport, deadline_s)
        return torch.cat(rooms).index_select(0, _index(owners.inverse, x)).movedim(0, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dim, owners, transport, deadline_s = ctx.rest
        parts = list(do.movedim(dim, 0).index_select(0, _index(owners.order, do)).split(owners.counts))
        rooms = [torch.empty_like(parts[transport.rank]) for _ in parts]
        rooms[transport.rank] = parts[transport.rank]
        transport.begin(deadline_s)
        run_steps(_swap(parts, rooms, transport), transport, deadline_s)
        wide = torch.promote_types(do.dtype, torch.float32)
        total = sum(room.to(wide) for room in rooms)
        assert isinstance(total, Tensor)
        return total.to(do.dtype).movedim(0, dim), None, None, None, None


def _swap(parts: Sequence[Tensor], rooms: Sequence[Tensor], transport: Transport) -> Generator[Handle, None, None]:
    """Part r goes to rank r, room r gets what rank r has for this one. Those over the same distances go together."""
    me, world = transport.rank, transport.world
    for step, lo in enumerate(range(1, world, BATCH // 2)):
        far = range(lo, min(lo + BATCH // 2, world))
        sends = [(peer, parts[peer].contiguous()) for x in far if parts[peer := (me + x) % world].numel()]
        recvs = [(peer, rooms[peer]) for x in far if rooms[peer := (me - x) % world].numel()]
        yield transport.post(step, sends, recvs)


def _agree(
    call: str, x: Tensor, dim: int, transport: Transport, layout: Named, deadline_s: float, by: tuple | None = None
) -> Owners:
    """The layout, once all ranks have said that they make the same call, with as many rows as they have. `by`: how far a roll
    goes, and what it fills in."""
    error, terms = None, {}
    try:
        if not isinstance(x, Tensor):
            raise DtypeError(f"{call} takes a tensor, got {type(x).__name__}")
        if by is not None:
            call, terms = f"{call} by {_whole(by[0])}", {"fill": _number(by[1])}
        shape = list(x.shape)
        rows = shape.pop(dim)
        terms |= {
            "call": call, "axes": shape, "axis along which": dim % x.dim(), "dtype": str(x.dtype).removeprefix("torch."),
            "mask": fingerprint(layout.mask), "layout": name_layout(*layout), OWN + "rows": rows,
            "gradients": torch.is_grad_enabled() and x.requires_grad,
        }  # fmt: skip
    except Exception as found:
        error = found
    transport.begin(deadline_s)
    theirs = agree(terms, partial(transport.gather, deadline_s=deadline_s), error)
    counts = [found[OWN + "rows"] for found in theirs]
    return lay_out_as_held(layout, counts, "x", x.shape[0] if dim % x.dim() else 1)


def _whole(shift: Any) -> int:
    if not isinstance(shift, (int, np.integer)):
        raise DtypeError(f"roll: shift must be an integer, got {type(shift).__name__}")
    return int(shift)


def _number(fill: Any) -> str | None:
    """What comes in around the end, in words, as NaN is not equal to itself."""
    if fill is None:
        return None
    check_number("fill", fill)
    return str(float(fill))


def _index(rows: Any, like: Tensor) -> Tensor:
    return torch.from_numpy(rows).to(like.device)
