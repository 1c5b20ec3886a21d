"""Plans: who sends what to whom, and computes what, in which order. One writer for every method: rows are exchanged for heads
where ranks form teams, keys move as `moves` says, and in backward each partial dk, dv goes straight home.

Why straight home, and not along with the keys: only rows that got a gradient travel, a rank never waits for a chain of
others, a narrow wire rounds each contribution once and not once a hop, and the owner adds in an order fixed beforehand."""

from __future__ import annotations

from collections import defaultdict

from ..problem import Problem
from .heads import exchange_in, exchange_out, own_buffer
from .moves import Held, Message, Round, rounds, stay
from .owners import Owners
from .program import Backward, Block, Buffer, Forward, Heads, Method, Plan, Program, View
from .runs import Runs
from .script import Script
from .sight import Box, look
from .teams import Teams, even, key_heads
from .tree import write_tree


def make_plan(
    problem: Problem, q: Owners, kv: Owners, method: Method, backward: bool = False, wire: dict[str, int] | None = None
) -> Plan:
    """The plan of one direction. Forward turns `q` and `kv` into `out` and `lse`; backward turns `q kv do stats` into `dq` and
    `dkv`. `wire`: bytes of an element on the wire for kinds that should travel narrower than they are kept."""
    teams = Teams(problem, q, kv, method)
    script = Script(q.world)
    writer = Writer(teams, script, backward, exchange_in(teams, script, backward))
    if method.movement == "tree":
        writer.write([stay(teams, writer.names["kv"])])
        write_tree(teams, script, backward, writer.names)
    else:
        writer.write(rounds(teams, writer.names["kv"], backward))
        exchange_out(teams, script, backward)
    given = ("q", "kv", "do", "stats") if backward else ("q", "kv")
    results = ("dq", "dkv") if backward else ("out", "lse")
    programs = [
        Program(tuple(own_buffer(teams, r, kind) for kind in given), tuple(ops), results) for r, ops in enumerate(script.ops)
    ]
    return Plan(problem, q, kv, method, backward, tuple(programs), wire or {})


Return = tuple[Message, View]
"""A partial gradient on its way home, and where its owner adds it."""


class Writer:
    """Writes rounds. `names`: in which buffers a rank has its team's rows of each kind."""

    def __init__(self, teams: Teams, script: Script, backward: bool, names: dict[str, str]) -> None:
        self.teams, self.script, self.backward, self.names = teams, script, backward, names
        self._begun: set[tuple[int, Heads]] = set()
        self._boxes: dict[tuple[int, Runs], Box | None] = {}

    def write(self, made: list[Round]) -> None:
        """All rounds: what the next one needs is posted, then this one is computed, then what was posted before is awaited."""
        self._make_buffers(made)
        due: dict[int, list[int]] = defaultdict(list)
        home: tuple[list[int], list[Return]] = ([], [])
        for j, round_ in enumerate(made):
            self.script.wait(due.pop(j, []))
            for transfer in round_.transfers:
                due[transfer.due] += self.script.post(transfer.channel, transfer.messages)
            for r, held in sorted(round_.held.items()):
                self.script.add(r, *held.copies)
                self.compute(r, held, j)
            if self.backward:
                self._receive_home(home)
                returns = self._homeward(round_, j)
                home = self.script.post("home", [message for message, _ in returns]), returns
        self._receive_home(home)
        for r in self.script.ranks:
            self.script.free(r, *self._scratch[r])

    def _make_buffers(self, made: list[Round]) -> None:
        """Accumulators, slots for keys on the way, and what their partial results go through."""
        several = sum(bool(round_.held) for round_ in made) > 1
        sizes: list[dict[str, Buffer]] = [{} for _ in self.script.ranks]
        for j, round_ in enumerate(made):
            for r, held in round_.held.items():
                if held.buffer != self.names["kv"]:
                    grow(sizes[r], held.buffer, "kv", held.rows.count, held.heads.count)
                if self.backward and not self._first_at_home(held, j):
                    grow(sizes[r], f"dkv{j % 2}", "dkv", held.rows.count, held.heads.count)
            if self.backward:
                for m, _ in self._homeward(round_, j):
                    grow(sizes[m.target], m.into.buffer, "dkv", m.into.rows.ranges[-1].stop, m.into.heads.past)
        for r in self.script.ranks:
            self.make_accumulators(r)
            if several:
                kind = "dq" if self.backward else "part"
                sizes[r]["part"] = Buffer("part", kind, *self._query_size(r))
            self.script.make(r, *sizes[r].values())
        self._scratch = [list(x) for x in sizes]

    def make_accumulators(self, r: int) -> None:
        """Where a rank's results come together."""
        t, u = divmod(r, self.teams.size)
        if not self.backward:
            self.script.make(r, Buffer("acc", "part", *self._query_size(r)))
            return
        keys = self.teams.kv_rows[t].count, self.teams.kv_heads(u).count
        self.script.make(r, Buffer(self.names["dq"], "dq", *self._query_size(r)), Buffer(self.names["dkv"], "dkv", *keys))

    def _query_size(self, r: int) -> tuple[int, int]:
        t, u = divmod(r, self.teams.size)
        return self.teams.q_rows[t].count, self.teams.q_heads(u).count

    def compute(self, r: int, held: Held, j: int) -> None:
        """What rank r sees of what it holds, if anything, and where that goes."""
        t, u = divmod(r, self.teams.size)
        group, mine = self.teams.problem.group, self.teams.q_heads(u)
        heads = Heads(max(mine.first, held.heads.first * group), min(mine.past, held.heads.past * group))
        box = self._look(t, held.rows) if heads.count > 0 else None
        if box is None:
            return
        rows, keys = Runs.span(*box.q), Runs.span(*box.kv)
        for part in even(heads, group):
            block = Block(self.teams.q_rows[t].take(rows), held.rows.take(keys), part, box.kind)
            q = View(self.names["q"], rows, part.inside(mine))
            kv = View(held.buffer, keys, key_heads(part, group).inside(held.heads))
            total = self.names["dq"] if self.backward else "acc"
            into = q._replace(buffer="part" if (r, part) in self._begun else total)
            self._begun.add((r, part))
            if self.backward:
                do, stats = (q._replace(buffer=self.names[kind]) for kind in ("do", "stats"))
                dkv = self.names["dkv"] if self._first_at_home(held, j) else f"dkv{j % 2}"
                self.script.add(r, Backward(block, q, kv, do, stats, into, kv._replace(buffer=dkv)))
            else:
                self.script.add(r, Forward(block, q, kv, into))
            if into.buffer == "part":
                self.script.combine(r, into, into._replace(buffer=total), "dq" if self.backward else "part")
        if self.backward and not self._first_at_home(held, j):
            self._keep_own(r, held, j)

    def _first_at_home(self, held: Held, j: int) -> bool:
        """Whether all that a rank looks at in a round is its own, and nobody has sent gradients of it yet."""
        return held.buffer == self.names["kv"] and j == 0

    def _keep_own(self, r: int, held: Held, j: int) -> None:
        """Add the gradients of a rank's own keys among what it holds."""
        t, u = divmod(r, self.teams.size)
        for section in held.sections:
            if section.owner == t:
                rows = self.teams.needs[t][t]
                place = section.place.take(rows.within(section.rows))
                into = View(self.names["dkv"], rows, held.heads.inside(self.teams.kv_heads(u)))
                self.script.combine(r, View(f"dkv{j % 2}", place, Heads(0, held.heads.count)), into, "dkv")

    def _receive_home(self, home: tuple[list[int], list[Return]]) -> None:
        """Wait for gradients on their way home and add them, in the order in which they were listed."""
        steps, returns = home
        self.script.wait(steps)
        for message, into in returns:
            self.script.combine(message.target, message.into, into, "dkv")

    def _look(self, team: int, rows: Runs) -> Box | None:
        if (team, rows) not in self._boxes:
            self._boxes[team, rows] = look(self.teams.problem, self.teams.q_rows[team], rows)
        return self._boxes[team, rows]

    def _homeward(self, round_: Round, j: int) -> list[Return]:
        """The gradients of others' keys that a round leaves, from the lowest rank to the highest."""
        teams, found = self.teams, []
        ends: dict[int, int] = defaultdict(int)
        for r, held in sorted(round_.held.items()):
            t, u = divmod(r, teams.size)
            for section in held.sections:
                rows, owner = teams.needs[t][section.owner], teams.rank(section.owner, u)
                if owner == r or not rows.count:
                    continue
                heads = Heads(0, held.heads.count)
                view = View(f"dkv{j % 2}", section.place.take(rows.within(section.rows)), heads)
                into = View(f"home{j % 2}", Runs.span(ends[owner], ends[owner] + rows.count), heads)
                ends[owner] += rows.count
                total = View(self.names["dkv"], rows, held.heads.inside(teams.kv_heads(u)))
                found.append((Message(r, view, owner, into), total))
        return found


def grow(sizes: dict[str, Buffer], name: str, kind: str, rows: int, heads: int) -> None:
    """Note that a buffer must hold so much."""
    have = sizes.get(name, Buffer(name, kind, 0, 0))
    sizes[name] = Buffer(name, kind, max(have.rows, rows), max(have.heads, heads))
