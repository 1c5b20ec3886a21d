"""The interface of FlashAttention-2 on tilewise: the same signatures, windows by brute force, answers by the definition."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
import tilewise.compat.flash_attn as fa
from tilewise.problem import Inputs, Options
from tilewise.testing import agree, assert_right

INF = float("inf")
SHARED = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
OFFSETS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {SHARED}",
    "flash_attn_qkvpacked_func": f"qkv, {SHARED}",
    "flash_attn_kvpacked_func": f"q, kv, {SHARED}",
    "flash_attn_varlen_func": f"q, k, v, {OFFSETS}, {SHARED}, block_table=None",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {SHARED}",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {OFFSETS}, {SHARED}",
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, "
        "cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
        "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False"
    ),
}


def written(function: Callable[..., Any]) -> str:
    """A signature without what may only be said by name, and without annotations."""
    given = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    return ", ".join(str(p.replace(annotation=p.empty)) for p in given)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    assert written(getattr(fa, name)) == SIGNATURES[name]
    later = [p for p in inspect.signature(getattr(fa, name)).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert all(p.default is None for p in later)


def draw(b: int, n: int, h: int, d: int, s: int | None = None, g: int | None = None, dtype: Any = torch.float32) -> Any:
    s, g = n if s is None else s, h if g is None else g
    return [torch.randn(b, *axes, d).to(dtype) for axes in ((n, h), (s, g), (s, g))]


def packed(t: int, h: int, d: int, s: int | None = None, g: int | None = None, dtype: Any = torch.float32) -> Any:
    return [x[0] for x in draw(1, t, h, d, s, g, dtype)]


def offsets(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def same(call: Callable[..., Any], x: list[Tensor], mask: tw.Mask | None = None, ragged: Any = None, **options: Any) -> None:
    """`call` of the inputs gives out, lse and all gradients of tilewise's own call, which is held to the definition."""
    names = ("q", "k", "v", "alibi", "sink")[: len(x)]

    def right(q: Tensor, k: Tensor, v: Tensor, *more: Any) -> Any:
        extras = dict(zip(names[3:], more, strict=True))
        return tw.attention_with_lse(q, k, v, mask=mask, ragged=ragged, **extras, **options)

    found = []
    for function in (call, right):
        leaves = [t.detach().requires_grad_() for t in x]
        o, lse, *_ = function(*leaves)
        torch.manual_seed(1)
        grads = torch.autograd.grad((o, lse), leaves, (torch.randn_like(o), torch.randn_like(lse)))
        found.append((o, lse, *grads))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    four = x if ragged is None else [*(t[None] for t in x[:3]), *x[3:]]
    assert_right(Inputs(**dict(zip(names, four, strict=True))), Options(mask, ragged=ragged, **options))


def test_dense() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return fa.flash_attn_func(q, k, v, 0.0, 0.3, True, (3, 5), 2.0, None, True, True)

    same(call, draw(2, 5, 4, 16, s=7, g=2), tw.Window(3, 0), scale=0.3, softcap=2.0)


def test_packed() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return fa.flash_attn_varlen_func(q, k, v, *cu, 1, torch.tensor(1), 0.0, 0.3, False, (3, 1), 2.0, None, True, True)

    cu = offsets(0, 3, 3, 8), offsets(0, 2, 5, 11)
    same(call, packed(9, 4, 16, s=12, g=2), tw.Window(3, 1), tw.Ragged.from_offsets(*cu), scale=0.3, softcap=2.0)


def test_alibi_and_sinks() -> None:
    def dense(q: Tensor, k: Tensor, v: Tensor, alibi: Tensor, sink: Tensor) -> Any:
        return fa.flash_attn_func(q, k, v, causal=True, alibi_slopes=alibi, return_attn_probs=True, s_aux=sink)

    def ragged(q: Tensor, k: Tensor, v: Tensor, alibi: Tensor, sink: Tensor) -> Any:
        return fa.flash_attn_varlen_func(q, k, v, cu, cu, 5, 5, alibi_slopes=alibi, return_attn_probs=True, s_aux=sink)

    same(dense, [*draw(2, 5, 4, 16, s=7), torch.rand(2, 4), torch.randn(4)], tw.Causal())
    cu = offsets(0, 3, 8)
    same(ragged, [*packed(8, 4, 16), torch.rand(4), torch.randn(4)], None, tw.Ragged.from_offsets(cu))


@pytest.mark.parametrize("causal", [False, True])
def test_alibi_is_a_distance_between_positions_aligned_bottom_right(causal: bool) -> None:
    q, k, v = draw(1, 3, 2, 8, s=5)
    slopes = torch.tensor([0.5, 0.25])
    i, j = torch.arange(3)[:, None], torch.arange(5)
    bias = -slopes[:, None, None] * (i + 5 - 3 - j).abs()
    mask = tw.Causal() if causal else tw.Full()
    assert agree(fa.flash_attn_func(q, k, v, causal=causal, alibi_slopes=slopes), tw.attention(q, k, v, bias=bias, mask=mask))


@pytest.mark.parametrize("name", ["flash_attn_qkvpacked_func", "flash_attn_kvpacked_func"])
def test_tensors_packed_in_one(name: str) -> None:
    """Both forms, dense and of sequences end to end, with their gradients, equal the calls with three tensors."""
    rows, cu = (2, 4), offsets(0, 3, 8)
    for varlen in (False, True):
        lead = (8,) if varlen else rows
        together = torch.randn(*lead, 3 if "qkv" in name else 2, 2, 8, requires_grad=True)
        q = together.select(-3, 0).detach().requires_grad_() if "qkv" in name else torch.randn(*lead, 2, 8, requires_grad=True)
        k, v = (together.select(-3, at).detach().requires_grad_() for at in (-2, -1))
        options: dict[str, Any] = {"causal": True, "window_size": (2, -1), "return_attn_probs": True}
        first = (together,) if "qkv" in name else (q, together)
        if varlen:
            more: tuple = (cu, 5) if "qkv" in name else (cu, cu, 5, 5)
            one = getattr(fa, name.replace("attn_", "attn_varlen_"))(*first, *more, **options)
            three = fa.flash_attn_varlen_func(q, k, v, cu, cu, 5, 5, **options)
        else:
            one, three = getattr(fa, name)(*first, **options), fa.flash_attn_func(q, k, v, **options)
        assert torch.equal(one[0], three[0]) and torch.equal(one[1], three[1]) and one[2] is None
        do = torch.randn_like(one[0])
        grads = torch.autograd.grad(three[0], (q, k, v), do)
        (whole,) = torch.autograd.grad(one[0], together, do)
        assert torch.equal(whole, torch.stack(grads if "qkv" in name else grads[1:], -3))


WINDOWS = [(-1, -1), (0, 0), (2, 0), (0, 2), (3, 1), (-1, 0), (-1, 2), (2, -1), (100, 100)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n, s", [(5, 5), (3, 7), (7, 3), (1, 6)])
def test_windows_by_brute_force(n: int, s: int, causal: bool) -> None:
    """Uniform weights over the visible keys, whose values are the bits of a number: out says exactly who was seen."""
    q, k = torch.zeros(1, n, 1, 8), torch.randn(1, s, 1, 8)
    v = torch.eye(s)[None, :, None]
    for left, right in WINDOWS:
        out, lse, _ = fa.flash_attn_func(q, k, v, causal=causal, window_size=(left, right), return_attn_probs=True)
        for i in range(n):
            at = i + s - n
            limit = 0 if causal else right
            seen = [j for j in range(s) if (left < 0 or j >= at - left) and (limit < 0 or j <= at + limit)]
            assert torch.nonzero(out[0, i, 0]).flatten().tolist() == seen
            assert agree(lse[0, 0, i], torch.tensor(float(len(seen))).log())


def test_returns() -> None:
    q, k, v = draw(2, 3, 4, 16, s=5, g=2, dtype=torch.bfloat16)
    assert isinstance(fa.flash_attn_func(q, k, v), Tensor)
    out, lse, weights = fa.flash_attn_func(q, k, v, return_attn_probs=True)
    assert (out.shape, out.dtype, weights) == (q.shape, torch.bfloat16, None)
    assert (lse.shape, lse.dtype) == ((2, 4, 3), torch.float32)
    (q, k, v), cu = packed(8, 4, 16), offsets(0, 3, 8)
    out, lse, weights = fa.flash_attn_varlen_func(q, k, v, cu, cu, 5, 5, return_attn_probs=True)
    assert (out.shape, lse.shape, weights) == ((8, 4, 16), (4, 8), None)
    assert fa.__version__.startswith("2.8")


def test_lse_is_a_natural_logarithm_with_a_gradient() -> None:
    q, k, v = (x.double().requires_grad_() for x in draw(1, 3, 2, 8, s=5))
    _, lse, _ = fa.flash_attn_func(q, k, v, return_attn_probs=True)
    logits = torch.einsum("bnhd,bshd->bhns", q, k) * 8**-0.5
    assert agree(lse, logits.logsumexp(-1))
    mine, right = (torch.autograd.grad(x.square().sum(), (q, k)) for x in (lse, logits.logsumexp(-1)))
    assert all(agree(a, b) for a, b in zip(mine, right, strict=True))


def test_values_of_another_size_any_head_size_and_float64() -> None:
    q, k, v = torch.randn(1, 3, 2, 5), torch.randn(1, 4, 2, 5), torch.randn(1, 4, 2, 3)
    assert fa.flash_attn_func(q, k, v).shape == (1, 3, 2, 3)
    assert fa.flash_attn_func(q.double(), k.double(), v.double()).dtype == torch.float64


def test_dropout_follows_the_seed() -> None:
    q, k, v = (x.requires_grad_() for x in draw(1, 6, 2, 8))

    def once(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        out = fa.flash_attn_func(q, k, v, 0.4, causal=True, softcap=3.0)
        return [out, *torch.autograd.grad(out.sum(), (q, k, v))]

    first, again, other = once(0), once(0), once(1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    cu = offsets(0, 6)
    torch.manual_seed(0)
    one = fa.flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 6, 6, 0.4, causal=True, softcap=3.0)
    assert torch.equal(one, first[0][0])


@pytest.mark.parametrize("options, error, message", [
    ({"window_size": (-1, -3)}, ValueError, "window_size"),
    ({"window_size": (-2, 0)}, ValueError, "window_size"),
    ({"window_size": (-1, -3), "causal": True}, ValueError, "window_size"),
    ({"window_size": (1,)}, ValueError, "pair"),
    ({"dropout_p": 1.0}, ValueError, "dropout"),
    ({"softcap": -1.0}, ValueError, "softcap"),
    ({"softcap": 1.0, "alibi_slopes": torch.ones(4)}, ValueError, "after softcap"),
    ({"alibi_slopes": torch.ones(3)}, ValueError, "axis h: alibi"),
    ({"s_aux": torch.ones(3)}, ValueError, "axis h: sink"),
])  # fmt: skip
def test_what_is_refused(options: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        fa.flash_attn_func(*draw(1, 3, 4, 8), **options)


def test_what_else_is_refused() -> None:
    cu = offsets(0, 3)
    q, k, v = packed(3, 4, 8)
    with pytest.raises(ValueError, match="4 query heads"):
        fa.flash_attn_func(*draw(1, 3, 4, 8, g=3))
    with pytest.raises(ValueError, match="paged"):
        fa.flash_attn_varlen_func(q, k, v, cu, cu, 3, 3, block_table=torch.zeros(1, 1, dtype=torch.int32))
    with pytest.raises(ValueError, match="slopes by sequence"):
        fa.flash_attn_varlen_func(q, k, v, cu, cu, 3, 3, alibi_slopes=torch.ones(1, 4))
    with pytest.raises(TypeError, match="integers"):
        fa.flash_attn_varlen_func(q, k, v, cu.float(), cu.float(), 3, 3)
    with pytest.raises(ValueError, match="must start at 0"):
        fa.flash_attn_varlen_func(q, k, v, cu + 1, cu, 3, 3)
    with pytest.raises(ValueError, match="seqused_k"):
        fa.flash_attn_varlen_func(q, k, v, cu, cu, 3, 3, seqused_k=offsets(1, 2))
    with pytest.raises(ValueError, match="'b n 3 h d'"):
        fa.flash_attn_qkvpacked_func(torch.randn(1, 3, 2, 4, 8))
    with pytest.raises(ValueError, match="'t 2 g d'"):
        fa.flash_attn_varlen_kvpacked_func(q, torch.randn(3, 2, 8), cu, cu, 3, 3)


@pytest.mark.parametrize("lengths", [[2, 5], [0, 3]])
def test_a_cache_as_the_error_says(lengths: list[int]) -> None:
    q, k_cache, v_cache = draw(2, 2, 2, 8, s=7)
    before = torch.tensor(lengths)
    with pytest.raises(NotImplementedError, match=r"mask=Causal\(\) & Lengths\(lengths \+ n\), positions=\(Positions"):
        fa.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=before)
    mask, positions = tw.Causal() & tw.Lengths(before + 2), (tw.Positions(2, start=before), tw.Positions(7))
    o = tw.attention(q, k_cache, v_cache, mask=mask, positions=positions)
    for b, length in enumerate(lengths):
        one = slice(b, b + 1), slice(0, length + 2)
        assert agree(o[b], tw.attention(q[b : b + 1], k_cache[one], v_cache[one], mask=tw.Causal())[0])


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (1, 1)}, {"alibi_slopes": torch.tensor([0.5, 0.1])}])
@pytest.mark.parametrize("sides", ["seqused_k", "leftpad_k", "both"])
def test_used_keys(options: dict[str, Any], sides: str) -> None:
    """Only the used keys are seen, positions count from the first of them, and what the others hold is never read."""
    q, k, v = packed(6, 2, 8, s=13)
    cu_q, cu_k = offsets(0, 2, 2, 6), offsets(0, 5, 8, 12)
    leftpad, used = [1, 0, 4], [4, 2, 3]
    given: dict[str, Any] = {"leftpad_k": offsets(*leftpad), "seqused_k": offsets(*used)}
    given = given if sides == "both" else {sides: given[sides]}
    keep = [
        range(
            int(first) + (leftpad[r] if "leftpad_k" in given else 0),
            int(first) + used[r] if "seqused_k" in given else int(past),
        )
        for r, (first, past) in enumerate(pairwise(cu_k))
    ]
    rows = [row for span in keep for row in span]
    for x in (k, v):
        x[[row for row in range(13) if row not in rows]] = torch.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = fa.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 4, 5, **options, **given)
    ragged = tw.Ragged.from_lengths([2, 0, 4], [len(span) for span in keep])
    right = fa.flash_attn_varlen_func(q, k[rows], v[rows], ragged.q_offsets, ragged.kv_offsets, 4, 5, **options)
    assert agree(out, right)
    pairs = zip(*(torch.autograd.grad(o.square().sum(), leaves) for o in (out, right)), strict=True)
    assert all(a.isfinite().all() and agree(a, b) for a, b in pairs)


def test_more_used_keys_than_there_are() -> None:
    q, k, v = packed(4, 2, 8)
    cu = offsets(0, 2, 4)
    assert torch.equal(*(fa.flash_attn_varlen_func(q, k, v, cu, cu, 2, 2, seqused_k=x) for x in (offsets(9, 9), None)))
    out = fa.flash_attn_varlen_func(q, k, v, cu, cu, 2, 2, seqused_k=offsets(0, 1), leftpad_k=offsets(0, 3))
    assert not out.any()
    none = fa.flash_attn_varlen_func(q, k, v, offsets(0), offsets(0), 0, 0, seqused_k=offsets())
    assert not none.any()


def test_t01_t04_packed_sequences_with_few_keys() -> None:
    q, k, v = (x.requires_grad_() for x in packed(256, 1, 32, s=3, dtype=torch.float16))
    cu_q, cu_k = offsets(0, 76, 110, 256), offsets(0, 1, 2, 3)
    out, lse, _ = fa.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 146, 1, causal=True, return_attn_probs=True)
    (dq,) = torch.autograd.grad(out, q, torch.ones_like(out))
    sees = torch.zeros(256, dtype=torch.bool).index_fill(0, torch.tensor([75, 109, 255]), True)
    assert not out[~sees].any() and not dq[~sees].any() and (lse[:, ~sees] == -INF).all()
    assert torch.equal(out[sees], v) and dq.isfinite().all()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return fa.flash_attn_varlen_func(q, k, v, *cu, 1, 5, softmax_scale=1.0, causal=True, return_attn_probs=True)

    cu = offsets(0, 1, 1, 2), offsets(0, 3, 3, 8)
    same(call, packed(2, 9, 64, s=8, g=3, dtype=torch.bfloat16), tw.Causal(), tw.Ragged.from_offsets(*cu), scale=1.0)


def test_t17_t18_empty_sequences_and_rows_past_the_last_offset() -> None:
    q, k, v = (x.requires_grad_() for x in packed(1023, 1, 128, s=2046, dtype=torch.bfloat16))
    cu = offsets(0, 0, 0, 1023), offsets(0, 0, 1, 2046)
    out = fa.flash_attn_varlen_func(q, k, v, *cu, 1023, 2045)
    _, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    assert out.isfinite().all() and not dk[0].any() and not dv[0].any()
    q, k, v = (t.requires_grad_() for t in packed(946, 16, 64))
    cu = offsets(0, 144, 432, 944)
    out = fa.flash_attn_varlen_func(q, k, v, cu, cu, 512, 512, causal=True)
    for t in (out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))):
        assert not t[944:].any() and t.isfinite().all()


@pytest.mark.parametrize("s", [127, 64, 1])
def test_t22_a_window_beside_the_keys(s: int) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return fa.flash_attn_func(q, k, v, window_size=(32, 64), return_attn_probs=True)

    same(call, draw(2, 129, 2, 16, s=s), tw.Window(32, 64))


def test_t25_t26_windows_of_the_right_size() -> None:
    x = draw(1, 6, 1, 8)
    windows: list[Any] = [(-1, 0), (None, 0), [-1, 0]]
    assert all(torch.equal(fa.flash_attn_func(*x, window_size=w), fa.flash_attn_func(*x, causal=True)) for w in windows)
    q, k, v = torch.zeros(1, 6, 1, 8), torch.zeros(1, 6, 1, 8), torch.eye(6)[None, :, None]
    out = fa.flash_attn_func(q, k, v, causal=True, window_size=(3, 3))
    assert out[0, 5, 0].nonzero().flatten().tolist() == [2, 3, 4, 5]


def test_compiled() -> None:
    def dense(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return fa.flash_attn_func(q, k, v, causal=True, window_size=(3, 0), softcap=2.0, return_attn_probs=True)

    def ragged(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, used: Tensor) -> Any:
        most = (cu_k[1:] - cu_k[:-1]).max()
        return fa.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, most, causal=True, seqused_k=used, return_attn_probs=True)

    cases: list[tuple[Any, list[Tensor], list[Tensor]]] = [
        (dense, draw(2, 5, 4, 16, s=7, g=2), []),
        (ragged, packed(8, 4, 16, s=12), [offsets(0, 3, 8), offsets(0, 5, 12), offsets(4, 7)]),
    ]
    for function, x, rest in cases:
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        found = []
        for call in (function, compiled):
            leaves = [t.detach().requires_grad_() for t in x]
            o, lse, _ = call(*leaves, *rest)
            found.append((o, lse, *torch.autograd.grad(o.sum() + lse.sum(), leaves)))
        assert all(agree(a, b) for a, b in zip(*found, strict=True))


def test_second_derivatives() -> None:
    x = [t.double().requires_grad_() for t in draw(1, 3, 1, 4)]
    assert torch.autograd.gradgradcheck(lambda *x: fa.flash_attn_func(*x, causal=True), x)


def test_transformers_finds_every_feature_in_the_signature() -> None:
    """transformers asks the signature of the packed function what it may pass; nothing it asks for is missing."""
    flash = pytest.importorskip("transformers.modeling_flash_attention_utils")
    process = flash._lazy_define_process_function(fa.flash_attn_varlen_func)
    asked = {
        "is_causal": True,
        "dropout": 0.0,
        "softmax_scale": 0.5,
        "sliding_window": 3,
        "softcap": 2.0,
        "deterministic": True,
    }
    given = process(query_length=8, key_length=8, **asked, s_aux=torch.zeros(2), max_seqlen_q=5, max_seqlen_k=5)
    assert {"causal", "dropout_p", "softmax_scale", "window_size", "softcap", "deterministic", "s_aux"} <= set(given)
    q, k, v = packed(8, 2, 8)
    cu = offsets(0, 3, 8)
    out = fa.flash_attn_varlen_func(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, **given)
    options: dict[str, Any] = {"mask": tw.Window(2, 0), "scale": 0.5, "softcap": 2.0, "sink": torch.zeros(2)}
    assert torch.equal(out, tw.attention_varlen(q, k, v, ragged=tw.Ragged.from_offsets(cu), **options))


def test_the_old_names_find_it() -> None:
    said = (fa.__doc__ or "").partition("sys.modules |=")[2].partition("}")[0]
    code = f"""import sys, tilewise.compat.flash_attn as flash_attn; sys.modules |= {said}}}
import flash_attn; from flash_attn import flash_attn_func; from flash_attn.bert_padding import unpad_input
from flash_attn.flash_attn_interface import flash_attn_varlen_func as varlen
assert varlen.__module__ == flash_attn_func.__module__ == 'tilewise.compat.flash_attn'"""
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0
