"""Hugging Face transformers over many ranks: `register()` once, then a model with attn_implementation="tilewise" attends over
the rows of all ranks while `tilewise.ring.sharded` is open, and as in `compat.transformers` while it is not.

    register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="tilewise")
    with tw.ring.sharded(mesh) as ring:                                     # on every rank
        labels = ring.roll(ring.shard(ids), -1, fill=-100)
        logits = model(ring.shard(ids), position_ids=ring.positions(ids.shape[1])[None], use_cache=False).logits

What the user passes: this rank's tokens, and position_ids that say where they are in the whole sequence (for packed documents,
in each document: `whole[:, ring.positions(n)]`). position_ids serve rotary embeddings alone: which tokens see each other comes
from the model, causal or windowed, and from `sharded(mask=...)`, which documents and padding belong in. An attention_mask
with holes, a cache and chunked layers are refused. Activation checkpointing runs attention again in backward: keep `sharded`
open until that is done."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from .._errors import OptionError
from ..mask import Causal, Full, Mask, Window
from ..ring.api import current
from . import transformers as alone


def register(name: str = "tilewise") -> None:
    """Let `attn_implementation=name` run any transformers model on tilewise, sharded or not."""
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, describe)


def describe(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask of one model call. Sharded: of the whole sequence, though its shape is that of this rank's rows."""
    if current() is None:
        return alone.describe(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **kwargs)
    if attention_mask is not None and not bool(attention_mask.all()):
        raise OptionError("attention_mask hides tokens of this rank alone: give sharded(mask=...) Lengths or Documents of all")
    if q_length != kv_length:
        raise OptionError(f"a cache of {kv_length} keys for {q_length} queries cannot be sharded: pass use_cache=False")
    parts: list[Mask] = []
    for code, captured, _ in alone._conditions(mask_function):
        if code in alone._BANDS:
            parts += alone._BANDS[code](captured)
        elif code is not alone._PACKED:  # position_ids that are not 0, 1, 2, ... look like packed sequences
            raise OptionError("this model hides tokens by a function that tilewise does not know: it cannot run sharded")
    mask = reduce(operator.and_, parts) if parts else Full()
    return alone.MaskTensor(mask, 0, (batch_size, 1, q_length, kv_length), kwargs.get("device", "cpu"))


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, "b h n d" of this rank's rows → "b n h d"."""
    ring = current()
    if ring is None:
        return alone.attend(
            module, query, key, value, attention_mask, dropout, scaling, sliding_window, softcap, is_causal, s_aux,
            position_bias, **kwargs,
        )  # fmt: skip
    alone._refuse(kwargs)
    if position_bias is not None or kwargs.get("cu_seq_lens_q") is not None:
        raise OptionError("a position bias and packed offsets cannot be sharded; give sharded(mask=Documents...) instead")
    if isinstance(attention_mask, alone.MaskTensor):
        mask = attention_mask.mask
    elif attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        mask = Causal() if causal else Full()
        if sliding_window is not None:
            mask = mask & Window(left=sliding_window - 1, right=None if causal else sliding_window - 1)
    else:
        raise OptionError(f"attention_mask {tuple(attention_mask.shape)} is a table of this rank's rows alone")
    x = (t.transpose(1, 2) for t in (query, key, value))
    rate = dropout if module.training else 0.0
    return ring.attention(*x, mask=mask, scale=scaling, softcap=softcap, sink=s_aux, dropout=rate), None
