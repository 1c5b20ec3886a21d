"""Calls that begin by a guess, on processes whose devices are made up and talk over Gloo: what `ring_workers` runs of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import ring_workers as workers
import torch
from ring_workers import EXACT, Found, distance, raised
from torch import Tensor

import tilewise as tw
from tilewise.ring import api, meet
from tilewise.ring.kernel import Kernel
from tilewise.ring.nccl import DeviceTransport
from tilewise.ring.transport import HostTransport

dist: Any = torch.distributed


class Device:
    """A stream or an event of a device that does everything at once."""

    def __init__(self, *_: Any) -> None: ...

    def wait_event(self, event: Device) -> None: ...

    def record(self, stream: Device) -> None: ...

    def query(self) -> bool:
        return True


@contextmanager
def made_up() -> Iterator[None]:
    """torch.cuda, as far as `DeviceTransport` goes, and messages as between hosts."""
    cuda = {
        "Stream": Device,
        "Event": Device,
        "current_stream": Device,
        "stream": nullcontext,
        "set_device": lambda device: None,
    }
    with patch.multiple(torch.cuda, **cuda), patch.object(DeviceTransport, "_start", HostTransport._start):
        yield


class Log:
    """What a rank does in one call: "post" and "block", in order; `behind`: whether each post waits for a mark."""

    def __init__(self) -> None:
        self.acts: list[str] = []
        self.behind: list[bool] = []

    @property
    def guessed(self) -> bool:
        return self.acts.index("block") < self.acts.index("post")


@contextmanager
def watched(transport: Any) -> Iterator[Log]:
    """A log of what this rank does."""
    kernel: Any = Kernel
    log, post, forward = Log(), transport.post, kernel.forward

    def posting(step: int, sends: Any, recvs: Any, after: Any = None) -> Any:
        log.acts.append("post")
        log.behind.append(after is not None)
        return post(step, sends, recvs, after)

    def attending(*arguments: Any) -> Any:
        log.acts.append("block")
        return forward(*arguments)

    transport.post, kernel.forward = posting, attending
    try:
        yield log
    finally:
        transport.post, kernel.forward = post, forward


def said_before() -> Found:
    """Every case once more: what a device begins by a guess."""
    names = workers.cases(dist.get_world_size())
    return {f"{name}: {what}": x for name in names for what, x in workers.attends(name).items()}


def guesses() -> Found:
    """On a group of its own: calls said before, one of which means something else now; mismatches;
    what is never guessed; and one rank that fails before anything is agreed."""
    cpu, ranks = torch.device("cpu"), list(range(dist.get_world_size()))
    group = dist.new_group(ranks)
    with made_up():
        meet._open[group, cpu] = transport = DeviceTransport(group, cpu, dist.new_group(ranks))
        found = _guesses(transport, group)
        dist.destroy_process_group(group)
        meet.open_transport(dist.group.WORLD, cpu)
        gone = transport._hosts.group not in dist.distributed_c10d._world.pg_map
        return {**found, "hosts part when their devices do": (float(not gone), 0)}


def _guesses(transport: Any, group: Any) -> Found:
    world, last, found = group.size(), group.rank() == group.size() - 1, Found()

    def call(name: str, last_has: int, guess: bool, right: bool | None = None, **options: Any) -> None:
        """A call against the whole, a guess or not and a right one; every rank but the last has five rows."""
        counts = [5] * (world - 1) + [last_has]
        error, log = attends(counts, transport, group, **options)
        behind = [guess if right is None else right] + [False] * (len(log.behind) - 1)
        found[name] = error, EXACT
        found[f"{name}: guessed"] = float(log.guessed != guess), 0
        found[f"{name}: posts behind their marks"] = float(log.behind != behind), 0

    call("first", 5, False)
    call("again", 5, True)
    call("others changed", 4, not last, False)
    call("and back", 5, True, last)
    call("and again", 5, True)
    call("a function", 5, False, mask=tw.Where(lower))
    call("a function again", 5, False, mask=tw.Where(lower))
    call("drops", 5, False, dropout=0.4, seed=3)
    call("drops again", 5, True, dropout=0.4, seed=4)
    call("gathered", 5, False, method="gather")
    call("gathered: nothing to do ahead", 5, False, True, method="gather")
    x = torch.randn(1, 5, 4, 8)
    for _ in range(2):
        with watched(transport) as log:
            api.attention(x, x, x, mesh=group, layout="contiguous", dropout=0.4)
        found["drawn seeds are not guessed"] = float(log.guessed), 0
    said = {"mask": tw.Causal(), "layout": "contiguous", "mesh": group}
    api.attention(x, x, x, **said)
    with watched(transport) as log:
        error = raised(lambda: api.attention(x, x, x, **said, softcap=9.0 if last else None))
    wrong = f"OptionError: softcap: rank 0 of the group has None, rank {world - 1} has 9.0"
    found["a mismatch"] = float(error != wrong), 0
    found["no data has moved"] = float(log.acts != ([] if last else ["block"])), 0
    call("after", 5, True)
    kernel: Any = Kernel
    if last:
        kernel.forward = divide
    error = raised(lambda: api.attention(x, x, x, **said))
    lost = f"rank {world - 1} of the group was lost at step -1: it raised ZeroDivisionError: division by zero"
    right = "ZeroDivisionError: division by zero" if last else f"PeerLost: {lost}"
    found["one fails ahead of the rest"] = float(error != right), 0
    return found


def attends(counts: list[int], transport: Any, group: Any, mask: Any = None, **options: Any) -> tuple[float, Log]:
    """How far o and gradients of this rank's rows are from those of one device, and what it did."""
    rng = torch.Generator().manual_seed(5)
    whole = [torch.randn(1, sum(counts), h, 8, generator=rng, dtype=torch.float64).requires_grad_() for h in (4, 2, 2, 4)]
    mine = [x.detach().split(counts, 1)[group.rank()].clone().requires_grad_() for x in whole]
    mask = tw.Causal() if mask is None else mask
    with watched(transport) as log:
        o = api.attention(*mine[:3], mesh=group, mask=mask, layout="contiguous", **options)
    options.pop("method", None)
    right = tw.attention(*whole[:3], mask=mask, **options)
    found = [o, *torch.autograd.grad(o, mine[:3], mine[3].detach())]
    wanted = [right, *torch.autograd.grad(right, whole[:3], whole[3].detach())]
    parts = (x.split(counts, 1)[group.rank()] for x in wanted)
    return max(distance(x, part) for x, part in zip(found, parts, strict=True)), log


def lower(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return j <= i


def divide(*_: Any) -> Any:
    raise ZeroDivisionError("division by zero")
