"""A plan run on sets instead of tensors. Every cell of a buffer, a row of one head, knows which row of the sequence it belongs
to and which blocks have gone into it; at the end each result must have had every visible pair once.

Messages obey rendezvous: a batch is done when all its peers have posted theirs and everything before it on its channel is
done. So a plan that gets through here cannot hang for want of buffers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..mask import Tile
from .program import (
    Add,
    Backward,
    Block,
    Buffer,
    Copy,
    Finish,
    Forward,
    Free,
    Make,
    Merge,
    Op,
    Plan,
    Post,
    Recv,
    Send,
    View,
    Wait,
)
from .runs import Runs
from .sight import Box, corner, look

NOTHING = -2
"""Whose a finished cell is that no block has gone into: it is right wherever nothing is visible."""

SUMS = ("part", "out", "lse", "dq", "dkv")
"""Kinds in which blocks come together; the others hold rows as they were given."""


@dataclass
class Cells:
    """The cells of a buffer "rows heads": whose they are (row · heads + head, −1 nobody's yet), which set of blocks is in them,
    the step that is writing them (−1 none) and how many are reading them."""

    buffer: Buffer
    who: np.ndarray
    sets: np.ndarray
    writer: np.ndarray
    readers: np.ndarray

    @classmethod
    def new(cls, buffer: Buffer) -> Cells:
        shape = buffer.rows, buffer.heads
        return cls(buffer, np.full(shape, -1), np.zeros(shape, int), np.full(shape, -1), np.zeros(shape, int))


class Sets:
    """Multisets of blocks by number; 0 is the empty one."""

    def __init__(self) -> None:
        self.known: list[tuple[int, ...]] = [()]
        self._numbers: dict[tuple[int, ...], int] = {(): 0}

    def number(self, members: tuple[int, ...]) -> int:
        if members not in self._numbers:
            self._numbers[members] = len(self.known)
            self.known.append(members)
        return self._numbers[members]

    def join(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """The sum of two multisets, cell by cell."""
        pairs, back = np.unique(np.stack([a.ravel(), b.ravel()]), axis=1, return_inverse=True)
        sums = [self.number(tuple(sorted(self.known[x] + self.known[y]))) for x, y in pairs.T.tolist()]
        return np.array(sums, int)[back.ravel()].reshape(a.shape)


class Rank:
    """One rank: its buffers, and what is on its way."""

    def __init__(self, proof: Proof, number: int) -> None:
        self.proof, self.number, self.at = proof, number, 0
        self.ops = proof.plan.programs[number].ops
        self.cells: dict[str, Cells] = {}
        self.posted: dict[int, tuple[Post, list[tuple[np.ndarray, np.ndarray]]]] = {}
        self.open: list[int] = []
        for buffer in proof.plan.programs[number].given:
            self.cells[buffer.name] = cells = Cells.new(buffer)
            cells.who[...] = proof.identity(number, buffer.kind)

    def say(self, text: str) -> None:
        self.proof.found.append(f"rank {self.number}, operation {self.at}: {text}")

    def run(self) -> bool:
        """Go on until a wait that cannot end yet; whether anything was done."""
        start = self.at
        while self.at < len(self.ops):
            op = self.ops[self.at]
            if isinstance(op, Wait) and not self._arrive(op.step):
                break
            if not isinstance(op, Wait):
                self._do(op)
            self.at += 1
        return self.at > start

    def _do(self, op: Op) -> None:
        if isinstance(op, Make):
            if op.buffer.name in self.cells:
                self.say(f"makes {op.buffer.name!r}, which is there already")
            self.cells[op.buffer.name] = Cells.new(op.buffer)
        elif isinstance(op, Free):
            cells = self.cells.pop(op.buffer, None)
            if cells is None:
                self.say(f"frees {op.buffer!r}, which is not there")
            elif (cells.writer >= 0).any() or cells.readers.any():
                self.say(f"frees {op.buffer!r} while it is in flight")
        elif isinstance(op, Post):
            self._post(op)
        elif isinstance(op, (Forward, Backward)):
            self._compute(op)
        elif isinstance(op, Finish):
            self._finish(op)
        elif isinstance(op, (Copy, Merge, Add)):
            self._move(op)

    def part(self, view: View, write: bool) -> tuple[Cells, tuple] | None:
        """The cells of a view, once it is known to be there and free to be read or written."""
        cells = self.cells.get(view.buffer)
        if cells is None:
            self.say(f"uses {view.buffer!r}, which is not there")
            return None
        rows, (first, past) = view.rows.array(), view.heads
        if (rows.size and rows[-1] >= cells.buffer.rows) or not 0 <= first <= past <= cells.buffer.heads:
            self.say(f"reaches past the end of {view.buffer!r}: {view} of {cells.buffer}")
            return None
        index = np.ix_(rows, np.arange(first, past))
        if (cells.writer[index] >= 0).any():
            step = int(cells.writer[index].max())
            self.say(f"{'writes' if write else 'reads'} {view.buffer!r} while step {step} is writing it")
        if write and cells.readers[index].any():
            self.say(f"writes {view.buffer!r} while a message is being sent from it")
        return cells, index

    def _post(self, op: Post) -> None:
        carried = []
        for send in op.sends:
            found = self.part(send.view, write=False)
            if found is not None:
                cells, index = found
                carried.append((cells.who[index], cells.sets[index]))
                cells.readers[index] += 1
            else:
                carried.append((np.full((0, 0), -1), np.zeros((0, 0), int)))
        for recv in op.recvs:
            found = self.part(recv.view, write=True)
            if found is not None:
                found[0].writer[found[1]] = op.step
        self.posted[op.step] = op, carried
        self.open.append(op.step)

    def done(self, step: int) -> bool:
        """Whether a batch of this rank is done."""
        if step not in self.posted or self._blockers(step):
            return False
        channel = self.posted[step][0].channel
        earlier = self.open[: self.open.index(step)] if step in self.open else []
        return not any(self.posted[x][0].channel == channel and self._blockers(x) for x in earlier)

    def _blockers(self, step: int) -> list[int]:
        """Peers of a batch that have not posted theirs."""
        op = self.posted[step][0]
        peers = {x.peer for x in (*op.sends, *op.recvs)}
        return [p for p in sorted(peers) if p in range(len(self.proof.ranks)) and step not in self.proof.ranks[p].posted]

    def blockers(self) -> list[int]:
        """Whom this rank waits for."""
        op = self.ops[self.at]
        if not isinstance(op, Wait) or op.step not in self.posted:
            return []
        return [p for step in self.open if step <= op.step for p in self._blockers(step)]

    def _arrive(self, step: int) -> bool:
        """End a wait, if it can end: what was sent may be written again, what was received is there."""
        if step in self.posted and step not in self.open:
            self.say(f"waits for step {step} twice")
            return True
        if not self.done(step):
            return False
        self.open.remove(step)
        op, _ = self.posted[step]
        for send in op.sends:
            cells = self.cells.get(send.view.buffer)
            if cells is not None:
                cells.readers[np.ix_(send.view.rows.array(), np.arange(*send.view.heads))] -= 1
        taken: dict[int, Iterator] = {}
        for recv in op.recvs:
            arriving = taken.setdefault(recv.peer, self.proof.sent(recv.peer, step, self.number))
            self._take(recv, next(arriving, None))
        return True

    def _take(self, recv: Recv, data: tuple[np.ndarray, np.ndarray] | None) -> None:
        cells = self.cells.get(recv.view.buffer)
        index = np.ix_(recv.view.rows.array(), np.arange(*recv.view.heads))
        if cells is None or (recv.view.rows.count and recv.view.rows.ranges[-1][-1] >= cells.buffer.rows):
            return
        cells.writer[index] = -1
        if data is None or data[0].shape != cells.who[index].shape:
            self.say(f"receives from rank {recv.peer} into {recv.view.buffer!r} what was not sent")
            return
        cells.who[index], cells.sets[index] = data

    def _move(self, op: Copy | Merge | Add) -> None:
        source, into = self.part(op.source, write=False), self.part(op.into, write=True)
        if source is None or into is None:
            return
        (a, i), (b, j) = source, into
        if a.buffer.kind != b.buffer.kind or a.who[i].shape != b.who[j].shape:
            self.say(f"moves {op.source} into {op.into}, which do not fit")
            return
        if isinstance(op, Copy):
            b.who[j], b.sets[j] = a.who[i], a.sets[i]
            return
        if (a.buffer.kind == "part") != isinstance(op, Merge):
            self.say(f"{type(op).__name__} does not go with {a.buffer.kind!r}")
        mine, theirs = b.who[j], a.who[i]
        if ((mine >= 0) & (theirs >= 0) & (mine != theirs)).any():
            self.say(f"adds rows of {op.source.buffer!r} to other rows in {op.into.buffer!r}")
        b.who[j], b.sets[j] = np.where(theirs >= 0, theirs, mine), self.proof.sets.join(b.sets[j], a.sets[i])

    def _finish(self, op: Finish) -> None:
        views = [self.part(view, write) for view, write in ((op.part, False), (op.out, True), (op.lse, True))]
        part, out, lse = views
        if part is None or out is None or lse is None:
            return
        heads = np.broadcast_to(np.arange(*op.heads), part[0].who[part[1]].shape)
        who = part[0].who[part[1]]
        if ((who >= 0) & (who % self.proof.plan.problem.h != heads)).any():
            self.say(f"finishes {op.part.buffer!r} as heads {op.heads}, which it does not hold")
        for cells, index in (out, lse):
            cells.who[index], cells.sets[index] = np.where(who < 0, NOTHING, who), part[0].sets[part[1]]

    def _compute(self, op: Forward | Backward) -> None:
        given = [(op.q, "q"), (op.kv, "kv")] + ([(op.do, "do"), (op.stats, "stats")] if isinstance(op, Backward) else [])
        results = [(op.dq, "dq"), (op.dkv, "dkv")] if isinstance(op, Backward) else [(op.into, "part")]
        parts = [self.part(view, write) for views, write in ((given, False), (results, True)) for view, _ in views]
        if any(part is None for part in parts):
            return
        p, block = self.proof.plan.problem, op.block
        number = self.proof.number(block, self)
        heads = np.arange(*block.heads)
        q = block.q.array()[:, None] * p.h + heads
        kv = block.kv.array()[:, None] * p.g + np.unique(heads // p.group)
        for (view, kind), part in zip([*given, *results], parts, strict=True):
            assert part is not None
            (cells, index), claimed = part, kv if kind in ("kv", "dkv") else q
            if cells.buffer.kind != kind or cells.who[index].shape != claimed.shape:
                self.say(f"{view} does not fit {kind!r} of {block}")
            elif kind in SUMS:
                cells.who[index], cells.sets[index] = claimed, self.proof.sets.number((number,))
            elif not np.array_equal(cells.who[index], claimed):
                self.say(f"computes with {view.buffer!r}, which does not hold the rows that the block names as {kind!r}")


class Proof:
    """All ranks, the blocks they have computed, and what was found wrong."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.found, self.sets = plan, list[str](), Sets()
        self.blocks: list[Block] = []
        self._boxes: dict[tuple[Runs, Runs], Box | None] = {}
        self.ranks: list[Rank] = []
        self.ranks.extend(Rank(self, r) for r in range(plan.world))

    def identity(self, rank: int, kind: str) -> np.ndarray:
        """Whose cells a rank's own rows of a kind are."""
        owners, heads = (self.plan.kv, self.plan.problem.g) if kind in ("kv", "dkv") else (self.plan.q, self.plan.problem.h)
        return owners.shards[rank].array()[:, None] * heads + np.arange(heads)

    def number(self, block: Block, rank: Rank) -> int:
        """Note a block, once it is known to be one that should be computed."""
        self.blocks.append(block)
        p = self.plan.problem
        box = self.look(block.q, block.kv)
        if box is None:
            rank.say(f"computes a tile that is EMPTY: {block}")
        else:
            edges = np.array([0, block.kv.count])
            kind = p.mask.tiles(corner(p, block.q, block.kv), slice(0, p.b), slice(0, block.q.count), edges)[0]
            if kind != block.kind:
                rank.say(f"takes a tile for {block.kind.name} that is {Tile(kind).name}: {block}")
        return len(self.blocks) - 1

    def look(self, q: Runs, kv: Runs) -> Box | None:
        """`sight.look`, asked once."""
        if (q, kv) not in self._boxes:
            self._boxes[q, kv] = look(self.plan.problem, q, kv)
        return self._boxes[q, kv]

    def sent(self, source: int, step: int, target: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """What a rank has sent another in a step, in order."""
        op, carried = self.ranks[source].posted[step] if source in range(len(self.ranks)) else (None, [])
        sends: tuple[Send, ...] = op.sends if op is not None else ()
        return (data for send, data in zip(sends, carried, strict=True) if send.peer == target)

    def run(self) -> list[str]:
        """Everything that is wrong with the plan's programs."""
        while sum(rank.run() for rank in self.ranks):
            pass
        stuck = [rank for rank in self.ranks if rank.at < len(rank.ops)]
        for rank in stuck:
            step, peers = rank.ops[rank.at], sorted(set(rank.blockers()))
            names = ", ".join(f"rank {p}" + (" (which has ended)" if self.ranks[p] not in stuck else "") for p in peers)
            rank.say(f"waits for ever at {step} for {names or 'a step that it has not posted'}")
        for rank in self.ranks:
            if rank.open and rank not in stuck:
                rank.say(f"ends with steps {rank.open} in flight")
        return self.found if stuck else [*self.found, *check_results(self), *check_left(self)]


def check_results(proof: Proof) -> list[str]:
    """Whether each result holds the rows it should, with every visible pair in it exactly once."""
    found = []
    for rank in proof.ranks:
        for name in proof.plan.programs[rank.number].results:
            cells = rank.cells.get(name)
            if cells is None:
                found.append(f"rank {rank.number}: there is no {name!r} at the end")
                continue
            own = proof.identity(rank.number, cells.buffer.kind)
            if own.shape != cells.who.shape or ((cells.who >= 0) & (cells.who != own)).any():
                found.append(f"rank {rank.number}: {name!r} does not hold the rank's own rows")
                continue
            if cells.buffer.kind in ("out", "lse") and (cells.who == -1).any():
                found.append(f"rank {rank.number}: {name!r} is not finished")
            keys = cells.buffer.kind == "dkv"
            found += [f"rank {rank.number}: {name!r} {text}" for text in _check_cells(proof, cells.sets, own, keys)]
    return found


def check_left(proof: Proof) -> list[str]:
    """Whether every block is in some result and nothing but what was given and what came out is left."""
    found, used = [], set()
    for rank in proof.ranks:
        program = proof.plan.programs[rank.number]
        left = set(rank.cells) - {buffer.name for buffer in program.given} - set(program.results)
        found += [f"rank {rank.number} never frees {name!r}" for name in sorted(left)]
        numbers = {x for name in program.results if name in rank.cells for x in np.unique(rank.cells[name].sets).tolist()}
        used |= {block for number in numbers for block in proof.sets.known[number]}
    return found + [f"in no result: {block}" for x, block in enumerate(proof.blocks) if x not in used]


def _check_cells(proof: Proof, sets: np.ndarray, own: np.ndarray, keys: bool) -> Iterator[str]:
    """Compare the blocks in each cell with all pairs that its row is in, of each query head that it is about."""
    p, seen = proof.plan.problem, set()
    width = p.g if keys else p.h
    for number in np.unique(sets):
        for head in np.flatnonzero((sets == number).any(0)).tolist():
            rows = Runs.of(own[sets[:, head] == number, head] // width)
            for x in range(head * p.group, (head + 1) * p.group) if keys else [head]:
                blocks = tuple(b for b in proof.sets.known[number] if proof.blocks[b].heads[0] <= x < proof.blocks[b].heads[1])
                if (blocks, rows) not in seen:
                    seen.add((blocks, rows))
                    yield from _check_rows(proof, [proof.blocks[b] for b in blocks], rows, keys)


def _check_rows(proof: Proof, blocks: list[Block], rows: Runs, keys: bool) -> Iterator[str]:
    """Whether blocks cover, once, all that some rows see (or, of keys, are seen by)."""
    total, side = (proof.plan.problem.n, "queries") if keys else (proof.plan.problem.s, "keys")
    times = np.zeros(total, int)
    for block in blocks:
        times[(block.q if keys else block.kv).array()] += 1
    for wrong, text in ((times == 0, "lacks"), (times > 1, "counts more than once")):
        others = Runs.of(np.flatnonzero(wrong))
        box = proof.look(others, rows) if keys else proof.look(rows, others)
        if box is not None:
            first = others.array()[(box.q if keys else box.kv)[0]]
            yield f"row {rows.array()[0]} {text} visible {side} from row {first} on"
