"""Every plan is right, whatever the lengths, mask, layout, method and direction; and costs what the textbook says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ring_plans import LAYOUTS, methods, pose, posts, shuffled
from strategies import masks, sides

from tilewise import OptionError
from tilewise.cases import CASES
from tilewise.mask import Causal, Documents, Full, Tile, Where, Window
from tilewise.problem import Problem
from tilewise.ring import owners
from tilewise.ring.owners import Owners
from tilewise.ring.program import Forward, Make, Method, Plan
from tilewise.ring.schedule import make_plan
from tilewise.ring.verify import check_messages, check_steps, count_flow, count_peak, verify

METHODS = (
    Method(), Method(direction=-1), Method("double", node=2), Method("direct"), Method("direct", at_once=8), Method("gather"),
    Method("gather", groups=3), Method(heads=2), Method(heads=4), Method("direct", heads=2),
    Method("gather", groups=2, heads=2),
)  # fmt: skip


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan: up to nine ranks, any lengths, masks, positions, layouts, heads, methods and both directions."""
    world, batch = draw(st.integers(1, 9)), draw(st.sampled_from([1, 1, 2]))
    n, s = draw(st.integers(0, 30)), draw(st.integers(0, 30))
    s = draw(st.sampled_from([n, s]))
    h, g = draw(st.sampled_from([(1, 1), (6, 3), (6, 1), (4, 4), (6, 2)]))
    pair = draw(st.none() | st.tuples(sides(batch, n), sides(batch, s, 0)))
    positions = None if pair is None else (pair[0].positions, pair[1].positions)
    align = "bottom-right" if positions is not None else draw(st.sampled_from(["bottom-right", "top-left"]))
    mask = draw(masks(batch, h, align, tables=positions is not None))
    problem = pose(n, s, mask, batch, h, g, positions)
    sides_ = draw(layouts(n, world)), draw(layouts(s, world))
    method = draw(methods(world))
    if draw(st.integers(0, 9)) == 0:
        method, sides_ = Method("tree"), (owners.replicated(n, world), sides_[1])
    return make_plan(problem, *sides_, method, draw(st.booleans()))


def layouts(length: int, world: int) -> st.SearchStrategy[Owners]:
    named = st.sampled_from(sorted(LAYOUTS)).map(lambda name: LAYOUTS[name](length, world))
    return named | st.integers(0, 99).map(lambda seed: shuffled(length, world, seed))


@settings(max_examples=120)
@given(plans())
def test_every_plan_is_right(plan):
    assert verify(plan) == []


DENSE = [case for case in CASES if case.options.ragged is None]


@pytest.mark.parametrize("case", DENSE, ids=lambda case: case.name)
def test_every_named_problem_has_right_plans(case):
    problem = Problem.describe(case.inputs(), case.options)
    q, kv = owners.zigzag(problem.n, 4), owners.zigzag(problem.s, 4)
    for backward in (False, True):
        for method in (Method(direction=-1), Method("direct", at_once=3), Method("gather", groups=2, heads=2)):
            assert verify(make_plan(problem, q, kv, method, backward)) == [], method


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("length", [3, 4, 9, 2999])
def test_lengths_that_divide_nothing(method, length):
    problem = pose(length, length, Causal())
    for backward in (False, True):
        made = owners.zigzag(length, 4)
        assert verify(make_plan(problem, made, made, method, backward)) == []


def test_keys_seen_in_steps_are_fetched_in_steps():
    problem, made = pose(24, 24, Where(lambda b, h, i, j: j % 2 + 0 * i == 0)), owners.contiguous(24, 3)
    for method in (Method(), Method("direct"), Method("gather")):
        plan = make_plan(problem, made, made, method, backward=True)
        assert verify(plan) == []
        assert count_flow(plan).sum() == 2 * 2 * 12 * 3 * 8 * 4, method  # half of all keys, and their gradients


def test_balanced_documents_have_right_plans():
    problem = pose(97, 97, Causal() & Documents.from_lengths([7, 1, 50, 20, 19]))
    made = owners.balanced(problem, 5)
    for method in (Method(), Method("direct", at_once=4)):
        assert verify(make_plan(problem, made, made, method, backward=True)) == []


# what is closed is closed: the textbook's numbers, from sizes alone


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_without_a_mask_bytes_are_the_textbooks(world):
    s, h, g, d, e = 16, 8, 8, 5, 3
    problem = pose(s * world, s * world, Full(), h=h, g=g)
    made = owners.striped(s * world, world)

    def received(method: Method, backward: bool) -> list[int]:
        return count_flow(make_plan(problem, made, made, method, backward)).sum(0).tolist()

    keys = (world - 1) * s * g * (d + e) * 4
    for method in (Method(), Method(direction=-1), Method("direct"), Method("gather", groups=2), Method("double", node=world)):
        assert received(method, False) == [keys] * world
        assert received(method, True) == [2 * keys] * world  # float32 gradients of float32 keys
    heads = (world - 1) * s * (h * d + g * (d + e) + h * e + h) // world * 4
    assert received(Method(heads=world), False) == [heads] * world


def test_a_wire_for_gradients_can_be_narrower():
    problem, made = pose(32, 32, Full()), owners.zigzag(32, 4)
    wide = make_plan(problem, made, made, Method(), backward=True)
    narrow = make_plan(problem, made, made, Method(), backward=True, wire={"dkv": 2})
    assert verify(narrow) == []
    keys = count_flow(make_plan(problem, made, made, Method())).sum()
    assert count_flow(wide).sum() == 2 * keys and count_flow(narrow).sum() == 1.5 * keys


def test_a_ring_against_the_diagonal_saves_a_quarter_of_zigzags_bytes():
    for world in (2, 4, 8):
        problem, made = pose(16 * world, 16 * world, Causal()), owners.zigzag(16 * world, world)
        up, down, straight = (
            count_flow(make_plan(problem, made, made, method)).sum()
            for method in (Method(), Method(direction=-1), Method("direct"))
        )
        assert down == straight == 0.75 * (world - 1) * 16 * world * 3 * 8 * 4
        assert up > down or world == 2


def test_a_window_touches_neighbours_only():
    problem, made = pose(80, 80, Causal() & Window(12)), owners.contiguous(80, 8)
    plan = make_plan(problem, made, made, Method("direct", at_once=8), backward=True)
    flow = count_flow(plan)
    assert {(a - b) % 8 for a, b in np.argwhere(flow)} <= {1, 2, 6, 7} and flow.any()
    assert [len(posts(plan, r)) for r in range(8)] == [2] * 8  # keys there, gradients back


def test_two_slots_serve_any_number_of_hops():
    problem = pose(72, 72, Full())
    slots = {}
    for world in (3, 9):
        made = owners.contiguous(72, world)
        plan = make_plan(problem, made, made, Method())
        slots[world] = [op.buffer for op in plan.programs[0].ops if isinstance(op, Make) and op.buffer.kind == "kv"]
        assert [(x.name, x.rows) for x in slots[world]] == [("kv1", 72 // world), ("kv0", 72 // world)]
        assert count_peak(plan)[0] == sum(
            rows * heads * columns * 4
            for rows, heads, columns in [(72 // world, 6, 5), (72 // world, 3, 8 * 3), (72 // world, 6, 4 * 2)]
        )


def test_zigzag_computes_three_rectangles_a_round_trip():
    """Own keys, half of the keys of ranks before, half of the queries for ranks after: nothing else, and only the first is
    masked."""
    problem, made = pose(64, 64, Causal()), owners.zigzag(64, 4)
    plan = make_plan(problem, made, made, Method())
    for program in plan.programs:
        blocks = [op.block for op in program.ops if isinstance(op, Forward)]
        assert [block.kind for block in blocks] == [Tile.PARTIAL, Tile.FULL, Tile.FULL, Tile.FULL]
        assert [(block.q.count, block.kv.count) in ((16, 8), (8, 16)) for block in blocks] == [False, True, True, True]


def test_decoding_takes_log_rounds_of_the_size_of_a_partial():
    for world, rounds in ((1, 0), (2, 1), (4, 2), (5, 4), (8, 3)):
        plan = make_plan(pose(1, 61), owners.replicated(1, world), owners.contiguous(61, world), Method("tree"))
        assert verify(plan) == [] and len(posts(plan, 0)) == rounds
        assert count_flow(plan).max(initial=0) == (1 * 6 * 4 * 4 if world > 1 else 0)


def test_large_batches_are_cut():
    problem, made = pose(300, 300, Full(), h=1, g=1), owners.contiguous(300, 150)
    plan = make_plan(problem, made, made, Method("gather"))
    assert len(posts(plan, 0)) == 2 and check_steps(plan) == [] and check_messages(plan) == []


def test_key_heads_are_sent_to_every_member_that_reads_them():
    problem, made = pose(24, 24, Causal(), h=6, g=2), owners.zigzag(24, 4)  # three query heads a key head, four members
    plan = make_plan(problem, made, made, Method(heads=4))
    blocks = [[tuple(op.block.heads) for op in program.ops if isinstance(op, Forward)] for program in plan.programs]
    assert blocks == [[(0, 1)], [(1, 3)], [(3, 4)], [(4, 6)]]
    assert verify(make_plan(problem, made, made, Method(heads=4), backward=True)) == []


@pytest.mark.parametrize(
    "method, world, words",
    [
        (Method(heads=3), 4, "do not form teams of 3"),
        (Method("double", node=3), 4, "do not form nodes of 3"),
        (Method("tree"), 4, "queries that every rank holds"),
    ],
)
def test_methods_that_do_not_fit_are_refused(method, world, words):
    with pytest.raises(OptionError, match=words):
        make_plan(pose(8, 8), owners.zigzag(8, world), owners.zigzag(8, world), method)


def test_bad_methods_are_refused():
    for wrong in (("carousel",), ("ring", 2), ("ring", 1, 0), ("ring", 1, 1, 0), ("ring", 1, 1, 1, 0), ("ring", 1, 1, 1, 1, 0)):
        with pytest.raises(OptionError, match="method"):
            Method(*wrong)  # pyright: ignore[reportArgumentType]
    made = owners.replicated(8, 2)
    for method, words in ((Method(), "every rank holds"), (Method("tree", heads=2), "does not exchange heads")):
        with pytest.raises(OptionError, match=words):
            make_plan(pose(8, 8), made, owners.zigzag(8, 2), method)
