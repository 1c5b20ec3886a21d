"""Messages between the ranks of a torch process group, over Gloo or NCCL, with a deadline: whoever waits learns within a
fraction of a second that some rank of the group is gone, also one that it does not talk to.

Everything a call sends goes through here. Peers are ranks within the group; torch translates them."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from .._errors import DtypeError, PeerLost
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
    a device they have NCCL's stream, and `wait` makes only the device wait. `settings` and `methods` are what the ranks of the
    group have settled before: the same on all of them."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.world = group.rank(), group.size()
        self.timeout_s = group._get_backend(device).options._timeout.total_seconds()
        self.lost: PeerLost | None = None
        self.calls, self.step = 0, AGREEING
        self.settings: dict[Any, Any] = {}
        self.methods: dict[Any, Any] = {}
        world = dist.get_process_group_ranks(group)
        store = distributed_c10d._get_process_group_store(group)
        self.news = News(store, self.rank, world.index(0) if 0 in world else None)

    def begin(self) -> None:
        """A new call: its messages are told from those of others by their tags."""
        self._check()
        self.calls, self.step = self.calls + 1, AGREEING

    def post(self, step: int, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]]) -> Handle:
        """Start messages with these peers. Those of one pair of ranks arrive in the order in which they are listed."""
        self._check()
        self.step = step
        tag = (self.calls << TAGS | (step + 1) & (1 << TAGS) - 1) & 0x7FFFFFFF
        listed = [(dist.isend, *x) for x in sends] + [(dist.irecv, *x) for x in recvs]
        ops = [dist.P2POp(op, tensor, group=self.group, tag=tag, group_peer=peer) for op, peer, tensor in listed]
        if not ops:
            return Handle(step, [])
        try:
            works = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            raise self._fail(PeerLost(listed[0][1], step, first_line(error))) from error
        peers = [peer for _, peer, _ in listed] if len(works) == len(ops) else [(recvs or sends)[0][0]] * len(works)
        return Handle(step, list(zip(peers, works, strict=True)), self._event())

    def wait(self, handle: Handle, deadline_s: float) -> None:
        """Until the messages have arrived, or `PeerLost`."""
        raise NotImplementedError

    def settle(self) -> None:
        """Until everything that was waited for has arrived, on devices too: only now results are results."""
        self._check()

    def gather(self, x: Tensor, deadline_s: float) -> list[Tensor]:
        """Every rank's x, a tensor of one size on the host."""
        raise NotImplementedError

    def give_up(self, error: BaseException) -> None:
        """Tell the others that this rank has raised and goes no further: messages under way are lost, and so is the group."""
        if self.lost is None:
            self._fail(PeerLost(self.rank, self.step, f"it raised {first_line(error)}"))

    def _event(self) -> Any:
        return None

    def _check(self) -> None:
        if self.lost is not None:
            raise self.lost

    def _fail(self, lost: PeerLost) -> PeerLost:
        """Make a loss known: the one that all ranks raise, and this one from now on whenever it is asked."""
        self.lost = self.news.declare(lost)
        return self.lost


class HostTransport(GroupTransport):
    """Over Gloo. Torch's handles can only be waited for, so a thread does that while this one looks at the news; where the wait
    never ends, the thread holds on to the buffers until the process does."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self._thread = _Waiter()

    def wait(self, handle: Handle, deadline_s: float) -> None:
        self._check()
        if not handle.works:
            return
        begun, said = time.monotonic(), False
        done = self._thread.submit(handle, deadline_s + 60)
        while not wait([done], LOOK_S).done:
            if (lost := self.news.check(handle.step)) is not None:
                raise self._fail(lost)
            waited = time.monotonic() - begun
            if waited > deadline_s:
                raise self._fail(self.news.blame(self._thread.peer, handle.step))
            if waited > min(PATIENCE_S, deadline_s / 2) and not said:
                self.news.wait_for(self._thread.peer)
                said = True
        self.news.arrived()
        if (error := done.result()) is not None:
            why = f"its connection broke: {first_line(error)}"
            raise self._fail(self.news.check(handle.step) or PeerLost(self._thread.peer, handle.step, why))

    def gather(self, x: Tensor, deadline_s: float) -> list[Tensor]:
        found = [x if r == self.rank else torch.empty_like(x) for r in range(self.world)]
        others = [r for r in range(self.world) if r != self.rank]
        self.wait(self.post(AGREEING, [(r, x) for r in others], [(r, found[r]) for r in others]), deadline_s)
        return found


class _Waiter:
    """A thread that waits. `peer` is whom it waits for. It does not keep the process from ending."""

    def __init__(self) -> None:
        self.peer = 0
        self._jobs: SimpleQueue[tuple[Handle, float, Future]] = SimpleQueue()
        threading.Thread(target=self._run, name="tilewise-ring-wait", daemon=True).start()

    def submit(self, handle: Handle, limit_s: float) -> Future:
        """A future of the error that ended the wait, or of None."""
        done: Future = Future()
        self._jobs.put((handle, limit_s, done))
        return done

    def _run(self) -> None:
        while True:
            handle, limit_s, done = self._jobs.get()
            done.set_result(self._wait(handle, timedelta(seconds=limit_s)))

    def _wait(self, handle: Handle, limit: timedelta) -> RuntimeError | None:
        for peer, work in handle.works:
            self.peer = peer
            try:
                work.wait(limit)
            except RuntimeError as error:
                return error
        return None


class Watched:
    """Messages that a device waits for, how long they may take once it gets to them, and when it did."""

    def __init__(self, handle: Handle, deadline_s: float) -> None:
        self.handle, self.deadline_s, self.begun = handle, deadline_s, 0.0

    @property
    def done(self) -> bool:
        return all(work.is_completed() for _, work in self.handle.works)


class DeviceTransport(GroupTransport):
    """Over NCCL. A message waits for what the device had to do when it was posted and travels beside what it does then. The
    host goes on at once and waits in `settle`; meanwhile a thread watches what is under way, and aborts the communicator at a
    deadline or at bad news, which ends whatever waits for it."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self._hosts = HostTransport(_between_hosts(group), torch.device("cpu"))
        self._hosts.news = self.news
        self._under_way: list[Watched] = []
        self._wake = threading.Condition()
        threading.Thread(target=self._watch, name="tilewise-ring-watch", daemon=True).start()

    def wait(self, handle: Handle, deadline_s: float) -> None:
        self._check()
        if handle.works:
            with self._wake:
                self._under_way.append(Watched(handle, deadline_s))
                self._wake.notify()
        for _, work in handle.works:
            work.wait()

    def settle(self) -> None:
        while self._oldest() is not None:
            self._check()
            time.sleep(2e-5)
        self._check()

    def gather(self, x: Tensor, deadline_s: float) -> list[Tensor]:
        """Between the hosts: whatever a device still has to do, it would have to do first."""
        self._check()
        self._hosts.calls = self.calls
        try:
            return self._hosts.gather(x, deadline_s)
        except PeerLost as lost:
            raise self._fail(lost) from None

    def _event(self) -> Any:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _fail(self, lost: PeerLost) -> PeerLost:
        if self.lost is None:
            lost = self.news.declare(lost)
            self.group._get_backend(self.device).abort()
            self.lost = lost
        return self.lost

    def _oldest(self) -> Watched | None:
        """The first messages that are still under way; those before them are forgotten."""
        with self._wake:
            while self._under_way and self._under_way[0].done:
                del self._under_way[0]
            return self._under_way[0] if self._under_way else None

    def _watch(self) -> None:
        torch.cuda.set_device(self.device)
        while self.lost is None:
            with self._wake:
                while not self._under_way:
                    self._wake.wait()
            time.sleep(LOOK_S / 2)
            if (lost := self._look()) is not None:
                self._fail(lost)

    def _look(self) -> PeerLost | None:
        """What is wrong with what is under way, if anything."""
        if (oldest := self._oldest()) is None:
            return None
        handle, now = oldest.handle, time.monotonic()
        if (lost := self.news.check(handle.step)) is not None or not handle.ready.query():
            return lost
        oldest.begun = oldest.begun or now
        waited, peer = now - oldest.begun, handle.works[0][0]
        if waited > min(PATIENCE_S, oldest.deadline_s / 2):
            self.news.wait_for(peer)
        return self.news.blame(peer, handle.step) if waited > oldest.deadline_s else None


class Alone:
    """One rank, with or without a process group: nobody to talk to."""

    rank, world, timeout_s = 0, 1, 0.0

    def __init__(self) -> None:
        self.settings: dict[Any, Any] = {}
        self.methods: dict[Any, Any] = {}

    def begin(self) -> None: ...

    def post(self, step: int, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]]) -> Handle:
        return Handle(step, [])

    def wait(self, handle: Handle, deadline_s: float) -> None: ...

    def settle(self) -> None: ...

    def give_up(self, error: BaseException) -> None: ...

    def gather(self, x: Tensor, deadline_s: float) -> list[Tensor]:
        return [x]


Transport = GroupTransport | Alone


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


_alone = Alone()
_open: dict[tuple[dist.ProcessGroup, torch.device], GroupTransport] = {}


def open_transport(group: dist.ProcessGroup | None, device: torch.device) -> Transport:
    """The transport of a group for tensors of a device. It lives as long as the group."""
    if group is None or group.size() == 1:
        return _alone
    for key in [key for key in _open if key[0] not in distributed_c10d._world.pg_map]:
        del _open[key]
    if (group, device) not in _open:
        make = {("cpu", "gloo"): HostTransport, ("cuda", "nccl"): DeviceTransport}.get((device.type, _backend(group, device)))
        if make is None:
            have = _backend(group, device) or "no backend"
            raise DtypeError(f"on {device} the process group has {have}; ring attention takes gloo on cpu and nccl on cuda")
        _open[group, device] = make(group, device)
    return _open[group, device]


def _between_hosts(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group itself where it has Gloo beside NCCL; else one of the same ranks that has."""
    if _backend(group, torch.device("cpu")) == "gloo":
        return group
    return dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)


def _backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the backend that a group has for a device; nothing where it has none."""
    try:
        return group._get_backend(device).name().lower()
    except RuntimeError:
        return ""
