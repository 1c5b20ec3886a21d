"""Proves a plan: every visible pair exactly once, every message with one other end, no deadlock, nothing overwritten in
flight, gradients home once, and bytes and memory equal to `formulas`."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from .formulas import flow_bytes, peak_bytes
from .program import BATCH, Buffer, Free, Make, Plan, Post, Program, View
from .proof import Proof


def verify(plan: Plan) -> list[str]:
    """Everything that is wrong with a plan, each as a sentence; nothing for a plan that is right."""
    return [*check_steps(plan), *check_messages(plan), *Proof(plan).run(), *check_costs(plan)]


def check_steps(plan: Plan) -> list[str]:
    """Every rank posts the same steps in the same order, at most `BATCH` messages each."""
    posts = [posts_of(program) for program in plan.programs]
    order = [[(post.step, post.channel) for post in mine] for mine in posts]
    found = [f"rank {r} posts other steps than rank 0" for r, mine in enumerate(order) if mine != order[0]]
    for r, mine in enumerate(posts):
        for post in mine:
            size = len(post.sends) + len(post.recvs)
            if size > BATCH:
                found.append(f"rank {r}, step {post.step}: {size} messages at once, more than {BATCH}")
            if any(x.peer == r for x in (*post.sends, *post.recvs)):
                found.append(f"rank {r}, step {post.step}: a message to itself")
        if len({post.step for post in mine}) != len(mine):
            found.append(f"rank {r} posts a step twice")
    return found


def check_messages(plan: Plan) -> list[str]:
    """Every send meets one receive of the same kind, rows, heads and bytes in the same step, and the other way round."""
    ends: dict[tuple[int, int, int], tuple[list, list]] = defaultdict(lambda: ([], []))
    for r, program in enumerate(plan.programs):
        buffers = buffers_of(plan, r)
        for post in posts_of(program):
            for send in post.sends:
                ends[post.step, r, send.peer][0].append(_shape(buffers, send.view))
            for recv in post.recvs:
                ends[post.step, recv.peer, r][1].append(_shape(buffers, recv.view))
    return [
        f"step {step}: rank {a} sends rank {b} {sent}, which receives {received}"
        for (step, a, b), (sent, received) in sorted(ends.items())
        if sent != received
    ]


def check_costs(plan: Plan) -> list[str]:
    """Bytes between ranks and peak memory, as counted in the programs, against the formulas."""
    counted, expected = count_flow(plan), flow_bytes(plan)
    found = [
        f"rank {a} sends rank {b} {counted[a, b]} bytes where the formula says {expected[a, b]}"
        for a, b in np.argwhere(counted != expected).tolist()
    ]
    peaks = zip(count_peak(plan), peak_bytes(plan), strict=True)
    return found + [
        f"rank {r}: buffers take {have} bytes where the formula says {want}"
        for r, (have, want) in enumerate(peaks)
        if have != want
    ]


def count_flow(plan: Plan) -> np.ndarray:
    """Bytes that the programs send from each rank to each other one, "world world"."""
    flow = np.zeros((plan.world, plan.world), np.int64)
    for r, program in enumerate(plan.programs):
        buffers = buffers_of(plan, r)
        for post in posts_of(program):
            for send in post.sends:
                kind, rows, heads = _shape(buffers, send.view)
                flow[r, send.peer % plan.world] += rows * heads * plan.row_bytes(kind, wire=True) if kind else 0
    return flow


def count_peak(plan: Plan) -> list[int]:
    """The most bytes that are made and not yet freed on each rank, what it is given included."""
    return [_peak(plan, r) for r in range(plan.world)]


def buffers_of(plan: Plan, rank: int) -> dict[str, Buffer]:
    """Every buffer of a rank by name."""
    program = plan.programs[rank]
    made = [op.buffer for op in program.ops if isinstance(op, Make)]
    return {buffer.name: buffer for buffer in (*program.given, *made)}


def posts_of(program: Program) -> list[Post]:
    """All batches of a program, in order."""
    return [op for op in program.ops if isinstance(op, Post)]


def _peak(plan: Plan, rank: int) -> int:
    program = plan.programs[rank]
    sizes = {x.name: x.rows * x.heads * plan.row_bytes(x.kind) for x in buffers_of(plan, rank).values()}
    now = peak = sum(sizes[buffer.name] for buffer in program.given)
    for op in program.ops:
        if isinstance(op, Make):
            now += sizes[op.buffer.name]
        elif isinstance(op, Free):
            now -= sizes.get(op.buffer, 0)
        peak = max(peak, now)
    return peak


def _shape(buffers: dict[str, Buffer], view: View) -> tuple[str, int, int]:
    """The kind, rows and heads of a view."""
    return buffers[view.buffer].kind if view.buffer in buffers else "", view.rows.count, view.heads.count
