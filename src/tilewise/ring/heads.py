"""Rows for heads: before and after keys move, the ranks of a team give each other all their rows of some heads.

Source: Jacobs et al. 2023, DeepSpeed Ulysses, section 3; Fang and Zhao 2024, USP, for teams inside a ring."""

from __future__ import annotations

from .moves import Message
from .program import Buffer, Finish, Heads, View
from .runs import Runs
from .script import Script
from .teams import Teams

KEYS = ("kv", "dkv")


def local_names(teams: Teams) -> dict[str, str]:
    """The buffers in which a rank has its team's rows: its own ones, where it is alone."""
    prefix = "team " if teams.size > 1 else ""
    return {kind: prefix + kind for kind in ("q", "kv", "do", "stats", "dq", "dkv", "out", "lse")}


def exchange_in(teams: Teams, script: Script, backward: bool) -> dict[str, str]:
    """Bring every rank its team's rows of its own heads; the names of the buffers they are in."""
    names = local_names(teams)
    if teams.size == 1:
        return names
    kinds = ("q", "kv", "do", "stats") if backward else ("q", "kv")
    messages = []
    for r in script.ranks:
        for kind in kinds:
            script.make(r, team_buffer(teams, r, kind, names[kind]))
            mine, place = _places(teams, r, kind)
            for to in (r, *teams.mates(r)):
                heads = _heads(teams, to, kind)
                view, into = View(kind, mine, heads), View(names[kind], place, Heads(0, heads.count))
                if to == r:
                    script.copy(r, view, into)
                elif mine.count and heads.count:
                    messages.append(Message(r, view, to, into))
    script.wait(script.post("heads", messages))
    return names


def exchange_out(teams: Teams, script: Script, backward: bool) -> None:
    """Bring every row's results back to its owner; without teams, only finish them."""
    names = local_names(teams)
    for r in script.ranks:
        if teams.size > 1:
            script.free(r, *(names[kind] for kind in (("q", "kv", "do", "stats") if backward else ("q", "kv"))))
        if not backward:
            finish(teams, script, r, names)
    if teams.size == 1:
        return
    kinds = ("dq",) if backward else ("out", "lse")
    for r in script.ranks:
        script.make(r, *(own_buffer(teams, r, kind) for kind in kinds))
    messages = [message for r in script.ranks for kind in kinds for message in _give_back(teams, script, r, kind)]
    shares = _give_gradients_back(teams, script) if backward else []
    script.wait(script.post("heads", [*messages, *(message for message, _ in shares)]))
    for message, into in shares:
        script.combine(message.target, message.into, into, "dkv")
    for r in script.ranks:
        script.free(r, *(names[kind] for kind in (("dq", "dkv") if backward else ("out", "lse"))))
        script.free(r, *(["back"] if backward else []))


def finish(teams: Teams, script: Script, r: int, names: dict[str, str]) -> None:
    """The outputs of the rows that rank r has worked on."""
    out, lse = (team_buffer(teams, r, kind, names[kind]) for kind in ("out", "lse"))
    script.make(r, out, lse)
    rows, heads = Runs.span(0, out.rows), Heads(0, out.heads)
    if out.rows and out.heads:
        mine = teams.q_heads(r % teams.size)
        script.add(r, Finish(View("acc", rows, heads), View(out.name, rows, heads), View(lse.name, rows, heads), mine))
    script.free(r, "acc")


def own_buffer(teams: Teams, r: int, kind: str) -> Buffer:
    """A rank's own rows of a kind, all heads, under the name of the kind."""
    owners, heads = (teams.kv, teams.problem.g) if kind in KEYS else (teams.q, teams.problem.h)
    return Buffer(kind, kind, owners.shards[r].count, heads)


def team_buffer(teams: Teams, r: int, kind: str, name: str) -> Buffer:
    """A rank's heads of all its team's rows of a kind."""
    rows = (teams.kv_rows if kind in KEYS else teams.q_rows)[r // teams.size].count
    return Buffer(name, kind, rows, _heads(teams, r, kind).count)


def _heads(teams: Teams, r: int, kind: str) -> Heads:
    return (teams.kv_heads if kind in KEYS else teams.q_heads)(r % teams.size)


def _places(teams: Teams, r: int, kind: str) -> tuple[Runs, Runs]:
    """All rows of rank r's shard, counted in the shard, and where they are among its team's rows."""
    owners, rows = (teams.kv, teams.kv_rows) if kind in KEYS else (teams.q, teams.q_rows)
    shard = owners.shards[r]
    return Runs.span(0, shard.count), shard.within(rows[r // teams.size])


def _give_back(teams: Teams, script: Script, r: int, kind: str) -> list[Message]:
    """What rank r has worked out of each mate's query rows; its own are copied."""
    heads, messages = _heads(teams, r, kind), []
    for to in (r, *teams.mates(r)):
        theirs, place = _places(teams, to, kind)
        view, into = View("team " + kind, place, Heads(0, heads.count)), View(kind, theirs, heads)
        if to == r:
            script.copy(r, view, into)
        elif theirs.count and heads.count:
            messages.append(Message(r, view, to, into))
    return messages


def _give_gradients_back(teams: Teams, script: Script) -> list[tuple[Message, View]]:
    """What each rank has worked out of each mate's keys, and where that is added: several members may read one key head.
    A rank adds its own share first, then its mates' in the order of ranks."""
    shares = []
    for r in script.ranks:
        theirs, place = _places(teams, r, "dkv")
        mates = sorted(teams.mates(r))
        widest = max(_heads(teams, mate, "dkv").count for mate in mates)
        script.make(r, own_buffer(teams, r, "dkv"), Buffer("back", "dkv", theirs.count * len(mates), widest))
        mine, n = _heads(teams, r, "dkv"), theirs.count
        if n and mine.count:
            script.combine(r, View("team dkv", place, Heads(0, mine.count)), View("dkv", theirs, mine), "dkv")
        for x, mate in enumerate(mates):
            heads = _heads(teams, mate, "dkv")
            view = View("team dkv", place, Heads(0, heads.count))
            into = View("back", Runs.span(x * n, (x + 1) * n), Heads(0, heads.count))
            if n and heads.count:
                shares.append((Message(mate, view, r, into), View("dkv", theirs, heads)))
    return shares
