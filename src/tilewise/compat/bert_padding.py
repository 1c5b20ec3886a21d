"""`flash_attn.bert_padding` (flash-attn 2.8): between a padded batch "b n ..." and its real tokens end to end, "t ...".

Differentiable; rows of padding come back as 0.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from .._errors import ShapeError


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows `indices` "t" of `input` "rows ..."."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """A tensor of `first_axis_dim` rows that holds `values` "t ..." at rows `indices`, no row twice, and 0 elsewhere."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens where `attention_mask` "b n", or the `unused_mask` beside it, is not 0.

    Gives   the tokens "t ..." · their indices in the flattened batch "t" · cu_seqlens "b+1" int32 · the longest sequence ·
            how many tokens of each sequence `attention_mask` alone selects, "b" int32

    >>> import torch
    >>> _, indices, cu_seqlens, longest, _ = unpad_input(torch.randn(2, 3, 4), torch.tensor([[1, 1, 0], [1, 1, 1]]))
    >>> indices.tolist(), cu_seqlens.tolist(), longest
    ([0, 1, 3, 4, 5], [0, 2, 5], 3)
    """
    for name, mask in (("attention_mask", attention_mask), ("unused_mask", unused_mask)):
        if mask is not None and mask.shape != hidden_states.shape[:2]:
            want, have = tuple(hidden_states.shape[:2]), tuple(mask.shape)
            raise ShapeError(f"{name} {have} must be 'b n' {want} of hidden_states {tuple(hidden_states.shape)}")
    used = attention_mask.bool()
    taken = used if unused_mask is None else used | unused_mask.bool()
    lengths = taken.sum(-1)
    indices = taken.flatten().nonzero().flatten()
    offsets = pad(lengths.cumsum(0), (1, 0)).int()
    longest = int(lengths.max()) if len(lengths) else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, offsets, longest, used.sum(-1).int()


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of `unpad_input`: tokens "t ..." back at their indices of a batch "b n ...", 0 elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
