"""The interface of FlashAttention-2 (flash-attn 2.8) on tilewise: change the import, keep every call.

    import tilewise.compat.flash_attn as flash_attn
    from tilewise.compat.flash_attn import flash_attn_func                  # was: from flash_attn.flash_attn_interface
    from tilewise.compat.bert_padding import pad_input, unpad_input         # was: from flash_attn.bert_padding

Code that cannot be edited finds the old names after this, said before it is imported:

    sys.modules |= {"flash_attn": flash_attn, "flash_attn.flash_attn_interface": flash_attn,
                    "flash_attn.bert_padding": flash_attn.bert_padding}

What the functions share, where n queries meet s keys:

    s[i, j] = cap(softmax_scale·q[i]·k[j]) − slope·|i + s − n − j|           cap(x) = softcap·tanh(x / softcap)
    visible   i + s − n − left ≤ j ≤ i + s − n + right                      window_size = (left, right), −1: no limit

Causal      right = 0, whatever the window says: the last query sits at the last key; a row that sees no key gives 0
Options     softmax_scale None: d**-0.5 · softcap 0.0: none · alibi_slopes "h" or "b h" · dropout_p with a seed from torch's
            generator · deterministic: the gradients always are · s_aux "h", beyond flash-attn: attention sinks
Returns     out, or (out, softmax_lse, None) with return_attn_probs: the natural log of the sum of exp(s) over visible keys,
            "b h n" ("h t" where packed), float32, so −inf where a row sees no key (flash-attn: +inf; and with causal and ALiBi
            together it leaves out slope·(i + s − n)). The third, S_dmask there, would be the matrix that is never formed
Packed      cu_seqlens "b+1" integers, on any device; max_seqlen is not needed and not read; sequences may be empty; rows
            past the last offset give 0
Gradients   of all tensors, through out and softmax_lse, of any order: flash-attn knows those of q, k and v through out
Beyond      float32 and float64, any head size, values of a head size of their own, dropout with softcap, any device
Errors      ValueError (ShapeError, OptionError) or TypeError (DtypeError). alibi_slopes together with softcap, by sequence in
            packed calls, and pages (block_table) are refused
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._errors import OptionError, ShapeError
from ..api import attention_with_lse
from ..mask import Causal, Full, Mask, Window
from ..ragged import Ragged
from . import bert_padding as bert_padding

__version__ = "2.8.3"
"""The flash-attn whose interface this is, for code that asks."""

Out: TypeAlias = Any
"""A tensor, or with return_attn_probs three things: which of the two is beyond types, as in flash-attn."""


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Out:
    """Attention of q "b n h d" to k "b s g d" and v "b s g e" → "b n h e"; h % g == 0, query head x reads x // (h // g).

    >>> q, k, v = torch.randn(2, 5, 4, 16), torch.randn(2, 7, 2, 16), torch.randn(2, 7, 2, 16)
    >>> out, softmax_lse, _ = flash_attn_func(q, k, v, causal=True, window_size=(3, 0), return_attn_probs=True)
    >>> out.shape, softmax_lse.shape
    (torch.Size([2, 5, 4, 16]), torch.Size([2, 4, 5]))
    """
    said = _Said(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, s_aux)
    return _attend(q, k, v, said)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Out:
    """`flash_attn_func` of qkv "b n 3 h d" → "b n h d"."""
    said = _Said(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, s_aux)
    q, k, v = _split("qkv", qkv, "b n 3 h d")
    return _attend(q, k, v, said)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Out:
    """`flash_attn_func` of q "b n h d" and kv "b s 2 g d" → "b n h d"."""
    said = _Said(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, s_aux)
    k, v = _split("kv", kv, "b s 2 g d")
    return _attend(q, k, v, said)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    s_aux: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> Out:
    """Attention of packed q "t h d" to k "t g d" and v "t g e" → "t h e"; sequence r owns rows cu_seqlens[r] to [r+1].

    Of the keys of sequence r, leftpad_k[r] to seqused_k[r] are used where these, "b" integers, are given; the last query sits
    at the last used key. That costs a copy of k and v.

    >>> q, cu_seqlens = torch.randn(8, 4, 16), torch.tensor([0, 3, 8], dtype=torch.int32)
    >>> flash_attn_varlen_func(q, q, q, cu_seqlens, cu_seqlens, 5, 5, causal=True).shape
    torch.Size([8, 4, 16])
    """
    said = _Said(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, s_aux)
    if block_table is not None:
        raise OptionError("block_table: tilewise has no paged cache; gather each sequence's pages into k and v")
    k, v, cu_seqlens_k = used_keys(k, v, cu_seqlens_k, leftpad_k, seqused_k)
    return _attend(q, k, v, said, Ragged.from_offsets(cu_seqlens_q, cu_seqlens_k))


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Out:
    """`flash_attn_varlen_func` of qkv "t 3 h d" → "t h d"."""
    said = _Said(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, s_aux)
    q, k, v = _split("qkv", qkv, "t 3 h d")
    return _attend(q, k, v, said, Ragged.from_offsets(cu_seqlens))


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Out:
    """`flash_attn_varlen_func` of q "t h d" and kv "t 2 g d" → "t h d"."""
    said = _Said(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, s_aux)
    k, v = _split("kv", kv, "t 2 g d")
    return _attend(q, k, v, said, Ragged.from_offsets(cu_seqlens_q, cu_seqlens_k))


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Not here yet: raises NotImplementedError, which says how to attend to a cache with `tilewise.attention`."""
    raise NotImplementedError(
        "flash_attn_with_kvcache is not here yet. Write the new rows into the cache yourself, for a batch of one length "
        "k_cache[:, length : length + n] = k and so for v, then call tilewise.attention(q, k_cache, v_cache, "
        "mask=Causal() & Lengths(lengths + n), positions=(Positions(n, start=lengths), Positions(k_cache.shape[1]))), where "
        "lengths 'b' counts the rows that each sequence had before"
    )


class _Said(NamedTuple):
    """The arguments that all functions share."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    alibi_slopes: Tensor | None
    deterministic: bool
    return_attn_probs: bool
    s_aux: Tensor | None


def _attend(q: Tensor, k: Tensor, v: Tensor, said: _Said, ragged: Ragged | None = None) -> Out:
    """The translation: one call of tilewise."""
    if said.alibi_slopes is not None:
        if said.softcap:
            raise OptionError("flash-attn adds ALiBi after softcap, tilewise before it: it cannot run both in one call")
        if ragged is not None and said.alibi_slopes.dim() != 1:
            shape = tuple(said.alibi_slopes.shape)
            raise ShapeError(f"alibi_slopes {shape} must be 'h' in a packed call: slopes by sequence are not supported")
    o, lse = attention_with_lse(
        q, k, v, mask=band(said.causal, said.window_size), scale=said.softmax_scale, softcap=said.softcap or None,
        alibi=said.alibi_slopes, sink=said.s_aux, dropout=said.dropout_p, ragged=ragged, deterministic=said.deterministic,
    )  # fmt: skip
    return (o, lse, None) if said.return_attn_probs else o


def band(causal: bool, window_size: tuple[int | None, int | None]) -> Mask:
    """The mask of `causal` and `window_size` (left, right); −1 and None set no limit.

    >>> band(True, (3, 5)), band(False, (-1, 0))
    (Window(left=3, right=0), Causal(align='bottom-right'))
    """
    if len(window_size) != 2:
        raise OptionError(f"window_size must be a pair (left, right), got {window_size}")
    left, right = (None if size is None or size == -1 else size for size in window_size)
    if any(size is not None and size < 0 for size in (left, right)):
        raise OptionError(f"window_size: each side counts other keys, or is -1 for no limit; got {tuple(window_size)}")
    right = 0 if causal else right
    if left is None:
        return Full() if right is None else Causal() if right == 0 else Window(right=right)
    return Window(left, right)


def used_keys(
    k: Tensor, v: Tensor, offsets: Tensor, leftpad: Tensor | None, used: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Packed keys, values and offsets of which only keys `leftpad[r]` to `used[r]` of sequence r remain, in front; the others
    go past the last offset, where nobody reads them. Shapes do not depend on values, so nothing is brought to the host.

    >>> k, offsets = torch.arange(7.0)[:, None, None], torch.tensor([0, 3, 7])
    >>> k, _, offsets = used_keys(k, k, offsets, torch.tensor([0, 1]), torch.tensor([2, 3]))
    >>> k.flatten().tolist(), offsets.tolist()
    ([0.0, 1.0, 4.0, 5.0, 2.0, 3.0, 6.0], [0, 2, 4])
    """
    if (leftpad is None and used is None) or len(offsets) < 2:
        return k, v, offsets
    offsets = offsets.to(k.device, torch.int64)
    first, past = offsets[:-1], offsets[1:]
    for name, counts in (("leftpad_k", leftpad), ("seqused_k", used)):
        if counts is not None and counts.shape != first.shape:
            raise ShapeError(f"axis b: {name} {tuple(counts.shape)} must have one entry a sequence, {len(first)}")
    begin = first if leftpad is None else first + leftpad.to(k.device).clamp(min=0)
    end = past if used is None else torch.minimum(first + used.to(k.device), past)
    row = torch.arange(k.shape[0], device=k.device)
    owner = torch.searchsorted(past, row, right=True).clamp(max=len(first) - 1)
    keep = (row >= begin[owner]) & (row < end[owner])
    order = torch.argsort(~keep, stable=True)
    return k.index_select(0, order), v.index_select(0, order), pad((end - begin).clamp(min=0).cumsum(0), (1, 0))


def _split(name: str, x: Tensor, axes: str) -> tuple[Tensor, ...]:
    """q, k and v of a packed tensor, or k and v: views along the axis that `axes` names by its size."""
    words = axes.split()
    at = next(index for index, word in enumerate(words) if word.isdigit())
    if x.dim() != len(words) or x.shape[at] != int(words[at]):
        raise ShapeError(f"{name} must have the axes '{axes}', got {tuple(x.shape)}")
    return x.unbind(at)
