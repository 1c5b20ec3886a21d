"""Every mask as a literal grid, and its three answers - grid, bounds, tile - against a loop over `keep`."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import BATCHES, COUNTS, Side, masks, sides, simple_masks

from tilewise._errors import DtypeError, OptionError, ShapeError
from tilewise.mask import Causal, Chunked, Documents, Full, Lengths, Mask, Prefix, Tile, Where, Window, parse
from tilewise.positions import Dense, Positions
from tilewise.problem import Inputs, Options, Problem
from tilewise.ragged import Ragged

CHECKER = np.indices((3, 4)).sum(0) % 2 == 0


def literal(text: str) -> np.ndarray:
    """ "101/110" as a boolean grid."""
    return np.array([[c == "1" for c in row] for row in text.replace(" ", "").split("/")])


def problem_of(mask: Mask, b: int, n: int, s: int, h: int = 1) -> Problem:
    x = np.zeros((b, n, h, 1)), np.zeros((b, s, 1, 1)), np.zeros((b, s, 1, 1))
    return Problem.describe(Inputs(*x), Options(mask))


def whole(problem: Problem) -> np.ndarray:
    """The grid of all pairs, "b h n s"."""
    grid = problem.mask.grid(problem.layout, slice(0, problem.b), slice(0, problem.n), slice(0, problem.s))
    return np.broadcast_to(grid, (problem.b, problem.h, problem.n, problem.s))


GRIDS = {
    "full": (Full(), "1111/1111/1111"),
    "causal": (Causal(), "1100/1110/1111"),
    "causal, n = s": (Causal(), "100/110/111"),
    "causal, more queries than keys": (Causal(), "00/00/10/11"),
    "causal, top-left": (Causal("top-left"), "1000/1100/1110"),
    "causal, top-left, more queries than keys": (Causal("top-left"), "10/11/11/11"),
    "window": (Window(1, 0), "1000/1100/0110/0011"),
    "window, n < s": (Window(1, 1), "0111/0011"),
    "window, n > s": (Window(1, 0), "00/00/10/11/"[:-1]),
    "window, right only": (Window(0, 2), "1110/0111/0011/0001"),
    "window, no left limit": (Window(None, 0), "1000/1100/1110/1111"),
    "window, no right limit": (Window(0, None), "1111/0111/0011/0001"),
    "window, no limits": (Window(), "111/111"),
    "prefix": (Prefix(2), "1100/1100/1110/1111"),
    "prefix, n < s": (Prefix(2), "1110/1111"),
    "prefix of nothing": (Prefix(0), "100/110/111"),
    "prefix beyond the keys": (Prefix(9), "111/111"),
    "documents": (Documents.from_lengths([2, 1, 2]), "11000/11000/00100/00011/00011"),
    "documents, padding ids": (Documents([3, 3, -1, -1, 0]), "11000/11000/00000/00000/00001"),
    "documents, queries at the end": (Documents([0, 0, 7, 7]), "0011/0011"),
    "documents, ids too few": (Documents([0, 0]), "1100/1100/0000/0000"),
    "chunked": (Chunked(2), "11000/11000/00110/00110/00001"),
    "chunked, n < s": (Chunked(2), "00110/00110/00001"),
    "lengths": (Lengths([2]), "1100/1100/1100"),
    "lengths, padded left": (Lengths([2], [1]), "0110/0110/0110"),
    "lengths of nothing": (Lengths([0]), "00/00"),
    "where function": (Where(lambda b, h, i, j: (i + j) % 2 == 0), "101/010/101"),
    "where table": (Where(CHECKER), "1010/0101/1010"),
    "where table as a list": (Where([[True, False], [True, True]]), "10/11"),
    "where table, rows and keys past its end": (Where(np.ones((2, 2), bool), start=1), "1100/1100/0000"),
    "where table, queries before its start": (Where(np.ones((2, 2), bool), start=1), "000/110/110"),
    "and": (Causal() & Window(1, None), "1000/1100/0110/0011"),
    "and of three": (Causal() & Documents.from_lengths([3, 2]) & Window(1), "10000/11000/01100/00010/00011"),
    "and with a table": (Causal("top-left") & Where(CHECKER), "1000/0100/1010"),
    "chunked causal": (Chunked(3) & Causal(), "10000/11000/11100/00010/00011"),
}


@pytest.mark.parametrize("name", GRIDS)
def test_a_mask_is_its_literal_grid(name):
    mask, text = GRIDS[name]
    expected = literal(text)
    problem = problem_of(mask, 1, *expected.shape)
    np.testing.assert_array_equal(whole(problem)[0, 0], expected)
    np.testing.assert_array_equal(np.broadcast_to(problem.keep(), (1, 1, *expected.shape))[0, 0], expected)


BY_ENTRY = {
    "prefix": (Prefix([1, 3]), ["100/110/111", "111/111/111"]),
    "prefix, torch": (Prefix(torch.tensor([1, 3])), ["100/110/111", "111/111/111"]),
    "lengths": (Lengths([1, 3]), ["1000/1000", "1110/1110"]),
    "lengths, one for all": (Lengths([3]), ["1110/1110", "1110/1110"]),
    "lengths, padded left": (Lengths([2, 0], [1, 2]), ["0110/0110", "0000/0000"]),
    "documents": (Documents([[0, 1, 1], [5, 5, -1]]), ["100/011/011", "110/110/000"]),
    "where table": (Where(np.stack([CHECKER, ~CHECKER])[:, None]), ["1010/0101/1010", "0101/1010/0101"]),
    "where function": (Where(lambda b, h, i, j: j == b), ["100", "010"]),
    "and": (Causal() & Lengths([3, 1]), ["1000/1100/1110/1110", "1000/1000/1000/1000"]),
}


@pytest.mark.parametrize("name", BY_ENTRY)
def test_each_batch_entry_has_its_literal_grid(name):
    mask, texts = BY_ENTRY[name]
    expected = np.stack([literal(text) for text in texts])
    problem = problem_of(mask, *expected.shape)
    np.testing.assert_array_equal(whole(problem)[:, 0], expected)
    np.testing.assert_array_equal(np.broadcast_to(problem.keep()[:, 0], expected.shape), expected)


def test_each_head_has_its_own_point_test():
    problem = problem_of(Where(lambda b, h, i, j: j == h) & Full(), 1, 1, 3, h=3)
    np.testing.assert_array_equal(whole(problem)[0, :, 0], np.eye(3, dtype=bool))


def test_a_window_counts_other_keys():
    assert whole(problem_of(Window(3, 0), 1, 11, 11)).sum(-1).max() == 4
    assert whole(problem_of(Window(3, 2), 1, 11, 11)).sum(-1).max() == 6


@pytest.mark.parametrize("size", [-1, -7])
def test_negative_sizes_are_refused(size):
    for make in (lambda: Window(size), lambda: Window(0, size), lambda: Prefix(size), lambda: Chunked(size)):
        with pytest.raises(OptionError, match=str(size)):
            make()
    with pytest.raises(OptionError, match="at least 1"):
        Chunked(0)


def test_two_alignments_do_not_meet():
    with pytest.raises(OptionError, match="bottom-right and top-left"):
        _ = Causal() & Causal("top-left")
    with pytest.raises(OptionError, match="middle"):
        Causal("middle")  # type: ignore[arg-type]


def test_arrays_must_fit_the_batch_and_the_heads():
    for mask in (Lengths([1, 2, 3]), Lengths([1], [0, 0, 0]), Prefix([1, 2, 3]), Documents(np.zeros((3, 4), int))):
        with pytest.raises(ShapeError, match="axis b"):
            problem_of(mask & Full(), 2, 3, 4)
    with pytest.raises(ShapeError, match="axis h"):
        problem_of(Where(np.ones((1, 3, 3, 4), bool)), 2, 3, 4, h=2)
    with pytest.raises(DtypeError, match="boolean"):
        Where(np.ones((3, 4)))
    with pytest.raises(ShapeError, match="b h n s"):
        Where(np.ones(4, bool))


# documents from position ids


@pytest.mark.parametrize("array", [np.array, torch.tensor], ids=["numpy", "torch"])
@pytest.mark.parametrize(
    ("positions", "ids"),
    [
        ([0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 1, 2]),
        ([5, 6, 7, 3, 4, 9], [0, 0, 0, 1, 1, 2]),
        ([0, 0, 0], [0, 1, 2]),
        ([4], [0]),
        ([[0, 1, 2, 3], [7, 8, 0, 1]], [[0, 0, 0, 0], [0, 0, 1, 1]]),
    ],
)
def test_position_ids_start_a_document_wherever_they_do_not_go_up_by_one(array, positions, ids):
    documents = Documents.from_position_ids(array(positions))
    np.testing.assert_array_equal(np.asarray(documents.ids), ids)
    documents.check_values()


def test_an_id_that_comes_back_is_refused():
    for ids in ([0, 1, 0], [[0, 0, 1], [2, 1, 2]]):
        with pytest.raises(OptionError, match="one run"):
            (Causal() & Documents(ids)).check_values()
    Documents([0, -1, 1, -1, -1]).check_values()  # padding may come back


# against a loop over `keep`


@st.composite
def laid_out(draw: st.DrawFn) -> tuple[int, int, Side, Side]:
    """Batch, heads and both sides."""
    batch, heads = draw(BATCHES), draw(st.sampled_from([1, 2]))
    return batch, heads, draw(sides(batch, draw(COUNTS))), draw(sides(batch, draw(COUNTS), 0))


def brute(mask: Mask, heads: int, q: np.ndarray, kv: np.ndarray) -> np.ndarray:
    """`keep` asked of one pair at a time."""
    grid = np.zeros((len(q), heads, q.shape[1], kv.shape[1]), bool)
    for b, h, i, j in np.ndindex(grid.shape):
        grid[b, h, i, j] = mask.keep(q[b, i], kv[b, j], b, h)
    return grid


def slices(size: int) -> st.SearchStrategy[slice]:
    return st.tuples(st.integers(0, size), st.integers(0, size)).map(lambda ends: slice(*sorted(ends)))


def kind_of(grid: np.ndarray) -> Tile:
    return Tile.EMPTY if not grid.any() else Tile.FULL if grid.all() else Tile.PARTIAL


@given(st.data())
@settings(max_examples=250, deadline=None)
def test_grid_bounds_and_tile_agree_with_keep(data):
    batch, heads, q, kv = data.draw(laid_out())
    mask = data.draw(masks(batch, heads)).bind((0, 0), heads)
    layout = Dense(batch, q.positions, kv.positions)
    first = data.draw(st.integers(0, batch - 1))
    b = slice(first, data.draw(st.integers(first + 1, batch)))
    i, j = data.draw(slices(q.positions.count)), data.draw(slices(kv.positions.count))
    expected = brute(mask, heads, q.rows, kv.rows)
    part = expected[b, :, i, j]
    np.testing.assert_array_equal(np.broadcast_to(mask.grid(layout, b, i, j), part.shape), part)

    first, past = (np.broadcast_to(x, (b.stop - b.start, i.stop - i.start)) for x in mask.bounds(layout, b, i))
    assert (first >= 0).all() and (past <= kv.positions.count).all() and (first <= past).all()
    column = np.arange(kv.positions.count)
    inside = (first[..., None] <= column) & (column < past[..., None])
    seen = expected[b, :, i].any(1)
    assert (seen <= inside).all()
    if not mask.pointwise:
        np.testing.assert_array_equal(inside, seen)

    cuts = sorted(data.draw(st.sets(st.integers(1, max(kv.positions.count - 1, 1)), max_size=4)) | {0, kv.positions.count})
    edges = np.array(cuts if kv.positions.count else [0])
    tiles = mask.tiles(layout, b, i, edges)
    assert tiles.tolist() == [kind_of(expected[b, :, i, lo:hi]) for lo, hi in pairwise(edges)]
    assert mask.tile(q.positions.cut(i), kv.positions.cut(j), batch, heads) == kind_of(expected[:, :, i, j])


@pytest.mark.parametrize(
    "kv", [Positions(5), Positions(5, start=np.array([1, 2])), Positions.of(np.array([[0, 1, 2, 5, 6]] * 2))]
)
@pytest.mark.parametrize("mask", [Full(), Causal() & Lengths([3, 4]), Where(lambda b, h, i, j: i != j)])
def test_no_batch_entries_have_no_bounds_and_no_grid(mask, kv):
    layout = Dense(2, Positions(3), kv)
    first, past = mask.bounds(layout, slice(1, 1), slice(0, 3))
    assert first.size == past.size == 0
    assert mask.grid(layout, slice(1, 1), slice(0, 3), slice(0, 5)).size == 0


def test_a_table_by_sequence_is_not_asked_about_rows_of_no_sequence():
    table = np.stack([np.ones((2, 2), bool), np.eye(2, dtype=bool)])[:, None]
    x = Inputs(np.zeros((1, 5, 1, 1)), np.zeros((1, 5, 1, 1)), np.zeros((1, 5, 1, 1)))
    problem = Problem.describe(x, Options(Where(table, start=0), ragged=Ragged.from_lengths([2, 2])))
    expected = literal("11000/11000/00100/00010/00000")
    np.testing.assert_array_equal(whole(problem)[0, 0], expected)
    np.testing.assert_array_equal(problem.keep()[0, 0], expected)


@given(st.data())
@settings(max_examples=120, deadline=None)
def test_and_is_a_commutative_idempotent_monoid(data):
    batch, heads, q, kv = data.draw(laid_out())
    layout = Dense(batch, q.positions, kv.positions)
    everything = slice(0, batch), slice(0, q.positions.count), slice(0, kv.positions.count)

    def grid(mask: Mask) -> np.ndarray:
        shape = batch, heads, q.positions.count, kv.positions.count
        return np.broadcast_to(mask.bind((0, 0), heads).grid(layout, *everything), shape)

    a, b, c = (data.draw(masks(batch, heads)) for _ in range(3))
    np.testing.assert_array_equal(grid(a & b), grid(a) & grid(b))
    np.testing.assert_array_equal(grid(a & b), grid(b & a))
    np.testing.assert_array_equal(grid((a & b) & c), grid(a & (b & c)))
    np.testing.assert_array_equal(grid(a & a), grid(a))
    np.testing.assert_array_equal(grid(Full() & a), grid(a))
    np.testing.assert_array_equal(grid(a & Full()), grid(a))


def test_bounds_reach_as_far_as_int64():
    far = 2**40
    layout = Dense(1, Positions(3, start=far), Positions(5, start=far - 1))
    grid = (Causal() & Window(1)).grid(layout, slice(0, 1), slice(0, 3), slice(0, 5))
    np.testing.assert_array_equal(grid[0, 0], literal("11000/01100/00110"))


@pytest.mark.parametrize("size", [2**31, 2**60, 2**63 - 1])
def test_a_window_as_large_as_an_integer_can_be_is_no_limit(size):
    problem = problem_of(Window(size, size), 1, 3, 5)
    assert whole(problem).all() and problem.keep().all()


# text


def same(a: Mask, b: Mask) -> bool:
    """Equal as text, integers and arrays."""
    x, y = a.encode(), b.encode()
    arrays = len(x.arrays) == len(y.arrays) and all(np.array_equal(m, n) for m, n in zip(x.arrays, y.arrays, strict=True))
    return (x.text, x.ints) == (y.text, y.ints) and arrays


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_parse_is_the_inverse_of_encode(data):
    batch, heads, q, kv = data.draw(laid_out())
    mask = data.draw(masks(batch, heads, data.draw(st.sampled_from(["bottom-right", "top-left"])))).bind((0, 0), heads)
    again = parse(*mask.encode()).bind((0, 0), heads)
    assert same(mask, again)
    np.testing.assert_array_equal(brute(again, heads, q.rows, kv.rows), brute(mask, heads, q.rows, kv.rows))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_encodings_tell_different_masks_apart(data):
    a, b = data.draw(simple_masks(1, 1)), data.draw(simple_masks(1, 1))
    q, kv = np.arange(11)[None], np.arange(13)[None]
    if not np.array_equal(brute(a, 1, q, kv), brute(b, 1, q, kv)):
        assert not same(a, b)


@pytest.mark.parametrize(
    ("text", "mask"),
    [
        ("causal", Causal()),
        (" causal() ", Causal()),
        ("causal(align='top-left')", Causal("top-left")),
        ("full & window(3, 0)", Full() & Window(3, 0)),
        ("window(left=3)", Window(3)),
        ("window(None, 2) & (causal & chunked(size=5))", Window(None, 2) & Causal() & Chunked(5)),
        ("prefix(4) & lengths([3, 5], first=[1, 0])", Prefix(4) & Lengths([3, 5], [1, 0])),
        ("prefix([4, 2])", Prefix([4, 2])),
        ("documents([0, 0, 1])", Documents([0, 0, 1])),
        ("where([[True, False], [False, True]])", Where([[True, False], [False, True]])),
    ],
)
def test_text_is_read(text, mask):
    assert same(parse(text), mask)


BAD = [
    "", "causal(", "causal &", "causal | full", "~causal", "causal; full", "causal = full", "causal and full", "3", "'causal'",
    "nothing", "Causal", "mask.causal", "causal.keep", "causal.__class__", "causal().__class__()", "__import__('os')",
    "__import__('os').getcwd()", "causal(__import__('os').getcwd())", "window(left=open('x'))", "prefix(len([1]))", "prefix(n)",
    "(lambda: causal)()", "[causal for _ in 'x']", "causal if 1 else full", "causal()()", "window(3)(4)", "f'{causal}'",
    "causal('middle')", "causal(3)", "window(-1)", "window(0, -2)", "window(1, 2, 3)", "window(up=3)", "window('3')",
    "prefix", "prefix()", "prefix(-1)", "prefix('a')", "chunked", "chunked(0)", "documents", "full(1)", "where", "where(3)",
    "where([[1, 0], [0, 1]])", "prefix(INT)", "lengths(ARRAY)", "window(*[1, 2])", "window(**{'left': 3})", "prefix({[]: 1})",
    "prefix([1, [2]])", "causal\0", "window(" * 300,
]  # fmt: skip


@pytest.mark.parametrize("text", BAD, ids=[text[:40].replace("\0", "NUL") or "empty" for text in BAD])
def test_text_that_is_no_mask_is_refused(text):
    with pytest.raises(OptionError):
        parse(text)


def test_text_is_never_evaluated(tmp_path):
    touched = tmp_path / "touched"
    for text in (
        f"open({str(touched)!r}, 'w')",
        f"prefix(open({str(touched)!r}, 'w'))",
        f"window(left=[open({str(touched)!r}, 'w')])",
    ):
        with pytest.raises(OptionError):
            parse(text)
    assert not touched.exists()
