"""What a plan's mask hides, found out once a plan: intervals, and the tiles that blocks visit where kernels cannot count
them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ...problem import Problem
from ...tiles import TileShape
from ..reads import blocks
from ..remember import remember
from ..sight import Sight, look
from .config import Config
from .roster import in_order, lengths, roster


def looked_at(problem: Problem, config: Config, like: Tensor) -> Sight:
    """What the mask hides, where `like` is."""
    return remember(config.known, "sight", like, lambda: look(problem, like))


def visits_of_rows(problem: Problem, sight: Sight, config: Config, like: Tensor) -> Tensor | None:
    """The tiles of keys that each block of query rows visits, where rows have intervals of their own: int32 "b blocks 4"; b
    is 1 where batch entries agree."""
    if sight.first is None:
        return None
    return remember(config.known, "visits", like, lambda: survey_rows(sight, problem.s, config.forward.shape))


_in_graphs: dict[int, Tensor] = {}
"""What graphs read that have been captured: nobody knows how long they live."""


def roster_of(problem: Problem, sight: Sight, config: Config, programs: int, like: Tensor) -> Tensor | None:
    """Which blocks of query rows each program of forward does under a band; see `roster` and `settled`."""

    def table() -> np.ndarray:
        found = lengths(problem.n, problem.s, (sight.left, sight.right), config.forward)
        return roster(in_order(found, problem.b * problem.h, config.span), programs)

    return settled("roster", config, like, table)


def settled(name: str, config: Config, like: Tensor, table: Callable[[], np.ndarray]) -> Tensor | None:
    """A roster that a plan keeps, where `like` is. None while a graph is being captured, which can hold no copy from the host,
    and no call before has asked; else the graph's for good."""
    known, captured = config.known.get(name), like.is_cuda and torch.cuda.is_current_stream_capturing()
    if captured and known is not None:
        _in_graphs[id(known)] = known
    elif known is None and not captured:
        known = config.known[name] = torch.from_numpy(table()).to(like.device)
    return known


def survey_rows(sight: Sight, s: int, shape: TileShape) -> Tensor:
    """(lo, full_lo, full_hi, hi) of each block: some row sees something of the tiles from lo to hi, and every row sees all of
    those from full_lo to full_hi. Rows past the end do not count."""
    first, past = sight.first, sight.past
    assert first is not None and past is not None
    sees = first < past
    lo = _by_block(first.where(sees, s), shape.block_m, s).amin(-1) // shape.block_n
    hi = (_by_block(past.where(sees, 0), shape.block_m, 0).amax(-1) + shape.block_n - 1) // shape.block_n
    full_lo = (_by_block(first, shape.block_m, 0).amax(-1) + shape.block_n - 1) // shape.block_n
    full_hi = _by_block(past, shape.block_m, s).amin(-1) // shape.block_n
    return torch.stack([lo, full_lo, full_hi, hi], -1).to(torch.int32).contiguous()


def _by_block(x: Tensor, size: int, rest: int) -> Tensor:
    """Rows "b n" as "b blocks size", filled up with `rest`."""
    whole = blocks(x.shape[1], size) * size
    return torch.nn.functional.pad(x, (0, whole - x.shape[1]), value=rest).unflatten(1, (-1, size))


def visits_of_keys(problem: Problem, sight: Sight, config: Config, shape: TileShape, like: Tensor) -> tuple[Tensor, Tensor]:
    """The blocks of query rows that each block of keys visits in backward, where rows have intervals of their own; see
    `survey_keys`."""
    return remember(config.known, ("visits of keys", shape), like, lambda: survey_keys(sight, problem.s, shape))


def survey_keys(sight: Sight, s: int, shape: TileShape) -> tuple[Tensor, Tensor]:
    """(lo, hi, full_lo, full_hi) of each block of keys, int32 "b key-blocks 4": some row of blocks lo to hi sees some of
    them, and all rows of blocks full_lo to full_hi see all. And for each block of rows the first and the last block of keys
    that visits it, "b row-blocks 2".

    lo and hi never decrease, so that the blocks of keys which visit a block of rows follow each other. Most masks are so; for
    others it means that some blocks are visited in vain."""
    first, past = sight.first, sight.past
    assert first is not None and past is not None
    sees = first < past
    first, past = first.where(sees, s), past.where(sees, 0)
    low, high = _by_block(first, shape.block_m, s).amin(-1)[:, None], _by_block(past, shape.block_m, 0).amax(-1)[:, None]
    most, least = _by_block(first, shape.block_m, 0).amax(-1)[:, None], _by_block(past, shape.block_m, s).amin(-1)[:, None]
    start = torch.arange(0, s, shape.block_n, device=first.device)[:, None]
    end = (start + shape.block_n).clamp(max=s)
    some, every = (low < end) & (high > start), (most <= start) & (least >= end)
    rows, index = low.shape[2], torch.arange(low.shape[2], device=first.device)
    hi = torch.where(some, index + 1, 0).amax(-1).cummax(-1).values
    lo = torch.where(some, index, rows).amin(-1).flip(-1).cummin(-1).values.flip(-1).minimum(hi)
    full_lo, full_hi = torch.where(every, index, rows).amin(-1), torch.where(every, index + 1, 0).amax(-1)
    run = every.sum(-1) == full_hi - full_lo
    visits = torch.stack([lo, hi, full_lo.where(run, lo), full_hi.where(run, lo)], -1)
    index = index.expand(len(hi), rows).contiguous()
    seen = torch.stack([torch.searchsorted(hi, index, right=True), torch.searchsorted(lo, index, right=True) - 1], -1)
    return visits.to(torch.int32).contiguous(), seen.to(torch.int32).contiguous()
