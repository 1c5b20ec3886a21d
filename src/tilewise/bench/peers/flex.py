"""torch's FlexAttention: compiled for one problem alone, with a block mask unless nothing is hidden and a score function for
what is done to logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..cases import Task
from .masks import point_test, visible
from .peer import Attention, Peer

RECOMPILES = 64
"""Times that a function may be compiled again before torch.compile gives up on it."""


def why_not(task: Task) -> Iterator[str]:
    """What a score function cannot say, and masks that have no function."""
    if point_test(task.problem) is None:
        yield "this mask has no point test in torch, or positions differ by batch entry"
    if task.problem.dropout is not None:
        yield "has no dropout"
    for name in ("bias", "alibi"):
        if name in task.case.needs:
            yield f"a gradient of {name} through its score function is not measured"


def prepare(task: Task) -> Attention:
    from torch._dynamo import config as dynamo
    from torch._functorch import config
    from torch.nn.attention import flex_attention as flex

    config.donated_buffer = False  # or backward cannot be called twice
    dynamo.recompile_limit = max(dynamo.recompile_limit, RECOMPILES)
    p, keep = task.problem, point_test(task.problem)
    assert keep is not None
    hides = visible(p) is not None
    block_mask = flex.create_block_mask(lambda b, h, i, j: keep(i, j), None, None, p.n, p.s, p.device) if hides else None
    options: dict[str, Any] = {"enable_gqa": p.g != p.h, "scale": p.score.scale, "block_mask": block_mask}
    # without fullgraph, a limit reached means the unfused form, silently
    compiled: Any = torch.compile(flex.flex_attention, dynamic=False, fullgraph=True)

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Any = None, alibi: Any = None, sink: Any = None) -> Tensor:
        score_mod = _score(task, bias, alibi)
        if sink is None:
            return compiled(q, k, v, score_mod=score_mod, **options)
        o, aux = compiled(q, k, v, score_mod=score_mod, return_aux=flex.AuxRequest(lse=True), **options)
        return (o * torch.sigmoid(aux.lse - sink[:, None])[..., None]).to(q.dtype)

    return run


def _score(task: Task, bias: Tensor | None, alibi: Tensor | None) -> Callable[..., Tensor] | None:
    """What is done to one logit, in the order of the definition."""
    p, cap = task.problem, task.problem.score.softcap
    if bias is None and alibi is None and cap is None:
        return None
    start = 0 if p.mask.align == "top-left" else p.s - p.n
    whole = None if bias is None else bias.expand(p.b, p.h, p.n, p.s)
    slopes = None if alibi is None else alibi.expand(p.b, p.h)

    def score(x: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if whole is not None:
            x = x + whole[b, h, i, j]
        if slopes is not None:
            x = x - slopes[b, h] * (i + start - j).abs()
        return x if cap is None else cap * torch.tanh(x / cap)

    return score


FLEX = Peer("flex", why_not, prepare, slow_start=True)
