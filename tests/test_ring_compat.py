"""Other libraries' names for attention over many ranks: signatures, one rank, and what is refused. Many are in
`test_ring_gloo.py`."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.testing import assert_close

import tilewise as tw
from tilewise.compat import ring_flash_attn as theirs
from tilewise.compat.flash_attn import flash_attn_func, flash_attn_varlen_func

OPTIONS = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
    "group": None,
}
PACKED = ["cu_seqlens", "max_seqlen"]
GATHERED = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "heads_k_stride", "local_k_slice"]
FAMILIES: dict[str, list[str]] = {
    "ring_flash_attn": [],
    "zigzag_ring_flash_attn": [],
    "stripe_flash_attn": [],
    "ring_flash_attn_varlen": PACKED,
    "zigzag_ring_flash_attn_varlen": PACKED,
}
TENSORS = {"func": ["q", "k", "v"], "kvpacked_func": ["q", "kv"], "qkvpacked_func": ["qkv"]}


def parameters(name: str) -> dict[str, object]:
    return {p.name: p.default for p in inspect.signature(getattr(theirs, name)).parameters.values()}


@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_function_has_their_arguments_and_defaults(family, kind):
    named = [*TENSORS[kind], *FAMILIES[family]]
    expected = dict.fromkeys(named, inspect.Parameter.empty) | OPTIONS
    assert list(parameters(f"{family}_{kind}").items()) == list(expected.items())


def test_the_gathering_function_has_their_arguments_and_defaults():
    expected = dict.fromkeys(["q", "k", "v", *GATHERED], inspect.Parameter.empty) | OPTIONS
    assert list(parameters("llama3_flash_attn_varlen_func").items()) == list(expected.items())


@pytest.mark.parametrize("family", [name for name, extra in FAMILIES.items() if not extra])
def test_one_rank_is_flash_attn(family):
    q, k, v = torch.randn(2, 11, 4, 16), torch.randn(2, 11, 4, 16), torch.randn(2, 11, 4, 16)
    options = {"causal": True, "window_size": (3, -1), "return_attn_probs": True}
    right = flash_attn_func(q, k, v, **options)
    for call in (
        getattr(theirs, f"{family}_func")(q, k, v, **options),
        getattr(theirs, f"{family}_kvpacked_func")(q, torch.stack([k, v], 2), **options),
        getattr(theirs, f"{family}_qkvpacked_func")(torch.stack([q, k, v], 2), **options),
    ):
        assert_close(call[0], right[0])
        assert_close(call[1], right[1])
        assert call[2] is None
    plain = getattr(theirs, f"{family}_func")(q, k, v)
    assert_close(plain, tw.attention(q, k, v))


@pytest.mark.parametrize("family", [*(name for name, extra in FAMILIES.items() if extra), "llama3_flash_attn_varlen"])
def test_one_rank_packed_is_flash_attn(family):
    q, k, v = torch.randn(13, 4, 16), torch.randn(13, 4, 16), torch.randn(13, 4, 16)
    offsets = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
    right = flash_attn_varlen_func(q, k, v, offsets, offsets, 7, 7, causal=True, return_attn_probs=True)
    rest = (offsets, 7)
    if family.startswith("llama3"):
        prepared = theirs.llama3_flash_attn_prepare_cu_seqlens(offsets, True, 0, 1)
        rest = (*prepared[:4], 1, prepared[4])
    for name, packed in (
        ("func", (q, k, v)),
        ("kvpacked_func", (q, torch.stack([k, v], 1))),
        ("qkvpacked_func", (torch.stack([q, k, v], 1),)),
    ):
        out = getattr(theirs, f"{family}_{name}")(*packed, *rest, causal=True, return_attn_probs=True)
        assert_close(out[0], right[0])
        assert_close(out[1], right[1])


def test_prepared_offsets_are_theirs():
    """Sequences of 5, 1 and 10 rows over 4 ranks: the last rank's only sequence began two ranks before."""
    offsets = torch.tensor([0, 5, 6, 16])
    prepared = [theirs.llama3_flash_attn_prepare_cu_seqlens(offsets, True, r, 4) for r in range(4)]
    assert [x[0].tolist() for x in prepared] == [[0, 4], [0, 1, 2, 4], [0, 4], [0, 4]]
    assert [x[1].tolist() for x in prepared] == [[0, 4], [0, 5, 6, 8], [0, 6], [0, 10]]
    assert [x[2:] for x in prepared] == [
        (4, 4, slice(0, 4)),
        (2, 5, slice(0, 8)),
        (4, 6, slice(6, 12)),
        (4, 10, slice(6, 16)),
    ]
    full = theirs.llama3_flash_attn_prepare_cu_seqlens(offsets, False, 1, 4)
    assert (full[1].tolist(), full[4]) == ([0, 5, 6, 16], slice(0, 16))
    with pytest.raises(tw.ShapeError, match="16 rows do not share evenly among 3 ranks"):
        theirs.llama3_flash_attn_prepare_cu_seqlens(offsets, True, 0, 3)


def test_what_is_refused_says_why():
    x, offsets = torch.randn(6, 2, 8), torch.tensor([0, 6])
    with pytest.raises(NotImplementedError, match="where sequences on other ranks end"):
        theirs.llama3_flash_attn_varlen_func(x, x, x, offsets, offsets, 6, 6, 1, slice(0, 6))
    with pytest.raises(NotImplementedError, match=r"ring\.sharded"):
        theirs.substitute_hf_flash_attn(None, 1)
    with pytest.raises(NotImplementedError, match="Documents"):
        theirs.update_ring_flash_attn_params(offsets, None)


def test_gradients_flow_through_out_and_lse():
    q = torch.randn(1, 7, 2, 8, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(1, 7, 2, 8, dtype=torch.float64), torch.randn(1, 2, 7, dtype=torch.float64)
    out, lse, _ = theirs.zigzag_ring_flash_attn_func(q, q, q, causal=True, return_attn_probs=True)
    right = tw.attention_with_lse(q, q, q, mask=tw.Causal())
    mine, wanted = (torch.autograd.grad(pair, q, weights) for pair in ((out, lse), tuple(right)))
    assert_close(mine, wanted)
