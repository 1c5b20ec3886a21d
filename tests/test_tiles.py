"""The walk against the definition: every visible pair once, no tile for nothing, FULL only where all is seen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import questions

from tilewise._errors import OptionError
from tilewise.cases import CASES
from tilewise.mask import Causal, Full, Lengths, Mask, Tile, Where, Window
from tilewise.problem import Inputs, Options, Problem
from tilewise.tiles import TileShape, Visit, blocks, table, visible_pairs, walk, walk_keys

SHAPES = st.builds(TileShape, st.integers(1, 9), st.integers(1, 9))


def problem_of(mask: Mask, b: int, n: int, s: int, h: int = 1) -> Problem:
    return Problem.describe(Inputs(np.zeros((b, n, h, 1)), *(np.zeros((b, s, 1, 1)) for _ in range(2))), Options(mask))


def visible(problem: Problem) -> np.ndarray:
    """Every visible pair, "b h n s"."""
    return np.broadcast_to(problem.keep(), (problem.b, problem.h, problem.n, problem.s))


def visits(problem: Problem, shape: TileShape, batch: int = 1) -> list[Visit]:
    """Every visit, `batch` entries at a time."""
    return [v for b in blocks(problem.b, batch) for _, row in walk(problem, shape, b) for v in row]


def faults(problem: Problem, visits: list[Visit], shape: TileShape, batch: int) -> list[str]:
    """What is wrong with a walk."""
    keep, count, found = visible(problem), np.zeros((problem.b, problem.h, problem.n, problem.s), int), []
    for visit in visits:
        part = keep[visit.b, :, visit.i, visit.j]
        count[visit.b, :, visit.i, visit.j] += 1
        if part.shape[0] > batch or part.shape[2] > shape.block_m or part.shape[3] > shape.block_n:
            found.append(f"{visit} is larger than a tile")
        if not part.any():
            found.append(f"{visit} sees nothing")
        if (visit.kind == Tile.FULL) != part.all():
            found.append(f"{visit} is not {visit.kind.name}")
    if (count[keep] != 1).any() or count.max(initial=0) > 1:
        found.append("a visible pair is not visited exactly once")
    return found


@given(questions(), SHAPES, st.sampled_from([1, 2, 5]))
@settings(max_examples=200, deadline=None)
def test_the_walk_visits_every_visible_pair_once_and_nothing_for_nothing(question, shape, batch):
    problem = Problem.describe(*question)
    assert faults(problem, visits(problem, shape, batch), shape, batch) == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_walk_of_every_named_case_is_right(case):
    problem = Problem.describe(case.inputs(), case.options)
    for shape, batch in ((TileShape(16, 24), 1), (TileShape(97, 31), 2)):
        assert faults(problem, visits(problem, shape, batch), shape, batch) == []


def test_a_wrong_walk_has_faults():
    shape = TileShape(3, 4)
    problem = problem_of(Causal() & Window(2), 2, 7, 11)
    walked = visits(problem, shape, 2)
    partial = next(v for v in walked if v.kind == Tile.PARTIAL)
    hidden = Visit(slice(0, 2), slice(0, 3), slice(8, 11), Tile.PARTIAL)
    wrong = {
        "lost": walked[1:],
        "doubled": [*walked, walked[0]],
        "hidden": [*walked, hidden],
        "claimed full": [*(v for v in walked if v != partial), partial._replace(kind=Tile.FULL)],
        "too wide": [Visit(slice(0, 2), slice(0, 7), slice(0, 11), Tile.PARTIAL)],
        "too few entries": visits(replace(problem, b=1), shape, 2),
    }
    assert faults(problem, walked, shape, 2) == []
    assert [name for name, found in wrong.items() if not faults(problem, found, shape, 2)] == []
    everything = problem_of(Full(), 1, 7, 11)
    understated = [v._replace(kind=Tile.PARTIAL) for v in visits(everything, shape)]
    assert faults(everything, understated, shape, 1)


@given(questions(), SHAPES)
@settings(max_examples=100, deadline=None)
def test_the_walk_by_keys_is_the_transpose_of_the_walk(question, shape):
    problem = Problem.describe(*question)
    b = slice(0, problem.b)
    rows, columns = list(walk(problem, shape, b)), list(walk_keys(problem, shape, b))
    assert [i for i, _ in rows] == blocks(problem.n, shape.block_m)
    assert [j for j, _ in columns] == blocks(problem.s, shape.block_n)
    down = [v for _, column in columns for v in column]
    assert down == sorted((v for _, row in rows for v in row), key=lambda v: (v.j.start, v.i.start))
    assert all(v.i == i and v.b == b for i, row in rows for v in row) and all(v.j == j for j, col in columns for v in col)
    assert all(v.j.start < w.j.start for _, row in rows for v, w in pairwise(row))


@given(questions(), SHAPES)
@settings(max_examples=100, deadline=None)
def test_the_table_holds_the_walk(question, shape):
    problem = Problem.describe(*question)
    for b in blocks(problem.b, 2):
        kinds = table(problem, shape, b)
        assert kinds.shape == (len(blocks(problem.n, shape.block_m)), len(blocks(problem.s, shape.block_n)))
        filled = np.zeros_like(kinds)
        for _, visits in walk(problem, shape, b):
            for v in visits:
                filled[v.i.start // shape.block_m, v.j.start // shape.block_n] = v.kind
        np.testing.assert_array_equal(kinds, filled)


@given(questions())
@settings(max_examples=100, deadline=None)
def test_visible_pairs_are_those_the_definition_keeps(question):
    problem = Problem.describe(*question)
    assert visible_pairs(problem) == visible(problem).sum()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_visible_pairs_of_every_named_case(case):
    problem = Problem.describe(case.inputs(), case.options)
    assert visible_pairs(problem) == visible(problem).sum()


@dataclass(frozen=True)
class Drawn:
    """A problem whose tiles of 2 × 2 are known; digits are EMPTY 0, PARTIAL 1, FULL 2."""

    problem: Problem
    kinds: list[list[int]]


def test_tables_known_by_heart():
    cases = [
        Drawn(problem_of(Full(), 1, 5, 5), [[2, 2, 2], [2, 2, 2], [2, 2, 2]]),
        Drawn(problem_of(Causal(), 1, 5, 5), [[1, 0, 0], [2, 1, 0], [2, 2, 2]]),
        Drawn(problem_of(Causal(), 1, 3, 5), [[2, 1, 0], [2, 2, 2]]),
        Drawn(problem_of(Causal() & Window(1), 1, 5, 5), [[1, 0, 0], [1, 1, 0], [0, 1, 2]]),
        Drawn(problem_of(Where(lambda b, h, i, j: i // 2 == j // 2), 1, 5, 5), [[2, 0, 0], [0, 2, 0], [0, 0, 2]]),
        Drawn(problem_of(Where(lambda b, h, i, j: j == 2 * h), 1, 2, 3, h=2), [[1, 1]]),
    ]
    for case in cases:
        assert table(case.problem, TileShape(2, 2), slice(0, case.problem.b)).tolist() == case.kinds


def test_a_tile_is_full_for_a_batch_only_if_it_is_for_every_entry():
    problem = problem_of(Lengths([4, 3, 0]), 3, 2, 5)
    kinds = {b.stop: table(problem, TileShape(2, 2), b).tolist() for b in (slice(0, 1), slice(0, 2), slice(2, 3), slice(0, 3))}
    assert kinds == {1: [[2, 2, 0]], 2: [[2, 1, 0]], 3: [[1, 1, 0]]}
    assert table(problem, TileShape(2, 2), slice(2, 3)).tolist() == [[0, 0, 0]]
    assert [v.b for v in visits(problem, TileShape(2, 5), 2)] == [slice(0, 2)]


def test_blocks_cover_a_size_once():
    assert blocks(0, 3) == []
    assert blocks(7, 3) == [slice(0, 3), slice(3, 6), slice(6, 7)]
    assert blocks(3, 7) == [slice(0, 3)]
    for bad in (0, -1):
        with pytest.raises(OptionError, match="at least one row"):
            blocks(7, bad)
