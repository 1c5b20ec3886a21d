"""Attention over many ranks, as users call it: each rank holds its share of the rows of q, k and v."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from .._errors import DtypeError, OptionError, ShapeError
from ..api import _check_tensors, autocast_dtype
from ..mask import Causal, Mask
from ..problem import Inputs, Partial
from .call import Asked, Call, Shards, settle
from .exchange import rolled, unsharded
from .layout import Named, lay_out, name_layout
from .meet import open_transport
from .owners import Owners
from .program import Method
from .transport import Transport

Mesh = DeviceMesh | dist.ProcessGroup | None
"""The ranks that share the rows: a mesh of one dimension, a process group, or None for all there are."""

Layout = str | Named | tuple[Owners, Owners]
"""A name, a name and the mask that it goes by where that is not the call's own, or the owners of q's rows and of k's."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: Mesh = None,
    mask: Mask | None = None,
    layout: Layout = "auto",
    method: str | Method = "auto",
    scale: float | None = None,
    softcap: float | None = None,
    alibi: Tensor | None = None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    backend: str | None = None,
    wire: torch.dtype | None = None,
    deadline_s: float | None = None,
    **others: Any,
) -> Tensor:
    """`tilewise.attention` of sequences whose rows are shared out among the ranks of a mesh: to the last rounding the same o
    and gradients. Every rank makes the call, with its own rows; each gets its own rows of o.

    Shapes      q "b n h d" · k "b s g d" · v "b s g e" → o "b n h e", where n and s count this rank's rows, 0 included; the
                mask, alibi "h" or "b h" and sink "h" are those of the whole sequence, the same on every rank
    Rows        in the order of `shard` with the same layout and mask; `positions` says which they are. layout "contiguous"
                takes any number of rows from each rank; "zigzag", "striped" and "balanced" those that `shard` gives; "auto"
                goes by the mask (`layout.name_layout`); or the Owners of both sides. "replicated" is a decoding step: all
                of q, and so of o and q's gradient, on every rank, the keys where they are, contiguous, any number a rank
    method      "ring", "double", "direct", "gather", "heads" (rows for heads, all-to-all), "auto", or a `Method`; where q is
                replicated partial results merge in log₂ N rounds
    Options     scale, softcap, alibi, sink, dropout, seed, backend as in `tilewise.attention`. The pattern of dropout does not
                depend on the number of ranks; seed None takes one that the first rank draws. wire: the dtype in which
                gradients of k and v travel (float32 unless it says torch.bfloat16)
    Inputs      tensors, or DTensors sharded along the rows, whose layout is contiguous; then so is o
    Numerics    sums are float32 (float64 for float64) from the first block to the last rank, so the error does not grow with
                the number of ranks; the same bits every time
    Gradients   first derivatives of q, k, v and sink. Every rank must run backward. That of sink is this rank's share: the
                whole is the sum over ranks, as data parallelism makes it of every parameter
    Devices     over NCCL messages pass beside the work of kernels where the group's go first:
                init_process_group("nccl", pg_options=ProcessGroupNCCL.Options(is_high_priority_stream=True))
    Faults      a rank that dies, raises or is silent for deadline_s (the group's timeout unless given) raises PeerLost on all
                others; the group is of no use then, and torch makes no other NCCL communicator in the same thread: one to go on
                with must have been used before. Ranks that ask for different things raise the same error, before any data moves
    Errors      as `tilewise.attention`. What is not one rectangle of shared rows is refused: bias, ragged, positions
    Source      Liu et al. 2023, Ring Attention; Jacobs et al. 2023, DeepSpeed Ulysses; Shyam et al. 2024, Tree Attention

    >>> from tilewise import Causal
    >>> q = k = v = torch.randn(1, 6, 2, 8)         # one process: all rows are here
    >>> attention(q, k, v, mask=Causal()).shape
    torch.Size([1, 6, 2, 8])
    """
    return attention_with_lse(
        q, k, v, mesh=mesh, mask=mask, layout=layout, method=method, scale=scale, softcap=softcap, alibi=alibi, sink=sink,
        dropout=dropout, seed=seed, backend=backend, wire=wire, deadline_s=deadline_s, **others,
    ).o  # fmt: skip


def attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: Mesh = None,
    mask: Mask | None = None,
    layout: Layout = "auto",
    method: str | Method = "auto",
    scale: float | None = None,
    softcap: float | None = None,
    alibi: Tensor | None = None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    backend: str | None = None,
    wire: torch.dtype | None = None,
    deadline_s: float | None = None,
    **others: Any,
) -> Partial:
    """`attention` and the lse "b h n" of this rank's rows, over the keys of all ranks. Both differentiable."""
    rows = Named(layout, mask) if isinstance(layout, str) else layout
    asked = Asked(mask, rows, method, scale, softcap, dropout, seed, backend, wire)
    o, lse = _attend(Shards(q, k, v, alibi, sink), asked, others, mesh, deadline_s)  # pyright: ignore[reportCallIssue]
    return Partial(o, lse)


@torch.compiler.disable
def _attend(x: Shards, asked: Asked, others: dict[str, Any], mesh: Mesh, deadline_s: float | None) -> tuple[Tensor, Tensor]:
    """o and lse of this rank's rows. Messages are no matter for a compiler."""
    around = _mesh_of(x.q)
    transport = _meet(mesh if mesh is not None else around, *x)
    prepare = partial(_prepare, x, asked, others)
    call, mine = settle(prepare, transport, transport.timeout_s if deadline_s is None else deadline_s)
    o, lse = _Attention.apply(call, *mine)  # type: ignore[misc]
    if around is None:
        return o, lse
    b, n, h, _ = x.q.shape
    return _put(o, around, 1, (b, n, h, o.shape[3])), _put(lse, around, 2, (b, h, n))


def _prepare(x: Shards, asked: Asked, others: dict[str, Any]) -> tuple[Shards, Asked]:
    """This rank's own tensors, in the dtype of autocast, and where their rows are; or what is wrong with them."""
    refuse(others)
    _check_tensors(Inputs(x.q, x.k, x.v, None, x.alibi, x.sink))
    for name, t in (("alibi", x.alibi), ("sink", x.sink)):
        if _mesh_of(t) is not None:
            raise OptionError(f"{name} must be a tensor that every rank holds whole, got a DTensor: give its full_tensor()")
    spread = [_mesh_of(t) is not None for t in x[:3]]
    if any(spread):
        if not all(spread):
            raise DtypeError("q, k and v must all be DTensors, or none of them")
        if not isinstance(asked.layout, Named) or asked.layout.name not in ("auto", "contiguous"):
            given = asked.layout.name if isinstance(asked.layout, Named) else "Owners"
            raise OptionError(f"layout: rows of a DTensor are contiguous, got {given}")
        asked = replace(asked, layout=Named("contiguous", asked.layout.mask))
    q, k, v = (_local(name, t) for name, t in zip("qkv", x[:3], strict=True))
    dtype = autocast_dtype(q)
    if dtype is not None:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    return Shards(q, k, v, x.alibi, x.sink), asked


class _Attention(torch.autograd.Function):
    """Gradients from the global lse and delta of whole rows."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        x = Shards(*tensors)  # type: ignore[arg-type]
        ctx.call, (o, lse) = call.forward(x)
        ctx.save_for_backward(o, lse, *tensors)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        o, lse, *tensors = ctx.saved_tensors
        do, dlse = do.resolve_neg(), dlse.resolve_neg()
        x = Shards(*tensors)
        dq, dk, dv, total = ctx.call.backward(x, Partial(o, lse), Partial(do, dlse))
        dsink = None
        if x.sink is not None and ctx.needs_input_grad[5]:
            sink = x.sink.to(lse.dtype)[None, :, None]
            parts = torch.exp(sink - lse) * total
            shares = ctx.call.transport.world if ctx.call.setting.q.replicated else 1
            dsink = (-torch.where(lse == -torch.inf, 0, parts).sum((0, 2)) / shares).to(x.sink.dtype)
        return None, dq, dk, dv, None, dsink


def shard(x: Tensor, mesh: Mesh = None, dim: int = 1, *, layout: str = "auto", mask: Mask | None = None) -> Tensor:
    """This rank's rows of a whole x, along axis `dim`; a copy, through which gradients flow. Where the mask tells entries of
    the batch apart, axis 0 is the batch.

    >>> shard(torch.arange(6)[None]).tolist()       # one process
    [[0, 1, 2, 3, 4, 5]]
    """
    owners, rank = _owners(mesh, x.shape[dim], layout, mask, x.shape[0] if dim % x.dim() else 1)
    return x.index_select(dim, torch.from_numpy(owners.shards[rank].array()).to(x.device))


def positions(
    length: int, mesh: Mesh = None, *, layout: str = "auto", mask: Mask | None = None, batch: int = 1,
    device: torch.device | str = "cpu",
) -> Tensor:  # fmt: skip
    """Where this rank's rows sit in a sequence of `length` rows, int64 "n": what rotary embeddings need."""
    owners, rank = _owners(mesh, length, layout, mask, batch)
    return torch.from_numpy(owners.shards[rank].array()).to(device)


def unshard(
    x: Tensor, mesh: Mesh = None, dim: int = 1, *, layout: str = "auto", mask: Mask | None = None,
    deadline_s: float | None = None,
) -> Tensor:  # fmt: skip
    """All rows of a sharded x on every rank, in order. Differentiable: a rank's gradient is the sum of what all ranks do with
    its rows, so ranks that all take the same loss of the whole get it as many times as there are ranks."""
    transport = _meet(mesh, x)
    return unsharded(x, dim, transport, Named(layout, mask), transport.timeout_s if deadline_s is None else deadline_s)


def roll(
    x: Tensor, shift: int, mesh: Mesh = None, dim: int = 1, *, layout: str = "auto", mask: Mask | None = None,
    fill: float | None = None, deadline_s: float | None = None,
) -> Tensor:  # fmt: skip
    """`torch.roll` of the whole along the sharded axis. Labels of a language model are its tokens rolled by −1; `fill` takes
    the place of what comes around the end. No gradient flows.

    >>> roll(torch.tensor([[5, 6, 7]]), -1, fill=-100).tolist()     # one process
    [[6, 7, -100]]
    """
    transport = _meet(mesh, x)
    return rolled(
        x, shift, dim, transport, Named(layout, mask), fill, transport.timeout_s if deadline_s is None else deadline_s
    )


@dataclass(frozen=True)
class Sharded:
    """How a model's rows are shared out while `sharded` is open; the functions of this module with that filled in."""

    mesh: Mesh
    layout: Named
    mask: Mask | None
    method: str | Method
    deadline_s: float | None

    @property
    def layout_options(self) -> dict[str, Any]:
        return {"layout": self.layout.name, "mask": self.layout.mask}

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        return shard(x, self.mesh, dim, **self.layout_options)

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        return unshard(x, self.mesh, dim, **self.layout_options, deadline_s=self.deadline_s)

    def positions(self, length: int, device: torch.device | str = "cpu") -> Tensor:
        return positions(length, self.mesh, **self.layout_options, device=device)

    def roll(self, x: Tensor, shift: int, dim: int = 1, fill: float | None = None) -> Tensor:
        return roll(x, shift, self.mesh, dim, **self.layout_options, fill=fill, deadline_s=self.deadline_s)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, **options: Any) -> Tensor:
        """Attention of one layer under its own mask and everybody's."""
        mask = mask if self.mask is None else mask & self.mask
        said = {"mesh": self.mesh, "layout": self.layout, "method": self.method, "deadline_s": self.deadline_s}
        return attention(q, k, v, mask=mask, **said, **options)


_open: ContextVar[Sharded | None] = ContextVar("tilewise.ring.sharded", default=None)


@contextmanager
def sharded(
    mesh: Mesh = None, *, layout: str = "auto", mask: Mask | None = None, method: str | Method = "auto",
    deadline_s: float | None = None,
) -> Iterator[Sharded]:  # fmt: skip
    """While it is open, transformers models with attn_implementation="tilewise" (`compat.ring_transformers.register`) attend
    over the rows of all ranks. Each rank gives the model its own rows and says where they are:

        with tw.ring.sharded(mesh) as ring:
            logits = model(ring.shard(ids), position_ids=ring.positions(ids.shape[1])[None], use_cache=False).logits
            labels = ring.roll(ring.shard(ids), -1, fill=-100)

    mask    what is hidden beside what the model itself hides: Documents, say, for packed sequences. Arrays of it are of one
            entry for the whole batch
    Losses  are those of a rank's own rows: reduce their sum, and divide by how many labels there are over all ranks
    """
    whole = Causal() if mask is None else Causal() & mask
    made = Sharded(mesh, Named(name_layout(layout, whole), whole), mask, method, deadline_s)
    token = _open.set(made)
    try:
        yield made
    finally:
        _open.reset(token)


def current() -> Sharded | None:
    """The innermost `sharded` that is open."""
    return _open.get()


def refuse(others: dict[str, Any]) -> None:
    """Raise for what `tilewise.attention` can do on one rank and no plan can over many."""
    reasons = {
        "bias": "bias 'b h n s' has both rows and columns, and no rank has all of either: use alibi or a mask",
        "ragged": "ragged: packed sequences are shared out as one row with mask=Documents.from_lengths(...)",
        "positions": "positions: rows sit where the layout says; give layout= the Owners of both sides",
    }
    for name, value in others.items():
        if name not in reasons:
            raise TypeError(f"attention() got an unexpected keyword argument {name!r}")
        if value is not None:
            raise OptionError(reasons[name])


def group_of(mesh: Mesh) -> dist.ProcessGroup | None:
    """The process group of a mesh; without a mesh that of all ranks, if processes have met at all."""
    if mesh is None:
        return dist.group.WORLD if dist.is_initialized() else None
    if isinstance(mesh, dist.ProcessGroup):
        return mesh
    if not isinstance(mesh, DeviceMesh):
        raise DtypeError(f"mesh must be a DeviceMesh or a process group, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or "unnamed"
        raise OptionError(f"mesh has {mesh.ndim} dimensions ({names}): give the one that rows are shared over, as mesh['cp']")
    return mesh.get_group()


def _meet(mesh: Mesh, *tensors: Any) -> Transport:
    """Who carries messages for a call with these tensors. A rank without any, whose error is yet to be told, has the device
    that the group is for."""
    group = group_of(mesh)
    for x in tensors:
        if isinstance(x, Tensor):
            return open_transport(group, x.device)
    on_device = group is not None and dist.get_backend(group) == "nccl"
    return open_transport(group, torch.device("cuda", torch.cuda.current_device()) if on_device else torch.device("cpu"))


def _owners(mesh: Mesh, length: int, layout: str, mask: Mask | None, batch: int) -> tuple[Owners, int]:
    """The layout over a mesh, and this rank's place in it."""
    group = group_of(mesh)
    world, rank = (1, 0) if group is None else (group.size(), group.rank())
    return lay_out(Named(layout, mask), length, world, batch), rank


def _mesh_of(x: Any) -> DeviceMesh | None:
    """The mesh of a DTensor; None of anything else."""
    tensor = sys.modules.get("torch.distributed.tensor")  # who has a DTensor has imported this, which takes a second
    return x.device_mesh if tensor is not None and isinstance(x, tensor.DTensor) else None


def _local(name: str, x: Any) -> Tensor:
    """A rank's own part of a DTensor; any other tensor as it is."""
    if _mesh_of(x) is None:
        return x
    if len(x.placements) != 1 or not x.placements[0].is_shard(1):
        raise ShapeError(f"axis n or s: the DTensor {name} {tuple(x.shape)} must be sharded along its rows, Shard(1), on a mesh"
                         f" of one dimension; got {x.placements}")  # fmt: skip
    return x.to_local()


def _put(x: Tensor, mesh: DeviceMesh, dim: int, shape: tuple[int, ...]) -> Tensor:
    """The DTensor of this shape of which x is a rank's own part, be it of another length than those of others."""
    tensor = sys.modules["torch.distributed.tensor"]
    stride = torch.empty(shape, device="meta").stride()
    whole = {"shape": torch.Size(shape), "stride": stride}
    return tensor.DTensor.from_local(x.contiguous(), mesh, [tensor.Shard(dim)], run_check=False, **whole)
