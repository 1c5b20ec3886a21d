"""The interface of ring-flash-attn (0.1.8) on tilewise: change the import, keep every call.

    from tilewise.compat.ring_flash_attn import zigzag_ring_flash_attn_func     # was: from ring_flash_attn

Rows lie on ranks as that library wants them, which a function's name says:

    ring        rank r holds the r-th of N stretches
    zigzag      of 2N stretches rank r holds the r-th from each end
    stripe      rank r holds rows r, r + N, r + 2N, ...
    varlen      the same of each packed sequence on its own; cu_seqlens are those of a rank: of the whole, divided by N
    llama3      the r-th of N stretches of all sequences end to end; arguments from `llama3_flash_attn_prepare_cu_seqlens`

Each comes as `..._func(q, k, v)`, `..._kvpacked_func(q, kv)` and `..._qkvpacked_func(qkv)`.

Shapes      q "b n h d", k and v "b n g d", kv "b n 2 g d", qkv "b n 3 h d" of this rank; packed without b
Options     as in flash-attn: softmax_scale None: d**-0.5 · window_size counts other keys, −1: no limit · alibi_slopes "h" or
            "b h" · dropout_p with a seed that the first rank draws · deterministic: the gradients always are · group None: all
Returns     out, or (out, softmax_lse, None) with return_attn_probs: "b h n" ("h t" where packed), float32
Beyond      windows and ALiBi everywhere, causal=False in zigzag and stripe, dropout, float32 and float64, CPU over gloo
Gradients   of q, k and v, also through softmax_lse
Errors      those of `tilewise.ring.attention`; NotImplementedError for what patches transformers, and for llama3 calls whose
            offsets were not prepared here
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .._errors import ShapeError
from ..mask import Documents
from ..ring.api import attention_with_lse, group_of
from ..ring.layout import Named, lay_out
from ..ring.owners import Owners, contiguous
from ..ring.runs import Runs
from .flash_attn import _split, band

Out: TypeAlias = "Tensor | tuple[Tensor, Tensor, None]"
Function: TypeAlias = Callable[..., Out]
Window: TypeAlias = tuple[int, int]


class _Said(NamedTuple):
    """The arguments that all functions share."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: Window
    alibi_slopes: Tensor | None
    deterministic: bool
    return_attn_probs: bool
    group: dist.ProcessGroup | None


def _of_rows(name: str, layout: str) -> tuple[Function, Function, Function]:
    """The functions of rectangular batches in a layout."""

    def func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Window = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> Out:
        said = _Said(dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group)
        return _attend(q, k, v, said, Named(layout))

    def kvpacked_func(
        q: Tensor,
        kv: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Window = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> Out:
        said = _Said(dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group)
        k, v = _split("kv", kv, "b n 2 g d")
        return _attend(q, k, v, said, Named(layout))

    def qkvpacked_func(
        qkv: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Window = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> Out:
        said = _Said(dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group)
        q, k, v = _split("qkv", qkv, "b n 3 h d")
        return _attend(q, k, v, said, Named(layout))

    return _named(name, func, kvpacked_func, qkvpacked_func)


def _of_sequences(name: str, layout: str) -> tuple[Function, Function, Function]:
    """The functions of packed sequences, each of which is laid out on its own."""

    def func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Window = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> Out:
        said = _Said(dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group)
        return _attend_packed(q, k, v, said, *_share(layout, cu_seqlens, group))

    def kvpacked_func(
        q: Tensor,
        kv: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Window = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> Out:
        said = _Said(dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group)
        k, v = _split("kv", kv, "t 2 g d")
        return _attend_packed(q, k, v, said, *_share(layout, cu_seqlens, group))

    def qkvpacked_func(
        qkv: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Window = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> Out:
        said = _Said(dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group)
        q, k, v = _split("qkv", qkv, "t 3 h d")
        return _attend_packed(q, k, v, said, *_share(layout, cu_seqlens, group))

    return _named(name, func, kvpacked_func, qkvpacked_func)


def _named(name: str, *functions: Function) -> tuple[Function, Function, Function]:
    """Functions under the names by which they are known."""
    for function, kind in zip(functions, ("func", "kvpacked_func", "qkvpacked_func"), strict=True):
        function.__name__ = function.__qualname__ = f"{name}_{kind}"
    func, kvpacked, qkvpacked = functions
    return func, kvpacked, qkvpacked


ring_flash_attn_func, ring_flash_attn_kvpacked_func, ring_flash_attn_qkvpacked_func = _of_rows("ring_flash_attn", "contiguous")
zigzag_ring_flash_attn_func, zigzag_ring_flash_attn_kvpacked_func, zigzag_ring_flash_attn_qkvpacked_func = _of_rows(
    "zigzag_ring_flash_attn", "zigzag"
)
stripe_flash_attn_func, stripe_flash_attn_kvpacked_func, stripe_flash_attn_qkvpacked_func = _of_rows(
    "stripe_flash_attn", "striped"
)
ring_flash_attn_varlen_func, ring_flash_attn_varlen_kvpacked_func, ring_flash_attn_varlen_qkvpacked_func = _of_sequences(
    "ring_flash_attn_varlen", "contiguous"
)
(
    zigzag_ring_flash_attn_varlen_func,
    zigzag_ring_flash_attn_varlen_kvpacked_func,
    zigzag_ring_flash_attn_varlen_qkvpacked_func,
) = _of_sequences("zigzag_ring_flash_attn_varlen", "zigzag")


class Offsets(torch.Tensor):
    """Offsets of a rank's queries that remember those of all sequences."""

    whole: list[int]

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: Tensor, causal: bool, rank: int, world_size: int
) -> tuple[Tensor, Tensor, int, int, slice]:
    """(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice): the offsets of a rank's queries; those of the
    keys that they need, among these; the longest of each; and where these keys are among all.

    >>> llama3_flash_attn_prepare_cu_seqlens(torch.tensor([0, 5, 8]), True, 1, 2)[:2]
    (Offsets([0, 1, 4]), tensor([0, 5, 8]))
    """
    offsets = cu_seqlens.tolist()
    if offsets[-1] % world_size:
        raise ShapeError(f"axis t: {offsets[-1]} rows do not share evenly among {world_size} ranks")
    size = offsets[-1] // world_size
    mine = range(rank * size, (rank + 1) * size)
    left = max(x for x in offsets if x <= mine.start)
    right = min(x for x in offsets if x >= mine.stop)
    inner = [x for x in offsets if mine.start < x < mine.stop]
    past = mine.stop if causal else right
    q, k = [0, *(x - mine.start for x in inner), size], [0, *(x - left for x in inner), past - left]
    cu_seqlens_q = cu_seqlens.new_tensor(q).as_subclass(Offsets)
    cu_seqlens_q.whole = offsets
    longest = (max(b - a for a, b in pairwise(x)) for x in (q, k))
    return cu_seqlens_q, cu_seqlens.new_tensor(k), *longest, slice(left, past)


def llama3_flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    heads_k_stride: int,
    local_k_slice: slice,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Out:
    """Packed q "t h d", k and v "t g d": rows of all sequences end to end, in N stretches."""
    if not isinstance(cu_seqlens_q, Offsets):
        raise NotImplementedError(
            "cu_seqlens_q must be what llama3_flash_attn_prepare_cu_seqlens of tilewise.compat.ring_flash_attn returned,"
            " unchanged: a rank's own offsets do not say where sequences on other ranks end"
        )
    said = _Said(dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group)
    whole = cu_seqlens_q.whole
    return _attend_packed(q, k, v, said, contiguous(whole[-1], _world(group)), np.diff(whole))


def llama3_flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Out:
    """`llama3_flash_attn_varlen_func` of kv "t 2 g d"."""
    k, v = _split("kv", kv, "t 2 g d")
    return llama3_flash_attn_varlen_func(q, k, v, *args, **kwargs)


def llama3_flash_attn_varlen_qkvpacked_func(qkv: Tensor, *args: Any, **kwargs: Any) -> Out:
    """`llama3_flash_attn_varlen_func` of qkv "t 3 h d"."""
    q, k, v = _split("qkv", qkv, "t 3 h d")
    return llama3_flash_attn_varlen_func(q, k, v, *args, **kwargs)


def substitute_hf_flash_attn(process_group: dist.ProcessGroup | None, heads_k_stride: int) -> None:
    """Raises NotImplementedError, which says how to run transformers sharded."""
    raise NotImplementedError(
        "tilewise patches no other library: call tilewise.compat.ring_transformers.register(), load the model with"
        ' attn_implementation="tilewise" and run it inside tilewise.ring.sharded(process_group)'
    )


def update_ring_flash_attn_params(cu_seqlens: Tensor, process_group: dist.ProcessGroup | None) -> None:
    """Raises NotImplementedError, which says where sequences are given."""
    raise NotImplementedError("give packed sequences as tilewise.ring.sharded(group, mask=Documents.from_lengths(...))")


def _attend(q: Tensor, k: Tensor, v: Tensor, said: _Said, layout: Named | tuple[Owners, Owners], lengths: Any = None) -> Out:
    """The translation: one call of tilewise."""
    mask = band(said.causal, said.window_size)
    o, lse = attention_with_lse(
        q, k, v, mesh=said.group, mask=mask if lengths is None else mask & Documents.from_lengths(lengths), layout=layout,
        scale=said.softmax_scale, alibi=said.alibi_slopes, dropout=said.dropout_p,
    )  # fmt: skip
    return (o, lse, None) if said.return_attn_probs else o


def _attend_packed(q: Tensor, k: Tensor, v: Tensor, said: _Said, owners: Owners, lengths: Any) -> Out:
    """Packed sequences, as one row."""
    out = _attend(q[None], k[None], v[None], said, (owners, owners), lengths)
    return (out[0][0], out[1][0], None) if isinstance(out, tuple) else out[0]


def _share(layout: str, cu_seqlens: Tensor, group: dist.ProcessGroup | None) -> tuple[Owners, np.ndarray]:
    """Who holds what of sequences of which each rank has an N-th, and how long they are."""
    world = _world(group)
    lengths = world * np.diff(cu_seqlens.cpu().numpy().astype(np.int64))
    rows: list[list[range]] = [[] for _ in range(world)]
    for start, length in zip((np.cumsum(lengths) - lengths).tolist(), lengths.tolist(), strict=True):
        for mine, shard in zip(rows, lay_out(Named(layout), length, world).shards, strict=True):
            mine += [range(start + x.start, start + x.stop, x.step) for x in shard.ranges]
    shards = tuple(Runs.spans([x.start for x in mine], [x.stop for x in mine]) for mine in rows)
    return Owners(int(lengths.sum()), shards), lengths


def _world(group: dist.ProcessGroup | None) -> int:
    found = group_of(group)
    return 1 if found is None else found.size()
