"""What happens, in the order in which every rank takes part: work of its own, the start of messages, waiting for them. A plan's
programs read as such a list (`replay`), and so does a forecast that never writes programs (`outline`)."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..mask import Tile
from .prices import Prices
from .program import Add, Backward, Buffer, Copy, Finish, Forward, Merge, Op, Plan, Post, Wait
from .sight import area
from .verify import buffers_of

KINDS = ("compute", "merge", "copy")
"""Kinds of work: blocks of attention; merges, sums and finishing; copies between buffers."""


class Work(NamedTuple):
    """Seconds of each rank, how many operations that are, and for blocks of attention the pairs it works on, times heads."""

    kind: str
    seconds: np.ndarray
    pairs: np.ndarray
    calls: np.ndarray


class Sent(NamedTuple):
    """A step's messages: `size` bytes from rank `source` to rank `target`, arrays of the same length."""

    step: int
    channel: str
    source: np.ndarray
    target: np.ndarray
    size: np.ndarray


class Awaited(NamedTuple):
    """Every rank waits until its messages of a step are through."""

    step: int


Event = Work | Sent | Awaited


def replay(plan: Plan, prices: Prices) -> list[Event]:
    """A plan's programs as events. Every rank posts and awaits the same steps in the same order (`verify.check_steps`)."""
    parts = [_parted(program.ops) for program in plan.programs]
    buffers = [buffers_of(plan, r) for r in range(plan.world)]
    events: list[Event] = []
    for stage in zip(*parts, strict=True):
        events += _work([ops[:-1] if x else ops for ops, x in stage], buffers, prices)
        last = [ops[-1] for ops, x in stage if x]
        if last and isinstance(last[0], Wait):
            events.append(Awaited(last[0].step))
        elif last:
            posts = [op for op in last if isinstance(op, Post)]
            found = [
                (r, x.peer, x.view.rows.count * x.view.heads.count * plan.row_bytes(buffers[r][x.view.buffer].kind, wire=True))
                for r, post in enumerate(posts)
                for x in post.sends
            ]
            events.append(Sent(posts[0].step, posts[0].channel, *np.array(found, np.int64).reshape(-1, 3).T))
    return events


def _parted(ops: tuple[Op, ...]) -> list[tuple[list[Op], bool]]:
    """Operations up to and including each post or wait; the rest last."""
    parts: list[tuple[list[Op], bool]] = [([], False)]
    for op in ops:
        parts[-1][0].append(op)
        if isinstance(op, Post | Wait):
            parts[-1] = parts[-1][0], True
            parts.append(([], False))
    return parts


def _work(ops: list[list[Op]], buffers: list[dict[str, Buffer]], prices: Prices) -> list[Work]:
    plan = prices.plan
    seconds, calls = ({kind: np.zeros(plan.world) for kind in KINDS} for _ in range(2))
    pairs = np.zeros(plan.world)

    def note(kind: str, rank: int, price: np.ndarray) -> None:
        seconds[kind][rank] += price
        calls[kind][rank] += price > 0

    for r, mine in enumerate(ops):
        for before, op in pairwise((None, *mine)):
            if isinstance(before, Forward) and isinstance(op, Merge) and before.into == op.source:
                seconds["merge"][r] += prices.onto("part", op.into.rows.count, op.into.heads.count)  # by the block's kernel
            elif isinstance(op, Forward | Backward):
                seen, heads = area(plan.problem, op.block.q, op.block.kv), op.block.heads.count
                note("compute", r, prices.attend(op.block.q.count, seen, heads, op.block.kind == Tile.FULL))
                pairs[r] += seen * heads
            elif isinstance(op, Merge | Add | Copy):
                kind = buffers[r][op.into.buffer].kind
                price = prices.copy if isinstance(op, Copy) else prices.combine
                name = "copy" if isinstance(op, Copy) else "merge"
                note(name, r, price(kind, op.into.rows.count, op.into.heads.count))
            elif isinstance(op, Finish):
                note("merge", r, prices.finish(op.part.rows.count, op.part.heads.count))
    some = [kind for kind in KINDS if seconds[kind].any()]
    return [Work(kind, seconds[kind], pairs if kind == "compute" else 0 * pairs, calls[kind]) for kind in some]
