"""Programs of all ranks written side by side, so that every message has both its ends by construction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

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
    """Messages in steps of at most `BATCH` sends and receives a rank; those over the same distance stay together."""
    distances: dict[int, list[Message]] = {}
    for message in messages:
        distances.setdefault((message.target - message.source) % world, []).append(message)
    made: list[list[Message]] = []
    load: Counter[int] = Counter()
    for group in distances.values():
        extra = Counter([rank for m in group for rank in (m.source, m.target)])
        if not made or any(load[rank] + count > BATCH for rank, count in extra.items()):
            made.append([])
            load = Counter()
        made[-1].extend(group)
        load.update(extra)
    return made
