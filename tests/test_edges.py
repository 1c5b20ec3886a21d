"""Inputs and uses at the edge of what is allowed: right, refused clearly, or harmless."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

import tilewise as tw
from tilewise import api
from tilewise.problem import Inputs, Options
from tilewise.testing import agree

NAN = float("nan")


def draw(n=4, s=6, dtype=torch.float64, b=1, h=1):
    return torch.randn(b, n, h, 3, dtype=dtype), torch.randn(b, s, h, 3, dtype=dtype), torch.randn(b, s, h, 3, dtype=dtype)


def test_forward_mode_inside_a_compiled_function_is_refused_not_dropped():
    torch._dynamo.reset()
    q, k, v = draw()
    call = lambda x: torch.func.jvp(lambda q: tw.attention(q, k, v).sum(), (x,), (x,))[1]  # noqa: E731
    with pytest.raises(Exception, match="forward-mode differentiation inside"):
        torch.compile(call, fullgraph=True, backend="eager")(q)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        with pytest.raises(Exception, match="forward-mode differentiation inside"):
            torch.compile(lambda q: tw.attention(q, k, v), fullgraph=True, backend="eager")(dual)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64", "int8", "int32"])
def test_offsets_and_lengths_of_any_integer_type(dtype):
    x, y = torch.randn(8, 2, 4), torch.randn(5, 2, 4)

    def run(kind):
        ragged = tw.Ragged.from_offsets(np.array([0, 3, 8], kind), np.array([0, 2, 5], kind))
        return tw.attention_varlen(x, y, y, ragged=ragged, mask=tw.Causal() & tw.Lengths(np.array([2, 1], kind)))

    assert torch.equal(run(dtype), run("int64"))
    with pytest.raises(ValueError, match="decrease from 5 to 3"):
        tw.attention_varlen(x, x, x, ragged=tw.Ragged.from_offsets(np.array([0, 5, 3, 8], dtype)))


def test_derivatives_of_higher_order_are_not_autocast():
    q = torch.randn(1, 64, 2, 64) * 3
    with torch.autocast("cpu", dtype=torch.bfloat16):
        transformed = torch.func.vmap(lambda q: tw.attention_with_lse(q, q, q).lse)(q[None])[0]
        assert agree(transformed, tw.attention_with_lse(q, q, q).lse)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_hidden_nan_reaches_no_derivative_of_any_order(softcap):
    q, k, _ = draw()
    positions = (tw.Positions(4), tw.Positions(6))

    def loss(q, k):
        return (tw.attention(q, k, k, mask=tw.Causal(), positions=positions, softcap=softcap) ** 2).sum()

    dirty = k.clone()
    dirty[:, 4:] = NAN
    for transform in (torch.func.grad(loss), torch.func.grad(loss, 1), torch.func.hessian(loss)):
        clean = transform(q, k)
        found = transform(q, dirty)
        assert agree(found, clean)
    leaves = [x.clone().requires_grad_() for x in (q, dirty)]
    first = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
    second = torch.autograd.grad(torch.stack([(g**2).sum() for g in first]).sum(), leaves)
    assert all(g.isfinite().all() for g in (*first, *second))


def test_the_gradient_of_merge_does_not_read_what_a_neutral_partial_holds():
    o, lse = torch.randn(1, 2, 1, 3), torch.randn(1, 1, 2, requires_grad=True)
    merged = tw.merge((o, lse), (torch.full_like(o, NAN), torch.full((1, 1, 2), -math.inf)))
    (d,) = torch.autograd.grad(merged.o.sum() + merged.lse.sum(), lse)
    assert agree(d, torch.ones_like(d))


def test_arrays_without_values_are_refused_and_host_arrays_stay_on_the_host():
    q, k, v = draw(4, 4, torch.float32)
    with pytest.raises(TypeError, match="meta device"):
        tw.attention(q, k, v, mask=tw.Lengths(torch.tensor([3], device="meta")))
    with torch.device("meta"):
        o = tw.attention(q, k, v, mask=tw.Lengths([3]), dropout=0.2, seed=1)
    assert torch.equal(o, tw.attention(q, k, v, mask=tw.Lengths([3]), dropout=0.2, seed=1))


def test_changing_an_array_after_the_call_changes_no_gradient():
    q, k, v = (x.requires_grad_() for x in draw(4, 4))
    lengths = np.array([3])
    o = tw.attention(q, k, v, mask=tw.Lengths(lengths))
    lengths[:] = 1
    right = torch.autograd.grad(tw.attention(q, k, v, mask=tw.Lengths([3])).sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(o.sum(), (q, k, v)), right, strict=True))


def test_a_table_belongs_to_rows_and_columns_wherever_they_sit():
    q, k, v = draw(4, 4)
    table = torch.rand(4, 4) < 0.7
    here = tw.attention(q, k, v, mask=tw.Where(table))
    there = tw.attention(q, k, v, mask=tw.Where(table), positions=(tw.Positions(4, 9), tw.Positions(4, 5)))
    assert torch.equal(here, there)
    shard = tw.attention(q[:, 2:], k, v, mask=tw.Where(table, start=0), positions=(tw.Positions(2, 2), tw.Positions(4)))
    assert agree(shard, here[:, 2:])
    with pytest.raises(ValueError, match="needs start="):
        tw.attention(q, k, v, mask=tw.Where(table), positions=(tw.Positions(4), tw.Positions(4, 0, 2)))


def test_inputs_are_left_as_they_are():
    q, k, v = draw()
    x = Inputs(q, k, v)
    first = api.compute(x, Options(), torch.tensor(0.5))
    assert x.q is q and torch.equal(api.compute(x, Options(), torch.tensor(0.5)).o, first.o)


def test_a_backend_is_named_exactly_also_inside_transforms():
    q, k, v = draw()
    for name in ("torch anything", "torch bias", "nope"):
        with pytest.raises(ValueError, match="unknown"):
            tw.attention(q, k, v, backend=name)
    with pytest.raises(ValueError, match="unknown"):
        torch.func.grad(lambda q: tw.attention(q, k, v, backend="nope").sum())(q)


def test_a_tile_is_asked_of_all_heads_and_entries():
    table = torch.stack([torch.ones(4, 4), torch.zeros(4, 4)]).bool()
    assert tw.Where(table).tile(tw.Positions(4), tw.Positions(4), heads=2).name == "PARTIAL"
    with pytest.raises(ValueError, match="axis h"):
        tw.Where(table).tile(tw.Positions(4), tw.Positions(4))
    with pytest.raises(ValueError, match="axis b"):
        tw.Lengths([4, 2]).tile(tw.Positions(4), tw.Positions(4))


MASKS: dict[str, Any] = {
    "lengths": lambda: tw.Lengths([2]),
    "torch lengths": lambda: tw.Lengths(torch.tensor([2])),
    "documents": lambda: tw.Documents(torch.tensor([0, 0, 1, 1, 1, 1])),
    "prefix": lambda: tw.Prefix([3]),
    "table": lambda: tw.Where(torch.ones(4, 6, dtype=torch.bool).tril()),
    "function": lambda: tw.Where(lambda b, h, i, j: torch.abs(i - j) < 3),
}


@pytest.mark.parametrize("name", MASKS)
def test_torch_func_takes_masks_that_hold_arrays(name):
    q, k, v = draw()
    mask = MASKS[name]()
    found = torch.func.grad(lambda q: tw.attention(q, k, v, mask=mask).pow(2).sum())(q)
    leaf = q.clone().requires_grad_()
    assert agree(found, torch.autograd.grad(tw.attention(leaf, k, v, mask=mask).pow(2).sum(), leaf)[0])
    made_inside = torch.func.grad(lambda q: tw.attention(q, k, v, mask=MASKS[name]()).pow(2).sum())(q)
    assert torch.equal(made_inside, found)


def test_vmap_over_a_mask_is_a_clear_refusal():
    q, k, v = draw()
    with pytest.raises(ValueError, match="vmap over an array of a mask"):
        torch.func.vmap(lambda lengths: tw.attention(q, k, v, mask=tw.Lengths(lengths)))(torch.tensor([[2], [3]]))


@pytest.mark.parametrize("n, s, lengths", [(0, 6, None), (4, 0, None), (4, 6, [0])], ids=["n = 0", "s = 0", "all hidden"])
def test_double_backward_of_nothing_is_zero(n, s, lengths):
    q, k, v = (x.requires_grad_() for x in draw(n, s))
    o = tw.attention(q, k, v, mask=None if lengths is None else tw.Lengths(lengths))
    first = torch.autograd.grad((o**2).sum(), (q, k, v), create_graph=True)
    second = torch.autograd.grad(torch.stack([g.sum() for g in first]).sum(), (q, k, v))
    assert all(torch.equal(g, torch.zeros_like(g)) for g in second)


def test_values_compare_and_travel():
    assert tw.Lengths([1, 2]) == tw.Lengths(torch.tensor([1, 2])) != tw.Lengths([1, 3])
    assert tw.Causal() & tw.Documents([0, 1]) == tw.Causal() & tw.Documents([0, 1])
    assert tw.Positions(3, 1) == tw.Positions(3, 1) != tw.Positions(3, 2)
    assert tw.Ragged.from_lengths([1, 2]) == tw.Ragged.from_lengths([1, 2])
    assert hash(tw.Lengths([1, 2])) == hash(tw.Lengths([1, 2])) and tw.Causal() != tw.Full()
    for value in (tw.Causal() & tw.Lengths([3]), tw.Unsupported("a", ["b"]), tw.Positions(3), tw.Ragged.from_lengths([2])):
        for copied in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value)):
            assert str(copied) == str(value)


NONSENSE: dict[str, Any] = {
    "infinite scale": (ValueError, "scale must be a finite", {"scale": math.inf}),
    "no number as scale": (ValueError, "scale must be a finite", {"scale": NAN}),
    "infinite softcap": (ValueError, "softcap must be positive and finite", {"softcap": math.inf}),
    "tensor softcap": (TypeError, "softcap must be a number", {"softcap": torch.tensor(2.0)}),
    "text scale": (TypeError, "scale must be a number", {"scale": "x"}),
    "no dropout": (TypeError, "dropout must be a number", {"dropout": None}),
    "large seed": (ValueError, "seed must fit 64 bits", {"dropout": 0.1, "seed": 2**63}),
    "broken seed": (TypeError, "seed must be an integer", {"dropout": 0.1, "seed": 1.5}),
    "two seeds": (TypeError, "seed must be one integer", {"dropout": 0.1, "seed": torch.tensor([1, 2])}),
    "positions": (TypeError, "pair of Positions", {"positions": (5, 7)}),
    "one side": (TypeError, "pair of Positions", {"positions": tw.Positions(4)}),
    "float lengths": (TypeError, "Lengths: kv must hold integers", {"mask": tw.Lengths(np.array([1.5]))}),
    "negative lengths": (ValueError, "cannot be negative, got -1", {"mask": tw.Lengths([-1])}),
    "float documents": (TypeError, "must hold integers", {"mask": tw.Documents(np.zeros(6))}),
    "a test that returns nothing": (TypeError, "must return booleans", {"mask": tw.Where(lambda b, h, i, j: None)}),
    "a test that returns text": (TypeError, "must return booleans", {"mask": tw.Where(lambda b, h, i, j: "yes")}),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_refused(name):
    kind, message, options = NONSENSE[name]
    with pytest.raises(kind, match=message):
        tw.attention(*draw(), **options)


@pytest.mark.parametrize(
    "make",
    [lambda: tw.Window(2.5), lambda: tw.Chunked(2.5), lambda: tw.Prefix(2.5), lambda: tw.Positions(3, start=1.5),  # type: ignore
     lambda: tw.Lengths(None), lambda: tw.Causal() & None, lambda: tw.Causal() & torch.ones(2)],  # type: ignore
)  # fmt: skip
def test_nonsense_is_refused_when_it_is_made(make):
    with pytest.raises(TypeError, match=r"integer|another mask"):
        make()


def test_numpy_numbers_views_and_lists_are_taken():
    q, k, v = draw(4, 6)
    whole = tw.attention(q, k, v, mask=tw.Prefix(2) & tw.Window(3))
    assert torch.equal(whole, tw.attention(q, k, v, mask=tw.Prefix(np.int64(2)) & tw.Window(np.int64(3))))  # type: ignore
    assert torch.equal(whole, tw.attention(q, k, v, mask=tw.Prefix(torch.tensor(2)) & tw.Window(3)))
    table = np.random.default_rng(0).random((4, 6)) < 0.5
    table.setflags(write=False)
    assert torch.equal(
        tw.attention(q, k, v, mask=tw.Where(table[::-1])), tw.attention(q, k, v, mask=tw.Where(table[::-1].copy()))
    )
    assert tw.Documents.from_position_ids([0, 1, 0]) == tw.Documents([0, 0, 1])


def test_autocast_does_not_make_integers_welcome():
    x = torch.ones(1, 2, 1, 4, dtype=torch.int64)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(TypeError, match="int64"):
        tw.attention(x, x, x)


def test_sparse_and_missing_inputs_are_named():
    q, k, v = draw()
    with pytest.raises(TypeError, match="v must be a dense tensor"):
        tw.attention(q, k, v.to_sparse())
    with pytest.raises(TypeError, match="q must be a torch tensor, got NoneType"):
        tw.attention(None, k, v)  # type: ignore[arg-type]


def test_merge_takes_pairs_of_one_kind():
    partial = tw.attention_with_lse(*draw())
    for wrong in ([partial.o, partial.lse], (partial.o, partial.lse, 3), (partial.o.numpy(), partial.lse.numpy())):
        with pytest.raises(TypeError, match="partial 1 must be"):
            tw.merge(partial, wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"with lse .* the first is"):
        tw.merge(partial, (partial.o.float(), partial.lse))


def test_a_constant_bias_costs_no_gradient():
    q, k, v = (x.requires_grad_() for x in draw())
    seen = []
    from tilewise import backends

    real = backends.backward
    try:
        backends.backward = lambda *a: (seen.append(a[-1]), real(*a))[1]
        tw.attention(q, k, v, bias=torch.zeros(4, 6)).sum().backward()
    finally:
        backends.backward = real
    assert seen == [["q", "k", "v"]]


def test_new_numbers_of_sequences_need_no_new_graph():
    torch._dynamo.reset()
    counter = CompileCounter()
    call = torch.compile(lambda x, r: tw.attention_varlen(x, x, x, ragged=tw.Ragged(r, r)), fullgraph=True, backend=counter)
    for sizes in ([3, 5], [3, 2, 3], [1, 2, 2, 3], [1, 1, 1, 2, 3]):
        x, offsets = torch.randn(8, 2, 4), torch.tensor([0, *np.cumsum(sizes)])
        assert agree(call(x, offsets), tw.attention_varlen(x, x, x, ragged=tw.Ragged.from_lengths(sizes)))
    assert counter.frame_count <= 2
