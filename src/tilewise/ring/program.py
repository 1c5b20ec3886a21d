"""What each rank does, as a value. A program is a list of operations on named buffers; an interpreter of a few lines runs it
on any transport, and `verify` runs it on sets instead of tensors.

A buffer is "b rows heads columns". Its kind says what a row of one head holds (`Plan.columns`):

    q      a query                          d          dq     its gradient                      d, accumulated
    kv     a key and its value, packed      d + e      dkv    their gradients, packed           d + e, accumulated
    do     the gradient of the output       e          stats  lse and delta − dlse              2, accumulated
    part   unfinished output and its lse    e + 1, accumulated
    out    finished output                  e          lse    its lse                           1, accumulated

"Accumulated" kinds are float32 (float64 for float64 inputs) in memory and, but for what `Plan.wire` says, on the wire."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from .._errors import OptionError
from ..mask import Tile
from ..problem import Problem
from .owners import Owners
from .runs import Runs

ACCUMULATED = ("part", "lse", "stats", "dq", "dkv")
BATCH = 256
"""Sends and receives that one rank may post together (NCCL hangs on larger groups)."""


class Heads(NamedTuple):
    """Heads first … past − 1."""

    first: int
    past: int

    @property
    def count(self) -> int:
        return self.past - self.first

    def inside(self, outer: Heads) -> Heads:
        """These heads counted from the first one of `outer`."""
        return Heads(self.first - outer.first, self.past - outer.first)


class Buffer(NamedTuple):
    """Memory of one rank: `rows` × `heads` of a kind. Born as zeros, a `part` as the state of no keys (o = 0, lse = −inf)."""

    name: str
    kind: str
    rows: int
    heads: int


class View(NamedTuple):
    """Some rows and heads of a buffer, both counted in the buffer. More than one run of rows needs a copy, one does not."""

    buffer: str
    rows: Runs
    heads: Heads


class Send(NamedTuple):
    peer: int
    view: View


class Recv(NamedTuple):
    peer: int
    view: View


class Block(NamedTuple):
    """A tile of the score matrix: its query and key rows, counted in the sequence (positions follow from `sight`), its query
    heads counted in the whole model, and what the mask leaves of it."""

    q: Runs
    kv: Runs
    heads: Heads
    kind: Tile


class Make(NamedTuple):
    """A new buffer."""

    buffer: Buffer


class Free(NamedTuple):
    """The buffer is not used again."""

    buffer: str


class Post(NamedTuple):
    """Start sends and receives. Every rank posts every step, in the same order within a channel, with nothing in it where it
    has nothing to say. Channels do not wait for each other."""

    step: int
    channel: str
    sends: tuple[Send, ...]
    recvs: tuple[Recv, ...]


class Wait(NamedTuple):
    """Until the step's receives have arrived and what it sends may be written again."""

    step: int


class Copy(NamedTuple):
    """into ← source"""

    source: View
    into: View


class Forward(NamedTuple):
    """into ← (o, lse) of a block, over its keys alone; `into` is a part and is overwritten."""

    block: Block
    q: View
    kv: View
    into: View


class Backward(NamedTuple):
    """dq, dkv ← the gradients of a block, given the lse and delta of whole rows; both are overwritten."""

    block: Block
    q: View
    kv: View
    do: View
    stats: View
    dq: View
    dkv: View


class Merge(NamedTuple):
    """into ← the merge of two parts."""

    source: View
    into: View


class Add(NamedTuple):
    """into ← into + source"""

    source: View
    into: View


class Finish(NamedTuple):
    """out, lse ← the part, after these heads of the model have been given their sink."""

    part: View
    out: View
    lse: View
    heads: Heads


Op = Make | Free | Post | Wait | Copy | Forward | Backward | Merge | Add | Finish


class Program(NamedTuple):
    """One rank's part of a plan: the buffers it is given, its operations, and the buffers that hold its results."""

    given: tuple[Buffer, ...]
    ops: tuple[Op, ...]
    results: tuple[str, ...]


@dataclass(frozen=True)
class Method:
    """How keys and queries meet.

    movement  "ring"    keys travel from rank to rank; `direction` +1 or −1
              "double"  rings inside nodes of `node` ranks, which pass keys on to the next node meanwhile
              "direct"  keys go from their owner to whoever needs them, `at_once` owners in one batch and one block
              "gather"  all keys a rank needs first, `groups` groups of heads one after the other; nothing is merged
              "tree"    keys stay, queries are on every rank, partial results merge in log₂ N rounds
    heads     teams of so many neighbouring ranks exchange rows for heads (all-to-all) before and after: with as many as there
              are ranks nothing else moves
    """

    movement: str = "ring"
    direction: int = 1
    node: int = 1
    at_once: int = 1
    groups: int = 1
    heads: int = 1

    def __post_init__(self) -> None:
        if self.movement not in ("ring", "double", "direct", "gather", "tree"):
            raise OptionError(f"method: movement must be ring, double, direct, gather or tree, got {self.movement!r}")
        if self.direction not in (1, -1):
            raise OptionError(f"method: direction must be 1 or -1, got {self.direction}")
        for name in ("node", "at_once", "groups", "heads"):
            if getattr(self, name) < 1:
                raise OptionError(f"method: {name} must be at least 1, got {getattr(self, name)}")

    def __str__(self) -> str:
        detail = {
            "ring": f"{self.direction:+d}",
            "double": f" of {self.node}",
            "direct": f" by {self.at_once}",
            "gather": f" in {self.groups}",
        }
        name = self.movement + detail.get(self.movement, "")
        return f"{name}, heads over {self.heads}" if self.heads > 1 else name

    def check(self, world: int, replicated: bool) -> None:
        """Raise where this does not fit the number of ranks or who holds the queries."""
        if world % self.heads:
            raise OptionError(f"method {self}: {world} ranks do not form teams of {self.heads}")
        if self.movement == "double" and world // self.heads % self.node:
            raise OptionError(f"method {self}: {world // self.heads} teams do not form nodes of {self.node}")
        if (self.movement == "tree") != replicated:
            raise OptionError(f"method {self}: only a tree, and it always, takes queries that every rank holds")
        if self.movement == "tree" and self.heads > 1:
            raise OptionError(f"method {self}: a tree does not exchange heads")


@dataclass(frozen=True)
class Plan:
    """One direction of attention over many ranks. `wire`: bytes of an element on the wire, for accumulated kinds that travel in
    a narrower type than they are kept in."""

    problem: Problem
    q: Owners
    kv: Owners
    method: Method
    backward: bool
    programs: tuple[Program, ...] = ()
    wire: dict[str, int] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return self.q.world

    def columns(self, kind: str) -> int:
        """What a row of one head of this kind holds."""
        d, e = self.problem.d, self.problem.e
        return {"q": d, "dq": d, "kv": d + e, "dkv": d + e, "do": e, "out": e, "part": e + 1, "lse": 1, "stats": 2}[kind]

    def row_bytes(self, kind: str, wire: bool = False) -> int:
        """Bytes of a row of one head, over the batch, in memory or on the wire."""
        size = self.problem.lse_itemsize if kind in ACCUMULATED else self.problem.itemsize
        return self.problem.b * self.columns(kind) * (self.wire.get(kind, size) if wire else size)
