"""One block of a plan on tensors: the tile of some rows and heads as a problem of its own, planned and launched like any other
call. What a block gives is a part of a sum, so nothing of it is rounded to the inputs' dtype."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .._errors import OptionError
from ..api import merge
from ..backends import absorb, make_plan
from ..backends.plan import Plan
from ..dropout import Dropout
from ..mask import Full, Tile
from ..ops import launch, launch_backward, launch_onto
from ..problem import Inputs, Partial, Problem
from .program import Block, Heads
from .sight import corner, simplest
from .teams import key_heads


def block_problem(problem: Problem, block: Block) -> Problem:
    """The problem of a block. Its sink, which belongs to rows and not to keys, comes at the end of them (`Kernel.finish`)."""
    p, heads = problem, block.heads
    sizes = {"n": block.q.count, "s": block.kv.count, "h": heads.count, "g": key_heads(heads, p.group).count}
    slopes = None if p.score.alibi is None else (*p.score.alibi[:-1], heads.count)
    mask = Full() if block.kind == Tile.FULL else p.mask.of_heads(*heads)
    layout, score = corner(p, block.q, block.kv), replace(p.score, alibi=slopes, sink=False)
    if slopes is None and p.dropout is None:  # nothing asks where rows are but the mask
        mask, layout = simplest(mask, layout)
    return replace(p, **sizes, layout=layout, mask=mask, score=score, dropout=block_dropout(p, block), wide=True)


def block_dropout(problem: Problem, block: Block) -> Dropout | None:
    """The whole problem's pattern, from the first head of a block on; rows and keys know their positions."""
    drop = problem.dropout
    return None if drop is None else replace(drop, head=drop.head + block.heads.first)


@dataclass(frozen=True, eq=False)
class Kernel:
    """Blocks of a problem, on the named backend or the first that does not refuse. `alibi` "h" or "b h" and `sink` "h" are the
    whole model's. Plans of blocks are kept, so one kernel should serve all calls of a plan: see `with_arrays`."""

    problem: Problem
    alibi: Tensor | None = None
    sink: Tensor | None = None
    backend: str | None = None
    plans: dict[tuple[Block, bool], Plan] = field(default_factory=dict)

    def __post_init__(self) -> None:
        score = self.problem.score
        if score.bias is not None:
            raise OptionError(f"bias {score.bias} 'b h n s' has rows of no single rank: use alibi or a mask")
        for name, said, given in (("alibi", score.alibi is not None, self.alibi), ("sink", score.sink, self.sink)):
            if said != (given is not None):
                holds = ("an", "no") if said else ("no", "an")
                raise OptionError(f"the problem has {holds[0]} {name} array and the kernel {holds[1]} one")

    def with_arrays(self, alibi: Tensor | None, sink: Tensor | None, dropout: Dropout | None) -> Kernel:
        """The same blocks for another call: its slopes, sinks and seed."""
        return replace(self, problem=replace(self.problem, dropout=dropout), alibi=alibi, sink=sink)

    def plan(self, block: Block, wide: bool = True) -> Plan:
        """How a block runs whose results are in the dtype of sums, or not `wide`, in that of inputs."""
        plan = self.plans.get((block, wide))
        if plan is None:
            problem = replace(block_problem(self.problem, block), wide=wide)
            plan = self.plans[block, wide] = make_plan(problem, self.backend)
        drop = block_dropout(self.problem, block)
        return plan if drop is None else replace(plan, problem=replace(plan.problem, dropout=drop))

    def forward(self, block: Block, q: Tensor, k: Tensor, v: Tensor) -> Partial:
        """Attention over the keys of a block alone: o "b n h e" and lse "b h n", both in the dtype of sums."""
        return launch(self.plan(block), self._inputs(block, q, k, v))

    def attend(self, block: Block, q: Tensor, k: Tensor, v: Tensor, onto: Partial | None, wide: bool) -> Partial:
        """merge(onto, forward), o in the dtype of sums or, not `wide`, rounded once to that of q. `onto` may be overwritten
        and returned where that is all."""
        if onto is not None:
            both = launch_onto(self.plan(block, wide), self._inputs(block, q, k, v), onto)
            if both is not None:
                return both
        done = self.forward(block, q, k, v)
        if onto is not None:
            done = onto if absorb(onto, done) else merge(onto, done)
        return done if wide else Partial(done.o.to(q.dtype), done.lse)

    def backward(
        self, block: Block, qkv: tuple[Tensor, Tensor, Tensor], do: Tensor, lse: Tensor, total: Tensor, nothing: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of a block, in the dtype of sums, from what is known of whole rows: lse and total = delta − dlse "b h n".

        A backend works out rowsum(do∘o) − dlse; with o = 0 (`nothing`, as do) and dlse = −total that is total itself."""
        x = self._inputs(block, *qkv)
        found = launch_backward(self.plan(block), x, Partial(nothing, lse), Partial(do, -total), ("q", "k", "v"))
        return found.q, found.k, found.v

    def finish(self, part: Partial, heads: Heads) -> Partial:
        """Rows of these heads once they have seen all their keys: the sink is one more part, without a value."""
        if self.sink is None:
            return part
        sink = self.sink.detach()[heads.first : heads.past].to(part.lse.dtype)
        return merge(part, Partial(torch.zeros_like(part.o), sink[None, :, None].expand_as(part.lse)))

    def _inputs(self, block: Block, q: Tensor, k: Tensor, v: Tensor) -> Inputs[Tensor]:
        slopes = None if self.alibi is None else self.alibi.detach()[..., block.heads.first : block.heads.past]
        return Inputs(q, k, v, alibi=slopes)
