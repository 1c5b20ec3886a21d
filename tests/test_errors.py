"""Bad input is refused before anything runs, by a message that names the axis and shows both shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tilewise as tw


def draw(b=2, n=3, s=5, h=4, g=2, d=7, e=11, dtype=torch.float32):
    return [torch.randn(*shape).to(dtype) for shape in ((b, n, h, d), (b, s, g, d), (b, s, g, e))]


Q, K, V = draw()

SHAPES = {
    "three axes": ((Q[0], K, V), {}, "q must have the four axes 'b n h d'.*3"),
    "five axes": ((Q, K[None], V), {}, "k must have the four axes 'b s g d'.*5"),
    "heads": ((Q[:, :, :3], K, V), {}, r"axis h.*3 query heads.*\(2, 3, 3, 7\).*2 key heads.*\(2, 5, 2, 7\)"),
    "batch": ((Q, K[:1], V[:1]), {}, r"axis b.*\(2, 3, 4, 7\) has 2.*\(1, 5, 2, 7\) has 1"),
    "batch of v": ((Q, K, V[:1]), {}, r"axis b.*q.*v"),
    "key length": ((Q, K, V[:, :4]), {}, r"axis s.*k \(2, 5, 2, 7\) has 5.*v \(2, 4, 2, 11\) has 4"),
    "key heads": ((Q, K, V[:, :, :1]), {}, r"axis g.*k.*v"),
    "head size": ((Q[..., :6], K, V), {}, r"axis d.*q \(2, 3, 4, 6\) has 6.*k \(2, 5, 2, 7\) has 7"),
    "no head size": ((Q[..., :0], K[..., :0], V), {}, "axis d"),
    "no key heads": ((Q, K[:, :, :0], V[:, :, :0]), {}, "axis g"),
    "bias keys": ((Q, K, V), {"bias": torch.randn(3, 4)}, r"axis s: bias \(3, 4\) does not broadcast to \(3, 5\)"),
    "bias heads": ((Q, K, V), {"bias": torch.randn(1, 2, 3, 5)}, r"axis h: bias .* does not broadcast"),
    "bias axes": ((Q, K, V), {"bias": torch.randn(1, 1, 1, 3, 5)}, "bias must have axes"),
    "slopes": ((Q, K, V), {"alibi": torch.randn(2)}, r"axis h: alibi \(2,\)"),
    "sink": ((Q, K, V), {"sink": torch.randn(2)}, r"axis h: sink \(2,\)"),
    "scale": ((Q, K, V), {"scale": torch.randn(2)}, r"axis h: scale \(2,\)"),
    "lengths": ((Q, K, V), {"mask": tw.Lengths([1, 2, 3])}, r"axis b: Lengths: kv \(3,\)"),
    "documents": ((Q, K, V), {"mask": tw.Documents(np.zeros((3, 5), int))}, r"axis b: Documents: ids \(3, 5\)"),
    "table batch": ((Q, K, V), {"mask": tw.Where(torch.ones(3, 1, 3, 5, dtype=torch.bool))}, "axis b: Where table"),
    "table rows": ((Q, K, V), {"mask": tw.Where(torch.ones(4, 5, dtype=torch.bool))}, r"axis n: Where table \(4, 5\)"),
    "table keys": ((Q, K, V), {"mask": tw.Where(torch.ones(3, 6, dtype=torch.bool))}, r"axis s: Where table \(3, 6\)"),
    "positions": ((Q, K, V), {"positions": (tw.Positions(4), tw.Positions(5))}, "axis n: positions of q count 4"),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name):
    args, options, message = SHAPES[name]
    with pytest.raises(ValueError, match=message):
        tw.attention(*args, **options)


OPTIONS = {
    "dropout of one": ({"dropout": 1.0}, "dropout must lie in"),
    "negative dropout": ({"dropout": -0.1}, "dropout must lie in"),
    "unknown backend": ({"backend": "cuda-magic"}, "backend 'cuda-magic' is unknown"),
    "softcap": ({"softcap": 0.0}, "softcap must be positive"),
    "document comes back": ({"mask": tw.Documents([0, 0, 1, 0, 0])}, "one run of equal ids"),
    "unsorted positions": ({"positions": (tw.Positions(3), tw.Positions.of([0, 2, 1, 3, 4]))}, "strictly increase"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    options, message = OPTIONS[name]
    with pytest.raises(ValueError, match=message):
        tw.attention(Q, K, V, **options)


TYPES = {
    "integers": ([x.long() for x in (Q, K, V)], {}, "q must be one of float16.*int64"),
    "lists": ([Q.tolist(), K, V], {}, "q must be a torch tensor, got list"),
    "numpy": ([Q.numpy(), K, V], {}, "q must be a torch tensor, got ndarray"),
    "mixed dtypes": ([Q, K.half(), V], {}, r"q \(2, 3, 4, 7\) is float32 but k \(2, 5, 2, 7\) is float16"),
    "mixed devices": ([Q, K.to("meta"), V], {}, "q .* is on cpu but k .* is on meta"),
    "a boolean bias": ([Q, K, V], {"bias": torch.ones(3, 5, dtype=torch.bool)}, "mask=Where"),
    "a tensor as mask": ([Q, K, V], {"mask": torch.ones(3, 5)}, "mask must be a tilewise mask"),
}


@pytest.mark.parametrize("name", TYPES)
def test_types(name):
    args, options, message = TYPES[name]
    with pytest.raises(TypeError, match=message):
        tw.attention(*args, **options)


@pytest.mark.parametrize("left, right", [(-1, None), (None, -3), (-5, -5)])
def test_a_negative_window(left, right):
    with pytest.raises(ValueError, match="cannot be negative"):
        tw.Window(left, right)


def test_a_mask_has_one_alignment():
    with pytest.raises(ValueError, match="aligned bottom-right and top-left at once"):
        _ = tw.Causal() & tw.Window(2) & tw.Causal("top-left")


def test_a_table_of_numbers_is_not_a_mask():
    with pytest.raises(TypeError, match="must be boolean"):
        tw.Where(torch.zeros(3, 5))


RAGGED = {
    "not from 0": (lambda: tw.Ragged.from_offsets([1, 4, 8]), "q_offsets must start at 0"),
    "decreasing": (lambda: tw.Ragged.from_offsets([0, 5, 4, 8]), "q_offsets decrease from 5 to 4 at sequence 1"),
    "past the end": (lambda: tw.Ragged.from_offsets([0, 4, 9]), "axis t: q_offsets end at 9 but the packed tensor holds 8"),
    "keys past the end": (lambda: tw.Ragged.from_offsets([0, 8], [0, 9]), "axis t: kv_offsets end at 9"),
    "different counts": (lambda: tw.Ragged.from_offsets([0, 8], [0, 4, 8]), "axis b: q_offsets"),
    "no offsets": (lambda: tw.Ragged.from_offsets([]), "at least one entry"),
}


@pytest.mark.parametrize("name", RAGGED)
def test_cu_seqlens(name):
    make, message = RAGGED[name]
    x = torch.randn(8, 2, 3)
    with pytest.raises(ValueError, match=message):
        tw.attention_varlen(x, x, x, ragged=make())


def test_varlen_wants_three_axes_and_a_ragged():
    x = torch.randn(8, 2, 3)
    with pytest.raises(ValueError, match="q must have the three axes 't h d'"):
        tw.attention_varlen(x[None], x, x, ragged=tw.Ragged.from_lengths([8]))
    with pytest.raises(TypeError, match="ragged must be a tilewise Ragged"):
        tw.attention_varlen(x, x, x, ragged=[0, 8])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="top-left"):
        tw.attention_varlen(x, x, x, ragged=tw.Ragged.from_lengths([8]), mask=tw.Causal("top-left"))


def test_merge_names_what_does_not_fit():
    a, b = tw.attention_with_lse(Q, K, V), tw.attention_with_lse(Q[:, :2], K, V)
    with pytest.raises(ValueError, match="partial 1"):
        tw.merge(a, b)
    with pytest.raises(ValueError, match="at least one"):
        tw.merge()
    with pytest.raises(ValueError, match="does not fit lse"):
        tw.merge((a.o, a.lse[:, :1]))


def test_nothing_is_half_done_when_a_call_is_refused():
    q, k, v = (x.clone().requires_grad_() for x in (Q, K, V))
    with pytest.raises(ValueError):
        tw.attention(q, k, v[:, :4])
    assert q.grad is None and k.grad is None and v.grad is None
