"""What tests of plans for many devices share: problems without arrays, layouts, methods, and plans with one thing changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np
from hypothesis import strategies as st

from tilewise.mask import Mask
from tilewise.positions import Positions
from tilewise.problem import Inputs, Options, Problem
from tilewise.ring import owners
from tilewise.ring.owners import Owners
from tilewise.ring.program import Method, Op, Plan, Post

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
