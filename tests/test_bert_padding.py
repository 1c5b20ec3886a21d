"""Between padded batches and tokens end to end."""

from __future__ import annotations

import inspect

import pytest
import torch

import tilewise as tw
import tilewise.compat.flash_attn as fa
from tilewise.compat.bert_padding import index_first_axis, index_put_first_axis, pad_input, unpad_input
from tilewise.testing import agree


def test_signatures():
    names = {
        f: [str(p.replace(annotation=p.empty)) for p in inspect.signature(f).parameters.values()]
        for f in (pad_input, unpad_input)
    }
    assert names[unpad_input] == ["hidden_states", "attention_mask", "unused_mask=None"]
    assert names[pad_input] == ["hidden_states", "indices", "batch", "seqlen"]
    assert fa.bert_padding.pad_input is pad_input


def test_padding_and_back():
    x = torch.randn(3, 5, 2, 4, requires_grad=True)
    real = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]])
    tokens, indices, cu, longest, used = unpad_input(x, real)
    assert torch.equal(tokens, x[real.bool()]) and indices.tolist() == [0, 1, 2, 11, 12, 13, 14]
    assert (cu.tolist(), cu.dtype, longest, used.tolist(), used.dtype) == ([0, 3, 3, 7], torch.int32, 4, [3, 0, 4], torch.int32)
    assert torch.equal(index_first_axis(x.flatten(0, 1), indices), tokens)
    assert torch.equal(index_put_first_axis(tokens, indices, 15).unflatten(0, (3, 5)), pad_input(tokens, indices, 3, 5))
    again = pad_input(tokens, indices, 3, 5)
    assert torch.equal(again, x * real[..., None, None])
    (grad,) = torch.autograd.grad(again, x, torch.ones_like(x))
    assert torch.equal(grad, real[..., None, None].expand_as(x).float())
    unused = torch.tensor([[0, 0, 0, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]]).bool()
    tokens, _, cu, longest, used = unpad_input(x, real.bool(), unused)
    assert (len(tokens), cu.tolist(), longest, used.tolist()) == (9, [0, 4, 5, 9], 4, [3, 0, 4])
    assert unpad_input(x[:0], real[:0])[3] == 0
    with pytest.raises(ValueError, match="attention_mask"):
        unpad_input(x, real[:, :4])


def test_a_padded_batch_through_packed_attention():
    q, k, v = (torch.randn(2, 5, 2, 8) for _ in range(3))
    real = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    (q_, indices, cu, longest, _), (k_, *_), (v_, *_) = (unpad_input(x, real) for x in (q, k, v))
    out = fa.flash_attn_varlen_func(q_, k_, v_, cu, cu, longest, longest, causal=True)
    right = tw.attention(q, k, v, mask=tw.Causal() & tw.Lengths(real.sum(-1)))
    assert agree(pad_input(out, indices, 2, 5), right * real[..., None, None])
