"""The cost model says what the reference is seen to do: equal counts, not estimates."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import questions
from traced import counted, seen

from tilewise import cost
from tilewise.cases import CASES
from tilewise.cost import Cost, Meter, Moved
from tilewise.mask import Causal, Full, Lengths, Mask, Tile, Window
from tilewise.problem import DTYPES, Inputs, Options, Partial, Problem
from tilewise.reference import flash
from tilewise.tiles import TileShape, blocks, table

SHAPES = st.builds(TileShape, st.integers(1, 9), st.integers(1, 9))


def measured(problem: Problem, x: Inputs[np.ndarray], shape: TileShape) -> tuple[Cost, Cost]:
    """What a meter counts while the reference runs forward and backward."""
    forward, backward = Meter.of(problem), Meter.of(problem)
    saved = flash.forward(problem, x, shape, forward)
    grads = Partial(np.ones_like(saved.o), np.ones_like(saved.lse))
    flash.backward(problem, x, saved, grads, shape, backward)
    return counted(forward), counted(backward)


def problem_of(mask: Mask, n: int, s: int, **sizes: int) -> Problem:
    b, h, g, d, e = (sizes.get(axis, 1) for axis in "bhgde")
    x = Inputs(*(np.zeros(shape, np.float32) for shape in ((b, n, h, d), (b, s, g, d), (b, s, g, e))))
    return Problem.describe(x, Options(mask))


@given(questions(), SHAPES, st.sampled_from(sorted(DTYPES)))
@settings(max_examples=120, deadline=None)
def test_cost_equals_what_a_meter_sees_of_the_reference(question, shape, dtype):
    problem = replace(Problem.describe(*question), dtype=dtype)
    forward, backward = measured(problem, question[0], shape)
    assert seen(cost.forward(problem, shape)) == forward
    assert seen(cost.backward(problem, shape)) == backward


@pytest.mark.parametrize("case", [c for c in CASES if c.n * c.s < 4000], ids=lambda case: case.name)
def test_cost_equals_the_meter_on_named_cases(case):
    problem, shape = Problem.describe(case.inputs(), case.options), TileShape(16, 24)
    forward, backward = measured(problem, case.inputs(), shape)
    assert seen(cost.forward(problem, shape)) == forward
    assert seen(cost.backward(problem, shape)) == backward


@pytest.mark.parametrize(("n", "s"), [(0, 5), (5, 0), (5, 7)])
@pytest.mark.parametrize("mask", [Full(), Lengths([3, 7, 3]), Causal() & Lengths([7, 7, 0])])
def test_every_batch_entry_is_paid_for(mask, n, s):
    problem = problem_of(mask, n, s, b=3, h=2, d=2, e=3)
    x = Inputs(np.ones((3, n, 2, 2)), np.ones((3, s, 1, 2)), np.ones((3, s, 1, 3)))
    forward, backward = measured(problem, x, TileShape(2, 3))
    assert seen(cost.forward(problem, TileShape(2, 3))) == forward
    assert seen(cost.backward(problem, TileShape(2, 3))) == backward


def test_a_meter_counts_each_kind_once():
    meter = Meter(itemsize=2, lse_itemsize=4)
    x = np.zeros((3, 5))
    assert meter.read(x, "k") is x and meter.write(x[0], "lse").shape == (5,)
    meter.read(x[:, 0], "delta")
    meter.read(x, "dq", itemsize=8)
    meter.product(2, 3, 5)
    meter.exponential(7)
    moved = {"k": Moved(30, 0, 30), "lse": Moved(0, 20, 20), "delta": Moved(12, 0, 12), "dq": Moved(120, 0, 120)}
    assert meter.cost == Cost(60, 7, moved)


def test_a_meter_knows_what_a_perfect_cache_would_spare():
    meter, x = Meter(itemsize=2, lse_itemsize=4), np.zeros(5)
    for _ in range(3):
        meter.read(x, "k", (0, 0))
    meter.read(x, "k", (0, 5))
    assert meter.tensors["k"] == Moved(40, 0, 20)
    meter.write(x, "o", (0,), itemsize=4)  # unfinished, read again, finished: memory sees the last ten bytes
    meter.read(x, "o", (0,), itemsize=4)
    meter.write(x, "o", (0,))
    assert meter.tensors["o"] == Moved(20, 30, 10)
    meter.kernel()
    meter.read(x, "k", (0, 0))
    assert meter.tensors["k"] == Moved(50, 0, 30)


@pytest.mark.parametrize(
    ("dtype", "itemsize", "lse"), [("float16", 2, 4), ("bfloat16", 2, 4), ("float32", 4, 4), ("float64", 8, 8)]
)
def test_bytes_follow_the_dtype(dtype, itemsize, lse):
    # One tile of n = 3, s = 5, d = 2, e = 7. Forward reads q, k, v and writes o, lse.
    problem = replace(problem_of(Full(), 3, 5, d=2, e=7), dtype=dtype)
    price = cost.forward(problem, TileShape(3, 5))
    assert price.read_bytes == (3 * 2 + 5 * 2 + 5 * 7) * itemsize
    assert price.write_bytes == 3 * 7 * itemsize + 3 * lse
    assert price.bytes == price.read_bytes + price.write_bytes


@given(questions(), SHAPES)
@settings(max_examples=60, deadline=None)
def test_tiles_are_counted_for_every_head_and_entry(question, shape):
    problem = Problem.describe(*question)
    kinds = [table(problem, shape, b) for b in blocks(problem.b, 1)]
    counts = [problem.h * sum(int((k == kind).sum()) for k in kinds) for kind in (Tile.EMPTY, Tile.PARTIAL, Tile.FULL)]
    for price in (cost.forward(problem, shape), cost.backward(problem, shape)):
        assert [price.empty_tiles, price.partial_tiles, price.full_tiles] == counts


def test_storing_the_scores_forward_equals_a_count_by_hand():
    # b = 1, h = 2 query heads on g = 1 key head, n = 2, s = 3, d = 4, e = 5, float32. Elements: q 2·2·4 = 16,
    # k 3·4 = 12, v 3·5 = 15, o 2·2·5 = 20, pairs of both heads 2·2·3 = 12.
    #   s = q·kᵀ    reads q, k      writes s    2·12·4 flops
    #   p = exp s   reads s         writes p    12 exponentials
    #   o = p·v     reads p, v      writes o    2·12·5 flops
    problem = problem_of(Full(), 2, 3, h=2, d=4, e=5)
    reads, writes = (16 + 12) + 12 + (12 + 15), 12 + 12 + 20
    price = cost.standard(problem)
    assert (price.flops, price.exponentials, price.read_bytes, price.write_bytes) == (96 + 120, 12, reads * 4, writes * 4)


def test_storing_the_scores_backward_equals_a_count_by_hand():
    # The same sizes; Dao et al. 2022, algorithm 3.
    #   dv = pᵀ·do          reads p, do     writes dv   2·12·5 flops
    #   dp = do·vᵀ          reads do, v     writes dp   2·12·5
    #   ds from p and dp    reads p, dp     writes ds
    #   dq = ds·k           reads ds, k     writes dq   2·12·4
    #   dk = dsᵀ·q          reads ds, q     writes dk   2·12·4
    problem = problem_of(Full(), 2, 3, h=2, d=4, e=5)
    reads = (12 + 20) + (20 + 15) + (12 + 12) + (12 + 12) + (12 + 16)
    writes = 15 + 12 + 12 + 16 + 12
    price = cost.standard(problem, backward=True)
    assert (price.flops, price.exponentials, price.read_bytes, price.write_bytes) == (240 + 192, 0, reads * 4, writes * 4)


@pytest.mark.parametrize("change", ["tensor", "read", "write", "least", "flops", "exponentials"])
def test_a_count_that_is_off_by_one_is_seen(change):
    problem = problem_of(Causal(), 7, 11, h=2, d=3, e=2)
    right = cost.forward(problem, TileShape(2, 3))
    if change == "tensor":
        wrong = replace(right, tensors={**right.tensors, "q": right.tensors["k"], "k": right.tensors["q"]})
    elif change in ("read", "write", "least"):
        k = right.tensors["k"]
        wrong = replace(right, tensors={**right.tensors, "k": k._replace(**{change: getattr(k, change) + 1})})
    else:
        wrong = replace(right, **{change: getattr(right, change) + 1})
    assert seen(wrong) != seen(right)


@pytest.mark.parametrize(("n", "block"), [(101, 7), (211, 16), (211, 64), (13, 1)])
def test_causal_costs_about_half(n, block):
    # A block of t rows that ends at row i visits i keys, so pairs are (n² + Σ t²) / 2: half, and half a diagonal of tiles.
    causal, full = (cost.forward(problem_of(m, n, n), TileShape(block, block)).flops for m in (Causal(), Full()))
    diagonal = sum((i.stop - i.start) ** 2 for i in blocks(n, block))
    assert 2 * causal * n**2 == full * (n**2 + diagonal)
    assert full < 2 * causal <= full * (1 + block / n)


@pytest.mark.parametrize("price", [cost.forward, cost.backward], ids=["forward", "backward"])
def test_a_window_costs_in_proportion_to_n(price):
    shape, mask = TileShape(16, 8), Causal() & Window(37)
    flops = [price(problem_of(mask, n, n), shape).flops for n in range(101, 101 + 16 * 8, 16)]
    assert len(set(np.diff(flops))) == 1
    full = [price(problem_of(Full(), n, n), shape).flops for n in range(101, 101 + 16 * 8, 16)]
    assert len(set(np.diff(full))) > 1


def test_a_window_of_single_pairs_costs_its_visible_pairs():
    n, left = 101, 13
    pairs = n * (left + 1) - left * (left + 1) // 2
    assert cost.forward(problem_of(Causal() & Window(left), n, n, d=3, e=2), TileShape(1, 1)).flops == 2 * pairs * (3 + 2)


def test_costs_add():
    one, two = Cost(1, 2, {"q": Moved(3, 4, 5)}, 6, 7, 8, 9, 10), Cost(10, 20, {"q": Moved(30, 40, 50), "k": Moved(1)}, 60, 70)
    assert one + two == Cost(11, 22, {"q": Moved(33, 44, 55), "k": Moved(1)}, 66, 77, 8, 9, 10)
    assert one * 3 == one + one + one
    assert "0.000 GFLOP" in str(one) and "8 full, 7 partial, 6 skipped" in str(one)
    assert (one + two).on_chip(4) == 9 + 4 * 10 and (one + two).least_bytes == 55
