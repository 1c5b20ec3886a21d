"""Who is measured beside tilewise. A peer is data: its name, the layout it likes its tensors in, why it cannot run a
problem, and how it would be called by somebody who uses it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .. import api
from ..mask import Both, Causal, Chunked, Documents, Full, Mask, Prefix, Window
from ..positions import Dense
from ..problem import Problem
from .cases import Case, Task

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Peer:
    """One way of computing attention. `prepare` builds what a user builds once (masks, compiled functions) and returns a
    function of q, k and v in `layout`; `slow_start` marks those that compile for many seconds."""

    name: str
    why_not: Callable[[Problem], tuple[str, ...]]
    prepare: Callable[[Problem], Attention]
    layout: str = "b h n d"
    slow_start: bool = False


def contender(peer: Peer, task: Task) -> Callable[[], Any]:
    """One call, ready to be timed, its inputs in the peer's own layout. Of backward alone, if that is the pass."""
    run = peer.prepare(task.problem)
    x, do = task.x, task.do
    leaves = [t.transpose(1, 2).contiguous() if peer.layout == "b h n d" else t.clone() for t in (x.q, x.k, x.v)]
    if task.name != "backward":

        def forward() -> Tensor:
            with torch.no_grad():
                return run(*leaves)

        return forward
    leaves = [t.requires_grad_() for t in leaves]
    o = run(*leaves)
    do = do.transpose(1, 2).contiguous() if peer.layout == "b h n d" else do
    return lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)


def tilewise(case: Case, backend: str | None = None) -> Peer:
    """tilewise itself, called as its users call it."""

    def prepare(problem: Problem) -> Attention:
        return lambda q, k, v: api.attention(q, k, v, mask=case.mask, softcap=case.softcap, backend=backend)

    return Peer("tilewise", lambda problem: (), prepare, layout="b n h d")


def _sdpa_why_not(problem: Problem) -> tuple[str, ...]:
    return ("has no softcap",) if problem.score.softcap is not None else ()


def _sdpa(problem: Problem) -> Attention:
    """is_causal where that says it, nothing where nothing is hidden, and otherwise a boolean mask."""
    p, options = problem, {"enable_gqa": problem.g != problem.h, "scale": problem.score.scale}
    if isinstance(p.mask, Causal) and p.n == p.s:
        return lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True, **options)
    keep = torch.as_tensor(p.keep()).to(p.device)
    mask = None if bool(keep.all()) else keep
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)


def _flex_why_not(problem: Problem) -> tuple[str, ...]:
    reasons = [] if _point_test(problem.mask, problem.device) else ["this mask has no point test in torch"]
    if not isinstance(problem.layout, Dense) or not isinstance(problem.layout.q.start, int):
        reasons.append("positions differ by batch entry")
    return tuple(reasons)


def _flex(problem: Problem) -> Attention:
    """Compiled for this problem alone, with a block mask unless nothing is hidden and a score function for softcap."""
    from torch._functorch import config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    config.donated_buffer = False  # or backward cannot be called twice
    torch.compiler.reset()
    p, cap, keep = problem, problem.score.softcap, _point_test(problem.mask, problem.device)
    assert keep is not None and isinstance(p.layout, Dense)
    start = int(p.layout.q.start)
    hides = not bool(p.keep().all())
    block_mask = create_block_mask(lambda b, h, i, j: keep(i + start, j), None, None, p.n, p.s, p.device) if hides else None
    score_mod = None if cap is None else (lambda score, b, h, i, j: cap * torch.tanh(score / cap))
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    options = {"enable_gqa": p.g != p.h, "scale": p.score.scale, "block_mask": block_mask, "score_mod": score_mod}
    return lambda q, k, v: compiled(q, k, v, **options)


def _point_test(mask: Mask, device: str) -> Callable[[Tensor, Tensor], Tensor] | None:
    """The mask as a function of torch positions, written as a user of FlexAttention would; None where there is none."""
    if isinstance(mask, Both):
        tests = [_point_test(part, device) for part in mask.parts]
        return None if None in tests else lambda i, j: _all([test(i, j) for test in tests if test is not None])
    if isinstance(mask, Documents) and len(mask.ids.shape) == 1:
        ids = torch.as_tensor(mask.ids).to(device)
        return lambda i, j: ids[i] == ids[j]
    if isinstance(mask, Full | Causal | Window | Chunked) or (isinstance(mask, Prefix) and isinstance(mask.length, int)):
        return mask.keep
    return None


def _all(tests: list[Tensor]) -> Tensor:
    keep = tests[0]
    for test in tests[1:]:
        keep = keep & test
    return keep


PEERS: tuple[Peer, ...] = (
    Peer("sdpa", _sdpa_why_not, _sdpa),
    Peer("flex", _flex_why_not, _flex, slow_start=True),
)
"""Everyone who is asked, in the order of the table's columns."""
