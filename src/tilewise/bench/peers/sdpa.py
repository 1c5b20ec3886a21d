"""torch's scaled_dot_product_attention: its own choice of kernel, or one of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ...mask import Causal
from ...positions import Dense
from ..cases import Task
from .masks import visible
from .peer import Attention, Peer, present


def of(name: str, kernel: SDPBackend | None = None) -> Peer:
    """SDPA under a name; `kernel` None leaves the choice to torch, any other exists on CUDA only."""

    def prepare(task: Task) -> Attention:
        run = attend(task)
        return run if kernel is None else within(kernel, run)

    return Peer(name, why_not, prepare, absent=present if kernel is None else _needs_cuda)


def within(kernel: Any, run: Attention) -> Attention:
    """`run` with no kernel but this one to choose from."""

    def named(**tensors: Tensor) -> Tensor:
        with sdpa_kernel(kernel):
            return run(**tensors)

    return named


def _needs_cuda(device: str) -> str:
    return "" if device == "cuda" else "needs CUDA"


def why_not(task: Task) -> Iterator[str]:
    """What no float mask can say."""
    if task.problem.score.softcap is not None:
        yield "has no softcap"
    if task.problem.score.sink:
        yield "has no sink"
    if "alibi" in task.case.needs:
        yield "has no slopes that could have a gradient"


def attend(task: Task) -> Attention:
    """is_causal where that says it, nothing where nothing is hidden, and otherwise a boolean mask; with a bias or slopes a
    float mask, -inf where hidden."""
    p = task.problem
    options = {"enable_gqa": p.g != p.h, "scale": p.score.scale, "dropout_p": 0.0 if p.dropout is None else p.dropout.rate}
    plain = task.x.bias is None and task.x.alibi is None
    if plain and isinstance(p.mask, Causal) and isinstance(p.layout, Dense) and p.n == p.s:
        return lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True, **options)
    keep = visible(p)
    slopes = None if task.x.alibi is None else _slopes(task, task.x.alibi)
    if keep is not None and slopes is not None:
        slopes = torch.where(keep, slopes, -torch.inf)

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, alibi: Tensor | None = None) -> Tensor:
        mask = keep if slopes is None else slopes
        if bias is not None and slopes is not None:
            mask = bias + slopes
        elif bias is not None:
            mask = bias if keep is None else torch.where(keep, bias, -torch.inf)
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)

    return run


def _slopes(task: Task, alibi: Tensor) -> Tensor:
    """What ALiBi adds, "b h n s" or "1 h n s", in the dtype of q: SDPA takes it in no other form. Slopes have no gradient."""
    p, device = task.problem, alibi.device
    start = 0 if p.mask.align == "top-left" else p.s - p.n
    distance = (torch.arange(p.n, device=device)[:, None] + start - torch.arange(p.s, device=device)).abs()
    return (-alibi.detach()[..., None, None] * distance).to(task.x.q.dtype)
