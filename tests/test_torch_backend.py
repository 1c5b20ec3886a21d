"""The torch backend called directly: no configuration, stride or split changes an answer, and no step holds n·s scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tilewise.backends import torch as backend
from tilewise.backends.torch.config import SCORES, Config
from tilewise.backends.torch.tile import weigh
from tilewise.cases import CASES, Case
from tilewise.dropout import Dropout
from tilewise.mask import Causal, Lengths, Window
from tilewise.problem import Inputs, Options, Partial, Problem
from tilewise.testing import Answer, eager, judge, tensors
from tilewise.tiles import TileShape


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small are multiplied faster by one thread than they are shared between several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def config_of(problem: Problem, rows: int, cols: int, batch: int, key_heads: int) -> Config:
    return Config(TileShape(rows, cols), batch, key_heads, rows * cols * problem.group * batch * key_heads)


def run(problem: Problem, x: Inputs[Tensor], grads: Partial, config: Config) -> tuple[Partial, Inputs[Tensor]]:
    """o, lse and every gradient."""
    saved = backend.forward(problem, x, config)
    return saved, backend.backward(problem, x, saved, grads, config, [name for name, _ in x.present()])


def upstream(case: Case, dtype: str) -> Partial:
    o, lse = case.upstream()
    wide = torch.float64 if dtype == "float64" else torch.float32
    return Partial(torch.from_numpy(o).to(getattr(torch, dtype)), torch.from_numpy(lse).to(wide))


def wrong(case: Case, x: Inputs[Tensor], grads: Partial, cut: tuple[int, int, int, int] | None) -> list:
    """The quantities over budget, of one configuration or of the one the backend would choose."""
    problem = Problem.describe(x, case.options)
    config = backend.configure(problem) if cut is None else config_of(problem, *cut)
    return [r for r in judge(case, x, grads, Answer.of(*run(problem, x, grads, config))) if not r.ok]


CROSS_SECTION = (
    "full", "no queries", "no keys", "no batch", "causal, more queries than keys", "window, causal", "documents by entry",
    "lengths, padded left, one empty", "where function", "where table, a row hidden", "positions, zigzag", "positions by entry",
    "softcap", "alibi by entry", "bias", "bias by query", "sink, rows hidden", "dropout", "huge logits", "everything",
    "packed, everything",
)  # fmt: skip
SELECTED = [case for case in CASES if case.name in CROSS_SECTION]
CUTS = [(7, 5, 1, 1), (16, 64, 2, 2), (11, 53, 3, 3), (64, 3, 5, 1), (5, 7, 1, 2)]


def test_the_cross_section_names_cases():
    assert len(SELECTED) == len(CROSS_SECTION)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", SELECTED, ids=lambda case: case.name)
def test_no_configuration_changes_an_answer(case, dtype):
    x, grads = tensors(case.inputs(), dtype, "cpu"), upstream(case, dtype)
    for cut in (None, *CUTS[:2]) if dtype == "float32" else CUTS[2:]:
        assert not wrong(case, x, grads, cut), cut


@pytest.mark.parametrize("name", ["everything", "packed, everything", "window, some rows hidden"])
def test_single_pairs_are_tiles_too(name):
    case = next(c for c in CASES if c.name == name)
    small = replace(case, n=min(case.n, 17), s=23) if case.options.ragged is None else case
    assert not wrong(small, tensors(small.inputs(), "float32", "cpu"), upstream(small, "float32"), (1, 1, 2, 3))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_accumulates_in_float32(dtype):
    for name in ("causal, several tiles", "everything"):
        case = next(c for c in CASES if c.name == name)
        assert not wrong(case, tensors(case.inputs(), dtype, "cpu"), upstream(case, dtype), (64, 37, 1, 1))


@pytest.mark.parametrize("cut", [(2, 2, 2, 3), (3, 5, 3, 2), (5, 3, 4, 4), (17, 13, 7, 5)])
def test_batches_and_heads_need_not_divide(cut):
    case = Case("indivisible", b=5, n=11, s=13, h=10, g=5, d=3, e=2, bias="h 1 s", alibi="b h", sink=True,
                options=Options(Causal() & Lengths([13, 0, 7, 5, 1]), dropout=Dropout(0.2, seed=5)))  # fmt: skip
    assert not wrong(case, tensors(case.inputs(), "float32", "cpu"), upstream(case, "float32"), cut)


def test_a_batch_of_two_thousand():
    case = Case("batch", b=2003, n=2, s=3, h=2, g=1, d=3, e=2, options=Options(Causal()))
    x, grads = tensors(case.inputs(), "float32", "cpu"), upstream(case, "float32")
    for cut in (None, (2, 3, 401, 1)):
        assert not wrong(case, x, grads, cut)


def test_only_needed_gradients_are_read_from_an_answer():
    case = next(c for c in CASES if c.name == "everything")
    x, grads = tensors(case.inputs(), "float32", "cpu"), upstream(case, "float32")
    problem = Problem.describe(x, case.options)
    config = backend.configure(problem)
    saved = backend.forward(problem, x, config)
    every = backend.backward(problem, x, saved, grads, config, ["q", "k", "v", "bias", "alibi", "sink"])
    for needs in (["q"], ["v", "sink"], ["bias"], ["alibi", "k"]):
        some = backend.backward(problem, x, saved, grads, config, needs)
        for name in needs:
            assert torch.equal(getattr(some, name), getattr(every, name))


# strides

STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "last axis apart": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "heads outside": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every other element": lambda x: torch.stack([x, torch.full_like(x, torch.nan)], -1).flatten(-2)[..., ::2],
    "inside a larger one": lambda x: torch.nn.functional.pad(x, (3, 1, 0, 2, 1, 1), value=torch.nan)[:, 1:-1, :-2, 3:-1],
    "batch 0": lambda x: x[:1].expand_as(x),
    "rows 0": lambda x: x[:, :1].expand_as(x),
    "heads 0": lambda x: x[:, :, :1].expand_as(x),
    "one number": lambda x: x[:1, :1, :1, :1].expand_as(x),
}


@pytest.mark.parametrize("name", STRIDES)
def test_any_strides(name):
    case = Case("strides", n=17, s=23, d=5, e=7, options=Options(Causal()))
    stride = STRIDES[name]
    x, grads = tensors(case.inputs(), "float32", "cpu"), upstream(case, "float32")
    x = Inputs(stride(x.q), stride(x.k), stride(x.v))
    assert not x.q.is_contiguous()
    grads = Partial(stride(grads.o), grads.lse.transpose(0, 2).contiguous().transpose(0, 2))
    for cut in (None, (7, 5, 1, 2)):
        assert not wrong(case, x, grads, cut)


def test_biases_slopes_and_sinks_of_any_strides():
    case = next(c for c in CASES if c.name == "everything")
    x, grads = tensors(case.inputs(), "float32", "cpu"), upstream(case, "float32")
    assert x.bias is not None and x.alibi is not None and x.sink is not None
    h, _, s = x.bias.shape
    x.bias = x.bias[:1].expand(h, 37, s)
    x.alibi, x.sink = x.alibi[:, :1].expand_as(x.alibi), x.sink[:1].expand_as(x.sink)
    for cut in (None, (7, 5, 1, 2)):
        assert not wrong(case, x, grads, cut)


def test_slices_of_one_qkv():
    case = Case("qkv", n=19, s=19, h=3, g=3, d=5, e=5, options=Options(Window(4, 2)))
    x, grads = tensors(case.inputs(), "float32", "cpu"), upstream(case, "float32")
    x = Inputs(*torch.stack([x.q, x.k, x.v], dim=2).unbind(2))
    assert not wrong(case, x, grads, None)


# hidden and visible infinities


def summed(w: Tensor, x: Tensor, seen: Tensor) -> Tensor:
    """w @ x over seen pairs, one product at a time."""
    result = torch.zeros(w.shape[0], x.shape[1], dtype=w.dtype)
    for row, col, inner in np.ndindex(w.shape[0], x.shape[1], w.shape[1]):
        if seen[row, inner]:
            result[row, col] += w[row, inner] * x[inner, col]
    return result


@st.composite
def weighed(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, 0 where hidden, values with NaN and infinities, and which pairs are seen: small integers, so sums are exact."""
    rows, inner, cols = (draw(st.sampled_from([1, 2, 3, 5])) for _ in range(3))

    def array(of: list, *shape: int) -> Tensor:
        size = int(np.prod(shape))
        return torch.tensor(draw(st.lists(st.sampled_from(of), min_size=size, max_size=size))).reshape(shape)

    seen = array([True, False], rows, inner)
    w = torch.where(seen, array([-2.0, -1.0, 0.0, 1.0, 2.0, 3.0], rows, inner), 0)
    return w, array([-3.0, 0.0, 1.0, 2.0, torch.nan, torch.inf, -torch.inf], inner, cols), seen


@given(weighed())
@settings(max_examples=300, deadline=None)
def test_weigh_is_the_sum_over_seen_pairs(given):
    w, x, seen = given
    np.testing.assert_array_equal(weigh(w, x, seen, clean=False), summed(w, x, seen))
    everything = torch.ones_like(seen)
    np.testing.assert_array_equal(weigh(w, x, None, clean=False), summed(w, x, everything))
    if x.isfinite().all():
        np.testing.assert_array_equal(weigh(w, x, seen, clean=True), summed(w, x, seen))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("cut", [None, (3, 5, 1, 1)])
def test_what_is_hidden_changes_nothing(cut, bad):
    # queries sit at the last 11 of 17 keys, and keys 13 and later are hidden from all; queries 0 and 1 see no key at all
    mask = Lengths([13]) & Window(4, 4) & Lengths([8], [11])
    case = Case("poison", n=11, s=17, d=3, e=2, h=4, g=2, alibi="h", options=Options(mask))
    x, grads = tensors(case.inputs(), "float64", "cpu"), upstream(case, "float64")
    problem = Problem.describe(x, case.options)
    keep = torch.from_numpy(np.broadcast_to(problem.keep(), (2, 4, 11, 17)).copy())
    rows, cols = keep.any(-1).any(1).any(0), keep.any(2).any(1).any(0)
    assert not rows.all() and rows.any() and not cols.all() and cols.any()
    config = backend.configure(problem) if cut is None else config_of(problem, *cut)
    clean = Answer.of(*run(problem, x, grads, config)).arrays
    dirty = Inputs(x.q.clone(), x.k.clone(), x.v.clone(), alibi=x.alibi)
    dirty.q[:, ~rows], dirty.k[:, ~cols], dirty.v[:, ~cols] = bad, bad, bad
    poisoned = Partial(grads.o.clone(), grads.lse)
    poisoned.o[:, ~rows] = bad
    found = Answer.of(*run(problem, dirty, poisoned, config)).arrays
    for name, array in clean.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_a_visible_nan_reaches_only_the_rows_that_see_it():
    case = Case("visible", n=11, s=17, options=Options(Window(2, 0)))
    x, grads = tensors(case.inputs(), "float32", "cpu"), upstream(case, "float32")
    x.v[:, 9] = torch.nan  # the first query sits at key 6, so queries 3, 4 and 5 see key 9
    problem = Problem.describe(x, case.options)
    o = run(problem, x, grads, config_of(problem, 3, 5, 1, 1))[0].o
    assert o.isnan().all((0, 2, 3)).nonzero().flatten().tolist() == [3, 4, 5]
    assert o.isnan().any(0).any(1).any(1).nonzero().flatten().tolist() == [3, 4, 5]


# memory and determinism


class Largest(TorchDispatchMode):
    """Records the largest storage, in elements, that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return out


long = partial(Case, b=1, n=1031, s=1031, h=1, g=1, d=5, e=3)
LONGS = [
    long("full"),
    long("causal, all options", bias="h 1 s", alibi="h", sink=True,
         options=Options(Causal(), softcap=4.0, dropout=Dropout(0.1, seed=3))),
    long("window", options=Options(Window(97, 31))),
]  # fmt: skip


@pytest.mark.parametrize("case", LONGS, ids=lambda case: case.name)
def test_no_operation_makes_as_many_elements_as_there_are_scores(case):
    x, grads = tensors(case.inputs(), "float32", "cpu"), upstream(case, "float32")
    problem = Problem.describe(x, case.options)
    config = backend.configure(problem)
    with Largest() as largest:
        run(problem, x, grads, config)
    assert 0 < largest.elements <= config.scores < case.n * case.s


@pytest.mark.parametrize(
    ("b", "n", "s", "h", "g"),
    [
        (1, 5, 7, 1, 1),
        (3, 1031, 521, 6, 3),
        (2, 100003, 100003, 4, 4),
        (1, 1, 10**9, 7, 1),
        (7, 10**9, 1, 3, 1),
        (1, 1031, 1031, 3, 1),
        (1, 521, 1031, 128, 1),
    ],
)
def test_a_step_holds_no_more_scores_than_fit(b, n, s, h, g):
    x = Inputs(*(torch.zeros(1, 1, 1, 1).expand(b, rows, heads, 3) for rows, heads in ((n, h), (s, g), (s, g))))
    config = backend.configure(Problem.describe(x))
    rows, cols = config.shape
    assert config.scores == rows * cols * (h // g) * config.key_heads * config.batch
    assert 0 < config.scores <= SCORES


def test_the_recorder_catches_attention_that_stores_its_scores():
    case = LONGS[0]
    x = tensors(case.inputs(), "float32", "cpu")
    with Largest() as largest:
        eager(Problem.describe(x, case.options), x, upstream(case, "float32"))
    assert largest.elements >= case.n * case.s


@pytest.mark.parametrize("threads", [1, 2])
def test_five_runs_give_the_same_bits(threads):
    torch.set_num_threads(threads)
    case = Case("again", n=211, s=307, h=6, g=2, bias="h 1 s", alibi="h", sink=True,
                options=Options(Causal(), softcap=4.0, dropout=Dropout(0.1, seed=3)))  # fmt: skip
    x, grads = tensors(case.inputs(), "float32", "cpu"), upstream(case, "float32")
    problem = Problem.describe(x, case.options)
    for config in (backend.configure(problem), config_of(problem, 37, 41, 2, 1))[: 3 - threads]:
        first, *others = (Answer.of(*run(problem, x, grads, config)).arrays for _ in range(5))
        for other in others:
            for name, array in first.items():
                np.testing.assert_array_equal(other[name], array, err_msg=name)
