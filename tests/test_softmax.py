"""The algorithm of fifteen lines: states are a commutative monoid, and a fold over any tiles is the softmax of all keys."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.softmax import State, absorb, empty, finish, merge, weigh

EPS = np.finfo(np.float64).eps
ROUNDINGS = 4
"""Of a term in one step: the difference in the exponent, the exponential, the product, the sum."""

LOGITS = st.just(-np.inf) | st.floats(-40, 40) | st.integers(-3, 3).map(float)
VALUES = st.floats(-8, 8).filter(lambda x: x == 0 or abs(x) > EPS)


@st.composite
def tiles(draw: st.DrawFn, most: int = 7) -> tuple[np.ndarray, np.ndarray]:
    """Logits "rows cols", some rows hidden, and values "cols e"."""
    rows, cols, e = 3, draw(st.integers(1, most)), 2
    s = np.array(draw(st.lists(LOGITS, min_size=rows * cols, max_size=rows * cols))).reshape(rows, cols)
    v = np.array(draw(st.lists(VALUES, min_size=cols * e, max_size=cols * e))).reshape(cols, e)
    s[draw(st.lists(st.integers(0, rows - 1), max_size=rows))] = -np.inf
    return s, v


def state_of(s: np.ndarray, v: np.ndarray) -> State:
    return absorb(empty(len(s), v.shape[1]), s, v)


def same(a: State, b: State) -> bool:
    """Equal bit for bit."""
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def close(a: State, b: State, v: np.ndarray, steps: int) -> bool:
    """The same maximum, and sums that differ by no more than the roundings of `steps` on either side: no weight exceeds 1,
    so a rounding of l is at most a share of the number of keys, and one of acc a share of Σ|v|."""
    unit = 2 * ROUNDINGS * steps * EPS
    sums = np.abs(a.l - b.l) <= unit * len(v)
    return np.array_equal(a.m, b.m) and bool(sums.all() and (np.abs(a.acc - b.acc) <= unit * np.abs(v).sum(0)).all())


@given(tiles(), tiles())
@settings(max_examples=100, deadline=None)
def test_merge_commutes_exactly(x, y):
    assert same(merge(state_of(*x), state_of(*y)), merge(state_of(*y), state_of(*x)))


@given(tiles())
@settings(max_examples=100, deadline=None)
def test_empty_is_neutral_exactly(x):
    state = state_of(*x)
    nothing = empty(*state.acc.shape)
    assert same(merge(state, nothing), state)
    assert same(merge(nothing, state), state)
    assert same(merge(nothing, nothing), nothing)


@given(tiles(), tiles(), tiles())
@settings(max_examples=100, deadline=None)
def test_merge_associates(x, y, z):
    a, b, c = state_of(*x), state_of(*y), state_of(*z)
    assert close(merge(merge(a, b), c), merge(a, merge(b, c)), np.concatenate([x[1], y[1], z[1]]), steps=3)


@given(tiles(most=13), st.data())
@settings(max_examples=150, deadline=None)
def test_any_split_in_any_order_equals_all_keys_at_once(x, data):
    s, v = x
    order = data.draw(st.permutations(range(len(v))))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(v)))))
    parts = [np.array(part, int) for part in np.split(np.array(order), cuts)]
    at_once = state_of(s, v)
    absorbed = reduce(lambda state, part: absorb(state, s[:, part], v[part]), parts, empty(len(s), v.shape[1]))
    merged = reduce(merge, [state_of(s[:, part], v[part]) for part in parts])
    assert close(absorbed, at_once, v, len(parts) + 1)
    assert close(merged, at_once, v, len(parts) + 1)


def test_a_wrong_state_is_not_close():
    s, v = np.array([[1.0, 2.0, -np.inf]]), np.array([[1.0], [3.0], [5.0]])
    state = state_of(s, v)
    wrong = (
        state._replace(m=state.m + EPS * 4),
        state._replace(l=state.l * (1 + 2.0**-30)),
        state._replace(acc=state.acc * (1 - 2.0**-30)),
        state._replace(acc=state.acc * np.nan),
        merge(state, state),
    )
    assert close(state, state, v, 1)
    assert not any(close(state, other, v, 10) or same(state, other) for other in wrong)


def test_the_example_of_two_tiles():
    one = np.ones((2, 1))
    first = absorb(empty(1, 1), np.array([[1.0, 3.0]]), one)
    assert (first.m[0], f"{first.l[0]:.3f}") == (3, "1.135")
    second = absorb(first, np.array([[2.0, 5.0]]), one)
    assert (second.m[0], f"{second.l[0]:.3f}") == (5, "1.203")
    o, lse = finish(second)
    assert f"{lse[0]:.3f}" == "5.185" and o[0, 0] == 1  # log(e + e² + e³ + e⁵)


def test_a_row_that_saw_nothing_finishes_as_nothing():
    for state in (empty(3, 2), state_of(np.full((3, 5), -np.inf), np.ones((5, 2))), merge(empty(3, 2), empty(3, 2))):
        o, lse = finish(state)
        np.testing.assert_array_equal(o, np.zeros((3, 2)))
        np.testing.assert_array_equal(lse, np.full(3, -np.inf))


def test_a_tile_without_columns_changes_nothing():
    state = state_of(np.array([[1.0, -np.inf]]), np.ones((2, 3)))
    assert same(absorb(state, np.zeros((1, 0)), np.zeros((0, 3))), state)


@pytest.mark.parametrize("size", [1e3, 1e6, 1e300])
def test_huge_logits_do_not_overflow(size):
    s, v = np.array([[size, -size, size], [-size, -size, -np.inf]]), np.array([[1.0], [7.0], [3.0]])
    for tiles_of in ([slice(0, 3)], [slice(0, 1), slice(1, 2), slice(2, 3)], [slice(1, 3), slice(0, 1)]):
        o, lse = finish(reduce(lambda state, part: absorb(state, s[:, part], v[part]), tiles_of, empty(2, 1)))
        np.testing.assert_array_equal(o, [[2.0], [4.0]])
        np.testing.assert_array_equal(lse, [size + np.log(2.0), -size + np.log(2.0)])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_hidden_value_is_not_read(bad):
    s = np.array([[0.0, 0.0, -np.inf], [-np.inf, 0.0, -np.inf], [-np.inf, -np.inf, -np.inf]])
    v = np.array([[1.0], [3.0], [bad]])
    o, lse = finish(state_of(s, v))
    np.testing.assert_array_equal(o, [[2.0], [3.0], [0.0]])
    np.testing.assert_array_equal(lse, [np.log(2.0), 0.0, -np.inf])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_visible_value_is_read(bad):
    s, v = np.array([[0.0, 0.0], [0.0, -np.inf]]), np.array([[3.0], [bad]])
    np.testing.assert_array_equal(finish(state_of(s, v))[0], [[bad], [3.0]])


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_weigh_is_the_sum_over_seen_pairs(data):
    rows, cols, e = (data.draw(st.sampled_from([1, 2, 3, 5])) for _ in range(3))
    draw = lambda of, size: data.draw(st.lists(st.sampled_from(of), min_size=size, max_size=size))  # noqa: E731
    seen = np.array(draw([True, False], rows * cols)).reshape(rows, cols)
    p = np.where(seen, np.array(draw([0.0, 1.0, 2.0], rows * cols)).reshape(rows, cols), 0)
    v = np.array(draw([-2.0, 0.0, 3.0, np.nan, np.inf, -np.inf], cols * e)).reshape(cols, e)
    with np.errstate(invalid="ignore"):  # 0·inf and inf − inf are what is asked for
        expected = [[sum((p[r, c] * v[c, x] for c in range(cols) if seen[r, c]), 0.0) for x in range(e)] for r in range(rows)]
        np.testing.assert_array_equal(weigh(p, v, seen), expected)
