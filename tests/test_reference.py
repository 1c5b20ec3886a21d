"""The spec against itself: tiles equal the definition, gradients equal finite differences, and a watcher sees m and l."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import questions

from tilewise.cases import CASES, Case
from tilewise.dropout import Dropout
from tilewise.mask import Causal, Full, Lengths, Where, Window
from tilewise.problem import Inputs, Options, Partial, Problem
from tilewise.ragged import Ragged
from tilewise.reference import flash, plain
from tilewise.softmax import finish
from tilewise.testing import Answer, Result, compare, roundings
from tilewise.tiles import TileShape

EPS = float(np.finfo(np.float64).eps)
SHAPES = (TileShape(16, 24), TileShape(97, 131), TileShape(1039, 1039))


def folded(problem: Problem, x: Inputs[np.ndarray], grads: Partial, shape: TileShape) -> Answer:
    """What the tiled reference answers."""
    saved = flash.forward(problem, x, shape)
    return Answer.of(saved, flash.backward(problem, x, saved, grads, shape))


def held(problem: Problem, x: Inputs[np.ndarray], grads: Partial, *answers: Answer) -> list[Result]:
    """Answers against the definition. A sum of L terms rounds L times: no sum here is longer than all axes together."""
    right = Answer.of(plain.attention(problem, x), plain.gradients(problem, x, grads.o, grads.lse)).arrays
    unit = EPS * (problem.b * problem.h + problem.n + problem.s + problem.d + problem.e)
    size = roundings(problem, x, grads, (unit, unit))
    labels = {name: ("", "float64", name) for name in right}
    return [compare(labels[name], mine.arrays[name], a, a, size[name]) for mine in answers for name, a in right.items()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tiles_equal_the_definition_on_every_named_case(case):
    x, grads = case.inputs(), case.upstream()
    problem = Problem.describe(x, case.options)
    wrong = [r for r in held(problem, x, grads, *(folded(problem, x, grads, shape) for shape in SHAPES)) if not r.ok]
    assert not wrong, wrong


def upstream_of(problem: Problem, seed: int = 5) -> Partial:
    rng = np.random.default_rng(seed)
    o, lse = (problem.b, problem.n, problem.h, problem.e), (problem.b, problem.h, problem.n)
    return Partial(rng.normal(size=o), rng.normal(size=lse))


@given(questions(), st.builds(TileShape, st.integers(1, 9), st.integers(1, 9)), st.none() | st.just(Dropout(0.4, seed=11)))
@settings(max_examples=80, deadline=None)
def test_any_tile_shape_equals_the_definition(question, shape, dropout):
    x, options = question
    problem = Problem.describe(x, replace(options, dropout=dropout))
    grads = upstream_of(problem)
    wrong = [r for r in held(problem, x, grads, folded(problem, x, grads, shape)) if not r.ok]
    assert not wrong, wrong


def test_a_wrong_answer_is_not_held():
    case = Case("everything small", n=5, s=7, bias="h 1 s", alibi="h", sink=True, options=Options(Causal(), softcap=3.0))
    x, grads = case.inputs(), case.upstream()
    problem = Problem.describe(x, case.options)
    answer = folded(problem, x, grads, TileShape(2, 3))
    for name, array in answer.arrays.items():
        wrong = Answer({**answer.arrays, name: array * (1 + 2.0**-30)})
        assert [r.quantity for r in held(problem, x, grads, wrong) if not r.ok] == [name]


# finite differences

small = partial(Case, b=2, n=3, s=5, h=2, g=1, d=2, e=3)
SCORES = [
    small("plain"),
    small("causal, a row hidden", n=5, s=3, options=Options(Causal())),
    small("scale", options=Options(Window(1, 1), scale=0.7)),
    small("softcap", options=Options(softcap=1.5)),
    small("bias", bias="b h n s"),
    small("bias, softcap", bias="h 1 s", options=Options(Causal(), softcap=1.5)),
    small("bias by key", bias="s"),
    small("bias by query", bias="b 1 n 1", options=Options(Causal())),
    small("alibi", alibi="h", options=Options(softcap=2.0)),
    small("alibi by entry", alibi="b h", options=Options(Causal())),
    small("sink", sink=True),
    small("sink, rows hidden", n=5, s=3, sink=True, options=Options(Causal())),
    small("dropout", options=Options(Causal(), dropout=Dropout(0.4, seed=3))),
    small("packed", b=1, n=6, alibi="h",
         options=Options(Causal(), ragged=Ragged.from_lengths([2, 3], [2, 3]))),
    small("everything", bias="h 1 s", alibi="b h", sink=True,
         options=Options(Causal() & Lengths([3, 5]), 0.7, 2.0, Dropout(0.3, seed=4))),
]  # fmt: skip


def loss(problem: Problem, x: Inputs[np.ndarray], grads: Partial) -> float:
    """Σ do∘o + Σ dlse∘lse, over the rows that saw something."""
    o, lse = plain.attention(problem, x)
    return float((grads.o * o).sum() + np.where(np.isneginf(lse), 0, grads.lse * np.where(np.isneginf(lse), 0, lse)).sum())


def differences(problem: Problem, x: Inputs[np.ndarray], grads: Partial, name: str, step: float) -> np.ndarray:
    """Central differences of the loss by every element of one input."""
    array = getattr(x, name)
    found = np.zeros(array.shape)
    for at in np.ndindex(array.shape):
        ends = []
        for sign in (1, -1):
            moved = array.copy()
            moved[at] += sign * step
            ends.append(loss(problem, replace(x, **{name: moved}), grads))
        found[at] = (ends[0] - ends[1]) / (2 * step)
    return found


def misses(case: Case, gradients: Inputs[np.ndarray]) -> list[str]:
    """The inputs whose gradient is not the slope. Differences of one step and of two differ by three truncation errors;
    a loss of size L rounds by eps·L for each of its terms, which a step magnifies by 1 / step."""
    x, grads = case.inputs(), case.upstream()
    problem = Problem.describe(x, case.options)
    step = EPS ** (1 / 3)
    o, lse = plain.attention(problem, x)
    size = np.abs(grads.o * o).sum() + np.abs(grads.lse * np.where(np.isneginf(lse), 0, lse)).sum()
    found = []
    for name, gradient in gradients.present():
        near, far = (differences(problem, x, grads, name, k * step) for k in (1, 2))
        budget = np.linalg.norm(near - far) + EPS * size / step * np.sqrt(gradient.size)
        if not np.linalg.norm(gradient - near) <= budget:
            found.append(name)
    return found


def slopes(case: Case) -> Inputs[np.ndarray]:
    x, grads = case.inputs(), case.upstream()
    return plain.gradients(Problem.describe(x, case.options), x, grads.o, grads.lse)


@pytest.mark.parametrize("case", SCORES, ids=lambda case: case.name)
def test_gradients_are_finite_differences(case):
    assert misses(case, slopes(case)) == []


def test_a_wrong_gradient_is_missed():
    case = SCORES[-1]
    right = slopes(case)
    for name, gradient in right.present():
        assert misses(case, replace(right, **{name: gradient * (1 + 2.0**-12)})) == [name]


# what is hidden is not read


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("mask", [Causal(), Where(lambda b, h, i, j: (j < 5) & (j <= i)), Lengths([5, 3]) & Causal()])
def test_what_hidden_keys_and_values_hold_changes_nothing(mask, bad):
    # queries sit at the last five of seven keys; keys 5 and 6 are hidden from all of them
    case = Case("poison", n=5, s=7, options=Options(mask & Lengths([5])), alibi="h")
    clean, grads = case.inputs(), case.upstream()
    poisoned = replace(clean, k=clean.k.copy(), v=clean.v.copy())
    poisoned.k[:, 5:], poisoned.v[:, 5:] = bad, bad
    problem = Problem.describe(clean, case.options)
    with np.errstate(invalid="ignore", over="ignore"):
        answers = [
            folded(problem, poisoned, grads, TileShape(2, 3)),
            Answer.of(plain.attention(problem, poisoned), plain.gradients(problem, poisoned, grads.o, grads.lse)),
        ]
    wrong = [r for r in held(problem, clean, grads, *answers) if not r.ok]
    assert not wrong, wrong


@pytest.mark.parametrize("bad", [0.0, np.nan, np.inf])
def test_a_bias_of_minus_infinity_hides_as_a_mask_does(bad):
    case = Case("bias", n=5, s=7, bias="h 1 s", options=Options(Where(lambda b, h, i, j: j != 3) & Causal()))
    x, grads = case.inputs(), case.upstream()
    masked = Problem.describe(x, case.options)
    assert x.bias is not None
    bias, v = x.bias.copy(), x.v.copy()
    bias[..., 3], v[:, 3] = -np.inf, bad
    biased = replace(x, bias=bias, v=v)
    problem = Problem.describe(biased, Options(Causal()))
    with np.errstate(invalid="ignore"):
        answers = [
            folded(problem, biased, grads, TileShape(2, 3)),
            Answer.of(plain.attention(problem, biased), plain.gradients(problem, biased, grads.o, grads.lse)),
        ]
    wrong = [r for r in held(masked, x, grads, *answers) if not r.ok]
    assert not wrong, wrong


def test_a_visible_nan_is_read():
    case = Case("poison", n=5, s=7, options=Options(Causal()))
    x = case.inputs()
    x.v[:, 3] = np.nan  # rows 1 and later see key 3: the first sits at key 2
    problem = Problem.describe(x, case.options)
    for answer in (plain.attention(problem, x), flash.forward(problem, x, TileShape(2, 3))):
        assert np.isfinite(answer.o[:, :1]).all() and np.isnan(answer.o[:, 1:]).all()


# watching


def test_a_watcher_sees_the_example_of_two_tiles():
    x = Inputs(np.ones((1, 1, 1, 1)), np.array([1.0, 3.0, 2.0, 5.0]).reshape(1, 4, 1, 1), np.ones((1, 4, 1, 1)))
    problem = Problem.describe(x, Options(Full(), scale=1.0))
    seen = []
    flash.forward(problem, x, TileShape(1, 2), watch=lambda visit, head, state: seen.append((visit.j, head, state)))
    shown = [(j.start, j.stop, head, f"{state.m[0]:g}", f"{state.l[0]:.3f}") for j, head, state in seen]
    assert shown == [(0, 2, 0, "3", "1.135"), (2, 4, 0, "5", "1.203")]


@given(questions(), st.builds(TileShape, st.integers(1, 5), st.integers(1, 5)))
@settings(max_examples=40, deadline=None)
def test_a_watcher_sees_every_visit_of_every_head_and_last_the_result(question, shape):
    x, options = replace(question[0], sink=None), question[1]
    problem = Problem.describe(x, options)
    last, count = {}, 0

    def watch(visit, head, state):
        nonlocal count
        count += 1
        before = last.get((visit.b.start, head, visit.i.start))
        assert before is None or (state.m >= before.m).all()
        last[visit.b.start, head, visit.i.start] = state

    o, lse = flash.forward(problem, x, shape, watch=watch)
    for (b, head, i), state in last.items():
        rows = slice(i, i + len(state.m))
        np.testing.assert_array_equal(finish(state)[0], o[b, rows, head])
        np.testing.assert_array_equal(finish(state)[1], lse[b, head, rows])
        assert len(state.m) == min(shape.block_m, problem.n - i)
    assert count >= len(last) and (count > 0) == bool(problem.keep().any())
