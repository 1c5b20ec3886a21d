"""Every kernel of a problem compiled and loaded before it is needed: the problem's own launches on next to no data. Lengths and
other numbers are not compiled for, so what a mask's arrays hold does not matter, only what sort of mask it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...mask import Causal, Full, Lengths, Mask, Where
from ...positions import Dense, Positions
from ...problem import Inputs, Options, Partial, Problem
from ...ragged import Ragged
from ..sight import banded, kind_of
from .backward_pass import backward
from .call import bias_kind
from .config import Config
from .forward_pass import forward
from .offline import recorded

FEW = 2
"""Length of every axis that has more than one: an axis of one is something else, for the gradient of a bias."""


def warm(problem: Problem, x: Inputs[Tensor], config: Config, needs: Sequence[str]) -> list[str]:
    """Launch what forward would, and with `needs` backward, on small tensors like `x`, which is not read. The kernels' names,
    in the order of their launches."""
    if 0 in (problem.b, problem.n, problem.s):
        return []
    small = x.map(lambda t: t.new_zeros([min(size, FEW) for size in t.shape]))
    small.q, small.k = (t.new_zeros(*t.shape[:3], problem.d) for t in (small.q, small.k))
    small.v = small.v.new_zeros(*small.v.shape[:3], problem.e)
    small.bias = bias_like(x.bias, bias_kind(problem, x.bias))
    likeness = Problem.describe(small, options(problem))
    config = replace(config, known={})  # what is found out about the small one does not hold for the other
    with recorded(run=True) as jobs:
        out = forward(likeness, small, config)
        for dlse in (None, out.lse) if needs else ():
            backward(likeness, small, out, Partial(torch.zeros_like(out.o), dlse), config, needs)
    if small.q.is_cuda:
        torch.cuda.synchronize(small.q.device)
    return [job.name for job in jobs]


def bias_like(bias: Tensor | None, kind: str | None) -> Tensor | None:
    """A small bias that kernels read in the same way."""
    if bias is None or not bias.dim():
        return None if bias is None else bias.new_zeros(())
    *sizes, last = (min(size, FEW) for size in bias.shape)
    room = bias.new_zeros(*sizes, 16)  # whole steps of the copy engine, for any dtype
    return room[..., :last] if kind == "TILES" else room[..., 1 : last + 1]


def options(problem: Problem) -> Options:
    """What a problem was asked with, for a small one."""
    p, score = problem, problem.score
    common: dict[str, Any] = {"dropout": p.dropout, "deterministic": p.deterministic, **places_like(p)}
    return Options(mask_like(p), score.scale, score.softcap, **common)


def places_like(problem: Problem) -> dict[str, Any]:
    """Small positions that kernels read in the same way: packed, counted from the same first one, or looked up."""
    p, n, s = problem, min(problem.n, FEW), min(problem.s, FEW)
    if not isinstance(p.layout, Dense):
        return {"ragged": Ragged.from_lengths([n], [s])}
    if p.layout.starts is None:
        return {"positions": (Positions.of(2 * np.arange(n)), Positions.of(2 * np.arange(s)))}
    return {"positions": tuple(Positions(m, start=at) for m, at in zip((n, s), p.layout.starts, strict=True))}


def mask_like(problem: Problem) -> Mask:
    """A small mask that kernels see in the same way; see `visits.look`."""
    p = problem
    if p.mask.kind == "TABLE":
        return Where(lambda b, h, i, j: i - j == i - j)
    if kind_of(p) == "NONE":
        return Full()
    starts = p.layout.starts if isinstance(p.layout, Dense) else None
    if starts is not None and banded(p.mask):
        return Causal()
    return Lengths(np.full(min(p.b, FEW), p.s)) if isinstance(p.layout, Dense) else Causal()
