"""Random masks, positions and problems for hypothesis, small enough to be compared with loops over every pair."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import and_
from typing import NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

from tilewise.mask import Causal, Chunked, Documents, Full, Lengths, Mask, Prefix, Where, Window
from tilewise.positions import Positions
from tilewise.problem import Inputs, Options
from tilewise.ragged import Ragged

COUNTS = st.sampled_from([0, 1, 2, 3, 5, 7, 11, 13])
BATCHES = st.sampled_from([1, 2, 3])
FIRST, PAST = -7, 61
"""Every position lies in [FIRST, PAST), those of keys from 0."""


class Side(NamedTuple):
    """Positions as the library holds them, and the same ones as plain integers "b count"."""

    positions: Positions
    rows: np.ndarray


@st.composite
def sides(draw: st.DrawFn, batch: int, count: int, first: int = FIRST) -> Side:
    """One side of a dense problem: arithmetic rows, starts by entry, rows one by one, or rows by entry."""
    kind = draw(st.sampled_from(["number", "starts", "rows", "rows by entry"]))
    array: Callable = draw(st.sampled_from([np.asarray, torch.tensor]))
    if kind in ("number", "starts"):
        step = draw(st.integers(1, 3))
        starts = draw(st.lists(st.integers(first, 20), min_size=batch, max_size=batch))
        start = starts[0] if kind == "number" else array(starts)
        rows = [[x + step * r for r in range(count)] for x in (starts if kind == "starts" else starts[:1] * batch)]
        return Side(Positions(count, start, step), np.array(rows, np.int64).reshape(batch, count))
    one = st.lists(st.integers(first, PAST - 1), min_size=count, max_size=count, unique=True).map(sorted)
    rows = np.array(draw(st.lists(one, min_size=batch, max_size=batch)), np.int64).reshape(batch, count)
    if kind == "rows":
        rows = np.broadcast_to(rows[:1], rows.shape)
        return Side(Positions.of(array(rows[0].tolist()) if count else rows[0]), rows)
    return Side(Positions.of(array(rows.tolist()) if count else rows), rows)


@st.composite
def documents(draw: st.DrawFn, batch: int) -> Documents:
    """Runs of distinct ids, with padding between them, for all entries or one row an entry."""
    entries = draw(st.sampled_from([1, batch]))
    rows = []
    for _ in range(entries):
        lengths = draw(st.lists(st.integers(0, 11), min_size=1, max_size=6))
        ids = draw(st.permutations(range(len(lengths))))
        padding = draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
        rows.append(np.repeat(np.where(padding, -1, ids), lengths))
    size = max(len(row) for row in rows)
    table = np.stack([np.pad(row, (0, size - len(row)), constant_values=-1) for row in rows])
    return Documents(table if entries > 1 or draw(st.booleans()) else table[0])


@st.composite
def wheres(draw: st.DrawFn, batch: int, heads: int, tables: bool = True) -> Where:
    """A function of all four indices, or a table that covers every position."""
    if tables and draw(st.booleans()):
        seed, share = draw(st.integers(0, 2**16)), draw(st.sampled_from([0.1, 0.5, 0.95]))
        shape = draw(st.sampled_from([1, batch])), draw(st.sampled_from([1, heads])), PAST - FIRST, PAST
        return Where(np.random.default_rng(seed).random(shape) < share, start=FIRST)
    down, across, period = draw(st.integers(0, 5)), draw(st.integers(0, 5)), draw(st.integers(1, 7))
    return Where(lambda b, h, i, j: (down * i + across * j + 2 * h + 3 * b) % period == 0)


def simple_masks(batch: int, heads: int, align: str = "bottom-right", tables: bool = True) -> st.SearchStrategy[Mask]:
    """Any mask but `&`, with arrays that have one entry, or one a batch entry."""
    sizes = st.integers(0, 40)
    by_entry = st.sampled_from([1, batch]).flatmap(lambda n: st.lists(sizes, min_size=n, max_size=n)).map(np.array)
    limits = st.none() | st.integers(0, 17)
    return st.one_of(
        st.just(Full()),
        st.just(Causal(align)),  # type: ignore[arg-type]
        st.builds(Window, limits, limits),
        st.builds(Prefix, sizes | by_entry),
        st.builds(Chunked, st.integers(1, 19)),
        st.builds(Lengths, by_entry, st.none() | by_entry),
        documents(batch),
        wheres(batch, heads, tables),
    )


def masks(batch: int, heads: int, align: str = "bottom-right", tables: bool = True) -> st.SearchStrategy[Mask]:
    """Any mask, `&` included."""
    return st.lists(simple_masks(batch, heads, align, tables), min_size=1, max_size=3).map(lambda parts: reduce(and_, parts))


@st.composite
def questions(draw: st.DrawFn) -> tuple[Inputs[np.ndarray], Options]:
    """Arrays and options of a small call, dense or packed, with every score option."""
    h = draw(st.sampled_from([1, 2, 3])) * (g := draw(st.sampled_from([1, 2])))
    d, e = draw(st.sampled_from([(2, 3), (3, 1), (5, 2)]))
    ragged = positions = None
    if draw(st.booleans()):
        lengths = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), min_size=1, max_size=4)
        ragged = Ragged.from_lengths(*zip(*draw(lengths), strict=True))
        b, n, s = 1, int(ragged.q_offsets[-1]) + draw(st.integers(0, 2)), int(ragged.kv_offsets[-1]) + draw(st.integers(0, 2))
        mask = draw(masks(ragged.sequences, h))
    else:
        b, n, s = draw(BATCHES), draw(COUNTS), draw(COUNTS)
        if draw(st.booleans()):
            positions = draw(sides(b, n)).positions, draw(sides(b, s, 0)).positions
        align = "bottom-right" if positions is not None else draw(st.sampled_from(["bottom-right", "top-left"]))
        mask = draw(masks(b, h, align, tables=positions is not None))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    bias = draw(st.none() | st.sampled_from([(b, h, n, s), (h, 1, s), (n, 1), (s,), ()]))
    alibi = draw(st.none() | st.sampled_from([(h,), (b, h), (1, h)]))
    inputs = Inputs(
        rng.normal(size=(b, n, h, d)),
        rng.normal(size=(b, s, g, d)),
        rng.normal(size=(b, s, g, e)),
        None if bias is None else np.asarray(rng.normal(size=bias)),
        None if alibi is None else np.abs(rng.normal(size=alibi)),
        rng.normal(size=h) if draw(st.booleans()) else None,
    )
    return inputs, Options(mask, softcap=draw(st.none() | st.just(2.0)), positions=positions, ragged=ragged)
