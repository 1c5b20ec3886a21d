"""A run that happened: the reference folds the user's own numbers tile by tile, and every step keeps what it loaded and stored,
and what m and ℓ were after it. Nothing is worked out twice: the reference computes, and a meter that knows the step counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from .._errors import DtypeError, OptionError, ShapeError
from ..cost import Meter, Moved
from ..mask import Tile
from ..problem import DTYPES, Inputs, Options, Partial, Problem
from ..reference import flash, flash1, plain
from ..softmax import State, empty, pivot
from ..tiles import TileShape, Visit, blocks, table, walk

STEPS = 4096
"""Tiles that a pass visits or skips, over all heads, at most."""

PAIRS = 512 * 512
"""Query-key pairs over all heads, at most."""

BATCH = slice(0, 1)
"""A trace follows one batch entry."""

FORWARD, DELTA, DQ, DKDV = "forward", "delta", "dq", "dkdv"
"""Passes of FlashAttention-2's order: query blocks outside in forward and dq, key blocks outside in dkdv; delta is
rowsum(do∘o) of all rows at once."""

FORWARD1, BACKWARD1 = "forward1", "backward1"
"""Passes of FlashAttention-1's order: key blocks outside, and what is unfinished of o and dq goes through memory."""

KEYS_OUTSIDE = (DKDV, FORWARD1, BACKWARD1)

PRODUCTS = {DELTA: 0, FORWARD: 2, DQ: 3, DKDV: 4, FORWARD1: 2, BACKWARD1: 5}
"""Matrix products that a pass makes of each tile it visits."""


class After(NamedTuple):
    """What a visited tile leaves of its block of query rows, each "rows": the running max, the running sum, and what the old
    sum was scaled by."""

    m: np.ndarray
    l: np.ndarray  # noqa: E741 - the paper's ℓ
    alpha: np.ndarray


@dataclass
class Step:
    """One tile of one pass. A tile that the mask hides moves and computes nothing, except the last one of a block that sees
    nothing at all, where the block is read and its zeros are written all the same.

    load, store   bytes of each tensor
    after         of visited tiles of the forward pass
    """

    part: str
    head: int
    i: int
    j: int
    kind: Tile
    load: dict[str, int] = field(default_factory=dict)
    store: dict[str, int] = field(default_factory=dict)
    flops: int = 0
    exponentials: int = 0
    after: After | None = None

    @property
    def tiled(self) -> bool:
        """Whether the step is a tile's."""
        return self.part != DELTA


@dataclass(frozen=True)
class Backward:
    """Gradients of Σ do∘o for a random `do` "1 n h e", and ds "h n s", those of the logits; `error` is the largest distance of
    a gradient from the definition."""

    do: np.ndarray
    grads: Inputs[np.ndarray]
    ds: np.ndarray
    steps: tuple[Step, ...]
    keys_outside: tuple[Step, ...]
    error: float


@dataclass(frozen=True)
class Trace:
    """One traced call in FlashAttention-2's order, and its steps in FlashAttention-1's too; `error` is the largest distance of
    o from the definition, `reference.plain`.

    Shapes  kinds "row blocks × key blocks" · s "h n s": the logits, −inf where hidden · result o "1 n h e", lse "1 h n"
    """

    problem: Problem
    shape: TileShape
    inputs: Inputs[np.ndarray]
    kinds: np.ndarray
    steps: tuple[Step, ...]
    keys_outside: tuple[Step, ...]
    s: np.ndarray
    result: Partial
    error: float
    backward: Backward | None = None

    @property
    def p(self) -> np.ndarray:
        """The probabilities exp(s − lse), "h n s"."""
        return np.where(np.isneginf(self.s), 0, np.exp(self.s - pivot(self.result.lse[0])[..., None]))

    def visits(self) -> list[Visit]:
        """The tiles of one head that are visited, in the order of rows."""
        return [visit for _, row in walk(self.problem, self.shape, BATCH) for visit in row]


class Recorder(Meter):
    """A meter that also writes what it counts into the step that it happens in."""

    def __init__(self, problem: Problem, shape: TileShape, kinds: np.ndarray, passes: Sequence[str]) -> None:
        super().__init__(problem.itemsize, problem.lse_itemsize)
        self.problem, self.shape, self.kinds = problem, shape, kinds
        self.waiting = list(passes)
        self.steps: list[Step] = []
        self.kernel()

    def kernel(self) -> None:
        """The next pass begins: all its steps, hidden tiles too, in its order."""
        super().kernel()
        if not self.waiting:
            return
        self.part = self.waiting.pop(0)
        made = [Step(self.part, x, i, j, Tile(self.kinds[i, j])) for x, i, j in self._order()]
        self.steps += made
        self.at = {(step.head, step.i, step.j): step for step in made}
        self.here = made[0]
        self.visits = iter([step for step in made if step.kind != Tile.EMPTY])

    def _order(self) -> list[tuple[int, int, int]]:
        rows, cols = map(range, self.kinds.shape)
        h, group = self.problem.h, self.problem.group
        if self.part == DELTA:
            return [(0, 0, 0)]
        if self.part == DKDV:
            return [(x, i, j) for x in range(h) for j in cols for i in rows]
        if self.part in KEYS_OUTSIDE:
            return [(x, i, j) for first in range(0, h, group) for j in cols for x in range(first, first + group) for i in rows]
        return [(x, i, j) for x in range(h) for i in rows for j in cols]

    def read(self, x: np.ndarray, name: str, at: tuple = (), itemsize: int | None = None) -> np.ndarray:
        if name == "q":
            self.here = self._query(at[1], at[2] // self.shape.block_m)
        elif name == "k":
            self.here = self._key(at[1], at[2] // self.shape.block_n)
        before = self._moved(name).read
        super().read(x, name, at, itemsize)
        self.here.load[name] = self.here.load.get(name, 0) + self._moved(name).read - before
        return x

    def write(self, x: np.ndarray, name: str, at: tuple = (), itemsize: int | None = None) -> np.ndarray:
        if name in ("dk", "dv") and not at:  # of all blocks at once
            for g in range(self.problem.g):
                for j in blocks(self.problem.s, self.shape.block_n):
                    self.write(x[:, j, g], name, (0, g, j.start), itemsize)
            return x
        if name in ("dk", "dv"):
            self.here = self._column(at[1], at[2] // self.shape.block_n)[-1]
        elif name in ("o", "dq") and at and self.here.kind == Tile.EMPTY:
            self.here = self._row(at[1], at[2] // self.shape.block_m)[-1]
        before = self._moved(name).write
        super().write(x, name, at, itemsize)
        self.here.store[name] = self.here.store.get(name, 0) + self._moved(name).write - before
        return x

    def product(self, rows: int, inner: int, cols: int) -> None:
        before = self.flops
        super().product(rows, inner, cols)
        self.here.flops += self.flops - before

    def exponential(self, count: int) -> None:
        super().exponential(count)
        self.here.exponentials += count

    def _moved(self, name: str) -> Moved:
        return self.tensors.get(name, Moved())

    def _query(self, head: int, i: int) -> Step:
        """Where rows of q are brought in: at the first visit of their block, or with key blocks outside at every one."""
        if self.part == DKDV:
            return next(self.visits)
        return self.at[head, i, self.here.j] if self.part in KEYS_OUTSIDE else self._row(head, i)[0]

    def _key(self, g: int, j: int) -> Step:
        """The same for keys."""
        return self._column(g, j)[0] if self.part in KEYS_OUTSIDE else self.at[self.here.head, self.here.i, j]

    def _row(self, head: int, i: int) -> list[Step]:
        """The visited steps of a block of query rows, or its last step where none is."""
        row = [self.at[head, i, j] for j in range(self.kinds.shape[1])]
        return [step for step in row if step.kind != Tile.EMPTY] or row[-1:]

    def _column(self, g: int, j: int) -> list[Step]:
        """The same of a block of key rows, for the heads that share them."""
        heads = range(g * self.problem.group, (g + 1) * self.problem.group)
        column = [self.at[head, i, j] for head in heads for i in range(self.kinds.shape[0])]
        return [step for step in column if step.kind != Tile.EMPTY] or column[-1:]


def run(
    inputs: Inputs[np.ndarray], options: Options, shape: TileShape, dtype: str = "float16", backward: bool = False
) -> Trace:
    """Fold these arrays tile by tile and keep every step. Computes in float64; bytes are those of `dtype`.

    >>> x = Inputs(np.ones((1, 1, 1, 1)), np.reshape([1.0, 3.0, 2.0, 5.0], (1, 4, 1, 1)), np.ones((1, 4, 1, 1)))
    >>> for step in run(x, Options(), TileShape(1, 2)).steps:
    ...     m, l, alpha = step.after
    ...     print(f"m={m[0]:.0f} ℓ={l[0]:.3f} α={alpha[0]:.3f}", step.load)
    m=3 ℓ=1.135 α=0.000 {'q': 2, 'k': 4, 'v': 4}
    m=5 ℓ=1.203 α=0.135 {'k': 4, 'v': 4}
    """
    if dtype not in DTYPES:
        raise DtypeError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    x = inputs.map(lambda a: np.asarray(a, np.float64))
    problem = replace(Problem.describe(x, options), dtype=dtype)
    problem.check_values()
    check(problem, shape)
    kinds, states = table(problem, shape, BATCH), {}
    recorder, outside = (Recorder(problem, shape, kinds, [part]) for part in (FORWARD, FORWARD1))

    def watch(visit: Visit, head: int, state: State) -> None:
        states[head, visit.i.start // shape.block_m, visit.j.start // shape.block_n] = state

    result = flash.forward(problem, x, shape, recorder, watch)
    kept = flash1.forward(problem, x, shape, meter=outside)
    _keep_states(recorder.steps, states, problem, shape)
    error = _distance(result.o, plain.attention(problem, x).o)
    grads = differentiate(problem, x, kept, shape, kinds) if backward else None
    steps = tuple(recorder.steps), tuple(outside.steps)
    return Trace(problem, shape, x, kinds, *steps, logits(problem, x, shape), result, error, grads)


def differentiate(problem: Problem, x: Inputs[np.ndarray], kept: flash1.Kept, shape: TileShape, kinds: np.ndarray) -> Backward:
    """The backward passes of a traced forward, in both orders, for the same random `do` every time."""
    do = np.random.default_rng(problem.n).normal(size=kept.o.shape)
    upstream = Partial(do, np.zeros_like(kept.m))
    recorder, outside = Recorder(problem, shape, kinds, [DELTA, DQ, DKDV]), Recorder(problem, shape, kinds, [BACKWARD1])
    grads = flash.backward(problem, x, kept.partial, upstream, shape, recorder)
    flash1.backward(problem, x, kept, upstream, shape, meter=outside)
    exact = plain.gradients(problem, x, do, upstream.lse)
    error = max(_distance(mine, theirs) for (_, mine), (_, theirs) in zip(grads.present(), exact.present(), strict=True))
    ds = _gather(problem, x, shape, lambda head, visit: _logit_gradients(head, visit, do, kept))
    return Backward(do, grads, ds, tuple(recorder.steps), tuple(outside.steps), error)


def check(problem: Problem, shape: TileShape) -> None:
    """Raise where a trace would be empty or larger than anyone could follow, naming the axes and the numbers."""
    p = problem
    if p.b != 1:
        raise ShapeError(f"axis b: a trace follows one batch entry, got {p.b}")
    for axis, rows in (("n", p.n), ("s", p.s)):
        if rows < 1:
            raise ShapeError(f"axis {axis}: a trace needs at least one row, got {rows}")
    tiles = len(blocks(p.n, shape.block_m)) * len(blocks(p.s, shape.block_n))
    if p.h * tiles > STEPS:
        raise OptionError(
            f"axes h, n, s: {p.h} heads × {p.n} × {p.s} in tiles of {shape.block_m} × {shape.block_n} are {p.h * tiles} steps, "
            f"a trace holds at most {STEPS}: take larger blocks"
        )
    if p.h * p.n * p.s > PAIRS:
        pairs = p.h * p.n * p.s
        raise OptionError(f"axes h, n, s: {p.h} heads × {p.n} × {p.s} are {pairs} logits, a trace holds at most {PAIRS}")


def logits(problem: Problem, x: Inputs[np.ndarray], shape: TileShape) -> np.ndarray:
    """s "h n s" of the visited tiles, −inf elsewhere."""
    tile = _gather(problem, x, shape, lambda head, visit: head.logits(head.rows("q", visit.i), head.rows("k", visit.j), visit))
    return np.where(np.isnan(tile), -np.inf, tile)


def _logit_gradients(head: flash.Head, visit: Visit, do: np.ndarray, kept: flash1.Kept) -> np.ndarray:
    """ds of one tile, as backward makes it."""
    o, lse = kept.partial
    rows = flash.Rows(head.problem, do, lse, np.einsum("bnhe,bnhe->bhn", do, o))
    q, k, v = head.rows("q", visit.i), head.rows("k", visit.j), head.rows("v", visit.j)
    return flash.recompute(head, visit, q, k, v, rows.load(head, visit.i))[1]


def _gather(problem: Problem, x: Inputs[np.ndarray], shape: TileShape, tile: Callable[..., np.ndarray]) -> np.ndarray:
    """A matrix "h n s" put together from what `tile` says of each visit of each head; NaN where none is."""
    whole = np.full((problem.h, problem.n, problem.s), np.nan)
    for number in range(problem.h):
        head = flash.Head(problem, x, Meter.of(problem), BATCH, number)
        for _, visits in walk(problem, shape, BATCH):
            for visit in visits:
                whole[number, visit.i, visit.j] = tile(head, visit)
    return whole


def _keep_states(steps: list[Step], states: dict[tuple[int, int, int], State], problem: Problem, shape: TileShape) -> None:
    """m, ℓ and α of each visited step, from its state and the one before it in the row of tiles."""
    rows = [i.stop - i.start for i in blocks(problem.n, shape.block_m)]
    before = empty(0, problem.e)
    for step in steps:
        if step.j == 0:
            before = empty(rows[step.i], problem.e)
        if step.kind != Tile.EMPTY:
            state = states[step.head, step.i, step.j]
            step.after = After(state.m, state.l, np.exp(before.m - pivot(state.m)))
            before = state


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max(initial=0))
