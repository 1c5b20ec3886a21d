"""Inputs on which other attention libraries went wrong, with the right answer, numbered in the order in which they were
collected. What needs a cache, pages or more memory than a computer has is not here (DESIGN.md, "Reported cases")."""

from __future__ import annotations

import math

import pytest
import torch

import tilewise as tw
from tilewise.problem import Inputs, Options
from tilewise.testing import agree, assert_right

INF = float("inf")


def draw(b, n, h, d, *, s=None, g=None, e=None, dtype=torch.float32):
    s, g, e = n if s is None else s, h if g is None else g, d if e is None else e
    return tuple(torch.randn(*shape).to(dtype) for shape in ((b, n, h, d), (b, s, g, d), (b, s, g, e)))


def right(q, k, v, mask=None, **options):
    extras = {name: options.pop(name) for name in ("bias", "alibi", "sink") if name in options}
    assert_right(Inputs(q, k, v, **extras), Options(mask, **options))


def packed_right(q, k, v, ragged, mask=None, **options):
    """Packed attention and its gradients, held against the definition on the packed problem."""
    right(q[None], k[None], v[None], mask, ragged=ragged, **options)


def test_t01_packed_sequences_with_one_key_each():
    q, k, v = torch.randn(256, 1, 32).half(), torch.randn(3, 1, 32).half(), torch.randn(3, 1, 32).half()
    ragged = tw.Ragged.from_offsets([0, 76, 110, 256], [0, 1, 2, 3])
    packed_right(q, k, v, ragged, tw.Causal())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = tw.attention_varlen(*leaves, ragged=ragged, mask=tw.Causal())
    dq, *_ = torch.autograd.grad(o, leaves, torch.ones_like(o))
    sees = torch.zeros(256, dtype=torch.bool)
    sees[[75, 109, 255]] = True  # only the last query of a sequence sits at its one key
    assert torch.equal(o[~sees], torch.zeros_like(o[~sees])) and torch.equal(dq[~sees], torch.zeros_like(dq[~sees]))
    assert torch.equal(o[sees], v)


def test_t02_one_of_each_gives_v_and_no_gradient_to_q_and_k():
    q, k, v = (x.requires_grad_() for x in draw(1, 1, 1, 16, dtype=torch.float16))
    o = tw.attention(q, k, v)
    do = torch.randn_like(o)
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), do)
    assert torch.equal(o, v) and torch.equal(dv, do)
    right(q.detach(), k.detach(), v.detach())
    assert dq.isfinite().all() and dk.isfinite().all()


def test_t03_causal_half_is_finite():
    q, k, v = draw(1, 1024, 1, 128, dtype=torch.float16)
    right(q, k, v, tw.Causal())


def test_t04_packed_grouped_heads_with_one_query_each():
    q, k, v = torch.randn(2, 9, 64).bfloat16(), torch.randn(8, 3, 64).bfloat16(), torch.randn(8, 3, 64).bfloat16()
    packed_right(q, k, v, tw.Ragged.from_offsets([0, 1, 1, 2], [0, 3, 3, 8]), tw.Causal(), scale=1.0)


def test_t07_a_batch_of_8300_single_tokens():
    q, k, v = (x.requires_grad_() for x in draw(8300, 1, 16, 128, dtype=torch.bfloat16))
    o = tw.attention(q, k, v)
    do = torch.randn_like(o)
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), do)
    assert torch.equal(o, v) and torch.equal(dv, do)
    assert dq.isfinite().all() and dk.isfinite().all()


def test_t17_empty_sequences_before_a_long_one():
    q, k, v = (torch.randn(rows, 1, 128).bfloat16() for rows in (1023, 2046, 2046))
    ragged = tw.Ragged.from_lengths([0, 0, 1023], [0, 1, 2045])
    packed_right(q, k, v, ragged)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = tw.attention_varlen(*leaves, ragged=ragged)
    _, dk, dv = torch.autograd.grad(o.sum(), leaves)
    assert torch.equal(dk[0], torch.zeros_like(dk[0])) and torch.equal(dv[0], torch.zeros_like(dv[0]))


def uncovered() -> list[torch.Tensor]:
    leaves = [torch.randn(946, 16, 64).requires_grad_() for _ in range(3)]
    o = tw.attention_varlen(*leaves, ragged=tw.Ragged.from_offsets([0, 144, 432, 944]), mask=tw.Causal())
    return [o.detach(), *torch.autograd.grad(o, leaves, torch.ones_like(o))]


def test_t18_rows_past_the_last_offset_give_zero():
    for x in uncovered():
        assert torch.equal(x[944:], torch.zeros_like(x[944:])) and x.isfinite().all()


def test_t19_memory_that_holds_nan_before_use_changes_nothing():
    torch.manual_seed(1)
    clean = uncovered()
    torch.use_deterministic_algorithms(True)  # fills every torch.empty with NaN
    try:
        assert torch.empty(3).isnan().all()
        torch.manual_seed(1)
        dirty = uncovered()
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(clean) == 4 and all(torch.equal(a, b) for a, b in zip(dirty, clean, strict=True))


def test_t21_more_queries_than_keys():
    q, k, v = (x.requires_grad_() for x in draw(1, 2048, 1, 16, s=1024))
    o, lse = tw.attention_with_lse(q, k, v, mask=tw.Causal())
    assert torch.equal(o[:, :1024], torch.zeros_like(o[:, :1024])) and (lse[..., :1024] == -INF).all()
    dq, _, _ = torch.autograd.grad(o.sum(), (q, k, v))
    assert torch.equal(dq[:, :1024], torch.zeros_like(dq[:, :1024])) and lse[..., 1024:].isfinite().all()
    right(q.detach(), k.detach(), v.detach(), tw.Causal())


@pytest.mark.parametrize("s", [127, 64, 1])
def test_t22_a_window_beside_the_keys(s):
    q, k, v = draw(2, 129, 2, 16, s=s)
    right(q, k, v, tw.Window(32, 64))
    _, lse = tw.attention_with_lse(q, k, v, mask=tw.Window(32, 64))
    i, j = torch.arange(129)[:, None] + s - 129, torch.arange(s)
    assert torch.equal(lse[0, 0] == -INF, ~((j >= i - 32) & (j <= i + 64)).any(1))


def test_t24_a_negative_window_raises():
    with pytest.raises(ValueError, match="negative"):
        tw.Window(None, -3)


def test_t25_a_window_with_nothing_to_the_right_is_causal():
    q, k, v = draw(1, 13, 2, 8)
    assert torch.equal(tw.attention(q, k, v, mask=tw.Window(None, 0)), tw.attention(q, k, v, mask=tw.Causal()))


def test_t26_a_sliding_window_of_four_sees_four():
    x = torch.zeros(1, 9, 1, 4)
    _, lse = tw.attention_with_lse(x, x, x, mask=tw.Causal() & tw.Window(left=3))
    assert torch.equal(lse[0, 0, 4:], torch.full((5,), math.log(4)))


@pytest.mark.parametrize("length", [64, 192, 704, 1088])
def test_t28_very_negative_logits_beside_a_padded_tail(length):
    q, k, v = draw(1, length, 1, 64, dtype=torch.bfloat16)
    q, k = q * 0.1, k * 0.1
    q[..., 0], k[..., 0] = 1, -120 * math.sqrt(64)
    table = torch.ones(length, length, dtype=torch.bool).tril()
    for mask in (tw.Where(table), tw.Causal()):
        right(q, k, v, mask)


@pytest.mark.parametrize("n", [1, 5])
def test_t30_all_logits_far_below_any_sentinel(n):
    q, k = torch.full((1, n, 1, 1), 1024.0), torch.full((1, n, 1, 1), -512.0)
    v = torch.ones(1, n, 1, 3)
    o, lse = tw.attention_with_lse(q, k, v, scale=0.1)
    assert torch.equal(o, v)
    assert agree(lse, torch.full_like(lse, -524288 * 0.1 + math.log(n)))


def test_t32_merging_two_empty_partials():
    o, lse = tw.merge(
        (torch.zeros(1, 2, 1, 3), torch.full((1, 1, 2), -INF)), (torch.zeros(1, 2, 1, 3), torch.full((1, 1, 2), -INF))
    )
    assert torch.equal(o, torch.zeros_like(o)) and (lse == -INF).all()


def test_t34_a_length_off_the_tile_is_not_scaled_by_padding():
    q, k, v = draw(1, 1, 2, 16, s=160)
    o = tw.attention(torch.zeros_like(q), k, v, mask=tw.Lengths([100]))
    assert agree(o, v[:, :100].mean(1, keepdim=True))


def gradients(call, *tensors):
    leaves = [x.clone().requires_grad_() for x in tensors]
    o = call(*leaves)
    return [o.detach(), *torch.autograd.grad(o.sum(), leaves)]


def test_t35_nan_in_unused_slots_and_left_of_the_window():
    q, k, v = draw(1, 1, 2, 16, s=64)
    positions = (tw.Positions(1, start=12), tw.Positions(64))
    mask = tw.Causal() & tw.Window(5) & tw.Lengths([13])
    call = lambda *t: tw.attention(*t, mask=mask, positions=positions)  # noqa: E731
    clean = gradients(call, q, k, v)
    for x in (k, v):
        x[:, 13:], x[:, :7] = float("nan"), float("nan")
    assert all(torch.equal(a, b) for a, b in zip(gradients(call, q, k, v), clean, strict=True))


def test_t36_nan_behind_a_boolean_mask():
    q, k, v = draw(2, 8, 2, 16)
    table = torch.rand(8, 8) < 0.5
    table[:, 3] = False
    call = lambda *t: tw.attention(*t, mask=tw.Where(table))  # noqa: E731
    clean = gradients(call, q, k, v)
    k[:, 3], v[:, 3] = float("nan"), float("nan")
    assert all(agree(a, b) for a, b in zip(gradients(call, q, k, v), clean, strict=True))


def test_t37_and_t39_rows_that_a_boolean_mask_hides_whole():
    q, k, v = draw(2, 8, 2, 16)
    table = torch.ones(2, 1, 8, 8, dtype=torch.bool).tril()
    table[0, 0, 2] = table[1, 0, 7] = False
    right(q, k, v, tw.Where(table))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o = tw.attention(*leaves, mask=tw.Where(table))
    assert torch.equal(o[0, 2], torch.zeros_like(o[0, 2]))
    dq, dk, dv = torch.autograd.grad(o.sum(), leaves)
    assert torch.equal(dq[0, 2], torch.zeros_like(dq[0, 2])) and all(x.isfinite().all() for x in (dq, dk, dv))


def test_t42_slices_of_one_projection():
    qkv = torch.randn(2, 37, 3, 2, 256)
    right(*qkv.unbind(2))
    leaf = qkv.clone().requires_grad_()
    o = tw.attention(*leaf.unbind(2), mask=tw.Causal())
    (d,) = torch.autograd.grad(o, leaf, torch.ones_like(o))
    apart = [x.clone().requires_grad_() for x in qkv.unbind(2)]
    o = tw.attention(*apart, mask=tw.Causal())
    assert torch.equal(d, torch.stack(torch.autograd.grad(o, apart, torch.ones_like(o)), 2))


def test_t43_and_t46_a_last_axis_that_is_not_contiguous():
    q, k, v = (torch.randn(2, 16, 4, 19).permute(0, 3, 2, 1) for _ in range(3))
    assert q.stride(-1) != 1
    right(q, k, v, tw.Causal())


def test_t47_values_of_another_size():
    q, k, v = draw(1, 16, 1, 32, e=24)
    assert tw.attention(q, k, v).shape == (1, 16, 1, 24)
    right(q, k, v)


@pytest.mark.parametrize("axes", [2, 3, 5])
def test_t49_other_ranks_are_a_clear_error(axes):
    x = torch.randn(*(3,) * axes)
    with pytest.raises(ValueError, match=f"q must have the four axes 'b n h d', got {axes}"):
        tw.attention(x, x, x)


def test_t50_and_t51_a_batch_of_65536_and_of_decodes():
    for n, s in ((2, 2), (1, 5)):
        q, k, v = (x.requires_grad_() for x in draw(65536, n, 1, 4, s=s))
        o = tw.attention(q, k, v)
        grads = torch.autograd.grad(o.sum(), (q, k, v))
        last = [x.detach()[-3:].requires_grad_() for x in (q, k, v)]
        few = tw.attention(*last)
        assert agree(o[-3:], few)
        assert all(agree(a[-3:], b) for a, b in zip(grads[1:], torch.autograd.grad(few.sum(), last)[1:], strict=True))


def test_t50_80000_packed_sequences():
    q, k, v = (x.requires_grad_() for x in (torch.randn(80000, 1, 4) for _ in range(3)))
    o = tw.attention_varlen(q, k, v, ragged=tw.Ragged.from_lengths([1, 2, 1, 0] * 20000), mask=tw.Causal())
    pairs = [x.view(20000, 4, 1, 4)[:, 1:3] for x in (q, k, v)]
    dense, lone = tw.attention(*pairs, mask=tw.Causal()), v.view(20000, 4, 1, 4)[:, ::3]
    assert agree(o.view(20000, 4, 1, 4)[:, 1:3], dense)
    assert torch.equal(o.view(20000, 4, 1, 4)[:, ::3], lone)
    loss = dense.square().sum() + lone.square().sum()
    assert agree(*(torch.autograd.grad(x, v)[0] for x in (o.square().sum(), loss)))


def test_t50_71280_heads():
    q, k, v = draw(1, 3, 71280, 4)
    assert agree(tw.attention(q, k, v)[:, :, -7:], tw.attention(*(x[:, :, -7:] for x in (q, k, v))))


def test_t52_zeros_of_length_33728():
    x = torch.zeros(1, 33728, 1, 512)  # all keys, and as many of the queries as take a second
    assert torch.equal(tw.attention(x[:, :512], x, x), torch.zeros(1, 512, 1, 512))


def test_t53_and_t55_bias_of_an_odd_length_with_its_gradient():
    q, k, v = draw(831, 43, 32, 8)
    bias = torch.randn(831, 1, 43, 43)
    whole = gradients(lambda q, k, v, bias: tw.attention(q, k, v, bias=bias), q, k, v, bias)
    last = gradients(lambda q, k, v, bias: tw.attention(q, k, v, bias=bias), *(x[-3:] for x in (q, k, v, bias)))
    assert agree(whole[0][-3:], last[0]) and agree(whole[3][-3:], last[3]) and agree(whole[4][-3:], last[4])
    right(q[-3:], k[-3:], v[-3:], bias=bias[-3:])
    right(q[:3], k[:3], v[:3], bias=torch.randn(3, 1, 1, 43))


def test_t57_the_gradient_of_a_sink_is_summed_in_float32():
    q, k, v = draw(1, 1024, 64, 16, dtype=torch.bfloat16)
    sink = torch.randn(64, requires_grad=True)
    exact = sink.detach().double().requires_grad_()
    o = tw.attention(q, k, v, mask=tw.Causal(), sink=sink)
    wide = tw.attention(*(x.double() for x in (q, k, v)), mask=tw.Causal(), sink=exact)
    (d,), (r,) = torch.autograd.grad(o.float().sum(), sink), torch.autograd.grad(wide.sum(), exact)
    assert (d - r).norm() <= torch.finfo(torch.bfloat16).eps * r.norm()
    right(q[:, :256, :4], k[:, :256, :4], v[:, :256, :4], tw.Causal(), sink=sink.detach()[:4])


def test_t59_gradient_of_a_gradient():
    q, k, v = (x.double().requires_grad_() for x in draw(1, 5, 2, 4))
    assert torch.autograd.gradgradcheck(lambda *t: tw.attention(*t, mask=tw.Causal()), (q, k, v))


def test_t61_a_loss_of_exp_lse():
    q, k, v = (x.double().requires_grad_() for x in draw(1, 9, 2, 4, s=5))

    def loss(q, k, v):
        o, lse = tw.attention_with_lse(q, k, v, mask=tw.Causal())
        return o.sum() + lse.exp().sum()

    assert torch.autograd.gradcheck(loss, (q, k, v))


def test_t63_an_irregular_mask_over_several_tiles():
    q, k, v = draw(1, 1024, 1, 16)
    table = (torch.rand(4, 4) < 0.5).repeat_interleave(256, 0).repeat_interleave(256, 1)
    table[:, :3] = True
    right(q, k, v, tw.Where(table))
    right(q, k, v, tw.Where(lambda b, h, i, j: (i // 256 * 3 + j // 256) % 5 < 3))


def test_t65_one_causal_query_sees_every_key():
    q, k, v = draw(1, 1, 2, 16, s=8)
    assert torch.equal(tw.attention(q, k, v, mask=tw.Causal()), tw.attention(q, k, v))


def test_t67_a_causal_table_has_the_gradients_of_causal():
    q, k, v = draw(1, 600, 2, 64)
    found = []
    for mask in (tw.Causal(), tw.Where(lambda b, h, i, j: j <= i)):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        found.append(torch.autograd.grad(tw.attention(*leaves, mask=mask).square().sum(), leaves))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_t68_head_sizes_192_and_128_over_128_heads():
    q, k, v = draw(1, 1024, 128, 192, e=128, dtype=torch.bfloat16)
    call = lambda *t: tw.attention(*t, mask=tw.Causal())  # noqa: E731
    whole, last = gradients(call, q, k, v), gradients(call, *(x[:, :, -2:] for x in (q, k, v)))
    assert all(agree(a[:, :, -2:], b) for a, b in zip(whole, last, strict=True))
    right(*(x[:, :, -1:].contiguous() for x in (q, k, v)), mask=tw.Causal())


def test_t70_thirty_runs_are_bitwise_equal():
    q, k, v = (x.requires_grad_() for x in draw(1, 128, 2, 32))
    run = lambda: torch.autograd.grad(tw.attention(q, k, v, mask=tw.Causal(), deterministic=True).square().sum(), (q, k, v))  # noqa: E731
    first = run()
    assert all(torch.equal(a, b) for _ in range(30) for a, b in zip(first, run(), strict=True))


def test_t72_dropout_moves_with_the_seed_only():
    q, k, v = draw(1, 64, 1, 8)
    one = tw.attention(q, k, v, dropout=0.3, seed=1)
    elsewhere = [x.clone() for x in (q, k, v)]
    assert torch.equal(one, tw.attention(*elsewhere, dropout=0.3, seed=1))
    assert not torch.equal(one, tw.attention(q, k, v, dropout=0.3, seed=2))


def test_t73_all_of_128_dimensions_count():
    q, k, v = draw(1, 16, 1, 128)
    other = k.clone()
    other[..., 64:] *= -1
    assert not agree(tw.attention(q, k, v), tw.attention(q, other, v))
    right(q, other, v)


def test_t75_and_t76_grouped_heads_pick_the_token_that_the_definition_picks():
    q, k, v = draw(4, 1, 28, 64, s=333, g=4, dtype=torch.bfloat16)
    right(q, k, v)
    head = torch.randn(28 * 64, 97).bfloat16()
    wide = [x.double() for x in (q, k, v)]
    mine = (tw.attention(q, k, v).flatten(1).double() @ head.double()).argmax(-1)
    assert torch.equal(mine, (tw.attention(*wide).flatten(1) @ head.double()).argmax(-1))
