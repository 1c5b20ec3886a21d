"""What is particular to the cpu backend: what the conformance suite does not ask."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("llvmlite")

from cpu_code import runnable

import tilewise as tw
from tilewise import backends, testing
from tilewise.backends import trial
from tilewise.backends.cpu import choose, config, decode_call, refusals, selfcheck, sight
from tilewise.cases import CASES
from tilewise.problem import Inputs, Options, Problem

CPU = backends.load("cpu")
pytestmark = pytest.mark.skipif(not runnable(), reason="no target of this computer")


def draw(b: int, n: int, s: int, h: int, g: int, d: int, e: int, dtype: torch.dtype = torch.float32) -> Inputs[torch.Tensor]:
    rng = torch.Generator().manual_seed(n + s + d)
    shapes = (b, n, h, d), (b, s, g, d), (b, s, g, e)
    return Inputs(*(torch.randn(shape, generator=rng).to(dtype) for shape in shapes))


SIZES = [
    (1, 1, 1, 1, 1, 1, 1), (2, 16, 17, 2, 1, 16, 16), (1, 97, 301, 3, 3, 40, 37), (1, 149, 131, 2, 2, 72, 80),
    (1, 48, 128, 1, 1, 96, 192), (1, 53, 259, 2, 1, 256, 1), (3, 1, 700, 7, 1, 37, 53), (2, 1, 129, 12, 4, 128, 64),
    (1, 1, 2100, 5, 1, 80, 96),
]  # fmt: skip


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("mask", [None, tw.Causal(), tw.Window(33, 8)], ids=["full", "causal", "window"])
def test_sizes(sizes, mask):
    testing.assert_right(draw(*sizes), Options(mask), "cpu")


def test_many_keys_cost_no_accuracy():
    """Each block of keys is summed by itself; one running sum over all of them would round twice as much as is allowed."""
    testing.assert_right(draw(1, 48, 8192, 1, 1, 64, 64), Options(), "cpu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_converted_on_load(dtype, monkeypatch):
    """The same numbers as float32 give the same result, rounded once, where products are made of vectors."""
    monkeypatch.setattr(choose, "tiled", lambda: None)
    x = draw(1, 101, 203, 4, 2, 40, 24, dtype)
    for one in (x, Inputs(x.q[:, -1:], x.k, x.v)):
        exact = tw.attention(*(t.float() for t in (one.q, one.k, one.v)), mask=tw.Causal(), backend="cpu")
        assert torch.equal(tw.attention(one.q, one.k, one.v, mask=tw.Causal(), backend="cpu"), exact.to(dtype))


def strided(x: torch.Tensor) -> list[torch.Tensor]:
    """The same numbers, laid out otherwise."""
    wide = torch.zeros(*x.shape[:3], x.shape[3] + 5)[..., 2:-3]
    wide.copy_(x)
    far = torch.zeros(*x.shape, 3)[..., 1]
    far.copy_(x)
    heads_first = x.transpose(1, 2).contiguous().transpose(1, 2)
    return [wide, far, heads_first, x.flip(1).contiguous().flip(1)]


def test_any_strides_give_the_same_bits():
    x = draw(2, 61, 131, 4, 2, 20, 28)
    for n in (61, 1):
        q = x.q[:, :n]
        right = tw.attention(q, x.k, x.v, backend="cpu")
        for layout in zip(*(strided(t) for t in (q, x.k, x.v)), strict=True):
            assert torch.equal(tw.attention(*layout, backend="cpu"), right)
        shared = tw.attention(q, x.k[:1, :, :1].expand(2, -1, 2, -1), x.v, backend="cpu")
        assert torch.equal(shared, tw.attention(q, x.k[:1, :, :1].repeat(2, 1, 2, 1), x.v, backend="cpu"))


HIDING = [tw.Causal(), tw.Window(5, 0), tw.Where(lambda b, h, i, j: j <= i)]


@pytest.mark.parametrize("mask", HIDING, ids=["causal", "window", "where"])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_a_hidden_key_holds_is_not_read(mask, poison):
    x = draw(1, 150, 150, 2, 1, 19, 23)
    options = {"mask": mask, "backend": "cpu"}
    right = tw.attention_with_lse(x.q, x.k, x.v, **options)
    x.k[:, 101:], x.v[:, 101:] = poison, poison
    found = tw.attention_with_lse(x.q, x.k, x.v, **options)
    assert torch.equal(found.o[:, :101], right.o[:, :101]) and torch.equal(found.lse[..., :101], right.lse[..., :101])
    x = draw(1, 150, 150, 2, 1, 19, 23)
    x.v[:, 101, :, 3] = math.nan
    found = tw.attention(x.q, x.k, x.v, **options)
    nan = found.isnan()
    assert nan[:, 101, :, 3].all() and nan[..., 3].sum() == nan.sum() and not nan[:, :101].any()


def test_huge_and_infinite_logits():
    x = draw(1, 40, 70, 2, 2, 8, 8)
    x.q[0, 3], x.q[0, 5, 0] = 1e18, math.nan
    x.k[0, 7] = 1e18
    found = tw.attention_with_lse(x.q, x.k, x.v, mask=tw.Causal(), backend="cpu")
    right = tw.attention_with_lse(x.q, x.k, x.v, mask=tw.Causal(), backend="torch")
    assert torch.equal(found.o.isnan(), right.o.isnan()) and found.o[0, 5, 0].isnan().all()
    fine = ~right.o.isnan()
    assert torch.allclose(found.o[fine], right.o[fine], atol=1e-4)


@pytest.mark.parametrize("table", [(1, 1), (2, 1), (1, 4), (2, 4)])
def test_tables_are_read_in_place_whatever_their_layout(table):
    x = draw(2, 61, 300, 4, 2, 16, 16)
    keep = torch.rand(*table, 61, 300, generator=torch.Generator().manual_seed(0)) < 0.3
    keep[..., 192:] = False  # a block of keys that nobody sees
    keep[..., 20, :] = False
    testing.assert_right(x, Options(tw.Where(keep)), "cpu")
    turned = keep.transpose(-1, -2).contiguous().transpose(-1, -2)
    mask = tw.Where(turned) & tw.Window(200, 50)
    found, right = (tw.attention(x.q, x.k, x.v, mask=mask, backend=name) for name in ("cpu", "torch"))
    assert testing.agree(found, right)


@pytest.mark.parametrize("axes", ["s", "n 1", "1 n s", "h 1 s", "b h n 1", "turned", "double"])
def test_every_layout_of_a_bias(axes):
    x = draw(2, 61, 150, 4, 2, 16, 16)
    sizes = {"b": 2, "h": 4, "n": 61, "s": 150, "1": 1}
    rng = torch.Generator().manual_seed(0)
    if axes == "turned":
        bias = torch.randn(150, 61, generator=rng).T
    else:
        bias = torch.randn([sizes[a] for a in ("n s" if axes == "double" else axes).split()], generator=rng)
        bias = bias.double() if axes == "double" else bias
    for softcap in (None, 5.0):
        options = {"mask": tw.Causal(), "bias": bias, "softcap": softcap}
        found, right = (tw.attention(x.q, x.k, x.v, **options, backend=name) for name in ("cpu", "torch"))
        assert testing.agree(found, right)


def test_the_dropout_pattern_is_that_of_every_backend():
    x = draw(2, 45, 90, 4, 2, 16, 16)
    values = torch.ones_like(x.v)
    positions = tw.Positions(45, start=7, step=3), tw.Positions(90, start=-5)
    for more in ({}, {"positions": positions}):
        options: dict[str, Any] = {"dropout": 0.4, "seed": 2**40 + 11, "mask": tw.Window(40, 40), **more}
        found, right = (tw.attention(x.q, x.k, values, **options, backend=name) for name in ("cpu", "torch"))
        assert testing.agree(found, right)
        other: dict[str, Any] = {**options, "seed": 12}
        assert not testing.agree(found, tw.attention(x.q, x.k, values, **other, backend="torch"))


def test_repeated_calls_are_bit_equal_and_hold_nothing():
    x = draw(1, 333, 333, 2, 2, 40, 40)
    first = tw.attention(x.q, x.k, x.v, mask=tw.Causal(), backend="cpu")
    for _ in range(3):
        again = Inputs(*(t.clone() for t in (x.q, x.k, x.v)))
        assert torch.equal(tw.attention(again.q, again.k, again.v, mask=tw.Causal(), backend="cpu"), first)


def test_a_result_does_not_depend_on_the_tasks():
    """However many rows a task has: so neither threads nor caches change a bit."""
    x = draw(1, 500, 500, 1, 1, 24, 24)
    problem = Problem.describe(x, Options(tw.Causal() & tw.Window(77)))
    made = []
    for panels in (1, 2, 32):
        sizes = config.configure(problem)
        found = CPU.forward(problem, x, config.Config(sizes.target, panels, sizes.keys, sizes.rows))
        made.append((found.o, found.lse))
    assert all(torch.equal(a, b) for other in made[1:] for a, b in zip(made[0], other, strict=True))


@pytest.mark.parametrize("case", [case for case in CASES if min(case.b, case.n, case.s)], ids=lambda case: case.name)
def test_small_blocks_of_keys_change_no_more_than_rounding(case):
    """One block that holds all keys, as most cases have it, goes another way than several."""
    x = testing.tensors(case.inputs(), "float32", "cpu")
    problem = Problem.describe(x, case.options)
    sizes = config.configure(problem)
    found, right = (CPU.forward(problem, x, replace(sizes, keys=keys, known={})) for keys in (16, sizes.keys))
    assert testing.agree(found.o, right.o) and testing.agree(found.lse, right.lse)


def test_calls_of_several_threads_at_once_keep_apart():
    """Small ones use the memory that each thread keeps, larger ones their own."""
    given = [draw(1, n, s, 2, 1, 32, 32) for n, s in ((5, 9), (33, 70), (1, 300), (130, 400), (48, 192))]
    right = [tw.attention(x.q, x.k, x.v, mask=tw.Causal(), backend="cpu") for x in given]

    def repeat(at: int) -> bool:
        x = given[at % len(given)]
        return all(torch.equal(tw.attention(x.q, x.k, x.v, mask=tw.Causal(), backend="cpu"), right[at % 5]) for _ in range(50))

    with ThreadPoolExecutor(5) as threads:
        assert all(threads.map(repeat, range(15)))


def test_keys_of_decode_are_split_by_the_problem_alone():
    x = draw(1, 1, 5000, 8, 2, 16, 16)
    problem = Problem.describe(x, Options())
    assert decode_call.suits(problem)
    count, keys = decode_call.split(problem)
    assert count > 8 and (count - 1) * keys < 5000 <= count * keys
    assert not decode_call.suits(Problem.describe(draw(1, 2, 9, 1, 1, 4, 4), Options()))


def test_memory_is_that_of_the_tiles():
    x = draw(1, 4096, 4096, 8, 8, 64, 64)
    plan = tw.plan(x.q, x.k, x.v, mask=tw.Causal())
    assert plan.backend == "cpu" and plan.config.workspace_bytes < 2**23 * torch.get_num_threads()


# ---- refusals


def reasons(x: Inputs[torch.Tensor], options: Options = Options(), named: bool = True) -> str:
    return "; ".join(CPU.why_not(Problem.describe(x, options), named))


def test_what_is_refused_and_why(monkeypatch):
    x = draw(1, 4, 5, 2, 1, 3, 3)
    assert reasons(x) == ""
    assert "float64" in reasons(x.map(lambda t: t.double()))
    assert "meta" in reasons(x.map(lambda t: t.to("meta")))
    far = Options(positions=(tw.Positions(4, start=2**40), tw.Positions(5)))
    assert reasons(x, far) == ""
    slopes = Inputs(x.q, x.k, x.v, alibi=torch.ones(2))
    assert "positions" in reasons(slopes, far)
    monkeypatch.setattr(sight, "LARGEST_TABLE", 30)
    assert "40 pairs" in reasons(x, Options(tw.Where(lambda b, h, i, j: (i + j + h) % 2 == 0)))
    assert reasons(x, Options(tw.Where(torch.ones(2, 4, 5, dtype=torch.bool)))) == ""  # a table that is there already
    monkeypatch.setattr(refusals, "missing", lambda: "llvmlite is not installed")
    assert reasons(x) == "llvmlite is not installed"


def test_kernels_that_compute_something_wrong_are_not_used(monkeypatch, tmp_path):
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    real = selfcheck.forward

    def wrong(*given):
        o, lse = real(*given)
        return tw.Partial(o * 1.001, lse)

    selfcheck.broken.cache_clear()
    monkeypatch.setattr(selfcheck, "forward", wrong)
    x = draw(1, 4, 5, 2, 1, 3, 3)
    try:
        plan = tw.plan(x.q, x.k, x.v)
        assert plan.backend == "torch" and "kernels compute a wrong o" in str(plan)
        with pytest.raises(tw.Unsupported, match="wrong o"):
            tw.attention(x.q, x.k, x.v, backend="cpu")
        monkeypatch.setattr(selfcheck, "forward", lambda *given: 1 / 0)
        selfcheck.broken.cache_clear()
        assert "ZeroDivisionError" in reasons(x)
        monkeypatch.setattr(selfcheck, "best", lambda dtype: None)
        selfcheck.broken.cache_clear()
        assert "this processor has neither" in reasons(x)
        assert not list(tmp_path.rglob("checked-*"))
    finally:
        selfcheck.broken.cache_clear()


@pytest.mark.parametrize("quantity", ["o", "lse", "dq", "dk", "dv"])
def test_the_self_check_sees_a_small_error(monkeypatch, quantity):
    problem = selfcheck.small("float32", 53)
    assert selfcheck.differences(problem) == []
    real = trial.definition
    monkeypatch.setattr(trial, "definition", lambda *a: {k: v * (1 + 1e-4 * (k == quantity)) for k, v in real(*a).items()})
    assert selfcheck.differences(problem) == [quantity]


def test_warmup_names_the_kernels():
    q = torch.empty(8, 4096, 16, 64, device="meta")
    made = tw.warmup(q, q, q, device="cpu", backend="cpu", mask=tw.Causal())
    assert {"forward-float32", "decode-float32", "backward-float32"} == set(made.kernels)
    assert np.isfinite(made.seconds)
