"""Levels of memory, split keys and rings: what the cost model says of them equals walks that happen, load by load."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import traced
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import questions
from traced import counted, seen

from tilewise import cost
from tilewise._errors import OptionError
from tilewise.cost import Meter, keys_outside
from tilewise.cost.keys_outside import ATOMIC
from tilewise.cost.stored import price, steps
from tilewise.mask import Causal, Full, Mask, Window
from tilewise.problem import DTYPES, Inputs, Options, Problem
from tilewise.reference import plain
from tilewise.tiles import TileShape, visible_pairs

SHAPES = st.builds(TileShape, st.integers(1, 9), st.integers(1, 9))


def problem_of(mask: Mask, n: int, s: int, d: int, e: int, *, b: int = 1, h: int = 1, g: int = 1) -> Problem:
    x = Inputs(*(np.zeros(shape, np.float16) for shape in ((b, n, h, d), (b, s, g, d), (b, s, g, e))))
    return Problem.describe(x, Options(mask))


# the chip's own memory


@given(questions(), SHAPES, st.sampled_from([1, 2, 4]), st.sampled_from(sorted(DTYPES)))
@settings(max_examples=60, deadline=None)
def test_bytes_through_shared_memory_equal_a_walk(question, shape, readers, dtype):
    problem = replace(Problem.describe(*question), dtype=dtype)
    outside, inside = traced.chip_queries_outside, traced.chip_keys_outside
    assert cost.forward(problem, shape).on_chip(readers) == outside(problem, shape, readers, "k v")
    assert cost.dq(problem, shape).on_chip(readers) == outside(problem, shape, readers, "k v k")
    assert cost.dk_dv(problem, shape).on_chip(readers) == inside(problem, shape, readers, "dk_dv")
    assert keys_outside.forward(problem, shape).on_chip(readers) == inside(problem, shape, readers, "flash1")
    assert keys_outside.backward(problem, shape).on_chip(readers) == inside(problem, shape, readers, "flash1 backward")
    assert keys_outside.backward(problem, shape, ATOMIC).on_chip(readers) == inside(problem, shape, readers, "atomic")


@given(*[st.integers(1, 50)] * 4, SHAPES, st.sampled_from([1, 4]))
@settings(max_examples=40, deadline=None)
def test_bytes_through_shared_memory_of_stored_scores_equal_a_walk(n, s, d, e, shape, readers):
    problem, sizes = problem_of(Full(), n, s, d, e, b=2, h=3), {"n": n, "s": s, "d": d, "e": e}
    for step in [*steps(problem), *steps(problem, backward=True)]:
        rows, inner, cols = (sizes[axis] for axis in step.product.split()) if step.product else (0, 0, 0)
        walked = traced.chip_product(problem, shape, readers, (rows, inner, cols))
        assert price(problem, step, shape).on_chip(readers) == walked


def test_a_reader_more_is_seen():
    problem, shape = problem_of(Causal(), 37, 41, 5, 3, h=4, g=2), TileShape(8, 8)
    assert cost.forward(problem, shape).on_chip(3) != traced.chip_queries_outside(problem, shape, 4, "k v")
    assert keys_outside.forward(problem, shape).on_chip(3) != traced.chip_keys_outside(problem, shape, 4, "flash1")


# decode


@given(questions(), st.integers(1, 9), st.integers(1, 5), st.sampled_from(sorted(DTYPES)))
@settings(max_examples=80, deadline=None)
def test_decode_equals_a_meter_of_split_keys(question, block_n, splits, dtype):
    x, options = question
    problem, meter = replace(Problem.describe(x, options), dtype=dtype), Meter.of(Problem.describe(x, options))
    meter.itemsize, meter.lse_itemsize = problem.itemsize, problem.lse_itemsize
    assume(problem.n)
    answer, right = traced.decode(problem, x, block_n, splits, meter), plain.attention(problem, x)
    np.testing.assert_allclose(answer.o, right.o, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(answer.lse, right.lse, rtol=1e-9, atol=1e-12)
    assert seen(cost.decode(problem, block_n, splits)) == counted(meter)


def test_decode_reads_keys_once_a_group_and_merges_what_is_split():
    problem = problem_of(Causal(), 1, 8192, 128, 128, h=32, g=8)
    one, eight = cost.decode(problem, 128), cost.decode(problem, 128, splits=8)
    assert one.tensors["k"].read == 8 * 8192 * 128 * 2 and "parts" not in one.tensors
    assert eight.tensors["k"] == one.tensors["k"] and eight.tensors["parts"].write == 8 * 32 * (128 + 1) * 4
    assert one.flops / (one.tensors["k"].read + one.tensors["v"].read) == 32 / 8  # FLOP per byte: the group


# a ring


@given(st.integers(0, 90), st.integers(0, 90), st.integers(1, 8), st.sampled_from([1, 2]), st.sampled_from([1, 3]))
@settings(max_examples=60, deadline=None)
def test_a_ring_sends_what_a_simulated_one_sends(n, s, ranks, b, group):
    problem = problem_of(Full(), n, s, 3, 5, b=b, h=2 * group, g=2)
    for rank, sent in enumerate(traced.ring(problem, ranks)):
        one = cost.ring(problem, ranks, rank)
        assert (one.hops, one.sent_bytes) == (sent["hops"], sent["bytes"])
        assert (one.backward_hops, one.backward_sent_bytes) == (sent["back hops"], sent["back bytes"])


def test_a_lost_hop_is_seen():
    problem = problem_of(Full(), 64, 64, 8, 8)
    sent = traced.ring(problem, 4)[0]
    assert cost.ring(problem, 3).hops != sent["hops"] and cost.ring(problem, 3).sent_bytes != sent["bytes"]


def test_equal_parts_are_the_closed_forms():
    problem, ranks = problem_of(Full(), 4096, 8192, 128, 64, b=2, h=16, g=4), 8
    one, row = cost.ring(problem, ranks, 3), 2 * 4 * (128 + 64)
    assert one.sent_bytes == (ranks - 1) * (8192 // ranks) * row * 2
    assert one.backward_sent_bytes == one.sent_bytes + 8192 * row * 4
    assert one.state_bytes == 2 * (ranks - 1) * 2 * 16 * (4096 // ranks) * (4 * 64 + 4)
    assert cost.ring(problem, 1) == (0, 0, 0, 0, 0)


@pytest.mark.parametrize(("ranks", "rank"), [(0, 0), (4, 4), (4, -1)])
def test_a_rank_outside_the_ring_is_refused(ranks, rank):
    with pytest.raises(OptionError, match=r"rank"):
        cost.ring(problem_of(Full(), 8, 8, 2, 2), ranks, rank)


# useful operations


@given(questions())
@settings(max_examples=30, deadline=None)
def test_useful_operations_are_those_of_visible_pairs(question):
    problem = Problem.describe(*question)
    pairs = int(np.broadcast_to(problem.keep(), (problem.b, problem.h, problem.n, problem.s)).sum())
    assert visible_pairs(problem) == pairs
    assert cost.useful_flops(problem) == 2 * pairs * (problem.d + problem.e)
    assert cost.useful_flops(problem, backward=True) == 2 * pairs * (3 * problem.d + 2 * problem.e)


def test_tiles_that_are_visited_hold_every_visible_pair():
    problem = problem_of(Causal() & Window(31), 211, 211, 8, 8)
    executed = [cost.forward(problem, TileShape(block, block)).flops for block in (1, 8, 64)]
    assert executed[0] == cost.useful_flops(problem) < executed[1] < executed[2]
