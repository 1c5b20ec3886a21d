"""Standard attention and FlashAttention-1's order: both run, both are right, and the cost model says what a meter sees of them.
The closed forms of the papers are here, and nowhere in the library."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import questions
from traced import counted, seen

from tilewise import cost
from tilewise._errors import OptionError
from tilewise.cases import CASES
from tilewise.cost import Accounting, Meter, Passes, keys_outside
from tilewise.cost.keys_outside import ATOMIC, LEAN, LITERAL, RELEASED
from tilewise.dropout import Dropout
from tilewise.mask import Causal, Full, Mask
from tilewise.problem import DTYPES, Inputs, Options, Partial, Problem
from tilewise.reference import flash1, plain, stored
from tilewise.testing import Answer, Result, compare, roundings
from tilewise.tiles import TileShape

EPS = float(np.finfo(np.float64).eps)
SHAPES = st.builds(TileShape, st.integers(1, 9), st.integers(1, 9))
NAMED = {"lean": LEAN, "literal": LITERAL, "released": RELEASED, "atomic": ATOMIC}
ACCOUNTINGS = st.one_of(
    st.sampled_from(list(NAMED.values())),
    st.builds(
        Accounting,
        st.sampled_from([None, 4, 8]),
        st.sampled_from([("m", "l"), ("lse",)]),
        st.lists(st.sampled_from(["o", "dq", "dk", "dv"]), unique=True).map(tuple),
        st.sampled_from(["every", "first", "before"]),
        st.booleans(),
    ),
)


def upstream(problem: Problem, seed: int = 5) -> Partial:
    rng = np.random.default_rng(seed)
    o, lse = (problem.b, problem.n, problem.h, problem.e), (problem.b, problem.h, problem.n)
    return Partial(rng.normal(size=o), rng.normal(size=lse))


def problem_of(mask: Mask, n: int, s: int, d: int, e: int, *, b: int = 1, h: int = 1, g: int = 1) -> Problem:
    x = Inputs(*(np.zeros(shape, np.float16) for shape in ((b, n, h, d), (b, s, g, d), (b, s, g, e))))
    return Problem.describe(x, Options(mask))


def held(problem: Problem, x: Inputs[np.ndarray], grads: Partial, answer: Answer) -> list[Result]:
    """An answer against the definition, within what rounding as many terms as there are can do. o goes to memory and back once
    a block of keys, each time divided and multiplied by l: that many roundings more."""
    right = Answer.of(plain.attention(problem, x), plain.gradients(problem, x, grads.o, grads.lse)).arrays
    unit = EPS * (problem.b * problem.h + problem.n + 3 * problem.s + problem.d + problem.e)
    size = roundings(problem, x, grads, (unit, unit))
    return [compare(("", "float64", name), answer.arrays[name], a, a, size[name]) for name, a in right.items()]


# FlashAttention-1


def run1(problem: Problem, x: Inputs[np.ndarray], shape: TileShape, accounting: Accounting) -> tuple[Answer, Meter, Meter]:
    forward, backward, grads = Meter.of(problem), Meter.of(problem), upstream(problem)
    kept = flash1.forward(problem, x, shape, accounting, forward)
    return Answer.of(kept.partial, flash1.backward(problem, x, kept, grads, shape, accounting, backward)), forward, backward


@pytest.mark.parametrize("accounting", [LITERAL, ATOMIC], ids=["literal", "atomic"])
@pytest.mark.parametrize("case", [c for c in CASES if c.n * c.s < 4000], ids=lambda case: case.name)
def test_keys_outside_equals_the_definition_and_the_cost_on_named_cases(case, accounting):
    x, shape = case.inputs(), TileShape(16, 24)
    problem = Problem.describe(x, case.options)
    answer, forward, backward = run1(problem, x, shape, accounting)
    wrong = [r for r in held(problem, x, upstream(problem), answer) if not r.ok]
    assert not wrong, wrong
    assert seen(keys_outside.forward(problem, shape, accounting)) == counted(forward)
    assert seen(keys_outside.backward(problem, shape, accounting)) == counted(backward)


@given(questions(), SHAPES, ACCOUNTINGS, st.sampled_from(sorted(DTYPES)), st.none() | st.just(Dropout(0.4, seed=11)))
@settings(max_examples=120, deadline=None)
def test_keys_outside_equals_the_definition_and_the_cost(question, shape, accounting, dtype, dropout):
    x, options = question
    problem = replace(Problem.describe(x, replace(options, dropout=dropout)), dtype=dtype)
    answer, forward, backward = run1(problem, x, shape, accounting)
    wrong = [r for r in held(problem, x, upstream(problem), answer) if not r.ok]
    assert not wrong, wrong
    assert seen(keys_outside.forward(problem, shape, accounting)) == counted(forward)
    assert seen(keys_outside.backward(problem, shape, accounting)) == counted(backward)


def test_a_wrong_answer_and_a_wrong_count_are_found(monkeypatch):
    case = next(c for c in CASES if c.name == "causal")
    x, shape = case.inputs(), TileShape(16, 24)
    problem = Problem.describe(x, case.options)
    answer, *_ = run1(problem, x, shape, LEAN)
    for name, array in answer.arrays.items():
        wrong = Answer({**answer.arrays, name: array * (1 + 2.0**-30)})
        assert [r.quantity for r in held(problem, x, upstream(problem), wrong) if not r.ok] == [name]
    right = Meter.write

    def short(self: Meter, x: np.ndarray, name: str, *at, **more) -> np.ndarray:
        right(self, x[1:], name, *at, **more)
        return x

    monkeypatch.setattr(Meter, "write", short)
    _, forward, backward = run1(problem, x, shape, LEAN)
    assert seen(keys_outside.forward(problem, shape)) != counted(forward)
    assert seen(keys_outside.backward(problem, shape)) != counted(backward)


def elements(price: cost.Cost, itemsize: int = 2) -> float:
    """Elements moved, statistics counted as one each."""
    wide = ("m", "l", "lse", "delta")
    return sum((x.read + x.write) / (4 if name in wide else itemsize) for name, x in price.tensors.items())


@given(*[st.integers(1, 89)] * 4, *[st.integers(1, 39)] * 2)
@settings(max_examples=150, deadline=None)
def test_nothing_hidden_the_walks_are_the_papers_formulas(n, s, d, e, block_m, block_n):
    problem, shape = problem_of(Full(), n, s, d, e), TileShape(block_m, block_n)
    t_r, t_c = ceil(n / block_m), ceil(s / block_n)
    assert elements(cost.forward(problem, shape)) == n * (d + e) + n + t_r * s * (d + e)
    both = 2 * n * e + n + 2 * s * (d + e) + (t_c + 1) * n * (d + e + 2) + t_r * s * (d + e) + n * d
    assert elements(cost.backward(problem, shape)) == both
    lean = s * (d + e) + t_c * n * d + (n * e + n) * (2 * t_c - 1)
    assert elements(keys_outside.forward(problem, shape, LEAN)) == lean
    two = s * (d + e) + t_c * n * d + (n * e + 2 * n) * (2 * t_c + 1)
    assert elements(keys_outside.forward(problem, shape, LITERAL)) == two
    lean = 2 * s * (d + e) + t_c * n * (d + e) + n * e + n * d * (2 * t_c - 1) + 2 * n * t_c
    assert elements(keys_outside.backward(problem, shape, LEAN)) == lean
    every = 3 * s * (d + e) + n * d + t_c * (3 * n * d + 2 * n * e + 2 * n)
    assert elements(keys_outside.backward(problem, shape, LITERAL)) == every
    atomic = keys_outside.backward(problem, shape, replace(ATOMIC, accumulator_bytes=2))
    assert elements(atomic) == 2 * n * e + n + 2 * s * (d + e) + t_c * n * (3 * d + e + 2) + 3 * n * d
    assert keys_outside.backward(problem, shape).flops == 2 * n * s * (3 * d + 2 * e)
    assert cost.backward(problem, shape).flops == 2 * n * s * (4 * d + 3 * e)


@pytest.mark.parametrize("tiles", [1, 2, 5, 8])
def test_causal_square_blocks_take_half_and_half_a_diagonal(tiles):
    block, d = 16, 8
    n = tiles * block
    shape, causal, full = TileShape(block, block), problem_of(Causal(), n, n, d, d), problem_of(Full(), n, n, d, d)
    assert elements(cost.forward(causal, shape)) == (tiles + 3) * n * d + n
    assert 2 * tiles * cost.forward(causal, shape).flops == (tiles + 1) * cost.forward(full, shape).flops
    ours, theirs = (keys_outside.forward(p, shape).tensors["q"].read for p in (causal, full))
    assert 2 * tiles * ours == (tiles + 1) * theirs


def test_one_tile_moves_each_tensor_once():
    problem, n = problem_of(Full(), 64, 64, 16, 16), 64
    for price in (cost.forward(problem, TileShape(n, 7)), keys_outside.forward(problem, TileShape(7, n))):
        assert elements(price) == 4 * n * 16 + n and price.bytes == price.least_bytes


@given(questions(), SHAPES)
@settings(max_examples=40, deadline=None)
def test_least_is_never_more_than_the_walk(question, shape):
    problem = Problem.describe(*question)
    for price in (
        cost.forward(problem, shape),
        cost.backward(problem, shape),
        keys_outside.forward(problem, shape, LITERAL),
        keys_outside.backward(problem, shape, ATOMIC),
        cost.standard(problem, shape=shape),
    ):
        assert all(moved.least <= moved.read + moved.write for moved in price.tensors.values())


@pytest.mark.parametrize(
    "wrong", [{"statistics": ("m",)}, {"delta": "sometimes"}, {"zeroed": ("p",)}, {"accumulator_bytes": 0}], ids=str
)
def test_an_accounting_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(OptionError, match=r"accounting: "):
        Accounting(**wrong)


# standard attention


PASSES = {
    "nothing": Passes(),
    "scale": Passes(scale=True),
    "mask added": Passes(mask="add"),
    "mask filled": Passes(mask="fill"),
    "mask as torch does": Passes(mask="torch"),
    "copies": Passes(copies=True),
    "everything": Passes(scale=True, mask="torch", dropout=True),
}
MASKS = ("full", "causal", "window", "lengths", "no queries", "no keys")
PLAIN = (*MASKS, "bias", "bias by head", "bias by key", "full, multi-query", "scale", "dropout")


def run0(problem: Problem, x: Inputs[np.ndarray], passes: Passes, shape: TileShape | None = None) -> tuple:
    """What standard attention answers, and its two meters."""
    meters = stored.Meters(Meter.of(problem), Meter.of(problem))
    return stored.attention(problem, x, upstream(problem).o, passes, shape, meters), meters


def misses(problem: Problem, x: Inputs[np.ndarray], answer: stored.Answer) -> list[str]:
    """What of an answer is not the definition's."""
    grads = Partial(upstream(problem).o, np.zeros((problem.b, problem.h, problem.n)))
    right = Answer.of(plain.attention(problem, x), plain.gradients(problem, x, *grads)).arrays
    unit = EPS * (problem.b * problem.h + problem.n + problem.s + problem.d + problem.e)
    size = roundings(problem, x, grads, (unit, unit))
    mine = {"o": answer.o, "dq": answer.grads.q, "dk": answer.grads.k, "dv": answer.grads.v}
    results = [compare(("", "float64", name), a, right[name], right[name], size[name]) for name, a in mine.items()]
    return [r.quantity for r in results if not r.ok]


@pytest.mark.parametrize("shape", [None, TileShape(16, 24)], ids=["whole", "tiles"])
@pytest.mark.parametrize("passes", PASSES.values(), ids=PASSES)
@pytest.mark.parametrize("name", PLAIN)
def test_standard_attention_equals_the_definition_and_its_cost(name, passes, shape):
    case = next(c for c in CASES if c.name == name)
    x = case.inputs()
    problem = Problem.describe(x, case.options)
    passes = replace(passes, dropout=passes.dropout or problem.dropout is not None)
    answer, meters = run0(problem, x, passes, shape)
    assert misses(problem, x, answer) == []
    assert seen(cost.standard(problem, False, passes, shape)) == counted(meters.forward)
    assert seen(cost.standard(problem, True, passes, shape)) == counted(meters.backward)


def test_a_wrong_standard_attention_is_missed():
    case = next(c for c in CASES if c.name == "causal")
    x = case.inputs()
    problem = Problem.describe(x, case.options)
    answer, meters = run0(problem, x, Passes())
    assert misses(problem, x, answer._replace(o=answer.o * (1 + 2.0**-30))) == ["o"]
    assert misses(problem, x, answer._replace(grads=replace(answer.grads, k=answer.grads.k[..., ::-1]))) == ["dk"]
    assert seen(cost.standard(problem, passes=Passes(mask="add"))) != counted(meters.forward)


@pytest.mark.parametrize("name", ["softcap", "alibi", "sink", "dropout"])
def test_standard_attention_refuses_what_it_does_not_write_down(name):
    case = next(c for c in CASES if c.name == name)
    x = case.inputs()
    problem = Problem.describe(x, case.options)
    with pytest.raises(OptionError, match=r"standard attention is written down here"):
        stored.attention(problem, x, upstream(problem).o)


@pytest.mark.parametrize(
    ("passes", "forward", "both"),
    [
        (Passes(), 4, 11),
        (Passes(dropout=True), 6.5, 16),
        (Passes(mask="add"), 6, 13),
        (Passes(mask="add", dropout=True), 8.5, 18),
        (Passes(mask="fill", dropout=True), 8.5, 20),
        (Passes(mask="torch", dropout=True), 8.5, 22),
        (Passes(scale=True), 6, 15),
        (Passes(product=True), 4, 14),
        (Passes(mask="torch", dropout=True, product=True), 8.5, 25),
    ],
)
def test_passes_over_the_scores(passes, forward, both):
    problem = problem_of(Full(), 64, 48, 8, 8)
    one, two = (cost.standard(problem, way, passes) for way in (False, True))
    assert cost.score_passes(one, problem) == forward and cost.score_passes(one + two, problem) == both


@given(*[st.integers(1, 60)] * 4)
@settings(max_examples=40, deadline=None)
def test_standard_attention_is_eleven_passes_and_three_of_everything_else(n, s, d, e):
    problem = problem_of(Full(), n, s, d, e)
    both = cost.standard(problem) + cost.standard(problem, True)
    assert elements(both) == 11 * n * s + 3 * (n * d + s * d + s * e + n * e)


@pytest.mark.parametrize("wrong", [{"mask": "maybe"}, {"scale": True, "copies": True}], ids=str)
def test_passes_that_make_no_sense_are_refused(wrong):
    with pytest.raises(OptionError, match=r"passes: "):
        Passes(**wrong)


def test_passes_are_read_from_text():
    assert Passes.parse("") == Passes()
    assert Passes.parse("scale, mask-torch,dropout") == Passes(scale=True, mask="torch", dropout=True)
    for wrong in ("mask", "scale-twice", "relu", "mask-maybe"):
        with pytest.raises(OptionError, match=r"pass"):
            Passes.parse(wrong)
