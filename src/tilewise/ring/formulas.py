"""What a plan must cost: bytes from rank to rank and peak memory, from lengths, heads and who needs what alone. `verify` holds
every plan to them; with a mask that hides nothing they are the textbook's.

With N ranks of s key rows, U ranks a team, R = N / U teams, and x a row's bytes (`Plan.row_bytes`), a rank receives

    ring, double, direct, gather      (R − 1) · U·s · g/U · x(kv)                            forward, backward
    gradients of keys, straight home  (R − 1) · U·s · g/U · x(dkv)                           backward
    heads                             (U − 1) · s · (h·x(q) + g·x(kv) + h·x(out) + h·x(lse)) / U         forward
    tree                              log₂ N · n · h · x(part)                               forward

where N, U and the sizes divide; elsewhere, and where a mask hides rows, sums over what is needed say the same."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .program import Plan
from .runs import Runs
from .teams import Teams
from .tree import tree_rounds


class Stage(NamedTuple):
    """One round of keys, by team: rows held in a slot ("": its own keys, or in forward none; None: nobody holds anything),
    gradients that arrive home after it, and the share first … past of `groups` of the heads that it is about."""

    slot: str | None
    rows: list[int]
    arrivals: list[int]
    group: int = 0
    groups: int = 1


def peak_bytes(plan: Plan) -> list[int]:
    """The most memory that the buffers of each rank take at once."""
    teams = Teams(plan.problem, plan.q, plan.kv, plan.method)
    made = stages(teams, plan.backward)
    return [peak_of(plan, teams, made, r) for r in range(plan.world)]


def flow_bytes(plan: Plan) -> np.ndarray:
    """Bytes on the wire from each rank to each other one, "world world"."""
    teams = Teams(plan.problem, plan.q, plan.kv, plan.method)
    flow = np.zeros((plan.world, plan.world), np.int64)
    if plan.method.movement == "tree":
        kind = "dq" if plan.backward else "part"
        for pairs in tree_rounds(plan.world):
            for a, b, _ in pairs:
                flow[a, b] += plan.problem.n * plan.problem.h * plan.row_bytes(kind, wire=True)
        return flow
    keys, home = _flows_of_keys(teams)
    for u in range(teams.size):
        heads, size = teams.kv_heads(u).count, teams.size
        flow[u::size, u::size] += heads * keys * plan.row_bytes("kv", wire=True)
        flow[u::size, u::size] += heads * home * plan.row_bytes("dkv", wire=True) * plan.backward
    return flow + _flows_of_heads(plan, teams)


def stages(teams: Teams, backward: bool) -> list[Stage]:
    """The rounds of keys of a method; in backward own keys come last."""
    made = _stages(teams)
    if backward and len(made) > 1 and made[0].slot == "":
        nothing = made[0].rows
        return [made[0]._replace(slot=None), *made[1:], Stage("", [rows.count for rows in teams.kv_rows], nothing)]
    return made


def _stages(teams: Teams) -> list[Stage]:
    needs, n, every = teams.needs, teams.count, range(teams.count)
    method, own = teams.method, [0] * teams.count
    if method.movement in ("ring", "double"):
        return _passing(teams)
    if method.movement == "gather":
        rows = [sum(needs[t][o].count for o in every) for t in every]
        arrivals = [sum(needs[t][o].count for t in every if t != o) for o in every]
        return [Stage(f"kv{(j + 1) % 2}", rows, arrivals, j, method.groups) for j in range(method.groups)]
    if method.movement == "tree":
        return [Stage("", own, own)]
    far = [x for x in range(1, n) if any(needs[t][(t - x) % n].count for t in every)]
    size = min(method.at_once, 128)
    made = [Stage("", own, own)]
    for j in range(0, len(far), size):
        rows = [sum(needs[t][(t - x) % n].count for x in far[j : j + size]) for t in every]
        arrivals = [sum(needs[(o + x) % n][o].count for x in far[j : j + size]) for o in every]
        made.append(Stage(f"kv{(j // size + 1) % 2}", rows, arrivals))
    return made


def _passing(teams: Teams) -> list[Stage]:
    """Stages of methods in which keys are handed on, up to the last at which anybody still needs them."""
    n, made = teams.count, []
    for t in range(n):
        rows, arrivals = [0] * n, [0] * n
        for o in range(n):
            way, a, c = _way(teams, o), *divmod(t, teams.method.node)
            rows[way[t]] = _reach(teams, o, _ahead(teams, way, t))
            arrivals[o] = teams.needs[way[t]][o].count
        double = teams.method.movement == "double"
        slot = f"kv{(c if double else t) % 2}" if c or not double else f"far{a % 2}"
        made.append(Stage(slot, rows, arrivals) if t else Stage("", [0] * n, [0] * n))
    if teams.method.movement == "ring":
        while len(made) > 1 and not any(made[-1].rows):
            made.pop()
    return made


def _way(teams: Teams, o: int) -> list[int]:
    """The teams that keys of team o visit, in order."""
    n, g = teams.count, teams.method.node
    if teams.method.movement == "ring":
        return [(o + teams.method.direction * t) % n for t in range(n)]
    return [(o // g + t // g) % (n // g) * g + (o % g + t % g) % g for t in range(n)]


def _ahead(teams: Teams, way: list[int], t: int) -> list[int]:
    """Who still gets what arrives at stop t: all later stops, or in double rings the rest of the node; at its first stop in a
    node, everybody from there on."""
    g = teams.method.node
    return way[t:] if teams.method.movement == "ring" or t % g == 0 else way[t : (t // g + 1) * g]


def _reach(teams: Teams, owner: int, visitors: list[int]) -> int:
    """How many rows of a team at least one visitor needs."""
    return Runs.union(teams.needs[v][owner] for v in visitors).count


def _flows_of_keys(teams: Teams) -> tuple[np.ndarray, np.ndarray]:
    """Key rows from team to team, and rows of gradients on their way home."""
    n, g = teams.count, teams.method.node
    home = np.array([[0 if t == o else teams.needs[t][o].count for o in range(n)] for t in range(n)], np.int64)
    if teams.method.movement in ("direct", "gather"):
        return home.T, home
    keys = np.zeros((n, n), np.int64)
    for o in range(n):
        way = _way(teams, o)
        for t in range(1, n):
            source = way[t - g] if teams.method.movement == "double" and t % g == 0 else way[t - 1]
            keys[source, way[t]] += _reach(teams, o, _ahead(teams, way, t))
    return keys, home


def _flows_of_heads(plan: Plan, teams: Teams) -> np.ndarray:
    """Bytes that the members of teams exchange, rows for heads and back."""
    flow = np.zeros((plan.world, plan.world), np.int64)
    queries, keys = plan.q.counts, plan.kv.counts

    def size(kind: str, rows: int, member: int) -> int:
        heads = teams.kv_heads(member) if kind in ("kv", "dkv") else teams.q_heads(member)
        return rows * heads.count * plan.row_bytes(kind, wire=True)

    there, back = (("q", "kv", "do", "stats"), ("dq", "dkv")) if plan.backward else (("q", "kv"), ("out", "lse"))
    for r in range(plan.world):
        for mate in teams.mates(r):
            rows, theirs = ({"kv": keys[x], "dkv": keys[x]} for x in (r, mate))
            flow[r, mate] += sum(size(kind, rows.get(kind, queries[r]), mate % teams.size) for kind in there)
            flow[r, mate] += sum(size(kind, theirs.get(kind, queries[mate]), r % teams.size) for kind in back)
    return flow


def peak_of(plan: Plan, teams: Teams, made: list[Stage], r: int) -> int:
    """The most memory of rank r's buffers, given its rounds."""
    t, u = divmod(r, teams.size)
    n, s, h, g = plan.q.counts[r], plan.kv.counts[r], plan.problem.h, plan.problem.g
    q_size, kv_size = teams.q_rows[t].count * teams.q_heads(u).count, teams.kv_rows[t].count * teams.kv_heads(u).count

    def size(kinds: str, queries: int, keys: int) -> int:
        return sum((keys if kind in ("kv", "dkv") else queries) * plan.row_bytes(kind) for kind in kinds.split())

    given, results = ("q kv do stats", "dq dkv") if plan.backward else ("q kv", "out lse")
    sums = "dq dkv" if plan.backward else "part"
    scratch = size(
        "dq" if plan.backward else "part",
        q_size * (sum(stage.slot is not None for stage in made) > 1 or plan.method.movement == "tree"),
        0,
    )
    if plan.method.movement == "tree" and plan.world == 1:
        scratch = 0
    scratch += _slots(plan, made, t, teams.kv_heads(u).count)
    base, team = size(given, n * h, s * g), size(given, q_size, kv_size) if teams.size > 1 else 0
    phases = [team + size(sums, q_size, kv_size) + scratch]
    if not plan.backward:
        phases.append(size("part out lse", q_size, kv_size))
    if teams.size > 1:
        mates = [teams.kv_heads(mate % teams.size).count for mate in teams.mates(r)]
        back = s * len(mates) * max(mates) * plan.row_bytes("dkv") if plan.backward else 0
        phases.append(size(results, q_size, kv_size) + size(results, n * h, s * g) + back)
    return base + max(phases)


def _slots(plan: Plan, made: list[Stage], team: int, heads: int) -> int:
    """Slots for keys, and in backward for gradients of theirs and of one's own, each as large as its largest round."""
    sizes: dict[str, tuple[int, int]] = {}

    def grow(name: str, rows: int, width: int) -> None:
        have = sizes.get(name, (0, 0))
        sizes[name] = max(have[0], rows), max(have[1], width)

    for j, stage in enumerate(made):
        width = heads * (stage.group + 1) // stage.groups - heads * stage.group // stage.groups
        if stage.slot:
            grow(stage.slot, stage.rows[team] if width else 0, width)
        if plan.backward and stage.slot is not None and any(stage.rows):
            grow(f"dkv{j % 2}", stage.rows[team] if width else 0, width)
        if plan.backward and stage.slot:
            grow(f"home{j % 2}", stage.arrivals[team] if width else 0, width if stage.arrivals[team] else 0)
    return sum(rows * width * plan.row_bytes("dkv" if name[0] in "dh" else "kv") for name, (rows, width) in sizes.items())
