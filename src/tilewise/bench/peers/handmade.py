"""What a user without these kernels writes by hand around SDPA on a CPU: the query heads of a group as rows of one head, and
one call a document."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...arrays import host
from ...mask import Both, Causal, Documents, Full
from ...positions import Dense
from ...problem import Problem
from ..cases import Task
from .peer import Attention, Peer


def absent(device: str) -> str:
    return "" if device == "cpu" else "is for CPUs"


def _plain(task: Task) -> Iterator[str]:
    """What keeps such a trick from saying the same."""
    p = task.problem
    if (
        p.score.softcap is not None
        or p.score.sink
        or task.x.bias is not None
        or task.x.alibi is not None
        or p.dropout is not None
    ):
        yield "is written for scores as they are"


def folded_why_not(task: Task) -> Iterator[str]:
    yield from _plain(task)
    p = task.problem
    if p.n != 1 or p.g == p.h:
        yield "is for one query row and several query heads a key head"
    bare = isinstance(p.mask, Full | Causal) and isinstance(p.layout, Dense) and p.layout.starts == (p.s - 1, 0)
    if not bare:
        yield "is for a query that sees every key"


def folded(task: Task) -> Attention:
    """Query heads that share a key head become rows of one head, so that keys and values are read once."""
    p = task.problem

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = q.reshape(p.b, p.g, p.group, p.d)
        return scaled_dot_product_attention(rows, k, v, scale=p.score.scale).reshape(p.b, p.h, 1, p.e)

    return run


def looped_why_not(task: Task) -> Iterator[str]:
    yield from _plain(task)
    if ends(task.problem) is None:
        yield "is for causal attention in documents that follow each other"


def looped(task: Task) -> Attention:
    """One call a document, and the results put together."""
    p = task.problem
    lengths = ends(p)
    assert lengths is not None
    options = {"is_causal": True, "enable_gqa": p.g != p.h, "scale": p.score.scale}

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        documents = zip(*(x.split(lengths, 2) for x in (q, k, v)), strict=True)
        return torch.cat([scaled_dot_product_attention(*document, **options) for document in documents], 2)

    return run


def ends(problem: Problem) -> list[int] | None:
    """The lengths of causal documents that fill the sequence; None where the mask says something else."""
    p = problem
    parts = p.mask.parts if isinstance(p.mask, Both) else (p.mask,)
    documents = [part for part in parts if isinstance(part, Documents)]
    others = [part for part in parts if not isinstance(part, Documents)]
    if len(documents) != 1 or len(others) != 1 or not isinstance(others[0], Causal) or len(documents[0].ids.shape) != 1:
        return None
    ids = host(documents[0].ids)
    if not isinstance(p.layout, Dense) or p.layout.starts != (0, 0) or p.n != p.s or len(ids) != p.n or (ids < 0).any():
        return None
    starts = np.flatnonzero(np.diff(ids, prepend=-1))
    return np.diff(starts, append=p.n).tolist()


FOLDED = Peer("sdpa-folded", folded_why_not, folded, absent=absent)
LOOPED = Peer("sdpa-documents", looped_why_not, looped, absent=absent)
