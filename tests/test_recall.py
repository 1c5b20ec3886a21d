"""Calls that were made before take a shorter way: to the same numbers, with the same errors, and only where nobody looks on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import tilewise as tw
from tilewise import api, ops, recall
from tilewise._errors import DtypeError, OptionError, ShapeError


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recall, "_known", {})


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One entry for every call that is described anew."""
    found: list[object] = []
    compute = api.compute

    def counted(*arguments, **options):
        found.append(arguments)
        return compute(*arguments, **options)

    monkeypatch.setattr(api, "compute", counted)
    return found


def tensors(n=7, s=11, dtype=torch.float32, seed=0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, rows, h, 8, generator=generator).to(dtype) for rows, h in ((n, 4), (s, 2), (s, 2)))
    return q, k, v


class Watch(TorchDispatchMode):
    """Keeps the names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


PLAIN = [
    {},
    {"mask": tw.Causal()},
    {"mask": tw.Causal() & tw.Window(3), "scale": 0.3},
    {"mask": tw.Chunked(4), "softcap": 5.0, "deterministic": True},
    {"mask": tw.Prefix(3), "backend": "torch"},
]


@pytest.mark.parametrize("options", PLAIN, ids=str)
def test_the_second_call_is_the_first_again(options, described):
    x, y = tensors(), tensors(seed=1)
    first = [tw.attention_with_lse(*z, **options) for z in (x, y)]
    assert len(described) == 1
    recall._known.clear()
    anew = tw.attention_with_lse(*y, **options)
    assert len(described) == 2
    assert torch.equal(first[1].o, anew.o) and torch.equal(first[1].lse, anew.lse)
    assert not torch.equal(first[0].o, anew.o)


def test_masks_are_known_by_what_they_say(described):
    x = tensors()
    for mask in (tw.Window(1), tw.Window(2), tw.Window(1), tw.Causal(), tw.Causal("top-left"), tw.Causal()):
        again = tw.attention(*x, mask=mask)
        recall_free = tw.attention(*x, mask=mask & tw.Lengths([11, 11]))  # an array: never known
        assert torch.allclose(again, recall_free, atol=1e-6)
    assert len(described) == 4 + 6


def test_shapes_dtypes_and_words_are_part_of_it(described):
    one = tensors()
    calls = [
        (one, {}), (tensors(n=8), {}), (tensors(s=12), {}), (tensors(dtype=torch.float64), {}), (one, {"scale": 0.5}),
        (one, {"softcap": 0.5}), (one, {"backend": "torch"}), (one, {"deterministic": True}),
    ]  # fmt: skip
    for x, options in calls:
        tw.attention(*x, **options)
    assert len(described) == len(calls) == len(recall._known)


def test_gradients_of_a_known_call(described):
    def gradients(seed):
        leaves = [t.requires_grad_() for t in tensors(seed=seed)]
        o, lse = tw.attention_with_lse(*leaves, mask=tw.Causal())
        first = torch.autograd.grad((o.square().sum() + lse.sum()), leaves, create_graph=True)
        return [*first, *torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), leaves)]

    gradients(0)
    known = gradients(1)
    assert len(described) == 1
    recall._known.clear()
    assert all(torch.equal(a, b) for a, b in zip(known, gradients(1), strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {"mask": tw.Lengths([5, 9])},
        {"mask": tw.Where(lambda b, h, i, j: j <= i)},
        {"sink": torch.zeros(4)},
        {"positions": (tw.Positions(7), tw.Positions(11))},
        {"dropout": 0.5, "seed": 1},
        {"scale": torch.tensor(0.3)},
    ],
    ids=lambda options: next(iter(options)) + " " + type(next(iter(options.values()))).__name__,
)
def test_what_may_change_behind_its_words_is_never_known(options, described):
    x = tensors()
    for _ in range(3):
        tw.attention(*x, **options)
    assert len(described) == 3


def test_errors_come_as_they_did():
    q, k, v = tensors()
    for _ in range(2):
        tw.attention(q, k, v)
        with pytest.raises(ShapeError):
            tw.attention(q, k[:, :5], v)
        with pytest.raises(DtypeError):
            tw.attention(q, k.double(), v)
        with pytest.raises(DtypeError):
            tw.attention(q, k, None)  # type: ignore[arg-type]
        with pytest.raises(DtypeError):
            tw.attention(q, k, v, mask="causal")  # type: ignore[arg-type]
        with pytest.raises(OptionError):
            tw.attention(q, k, v, backend="abacus")
        with pytest.raises(OptionError):
            tw.attention(q, k, v, dropout=1.5)


def test_whoever_looks_on_sees_operators(described):
    x = tensors()
    plain = tw.attention(*x, mask=tw.Causal())
    with torch.autocast("cpu", torch.bfloat16):
        assert tw.attention(*x, mask=tw.Causal()).dtype == torch.bfloat16
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x[0], torch.ones_like(x[0]))
        assert forward_ad.unpack_dual(tw.attention(dual, *x[1:], mask=tw.Causal())).tangent is not None
    with Watch() as seen:
        tw.attention(*x, mask=tw.Causal())
    assert "tilewise.attention.default" in seen.names
    batched = torch.func.vmap(lambda q, k, v: tw.attention(q, k, v, mask=tw.Causal()))(*(t[:, None] for t in x))
    assert torch.allclose(batched[:, 0], plain, atol=1e-6)
    assert len(described) >= 5


def test_a_call_that_is_known_is_launched_with_its_own_tensors_only():
    x = tensors()
    assert ops.again(*x, recall.Words(None, None, None, None, False)) is None
    tw.attention(*x)
    made = ops.again(*x, recall.Words(None, None, None, None, False))
    assert made is not None and torch.equal(made.o, tw.attention(*x))
