"""Messages between devices over NCCL, with a deadline too: what a device waits for, a thread watches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from .._errors import PeerLost
from .news import first_line
from .transport import AGREEING, LOOK_S, PATIENCE_S, GroupTransport, Handle, HostTransport, Message


class Watched:
    """Messages under way, how long they may take, and since when they do: since a device got to them, or, while the host itself
    is held up as it starts them, since it began to."""

    def __init__(self, handle: Handle, deadline_s: float, begun: float = 0.0) -> None:
        self.handle, self.deadline_s, self.begun = handle, deadline_s, begun

    @property
    def done(self) -> bool:
        return all(work.is_completed() for _, work in self.handle.works)


class DeviceTransport(GroupTransport):
    """Over NCCL. A message waits for what the device had to do when it was posted and travels beside what it does then. The
    host goes on at once and waits in `settle`; meanwhile a thread watches what is under way, and aborts the communicator at a
    deadline or at bad news, which ends whatever waits for it.

    NCCL may hold the host up as well: where two ranks talk for the first time, until the other one comes. The thread watches
    that too; and as only a communicator that is there can be aborted, it is made at the first agreement, when all ranks are."""

    ahead = True

    def __init__(self, group: dist.ProcessGroup, device: torch.device, hosts: dist.ProcessGroup) -> None:
        super().__init__(group, device)
        self._hosts = HostTransport(hosts, torch.device("cpu"))
        self._hosts.news = self.news
        self._beside = torch.cuda.Stream(device)
        self._met = False
        self._talked: set[tuple[int, str]] = set()
        self._starting: Watched | None = None
        self._under_way: list[Watched] = []
        self._wake, self._failing = threading.Condition(), threading.Lock()
        threading.Thread(target=self._watch, name="tilewise-ring-watch", daemon=True).start()

    def post(self, step: int, sends: Sequence[Message], recvs: Sequence[Message], after: Any = None) -> Handle:
        ways = {(peer, "to") for peer, _ in sends} | {(peer, "from") for peer, _ in recvs}
        new = ways - self._talked
        if not new:
            return super().post(step, sends, recvs, after)
        with self._watched(step, min(new)[0]):
            handle = super().post(step, sends, recvs, after)
        self._talked |= ways
        return handle

    def _start(self, sends: Sequence[Message], recvs: Sequence[Message], tag: int) -> list[tuple[int, Any]]:
        """All of them as one operation of NCCL's, which is also ended where it cannot be: a thread has only one under way."""
        self.group._start_coalescing(self.device)
        try:
            for peer, x in sends:
                self.group.send([x], peer, tag)
            for peer, x in recvs:
                self.group.recv([x], peer, tag)
        except BaseException:
            with suppress(RuntimeError):
                self.group._end_coalescing(self.device)
            raise
        return [((recvs or sends)[0][0], self.group._end_coalescing(self.device))]

    def wait(self, handle: Handle, deadline_s: float) -> None:
        self._check()
        if handle.works:
            with self._wake:
                self._under_way.append(Watched(handle, deadline_s))
                self._wake.notify()
        for peer, work in handle.works:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._fail(PeerLost(peer, handle.step, first_line(error))) from error

    def settle(self) -> None:
        while self._oldest() is not None:
            self._check()
            time.sleep(2e-5)
        with self._failing:  # what has been aborted counts as done before the loss is known
            self._check()
        self.news.arrived()

    def close(self) -> None:
        """The hosts' group goes with that of the devices it was made for; where it is the same, it is gone."""
        if self._hosts.group in distributed_c10d._world.pg_map:
            dist.destroy_process_group(self._hosts.group)

    def offer(self, x: Tensor, deadline_s: float) -> Callable[[], list[Tensor]]:
        """Between the hosts: whatever a device still has to do, it would have to do first."""
        self._check()
        self._hosts.calls = self.calls
        return partial(self._told, self._on_hosts(partial(self._hosts.offer, x, deadline_s)))

    def _told(self, read: Callable[[], list[Tensor]]) -> list[Tensor]:
        found = self._on_hosts(read)
        if not self._met:
            self._meet()
        return found

    def _on_hosts(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except PeerLost as lost:
            raise self._fail(lost) from None

    def _meet(self) -> None:
        """Make the communicator, by a sum of nothing."""
        after = self.mark()
        with self._watched(AGREEING, (self.rank + 1) % self.world), self._behind(after):
            try:
                dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)
            except RuntimeError as error:
                raise self._fail(PeerLost((self.rank + 1) % self.world, AGREEING, first_line(error))) from error
        self._met = True

    def mark(self) -> Any:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    @contextmanager
    def _behind(self, after: Any) -> Iterator[None]:
        if after is None:
            yield
            return
        self._beside.wait_event(after)
        with torch.cuda.stream(self._beside):
            yield

    @contextmanager
    def _watched(self, step: int, peer: int) -> Iterator[None]:
        """While NCCL may hold the host up, waiting for `peer`. Where that ended in a loss, it is raised."""
        with self._wake:
            self._starting = Watched(Handle(step, [(peer, None)]), self.deadline_s, time.monotonic())
            self._wake.notify()
        try:
            yield
        finally:
            self._starting = None
        self._check()

    def _fail(self, lost: PeerLost) -> PeerLost:
        with self._failing:
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
                while not self._under_way and self._starting is None:
                    self._wake.wait()
            time.sleep(LOOK_S / 2)
            if (lost := self._look()) is not None:
                self._fail(lost)

    def _look(self) -> PeerLost | None:
        """What is wrong with what is being started or under way, if anything."""
        watched = self._starting or self._oldest()
        if watched is None:
            return None
        handle, now = watched.handle, time.monotonic()
        if (lost := self.news.check(handle.step)) is not None or (handle.ready is not None and not handle.ready.query()):
            return lost
        watched.begun = watched.begun or now
        waited, peer = now - watched.begun, handle.works[0][0]
        if waited > min(PATIENCE_S, watched.deadline_s / 2):
            with self._wake:  # or it would be said after `settle` has taken it back
                if watched is self._starting or not watched.done:
                    self.news.wait_for(peer)
        return self.news.blame(peer, handle.step) if waited > watched.deadline_s else None
