"""A method's events from a survey alone: what `schedule` would write for these rows, told in arrays over ranks instead of
operations, so that thousands of ranks take seconds. A test holds the two equal."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .events import Awaited, Event, Sent, Work
from .formulas import Stage
from .heads import KEYS
from .moves import members
from .passes import NOTHING, Pass, Rows, Share, passes
from .prices import Prices
from .program import Heads
from .script import split
from .survey import Survey
from .teams import Teams, even
from .tree import tree_rounds


class Outline:
    """Grows the events of a method. Work is "team member": that of rank team · U + member."""

    def __init__(self, teams: Teams, found: Survey, prices: Prices) -> None:
        self.teams, self.prices, self.plan = teams, prices, prices.plan
        self.n, self.size, self.world = teams.count, teams.size, teams.q.world
        self.passes = passes(teams, found, self.plan.backward)
        self.events: list[Event] = []
        self._steps = 0

    def write(self) -> list[Event]:
        """All events, in order."""
        self._exchange_in()
        self._rounds()
        if self.teams.method.movement == "tree":
            self._tree()
        else:
            self._exchange_out()
        return self.events

    def stages(self) -> list[Stage]:
        """The rounds as memory is counted (`formulas`): one for each slot, as large as the largest of its rounds."""
        nothing = Stage("", [0] * self.n, [0] * self.n)
        found: dict[tuple[str, int, int], Stage] = {}
        for j, x in enumerate(x for x in self.passes if x.slot is not None):
            arrivals = np.bincount(x.home.target, x.home.count, self.n).astype(np.int64)
            key = x.slot or "", j % 2, x.share.index
            have = found.get(key, nothing._replace(slot=x.slot or "", group=x.share.index, groups=x.share.parts))
            rows, home = np.maximum(have.rows, x.held), np.maximum(have.arrivals, arrivals)
            found[key] = have._replace(rows=rows.tolist(), arrivals=home.tolist())
        made: list[Stage] = []
        for (_, parity, _), stage in found.items():
            made += [nothing] * ((len(made) + parity) % 2) + [stage]
        return made

    # rounds

    def _rounds(self) -> None:
        due: dict[int, list[int]] = {}
        begun, home, share, steps = np.zeros(self.n, bool), NOTHING, Share(), []
        for j, pass_ in enumerate(self.passes):
            self._wait(due.pop(j, []))
            for x in pass_.posts:
                due.setdefault(x.due, []).extend(self._post_keys(x.channel, x.rows, "kv", x.share))
            self._look(pass_, begun)
            if self.plan.backward:
                self._arrive(steps, home, share)
                home, share = pass_.home, pass_.share
                steps = self._post_keys("home", home, "dkv", share)
        self._arrive(steps, home, share)

    def _look(self, pass_: Pass, begun: np.ndarray) -> None:
        """Copies of own keys, then blocks, then the merge of each into what there is (but for a team's first one)."""
        teams, group, price = self.teams, self.teams.problem.group, self.prices
        kind, merges = "dq" if self.plan.backward else "part", teams.method.movement != "gather"
        seconds, pairs, merged, copied = (np.zeros((self.n, self.size)) for _ in range(4))
        calls: dict[str, np.ndarray] = {name: np.zeros((self.n, self.size)) for name in ("compute", "merge")}
        for u, every in members(teams):
            mine, held = teams.q_heads(u), pass_.share.of(every)
            heads = Heads(max(mine.first, held.first * group), min(mine.past, held.past * group))
            for part in even(heads, group) if heads.count > 0 else []:
                took = price.attend(pass_.rows, pass_.pairs, part.count, pass_.full)
                seconds[:, u] += took
                calls["compute"][:, u] += took > 0
                pairs[:, u] += pass_.pairs * part.count
                if merges:
                    took = price.onto(kind, pass_.rows * begun, part.count)
                    merged[:, u] += took
                    calls["merge"][:, u] += (took > 0) * self.plan.backward  # a part joins in the block's own kernel
            if pass_.own is not None and held.count:
                copied[:, u] += price.copy("kv", pass_.own, held.count)
            if pass_.kept is not None and held.count and self.plan.backward:
                took = price.combine("dkv", pass_.kept, held.count)
                merged[:, u] += took
                calls["merge"][:, u] += took > 0
        begun |= pass_.pairs > 0
        self._work("copy", copied)
        self._work("compute", seconds, calls["compute"], pairs)
        self._work("merge", merged, calls["merge"])

    def _arrive(self, steps: list[int], home: Rows, share: Share) -> None:
        """Gradients that have come home are added."""
        self._wait(steps)
        added, calls = np.zeros((2, self.n, self.size))
        for u, every in members(self.teams):
            took = self.prices.combine("dkv", home.count, share.of(every).count)
            np.add.at(added[:, u], home.target, took)
            np.add.at(calls[:, u], home.target, took > 0)
        self._work("merge", added, calls)

    def _tree(self) -> None:
        """Parts, or dq, meet on all ranks."""
        kind = "dq" if self.plan.backward else "part"
        rows, heads = self.teams.q_rows[0].count, self.teams.problem.h
        for pairs in tree_rounds(self.world) if rows else []:
            a, b, merges = np.array(pairs, np.int64).T
            size = rows * heads * self.plan.row_bytes(kind, wire=True)
            self._wait(self._post("keys", a, b, np.full(len(a), size)))
            merged = np.zeros(self.world)
            merged[b] = merges * self.prices.combine(kind, rows, heads)
            self._work("merge", merged)
        self._finish()

    # rows for heads

    def _exchange_in(self) -> None:
        if self.size == 1:
            return
        kinds = ("q", "kv", "do", "stats") if self.plan.backward else ("q", "kv")
        self._wait(self._post_heads([self._given(kind) for kind in kinds]))

    def _exchange_out(self) -> None:
        self._finish()
        if self.size == 1:
            return
        if not self.plan.backward:
            self._wait(self._post_heads([self._returned("out"), self._returned("lse")]))
            return
        mine = [self.prices.combine("dkv", self._counts("dkv")[:, u], self._heads("dkv")[u]) for u in range(self.size)]
        self._work("merge", np.stack(mine, 1))
        self._wait(self._post_heads([self._returned("dq")], [self._returned("dkv")]))
        added, calls = np.zeros((2, self.n, self.size))
        for u in range(self.size):
            for mate in set(range(self.size)) - {u}:
                took = self.prices.combine("dkv", self._counts("dkv")[:, u], self._heads("dkv")[mate])
                added[:, u] += took
                calls[:, u] += took > 0
        self._work("merge", added, calls)

    def _finish(self) -> None:
        if not self.plan.backward:
            rows = np.array([x.count for x in self.teams.q_rows])
            done = [self.prices.finish(rows, self.teams.q_heads(u).count) for u in range(self.size)]
            self._work("merge", np.stack(done, 1))

    def _given(self, kind: str) -> np.ndarray:
        """Bytes of a kind that each member sends each, "team member mate": its rows, the mate's heads."""
        size = self._counts(kind)[:, :, None] * self._heads(kind)
        return self._copied(kind, size)

    def _returned(self, kind: str) -> np.ndarray:
        """The same on the way back: the mate's rows, the member's heads."""
        size = self._counts(kind)[:, None, :] * self._heads(kind)[:, None]
        return size * self.plan.row_bytes(kind, wire=True) if kind == "dkv" else self._copied(kind, size)

    def _copied(self, kind: str, size: np.ndarray) -> np.ndarray:
        """Bytes of these rows times heads; what stays with a member is copied."""
        self._work("copy", self.prices.copy(kind, np.einsum("tuu->tu", size), 1))
        return size * self.plan.row_bytes(kind, wire=True)

    def _counts(self, kind: str) -> np.ndarray:
        """Rows of each rank's own, "team member"."""
        owners = self.teams.kv if kind in KEYS else self.teams.q
        return np.array(owners.counts).reshape(self.n, self.size)

    def _heads(self, kind: str) -> np.ndarray:
        """Heads of each member."""
        of: Callable[[int], Heads] = self.teams.kv_heads if kind in KEYS else self.teams.q_heads
        return np.array([of(u).count for u in range(self.size)])

    def _post_heads(self, sent: list[np.ndarray], shares: list[np.ndarray] | None = None) -> list[int]:
        """Messages between mates, "team member mate" bytes each: sender by sender, kind by kind, the next mate first; then
        `shares`, receiver by receiver."""
        t, u, x = np.ogrid[: self.n, : self.size, 1 : self.size]
        r, mate = t * self.size + u + 0 * x, t * self.size + (u + x) % self.size
        source = np.stack([r] * len(sent), 2).ravel()
        target = np.stack([mate] * len(sent), 2).ravel()
        size = np.stack([one[t, u, (u + x) % self.size] for one in sent], 2).ravel()
        for one in shares or []:
            v = np.arange(self.size - 1) + (np.arange(self.size - 1) >= u[0])  # mates in the order of ranks
            source, target = np.r_[source, (t * self.size + v).ravel()], np.r_[target, r.ravel()]
            size = np.r_[size, one[t, v, u].ravel()]
        some = size > 0
        return self._post("heads", source[some], target[some], size[some])

    # events

    def _work(self, kind: str, seconds: np.ndarray, calls: np.ndarray | None = None, pairs: np.ndarray | None = None) -> None:
        """`calls`: operations, one of each rank that has any work unless given."""
        if seconds.any():
            each = seconds > 0 if calls is None else calls
            about = np.zeros(self.world) if pairs is None else pairs.ravel()
            self.events.append(Work(kind, seconds.ravel(), about, each.ravel().astype(float)))

    def _wait(self, steps: list[int]) -> None:
        self.events += [Awaited(step) for step in steps]

    def _post_keys(self, channel: str, rows: Rows, kind: str, share: Share) -> list[int]:
        """Rows of keys, or of their gradients, between members of the same number."""
        rows = rows.some()
        u, heads = np.array([(u, share.of(every).count) for u, every in members(self.teams)], np.int64).reshape(-1, 2).T
        some = np.broadcast_to(heads > 0, (len(rows.count), len(u)))
        source, target = (x[:, None] * self.size + u for x in (rows.source, rows.target))
        size = rows.count[:, None] * heads * self.plan.row_bytes(kind, wire=True)
        return self._post(channel, source[some], target[some], size[some])

    def _post(self, channel: str, source: np.ndarray, target: np.ndarray, size: np.ndarray) -> list[int]:
        steps = []
        for part in split(source, target, self.world):
            self.events.append(Sent(self._steps, channel, source[part], target[part], size[part]))
            steps.append(self._steps)
            self._steps += 1
        return steps
