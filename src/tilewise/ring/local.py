"""N ranks in one process, without threads: each is a generator, and a scheduler resumes one after the other, in turn or in any
order that a seed gives, while messages take their time, get lost, or have nobody left to go to. What is right here for every
order is right on any network; and every order is the same again for the same seed."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._errors import PeerLost
from ..problem import Partial
from .execute import Given, Message, backward_given, backward_results, forward_given, forward_results, run
from .kernel import Kernel
from .owners import Owners
from .program import Plan, Post

Rank = Generator[Any, None, dict[str, Tensor]]
"""One rank's run."""

Outcome = dict[str, Tensor] | PeerLost | None
"""How a rank ended: with results, with an error, or killed (None)."""


@dataclass
class Letter:
    """One message. It arrives when both its ends are there and its time has come."""

    sent: Tensor | None = None
    room: Tensor | None = None
    due: int = 0
    lost: bool = False
    arrived: bool = False


class Handle(NamedTuple):
    """A step of one rank, and its letters by peer."""

    step: int
    letters: list[tuple[int, Letter]]


@dataclass
class LocalTransport:
    """Carries messages between `world` virtual ranks.

    seed    None: ranks take turns and messages arrive at once; else both the next rank and the delays are drawn from it
    delay   the longest time that a message takes, in turns of the scheduler; needs a seed
    lost    messages (step, source, target) that never arrive
    killed  the step at which a rank dies instead of posting

    A message is copied when it arrives, not when it is posted, so a rank that writes what it is sending is found out by its
    results; and room for one holds NaN until then.
    """

    world: int
    seed: int | None = None
    delay: int = 0
    lost: Collection[tuple[int, int, int]] = ()
    killed: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.now = 0
        self.dead: set[int] = set()
        self._random = None if self.seed is None else random.Random(self.seed)
        self._letters: defaultdict[tuple[int, int, int], tuple[deque[Letter], deque[Letter]]]
        self._letters = defaultdict(lambda: (deque(), deque()))
        self._flying: list[Letter] = []

    def post(self, rank: int, op: Post, sends: Sequence[Message], recvs: Sequence[Message]) -> Handle:
        """Start a rank's messages of a step. The n-th that one rank sends another in a step is the n-th that it receives."""
        if self.killed.get(rank) == op.step:
            raise Killed
        letters = []
        for peer, sent in sends:
            letter = self._meet((op.step, rank, peer), 0)
            letter.sent = sent
            letters.append((peer, letter))
        for peer, room in recvs:
            letter = self._meet((op.step, peer, rank), 1)
            letter.room = room.fill_(torch.nan)
            letters.append((peer, letter))
        return Handle(op.step, letters)

    def _meet(self, key: tuple[int, int, int], end: int) -> Letter:
        """The letter that the other end is waiting with, or a new one that waits for the other end."""
        mine, theirs = self._letters[key][end], self._letters[key][1 - end]
        if theirs:
            return theirs.popleft()
        letter = Letter(due=self.now + (self._random.randint(0, self.delay) if self._random else 0), lost=key in self.lost)
        mine.append(letter)
        self._flying.append(letter)
        return letter

    def deliver(self) -> None:
        """Let time pass: every letter whose time has come arrives."""
        self.now += 1
        for letter in self._flying:
            if letter.sent is not None and letter.room is not None and letter.due < self.now and not letter.lost:
                letter.room.copy_(letter.sent)
                letter.arrived = True
        self._flying = [letter for letter in self._flying if not letter.arrived]

    def done(self, handle: Handle) -> bool:
        """Whether all messages of a step have arrived."""
        return all(letter.arrived for _, letter in handle.letters)

    def choose(self, waiting: Mapping[int, Handle | None]) -> int | None:
        """Whose turn it is of those that can go on, if anybody can: the longest waiting, or whoever is drawn."""
        able = (r for r, handle in waiting.items() if handle is None or self.done(handle))
        if self._random is None:
            return next(able, None)
        ranks = list(able)
        return self._random.choice(ranks) if ranks else None

    @property
    def stuck(self) -> bool:
        """Whether no message will arrive any more, as things are."""
        return not any(x.sent is not None and x.room is not None and not x.lost for x in self._flying)

    def loss(self, handle: Handle) -> PeerLost:
        """Why a step will never be done: a rank is dead, or a message of it lost, or a peer does not post it."""
        missing = sorted({peer for peer, letter in handle.letters if not letter.arrived})
        if self.dead:
            rank = min(self.dead & set(missing) or self.dead)
            return PeerLost(rank, handle.step, "it died")
        return PeerLost(missing[0], handle.step, "a message to or from it never arrived")

    def run(self, ranks: Sequence[Rank]) -> list[Outcome]:
        """Run every rank to its end. When none can go on, each that is left is told why."""
        outcomes: list[Outcome] = [None] * self.world
        waiting: dict[int, Handle | None] = dict.fromkeys(range(self.world))
        while waiting:
            self.deliver()
            chosen = self.choose(waiting)
            if chosen is not None:
                self._resume(chosen, ranks, waiting, outcomes)
            elif self.stuck:
                return self._give_up(ranks, waiting, outcomes)
        return outcomes

    def _resume(self, r: int, ranks: Sequence[Rank], waiting: dict[int, Handle | None], outcomes: list[Outcome]) -> None:
        """Let a rank go on until it waits again, ends or dies; it then goes to the end of the queue."""
        del waiting[r]
        try:
            waiting[r] = next(ranks[r])
        except StopIteration as end:
            outcomes[r] = end.value
        except Killed:
            self.dead.add(r)

    def _give_up(self, ranks: Sequence[Rank], waiting: dict[int, Handle | None], outcomes: list[Outcome]) -> list[Outcome]:
        for r, handle in waiting.items():
            assert handle is not None
            try:
                ranks[r].throw(self.loss(handle))
            except PeerLost as error:
                outcomes[r] = error
        return outcomes


class Killed(BaseException):
    """A rank's end, in a test of what the others do."""


def shards(owners: Owners, x: Tensor, dim: int = 1) -> list[Tensor]:
    """Each rank's rows of a whole tensor."""
    order = torch.from_numpy(owners.order).to(x.device)
    return list(x.index_select(dim, order).split(owners.counts, dim))


def unshard(owners: Owners, parts: Sequence[Tensor], dim: int = 1) -> Tensor:
    """The whole tensor again."""
    inverse = torch.from_numpy(owners.inverse)
    return torch.cat(list(parts), dim).index_select(dim, inverse.to(parts[0].device))


def attend(plan: Plan, kernel: Kernel, qkv: tuple[Tensor, Tensor, Tensor], transport: LocalTransport | None = None) -> Partial:
    """o "b n h e" and lse "b h n" of whole tensors by a forward plan on virtual ranks. Raises `PeerLost` where a rank does."""
    found = [forward_results(x) for x in results(plan, kernel, forward_shares(plan, qkv), transport)]
    return Partial(unshard(plan.q, [x.o for x in found]), unshard(plan.q, [x.lse for x in found], 2))


def gradients(
    plan: Plan, kernel: Kernel, qkv: tuple[Tensor, Tensor, Tensor], saved: Partial, grads: Partial,
    transport: LocalTransport | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv of Σ do∘o + Σ dlse∘lse with `grads` = (do, dlse), of whole tensors by a backward plan."""
    found = [
        backward_results(plan, x, qkv[0].dtype)
        for x in results(plan, kernel, backward_shares(plan, qkv, saved, grads), transport)
    ]
    dq, dk, dv = zip(*found, strict=True)
    return unshard(plan.q, dq), unshard(plan.kv, dk), unshard(plan.kv, dv)


def forward_shares(plan: Plan, qkv: tuple[Tensor, Tensor, Tensor]) -> list[Given]:
    """What each rank of a forward plan is given of whole tensors."""
    split = zip(*(shards(owners, x) for owners, x in zip((plan.q, plan.kv, plan.kv), qkv, strict=True)), strict=True)
    return [forward_given(plan, r, *part) for r, part in enumerate(split)]


def backward_shares(plan: Plan, qkv: tuple[Tensor, Tensor, Tensor], saved: Partial, grads: Partial) -> list[Given]:
    """What each rank of a backward plan is given of whole tensors."""
    do, wide = grads.o, saved.lse.dtype
    total = (do.to(wide) * saved.o.to(wide)).sum(-1).transpose(1, 2) - grads.lse
    q, do = shards(plan.q, qkv[0]), shards(plan.q, do)
    k, v = (shards(plan.kv, x) for x in qkv[1:])
    lse, total = (shards(plan.q, x, 2) for x in (saved.lse, total))
    return [backward_given(plan, r, (q[r], k[r], v[r]), do[r], lse[r], total[r]) for r in range(plan.world)]


def results(
    plan: Plan, kernel: Kernel, given: Sequence[Given], transport: LocalTransport | None = None
) -> list[dict[str, Tensor]]:
    """What every rank of a plan returns. Raises the `PeerLost` of the first that has one."""
    carrier = LocalTransport(plan.world) if transport is None else transport
    ranks = [run(plan, r, given[r], kernel, partial(carrier.post, r)) for r in range(plan.world)]
    outcomes = carrier.run(ranks)
    for outcome in outcomes:
        if isinstance(outcome, PeerLost):
            raise outcome
    return [outcome for outcome in outcomes if isinstance(outcome, dict)]
