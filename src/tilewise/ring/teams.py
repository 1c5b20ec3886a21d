"""Who works with whom. Neighbouring ranks form a team that holds its rows together, and each member of it a share of the
heads; keys move between teams. A team of one is a rank with its own rows and all heads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from ..problem import Problem
from .owners import Owners, check_sides
from .program import Heads, Method
from .runs import Runs
from .sight import needed


@dataclass(frozen=True)
class Teams:
    """Team t is ranks t·size … t·size + size − 1; its member u is rank t·size + u."""

    problem: Problem
    q: Owners
    kv: Owners
    method: Method

    def __post_init__(self) -> None:
        check_sides(self.problem, self.q, self.kv)
        self.method.check(self.q.world, self.q.replicated)

    @property
    def size(self) -> int:
        return self.method.heads

    @property
    def count(self) -> int:
        return self.q.world // self.size

    def rank(self, team: int, member: int) -> int:
        return team * self.size + member

    def mates(self, rank: int) -> list[int]:
        """The other members, the next one first."""
        team, member = divmod(rank, self.size)
        return [self.rank(team, (member + x) % self.size) for x in range(1, self.size)]

    @cached_property
    def q_rows(self) -> list[Runs]:
        """The query rows of each team."""
        return self._rows(self.q)

    @cached_property
    def kv_rows(self) -> list[Runs]:
        """The key rows of each team."""
        return self._rows(self.kv)

    def _rows(self, owners: Owners) -> list[Runs]:
        shards = owners.shards
        return [Runs.union(shards[t : t + self.size]) for t in range(0, len(shards), self.size)]

    @cached_property
    def needs(self) -> list[list[Runs]]:
        """`needs[t][o]`: which key rows of team o some query row of team t sees, counted in the rows of o."""
        wanted = [needed(self.problem, rows) if rows.count else Runs() for rows in self.q_rows]
        return [[_found(theirs, every) for theirs in self.kv_rows] for every in wanted]

    def q_heads(self, member: int) -> Heads:
        """The query heads of a member, of nearly equal number."""
        h = self.problem.h
        return Heads(h * member // self.size, h * (member + 1) // self.size)

    def kv_heads(self, member: int) -> Heads:
        """The key heads that they read. One that several members read is sent to each."""
        return key_heads(self.q_heads(member), self.problem.group)


def key_heads(heads: Heads, group: int) -> Heads:
    """The key heads that these query heads read."""
    return Heads(heads.first // group, -(-heads.past // group)) if heads.count else Heads(0, 0)


def even(heads: Heads, group: int) -> list[Heads]:
    """Query heads in at most three parts, each of which shares its key heads evenly: a call cannot do otherwise.

    >>> even(Heads(1, 8), 3)
    [Heads(first=1, past=3), Heads(first=3, past=6), Heads(first=6, past=8)]
    """
    lo, hi = -(-heads.first // group) * group, heads.past // group * group
    edges = [heads.first, lo, hi, heads.past] if lo <= hi else [heads.first, heads.past]
    return [Heads(a, b) for a, b in pairwise(edges) if a < b]


def _found(rows: Runs, intervals: Runs) -> Runs:
    """The indices of `rows` that lie in one of some intervals of the sequence."""
    first, past = np.array([(x.start, x.stop) for x in intervals.ranges], np.int64).reshape(-1, 2).T
    return Runs.spans(rows.find(first).tolist(), rows.find(past).tolist())
