"""What tests of plans for many devices share: problems without arrays, layouts, methods, and plans with one thing changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from tilewise.mask import Mask
from tilewise.positions import Positions
from tilewise.problem import Inputs, Options, Partial, Problem
from tilewise.reference import plain
from tilewise.ring import local, owners
from tilewise.ring.kernel import Kernel
from tilewise.ring.local import LocalTransport
from tilewise.ring.owners import Owners
from tilewise.ring.program import Method, Op, Plan, Post
from tilewise.ring.schedule import make_plan

T = TypeVar("T")


def pose(n: int, s: int, mask: Mask | None = None, b: int = 1, h: int = 6, g: int = 3,
         positions: tuple[Positions, Positions] | None = None) -> Problem:  # fmt: skip
    """A float32 problem of these sizes, with head sizes 5 and 3."""
    shapes = (b, n, h, 5), (b, s, g, 5), (b, s, g, 3)
    q, k, v = (np.broadcast_to(np.float32(0), shape) for shape in shapes)
    problem = Problem.describe(Inputs(q, k, v), Options(mask, positions=positions))
    problem.check_values()
    return problem


LAYOUTS: dict[str, Callable[[int, int], Owners]] = {
    "contiguous": owners.contiguous,
    "zigzag": owners.zigzag,
    "striped": owners.striped,
    "striped by 3": lambda length, world: owners.striped(length, world, 3),
}


def shuffled(length: int, world: int, seed: int) -> Owners:
    """Rows dealt out at random: a layout that no formula knows."""
    hand = np.random.default_rng(seed).integers(0, world, length)
    return Owners(length, tuple(owners.Runs.of(np.flatnonzero(hand == r)) for r in range(world)))


def methods(world: int) -> st.SearchStrategy[Method]:
    """Any method that `world` ranks can follow with queries shared out."""
    teams = st.sampled_from([u for u in range(1, world + 1) if world % u == 0])

    def of_teams(u: int) -> st.SearchStrategy[Method]:
        nodes = st.sampled_from([x for x in range(1, world // u + 1) if world // u % x == 0])
        return st.one_of(
            st.builds(Method, direction=st.sampled_from([1, -1]), heads=st.just(u)),
            st.builds(Method, st.just("double"), node=nodes, heads=st.just(u)),
            st.builds(Method, st.just("direct"), at_once=st.integers(1, world), heads=st.just(u)),
            st.builds(Method, st.just("gather"), groups=st.integers(1, 4), heads=st.just(u)),
        )

    return teams.flatmap(of_teams)


def changed(plan: Plan, rank: int, change: Callable[[list[Op]], list[Op]]) -> Plan:
    """The plan with the operations of one rank changed."""
    programs = list(plan.programs)
    programs[rank] = programs[rank]._replace(ops=tuple(change(list(programs[rank].ops))))
    return replace(plan, programs=tuple(programs))


def at(index: int, *ops: Op) -> Callable[[list[Op]], list[Op]]:
    """Put these operations where one was: none to drop it, itself twice to double it."""
    return lambda old: [*old[:index], *ops, *old[index + 1 :]]


def posts(plan: Plan, rank: int) -> list[tuple[int, Post]]:
    """The batches of a rank, with their place in its program."""
    return [(x, op) for x, op in enumerate(plan.programs[rank].ops) if isinstance(op, Post)]


def find(plan: Plan, rank: int, kind: type[T], which: int = 0) -> tuple[int, T]:
    """One operation of a kind, with its place in the rank's program."""
    return [(x, op) for x, op in enumerate(plan.programs[rank].ops) if isinstance(op, kind)][which]


def with_posts(plan: Plan, which: int, change: Callable[[int, Post], Post]) -> Plan:
    """The plan with every rank's batch number `which` changed."""
    for r in range(plan.world):
        x, post = posts(plan, r)[which]
        plan = changed(plan, r, at(x, change(r, post)))
    return plan


# ---- plans run on tensors

NAMES = ("o", "lse", "dq", "dk", "dv")
"""What a plan's two directions give."""


@dataclass(frozen=True)
class Question:
    """A problem on random tensors, and what is right by the definition in float64 of these very tensors."""

    x: Inputs[Tensor]
    options: Options
    grads: Partial

    @classmethod
    def ask(cls, n: int, s: int, options: Options = Options(), b: int = 1, heads: tuple[int, int] = (6, 3),
            size: tuple[int, int] = (5, 3), dtype: torch.dtype = torch.float64,
            extras: str = "") -> Question:  # fmt: skip
        """Random tensors of these sizes; `extras`: "alibi", "sink" or both."""
        draw = torch.Generator().manual_seed(n * 1000 + s)
        (h, g), (d, e) = heads, size
        sizes = ((b, n, h, d), (b, s, g, d), (b, s, g, e), (b, n, h, e), (b, h, n), (h,), (h,))
        q, k, v, do, dlse, slopes, sinks = (torch.randn(x, generator=draw, dtype=torch.float64) for x in sizes)
        x = Inputs(q, k, v, alibi=slopes.abs() / 8 if "alibi" in extras else None, sink=sinks if "sink" in extras else None)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return cls(x.map(lambda t: t.to(dtype)), options, Partial(do.to(dtype), dlse.to(wide)))

    @cached_property
    def problem(self) -> Problem:
        return Problem.describe(self.x, self.options)

    @cached_property
    def right(self) -> tuple[np.ndarray, ...]:
        x = self.x.map(lambda t: t.double().numpy())
        problem = Problem.describe(x, self.options)
        partial = plain.attention(problem, x)
        found = plain.gradients(problem, x, *(t.double().numpy() for t in self.grads))
        return partial.o, partial.lse, found.q, found.k, found.v

    def kernel(self, backend: str | None = None) -> Kernel:
        return Kernel(self.problem, self.x.alibi, self.x.sink, backend)

    def plans(self, q: Owners, kv: Owners, method: Method) -> tuple[Plan, Plan]:
        """Forward and backward."""
        forward, backward = (make_plan(self.problem, q, kv, method, backward) for backward in (False, True))
        return forward, backward

    def answer(self, plans: tuple[Plan, Plan], kernel: Kernel | None = None,
               transport: Callable[[], LocalTransport | None] = lambda: None) -> tuple[Tensor, ...]:  # fmt: skip
        """What virtual ranks say: o, lse, dq, dk, dv."""
        kernel, qkv = self.kernel() if kernel is None else kernel, (self.x.q, self.x.k, self.x.v)
        out = local.attend(plans[0], kernel, qkv, transport())
        return *out, *local.gradients(plans[1], kernel, qkv, out, self.grads, transport())

    def errors(self, found: tuple[Tensor, ...]) -> dict[str, float]:
        """The relative L2 error of each quantity; infinite where infinities or NaN are not where they should be."""
        return {name: error(a, b) for name, a, b in zip(NAMES, found, self.right, strict=True)}


def error(found: Tensor, right: np.ndarray) -> float:
    """The relative L2 error."""
    have, finite = found.detach().double().numpy(), np.isfinite(right)
    if have.shape != right.shape or not np.array_equal(have[~finite], right[~finite]) or not np.isfinite(have[finite]).all():
        return float("inf")
    return float(np.linalg.norm(have[finite] - right[finite])) / (float(np.linalg.norm(right[finite])) or 1.0)


EXACT = 1e-12
"""Float64 results differ from the definition by roundings alone."""


def exact(errors: dict[str, float]) -> bool:
    """Whether every quantity is right in float64."""
    return all(x < EXACT for x in errors.values())
