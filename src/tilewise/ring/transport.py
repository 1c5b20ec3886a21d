"""Messages between the ranks of a torch process group, over Gloo or NCCL, with a deadline: whoever waits learns within a
fraction of a second that some rank of the group is gone, also one that it does not talk to.

Everything a call sends goes through here. Peers are ranks within the group; torch translates them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from .._errors import PeerLost
from .execute import Message
from .news import News, first_line

T = TypeVar("T")
LOOK_S = 0.1
"""How often a rank that waits looks whether another one was lost."""

PATIENCE_S = 0.5
"""After how long it tells the others whom it waits for."""

AGREEING = -1
"""The step at which ranks compare what they are about to do."""

TAGS = 12
"""Bits of a tag that count the steps of a call; the others count calls."""


class Handle(NamedTuple):
    """Messages under way: the peer at the other end of each, and torch's handle. `ready` is the event on a device before
    which none of them can start."""

    step: int
    works: list[tuple[int, Any]]
    ready: Any = None


class GroupTransport:
    """Sends and receives for one process group and one kind of device. On the host messages travel while the host computes; on
    a device they have NCCL's stream, and `wait` makes only the device wait.

    `settings`, `methods` and `agreed` (by what all have said) are what the ranks of the group have settled before: the same on
    all of them. `guesses`: by what this rank alone has said, what was settled then. `ahead`: work that turns out to be in vain
    costs the host little, so a call may begin by a guess."""

    ahead = False

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.world = group.rank(), group.size()
        self.timeout_s = group._get_backend(device).options._timeout.total_seconds()
        self.lost: PeerLost | None = None
        self.calls, self.step, self.deadline_s = 0, AGREEING, self.timeout_s
        self.settings: dict[Any, Any] = {}
        self.methods: dict[Any, Any] = {}
        self.agreed: dict[Any, Any] = {}
        self.guesses: dict[Any, Any] = {}
        world = dist.get_process_group_ranks(group)
        store = distributed_c10d._get_process_group_store(group)
        self.news = News(store, self.rank, world.index(0) if 0 in world else None)

    def begin(self, deadline_s: float) -> None:
        """A new call: its messages are told from those of others by their tags."""
        self._check()
        self.calls, self.step, self.deadline_s = self.calls + 1, AGREEING, deadline_s

    def post(self, step: int, sends: Sequence[Message], recvs: Sequence[Message], after: Any = None) -> Handle:
        """Start messages with these peers. Those of one pair of ranks arrive in the order in which they are listed. They wait
        for what the device had to do when `after` was made (`mark`), or has to do now."""
        self._check()
        self.step, tag = step, self._tag(step)
        if not sends and not recvs:
            return Handle(step, [])
        ready = self.mark() if after is None else after
        try:
            with self._behind(after):
                return Handle(step, self._start(sends, recvs, tag), ready)
        except RuntimeError as error:
            raise self._fail(PeerLost((*sends, *recvs)[0][0], step, first_line(error))) from error

    def _tag(self, step: int) -> int:
        """What tells the messages of a call's step from others."""
        return (self.calls << TAGS | (step + 1) & (1 << TAGS) - 1) & 0x7FFFFFFF

    def _start(self, sends: Sequence[Message], recvs: Sequence[Message], tag: int) -> list[tuple[int, Any]]:
        """Torch's handles, and whom each is about."""
        raise NotImplementedError

    def mark(self) -> Any:
        """An event on the device after all that it has to do so far."""
        return None

    def wait(self, handle: Handle, deadline_s: float) -> None:
        """Until the messages have arrived, or `PeerLost`."""
        raise NotImplementedError

    def settle(self) -> None:
        """Until everything that was waited for has arrived, on devices too: only now results are results."""
        self._check()

    def offer(self, x: Tensor, deadline_s: float) -> Callable[[], list[Tensor]]:
        """Start to tell every rank x, a tensor of one size on the host; what is returned waits for theirs. One at a time."""
        raise NotImplementedError

    def gather(self, x: Tensor, deadline_s: float) -> list[Tensor]:
        """Every rank's x."""
        return self.offer(x, deadline_s)()

    def give_up(self, error: BaseException) -> None:
        """Tell the others that this rank has raised and goes no further: messages under way are lost, and so is the group."""
        if self.lost is None:
            self._fail(PeerLost(self.rank, self.step, f"it raised {first_line(error)}"))

    def close(self) -> None:
        """Let go of what was made for the group, which is no more."""

    def _behind(self, after: Any) -> AbstractContextManager[Any]:
        """Where what is started waits for `after` and nothing else."""
        return nullcontext()

    def _check(self) -> None:
        if self.lost is not None:
            raise self.lost

    def _fail(self, lost: PeerLost) -> PeerLost:
        """Make a loss known: the one that all ranks raise, and this one from now on whenever it is asked."""
        self.lost = self.news.declare(lost)
        return self.lost


class HostTransport(GroupTransport):
    """Over Gloo. Torch's handles can only be waited for, so a thread does that while this one looks at the news; where the wait
    never ends, the thread holds on to the buffers until the process does. An offer the thread even sends, while this one goes
    on."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self._thread = _Waiter()

    def _start(self, sends: Sequence[Message], recvs: Sequence[Message], tag: int) -> list[tuple[int, Any]]:
        begun = [(peer, self.group.send([x], peer, tag)) for peer, x in sends]
        return begun + [(peer, self.group.recv([x], peer, tag)) for peer, x in recvs]

    def wait(self, handle: Handle, deadline_s: float) -> None:
        self._check()
        if handle.works:
            self._finish(
                self._thread.submit(_Job(handle.step, lambda: handle.works, deadline_s + 60, handle.works[0][0])), deadline_s
            )

    def offer(self, x: Tensor, deadline_s: float) -> Callable[[], list[Tensor]]:
        self._check()
        self.step, tag = AGREEING, self._tag(AGREEING)
        found = [x if r == self.rank else torch.empty_like(x) for r in range(self.world)]
        others = [r for r in range(self.world) if r != self.rank]
        start = partial(self._start, [(r, x) for r in others], [(r, found[r]) for r in others], tag)
        job = self._thread.submit(_Job(AGREEING, start, deadline_s + 60, others[0]))
        return partial(self._told, job, found, deadline_s)

    def _told(self, job: _Job, found: list[Tensor], deadline_s: float) -> list[Tensor]:
        self._finish(job, deadline_s)
        return found

    def _finish(self, job: _Job, deadline_s: float) -> None:
        begun, said, step = time.monotonic(), False, job.step
        while not job.done.wait(LOOK_S):
            if (lost := self.news.check(step)) is not None:
                raise self._fail(lost)
            waited = time.monotonic() - begun
            if waited > deadline_s:
                raise self._fail(self.news.blame(self._thread.peer, step))
            if waited > min(PATIENCE_S, deadline_s / 2) and not said:
                self.news.wait_for(self._thread.peer)
                said = True
        self.news.arrived()
        if job.error is not None:
            why = f"its connection broke: {first_line(job.error)}"
            raise self._fail(self.news.check(step) or PeerLost(self._thread.peer, step, why))


class _Job:
    """Messages of a step that a thread starts, or that are under way, and waits for; whom they are about before any has
    started; and the error that ended this, if one did."""

    def __init__(self, step: int, start: Callable[[], list[tuple[int, Any]]], limit_s: float, peer: int) -> None:
        self.step, self.start, self.limit, self.peer = step, start, timedelta(seconds=limit_s), peer
        self.error: Exception | None = None
        self.done = threading.Event()


class _Waiter:
    """A thread that waits. `peer` is whom it waits for. It does not keep the process from ending."""

    def __init__(self) -> None:
        self.peer = 0
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        threading.Thread(target=self._run, name="tilewise-ring-wait", daemon=True).start()

    def submit(self, job: _Job) -> _Job:
        self._jobs.put(job)
        return job

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            self.peer = job.peer
            try:
                for self.peer, work in job.start():
                    work.wait(job.limit)
            except Exception as error:
                job.error = error
            job.done.set()


class Alone:
    """One rank, with or without a process group: nobody to talk to."""

    rank, world, timeout_s, ahead = 0, 1, 0.0, False

    def __init__(self) -> None:
        self.settings: dict[Any, Any] = {}
        self.methods: dict[Any, Any] = {}
        self.agreed: dict[Any, Any] = {}
        self.guesses: dict[Any, Any] = {}

    def begin(self, deadline_s: float) -> None: ...

    def post(self, step: int, sends: Sequence[Message], recvs: Sequence[Message], after: Any = None) -> Handle:
        return Handle(step, [])

    def mark(self) -> Any: ...

    def wait(self, handle: Handle, deadline_s: float) -> None: ...

    def settle(self) -> None: ...

    def give_up(self, error: BaseException) -> None: ...

    def offer(self, x: Tensor, deadline_s: float) -> Callable[[], list[Tensor]]:
        return lambda: [x]

    def gather(self, x: Tensor, deadline_s: float) -> list[Tensor]:
        return [x]


Transport = GroupTransport | Alone


class Held:
    """Messages of a call that ranks have not agreed on yet. What they are about is set down; they go out, in order and each
    behind what the device had to do when it was posted, once they have."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._posted: list[tuple[Handle, Sequence[Message], Sequence[Message]]] | None = []

    def post(self, step: int, sends: Sequence[Message], recvs: Sequence[Message]) -> Handle:
        if self._posted is None:
            return self.transport.post(step, sends, recvs)
        handle = Handle(step, [], self.transport.mark())
        self._posted.append((handle, sends, recvs))
        return handle

    def release(self) -> None:
        for handle, sends, recvs in self._posted or []:
            handle.works.extend(self.transport.post(handle.step, sends, recvs, handle.ready).works)
        self._posted = None


def begun(steps: Generator[Handle, None, T], transport: Transport) -> Generator[Any, None, T]:
    """The same steps, those before the first wait taken already."""
    rest = _from_the_first_wait(steps)
    try:
        next(rest)
    except BaseException as error:
        transport.give_up(error)
        raise
    return rest


def _from_the_first_wait(steps: Generator[Handle, None, T]) -> Generator[Any, None, T]:
    try:
        first = next(steps)
    except StopIteration as done:
        yield
        return done.value
    yield
    yield first
    return (yield from steps)


def run_steps(steps: Generator[Handle, None, T], transport: Transport, deadline_s: float) -> T:
    """What a generator returns that yields a handle wherever it has to wait. Where it raises, the other ranks are told."""
    try:
        while True:
            transport.wait(next(steps), deadline_s)
    except StopIteration as done:
        transport.settle()
        return done.value
    except BaseException as error:
        steps.close()
        transport.give_up(error)
        raise
