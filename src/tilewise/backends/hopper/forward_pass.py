"""One call's tensors and options as what the forward kernel takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...positions import Dense
from ...problem import Inputs, Partial, Problem
from ..made import made_of, unseen
from ..reads import blocks, readable
from ..sight import FAR, Sight
from ..tape import Tape, repeat
from .config import Config, padded
from .forward_kernel import forward_kernel
from .launch import launch, tiles
from .looks import looked_at, roster_of, visits_of_rows
from .variant import Variant

LEAST = 2.0**-100
"""The smallest scale that is multiplied after the fact: one that float32 took for 0 would make NaN of −inf."""


def forward(problem: Problem, x: Inputs[Tensor], config: Config) -> Partial:
    """Exact attention, by one kernel."""
    if 0 in (problem.b, problem.n, problem.s, problem.h):
        return unseen(problem, x)
    return _run(problem, x, None, config)


def forward_onto(problem: Problem, x: Inputs[Tensor], onto: Partial, config: Config) -> Partial | None:
    """merge(onto, attention) by the same kernel, of a partial result in float32 whose rows are whole steps of the copy engine;
    None: it is another."""
    if 0 in (problem.b, problem.n, problem.s, problem.h):
        return onto
    o, aligned = onto.o, onto.o.data_ptr() % 16 == 0 and all(step % 4 == 0 for step in onto.o.stride()[:3])
    if not aligned or o.stride(3) != 1 or {o.dtype, onto.lse.dtype} != {torch.float32}:
        return None
    return _run(problem, x, onto, config)


def _run(p: Problem, x: Inputs[Tensor], onto: Partial | None, config: Config) -> Partial:
    sink = None if x.sink is None else x.sink.contiguous()
    given = {"q": x.q, "k": x.k, "v": x.v, "alibi": x.alibi, "sink": sink}
    if onto is not None:
        given |= {"seen": onto.o, "seen lse": onto.lse}
    made = repeat(config.known, "forward", given, lambda tape: _forward(p, replace(x, sink=sink), onto, config, tape))
    return Partial(made["o"], made["lse"])


def _forward(p: Problem, x: Inputs[Tensor], onto: Partial | None, config: Config, tape: Tape) -> None:
    """The launch of `forward`."""
    q, k, v = readable(x.q), readable(x.k), readable(x.v)
    o = tape.room("o", (p.b, p.n, p.h, p.e), made_of(p, q), q)
    lse = tape.room("lse", (p.b, p.h, p.n), torch.float32, q)
    sight = looked_at(p, config, q)
    visits = visits_of_rows(p, sight, config, q)
    C = replace(variant(p, x, sight, config), ONTO=onto is not None)
    total = p.b * p.h * blocks(p.n, C.BLOCK_M)
    programs = min(total, config.programs)
    mine = roster_of(p, sight, config, programs, q) if C.LISTED else None
    if C.LISTED and mine is None:
        C, tape.whole = replace(C, sizes=replace(C.sizes, persistent=False)), False
    tape.hold(sight.first, sight.past, visits, mine)
    leaves = None if C.WIDE else tiles(o, 64, C.E)
    args = (
        tiles(q, 64, C.D), tiles(k, C.BLOCK_N, C.D), tiles(v, C.BLOCK_N, C.E), leaves, o if C.WIDE else None, lse,
        *_seen(onto), v, v.stride(0), v.stride(2), v.stride(1), *_mask(sight, visits, p), *score_of(p, x, x.sink),
        p.n, p.s, p.h, p.group, config.span, total, mine,
    )  # fmt: skip
    kinds = (q.dtype, *[None if t is None else t.dtype for t in (x.alibi, x.sink)])
    launch(forward_kernel, programs if C.PERSISTENT else total, args, C, C.sizes.entry, kinds, tape)


def variant(p: Problem, x: Inputs[Tensor], sight: Sight, config: Config) -> Variant:
    """What the kernel is compiled for."""
    plain = x.alibi is None and p.score.softcap is None and p.score.scale >= LEAST
    kind = "NONE" if sight.kind == "NONE" else "BAND" if sight.first is None else "ROWS"
    late = kind == "ROWS" or (kind == "BAND" and sight.left + p.n > 1)
    return Variant(
        config.forward, padded(p.d), padded(p.e), p.e, p.dtype, kind, late, plain, p.score.softcap is not None,
        x.alibi is not None, x.sink is not None, p.wide,
    )  # fmt: skip


def _seen(onto: Partial | None) -> tuple[Any, ...]:
    """seen_ptr … seen_lse_head in the kernel's parameter list."""
    if onto is None:
        return None, 0, 0, 0, None, 0, 0, 0
    (b, head, row), steps = onto.lse.stride(), [step // 4 for step in onto.o.stride()[:3]]
    return onto.o, *steps, onto.lse, b, row, head


def _mask(sight: Sight, visits: Tensor | None, p: Problem) -> tuple[Any, ...]:
    """first_ptr … visits_b in the kernel's parameter list."""
    row_b = p.n if sight.first is not None and len(sight.first) > 1 else 0
    visits_b = visits.stride(0) if visits is not None and len(visits) > 1 else 0
    return sight.first, sight.past, row_b, sight.left, sight.right, visits, visits_b


def score_of(p: Problem, x: Inputs[Tensor], sink: Tensor | None) -> tuple[Any, ...]:
    """scale … far."""
    alibi = x.alibi if x.alibi is None or x.alibi.stride(-1) == 1 else x.alibi.contiguous()
    alibi_b = 0 if alibi is None or alibi.dim() == 1 or len(alibi) == 1 else alibi.stride(0)
    cap = 0.0 if p.score.softcap is None else float(p.score.softcap)
    starts = p.layout.starts if isinstance(p.layout, Dense) else None
    far = 0 if starts is None else max(min(starts[0] - starts[1], FAR), -FAR)
    return float(p.score.scale), cap, alibi, alibi_b, sink, far
