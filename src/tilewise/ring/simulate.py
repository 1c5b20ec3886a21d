"""How long a plan takes, in a row of calls like it: a rank works, posts and waits one event after the other; a message starts
when both its ends have posted it and the links on its way are free. Every event is one step for all ranks at once.

    work     = now[r] ← max(now[r], when the host has started it) + seconds
    start[r] = max(now[r], end of the channel's last step at r, when the host has posted it)
    begin    = max(start[source], start[target], out[link of source] free, in[link of target] free)
    end      = begin + α + max(bytes out of the source's link, bytes into the target's) / W      over all messages of the step
    waiting  = now[r] ← max(now[r], last end of r's messages)

The host of a rank begins with a call when the last message of the call before has come, and its device works on meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from .events import KINDS, Awaited, Event, Sent, Work, replay
from .formulas import peak_of
from .links import Cluster
from .outline import Outline
from .prices import Prices
from .program import Plan
from .survey import Survey, survey
from .teams import Teams


class Step(NamedTuple):
    """A step of a forecast: its messages and bytes, how long the slowest of them took, and the most that any rank waited."""

    number: int
    channel: str
    messages: int
    bytes: int
    longest_s: float
    waited_s: float


class Span(NamedTuple):
    """What every rank does from `start` to `stop` (arrays over ranks; of no length where it has nothing to do)."""

    kind: str
    start: np.ndarray
    stop: np.ndarray


@dataclass(frozen=True, eq=False)
class Forecast:
    """What a plan would take. Seconds and bytes are arrays over ranks, but for `link_s`: the most that any device's own link
    and any network card are busy. `idle_s`: while a device waits for its own host. `work`: pairs times heads,
    "round rank"; `steps`: what was sent; `spans`: who does what when, kept only where asked for."""

    total_s: float
    alone_s: float
    spent_s: dict[str, np.ndarray]
    waited_s: np.ndarray
    idle_s: np.ndarray
    link_s: np.ndarray
    sent_bytes: np.ndarray
    far_bytes: np.ndarray
    memory: np.ndarray
    work: np.ndarray
    steps: list[Step]
    spans: list[Span]

    @property
    def world(self) -> int:
        return len(self.waited_s)

    @property
    def efficiency(self) -> float:
        """How much of N devices is used: the time of one device alone, over N times this."""
        return self.alone_s / (self.world * self.total_s) if self.total_s else 1.0

    @property
    def busy_s(self) -> np.ndarray:
        """Seconds that each rank works."""
        return sum(self.spent_s.values(), np.zeros(self.world))

    @property
    def balance(self) -> float:
        """The largest share of pairs over the mean one: 1 where all ranks have the same work."""
        each = self.work.sum(0)
        return float(each.max() / each.mean()) if each.any() else 1.0

    @cached_property
    def losses(self) -> dict[str, float]:
        """Where the rest of N · total goes, as shares of it that add up with `efficiency` to 1: blocks smaller than one
        device's, merges, copies, unequal work (the busiest rank's time beyond the mean), the host of the busiest rank, and
        communication in the open."""
        whole = self.total_s or 1.0
        mean = {kind: float(x.mean()) / whole for kind, x in self.spent_s.items()}
        busy = self.busy_s
        unequal = float(busy.max() - busy.mean()) / whole
        host = float(self.idle_s[busy.argmax()]) / whole
        return {
            "smaller blocks": mean["compute"] - self.efficiency,
            "merges": mean["merge"],
            "copies": mean["copy"],
            "unequal work": unequal,
            "the host": host,
            "communication": 1 - float(busy.max()) / whole - host,
        }


def simulate(plan: Plan, cluster: Cluster = Cluster(), found: Survey | None = None, keep: bool = False) -> Forecast:
    """The forecast of a plan. With programs they are replayed, operation by operation; without any (`Plan(problem, q, kv,
    method, backward)`), events come from areas and needs alone, which takes seconds for thousands of ranks. `found`: a survey
    of the same rows and teams that is already there; `keep`: `spans` too."""
    prices, teams = Prices(plan, cluster.machine), Teams(plan.problem, plan.q, plan.kv, plan.method)
    found = survey(teams) if found is None else found
    outline = Outline(teams, found, prices)
    counts = np.array(plan.q.counts), np.array(plan.kv.counts)
    events = [_copies(prices.begin(*counts)), *(replay(plan, prices) if plan.programs else outline.write())]
    events.append(_copies(prices.end(*counts)))
    stages = outline.stages()
    memory = np.array([peak_of(plan, teams, stages, r) for r in range(plan.world)])
    agreed_s = 0.0 if plan.backward or plan.world == 1 else cluster.machine.host.agree_s
    once = Clock(cluster, np.zeros(plan.world), agreed_s, False)
    run(events, once)
    clock = Clock(cluster, once.tail, agreed_s, keep)
    run(events, clock)
    return clock.read(prices.alone(*found.whole(plan.q.replicated)), memory)


def _copies(seconds: np.ndarray) -> Work:
    return Work("copy", seconds, 0 * seconds, (seconds > 0).astype(float))


def run(events: list[Event], clock: Clock) -> None:
    """Every event for all ranks."""
    for event in events:
        if isinstance(event, Work):
            clock.work(event)
        elif isinstance(event, Sent):
            clock.send(event)
        else:
            clock.wait(event)


class Clock:
    """What time it is on each rank, for its device (`now`) and for its host, which goes ahead (`issued`); and from when on each
    channel and link is free. Devices have a link to their node of their own and share network cards as the cluster says; both
    carry as much in as out at once. No message is under way before hosts have agreed, which takes `agreed_s`. `lead`: by how
    much each host begins before its device has done what came before."""

    def __init__(self, cluster: Cluster, lead: np.ndarray, agreed_s: float, keep: bool) -> None:
        self.cluster, self.lead, self.agreed_s, self.keep = cluster, lead, agreed_s - lead, keep
        self.host, self.world = cluster.machine.host, (world := len(lead))
        self.issued, self.idle = self.host.call_s - lead, np.zeros(world)
        self.heard = np.zeros(world)
        self.fresh = np.ones(world, bool)
        links = world + int(cluster.card(np.array(world - 1))) + 1
        self.now = np.zeros(world)
        self.free_out, self.free_in = np.zeros(links), np.zeros(links)
        self.channel_end: dict[str, np.ndarray] = {}
        self.done: dict[int, np.ndarray] = {}
        self.spent = {kind: np.zeros(world) for kind in KINDS}
        self.waited, self.busy_link = np.zeros(world), np.zeros(links)
        self.sent, self.far = np.zeros(world, np.int64), np.zeros(world, np.int64)
        self.table: list[np.ndarray] = []
        self.steps: dict[int, Step] = {}
        self.spans: list[Span] = []

    def work(self, event: Work) -> None:
        """One operation after the other: the first since a message waits until it is issued, and none ends before the last one
        is (`_catch_up`), in whichever order they are told."""
        some = event.calls > 0
        self._idle_until(np.where(some & self.fresh, self.issued + self.host.work_s, 0))
        self.issued = self.issued + event.calls * self.host.work_s
        self.fresh = self.fresh & ~some
        self._span(event.kind, self.now, self.now + event.seconds)
        self.now = self.now + event.seconds
        self.spent[event.kind] += event.seconds
        if event.kind == "compute":
            self.table.append(event.pairs)

    def _catch_up(self) -> None:
        self._idle_until(np.where(self.fresh, 0, self.issued))
        self.fresh[:] = True

    def _idle_until(self, issued: np.ndarray) -> None:
        until = np.maximum(self.now, issued)
        self.idle += until - self.now
        self.now = until

    def send(self, event: Sent) -> None:
        self._catch_up()
        a, b, size, world, links = event.source, event.target, event.size, self.world, len(self.free_in)
        start = np.maximum(self.now, self.channel_end.get(event.channel, np.zeros(world)))
        self.issued[np.union1d(a, b)] += self.host.post_s
        start = np.maximum(start, np.maximum(self.issued, self.agreed_s) if len(a) else 0)
        far = self.cluster.is_far(a, b)
        machine, card = self.cluster.machine, self.cluster.card
        out, into = np.where(far, world + card(a), a), np.where(far, world + card(b), b)
        rate = np.where(far, machine.far.bytes_s, machine.near.bytes_s)
        alpha = np.where(far, machine.far.alpha_s, machine.near.alpha_s)
        load_out, load_in = np.bincount(out, size, links), np.bincount(into, size, links)
        begin = np.maximum.reduce([start[a], start[b], self.free_out[out], self.free_in[into]])
        end = begin + alpha + np.maximum(load_out[out], load_in[into]) / rate
        done = start.copy()
        for where, x in ((a, done), (b, done), (out, self.free_out), (into, self.free_in)):
            np.maximum.at(x, where, end)
        self.done[event.step] = self.channel_end[event.channel] = done
        self.busy_link += np.bincount(out, size / rate, links)
        self.sent += np.bincount(a, size, world).astype(np.int64)
        self.far += np.bincount(a, size * far, world).astype(np.int64)
        longest = float((end - begin).max(initial=0))
        self.steps[event.step] = Step(event.step, event.channel, len(a), int(size.sum()), longest, 0.0)
        if self.keep:
            first = np.full(world, np.inf)
            np.minimum.at(first, a, begin)
            last = np.zeros(world)
            np.maximum.at(last, a, end)
            self._span("send " + event.channel, np.minimum(first, last), last)

    def wait(self, event: Awaited) -> None:
        self._catch_up()
        until = np.maximum(self.now, self.done[event.step])
        waited = until - self.now
        self._span("wait", self.now, until)
        self.steps[event.step] = self.steps[event.step]._replace(waited_s=float(waited.max(initial=0)))
        self.waited += waited
        self.now, self.heard = until, np.maximum(self.heard, self.done[event.step])

    @property
    def tail(self) -> np.ndarray:
        """How long each device has work yet when its host is done with a call: that waits for the last message."""
        return self.now - self.heard

    def read(self, alone_s: float, memory: np.ndarray) -> Forecast:
        self._catch_up()
        self._idle_until(self.issued + self.lead)
        work = np.stack(self.table) if self.table else np.zeros((0, self.world))
        links = np.array([self.busy_link[: self.world].max(), self.busy_link[self.world :].max()])
        return Forecast(
            total_s=float(self.now.max(initial=0)),
            alone_s=alone_s,
            spent_s=self.spent,
            waited_s=self.waited,
            idle_s=self.idle,
            link_s=links,
            sent_bytes=self.sent,
            far_bytes=self.far,
            memory=memory,
            work=work,
            steps=list(self.steps.values()),
            spans=self.spans,
        )

    def _span(self, kind: str, start: np.ndarray, stop: np.ndarray) -> None:
        if self.keep:
            self.spans.append(Span(kind, start, stop))
