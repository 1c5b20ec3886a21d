"""What happens to the scores of a panel between q·k and softmax, in the order of `score`: bias, alibi → softcap → mask; and to
its weights after it: dropout. Scores are in log2 units. A call that has no such option does not run its function."""

from __future__ import annotations

import math

from llvmlite import ir

from .arguments import Block, Words
from .arithmetic import LOG2_E, tanh
from .panel import rows
from .random import at_least, choose, philox
from .vector import ADDRESS, F32, I8, I32, INDEX, Code, Module, Value

OPTIONS = (
    "bias", "bias_ptr", "bias_b", "bias_h", "bias_n", "bias_s", "alibi", "alibi_ptr", "alibi_b", "i_ptr", "j_ptr", "i_b", "j_b",
    "sequence_ptr", "capped", "cap_f32", "table", "table_ptr", "table_b", "table_h", "table_n",
    "dropout", "seed_low", "seed_high", "first_head", "threshold", "kept_f32",
)  # fmt: skip
"""The words of a call for all of this: `bias`, `alibi`, `capped`, `table` and `dropout` are 1 where there is such a thing, 0
elsewhere. bias and slopes are float32, a table has a byte a pair and its keys next to each other."""

NO_QUAD = 2**40
"""Four neighbouring positions that no key is one of."""


class Place:
    """Which scores these are: those of query rows i … of head x of entry b, with the keys j …; `left` rows from i on exist."""

    takes = (ADDRESS, ADDRESS, INDEX, INDEX, INDEX, INDEX)

    def __init__(self, code: Code, words: Block) -> None:
        block, self.s, self.head, self.i, self.j, self.keys = code.arguments
        self.w = Words(code, words, block)
        self.b, self.x = self.head // self.w.h, self.head % self.w.h
        self.left = self.w.n - self.i


def add_bias(module: Module, words: Block, vectors: int) -> ir.Function:
    """s += bias: a number a key where all queries share it, a number a query where all keys do, else tiles, transposed."""
    name = f"add_bias_{vectors}"
    with module.function(name, Place.takes) as code:
        at = Place(code, words)
        w = at.w
        base = w.bias_ptr + at.b * w.bias_b + at.x * w.bias_h + at.i * w.bias_n + at.j * w.bias_s
        with code.either(w.bias_n.equals(0)) as (by_key, other):
            with by_key, rows(code, at.s, at.keys, vectors) as (j, places):
                bias = code.broadcast(base + j * w.bias_s) * LOG2_E
                for place in places:
                    code.store(place, code.load(place) + bias)
            with other, code.either(w.bias_s.equals(0)) as (by_query, whole):
                with by_query:
                    of_queries = [_gather(code, base, (w.bias_n, v * code.lanes, at.left)) * LOG2_E for v in range(vectors)]
                    with rows(code, at.s, at.keys, vectors) as (_, places):
                        for place, bias in zip(places, of_queries, strict=True):
                            code.store(place, code.load(place) + bias)
                with whole:
                    _add_tiles(code, at, base, vectors)
    return module.find(name)  # type: ignore[return-value]


def _add_tiles(code: Code, at: Place, base: Value, vectors: int) -> None:
    def add(place: Value, bias: Value) -> None:
        code.store(place, code.load(place) + bias * LOG2_E)

    _tiles(code, at, (base, at.w.bias_n, F32), vectors, add)


def _tiles(code: Code, at: Place, source: tuple, vectors: int, use) -> None:
    """`use(place, vector)` for each vector of scores and what a matrix "queries keys" has there: base, bytes from one query to
    the next, and kind."""
    base, row_bytes, kind = source
    size = 4 if kind == F32 else 1
    panel = 4 * code.module.target.panel
    for v in range(vectors):
        with code.when(at.left > v * code.lanes):
            lanes = [base + row_bytes * _clamped(code, v * code.lanes + i, at.left) for i in range(code.lanes)]
            with code.loop(code.index(0), at.keys, code.lanes) as j:
                left = at.keys - j
                loaded = [code.load(lane + j * size, kind, left) for lane in lanes]
                if kind != F32:
                    loaded = [x.to(I32) for x in loaded]
                for k, vector in enumerate(code.transpose(loaded)):
                    with code.when(left > k):
                        use(at.s + (j + k) * panel + v * code.vector_bytes, vector)


def _gather(code: Code, base: Value, lanes: tuple[Value, int, Value]) -> Value:
    """One vector of numbers that lie apart: (bytes between them, the first, how many there are)."""
    step, first, left = lanes
    vector = code.vector(0.0)
    for i in range(code.lanes):
        number = code.get(base + step * _clamped(code, first + i, left))
        vector = code.insert(vector, number, i)
    return vector


def _clamped(code: Code, i: int, left: Value) -> Value:
    """Query i, or the last one that there is."""
    return code.lesser(code.index(i), left - 1)


def add_alibi(module: Module, words: Block, vectors: int) -> ir.Function:
    """s −= slope·|i − j|, in positions."""
    name = f"add_alibi_{vectors}"
    with module.function(name, Place.takes) as code:
        at = Place(code, words)
        w = at.w
        slope = code.broadcast(w.alibi_ptr + at.b * w.alibi_b + at.x * 4) * -LOG2_E
        queries = _positions(code, w.i_ptr + at.b * w.i_b + at.i * 4, at.left, vectors)
        keys = w.j_ptr + at.b * w.j_b + at.j * 4
        with rows(code, at.s, at.keys, vectors) as (j, places):
            key = code.broadcast(keys + j * 4, I32)
            for place, i in zip(places, queries, strict=True):
                apart = i - key
                distance = code.greater(apart, code.vector(0, I32) - apart).to(F32)
                code.store(place, code.fma(slope, distance, code.load(place)))
    return module.find(name)  # type: ignore[return-value]


def _positions(code: Code, address: Value, left: Value, vectors: int) -> list[Value]:
    """int32 numbers of a panel's queries; 0 for those that are not there."""
    return [code.load(address + v * code.vector_bytes, I32, left - v * code.lanes) for v in range(vectors)]


def cap(module: Module, words: Block, vectors: int) -> ir.Function:
    """s = softcap·tanh(s / softcap)."""
    name = f"cap_{vectors}"
    with module.function(name, Place.takes) as code:
        at = Place(code, words)
        most = code.vector(at.w.cap_f32)
        inverse = code.vector(1.0) / most
        with rows(code, at.s, at.keys, vectors) as (_, places):
            for place in places:
                code.store(place, most * tanh(code, code.load(place) * inverse))
    return module.find(name)  # type: ignore[return-value]


def hide_points(module: Module, words: Block, vectors: int) -> ir.Function:
    """−inf where the table is 0."""
    name = f"hide_points_{vectors}"
    with module.function(name, Place.takes) as code:
        at = Place(code, words)
        w = at.w
        base = w.table_ptr + at.b * w.table_b + at.x * w.table_h + at.i * w.table_n + at.j

        def hide(place: Value, seen: Value) -> None:
            code.store(place, code.select(seen.differs(0), code.load(place), code.vector(-math.inf)))

        _tiles(code, at, (base, w.table_n, I8), vectors, hide)
    return module.find(name)  # type: ignore[return-value]


def drop(module: Module, words: Block, vectors: int) -> ir.Function:
    """Weights times what dropout makes of them: 0, or 1 / (1 − rate). Four keys that share a quad of positions share one
    evaluation; where a quad begins anew, so do the words."""
    name = f"drop_{vectors}"
    with module.function(name, Place.takes) as code:
        at = Place(code, words)
        w = at.w
        queries = _positions(code, w.i_ptr + at.b * w.i_b + at.i * 4, at.left, vectors)
        sequences = _positions(code, w.sequence_ptr + at.b * w.i_b + at.i * 4, at.left, vectors)
        keys, head = w.j_ptr + at.b * w.j_b + at.j * 4, (at.x + w.first_head).to(I32)
        key = w.seed_low.to(I32), w.seed_high.to(I32)
        threshold, kept = code.vector(w.threshold.to(I32)), code.vector(w.kept_f32)
        drawn = [[code.variable(code.vector(0, I32)) for _ in range(4)] for _ in range(vectors)]
        quad = code.variable(code.index(NO_QUAD))
        with rows(code, at.s, at.keys, vectors) as (j, places):
            position = code.get(keys + j * 4, I32).to(INDEX)
            lane, mine = position & 3, (position - (position & 3)) // 4
            with code.when(mine.differs(quad.get())):
                quad.set(mine)
                for v in range(vectors):
                    words_of = philox(code, (mine.to(I32), queries[v], head, sequences[v]), key)
                    for word, variable in zip(words_of, drawn[v], strict=True):
                        variable.set(word)
            for v, place in enumerate(places):
                word = choose(code, [one.get() for one in drawn[v]], lane)
                factor = code.select(at_least(word, threshold), kept, code.vector(0.0))
                code.store(place, code.load(place) * factor)
    return module.find(name)  # type: ignore[return-value]
