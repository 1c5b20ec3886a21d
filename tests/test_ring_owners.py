"""Which token sits where: every layout, any length, any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ring_plans import LAYOUTS, pose, shuffled
from strategies import masks, sides

from tilewise import OptionError, ShapeError
from tilewise.mask import Causal, Documents, Full, Tile, Window
from tilewise.positions import Dense
from tilewise.problem import Inputs, Options, Problem
from tilewise.ragged import Ragged
from tilewise.ring import owners
from tilewise.ring.owners import Owners, check_sides
from tilewise.ring.program import Heads
from tilewise.ring.runs import Runs
from tilewise.ring.sight import area, corner, dense, look, needed, take_positions
from tilewise.ring.teams import even

WORLDS, LENGTHS = st.integers(1, 9), st.integers(0, 60)
ROWS = st.sets(st.integers(0, 40)).map(sorted).map(np.array)


@given(ROWS, st.data())
def test_runs_are_the_rows_they_stand_for(rows, data):
    runs = Runs.of(rows)
    assert runs.array().tolist() == rows.tolist() and runs.count == len(rows)
    index = Runs.of(np.array(sorted(data.draw(st.sets(st.integers(0, max(len(rows) - 1, 0)))))))
    if len(rows):
        taken = runs.take(index)
        assert taken.array().tolist() == rows[index.array()].tolist()
        assert taken.within(runs).array().tolist() == index.array().tolist()
    other = data.draw(ROWS)
    assert Runs.union([runs, Runs.of(other)]).array().tolist() == sorted({*rows.tolist(), *other.tolist()})
    wanted = np.arange(-3, 45)
    assert runs.find(wanted).tolist() == np.searchsorted(rows, wanted).tolist()


@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 5), st.data())
def test_runs_with_a_step_are_the_rows_they_stand_for(start, count, step, data):
    runs = Runs((range(start, start + step * count, step), range(90, 97, 3)))
    index = Runs.of(np.array(sorted(data.draw(st.sets(st.integers(0, runs.count - 1))))))
    taken = runs.take(index)
    assert taken.array().tolist() == runs.array()[index.array()].tolist()
    assert taken.within(runs).array().tolist() == index.array().tolist()


def test_rows_that_do_not_increase_are_refused():
    with pytest.raises(OptionError, match="strictly increase"):
        Runs((range(4, 8), range(7, 9)))


@given(st.sampled_from(sorted(LAYOUTS)), LENGTHS, WORLDS)
def test_every_row_is_on_one_rank(layout, length, world):
    made = LAYOUTS[layout](length, world)
    assert sorted(made.order.tolist()) == list(range(length)) and made.world == world
    x = np.random.default_rng(0).normal(size=(2, length))
    shards = [x[:, shard.array()] for shard in made.shards]
    assert np.array_equal(np.concatenate(shards, 1)[:, made.inverse], x)
    rank, index = made.locate(np.arange(length))
    assert all(made.shards[r].array()[i] == row for row, (r, i) in enumerate(zip(rank, index, strict=True)))


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 9, 2999])
def test_rows_are_shared_evenly(length):
    for layout in ("contiguous", "zigzag", "striped"):
        counts = LAYOUTS[layout](length, 4).counts
        assert max(counts) - min(counts) <= (2 if layout == "zigzag" else 1), layout


def test_layouts_by_hand():
    assert [x.array().tolist() for x in owners.contiguous(5, 2).shards] == [[0, 1], [2, 3, 4]]
    assert [x.array().tolist() for x in owners.zigzag(7, 2).shards] == [[0, 5, 6], [1, 2, 3, 4]]
    assert [x.ranges for x in owners.striped(7, 3).shards] == [(range(0, 7, 3),), (range(1, 7, 3),), (range(2, 7, 3),)]
    assert [x.array().tolist() for x in owners.striped(7, 2, 2).shards] == [[0, 1, 4, 5], [2, 3, 6]]
    assert owners.replicated(3, 2).counts == [3, 3]
    assert owners.contiguous(2, 3).counts == [0, 1, 1]  # a rank without rows is legal


@given(st.sampled_from(sorted(LAYOUTS)), LENGTHS, WORLDS, st.integers(-70, 70))
def test_a_roll_moves_rows_across_shards(layout, length, world, shift):
    made = LAYOUTS[layout](length, world)
    x = np.random.default_rng(0).normal(size=length)
    rolled = np.roll(x, shift)
    local = [x[shard.array()] for shard in made.shards]
    plans = [made.roll(r, shift) for r in range(world)]
    for r, (_, receives) in enumerate(plans):
        got = np.full(len(local[r]), np.nan)
        for peer, exchange in enumerate(receives):
            sent = plans[peer][0][r]
            assert sent.rows.tolist() == exchange.rows.tolist() and sent.into.tolist() == exchange.into.tolist()
            got[exchange.into] = local[peer][exchange.rows]
        assert np.array_equal(got, rolled[made.shards[r].array()])


@given(st.sampled_from(sorted(LAYOUTS)), WORLDS, st.data())
def test_positions_of_shards_are_those_of_their_rows(layout, world, data):
    batch, count = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([0, 1, 7, 23]))
    side = data.draw(sides(batch, count))
    made = LAYOUTS[layout](count, world)
    for r, shard in enumerate(made.shards):
        have = made.positions(r, side.positions).array()
        assert np.array_equal(np.broadcast_to(have, (batch, shard.count)), side.rows[:, shard.array()])
    assert made.positions(0).array()[0].tolist() == made.shards[0].array().tolist()


def test_positions_stay_arithmetic_where_rows_are():
    assert owners.striped(23, 3).positions(1).rows is None
    assert owners.contiguous(23, 3).positions(2).rows is None


def test_zigzag_gives_every_rank_equal_causal_work_at_every_step():
    for world in (1, 2, 3, 5, 8):
        problem, made = pose(16 * world, 16 * world, Causal()), owners.zigzag(16 * world, world)
        for t in range(world):
            work = {area(problem, made.shards[r], made.shards[(r - t) % world]) for r in range(world)}
            assert len(work) == 1, (world, t, work)


def test_contiguous_causal_work_is_not_equal():
    problem, made = pose(64, 64, Causal()), owners.contiguous(64, 4)
    work = [area(problem, shard, Runs.span(0, 64)) for shard in made.shards]
    assert max(work) > 1.5 * sum(work) / 4


@pytest.mark.parametrize("world", [2, 3, 8, 16])
@pytest.mark.parametrize("seed", range(3))
def test_documents_are_balanced_within_ten_percent_by_area(world, seed):
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.lognormal(5, 1.3, 40 * world).astype(int) + 1, 3000)
    total = int(lengths.sum())
    problem = pose(total, total, Causal() & Documents.from_lengths(lengths.tolist()), h=1, g=1)
    made = owners.balanced(problem, world)
    work = [area(problem, shard, Runs.span(0, total)) for shard in made.shards]
    assert max(work) <= 1.1 * sum(work) / world
    assert max(made.counts) <= owners.ROOM * -(-total // world)
    plain = [area(problem, shard, Runs.span(0, total)) for shard in owners.contiguous(total, world).shards]
    assert max(work) <= max(plain)


def test_documents_that_fit_a_share_are_not_split():
    lengths = [50, 3, 200, 17, 1, 90, 35, 4]
    problem = pose(400, 400, Causal() & Documents.from_lengths(lengths))
    made = owners.balanced(problem, 4)
    rank, _ = made.locate(np.arange(400))
    for length, start in zip(lengths, np.cumsum([0, *lengths]), strict=False):
        assert length > 100 or len(set(rank[start : start + length])) == 1, length
    assert len(set(rank[53:253])) > 1  # the one that does not fit is


@given(st.integers(0, 40), WORLDS, st.integers(1, 9) | st.none(), st.data())
def test_balanced_shards_hold_every_row_whatever_the_mask(length, world, chunk, data):
    problem = pose(length, length, data.draw(masks(1, 6)), b=1)
    assert sorted(owners.balanced(problem, world, chunk).order.tolist()) == list(range(length))


@given(st.integers(1, 2), st.data())
def test_what_is_seen_is_what_the_mask_says(batch, data):
    """`needed`, `look` and `area` against the definition, pair by pair."""
    n, s = data.draw(st.integers(1, 23)), data.draw(st.integers(1, 23))
    pair = data.draw(st.none() | st.tuples(sides(batch, n), sides(batch, s, 0)))
    positions = None if pair is None else (pair[0].positions, pair[1].positions)
    problem = pose(n, s, data.draw(masks(batch, 6, tables=positions is not None)), b=batch, positions=positions)
    keep = np.broadcast_to(problem.keep(), (batch, 6, n, s))
    q, kv = shuffled(n, 2, data.draw(st.integers(0, 99))).shards[0], shuffled(s, 2, data.draw(st.integers(0, 99))).shards[0]
    assert needed(problem, q).array().tolist() == np.flatnonzero(keep[:, :, q.array()].any((0, 1, 2))).tolist()
    tile = keep[:, :, q.array()][:, :, :, kv.array()]
    assert area(problem, q, kv) == tile.sum() // 6
    rows, cols = np.flatnonzero(tile.any((0, 1, 3))), np.flatnonzero(tile.any((0, 1, 2)))
    box = look(problem, q, kv)
    assert (box is None) == (not len(rows))
    if box is not None:
        assert (box.q, box.kv) == ((rows[0], rows[-1] + 1), (cols[0], cols[-1] + 1))
        inside = tile[:, :, slice(*box.q), slice(*box.kv)]
        assert box.kind == (Tile.FULL if inside.all() else Tile.PARTIAL)


def test_corners_keep_the_alignment_of_the_whole():
    problem = pose(5, 9, Causal())
    layout = corner(problem, Runs.span(3, 5), Runs((range(0, 9, 4),)))
    assert layout == Dense(1, take_positions(dense(problem).q, Runs.span(3, 5)), owners.striped(9, 4).positions(0))
    assert layout.q.array().tolist() == [[7, 8]]


@pytest.mark.parametrize("heads, group", [((0, 6), 2), ((1, 3), 2), ((1, 8), 3), ((4, 5), 3), ((2, 2), 1), ((3, 9), 12)])
def test_parts_of_heads_share_their_key_heads_evenly(heads, group):
    parts = even(Heads(*heads), group)
    assert [x for part in parts for x in range(*part)] == list(range(*heads))
    for part in parts:
        shares = np.unique([x // group for x in range(*part)], return_counts=True)[1]
        assert len(set(shares.tolist())) == 1


def test_sides_that_do_not_fit_are_refused():
    problem = pose(8, 12, Full())
    with pytest.raises(ShapeError, match="axis n: owners of q share 9 rows where the problem has 8"):
        check_sides(problem, owners.zigzag(9, 2), owners.zigzag(12, 2))
    with pytest.raises(ShapeError, match="axis s: owners of k share 8 rows where the problem has 12"):
        check_sides(problem, owners.zigzag(8, 2), owners.zigzag(8, 2))
    with pytest.raises(ShapeError, match="2 ranks and keys among 3"):
        check_sides(problem, owners.zigzag(8, 2), owners.zigzag(12, 3))
    with pytest.raises(OptionError, match="every rank holds"):
        check_sides(problem, owners.zigzag(8, 2), owners.replicated(12, 2))


def test_bad_layouts_are_refused():
    for make, words in (
        (lambda: owners.zigzag(8, 0), "at least one rank"),
        (lambda: owners.contiguous(-1, 2), "cannot have -1 rows"),
        (lambda: owners.striped(8, 2, 0), "at least one row"),
        (lambda: owners.balanced(pose(8, 8), 2, 0), "at least one row"),
        (lambda: Owners(4, (Runs.span(0, 2), Runs.span(1, 4))), "exactly once"),
        (lambda: Owners(4, ()), "at least one rank"),
        (lambda: Owners(4, (Runs.span(0, 3),), replicated=True), "all 4 rows"),
    ):
        with pytest.raises(OptionError, match=words):
            make()


def test_a_packed_problem_is_told_how_to_be_sharded():
    q = np.zeros((1, 8, 2, 3), np.float32)
    packed = Problem.describe(Inputs(q, q, q), Options(Window(2), ragged=Ragged.from_lengths([3, 5])))
    with pytest.raises(OptionError, match="Documents mask"):
        needed(packed, Runs.span(0, 4))
