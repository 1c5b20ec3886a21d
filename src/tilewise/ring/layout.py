"""Names of layouts, and which one a mask asks for. Both a shard and a call find their rows here, so the same words give the
same rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from .._errors import OptionError, ShapeError
from ..mask import Causal, Chunked, Documents, Full, Mask, Prefix, Window, parse
from ..problem import Inputs, Options, Problem
from .owners import BY_NAME, Owners, balanced, parts_of, replicated
from .runs import Runs

LAYOUTS = (*BY_NAME, "balanced", "replicated")
"""The last one is of a decoding step: every rank has all queries, and any number of keys, in order."""


class Named(NamedTuple):
    """A layout by name, and the mask that it goes by: that of a call, unless many calls with masks of their own share rows."""

    name: str
    mask: Mask | None = None


def name_layout(layout: str, mask: Mask | None) -> str:
    """The layout that "auto" stands for: documents are shared out by area; a window, or chunks, keep neighbours together, so
    that only neighbours talk; what is causal otherwise is folded, so that early and late rows meet; anything else stays in
    order.

    >>> name_layout("auto", Causal()), name_layout("auto", Window(left=99, right=0)), name_layout("striped", None)
    ('zigzag', 'contiguous', 'striped')
    """
    if layout != "auto":
        if layout not in LAYOUTS:
            raise OptionError(f"layout must be auto, {', '.join(LAYOUTS)} or Owners, got {layout!r}")
        return layout
    parts = () if mask is None else parts_of(mask)
    if any(isinstance(part, Documents) for part in parts):
        return "balanced"
    if any(isinstance(part, Chunked) or (isinstance(part, Window) and part.left is not None) for part in parts):
        return "contiguous"
    causal = any(isinstance(part, Causal | Prefix) or (isinstance(part, Window) and part.right is not None) for part in parts)
    return "zigzag" if causal else "contiguous"


def lay_out(layout: Named, length: int, world: int, batch: int = 1) -> Owners:
    """The rows of each rank. `batch`: entries of the batch, which an array of the mask may tell apart."""
    name = name_layout(*layout)
    if name == "balanced":
        return balanced(_of_rows(length, layout.mask, batch), world)
    if name == "replicated":
        return replicated(length, world)
    return BY_NAME[name](length, world)


def lay_out_as_held(layout: Named, counts: Sequence[int], side: str, batch: int = 1) -> Owners:
    """The rows of each rank, where rank r holds `counts[r]` of them. In the contiguous layout a rank may hold any number."""
    length, world, name = sum(counts), len(counts), name_layout(*layout)
    if name == "replicated" and side == "q":
        other = next((rank for rank, count in enumerate(counts) if count != counts[0]), None)
        if other is not None:
            have = f"rank 0 holds {counts[0]} rows of q, rank {other} {counts[other]}"
            raise ShapeError(f"axis n: {have}; in the replicated layout every rank holds all of them")
        return replicated(counts[0], world)
    if name in ("contiguous", "replicated"):
        ends = np.cumsum([0, *counts]).tolist()
        return Owners(length, tuple(Runs.span(lo, hi) for lo, hi in pairwise(ends)))
    owners = lay_out(Named(name, layout.mask), length, world, batch)
    for rank, (have, want) in enumerate(zip(counts, owners.counts, strict=True)):
        if have != want:
            axis = "n" if side == "q" else "s"
            raise ShapeError(
                f"axis {axis}: rank {rank} holds {have} rows of {side}; of {length} rows over {world} ranks the {name} layout"
                f" gives it {want}"
            )
    return owners


def private(mask: Mask | None) -> Mask | None:
    """The same mask with arrays of its own, which no caller can change, and nothing remembered of what they once held."""
    if mask is None:
        return None
    text, ints, arrays = mask.encode()
    return parse(text, ints, [x.clone() if hasattr(x, "clone") else np.array(x) for x in arrays])


def _of_rows(length: int, mask: Mask | None, batch: int) -> Problem:
    """A problem of these rows among themselves, whose areas the rows are weighed by."""
    x = np.broadcast_to(np.float32(0), (batch, length, 1, 1))
    problem = Problem.describe(Inputs(x, x, x), Options(private(mask) or Full()))
    problem.check_values()
    return problem
