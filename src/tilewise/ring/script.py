"""Programs of all ranks written side by side, so that every message has both its ends by construction."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .moves import Message
from .program import BATCH, Add, Buffer, Copy, Free, Make, Merge, Op, Post, Recv, Send, View, Wait


class Script:
    """Grows the operations of every rank. Steps are numbered as they are posted."""

    def __init__(self, world: int) -> None:
        self.ops: list[list[Op]] = [[] for _ in range(world)]
        self._steps = 0

    @property
    def ranks(self) -> range:
        return range(len(self.ops))

    def add(self, rank: int, *ops: Op) -> None:
        self.ops[rank].extend(ops)

    def make(self, rank: int, *buffers: Buffer) -> None:
        self.ops[rank].extend(Make(buffer) for buffer in buffers)

    def free(self, rank: int, *names: str) -> None:
        self.ops[rank].extend(Free(name) for name in names)

    def post(self, channel: str, messages: list[Message]) -> list[int]:
        """Start messages, in as many steps as keep every rank within the limit; nothing where there are none."""
        return [self._post(channel, batch) for batch in batches(messages, len(self.ops))]

    def _post(self, channel: str, messages: list[Message]) -> int:
        step, self._steps = self._steps, self._steps + 1
        sends: list[list[Send]] = [[] for _ in self.ranks]
        recvs: list[list[Recv]] = [[] for _ in self.ranks]
        for m in messages:
            sends[m.source].append(Send(m.target, m.view))
            recvs[m.target].append(Recv(m.source, m.into))
        for r in self.ranks:
            self.add(r, Post(step, channel, tuple(sends[r]), tuple(recvs[r])))
        return step

    def wait(self, steps: Iterable[int]) -> None:
        """Every rank waits for these steps."""
        for step in steps:
            for r in self.ranks:
                self.add(r, Wait(step))

    def combine(self, rank: int, source: View, into: View, kind: str) -> None:
        """Merge parts, add anything else."""
        self.add(rank, (Merge if kind == "part" else Add)(source, into))

    def copy(self, rank: int, source: View, into: View) -> None:
        """A copy on one rank, where there is anything to copy."""
        if source.rows.count and source.heads.count:
            self.add(rank, Copy(source, into))


def batches(messages: list[Message], world: int) -> list[list[Message]]:
    """Messages in steps, as `split` puts them."""
    ends = np.array([(m.source, m.target) for m in messages], int).reshape(-1, 2)
    return [[messages[at] for at in part] for part in split(ends[:, 0], ends[:, 1], world)]


def split(source: np.ndarray, target: np.ndarray, world: int) -> list[np.ndarray]:
    """Messages in steps of at most `BATCH` sends and receives a rank, as indices; those over one distance stay together."""
    if not len(source):
        return []
    if np.bincount(np.r_[source, target]).max() <= BATCH:
        return [np.arange(len(source))]
    distance = (target - source) % world
    order = np.argsort(distance, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(distance[order])) + 1)
    made: list[list[np.ndarray]] = []
    load = np.zeros(world, np.int64)
    for group in sorted(groups, key=lambda group: group[0]):
        extra = np.bincount(np.r_[source[group], target[group]], minlength=world)
        if not made or ((load + extra)[extra > 0] > BATCH).any():
            made.append([])
            load = np.zeros(world, np.int64)
        made[-1].append(group)
        load += extra
    return [np.sort(np.concatenate(batch)) for batch in made]
