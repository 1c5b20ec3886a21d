"""Dropout is a function of (seed, b, h, i, j): known answers, two implementations, and any way to cut the same problem."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise._errors import OptionError
from tilewise.backends.torch.dropout import keep as torch_keep
from tilewise.backends.torch.dropout import philox as torch_philox
from tilewise.backends.torch.tile import Chunk
from tilewise.dropout import Dropout, philox
from tilewise.mask import Tile
from tilewise.positions import Positions
from tilewise.problem import Inputs, Options, Problem
from tilewise.ragged import Ragged
from tilewise.reference import plain
from tilewise.tiles import Visit, blocks

KNOWN = {  # Random123 1.09, tests/kat_vectors: philox4x32 10
    "zeros": ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    "ones": ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    "pi": (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
}
FALSE_ALARM = 1e-9
"""Chance that a count of fair coins lies outside its bound."""


@pytest.mark.parametrize("name", KNOWN)
def test_philox_gives_the_known_answers(name):
    counter, key, words = KNOWN[name]
    assert tuple(int(w) for w in philox(tuple(np.array(c) for c in counter), key)) == words
    tensors = tuple(torch.tensor(c, dtype=torch.int64) for c in counter)
    assert tuple(int(w) for w in torch_philox(tensors, key)) == words  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 2**32 - 1), min_size=6, max_size=6))
@settings(max_examples=100, deadline=None)
def test_both_philox_agree(words):
    counter, key = words[:4], (words[4], words[5])
    expected = [int(w) for w in philox(tuple(np.array(c) for c in counter), key)]
    assert [int(w) for w in torch_philox(tuple(torch.tensor(c) for c in counter), key)] == expected  # type: ignore[arg-type]


POSITIONS = st.one_of(st.integers(-40, 40), st.integers(-(2**33), 2**33), st.integers(2**31 - 5, 2**31 + 5))


@st.composite
def positions(draw: st.DrawFn, entries: int, count: int) -> np.ndarray:
    """ "entries count": neighbours, strided, or anywhere, in any order."""
    if draw(st.booleans()):
        return draw(POSITIONS) + draw(st.integers(1, 9)) * np.tile(np.arange(count), (entries, 1))
    return np.array(draw(st.lists(POSITIONS, min_size=entries * count, max_size=entries * count))).reshape(entries, count)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_both_implementations_keep_the_same_pairs(data):
    batch, groups, group, rows, cols = (
        data.draw(st.sampled_from(sizes)) for sizes in ([1, 3], [1, 2], [1, 3], [1, 5], [1, 7, 13])
    )
    dropout = Dropout(data.draw(st.floats(0.01, 0.99)), data.draw(st.integers(0, 2**64 - 1)))
    i = data.draw(positions(data.draw(st.sampled_from([1, batch])), rows))[:, None, None, :, None]
    j = data.draw(positions(data.draw(st.sampled_from([1, batch])), cols))[:, None, None, None, :]
    sequence = np.arange(batch).reshape(-1, 1, 1, 1, 1) + data.draw(st.integers(0, 2**31))
    head = np.arange(groups * group).reshape(1, groups, group, 1, 1) + data.draw(st.integers(0, 64))
    found = torch_keep(dropout, *(torch.from_numpy(np.asarray(x)) for x in (sequence, head, i, j))).numpy()
    expected = dropout.keep(sequence, head, i, j)
    np.testing.assert_array_equal(np.broadcast_to(found, expected.shape), expected)


def outside(kept: np.ndarray, chance: float) -> bool:
    """True where a count of independent coins is further from its mean than Hoeffding's bound allows."""
    return abs(kept.sum() - kept.size * chance) > np.sqrt(kept.size * np.log(2 / FALSE_ALARM) / 2)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_the_share_kept_is_one_minus_the_rate_and_what_is_kept_makes_up_for_it(rate):
    axes = np.ogrid[0:2, 0:3, 0:211, 0:503]
    keep = Dropout(rate, seed=17).keep(*axes)
    assert not outside(keep, 1 - rate)
    for lane in range(4):
        assert not outside(keep[..., lane::4], 1 - rate)
    assert not outside(keep[..., 1:] & keep[..., :-1], (1 - rate) ** 2)
    assert not outside(keep[:, :, 1:] & keep[:, :, :-1], (1 - rate) ** 2)
    assert not outside(keep[:, 1:] & keep[:, :-1], (1 - rate) ** 2)
    assert abs(Dropout(rate, 17).scale * (1 - rate) - 1) <= np.finfo(float).eps
    assert outside(keep, 1 - rate + 0.005) and outside(keep, 1 - rate - 0.005)


def test_seeds_heads_and_entries_have_patterns_of_their_own():
    axes = np.ogrid[0:3, 0:3, 0:31, 0:37]
    seeds = (0, 1, 2**32, 2**32 + 1, 2**63)
    patterns = [pattern for seed in seeds for entry in Dropout(0.5, seed).keep(*axes) for pattern in entry]
    for one, other in combinations(patterns, 2):
        assert not outside(one == other, 0.5)
    assert outside(patterns[0] == Dropout(0.5, 0).keep(0, 0, *np.ogrid[0:31, 0:37]), 0.5)  # the same one agrees everywhere


def test_nothing_is_dropped_at_rate_0_and_rates_outside_are_refused():
    assert Dropout(0.0, 3).keep(*np.ogrid[0:2, 0:2, 0:31, 0:37]).all()
    for rate in (-0.1, 1.0, 1.5, float("nan")):
        with pytest.raises(OptionError, match="dropout"):
            Dropout(rate, 3)


# one pattern however the problem is cut

DROPOUT = Dropout(0.4, seed=2**40 + 7)


def problem_of(b: int, n: int, s: int, options: Options = Options(), h: int = 6, g: int = 3) -> tuple[Problem, Inputs]:
    x = Inputs(torch.zeros(b, n, h, 1).double(), torch.zeros(b, s, g, 1).double(), torch.zeros(b, s, g, 1).double())
    return Problem.describe(x, replace(options, dropout=DROPOUT)), x


def assembled(problem: Problem, x: Inputs, rows: int, cols: int, batch: int, key_heads: int) -> np.ndarray:
    """The factor "b h n s" that the torch backend multiplies by, put together from the tiles of one configuration."""
    whole = torch.full((problem.b, problem.h, problem.n, problem.s), torch.nan, dtype=torch.float64)
    for b in blocks(problem.b, batch):
        for g in blocks(problem.g, key_heads):
            chunk = Chunk(problem, x, b, g)
            for i in blocks(problem.n, rows):
                for j in blocks(problem.s, cols):
                    tile = chunk.drop(Visit(b, i, j, Tile.FULL))
                    assert isinstance(tile, torch.Tensor)
                    whole[b, chunk.heads, i, j] = chunk.split(tile).flatten(1, 2)
    return whole.numpy()


@pytest.mark.parametrize("cut", [(1, 1, 1, 1), (7, 5, 2, 2), (16, 64, 3, 1), (3, 11, 1, 3), (37, 53, 3, 3)])
def test_the_pattern_does_not_depend_on_tiles_or_splits(cut):
    problem, x = problem_of(3, 13, 17)
    b, h, i, j = np.ogrid[0:3, 0:6, 4:17, 0:17]  # the last of 13 queries sits at the last of 17 keys
    expected = DROPOUT.keep(b, h, i, j) * DROPOUT.scale
    np.testing.assert_array_equal(plain.dropout_factor(problem), expected)
    np.testing.assert_array_equal(assembled(problem, x, *cut), expected)


def test_packed_sequences_have_the_pattern_of_separate_ones():
    q, kv = [3, 0, 5, 2], [7, 2, 5, 1]
    packed, x = problem_of(1, sum(q), sum(kv), Options(ragged=Ragged.from_lengths(q, kv)))
    start = np.array(kv) - np.array(q)
    apart, y = problem_of(4, 5, 7, Options(positions=(Positions(5, start), Positions(7))))
    for whole, separate in (
        (plain.dropout_factor(packed), plain.dropout_factor(apart)),
        (assembled(packed, x, 4, 3, 1, 2), assembled(apart, y, 4, 3, 3, 2)),
    ):
        at = np.cumsum([0, *q]), np.cumsum([0, *kv])
        for r in range(4):
            block = whole[0, :, at[0][r] : at[0][r + 1], at[1][r] : at[1][r + 1]]
            np.testing.assert_array_equal(block, separate[r, :, : q[r], : kv[r]])


@pytest.mark.parametrize("shards", [2, 3, 5])
def test_strided_and_contiguous_shards_have_the_pattern_of_the_whole(shards):
    whole, _ = problem_of(2, 31, 31)
    expected = plain.dropout_factor(whole)
    for rank in range(shards):
        rows = range(rank, 31, shards)
        strided = Positions(len(rows), rank, shards)
        first = rank * (31 // shards)
        near = Positions(31 // shards, first)
        for q, kv in ((strided, near), (near, strided), (strided, strided)):
            problem, x = problem_of(2, q.count, kv.count, Options(positions=(q, kv)))
            part = expected[:, :, q.array()[0]][..., kv.array()[0]]
            np.testing.assert_array_equal(plain.dropout_factor(problem), part)
            np.testing.assert_array_equal(assembled(problem, x, 4, 3, 1, 2), part)
