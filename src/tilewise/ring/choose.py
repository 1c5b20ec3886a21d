"""Which layout and method suit a problem and a cluster: every candidate is simulated, and the choice says why.

A layout decides whether work is equal and what has to travel; a method, whether that can hide behind work. Stripes are left
out: every step of theirs is half hidden, so a kernel does more for the same pairs than in zigzag's rectangles."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from .._errors import OptionError
from ..problem import Problem
from . import owners
from .links import Cluster
from .owners import Owners
from .prices import Prices
from .program import Method, Plan
from .runs import Runs
from .sight import area
from .simulate import Forecast, simulate
from .survey import Survey, survey
from .teams import Teams

ALIKE = 1.05
"""Times within this factor of the best count as equal, for a forecast is no better than that: then the one that leaves least
communication in the open is chosen (the network is what a forecast knows least about), then the faster, by whole percents,
then the one with less memory."""

HOPELESS = 1.1
"""A layout whose busiest rank alone takes this many times as long as the best candidate is not simulated."""

UNEQUAL = 1.05
"""Above this share of the mean on the busiest rank, rows are dealt out by area too."""

Sides = tuple[Owners, Owners]


class Candidate(NamedTuple):
    """A layout and a method with what they would take. `backward` is None where only forward was asked for; `reach`: of how
    many other ranks (or teams) a rank needs keys, at most."""

    layout: str
    method: Method
    q: Owners
    kv: Owners
    forward: Forecast
    backward: Forecast | None
    reach: int

    @property
    def passes(self) -> list[Forecast]:
        return [self.forward] if self.backward is None else [self.forward, self.backward]

    @property
    def total_s(self) -> float:
        return sum(x.total_s for x in self.passes)

    @property
    def efficiency(self) -> float:
        return sum(x.alone_s for x in self.passes) / (self.forward.world * self.total_s) if self.total_s else 1.0

    @property
    def link_s(self) -> float:
        """Seconds that the busiest links work, near and far."""
        return float(sum(x.link_s.sum() for x in self.passes))

    @property
    def memory(self) -> int:
        """Bytes of the buffers of the rank with the largest ones."""
        return int(max(x.memory.max() for x in self.passes))

    @property
    def losses(self) -> dict[str, float]:
        """What keeps it from the whole rate of N devices, as shares of its time, largest first."""
        whole = self.total_s or 1.0
        shares = {name: sum(x.losses[name] * x.total_s for x in self.passes) / whole for name in self.forward.losses}
        return dict(sorted(shares.items(), key=lambda x: -x[1]))

    @property
    def binds(self) -> str:
        """The largest loss, in words."""
        name, share = next(iter(self.losses.items()))
        return f"{name} {share:.1%}" if share >= 0.0005 else "nothing"

    def __str__(self) -> str:
        figures = f"{1e3 * self.total_s:>10.3f} ms  {self.efficiency:>6.1%}  {self.memory / 2**30:>7.2f} GiB"
        return f"{self.layout:<10}  {self.method!s:<26}  {figures}  {self.binds}"


@dataclass(frozen=True)
class Choice:
    """The candidate that was chosen (the first one) and all others, fastest first; `refused`: those that need more memory than
    there is; `skipped`: layouts that no method could have made fast enough. Prints why."""

    problem: Problem
    cluster: Cluster
    candidates: tuple[Candidate, ...]
    refused: tuple[Candidate, ...] = ()
    skipped: tuple[str, ...] = ()

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    @property
    def layout(self) -> str:
        return self.best.layout

    @property
    def method(self) -> Method:
        return self.best.method

    @property
    def q(self) -> Owners:
        return self.best.q

    @property
    def kv(self) -> Owners:
        return self.best.kv

    @cached_property
    def why(self) -> str:
        """One sentence on the choice."""
        best, others = self.best, sorted(self.candidates[1:], key=lambda x: x.total_s)
        text = f"{best.layout} with {best.method}: {1e3 * best.total_s:.3f} ms, "
        text += f"{best.efficiency:.1%} of {best.forward.world} devices"
        if best.forward.balance == 1:
            text += ", work exactly equal"
        else:
            text += f", busiest rank {best.forward.balance - 1:.1%} above the mean"
        text += f"; what binds: {best.binds}"
        if 0 < best.reach < best.forward.world // best.method.heads - 1:
            text += f"; a halo: nobody needs keys of more than {best.reach} others"
        faster = [x for x in others if x.total_s < best.total_s]
        if faster:
            gap = best.total_s / faster[0].total_s - 1
            text += f"; {faster[0].layout} with {faster[0].method} is {gap:.1%} faster, but leaves more communication in the"
            text += " open or takes more memory"
        elif others:
            text += f"; next is {others[0].layout} with {others[0].method}, {others[0].total_s / best.total_s - 1:.1%} slower"
        return text

    def __str__(self) -> str:
        lines = [self.why, *(f"  {x}" for x in self.candidates)]
        lines += [f"  {x}, but needs {x.memory / 2**30:.1f} GiB a rank" for x in self.refused]
        return "\n".join([*lines, *(f"  {x}" for x in self.skipped)])


def choose(
    problem: Problem,
    world: int,
    cluster: Cluster = Cluster(),
    backward: bool = True,
    layout: str | None = None,
    method: Method | None = None,
    memory: int | None = None,
) -> Choice:
    """Simulate what could suit (or only a given `layout` or `method`) and choose. `backward`: judge forward and backward
    together; `memory`: bytes that the buffers of a rank may take at most."""
    tried = layouts(problem, world) if layout is None else {layout: sides_named(layout, problem, world)}
    search = Search(problem, cluster, backward)
    for name, sides in tried.items():
        fitting = [Method("tree")] if sides[0].replicated else methods(problem, world, cluster) if method is None else [method]
        for one in fitting:
            search.add(name, sides, one)
    found = search.found
    fits = sorted((x for x in found if memory is None or x.memory <= memory), key=lambda x: x.total_s)
    if not fits:
        least = min(x.memory for x in found)
        raise OptionError(f"memory: no method fits into {memory} bytes a rank; the smallest needs {least}")
    alike = [x for x in fits if x.total_s <= ALIKE * fits[0].total_s]

    def rank(x: Candidate) -> tuple[float, ...]:
        slower = round(x.total_s / fits[0].total_s, 2) if fits[0].total_s else 1.0
        return round(x.losses["communication"], 2), slower, x.memory, x.link_s, found.index(x)

    best = min(alike, key=rank)
    rest = [x for x in fits if x is not best]
    return Choice(problem, cluster, (best, *rest), tuple(x for x in found if x not in fits), tuple(search.skipped))


class Search:
    """Simulates candidates. A survey serves all methods with teams of one size, and says whether it is worth it: no method is
    faster than the busiest team's pairs at the rate of one device."""

    def __init__(self, problem: Problem, cluster: Cluster, backward: bool) -> None:
        self.problem, self.cluster, self.directions = problem, cluster, (False, True)[: 1 + backward]
        self.found: list[Candidate] = []
        self.skipped: list[str] = []
        self._surveys: dict[tuple[str, int], Survey] = {}

    def add(self, name: str, sides: Sides, method: Method) -> None:
        """One more candidate, unless it cannot be near the best one so far."""
        if method.heads == sides[0].world > 1 and any(x.method == method for x in self.found):
            return  # every rank gets all rows: layouts make no difference
        if (name, method.heads) not in self._surveys:
            self._surveys[name, method.heads] = survey(Teams(self.problem, *sides, method))
        plans = [Plan(self.problem, *sides, method, backward) for backward in self.directions]
        at_least = self._at_least(plans, self._surveys[name, method.heads])
        if self.found and at_least > HOPELESS * min(x.total_s for x in self.found):
            teams = f" in teams of {method.heads}" if method.heads > 1 else ""
            line = f"{name}{teams}: at least {1e3 * at_least:.3f} ms with any method, for work is unequal"
            self.skipped += [line] if line not in self.skipped else []
            return
        found = self._surveys[name, method.heads]
        passes = [simulate(plan, self.cluster, found) for plan in plans]
        reach = int(((found.needs > 0) & ~np.eye(found.count, dtype=bool)).sum(1).max())
        self.found.append(Candidate(name, method, *sides, passes[0], passes[1] if len(passes) > 1 else None, reach))

    def _at_least(self, plans: list[Plan], found: Survey) -> float:
        pairs = found.pairs.sum(1)
        if plans[0].q.replicated or not pairs.any():
            return 0.0
        share = pairs.max() / pairs.sum() / plans[0].method.heads
        return share * sum(Prices(plan, self.cluster.machine).alone(*found.whole(False)) for plan in plans)


def layouts(problem: Problem, world: int) -> dict[str, Sides]:
    """The layouts that are worth a look: contiguous and zigzag; by area, where those leave work unequal; and queries on every
    rank, where they are fewer than the keys that a rank has.
    The one with the most equal work comes first."""
    found = {name: sides_named(name, problem, world) for name in ("contiguous", "zigzag")}
    balance = {name: _balance(problem, sides) for name, sides in found.items()}
    if problem.n == problem.s and min(balance.values()) > UNEQUAL:
        found["balanced"] = sides_named("balanced", problem, world)
        balance["balanced"] = _balance(problem, found["balanced"])
    found = {name: found[name] for name in sorted(found, key=lambda name: round(balance[name], 2))}
    if problem.n * world < problem.s:
        found["replicated"] = sides_named("replicated", problem, world)
    return found


def sides_named(name: str, problem: Problem, world: int) -> Sides:
    """Owners of queries and keys in a layout given by name."""
    p = problem
    make = owners.BY_NAME
    if name == "balanced":
        q = owners.balanced(p, world)
        return q, q if p.n == p.s else owners.contiguous(p.s, world)
    if name == "replicated":
        return owners.replicated(p.n, world), owners.contiguous(p.s, world)
    if name not in make:
        raise OptionError(f"layout must be one of {', '.join((*make, 'balanced', 'replicated'))}, got {name!r}")
    return make[name](p.n, world), make[name](p.s, world)


def methods(problem: Problem, world: int, cluster: Cluster) -> list[Method]:
    """What could suit: keys straight to whoever needs them, in rings and double rings, gathered; each also inside teams that
    exchange rows for heads, as far as heads and a node reach."""
    found = [Method("direct", at_once=x) for x in _steps(world - 1, 1, 8)]
    found += [Method(), Method("gather"), *([Method("gather", groups=4)] if problem.g % 4 == 0 else [])]
    if cluster.node < world and world % cluster.node == 0:
        found.append(Method("double", node=cluster.node))
    limits = min(cluster.node, problem.h), problem.g, problem.h
    for u in sorted({_largest(world, min(limit, world)) for limit in limits} - {1}):
        teams = world // u
        if u > cluster.node and teams > 1:
            continue
        inner = [Method("direct", at_once=x) for x in _steps(teams - 1, 1, 4)] or [Method()]
        inner += [Method()] * (teams > 1)
        found += [replace(x, heads=u) for x in inner]
    return found


def method_named(text: str) -> Method:
    """The method that prints as `text`.

    >>> method_named("direct by 8, heads over 4")
    Method(movement='direct', direction=1, node=1, at_once=8, groups=1, heads=4)
    """
    match = re.fullmatch(r"(\w+?)(?:([+-]1)| of (\d+)| by (\d+)| in (\d+))?(?:, heads over (\d+))?", text.strip())
    names = ("direction", "node", "at_once", "groups", "heads")
    given = {} if match is None else {k: int(x) for k, x in zip(names, match.groups()[1:], strict=True) if x is not None}
    made = None if match is None else Method(match.group(1), **given)
    if made is None or (set(given) - {"heads"} and str(made) != text.strip()):
        raise OptionError(
            f"method must read like 'ring+1', 'double of 8', 'direct by 2' or 'gather in 4, heads over 2', got {text!r}"
        )
    return made


def _balance(problem: Problem, sides: Sides) -> float:
    """The most visible pairs of a rank over the mean."""
    every = Runs.span(0, problem.s)
    each = np.array([area(problem, rows, every) if rows.count else 0 for rows in sides[0].shards], float)
    return float(each.max() / each.mean()) if each.any() else 1.0


def _steps(most: int, *wanted: int) -> list[int]:
    """Those of `wanted` that are at most `most`, and `most` in place of larger ones."""
    return sorted({min(x, most) for x in wanted if most > 0})


def _largest(world: int, limit: int) -> int:
    """The largest divisor of `world` up to `limit`."""
    return max(x for x in range(1, limit + 1) if world % x == 0)
