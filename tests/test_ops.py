"""The torch contract: schemas, fakes, derivatives of every order, compile and export without a graph per length."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck

import tilewise as tw
from tilewise import ops
from tilewise.problem import Options
from tilewise.request import Request
from tilewise.testing import agree


def draw(b=2, n=3, s=5, h=4, g=2, d=2, e=3, dtype=torch.float64):
    shapes = {"q": (b, n, h, d), "k": (b, s, g, d), "v": (b, s, g, e), "bias": (h, 1, s), "alibi": (b, h), "sink": (h,)}
    return [torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in shapes.values()]


def everything(q, k, v, bias, alibi, sink):
    mask = tw.Causal() & tw.Window(3)
    return tuple(tw.attention_with_lse(q, k, v, mask=mask, softcap=2.0, bias=bias, alibi=alibi, sink=sink, dropout=0.3, seed=3))


def test_opcheck():
    q, k, v, bias, alibi, sink = draw()
    options = Options(tw.Causal() & tw.Window(2) & tw.Lengths([4, 5]), 0.5, 3.0)
    wire = Request(options, 0.2, torch.tensor(4), ("bias", "alibi", "sink")).encode()
    arguments = (q, k, v, [bias, alibi, sink], *wire)
    found = opcheck(ops.attention, arguments)
    o, lse = ops.attention(*arguments)
    saved = [t.detach() for t in (o, lse, q, k, v, bias, alibi, sink)]
    found |= opcheck(ops.attention_backward, ([torch.randn_like(o), torch.randn_like(lse)], saved, *wire, [True] * 6))
    assert set(found.values()) == {"SUCCESS"}


def test_opcheck_sees_a_fake_that_lies(monkeypatch):
    """A meta-test: an operator whose fake gives another shape than its kernel must not pass."""

    @torch.library.custom_op("tilewise_test::liar", mutates_args=())
    def liar(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    liar.register_fake(lambda x: x.new_empty(x.shape[1:]))
    with pytest.raises(Exception, match=r"mismatched|[Ss]hape"):
        opcheck(liar, (torch.randn(2, 3),))


def test_gradcheck_of_every_input_and_of_lse():
    assert gradcheck(everything, draw())
    assert gradcheck(everything, draw(), check_forward_ad=True, check_backward_ad=False)


def test_gradgradcheck_of_every_input_and_of_lse():
    assert gradgradcheck(everything, draw(b=1, h=2, g=1))


@pytest.mark.parametrize(
    "mask", [None, tw.Causal("top-left"), tw.Documents([0, 0, 1, 1, 1]), tw.Where(lambda b, h, i, j: (i + j) % 3 > 0)],
    ids=["full", "top-left", "documents", "where"],
)  # fmt: skip
def test_gradcheck_with_masks(mask):
    inputs = draw(n=5)[:3]
    assert gradcheck(lambda *t: tuple(tw.attention_with_lse(*t, mask=mask)), inputs)
    assert gradgradcheck(lambda *t: tw.attention(*t, mask=mask), [x[:1].detach().requires_grad_() for x in inputs])


def test_gradcheck_of_packed_sequences():
    q, k, v = (torch.randn(7, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    ragged = tw.Ragged.from_lengths([3, 0, 2], [1, 2, 4])
    assert gradcheck(lambda *t: tw.attention_varlen(*t, ragged=ragged, mask=tw.Causal()), (q, k, v))


def test_a_third_derivative():
    q, k, v = (x[:1, :2, :1].detach().requires_grad_() for x in draw(h=1, g=1)[:3])

    def second(q):
        (first,) = torch.autograd.grad(tw.attention(q, k, v).pow(3).sum(), q, create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), q, create_graph=True)[0]

    assert gradcheck(second, q)


def test_gradients_only_where_they_are_asked():
    q, k, v, bias, *_ = draw()
    o = tw.attention(q.detach(), k, v.detach(), bias=bias)
    dk, dbias = torch.autograd.grad(o.sum(), (k, bias))
    both = torch.autograd.grad(tw.attention(q, k, v, bias=bias).sum(), (k, bias))
    assert torch.equal(dk, both[0]) and torch.equal(dbias, both[1])
    assert not tw.attention(q.detach(), k.detach(), v.detach()).requires_grad


def definition(q, k, v):
    s = torch.einsum("bnhd,bshd->bhns", q, k.repeat_interleave(2, 2)) * q.shape[-1] ** -0.5
    hidden = torch.arange(s.shape[3]) > torch.arange(s.shape[2])[:, None] + s.shape[3] - s.shape[2]
    return torch.einsum("bhns,bshe->bnhe", s.masked_fill(hidden, -torch.inf).softmax(-1), v.repeat_interleave(2, 2))


def causal(q, k, v):
    return tw.attention(q, k, v, mask=tw.Causal())


@pytest.mark.parametrize("name", ["jvp", "vjp", "jacrev", "jacfwd", "hessian", "vmap", "vmap of grad"])
def test_torch_func_transforms_match_the_definition(name):
    q, k, v = (x.detach() for x in draw()[:3])
    direction = torch.randn_like(q)
    many = torch.randn(3, *q.shape, dtype=q.dtype)
    func = torch.func
    transforms = {
        "jvp": lambda f: func.jvp(lambda x: f(x, k, v), (q,), (direction,))[1],
        "vjp": lambda f: func.vjp(lambda x: f(x, k, v), q)[1](torch.ones(2, 3, 4, 3, dtype=q.dtype))[0],
        "jacrev": lambda f: func.jacrev(lambda x: f(x, k, v))(q),
        "jacfwd": lambda f: func.jacfwd(lambda x: f(x, k, v))(q),
        "hessian": lambda f: func.hessian(lambda x: f(x, k[:1], v[:1]).pow(2).sum())(q[:1]),
        "vmap": lambda f: func.vmap(lambda x: f(x, k, v))(many),
        "vmap of grad": lambda f: func.vmap(func.grad(lambda x: f(x, k, v).pow(2).sum()))(many),
    }
    assert agree(transforms[name](causal), transforms[name](definition))


def test_batched_gradients():
    q, k, v = draw()[:3]
    o = causal(q, k, v)
    directions = torch.randn(3, *o.shape, dtype=o.dtype)
    batched = torch.func.vmap(lambda d: torch.autograd.grad(o, q, d, retain_graph=True)[0])(directions)
    apart = [torch.autograd.grad(o, q, d, retain_graph=True)[0] for d in directions]
    assert torch.equal(batched, torch.stack(apart))
    with pytest.raises(RuntimeError, match="Batching rule not implemented"):
        torch.autograd.grad(o, q, directions, is_grads_batched=True)  # torch's older vmap asks for no rule


def test_checkpointing_repeats_the_dropout_it_drew():
    from torch.utils.checkpoint import checkpoint

    q, k, v = draw()[:3]
    found = []
    for run in (lambda f: f(q, k, v), lambda f: checkpoint(f, q, k, v, use_reentrant=False)):
        torch.manual_seed(1)
        o = run(lambda *t: tw.attention(*t, dropout=0.5))
        assert isinstance(o, torch.Tensor)
        found.append(torch.autograd.grad(o.sum(), (q, k, v)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def far(b, h, i, j):
    return (i - j) % 3 != 1


CAPTURED = tw.Where(far)


def test_compile_with_gradients_of_bias_alibi_and_sink():
    torch._dynamo.reset()
    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager")
    for n, s in LENGTHS:
        inputs = draw(n=n, s=s)
        (o, lse), right = compiled(*inputs), everything(*inputs)
        assert torch.equal(o, right[0]) and torch.equal(lse, right[1])
        found, expected = (torch.autograd.grad(x.square().sum(), inputs) for x in (o, right[0]))
        assert all(agree(a, b) for a, b in zip(found, expected, strict=True))


CALLS = {
    "causal": lambda q, k, v: tw.attention(q, k, v, mask=tw.Causal()),
    "window": lambda q, k, v: tw.attention(q, k, v, mask=tw.Causal() & tw.Window(left=3), softcap=4.0, scale=0.3),
    "documents": lambda q, k, v: tw.attention(q, k, v, mask=tw.Documents(torch.arange(k.shape[1]) // 5)),
    "position ids": lambda q, k, v: tw.attention(
        q, k, v, mask=tw.Causal() & tw.Documents.from_position_ids(torch.arange(k.shape[1]) % 5)
    ),
    "lengths": lambda q, k, v: tw.attention(q, k, v, mask=tw.Lengths(torch.tensor([4, 7]))),
    "prefix of half": lambda q, k, v: tw.attention(q, k, v, mask=tw.Prefix(k.shape[1] // 2)),
    "where function": lambda q, k, v: tw.attention(q, k, v, mask=tw.Where(far) & tw.Causal()),
    "where captured": lambda q, k, v: tw.attention(q, k, v, mask=CAPTURED),
    "where table": lambda q, k, v: tw.attention(
        q, k, v, mask=tw.Where(torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril())
    ),
    "dropout": lambda q, k, v: tw.attention(q, k, v, dropout=0.5, seed=3),
    "positions": lambda q, k, v: tw.attention(
        q, k, v, mask=tw.Causal(), positions=(tw.Positions(q.shape[1], 2), tw.Positions(k.shape[1]))
    ),
    "merge": lambda q, k, v: tw.merge(
        tw.attention_with_lse(q, k[:, :4], v[:, :4]), tw.attention_with_lse(q, k[:, 4:], v[:, 4:])
    ).o,
    "packed": lambda q, k, v: tw.attention_varlen(
        q[0], k[0], v[0], mask=tw.Causal(),
        ragged=tw.Ragged(torch.tensor([0, 3, q.shape[1]]), torch.tensor([0, 4, k.shape[1]])),
    ),
}  # fmt: skip
LENGTHS = ((9, 11), (10, 13), (17, 19), (23, 29))


@pytest.mark.parametrize("name", CALLS)
def test_compile_needs_no_new_graph_for_a_new_length(name):
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(CALLS[name], fullgraph=True, backend="aot_eager")
    for n, s in LENGTHS:
        inputs = draw(n=n, s=s, d=8, e=6, dtype=torch.float32)[:3]
        o, expected = compiled(*inputs), CALLS[name](*inputs)
        assert torch.equal(o, expected)
        found, right = (torch.autograd.grad(x.square().sum(), inputs) for x in (o, expected))
        assert all(agree(a, b) for a, b in zip(found, right, strict=True))
    assert counters["stats"]["unique_graphs"] == 2  # one for the first length, one for every other


class Module(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, q, k, v):
        return CALLS[self.name](q, k, v)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_export_with_dynamic_lengths(name):
    n, s = (torch.export.Dim(axis, min=8, max=64) for axis in "ns")
    first, second = (draw(n=n_, s=s_, d=8, e=6, dtype=torch.float32)[:3] for n_, s_ in ((9, 11), (17, 19)))
    program = torch.export.export(Module(name), tuple(first), dynamic_shapes=({1: n}, {1: s}, {1: s}))
    assert torch.equal(program.module()(*second), CALLS[name](*second))


def test_a_compiled_call_refuses_what_an_eager_one_refuses():
    torch._dynamo.reset()
    q, k, v = (x.detach() for x in draw()[:3])
    with pytest.raises(Exception, match="axis s"):
        torch.compile(causal, fullgraph=True, backend="aot_eager")(q, k, v[:, :4])


def test_a_function_with_packed_sequences_cannot_be_compiled_and_says_so():
    torch._dynamo.reset()
    x = torch.randn(8, 2, 4)
    call = torch.compile(
        lambda x: tw.attention_varlen(x, x, x, ragged=tw.Ragged.from_lengths([3, 5]), mask=tw.Where(far)),
        fullgraph=True, backend="aot_eager",
    )  # fmt: skip
    with pytest.raises(Exception, match="cannot be compiled"):
        call(x)
