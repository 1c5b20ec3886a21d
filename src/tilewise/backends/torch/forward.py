"""o and lse, a block of query rows at a time: each is a fold of `absorb` over the tiles that its rows can see."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...problem import Inputs, Partial, Problem
from ...tiles import Visit, blocks, walk
from .config import Config, configure
from .tile import Chunk, accumulator, made_of, weigh


class State(NamedTuple):
    """Unfinished rows: m, l "b g (r rows) 1" and acc "b g (r rows) e"."""

    m: Tensor
    l: Tensor  # noqa: E741 - the paper's ℓ
    acc: Tensor


def forward(problem: Problem, x: Inputs[Tensor], config: Config) -> Partial:
    """Exact attention; no gradient flows, and one look at v decides how hidden NaN is kept out."""
    with torch.no_grad():
        o, lse = fold(problem, x, config, clean=bool(x.v.isfinite().all()))
        return Partial(o.contiguous(), lse.contiguous())


def differentiable(problem: Problem, x: Inputs[Tensor]) -> Partial:
    """The same fold as ordinary operations that autograd, forward mode and torch.func can look into. It keeps every tile's
    scores for the derivative: O(n·s) memory where gradients are on."""
    return fold(problem, x, configure(problem), clean=False)


def fold(problem: Problem, x: Inputs[Tensor], config: Config, clean: bool) -> Partial:
    parts = []
    for b in blocks(problem.b, config.batch):
        rows = list(walk(problem, config.shape, b))
        heads = [_rows(Chunk(problem, x, b, g, clean), rows) for g in blocks(problem.g, config.key_heads)]
        parts.append(Partial(_cat([h.o for h in heads], 2), _cat([h.lse for h in heads], 1)))
    if not parts:
        o, lse = x.q.new_zeros(0, problem.n, problem.h, problem.e), x.q.new_zeros(0, problem.h, problem.n)
        return Partial(o.to(made_of(problem, x.q)), lse.to(accumulator(problem)))
    return Partial(_cat([p.o for p in parts], 0), _cat([p.lse for p in parts], 0))


def _rows(chunk: Chunk, rows: list[tuple[slice, list[Visit]]]) -> Partial:
    """o "b n h e" and lse "b h n" of a chunk's heads."""
    o, lse = [], []
    for i, visits in rows:
        q = chunk.fold(chunk.x.q, i)
        state = empty(q, chunk.problem.e)
        for visit in visits:
            s, seen = chunk.logits(q, chunk.keys(chunk.x.k, visit.j), visit)
            state = absorb(state, s, chunk.keys(chunk.x.v, visit.j), seen, chunk.drop(visit), chunk.clean)
        if chunk.x.sink is not None:
            state = absorb_sink(state, chunk.fold_rows(_sinks(chunk), slice(0, i.stop - i.start)))
        tile_o, tile_lse = finish(state)
        o.append(chunk.unfold(tile_o).to(made_of(chunk.problem, chunk.x.q)))
        lse.append(chunk.split(tile_lse)[..., 0].flatten(1, 2))
    if not rows:
        b, h = chunk.b.stop - chunk.b.start, chunk.heads.stop - chunk.heads.start
        o, lse = chunk.x.q.new_zeros(b, 0, h, chunk.problem.e), chunk.x.q.new_zeros(b, h, 0)
        return Partial(o.to(made_of(chunk.problem, o)), lse.to(accumulator(chunk.problem)))
    return Partial(_cat(o, 1), _cat(lse, 2))


def empty(q: Tensor, e: int) -> State:
    """The state of no keys."""
    rows = q.shape[:-1]
    return State(q.new_full((*rows, 1), -torch.inf), q.new_zeros((*rows, 1)), q.new_zeros((*rows, e)))


def absorb(state: State, s: Tensor, v: Tensor, seen: Tensor | None, drop: Tensor | float, clean: bool) -> State:
    """`state` after a tile of logits s and values v. m is only a pivot, so no derivative goes through it."""
    m = torch.maximum(state.m, s.detach().amax(-1, keepdim=True))
    alpha, p = torch.exp(state.m - pivot(m)), torch.exp(s - pivot(m))
    return State(m, alpha * state.l + p.sum(-1, keepdim=True), alpha * state.acc + weigh(p * drop, v, seen, clean))


def absorb_sink(state: State, sink: Tensor) -> State:
    """`state` after one more logit that has no value."""
    m = torch.maximum(state.m, sink.detach())
    alpha = torch.exp(state.m - pivot(m))
    return State(m, alpha * state.l + torch.exp(sink - pivot(m)), alpha * state.acc)


def finish(state: State) -> tuple[Tensor, Tensor]:
    """o = acc / l and lse = m + log l; 0 and -inf where a row saw nothing."""
    nothing = state.l == 0
    l = torch.where(nothing, 1, state.l)  # noqa: E741
    return state.acc / l, torch.where(nothing, -torch.inf, state.m + torch.log(l))


def pivot(m: Tensor) -> Tensor:
    """What to subtract before exp: m, or 0 where the row has seen nothing."""
    return torch.where(m == -torch.inf, 0, m)


def _sinks(chunk: Chunk) -> Tensor:
    """The sinks as a statistic "b h n"."""
    assert chunk.x.sink is not None
    return chunk.x.sink[None, :, None].expand(chunk.problem.b, -1, chunk.problem.n)


def _cat(parts: list[Tensor], axis: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)
