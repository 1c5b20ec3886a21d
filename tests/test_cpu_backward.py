"""The backward pass of the cpu backend, called directly: right on every mask and score for any size of block, the same bits
for any number of threads, no more memory than it has to take, and nothing read that is hidden or not needed."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("llvmlite")

from tilewise import dropout
from tilewise.backends import cpu
from tilewise.backends import torch as plain_torch
from tilewise.backends.cpu import backward_kernel, machinecode
from tilewise.backends.cpu.backward_call import sizes, workspace_bytes
from tilewise.backends.cpu.config import Config
from tilewise.backends.cpu.random import at_least, choose, philox
from tilewise.backends.cpu.target import AVX2, AVX512, NEON, Target, host, l2_bytes
from tilewise.backends.cpu.vector import ADDRESS, BF16, F16, I32, Module
from tilewise.cases import CASES, Case
from tilewise.dropout import Dropout
from tilewise.mask import Causal, Documents, Lengths, Mask, Prefix, Where, Window
from tilewise.problem import Inputs, Options, Partial, Problem
from tilewise.testing import Answer, agree, judge, tensors
from tilewise.tiles import TileShape

pytestmark = pytest.mark.skipif(host() is None, reason="a CPU with vectors that the kernels know")

TWO_BLOCKS = TileShape(42, 64)
"""Sizes that cut the larger cases into several blocks, on any target."""


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def configure(problem: Problem, shape: TileShape | None = None, target: Target | None = None) -> Config:
    """What the backend would choose, or blocks of this shape, or another instruction set."""
    config = cpu.configure(problem)
    config = config if target is None else replace(config, target=target, known={})
    if shape is not None:
        config.known["backward"] = shape
    return config


def upstream(case: Case, dtype: str) -> Partial:
    do, dlse = case.upstream()
    return Partial(torch.from_numpy(do).to(getattr(torch, dtype)), torch.from_numpy(dlse).float())


def gradients(x: Inputs[Tensor], options: Options, shape: TileShape | None = None, **given) -> Inputs[Tensor]:
    """All gradients, or those of `needs`, with random (do, dlse) or those of `grads`."""
    problem = Problem.describe(x, options)
    saved = plain_torch.forward(problem, x, plain_torch.configure(problem))
    grads = given.get("grads") or Partial(torch.randn_like(saved.o), torch.randn_like(saved.lse))
    needs = given.get("needs") or [name for name, _ in x.present()]
    return cpu.backward(problem, x, saved, grads, configure(problem, shape, given.get("target")), needs)


def wrong(case: Case, dtype: str, shape: TileShape | None = None, target: Target | None = None, factor: float = 1.0) -> list:
    """The quantities over budget; q's gradient is off by `factor`."""
    x, grads = tensors(case.inputs(), dtype, "cpu"), upstream(case, dtype)
    problem = Problem.describe(x, case.options)
    saved = plain_torch.forward(problem, x, plain_torch.configure(problem))
    found = cpu.backward(problem, x, saved, grads, configure(problem, shape, target), [name for name, _ in x.present()])
    assert found.q.dtype == x.q.dtype and found.k.dtype == x.k.dtype and found.v.dtype == x.v.dtype
    found = replace(found, q=found.q * factor)
    return [r for r in judge(case, x, grads, Answer.of(saved, found)) if not r.ok]


OTHERS = ("full, multi-query", "window, several tiles", "large head sizes", "everything", "where table, a row hidden")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_is_within_budget_in_small_blocks(case):
    assert not wrong(case, "float32", TileShape(6, 64))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", OTHERS)
def test_half_types_are_within_budget(name, dtype):
    assert not wrong(named(name), dtype)


@pytest.mark.skipif(host() is None or host().triple[:6] != "x86_64", reason="an x86 CPU")  # type: ignore[union-attr]
@pytest.mark.parametrize("name", OTHERS)
def test_narrower_vectors_are_within_budget(name):
    assert not wrong(named(name), "float32", TWO_BLOCKS, AVX2)


def test_an_answer_that_is_off_by_a_thousandth_is_not():
    assert [r.quantity for r in wrong(named("causal"), "float32", factor=1.001)] == ["dq"]


def test_large_logits_cost_no_more_accuracy_than_they_do_in_torch():
    """The scores have the bits that the forward's had, so that the weights of a row sum up to 1 as nearly as lse allows."""
    errors: dict[str, list[float]] = {"cpu": [], "torch": [], "another forward": []}
    for seed in range(10):
        case = Case(f"large logits {seed}", b=1, n=53, s=53, h=2, g=2, options=Options(Causal()), size=2.5)
        x, grads = tensors(case.inputs(), "float32", "cpu"), upstream(case, "float32")
        problem = Problem.describe(x, case.options)
        config, other = configure(problem), plain_torch.configure(problem)
        mine, theirs = cpu.forward(problem, x, config), plain_torch.forward(problem, x, other)
        found = {
            "cpu": cpu.backward(problem, x, mine, grads, config, ("q", "k", "v")),
            "torch": plain_torch.backward(problem, x, theirs, grads, other, ("q", "k", "v")),
            "another forward": cpu.backward(problem, x, theirs, grads, config, ("q", "k", "v")),
        }
        for name, gradient in found.items():
            errors[name] += [r.error for r in judge(case, x, grads, Answer.of(mine, gradient)) if r.quantity == "dv"]
    typical = {name: float(np.sqrt(np.mean(np.square(error)))) for name, error in errors.items()}
    assert typical["cpu"] < 1.25 * typical["torch"] and typical["another forward"] > 1.5 * typical["torch"], typical


def named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


# ---- the same bits


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape)


SAME = {
    "one head": (Inputs(rows(1, 331, 1, 19), rows(1, 521, 1, 19), rows(1, 521, 1, 11)), Options(Causal())),
    "grouped, window": (Inputs(rows(1, 521, 6, 19), rows(1, 521, 2, 19), rows(1, 521, 2, 11)), Options(Causal() & Window(97))),
    "bias of all heads": (
        Inputs(rows(2, 131, 2, 7), rows(2, 521, 2, 7), rows(2, 521, 2, 5), rows(131, 521)),
        Options(Documents.from_lengths([211, 310])),
    ),
    "bias of one key": (Inputs(rows(2, 131, 2, 7), rows(2, 521, 1, 7), rows(2, 521, 1, 5), rows(2, 1, 131, 1)), Options()),
    "slopes, sink, dropout": (
        Inputs(rows(2, 131, 2, 7), rows(2, 257, 1, 7), rows(2, 257, 1, 5), None, rows(2, 2).abs(), rows(2)),
        Options(Causal(), softcap=3.0, dropout=Dropout(0.2, seed=5)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_every_run_gives_the_same_bits_whatever_the_number_of_threads(name):
    x, options = SAME[name]
    do, dlse = rows(*x.q.shape[:3], x.v.shape[3]), rows(x.q.shape[0], x.q.shape[2], x.q.shape[1])
    runs = []
    for threads in (1, 2, 8, 8, 2):
        torch.set_num_threads(threads)
        runs.append(gradients(x, options, TWO_BLOCKS, grads=Partial(do, dlse)))
    for other in runs[1:]:
        for gradient, one in runs[0].present():
            assert torch.equal(one, getattr(other, gradient)), gradient


def test_the_order_of_sums_would_show():
    x, options = SAME["one head"]
    grads = Partial(rows(1, 331, 1, 11), rows(1, 1, 331))
    one, other = (gradients(x, options, shape, grads=grads) for shape in (TWO_BLOCKS, TileShape(42, 128)))
    assert not torch.equal(one.q, other.q)


# ---- what is asked for


def test_only_what_is_needed_is_computed_and_it_is_the_same():
    bias, alibi, sink = rows(4, 37, 53), rows(4).abs(), rows(4)
    x = Inputs(rows(1, 37, 4, 19), rows(1, 53, 2, 19), rows(1, 53, 2, 11), bias, alibi, sink)
    grads = Partial(rows(1, 37, 4, 11), rows(1, 4, 37))
    names = [name for name, _ in x.present()]
    whole = gradients(x, Options(Causal()), grads=grads)
    for needs in (*combinations(names, 1), *combinations(names, 2), ("v", "k", "q")):
        found = gradients(x, Options(Causal()), grads=grads, needs=needs)
        for name in names:
            assert torch.equal(getattr(found, name), getattr(whole if name in needs else x, name)), (needs, name)


def test_no_gradient_of_lse_is_a_gradient_of_zero():
    x, do = Inputs(rows(1, 37, 4, 19), rows(1, 53, 2, 19), rows(1, 53, 2, 11)), rows(1, 37, 4, 11)
    none, zero = (gradients(x, Options(), grads=Partial(do, dlse)) for dlse in (None, torch.zeros(1, 4, 37)))
    assert all(torch.equal(a, getattr(zero, name)) for name, a in none.present())


def test_the_gradients_of_a_part_of_a_sum_are_not_rounded():
    x, grads = Inputs(rows(1, 37, 4, 19), rows(1, 53, 2, 19), rows(1, 53, 2, 11)), Partial(rows(1, 37, 4, 11), rows(1, 4, 37))
    x = x.map(torch.Tensor.bfloat16)
    problem = replace(Problem.describe(x), wide=True)
    saved = plain_torch.forward(problem, x, plain_torch.configure(problem))
    found = cpu.backward(problem, x, saved, grads, configure(problem), ("q", "k", "v"))
    right = gradients(x.map(torch.Tensor.float), Options(), grads=grads)
    assert all(agree(one, getattr(right, name)) and one.dtype == torch.float32 for name, one in found.present())
    half, do = saved.o.bfloat16(), grads.o.bfloat16()  # whoever calls may have rounded these
    one, two = (
        cpu.backward(problem, x, Partial(o, saved.lse), Partial(d, grads.lse), configure(problem), ("q", "k", "v"))
        for o, d in ((half, do), (half.float(), do.float()))
    )
    assert all(torch.equal(t, getattr(two, name)) and t.dtype == torch.float32 for name, t in one.present())


def test_strides_do_not_matter():
    x, grads = Inputs(rows(2, 37, 4, 19), rows(2, 53, 2, 19), rows(2, 53, 2, 11)), Partial(rows(2, 37, 4, 11), rows(2, 4, 37))
    right = gradients(x, Options(Causal()), grads=grads)
    for order in ((0, 2, 1, 3), (3, 2, 0, 1), (1, 0, 3, 2)):  # heads outside, columns outside, columns before heads

        def laid(t: Tensor, order: tuple[int, ...] = order) -> Tensor:
            return t.permute(order).contiguous().permute(np.argsort(order).tolist())

        found = gradients(x.map(laid), Options(Causal()), grads=Partial(laid(grads.o), grads.lse.mT.contiguous().mT))
        assert all(torch.equal(a, getattr(found, name)) for name, a in right.present()), order
    one = torch.ones(()).expand(2, 37, 4, 11)
    shared, own = (gradients(x, Options(), grads=Partial(do, None)) for do in (one, one.clone()))
    assert torch.equal(shared.q, own.q) and torch.equal(shared.v, own.v)


# ---- what is hidden

HIDES = {
    "causal": Causal(), "window": Window(5, 3), "prefix": Prefix(29), "documents": Documents.from_lengths([7, 1, 19, 26]),
    "lengths": Lengths([53, 17]), "table": Where(torch.arange(53) % 5 != torch.arange(53)[:, None] % 5),
}  # fmt: skip


def seen_by(x: Inputs[Tensor], mask: Mask) -> Tensor:
    """The visible pairs of the first head, "b n s"."""
    keep = torch.from_numpy(np.array(Problem.describe(x, Options(mask)).keep()))
    return keep.expand(x.q.shape[0], x.q.shape[2], x.q.shape[1], x.k.shape[1])[:, 0]


def spoil(names: tuple[str, ...], x: Inputs[Tensor], grads: Partial, at: int, bad: float) -> tuple[Inputs[Tensor], Partial]:
    """The same tensors, row `at` of some of them spoilt."""
    x, do = x.map(torch.clone), grads.o.clone()
    for name in names:
        (do if name == "do" else getattr(x, name))[:, at] = bad
    return x, Partial(do, grads.lse)


def same(found: Tensor, right: Tensor, clean: Tensor) -> bool:
    """Equal up to the order of sums in the rows "b rows" that are clean."""
    return all(agree(f[rows], r[rows]) for f, r, rows in zip(found, right, clean, strict=True))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", HIDES)
def test_a_hidden_key_is_not_read_and_a_visible_one_reaches_who_sees_it(name, bad):
    x = Inputs(rows(2, 53, 4, 19), rows(2, 53, 2, 19), rows(2, 53, 2, 11))
    mask, grads, j = HIDES[name], Partial(rows(2, 53, 4, 11), rows(2, 4, 53)), 31
    seen, right = seen_by(x, mask), gradients(x, Options(mask), grads=grads)
    reached = seen[:, :, j]
    keys = (seen & reached[..., None]).any(1)  # what those rows see
    spoilt, grads = spoil(("k", "v"), x, grads, j, bad)
    found = gradients(spoilt, Options(mask), grads=grads)
    assert (~reached).any() and same(found.q, right.q, ~reached) and found.q[reached].isnan().all()
    assert same(found.k, right.k, ~keys) and same(found.v, right.v, ~keys)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", HIDES)
def test_a_row_reaches_only_the_keys_that_it_sees(name, bad):
    x = Inputs(rows(2, 53, 4, 19), rows(2, 53, 2, 19), rows(2, 53, 2, 11))
    mask, grads, i = HIDES[name], Partial(rows(2, 53, 4, 11), rows(2, 4, 53)), 11
    seen, right = seen_by(x, mask), gradients(x, Options(mask), grads=grads)
    others, keys = (torch.arange(53) != i).expand(2, 53), seen[:, i]
    for names in (("q",), ("do",), ("q", "do")):
        spoilt, changed = spoil(names, x, grads, i, bad)
        found = gradients(spoilt, Options(mask), grads=changed)
        assert same(found.q, right.q, others) and same(found.k, right.k, ~keys) and same(found.v, right.v, ~keys), names
        assert "do" not in names or not found.v[keys].isfinite().any()


def test_a_row_that_sees_nothing_has_gradients_of_zero_whatever_comes_in():
    x, grads = Inputs(rows(1, 53, 2, 19), rows(1, 37, 2, 19), rows(1, 37, 2, 11)), Partial(rows(1, 53, 2, 11), rows(1, 2, 53))
    right = gradients(x, Options(Causal()), grads=grads)
    grads.o[:, :16], grads.lse[:, :, :16] = torch.nan, torch.nan
    found = gradients(x, Options(Causal()), grads=grads)
    assert not found.q[:, :16].any() and right.q[:, 16:].any()
    assert all(torch.equal(one, getattr(found, name)) for name, one in right.present())


# ---- memory

MEASURE = """
import re, torch
import tilewise as tw

def status(field):
    return int(re.search(field + r":\\s+(\\d+) kB", open("/proc/self/status").read()).group(1)) / 1024

def step(n, h):
    q, k, v = (torch.randn(1, n, h, 64, requires_grad=True) for _ in range(3))
    do = torch.randn(1, n, h, 64)
    open("/proc/self/clear_refs", "w").write("5")  # forget the high-water mark so far
    before = status("VmRSS")
    {body}
    return status("VmHWM") - before

step(64, 8)
print(step(8192, 8))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_a_step_of_8192_tokens_and_8_heads_takes_little_beside_o_and_the_gradients():
    body = "tw.attention(q, k, v, mask=tw.Causal() & tw.Window(left=255), backend='cpu').backward(do)"
    command = [sys.executable, "-c", MEASURE.replace("{body}", body)]
    extra = float(subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout)
    print(f"peak extra memory at n = s = 8192, d = 64, 8 heads, float32, forward + backward: {extra:.0f} MiB")
    assert 60 < extra < 90  # o and three gradients are 64 MiB


# ---- pieces


def call(module: Module, name: str, *arrays: np.ndarray) -> None:
    """Compile a module and call a function of it on arrays."""
    address = machinecode.Library(machinecode.compile(module), module.target).address(name)
    ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * len(arrays))(address)(*[x.ctypes.data for x in arrays])


@pytest.mark.parametrize("seed", [5, 2**63 + 2**31 + 7])
def test_philox_is_that_of_dropout(seed):
    target = host()
    assert target is not None
    module, rng = Module(target), np.random.default_rng(0)
    counters = rng.integers(0, 2**32, (4, target.lanes), np.uint32)
    key, threshold = Dropout(0.5, seed).key, int(counters[3, 0])
    found, kept = np.zeros((4, target.lanes), np.uint32), np.zeros(target.lanes, np.int32)
    lane = np.arange(target.lanes, dtype=np.int32) % 4
    with module.function("draw", [ADDRESS] * 4, exported=True) as code:
        source, lanes, out, keeps = code.arguments
        counter = [code.load(source + r * code.vector_bytes, I32) for r in range(4)]
        words = philox(code, counter, [code.constant(k, I32) for k in key])
        for r, word in enumerate(words):
            code.store(out + r * code.vector_bytes, word)
        word = choose(code, words, code.load(lanes, I32))
        code.store(keeps, at_least(word, code.vector(threshold, I32)).to(I32))
    call(module, "draw", counters, lane, found, kept)
    right = np.stack(dropout.philox(tuple(counters.astype(np.uint64)), key))
    np.testing.assert_array_equal(found, right)
    np.testing.assert_array_equal(kept, right[lane, np.arange(target.lanes)] >= threshold)


@pytest.mark.parametrize("target", [AVX2, AVX512, NEON], ids=["avx2", "avx512", "neon"])
def test_it_compiles_for_every_instruction_set(target):
    kinds = backward_kernel.Kinds(BF16, F16)
    assert machinecode.compile(backward_kernel.write(target, kinds))[:4] == b"\x7fELF"


@pytest.mark.parametrize("n, s, d, e", [(1, 1, 1, 1), (4096, 4096, 64, 64), (77, 16384, 128, 96), (8192, 5, 512, 256)])
def test_blocks_fit_the_cache_and_the_problem(n, s, d, e):
    target = host()
    assert target is not None
    problem = Problem.describe(Inputs(torch.empty(1, n, 1, d), torch.empty(1, s, 1, d), torch.empty(1, s, 1, e)))
    shape, panel = sizes(problem, target), backward_kernel.PANEL * target.lanes
    assert shape.block_n % target.lanes == 0 and shape.block_n < s + target.lanes and shape.block_m < n + 6
    assert workspace_bytes(problem, target) < l2_bytes() or shape.block_n <= panel
