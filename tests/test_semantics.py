"""What attention means here, one test for each promise of DESIGN.md ("Semantics")."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

import tilewise as tw
from tilewise.dropout import Dropout
from tilewise.problem import Inputs, Options
from tilewise.testing import agree, assert_right

NAN, INF = float("nan"), float("inf")


def draw(*, dtype: torch.dtype = torch.float32, b=2, n=7, s=11, h=4, g=2, d=5, e=3):
    return tuple(torch.randn(*shape, dtype=dtype) for shape in ((b, n, h, d), (b, s, g, d), (b, s, g, e)))


def gradients(call, *tensors):
    leaves = [t.clone().requires_grad_() for t in tensors]
    o = call(*leaves)
    return torch.autograd.grad(o, leaves, torch.ones_like(o))


def test_a_row_that_sees_no_key_gives_zero_minus_infinity_and_no_gradient():
    q, k, v = (t.requires_grad_() for t in draw(n=11, s=7))
    o, lse = tw.attention_with_lse(q, k, v, mask=tw.Causal())  # the first four rows sit before the first key
    assert torch.equal(o[:, :4], torch.zeros_like(o[:, :4]))
    assert (lse[:, :, :4] == -INF).all() and lse[:, :, 4:].isfinite().all()
    dq, dk, dv = torch.autograd.grad((o.sum() + lse[:, :, :4].sum()), (q, k, v))
    assert torch.equal(dq[:, :4], torch.zeros_like(dq[:, :4]))
    assert dk.isfinite().all() and dv.isfinite().all()


def test_a_hidden_row_stays_zero_with_a_sink_and_its_lse_is_the_sink():
    q, k, v = draw(n=11, s=7)
    sink = torch.randn(4)
    o, lse = tw.attention_with_lse(q, k, v, mask=tw.Causal(), sink=sink)
    assert torch.equal(o[:, :4], torch.zeros_like(o[:, :4]))
    assert torch.equal(lse[:, :, :4], sink[None, :, None].expand(2, 4, 4))


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("side", ["k", "v", "both"])
def test_a_hidden_key_or_value_is_never_read(poison, side):
    q, k, v = draw(n=11)
    mask = tw.Causal() & tw.Window(3)
    clean = (tw.attention_with_lse(q, k, v, mask=mask), gradients(lambda *t: tw.attention(*t, mask=mask)[:, :6], q, k, v))
    k, v = k.clone(), v.clone()
    for x, name in ((k, "k"), (v, "v")):
        if side in (name, "both"):
            x[:, 6:] = poison  # visible to rows 6 onwards only
    o, lse = tw.attention_with_lse(q, k, v, mask=mask)
    assert torch.equal(o[:, :6], clean[0].o[:, :6]) and torch.equal(lse[:, :, :6], clean[0].lse[:, :, :6])
    dirty = gradients(lambda *t: tw.attention(*t, mask=mask)[:, :6], q, k, v)
    assert torch.equal(dirty[0][:, :6], clean[1][0][:, :6])


def test_a_hidden_key_outside_every_row_changes_no_gradient():
    q, k, v = draw(n=11)
    mask = tw.Lengths([9, 8])
    clean = gradients(lambda *t: tw.attention(*t, mask=mask), q, k, v)
    k[0, 9:], v[1, 8:] = NAN, INF
    for a, b in zip(gradients(lambda *t: tw.attention(*t, mask=mask), q, k, v), clean, strict=True):
        assert torch.equal(a, b)


def test_nan_in_a_visible_key_does_reach_the_rows_that_see_it():
    q, k, v = draw(n=11)
    v[0, 4, 0, 1] = NAN
    o = tw.attention(q, k, v, mask=tw.Causal())
    assert o[0, 4:, :2, 1].isnan().all()
    assert o[0, :4].isfinite().all() and o[0, :, 2:].isfinite().all() and o[1].isfinite().all()
    assert o[0, :, :, [0, 2]].isfinite().all()
    k[1, 4, 0, 1] = NAN
    o = tw.attention(q, k, v, mask=tw.Causal())
    assert o[1, 4:, :2].isnan().all() and o[1, :4].isfinite().all()


def test_lse_is_the_natural_log_in_float32_and_float64_for_float64():
    for dtype, wide in ((torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        q, k, v = draw(dtype=dtype)
        o, lse = tw.attention_with_lse(torch.zeros_like(q), k, v)
        assert o.dtype == dtype and lse.dtype == wide
        assert torch.equal(lse, torch.full_like(lse, math.log(11)))


def test_causal_is_bottom_right_by_default_and_top_left_when_asked():
    v = torch.eye(4)[None, :, None]
    q, k = torch.zeros(1, 2, 1, 3), torch.zeros(1, 4, 1, 3)
    seen = lambda mask: (tw.attention(q, k, v, mask=mask)[0, :, 0] > 0).int().tolist()  # noqa: E731
    assert seen(tw.Causal()) == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert seen(tw.Causal(align="top-left")) == [[1, 0, 0, 0], [1, 1, 0, 0]]


def test_a_window_counts_other_keys_on_each_side():
    v = torch.eye(7)[None, :, None]
    q = torch.zeros(1, 7, 1, 3)
    seen = lambda mask: (tw.attention(q, q, v, mask=mask)[0, :, 0] > 0).sum(1).tolist()  # noqa: E731
    assert seen(tw.Window(3, 0)) == [1, 2, 3, 4, 4, 4, 4]
    assert seen(tw.Window(0, 0)) == [1] * 7
    assert seen(tw.Window(None, 0)) == [1, 2, 3, 4, 5, 6, 7]
    assert seen(tw.Window()) == [7] * 7
    with pytest.raises(ValueError, match="left"):
        tw.Window(-1, 0)


def test_float32_means_float32_and_float64_means_float64():
    for dtype in (torch.float32, torch.float64):
        q, k, v = draw(b=1, n=67, s=131, d=64, e=64, dtype=dtype)
        assert_right(Inputs(q, k, v), Options())
        assert tw.attention(q, k, v).dtype == dtype


def test_the_order_is_scale_bias_softcap_mask_sink_dropout():
    q, k, v = draw(h=2, g=2, dtype=torch.float64)
    bias, slopes, sink = (torch.rand(*shape, dtype=torch.float64) for shape in ((2, 7, 11), (2,), (2,)))
    s = 0.3 * torch.einsum("bnhd,bshd->bhns", q, k) + bias
    i, j = torch.arange(4, 11)[:, None], torch.arange(11)
    s = 2 * torch.tanh((s - slopes[:, None, None] * (i - j).abs()) / 2)
    s = torch.cat([s.masked_fill(j > i, -INF), sink[None, :, None, None].expand(2, 2, 7, 1)], -1)
    kept = torch.from_numpy(Dropout(0.3, 5).keep(*np.ix_(range(2), range(2), range(4, 11), range(11))))
    p = s.softmax(-1)[..., :-1] * kept / 0.7
    right = torch.einsum("bhns,bshe->bnhe", p, v)
    options = {"scale": 0.3, "bias": bias, "alibi": slopes, "softcap": 2.0, "sink": sink, "dropout": 0.3, "seed": 5}
    o, lse = tw.attention_with_lse(q, k, v, mask=tw.Causal(), **options)
    assert agree(o, right) and agree(lse, s.logsumexp(-1))


def test_query_head_x_reads_key_head_x_over_group():
    q, k, v = draw(h=6, g=3)
    wide = [x.repeat_interleave(2, dim=2) for x in (k, v)]
    assert agree(tw.attention(q, k, v), tw.attention(q, *wide))
    assert not agree(tw.attention(q, k, v), tw.attention(q, k.flip(2), v.flip(2)))


def test_dropout_depends_on_the_seed_and_on_nothing_else():
    q, k, v = draw(b=3, n=29, s=31)
    run = lambda seed, *t: tw.attention(*t, dropout=0.5, seed=seed)  # noqa: E731
    assert torch.equal(run(5, q, k, v), run(5, q, k, v))
    assert not torch.equal(run(5, q, k, v), run(6, q, k, v))
    assert torch.equal(run(5, q[:2], k[:2], v[:2]), run(5, q, k, v)[:2])  # other entries of the batch do not matter
    torch.manual_seed(3)
    first = tw.attention(q, k, v, dropout=0.5)
    second = tw.attention(q, k, v, dropout=0.5)
    torch.manual_seed(3)
    assert torch.equal(first, tw.attention(q, k, v, dropout=0.5)) and not torch.equal(first, second)


def test_dropout_of_packed_sequences_is_that_of_each_sequence_as_a_batch_entry():
    q, k, v = draw(b=2, n=5, s=5)
    batch = tw.attention(q, k, v, dropout=0.4, seed=9, mask=tw.Causal())
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    mine = tw.attention_varlen(*packed, ragged=tw.Ragged.from_lengths([5, 5]), dropout=0.4, seed=9, mask=tw.Causal())
    assert ((mine.view_as(batch) == 0) == (batch == 0)).all()
    assert agree(mine.view_as(batch), batch)


def test_dropout_uses_the_same_pattern_forward_and_backward():
    q, k, _ = draw(h=2, g=2)
    v = torch.eye(11)[None, :, None].repeat(2, 1, 2, 1)
    leaf = v.clone().requires_grad_()
    o = tw.attention(q, k, leaf, dropout=0.5, seed=1)  # o is the dropped probability matrix itself
    (dv,) = torch.autograd.grad(o[0, 2, 1].sum(), leaf)
    assert torch.equal(dv[0, :, 1, 0] != 0, o[0, 2, 1] != 0)
    assert 0 < (o == 0).float().mean() < 1


def test_backward_is_bitwise_deterministic():
    q, k, v = draw(b=1, n=301, s=301, d=16, e=16)
    call = lambda *t: tw.attention(*t, mask=tw.Causal(), deterministic=True)  # noqa: E731
    first = gradients(call, q, k, v)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(call, q, k, v), strict=True))


def test_any_strides_including_zero_and_a_last_axis_that_is_not_contiguous():
    q = torch.randn(2, 4, 5, 7).permute(0, 3, 1, 2)  # "b n h d" with strides of "b h d n"
    k = torch.randn(1, 11, 1, 5).expand(2, 11, 2, 5)
    v = torch.randn(2, 2, 3, 22)[..., ::2].permute(0, 3, 1, 2)
    assert q.stride(-1) != 1 and k.stride(0) == 0 and v.stride(-1) != 1
    assert_right(Inputs(q, k, v), Options(tw.Causal()))
    do = torch.ones(1).expand(2, 7, 4, 3)  # what .sum().backward() sends
    strided = [x.requires_grad_() for x in (q, k.detach(), v)]
    whole = [x.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for x in strided]
    found = torch.autograd.grad(tw.attention(*strided), strided, do)
    assert all(agree(a, b) for a, b in zip(found, torch.autograd.grad(tw.attention(*whole), whole, do.clone()), strict=True))


@pytest.mark.parametrize("axis", ["b", "n", "s"])
def test_any_length_including_zero(axis):
    empty: dict[str, Any] = {axis: 0}
    q, k, v = (t.requires_grad_() for t in draw(**empty))
    o, lse = tw.attention_with_lse(q, k, v, mask=tw.Causal(), dropout=0.1, seed=0)
    assert o.shape == (q.shape[0], q.shape[1], 4, 3)
    assert torch.equal(o, torch.zeros_like(o)) and (lse == -INF).all()
    grads = torch.autograd.grad(o.sum() + lse.nan_to_num().sum(), (q, k, v))
    assert all(torch.equal(g, torch.zeros_like(g)) for g in grads)


def test_packed_attention_has_a_log_sum_exp_too():
    q, k, v = torch.randn(6, 2, 3), torch.randn(6, 2, 3), torch.randn(6, 2, 3)
    o, lse = tw.attention_with_lse(q, k, v, ragged=tw.Ragged.from_lengths([2, 3]))
    assert o.shape == (6, 2, 3) and lse.shape == (2, 6) and (lse[:, 5] == -INF).all()
    first = tw.attention_with_lse(q[None, :2], k[None, :2], v[None, :2])
    assert agree(lse[:, :2], first.lse[0])
    halves = [tw.attention_with_lse(q, k[:c], v[:c], ragged=tw.Ragged.from_offsets([0, 2, 5], [0, 2, c])) for c in (5,)]
    assert agree(tw.merge(*halves).o, o)


def test_a_bias_of_minus_infinity_hides_as_a_mask_does():
    q, k, v = draw()
    table = torch.rand(7, 11) < 0.6
    bias = torch.zeros(7, 11).masked_fill(~table, -INF)
    v[:, 3], bias[:, 3], table[:, 3] = NAN, -INF, False
    assert agree(tw.attention(q, k, v, bias=bias), tw.attention(q, k, v, mask=tw.Where(table)))


def test_a_sequence_of_length_zero_in_a_packed_batch():
    q, k, v = torch.randn(5, 2, 3), torch.randn(6, 2, 3), torch.randn(6, 2, 3)
    o = tw.attention_varlen(q, k, v, ragged=tw.Ragged.from_lengths([0, 3, 2, 0], [4, 2, 0, 0]))
    assert torch.equal(o[3:], torch.zeros(2, 2, 3))
    assert agree(o[:3], tw.attention(q[None, :3], k[None, 4:], v[None, 4:])[0])


def test_merge_of_disjoint_keys_is_attention_over_all_of_them():
    q, k, v = draw(s=13, dtype=torch.float64)
    bounds = [0, 1, 6, 6, 13]
    parts = [tw.attention_with_lse(q, k[:, a:b], v[:, a:b]) for a, b in pairwise(bounds)]
    whole = tw.attention_with_lse(q, k, v)
    for order in (parts, parts[::-1]):
        merged = tw.merge(*order)
        assert agree(merged.o, whole.o) and agree(merged.lse, whole.lse)
    assert agree(tw.merge(tw.merge(*parts[:2]), tw.merge(*parts[2:])).o, whole.o)


def test_merge_is_differentiable_and_takes_tuples():
    q, k, v = draw(s=13, dtype=torch.float64)

    def split(q, k, v):
        halves = [tw.attention_with_lse(q, k[:, part], v[:, part]) for part in (slice(0, 4), slice(4, 13))]
        merged = tw.merge(*(tuple(h) for h in halves))
        return torch.cat([merged.o.flatten(), merged.lse.flatten()])

    def whole(q, k, v):
        return torch.cat([x.flatten() for x in tw.attention_with_lse(q, k, v)])

    for a, b in zip(gradients(split, q, k, v), gradients(whole, q, k, v), strict=True):
        assert agree(a, b)


def test_merge_of_nothing_is_neutral_and_its_o_is_not_read():
    q, k, v = draw()
    some = tw.attention_with_lse(q, k, v)
    nothing = (torch.full_like(some.o, NAN), torch.full_like(some.lse, -INF))
    for merged in (tw.merge(some, nothing), tw.merge(nothing, some)):
        assert torch.equal(merged.o, some.o) and torch.equal(merged.lse, some.lse)
    zero = tw.merge((torch.zeros_like(some.o), nothing[1]), (torch.zeros_like(some.o), nothing[1]))
    assert torch.equal(zero.o, torch.zeros_like(some.o)) and (zero.lse == -INF).all()
    lse = nothing[1].clone().requires_grad_()
    (d,) = torch.autograd.grad(tw.merge((torch.zeros_like(some.o), lse), some).o.sum(), lse)
    assert torch.equal(d, torch.zeros_like(d))


def test_positions_replace_offsets_and_shards():
    """A query shard and a key shard that know their positions give what the whole gives."""
    q, k, v = draw(b=1, n=24, s=24, dtype=torch.float64)
    mask = tw.Causal() & tw.Window(9)
    whole = tw.attention_with_lse(q, k, v, mask=mask, dropout=0.2, seed=4)
    mine = slice(1, None, 4)
    parts = [
        tw.attention_with_lse(
            q[:, mine], k[:, r::4], v[:, r::4], mask=mask, dropout=0.2, seed=4,
            positions=(tw.Positions(6, 1, 4), tw.Positions(6, r, 4)),
        )
        for r in range(4)
    ]  # fmt: skip
    merged = tw.merge(*parts)
    assert agree(merged.o, whole.o[:, mine])
    assert agree(merged.lse, whole.lse[:, :, mine])


def test_autocast_is_respected_and_does_not_reach_the_accumulators():
    q, k, v = draw(d=32, e=32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, lse = tw.attention_with_lse(q, k, v)
    low = [x.bfloat16() for x in (q, k, v)]
    right = tw.attention_with_lse(*low)
    assert o.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert torch.equal(o, right.o) and torch.equal(lse, right.lse)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tw.attention(*(x.double() for x in (q, k, v))).dtype == torch.float64


def test_a_tensor_scale_is_learnable():
    q, k, v = draw(dtype=torch.float64)
    for scale in (torch.tensor(0.7, dtype=torch.float64), torch.rand(4, dtype=torch.float64)):
        assert torch.autograd.gradcheck(lambda t: tw.attention(q, k, v, scale=t), scale.requires_grad_())
    assert agree(tw.attention(q, k, v, scale=torch.tensor(0.7, dtype=torch.float64)), tw.attention(q, k, v, scale=0.7))


def test_a_plan_prints_what_would_run_and_refuses_by_name():
    q, k, v = draw()
    plan = tw.plan(q, k, v, mask=tw.Causal(), backend="torch")
    assert plan.backend == "torch" and "INTERVAL" in str(plan) and plan.forward_cost.flops > 0
    with pytest.raises(ValueError, match="unknown"):
        tw.plan(q, k, v, backend="quantum")
    with pytest.raises(tw.Unsupported, match="meta device"):
        tw.plan(*(x.to("meta") for x in (q, k, v)), backend="torch")


def test_masks_are_asked_in_numpy_and_torch_alike():
    q, k, v = draw(n=11)
    ids = torch.arange(11) // 3
    by_function = tw.attention(q, k, v, mask=tw.Where(lambda b, h, i, j: ids[i] == ids[j]))
    assert torch.equal(by_function, tw.attention(q, k, v, mask=tw.Documents(ids)))
    assert torch.equal(by_function, tw.attention(q, k, v, mask=tw.Documents(np.arange(11) // 3)))
    assert torch.equal(by_function, tw.attention(q, k, v, mask=tw.Where(ids[:, None] == ids)))
