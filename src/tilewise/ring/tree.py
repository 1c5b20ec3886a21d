"""Queries on every rank, keys shared out: a decoding step. Each rank attends to its own keys, and the partial results are
merged on all ranks in ⌈log₂ N⌉ rounds or so, of a size that does not depend on how many keys there are. Merging is a maximum
and a sum: m = max(m₁, m₂), l = Σ l_i·exp(m_i − m), o likewise.

Source: Shyam et al. 2024, Tree Attention, section 5."""

from __future__ import annotations

from .heads import finish
from .moves import Message
from .program import Buffer, View
from .runs import Runs
from .script import Script
from .teams import Teams


def tree_rounds(world: int) -> list[list[tuple[int, int, bool]]]:
    """Who sends to whom in each round, and whether the receiver merges (or takes over what is finished). Ranks past the largest
    power of two hand in their part first and get the result last.

    >>> tree_rounds(3)
    [[(2, 0, True)], [(0, 1, True), (1, 0, True)], [(0, 2, False)]]
    """
    power = 1 << (world.bit_length() - 1)
    extra = range(power, world)
    doubling = [[(r, r ^ 1 << k, True) for r in range(power)] for k in range(power.bit_length() - 1)]
    first, last = [(r, r - power, True) for r in extra], [(r - power, r, False) for r in extra]
    return [x for x in (first, *doubling, last) if x]


def write_tree(teams: Teams, script: Script, backward: bool, names: dict[str, str]) -> None:
    """After every rank has worked on its own keys: merge (or, of dq, add) over all ranks."""
    kind, total = ("dq", names["dq"]) if backward else ("part", "acc")
    rows, heads = teams.q_rows[0].count, teams.q_heads(0)
    made = tree_rounds(teams.count) if rows else []
    for r in script.ranks:
        if made:
            script.make(r, Buffer("peer", kind, rows, heads.count))
    for pairs in made:
        views = {merges: View("peer" if merges else total, Runs.span(0, rows), heads) for merges in (True, False)}
        script.wait(script.post("keys", [Message(a, views[False], b, views[merges]) for a, b, merges in pairs]))
        for _, b, merges in pairs:
            if merges:
                script.combine(b, views[True], views[False], kind)
    for r in script.ranks:
        if made:
            script.free(r, "peer")
        if not backward:
            finish(teams, script, r, names)
