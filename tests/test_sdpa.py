"""torch's scaled_dot_product_attention on tilewise, against torch's own and against the definition."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn.attention import bias as torch_bias
from torch.nn.functional import scaled_dot_product_attention as imported

import tilewise as tw
from tilewise.compat import sdpa
from tilewise.compat.sdpa import use_tilewise
from tilewise.problem import Inputs, Options
from tilewise.testing import agree, assert_right


def tensors(*lead: int, n: int = 5, s: int = 7, d: int = 8, e: int = 6, dtype: Any = torch.float32) -> Any:
    return [torch.randn(*lead, rows, size).to(dtype) for rows, size in ((n, d), (s, d), (s, e))]


def outcome(call: Callable[..., Tensor], leaves: Sequence[Tensor], mode: Any) -> list[Tensor]:
    """What a call gives and the gradients of a random projection of it, in float64."""
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in leaves]
    with mode:
        o = call(*leaves)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o)
    grads = torch.autograd.grad(o, [x for x in leaves if x.requires_grad], do)
    return [x.double() for x in (o.detach(), *grads)]


def both(call: Callable[..., Tensor], *leaves: Tensor) -> None:
    """err(tilewise) ≤ 2·err(torch) + rounding against torch in float64, in L2: of the output, and of each gradient, where
    rounding is one machine epsilon of the output, or of all gradients together."""
    double = [x.double() if x.is_floating_point() else x for x in leaves]
    mine, rough = (outcome(call, leaves, mode) for mode in (use_tilewise(), nullcontext()))
    exact = outcome(call, double, nullcontext())
    eps, grads = torch.finfo(leaves[0].dtype).eps, torch.stack([x.norm() for x in exact[1:]]).norm()
    for at, (a, b, right) in enumerate(zip(mine, rough, exact, strict=True)):
        assert a.shape == right.shape
        assert (a - right).norm() <= 2 * (b - right).norm() + eps * (grads if at else right.norm())


def test_signature_is_that_of_torch() -> None:
    found = [p for p in inspect.signature(sdpa.scaled_dot_product_attention).parameters.values() if p.name != "backend"]
    want = "query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False"
    assert ", ".join(str(p.replace(annotation=p.empty)) for p in found) == want
    assert f"scaled_dot_product_attention({want})" in (imported.__doc__ or "").replace("\n", " ").replace("  ", "")


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3), (2, 1, 2, 3)], ids=len)
def test_t49_any_number_of_axes(lead: tuple[int, ...]) -> None:
    x, shape = tensors(*lead), (*lead, 5, 7)
    both(lambda q, k, v: imported(q, k, v), *x)
    both(lambda q, k, v: imported(q, k, v, is_causal=True, scale=0.3), *x)
    both(lambda q, k, v, m: imported(q, k, v, m), *x, torch.rand(shape) < 0.7)
    both(lambda q, k, v, m: imported(q, k, v, attn_mask=m), *x, torch.randn(shape))
    assert sdpa.scaled_dot_product_attention(*x).shape == (*lead, 5, 6)


MASKS = [(5, 1), (1, 7), (5, 7), (3, 1, 7), (1, 5, 7), (2, 1, 1, 7), (1, 3, 5, 7), (2, 3, 5, 7)]


@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_masks_broadcast(shape: tuple[int, ...]) -> None:
    x = tensors(2, 3)
    both(lambda q, k, v, m: imported(q, k, v, m), *x, torch.rand(shape) < 0.8)
    both(lambda q, k, v, m: imported(q, k, v, m), *x, torch.randn(shape))


@pytest.mark.parametrize("shape", [(2, 1, 1, 5, 7), (1, 3, 4, 1, 7), (3, 4, 5, 7)], ids=str)
def test_masks_broadcast_over_more_axes(shape: tuple[int, ...]) -> None:
    x = tensors(2, 3, 4)
    both(lambda q, k, v, m: imported(q, k, v, m), *x, torch.randn(shape))


def test_axes_before_the_last_two_broadcast() -> None:
    for shapes in itertools.product([(2, 3), (1, 3), (2, 1)], repeat=3):
        lead = torch.broadcast_shapes(*shapes)
        sizes = ((5, 8), (7, 8), (7, 6))
        x: Any = [torch.randn(*shape, *size) for shape, size in zip(shapes, sizes, strict=True)]
        both(lambda q, k, v: imported(q, k, v), *x)
        assert sdpa.scaled_dot_product_attention(*x).shape == (*lead, 5, 6)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)], ids=len)
def test_grouped_heads(lead: tuple[int, ...]) -> None:
    q, k, v = (torch.randn(*lead, *shape) for shape in ((6, 5, 8), (2, 7, 8), (2, 7, 6)))
    both(lambda q, k, v: imported(q, k, v, is_causal=True, enable_gqa=True), q, k, v)


@pytest.mark.parametrize("n, s", [(5, 5), (3, 6), (6, 3)])
def test_causal_is_aligned_top_left(n: int, s: int) -> None:
    q, k, v = torch.zeros(n, 8), torch.randn(s, 8), torch.eye(s)
    with use_tilewise():
        o = imported(q, k, v, is_causal=True)
    assert all(o[i].nonzero().flatten().tolist() == list(range(min(i + 1, s))) for i in range(n))


@pytest.mark.parametrize("n, s", [(5, 5), (3, 6)])
@pytest.mark.parametrize("make", [torch_bias.causal_upper_left, torch_bias.causal_lower_right])
def test_causal_bias_is_aligned_as_it_says(make: Any, n: int, s: int) -> None:
    both(lambda q, k, v: imported(q, k, v, make(n, s)), *tensors(2, 3, n=n, s=s))
    with use_tilewise(), pytest.raises(ValueError, match="CausalBias"):
        imported(*tensors(2, 3, n=n, s=s), attn_mask=make(n, s + 1))


def test_minus_infinity_hides_and_a_row_without_keys_gives_zero() -> None:
    x = tensors(2, 3)
    mask = torch.zeros(5, 7)
    mask[1, 2:], mask[3] = -torch.inf, -torch.inf
    both(lambda q, k, v: imported(q, k, v, mask.to(q.dtype)), *x)
    both(lambda q, k, v: imported(q, k, v, mask == 0), *x)
    with use_tilewise():
        assert not imported(*x, attn_mask=mask)[..., 3, :].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_the_definition(dtype: Any) -> None:
    q, k, v = tensors(2, 4, dtype=dtype)
    mask = torch.randn(2, 1, 5, 7).to(dtype)
    with use_tilewise():
        o = imported(q, k, v, mask)
    x = Inputs(*(t.transpose(1, 2) for t in (q, k, v)), bias=mask)
    assert torch.equal(o, tw.attention(x.q, x.k, x.v, bias=mask).transpose(1, 2))
    assert_right(x, Options())


def test_dropout_follows_the_seed() -> None:
    x, answers = tensors(2, 3), []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        with use_tilewise():
            answers.append(imported(*x, dropout_p=0.4))
    assert torch.equal(answers[0], answers[1]) and not torch.equal(answers[0], answers[2])


def test_what_is_refused() -> None:
    q, k, v = tensors(2, 4)
    table = torch.ones(5, 7, dtype=torch.bool)
    nested = torch.nested.nested_tensor([q[0], q[1]], layout=torch.jagged)
    cases: Any = (
        (ValueError, "do not go together", (q, k, v, table), {"is_causal": True}),
        (ValueError, "attn_mask", (q, k, v, table[:, :6]), {}),
        (ValueError, "attn_mask", (q, k, v, table.expand(2, 2, 4, 5, 7)), {}),
        (ValueError, "enable_gqa", (q, k[:, :2], v[:, :2]), {}),
        (ValueError, "cannot be shared evenly", (q, k[:, :3], v[:, :3]), {"enable_gqa": True}),
        (ValueError, "before 'h'", (q, k.expand(3, 2, 4, 7, 8), v.expand(4, 2, 4, 7, 6)), {}),
        (ValueError, "'... n d'", (q[0, 0, 0], k, v), {}),
        (ValueError, "dropout", (q, k, v), {"dropout_p": 1.0}),
        (TypeError, "bias", (q, k, v, table.long()), {}),
        (TypeError, "float64", (q, k.double(), v), {}),
        (TypeError, "nested", (nested, nested, nested), {}),
    )
    for error, message, arguments, options in cases:
        with use_tilewise(), pytest.raises(error, match=message):
            imported(*arguments, **options)


def test_a_named_backend() -> None:
    x = tensors(3)
    with use_tilewise("torch"):
        named = imported(*x)
    q, k, v = (t.transpose(-2, -3)[None] for t in x)
    assert torch.equal(named, tw.attention(q, k, v, backend="torch")[0].transpose(-2, -3))
    with use_tilewise("nothing"), pytest.raises(ValueError, match="nothing"):
        imported(*x)


@pytest.mark.parametrize("training", [False, True])
def test_modules_of_torch(training: bool) -> None:
    """Both passes of a Transformer layer, the one that has a kernel of its own in eval included, meet tilewise."""
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True).train(training)
    x, padding = torch.randn(2, 5, 16), torch.arange(5) >= torch.tensor([[5], [3]])
    with torch.no_grad(), patch.object(sdpa, "attention", wraps=sdpa.attention) as asked:
        right = layer(x, src_key_padding_mask=padding)
        with use_tilewise():
            mine = layer(x, src_key_padding_mask=padding)
    torch.testing.assert_close(mine[~padding], right[~padding])
    assert asked.call_count == 1
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with use_tilewise(), pytest.raises(Exception, match="as one piece"):
        compiled(x)


@pytest.mark.parametrize("where", ["around", "inside"])
def test_compiled(where: str) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        if where == "around":
            return imported(q, k, v, m, enable_gqa=True)
        with use_tilewise():
            return imported(q, k, v, m, enable_gqa=True)

    q, k, v, m = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8), torch.randn(4, 5, 7)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with use_tilewise():
        found = []
        for f in (call, compiled):
            leaves = [x.detach().requires_grad_() for x in (q, k, v, m)]
            o = f(*leaves)
            found.append((o, *torch.autograd.grad(o.sum(), leaves)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def rows_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["h before n", "n before h"])
def test_the_operator_of_sdpa(causal: bool, layout: str) -> None:
    """Against torch's own flash kernel of the CPU: out, lse, gradients, and the strides that torch's compiler expects."""
    q, k, v = tensors(2, 3, n=6, s=6, e=8)
    q, k, v = (x.contiguous() if layout == "h before n" else x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    o, lse, cu_q, cu_k, n, s, state, unused, debug = sdpa.sdpa_forward(q, k, v, 0.0, causal, False, scale=0.3)
    aten: Any = torch.ops.aten
    right = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=0.3)
    assert agree(o, right[0]) and agree(lse, right[1]) and o.stride() == torch.empty_like(q).stride()
    assert (cu_q, cu_k, n, s, state.shape, state.dtype, unused.dtype, debug.numel()) == (
        None, None, 6, 6, (2,), torch.uint64, torch.uint64, 0,
    )  # fmt: skip
    do = torch.randn_like(o)
    mine = sdpa.sdpa_backward(do, q, k, v, o, lse, None, None, n, s, 0.0, causal, state, unused, scale=0.3)
    theirs = aten._scaled_dot_product_flash_attention_for_cpu_backward(do, q, k, v, *right, 0.0, causal, scale=0.3)
    assert all(
        agree(a, b) and a.stride() == torch.empty_like(x).stride() for a, b, x in zip(mine, theirs, (q, k, v), strict=True)
    )


def test_the_operator_of_flash_attention() -> None:
    """Packed, windowed, causal bottom-right, with used keys and ALiBi: forward and backward are those of the public calls."""
    q, k, v = (torch.randn(t, h, 8) for t, h in ((9, 4), (12, 2), (12, 2)))
    cu = torch.tensor([0, 3, 8], dtype=torch.int32), torch.tensor([0, 5, 12], dtype=torch.int32)
    o, lse, state, unused, _ = sdpa.flash_forward(
        q, k, v, *cu, 5, 7, 0.0, True, False, window_size_left=2, window_size_right=-1
    )
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    ragged, mask = tw.Ragged.from_offsets(*cu), tw.Window(2, 0)
    right = tw.attention_with_lse(*leaves, ragged=ragged, mask=mask)
    assert torch.equal(o, right.o) and torch.equal(lse, right.lse)
    do = torch.randn_like(o)
    window: dict[str, Any] = {"window_size_left": 2}
    mine = sdpa.flash_backward(do, q, k, v, o, lse, *cu, 5, 7, 0.0, True, state, unused, **window)
    assert all(torch.equal(a, b) for a, b in zip(mine, torch.autograd.grad(right.o, leaves, do), strict=True))
    into = torch.empty_like(q)
    lse = sdpa.flash_forward_into(into, q, k, v, *cu, 5, 7, 0.0, True, False, window_size_left=2)
    assert torch.equal(into, right.o) and torch.equal(lse, right.lse)
    used, slopes = torch.tensor([2, 4], dtype=torch.int32), torch.rand(4)
    o, *_ = sdpa.flash_forward(q, k, v, *cu, 5, 7, 0.0, True, False, seqused_k=used, alibi_slopes=slopes)
    parts = [(slice(0, 3), slice(0, 2)), (slice(3, 8), slice(5, 9))]
    for rows, keys in parts:
        one = tw.attention(q[None, rows], k[None, keys], v[None, keys], mask=tw.Causal(), alibi=slopes)[0]
        assert agree(o[rows], one)


def test_the_operators_drop_the_same_pairs_in_both_passes() -> None:
    q, k, v = rows_first(*tensors(1, 2, e=8))
    o, lse, state, unused, _ = sdpa.flash_forward(q, k, v, None, None, 5, 7, 0.4, False, False)
    seed = state.view(torch.int64)[0]
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    right = tw.attention(*leaves, dropout=0.4, seed=seed)
    do = torch.randn_like(o)
    mine = sdpa.flash_backward(do, q, k, v, o, lse, None, None, 5, 7, 0.4, False, state, unused)
    assert torch.equal(o, right) and not torch.equal(o, sdpa.flash_forward(q, k, v, None, None, 5, 7, 0.4, False, False)[0])
    assert all(torch.equal(a, b) for a, b in zip(mine, torch.autograd.grad(right, leaves, do), strict=True))


@pytest.mark.parametrize("options, message", [
    ({"return_debug_mask": True}, "debug mask"),
    ({"block_table": torch.zeros(1, 1)}, "paged"),
    ({"seqused_k": torch.ones(1)}, "packed"),
    ({"window_size_left": -3}, "window_size"),
])  # fmt: skip
def test_what_the_operators_refuse(options: dict[str, Any], message: str) -> None:
    q, k, v = rows_first(*tensors(1, 2, e=8))
    debug = options.pop("return_debug_mask", False)
    with pytest.raises(ValueError, match=message):
        sdpa.flash_forward(q, k, v, None, None, 5, 7, 0.0, False, debug, **options)


@pytest.mark.parametrize("name", sdpa.OPERATORS)
def test_the_operators_have_the_schemas_of_torch(name: str) -> None:
    """Every argument of torch's operator in its place, those by name by name."""
    operator = getattr(torch.ops.aten, name, None)
    if operator is None:
        pytest.skip("this torch has no such operator")
    function = sdpa.flash_forward if name.endswith("inplace") else sdpa.OPERATORS[name]
    parameters = inspect.signature(function).parameters.values()
    arguments = [a for a in operator.default._schema.arguments if a.name != "out" or not name.endswith("inplace")]
    mine = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    assert mine == [a.name for a in arguments if not a.kwarg_only]
    assert {a.name for a in arguments if a.kwarg_only} <= {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}


@pytest.mark.skipif(not hasattr(torch.nn.attention, "activate_flash_attention_impl"), reason="this torch has no registry")
def test_registration() -> None:
    attention: Any = torch.nn.attention
    before = attention.list_flash_attention_impls()
    sdpa.register()
    assert attention.list_flash_attention_impls() == sorted([*before, "tilewise"])
    attention.activate_flash_attention_impl("tilewise")
    assert attention.current_flash_attention_impl() == "tilewise"
    attention.restore_flash_attention_impl()
    assert attention.current_flash_attention_impl() is None


def test_a_torch_without_a_registry_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl", raising=False)
    with pytest.raises(NotImplementedError, match="use_tilewise"):
        sdpa.register()
