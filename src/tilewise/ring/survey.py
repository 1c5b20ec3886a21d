"""Who sees how much of whom, for all pairs of teams at once: what a forecast for thousands of ranks is made of. Agrees with
`sight`, which is asked pair by pair."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..positions import Dense
from ..problem import Problem
from ..tiles import blocks
from .runs import Runs
from .sight import ROWS_AT_ONCE, bounds, dense, needed, spans_of, take_positions
from .teams import Teams

Looked = tuple[np.ndarray, np.ndarray, np.ndarray]
"""For each owner: pairs, the first query row that sees something of it, and the end of these rows."""


@dataclass(frozen=True)
class Survey:
    """Row t of "team team" is what team t sees of each team. `pairs`: visible pairs of one head (on average) over the batch;
    `first`, `past`: its query rows that see something, and where they end; `needs`: key rows that some of them see.

    Keys are cut into segments, so small that a team sees all of one or nothing: `seen` is "team segment", `owner` and `rows`
    are the team that has a segment and how many rows it is. Segments come owner by owner, in the order of rows."""

    pairs: np.ndarray
    first: np.ndarray
    past: np.ndarray
    needs: np.ndarray
    seen: np.ndarray
    owner: np.ndarray
    rows: np.ndarray
    ends: tuple[np.ndarray, np.ndarray]
    """The first segment of each team that each team sees, and the last one's successor."""

    @property
    def count(self) -> int:
        return len(self.pairs)

    def whole(self, replicated: bool) -> tuple[float, float]:
        """Query rows that see something, and visible pairs, of the whole problem. `replicated`: every team has all queries."""
        first = np.where(self.past > 0, self.first, 2**62).min(1)
        rows, pairs = np.maximum(self.past.max(1) - first, 0), self.pairs.sum(1)
        return (float(rows[0]), float(pairs[0])) if replicated else (float(rows.sum()), float(pairs.sum()))

    def owned(self, weights: np.ndarray) -> np.ndarray:
        """Rows of each owner's segments, those with `weights` False left out."""
        return np.bincount(self.owner, weights * self.rows, self.count).astype(np.int64)

    def hull(self, held: np.ndarray, teams: np.ndarray, owners: np.ndarray) -> np.ndarray:
        """How many rows of `held` segments lie between the first and the last that each of `teams` sees of each of `owners`."""
        before = np.r_[0, np.cumsum(held * self.rows)]
        return before[self.ends[1][teams, owners]] - before[self.ends[0][teams, owners]]


def survey(teams: Teams) -> Survey:
    """The survey of some teams' queries and keys."""
    n, ground = teams.count, Ground.of(teams)
    pairs, first, past = np.zeros((n, n)), np.zeros((n, n), np.int64), np.zeros((n, n), np.int64)
    spans = []
    for t, rows in enumerate(teams.q_rows):
        if not rows.count or not teams.problem.b:
            spans.append(Runs())
        elif teams.problem.mask.pointwise:
            spans.append(needed(teams.problem, rows))
            pairs[t], first[t], past[t] = ground.look_at_points(teams.problem, rows)
        else:
            edges = bounds(teams.problem, rows)
            spans.append(spans_of(*edges))
            pairs[t], first[t], past[t] = ground.look(*edges)
    return _with_segments(teams, spans, (pairs, first, past))


def _with_segments(teams: Teams, spans: list[Runs], seen_rows: Looked) -> Survey:
    """Cut every team's keys where anybody's need begins or ends."""
    n = teams.count
    edges = np.unique([edge for runs in spans for x in runs.ranges for edge in (x.start, x.stop)]).astype(np.int64)
    places, lengths, owners = [], [], []
    for o, rows in enumerate(teams.kv_rows):
        if rows.count:
            cuts = np.unique(np.r_[0, rows.find(edges), rows.count])
            places.append(rows.at(cuts[:-1]))
            lengths.append(np.diff(cuts))
            owners.append(np.full(len(cuts) - 1, o))
    place, length, owner = (np.concatenate([np.zeros(0, np.int64), *x]) for x in (places, lengths, owners))
    seen, needs = np.zeros((n, len(place)), bool), np.zeros((n, n), np.int64)
    ends = np.zeros((n, n), np.int64), np.zeros((n, n), np.int64)
    for t, runs in enumerate(spans):
        if not runs.count or not len(place):
            continue
        start, stop = np.array([(x.start, x.stop) for x in runs.ranges]).T
        at = np.searchsorted(start, place, "right") - 1
        seen[t] = (at >= 0) & (place < stop[at])
        needs[t] = np.bincount(owner, seen[t] * length, n)
        found = np.flatnonzero(seen[t])
        whose, index = np.unique(owner[found], return_index=True)
        ends[0][t, whose] = found[index]
        ends[1][t, whose] = found[np.r_[index[1:], len(found)] - 1] + 1
    return Survey(*seen_rows, needs, seen, owner, length, ends)


@dataclass(frozen=True)
class Ground:
    """Where every team's keys are. `start stop owner`: their runs, owner by owner; `smooth`: all of these have step 1."""

    keys: list[Runs]
    start: np.ndarray
    stop: np.ndarray
    owner: np.ndarray
    smooth: bool

    @classmethod
    def of(cls, teams: Teams) -> Ground:
        runs = [(x.start, x.stop, o) for o, rows in enumerate(teams.kv_rows) for x in rows.ranges]
        smooth = all(x.step == 1 for rows in teams.kv_rows for x in rows.ranges)
        return cls(teams.kv_rows, *np.array(runs, np.int64).reshape(-1, 3).T, smooth=smooth)

    def look(self, first: np.ndarray, past: np.ndarray) -> Looked:
        """Pairs and the ends of rows that see something of each owner, for rows that see keys [first, past), "b rows"."""
        one = first[:1], past[:1]
        alike = len(first) == 1 or ((first == one[0]).all() and (past == one[1]).all())
        some = np.flatnonzero((one[0] < one[1])[0])
        lo, hi = one[0][0, some], one[1][0, some]
        if alike and self.smooth and (lo[1:] >= lo[:-1]).all() and (hi[1:] >= hi[:-1]).all():
            pairs, i, j = self._look_in_order(lo, hi, some)
            return pairs * len(first), i, j
        return self._look_one_by_one(first, past)

    def _look_in_order(self, first: np.ndarray, past: np.ndarray, rows: np.ndarray) -> Looked:
        """Where neither end ever goes back. |[f, p) ∩ [a, c)| = min(p, c) − min(p, a) − min(f, c) + min(f, a), and a sum of
        min(x, e) over increasing x is a search and a running sum."""
        n = len(self.keys)
        if not len(rows) or not len(self.start):
            return np.zeros(n), np.zeros(n, np.int64), np.zeros(n, np.int64)

        def below(x: np.ndarray, edge: np.ndarray) -> np.ndarray:
            at = np.searchsorted(x, edge)
            return np.r_[0, np.cumsum(x)][at] + (len(x) - at) * edge

        a, c = self.start, self.stop
        pairs = below(past, c) - below(past, a) - below(first, c) + below(first, a)
        i, j = np.searchsorted(past, a, "right"), np.searchsorted(first, c, "left")
        some = i < j
        lo, hi = np.full(n, 2**62), np.zeros(n, np.int64)
        np.minimum.at(lo, self.owner[some], rows[i[some]])
        np.maximum.at(hi, self.owner[some], rows[j[some] - 1] + 1)
        return np.bincount(self.owner, pairs, n), np.minimum(lo, hi), hi

    def _look_one_by_one(self, first: np.ndarray, past: np.ndarray) -> Looked:
        n = len(self.keys)
        pairs, lo, hi = np.zeros(n), np.zeros(n, np.int64), np.zeros(n, np.int64)
        for o, keys in enumerate(self.keys):
            sees = keys.find(past) - keys.find(first)
            rows = np.flatnonzero((sees > 0).any(0))
            if len(rows):
                pairs[o], lo[o], hi[o] = sees.sum(), rows[0], rows[-1] + 1
        return pairs, lo, hi

    def look_at_points(self, problem: Problem, rows: Runs) -> Looked:
        """The same for a mask that tests pairs."""
        p, layout = problem, dense(problem)
        corner = Dense(p.b, take_positions(layout.q, rows), layout.kv)
        sees = np.zeros((rows.count, len(self.keys)), np.int64)
        for i in blocks(rows.count, ROWS_AT_ONCE):
            keep = p.mask.grid(corner, slice(0, p.b), i, slice(0, p.s))
            count = np.broadcast_to(keep, (p.b, p.h, *keep.shape[2:])).sum((0, 1))
            for o, keys in enumerate(self.keys):
                sees[i, o] = count[:, keys.array()].sum(1)
        some = sees > 0
        lo = np.where(some.any(0), some.argmax(0), 0)
        hi = np.where(some.any(0), rows.count - some[::-1].argmax(0), 0)
        return sees.sum(0) / p.h, lo, hi
