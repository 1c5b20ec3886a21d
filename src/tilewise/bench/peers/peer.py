"""What a peer is, and one call of it, ready to be timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ... import api
from ..cases import Task

Attention = Callable[..., Tensor]
"""o, of q, k, v and the extras that a case has, by name."""


def present(device: str) -> str:
    """Why it is not here: it is."""
    return ""


@dataclass(frozen=True)
class Peer:
    """One way of computing attention, called as somebody calls it who uses it. `why_not` says why it cannot run a task,
    `prepare` builds what a user builds once (masks, compiled functions), `absent` says why it is not here at all; `layout` is
    that of its tensors; `slow_start` marks those that compile for many seconds."""

    name: str
    why_not: Callable[[Task], Iterable[str]]
    prepare: Callable[[Task], Attention]
    layout: str = "b h n d"
    slow_start: bool = False
    absent: Callable[[str], str] = present

    def reasons(self, task: Task) -> str:
        """Everything that speaks against measuring this peer; empty where nothing does."""
        return self.absent(torch.device(task.problem.device).type) or "; ".join(self.why_not(task))


def contender(peer: Peer, task: Task, change: Callable[[Attention], Attention] | None = None) -> Callable[[], Any]:
    """One call of a task, on tensors of its own in the peer's layout. Of backward alone, if that is the pass. `change` is made
    to the function that is called: `torch.compile`, say."""
    run = peer.prepare(task)
    run = run if change is None else change(run)
    named = {name: _arranged(peer, name, x) for name, x in task.x.present()}
    if not task.gradients:

        def forward() -> Tensor:
            with torch.no_grad():
                return run(**named)

        return forward
    leaves = [named[name].requires_grad_() for name in task.case.needs]
    if task.name == "recorded":
        return lambda: run(**named)
    do = _arranged(peer, "q", task.do)
    if task.name == "step":
        return lambda: torch.autograd.grad(run(**named), leaves, do)
    o = run(**named)
    return lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)


def _arranged(peer: Peer, name: str, x: Tensor) -> Tensor:
    """A copy of "b n h d" in the layout of a peer; the extras have one layout for all."""
    moved = peer.layout == "b h n d" and name in ("q", "k", "v")
    return x.detach().transpose(1, 2).contiguous() if moved else x.detach().clone()


def tilewise(backend: str | None = None) -> Peer:
    """tilewise itself, called as its users call it."""

    def prepare(task: Task) -> Attention:
        o, drop = task.case.options, task.case.options.dropout
        options: dict[str, Any] = {"mask": o.mask, "scale": o.scale, "softcap": o.softcap, "backend": backend}
        if drop is not None:
            options |= {"dropout": drop.rate, "seed": drop.seed}
        if o.ragged is None:
            return lambda q, k, v, **extras: api.attention(q, k, v, **extras, **options)
        options["ragged"] = o.ragged
        return lambda q, k, v, **extras: api.attention_varlen(q[0], k[0], v[0], **extras, **options)[None]

    return Peer("tilewise", lambda task: (), prepare, layout="b n h d")
