"""How keys get to the queries that see them: each movement is a list of rounds, in which every rank holds some key rows and
more are under way. Rows that nobody on the way needs are not sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from .program import BATCH, Copy, Heads, View
from .runs import Runs
from .teams import Teams


class Message(NamedTuple):
    """Rows that go from one rank's buffer to another's."""

    source: int
    view: View
    target: int
    into: View


class Transfer(NamedTuple):
    """Messages that are posted together at the start of a round and waited for before round `due` computes."""

    channel: str
    due: int
    messages: list[Message]


class Section(NamedTuple):
    """Part of what a buffer holds: rows of team `owner`, counted in that team's rows, and where they are in the buffer."""

    owner: int
    rows: Runs
    place: Runs


@dataclass(frozen=True)
class Held:
    """What a rank looks at in a round: a buffer with rows of the sequence, of some key heads."""

    buffer: str
    rows: Runs
    heads: Heads
    sections: tuple[Section, ...]
    copies: tuple[Copy, ...] = ()


@dataclass
class Round:
    """What is posted, and what each rank then computes with."""

    transfers: list[Transfer] = field(default_factory=list)
    held: dict[int, Held] = field(default_factory=dict)


def rounds(teams: Teams, own: str, backward: bool = False) -> list[Round]:
    """The rounds of the teams' method; `own` names the buffer in which each rank has its own team's keys. These are looked at
    while the first keys come, but in backward while the last gradients go home, which are twice as large."""
    make: dict[str, Callable[[Teams, str], list[Round]]]
    make = {"ring": _ring, "double": _double, "direct": _direct, "gather": _gather}
    made = make[teams.method.movement](teams, own)
    if backward and len(made) > 1 and made[0].held:
        made.append(Round(held=made[0].held))
        made[0].held = {}
    return made


def members(teams: Teams) -> Iterator[tuple[int, Heads]]:
    """Each member and its key heads, those without heads left out."""
    return ((u, teams.kv_heads(u)) for u in range(teams.size) if teams.kv_heads(u).count)


class _Stop(NamedTuple):
    """A place on the way of a team's keys: in buffer `slot` of `team`, which gets `rows` (counted in the owner's rows)."""

    team: int
    slot: str
    rows: Runs


def _pass_on(teams: Teams, here: _Stop, there: _Stop) -> Iterator[Message]:
    """The messages by which each member hands on, from what it holds here, what is wanted there."""
    view, into = there.rows.within(here.rows), Runs.span(0, there.rows.count)
    for u, heads in members(teams):
        every = Heads(0, heads.count)
        yield Message(teams.rank(here.team, u), View(here.slot, view, every),
                      teams.rank(there.team, u), View(there.slot, into, every))  # fmt: skip


def _hold(teams: Teams, owner: int, stop: _Stop) -> dict[int, Held]:
    """What each member of a team holds at a stop."""
    rows, place = teams.kv_rows[owner].take(stop.rows), Runs.span(0, stop.rows.count)
    section = Section(owner, stop.rows, place)
    return {teams.rank(stop.team, u): Held(stop.slot, rows, heads, (section,)) for u, heads in members(teams)}


def stay(teams: Teams, own: str) -> Round:
    """A round in which every team looks at its own keys."""
    here = [_hold(teams, t, _Stop(t, own, _every(teams, t))) for t in range(teams.count)]
    return Round(held={r: held for team in here for r, held in team.items()})


def _remaining(needs: list[Runs]) -> list[Runs]:
    """What is needed at each stop or later."""
    left = [Runs()]
    for need in reversed(needs):
        left.append(Runs.union([need, left[-1]]))
    return left[:0:-1]


def _every(teams: Teams, owner: int) -> Runs:
    return Runs.span(0, teams.kv_rows[owner].count)


def _ring(teams: Teams, own: str) -> list[Round]:
    """Keys of team o visit o, o ± 1, o ± 2, ...: N − 1 hops, fewer where nobody further on needs them.

    Source: Liu et al. 2023, Ring Attention with Blockwise Transformers."""
    n, step = teams.count, teams.method.direction
    carry = ring_carry(teams)
    stops = [[_Stop((o + step * t) % n, f"kv{t % 2}" if t else own, carry[o][t]) for t in range(n)] for o in range(n)]
    last = max(t for way in stops for t, stop in enumerate(way) if stop.rows.count or not t)
    made = []
    for t in range(last + 1):
        going = [(way[t], way[t + 1]) for way in stops if t < last and way[t + 1].rows.count]
        messages = [message for pair in going for message in _pass_on(teams, *pair)]
        held = {r: held for o, way in enumerate(stops) for r, held in _hold(teams, o, way[t]).items()}
        made.append(Round([Transfer("keys", t + 1, messages)] if messages else [], held))
    return made


def ring_carry(teams: Teams) -> list[list[Runs]]:
    """`carry[o][t]`: the rows of team o that travel to its t-th stop, 0 being at home."""
    n, step = teams.count, teams.method.direction
    ways = [[teams.needs[(o + step * t) % n][o] for t in range(n)] for o in range(n)]
    return [[_every(teams, o), *_remaining(way)[1:]] for o, way in enumerate(ways)]


def _double(teams: Teams, own: str) -> list[Round]:
    """Keys go around the node of `node` teams, and meanwhile one copy of them goes to the next node, where they go around
    again: every link between nodes is busy, and has a whole inner ring to hide behind.

    Source: Gu et al. 2024, LoongTrain, section 4 (double-ring attention)."""
    n, g = teams.count, teams.method.node
    outer, inner = double_carry(teams)

    def stop(o: int, a: int, c: int) -> _Stop:
        team = (o // g + a) % (n // g) * g + (o % g + c) % g
        first = f"far{a % 2}" if a else own
        return _Stop(team, f"kv{c % 2}" if c else first, inner[o][a][c] if c else outer[o][a])

    made = []
    for t in range(n):
        a, c = divmod(t, g)
        near = [(stop(o, a, c), stop(o, a, c + 1)) for o in range(n) if c + 1 < g and inner[o][a][c + 1].count]
        far = [(stop(o, a, 0), stop(o, a + 1, 0)) for o in range(n) if not c and t + g < n and outer[o][a + 1].count]
        kinds = (("nodes", t + g, far), ("keys", t + 1, near))
        posts = [Transfer(name, due, [m for pair in pairs for m in _pass_on(teams, *pair)]) for name, due, pairs in kinds]
        held = {r: held for o in range(n) for r, held in _hold(teams, o, stop(o, a, c)).items()}
        made.append(Round([post for post in posts if post.messages], held))
    return made


def double_carry(teams: Teams) -> tuple[list[list[Runs]], list[list[list[Runs]]]]:
    """`outer[o][a]`: the rows of team o that reach its a-th node; `inner[o][a][c]`: those that get to its c-th stop there."""
    n, g = teams.count, teams.method.node
    outer, inner = [], []
    for o in range(n):
        nodes = [[teams.needs[(o // g + a) % (n // g) * g + (o % g + c) % g][o] for c in range(g)] for a in range(n // g)]
        outer.append([_every(teams, o), *_remaining([Runs.union(node) for node in nodes])[1:]])
        inner.append([_remaining(node) for node in nodes])
    return outer, inner


def _direct(teams: Teams, own: str) -> list[Round]:
    """Own keys first; then keys of the teams 1, 2, ... before this one, straight from there and only what is needed, `at_once`
    teams in one batch. Distances at which nobody needs anything are left out: for a window this is a halo exchange."""
    n, every = teams.count, range(teams.count)
    far = [x for x in range(1, n) if any(teams.needs[t][(t - x) % n].count for t in every)]
    size = min(teams.method.at_once, BATCH // 2)
    batches = [far[x : x + size] for x in range(0, len(far), size)]
    made = [stay(teams, own)]
    for j, batch in enumerate(batches, 1):
        messages: list[Message] = []
        round_ = Round()
        for t in every:
            sections = _sections(teams, t, [(t - x) % n for x in batch])
            messages += _fetch(teams, own, t, f"kv{j % 2}", sections)
            rows = Runs.union(teams.kv_rows[s.owner].take(s.rows) for s in sections)
            for u, heads in members(teams):
                round_.held[teams.rank(t, u)] = Held(f"kv{j % 2}", rows, heads, sections)
        made[-1].transfers.append(Transfer("keys", j, messages))
        made.append(round_)
    return made


def _sections(teams: Teams, team: int, owners: list[int]) -> tuple[Section, ...]:
    """What `team` needs of some teams, laid out in the order of the sequence."""
    found = {o: teams.kv_rows[o].take(teams.needs[team][o]) for o in owners}
    every = Runs.union(found.values())
    return tuple([Section(o, teams.needs[team][o], found[o].within(every)) for o in owners if found[o].count])


def _fetch(teams: Teams, own: str, team: int, slot: str, sections: tuple[Section, ...]) -> Iterator[Message]:
    """The messages that bring a team's sections from where they are."""
    for section in sections:
        for u, heads in members(teams):
            every = Heads(0, heads.count)
            yield Message(teams.rank(section.owner, u), View(own, section.rows, every),
                          teams.rank(team, u), View(slot, section.place, every))  # fmt: skip


def _gather(teams: Teams, own: str) -> list[Round]:
    """All keys that a team needs, its own among them, in the order of the sequence, for one group of heads; the next group
    comes in meanwhile. One block a group, and no merge.

    Source: Llama team 2024, The Llama 3 herd of models, section 3.3.2."""
    n, groups = teams.count, teams.method.groups
    made = [Round() for _ in range(groups + 1)]
    for t in range(n):
        sections = _sections(teams, t, [(t - x) % n for x in range(n)])
        rows = Runs.union(teams.kv_rows[s.owner].take(s.rows) for s in sections)
        for u, heads in members(teams):
            for j in range(1, groups + 1):
                part = Heads(*(heads.first + heads.count * x // groups for x in (j - 1, j)))
                there, here = Heads(0, part.count), part.inside(heads)
                slot, r = f"kv{j % 2}", teams.rank(t, u)
                moves = [(s.owner, View(own, s.rows, here), View(slot, s.place, there)) for s in sections if part.count]
                copies = tuple([Copy(view, into) for o, view, into in moves if o == t])
                made[j].held[r] = Held(slot, rows if part.count else Runs(), part, sections if part.count else (), copies)
                messages = [Message(teams.rank(o, u), view, r, into) for o, view, into in moves if o != t]
                if not made[j - 1].transfers:
                    made[j - 1].transfers.append(Transfer("keys", j, []))
                made[j - 1].transfers[0].messages.extend(messages)
    for round_ in made:
        round_.transfers = [x for x in round_.transfers if x.messages]
    return made
