"""Who looks at what in each round and what moves meanwhile, in arrays over teams: `moves`, from a survey."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .program import BATCH, Heads
from .survey import Survey
from .teams import Teams


class Rows(NamedTuple):
    """Rows that go from team `source` to team `target`: arrays of one length, in the order of a plan's messages."""

    source: np.ndarray
    target: np.ndarray
    count: np.ndarray

    def some(self) -> Rows:
        """Those that are any rows at all."""
        return Rows(*(x[self.count > 0] for x in self))


NOTHING = Rows(*np.zeros((3, 0), np.int64))


class Share(NamedTuple):
    """Part `index` of `parts` of a member's key heads."""

    index: int = 0
    parts: int = 1

    def of(self, heads: Heads) -> Heads:
        return Heads(*(heads.first + heads.count * x // self.parts for x in (self.index, self.index + 1)))


class Transfer(NamedTuple):
    """Keys that are posted at the start of a round and waited for before round `due`."""

    channel: str
    due: int
    rows: Rows
    share: Share = Share()


class Pass(NamedTuple):
    """A round. Team t looks at keys of teams `owners[:, t]`: `held` rows in `slot` ("": its own ones; None: nothing yet), of
    which so many of its query `rows` see something, `pairs` in all, nothing hidden where `full`. `own`: rows of its own keys
    that are copied there; `kept`: rows of its own whose gradients are added to what has come home. `home`: gradients that
    leave it. `posts`: what is under way meanwhile."""

    owners: np.ndarray
    slot: str | None
    held: np.ndarray
    rows: np.ndarray
    pairs: np.ndarray
    full: np.ndarray
    home: Rows
    posts: list[Transfer]
    share: Share = Share()
    own: np.ndarray | None = None
    kept: np.ndarray | None = None


def passes(teams: Teams, found: Survey, backward: bool = False) -> list[Pass]:
    """The rounds of the teams' method."""
    make: dict[str, Callable[[Teams, Survey], list[Pass]]]
    make = {"ring": _ring, "double": _double, "direct": _direct, "gather": _gather, "tree": _stay}
    made = make[teams.method.movement](teams, found)
    if backward and len(made) > 1 and made[0].slot == "":
        t = np.arange(teams.count)
        rows = np.array([rows.count for rows in teams.kv_rows])
        made.append(made[0]._replace(posts=[], held=rows, kept=found.needs[t, t]))
        made[0] = _wait_only(teams)._replace(posts=made[0].posts)
    return made


def _wait_only(teams: Teams) -> Pass:
    """A round in which nobody looks at anything."""
    zero = np.zeros(teams.count, np.int64)
    return Pass(zero[None][:0], None, zero, zero, zero, zero > 0, NOTHING, [])


def _look(teams: Teams, found: Survey, owners: np.ndarray, keys: np.ndarray, slot: str, held: np.ndarray) -> Pass:
    """Team t looks at keys of teams `owners[:, t]`, `keys[t]` of them from the first to the last that it sees."""
    t = np.arange(teams.count)
    pairs = found.pairs[t, owners]
    first = np.where(pairs > 0, found.first[t, owners], 2**62).min(0)
    rows = np.maximum(found.past[t, owners].max(0) - first, 0)
    total, needs = pairs.sum(0), found.needs[t, owners]
    source, target, count = (x.T.ravel() for x in (np.broadcast_to(t, owners.shape), owners, needs))
    away = source != target
    home = Rows(source[away], target[away], count[away]).some()
    return Pass(owners, slot, held, rows, total, (total > 0) & (total == teams.problem.b * rows * keys), home, [])


def _stay(teams: Teams, found: Survey) -> list[Pass]:
    """Everybody looks at its own keys."""
    t = np.arange(teams.count)
    keys = found.hull(np.ones(len(found.rows), bool), t, t)
    return [_look(teams, found, t[None], keys, "", np.zeros(teams.count, np.int64))]


def _ring(teams: Teams, found: Survey) -> list[Pass]:
    n, step, o = teams.count, teams.method.direction, np.arange(teams.count)
    segment, going = np.arange(len(found.rows)), np.zeros(len(found.rows), bool)
    carried, keys = np.zeros((n + 1, n), np.int64), np.zeros((n, n), np.int64)
    for t in range(n - 1, 0, -1):
        going |= found.seen[(found.owner + step * t) % n, segment]
        carried[t] = found.owned(going)
        keys[t] = found.hull(going, (o + step * t) % n, o)
    made = _stay(teams, found)
    for t in range(1, n):
        if not carried[t].any():
            break
        owner = (o - step * t) % n
        made[-1].posts.append(Transfer("keys", t, Rows((o + step * (t - 1)) % n, (o + step * t) % n, carried[t])))
        made.append(_look(teams, found, owner[None], keys[t][owner], f"kv{t % 2}", carried[t][owner]))
    return made


def _double(teams: Teams, found: Survey) -> list[Pass]:
    n, g, o = teams.count, teams.method.node, np.arange(teams.count)
    segment, nothing = np.arange(len(found.rows)), np.zeros(len(found.rows), bool)

    def place(owner: np.ndarray, a: int, c: int) -> np.ndarray:
        return (owner // g + a) % (n // g) * g + (owner % g + c) % g

    carried, keys = np.zeros((n // g + 1, g, n), np.int64), np.zeros((n // g, g, n), np.int64)
    beyond = nothing
    for a in range(n // g - 1, -1, -1):
        going = nothing
        for c in range(g - 1, -1, -1):
            going = going | found.seen[place(found.owner, a, c), segment]
            held = going if c else ~nothing if a == 0 else going | beyond
            carried[a, c], keys[a, c] = found.owned(held), found.hull(held, place(o, a, c), o)
        beyond = beyond | going
    made = []
    for t in range(n):
        a, c = divmod(t, g)
        here, owner = place(o, a, c), np.argsort(place(o, a, c))
        slot = f"kv{c % 2}" if c else f"far{a % 2}" if a else ""
        made.append(_look(teams, found, owner[None], keys[a, c][owner], slot, carried[a, c][owner] * bool(t)))
        if c == 0 and a + 1 < n // g:
            made[-1].posts.append(Transfer("nodes", t + g, Rows(here, place(o, a + 1, 0), carried[a + 1, 0])))
        if c + 1 < g:
            made[-1].posts.append(Transfer("keys", t + 1, Rows(here, place(o, a, c + 1), carried[a, c + 1])))
    return made


def _fetch(teams: Teams, found: Survey, owners: np.ndarray, slot: str) -> tuple[Pass, Rows]:
    """Teams look at what they need of `owners`, fetched from there."""
    t = np.arange(teams.count)
    needs = found.needs[t, owners]
    pass_ = _look(teams, found, owners, needs.sum(0), slot, needs.sum(0))
    return pass_, Rows(pass_.home.target, pass_.home.source, pass_.home.count)


def _direct(teams: Teams, found: Survey) -> list[Pass]:
    n, t = teams.count, np.arange(teams.count)
    far = [x for x in range(1, n) if found.needs[t, (t - x) % n].any()]
    size = min(teams.method.at_once, BATCH // 2)
    made = _stay(teams, found)
    for j, k in enumerate(range(0, len(far), size), 1):
        owners = (t - np.array(far[k : k + size])[:, None]) % n
        pass_, rows = _fetch(teams, found, owners, f"kv{j % 2}")
        made[-1].posts.append(Transfer("keys", j, rows))
        made.append(pass_)
    return made


def _gather(teams: Teams, found: Survey) -> list[Pass]:
    n, t, groups = teams.count, np.arange(teams.count), teams.method.groups
    pass_, rows = _fetch(teams, found, (t - np.arange(n)[:, None]) % n, "kv1")
    made = [_wait_only(teams)]
    for j in range(1, groups + 1):
        share = Share(j - 1, groups)
        made[-1].posts.append(Transfer("keys", j, rows, share))
        made.append(pass_._replace(slot=f"kv{j % 2}", share=share, own=found.needs[t, t], kept=found.needs[t, t], posts=[]))
    return made
