"""The gradients, from (o, lse) alone: s and p are recomputed tile by tile, in one pass over blocks of query rows that adds
up dk and dv on the way. Deterministic: each sum has one order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...problem import Inputs, Partial, Problem
from ...tiles import Visit, blocks, walk
from .config import Config
from .forward import pivot
from .tile import Chunk, accumulator, made_of, weigh


@dataclass(frozen=True)
class _Clean:
    """Which tensors hold only finite numbers: those need no care about hidden entries."""

    q: bool
    k: bool
    do: bool


def backward(
    problem: Problem, x: Inputs[Tensor], saved: Partial, grads: Partial, config: Config, needs: Sequence[str]
) -> Inputs[Tensor]:
    """Gradients of Σ do∘o + Σ dlse∘lse with `grads` = (do, dlse), for the inputs named in `needs`; others are not read.

    dv = pᵀ·do    dp = do·vᵀ    ds = p∘(dp − delta + dlse)    dq = scale·ds·k    dk = scale·dsᵀ·q    delta = rowsum(do∘o)
    """
    with torch.no_grad():
        wide = accumulator(problem)
        out: Inputs[Tensor | None] = Inputs(None, None, None)
        for name in needs:  # q, k and v leave a step finished; the others add up over steps
            given = getattr(x, name)
            dtype = made_of(problem, given) if name in ("q", "k", "v") else wide
            setattr(out, name, torch.zeros(given.shape, dtype=dtype, device=x.q.device))
        clean = _Clean(*(bool(a.isfinite().all()) for a in (x.q, x.k, grads.o)))
        for b in blocks(problem.b, config.batch):
            rows = list(walk(problem, config.shape, b))
            for g in blocks(problem.g, config.key_heads):
                _chunk(Chunk(problem, x, b, g), rows, _Rows(saved, grads), clean, out)
        extras = {name: getattr(x, name).dtype for name, _ in x.present() if name not in ("q", "k", "v")}
        return replace(x, **{name: a.to(extras.get(name, a.dtype)) for name, a in out.present() if a is not None})


@dataclass(frozen=True)
class _Rows:
    """What is known of the query rows: o, lse and their gradients."""

    saved: Partial
    grads: Partial

    def load(self, chunk: Chunk, i: slice) -> tuple[Tensor, Tensor, Tensor]:
        """do "b g (r rows) e", lse and total = delta − dlse "b g (r rows) 1": all that ds needs of a row."""
        do = chunk.fold(self.grads.o, i)
        delta = (do * chunk.fold(self.saved.o, i)).sum(-1, keepdim=True)
        total = delta if self.grads.lse is None else delta - chunk.fold_rows(self.grads.lse, i)
        return do, chunk.fold_rows(self.saved.lse, i), total


def _chunk(
    chunk: Chunk, rows: list[tuple[slice, list[Visit]]], given: _Rows, clean: _Clean, out: Inputs[Tensor | None]
) -> None:
    """The gradients of a chunk's heads, added into `out`."""
    wide, scale = accumulator(chunk.problem), chunk.problem.score.scale
    p, heads = chunk.problem, (chunk.b.stop - chunk.b.start, chunk.g.stop - chunk.g.start)
    dk, dv = (torch.zeros(*heads, p.s, size, dtype=wide, device=chunk.x.q.device) for size in (p.d, p.e))
    for i, visits in rows:
        q, row = chunk.fold(chunk.x.q, i), given.load(chunk, i)
        dq = torch.zeros_like(q)
        for visit in visits:
            k = chunk.keys(chunk.x.k, visit.j)
            w, ds, seen = _recompute(chunk, visit, q, k, row)
            across = None if seen is None else seen.transpose(-1, -2)
            if out.q is not None:
                dq += weigh(ds, k, seen, clean.k)
            if out.k is not None:
                dk[:, :, visit.j] += weigh(ds.transpose(-1, -2), q, across, clean.q)
            if out.v is not None:
                dv[:, :, visit.j] += weigh(w.transpose(-1, -2), row[0], across, clean.do)
            if out.bias is not None:
                _add_bias(out.bias, chunk.split(ds).flatten(1, 2), (chunk.b, chunk.heads, visit.i, visit.j))
            if out.alibi is not None:
                slopes = -(chunk.split(ds) * chunk.distance(visit)).sum((-1, -2)).flatten(1, 2)
                _add_heads(out.alibi, slopes, chunk)
        if out.q is not None:
            out.q[chunk.b, i, chunk.heads] = chunk.unfold(dq * scale).to(out.q.dtype)
        if out.sink is not None and chunk.x.sink is not None:
            _add_heads(out.sink, _dsink(chunk, i, row), chunk)
    if out.k is not None:
        out.k[chunk.b, :, chunk.g] = (dk * scale).transpose(1, 2).to(out.k.dtype)
    if out.v is not None:
        out.v[chunk.b, :, chunk.g] = dv.transpose(1, 2).to(out.v.dtype)


def _recompute(
    chunk: Chunk, visit: Visit, q: Tensor, k: Tensor, row: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of one tile: the weights p after dropout, ds by scale·q·k + extra, and which pairs are seen (None: all)."""
    do, lse, total = row
    s, seen = chunk.logits(q, k, visit)
    p, drop = torch.exp(s - pivot(lse)), chunk.drop(visit)
    dp = do @ chunk.keys(chunk.x.v, visit.j).transpose(-1, -2)
    ds = p * (dp * drop - total)
    cap = chunk.problem.score.softcap
    if cap is not None:
        ds = ds * (1 - (s / cap).square())
    if seen is not None:
        p, ds = torch.where(seen, p, 0), torch.where(seen, ds, 0)
    return p * drop, ds, seen


def _dsink(chunk: Chunk, i: slice, row: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """The sink's gradient from one block of rows, "b h": its probability has no value, so dp = 0."""
    assert chunk.x.sink is not None
    _, lse, total = (chunk.split(x)[..., 0] for x in row)
    sink = chunk.x.sink[chunk.heads].to(lse.dtype).view(-1, chunk.problem.group, 1)
    return torch.where(lse == -torch.inf, 0, -torch.exp(sink - pivot(lse)) * total).sum(-1).flatten(1, 2)


def _add_heads(total: Tensor, part: Tensor, chunk: Chunk) -> None:
    """Add a chunk's "b h" to a gradient of shape "h", "1 h" or "b h"."""
    if total.dim() == 2 and total.shape[0] == chunk.problem.b:
        total[chunk.b, chunk.heads] += part
    else:
        total[..., chunk.heads] += part.sum(0)


def _add_bias(total: Tensor, ds: Tensor, at: tuple[slice, ...]) -> None:
    """Add a tile "b h rows cols" to the bias gradient, summing along every axis that the bias was broadcast over."""
    whole = total.view((1,) * (4 - total.dim()) + total.shape)
    ds = ds.sum([axis for axis, size in enumerate(whole.shape) if size == 1], keepdim=True) if 1 in whole.shape else ds
    whole[tuple(slice(None) if size == 1 else part for part, size in zip(at, whole.shape, strict=True))] += ds
