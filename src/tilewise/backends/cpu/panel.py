"""What happens to the scores of one panel: a block of Sᵀ "keys panel" in log2 units, one query a lane. Each function is written
for a number of vectors, so that a panel that is not full does no more than it has to."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from .arithmetic import HIDDEN, exp2
from .vector import ADDRESS, F32, I32, INDEX, Code, Module, Value


@contextmanager
def rows(code: Code, s: Value, keys: Value, vectors: int) -> Iterator[tuple[Value, list[Value]]]:
    """Each key of a block of scores: its index and the addresses of its vectors."""
    with code.loop(keys) as j:
        row = s + j * (4 * code.module.target.panel)
        yield j, [row + v * code.vector_bytes for v in range(vectors)]


def vectors_at(code: Code, address: Value, vectors: int, kind: ir.Type = F32) -> list[Value]:
    """The neighbouring vectors at an address."""
    return [code.load(address + v * code.vector_bytes, kind) for v in range(vectors)]


def hide(module: Module, vectors: int) -> ir.Function:
    """−inf where key `start` + j lies outside a query's [first, past).

    Parameters  s, keys · start · first, past: addresses of int32 lanes"""
    name = f"hide_{vectors}"
    if (found := module.find(name)) is not None:
        return found
    with module.function(name, (ADDRESS, INDEX, INDEX, ADDRESS, ADDRESS)) as code:
        s, keys, start, first, past = code.arguments
        lo, hi = vectors_at(code, first, vectors, I32), vectors_at(code, past, vectors, I32)
        with rows(code, s, keys, vectors) as (j, places):
            key = code.vector((start + j).to(I32))
            for v, place in enumerate(places):
                seen = (key >= lo[v]) & (key < hi[v])
                code.store(place, code.select(seen, code.load(place), code.vector(-math.inf)))
    return module.find(name)  # type: ignore[return-value]


def weigh(module: Module, vectors: int, marked: bool) -> ir.Function:
    """The step of the online softmax: scores become weights p = 2^(s − m), m the largest score of a query so far, and its
    sums follow.

        m' = max(m, max s)    α = 2^(m − m')    ℓ' = α·ℓ + Σ p

    A query that has seen nothing has m = −inf and its weights are exactly 0. `marked`: the weight of a hidden pair, whose
    score is −inf, is −0, which tells it from one that is merely small.

    Parameters  s, keys · m, l, alpha: addresses of the queries' lanes; alpha is written"""
    name = f"weigh_{vectors}" + ("_marked" if marked else "")
    if (found := module.find(name)) is not None:
        return found
    with module.function(name, (ADDRESS, INDEX, ADDRESS, ADDRESS, ADDRESS)) as code:
        s, keys, m, l, alpha = code.arguments  # noqa: E741 - the paper's ℓ
        before = vectors_at(code, m, vectors)
        largest = [code.variable(x) for x in before]
        others = [code.variable(x) for x in before]  # of every other key: two chains wait less than one
        row = 4 * module.target.panel
        with code.loop(code.index(0), keys, 2) as j:
            for found, key in ((largest, j), (others, code.lesser(j + 1, keys - 1))):
                for most, score in zip(found, vectors_at(code, s + key * row, vectors), strict=True):
                    most.set(code.greater(score, most.get()))
        for most, other in zip(largest, others, strict=True):
            most.set(code.greater(other.get(), most.get()))
        pivots, sums = [], []
        for v in range(vectors):
            at, most = v * code.vector_bytes, largest[v].get()
            pivots.append(code.select(most.equals(-math.inf), code.vector(0.0), most))
            shrunk = exp2(code, before[v] - pivots[v])
            code.store(alpha + at, shrunk)
            code.store(m + at, most)
            sums.append(code.variable(code.vector(0.0)))
        with rows(code, s, keys, vectors) as (_, places):
            for v, place in enumerate(places):
                score = code.load(place)
                weight = exp2(code, score - pivots[v])
                sums[v].set(sums[v].get() + weight)
                if marked:
                    weight = code.select(score.equals(-math.inf), code.vector(-0.0), weight)
                code.store(place, weight)
        for v in range(vectors):
            at = v * code.vector_bytes
            code.store(l + at, code.fma(code.load(l + at), code.load(alpha + at), sums[v].get()))
    return module.find(name)  # type: ignore[return-value]


def careful_product(module: Module, vectors: int, kind: Any = F32) -> ir.Function:
    """The `rescale` product of one column of V, numbers of a kind, with marked weights, where V may hold NaN or infinities:
    what a hidden pair would add is not looked at.

    Parameters  v, v_step: V[k] is at v + k·v_step · p, keys: the weights · o: the address of the panel's row · alpha"""
    name = f"careful_product_{vectors}"
    if (found := module.find(name)) is not None:
        return found
    with module.function(name, (ADDRESS, INDEX, ADDRESS, INDEX, ADDRESS, ADDRESS)) as code:
        values, v_step, p, keys, o, alpha = code.arguments
        sums = [code.variable(code.vector(0.0)) for _ in range(vectors)]
        with rows(code, p, keys, vectors) as (k, places):
            number = code.broadcast(values + v_step * k, kind)
            for total, place in zip(sums, places, strict=True):
                weight = code.load(place)
                hidden = weight.bits(I32).equals(HIDDEN)
                total.set(code.select(hidden, total.get(), code.fma(number, weight, total.get())))
        before, factors = vectors_at(code, o, vectors), vectors_at(code, alpha, vectors)
        for v, (total, x, factor) in enumerate(zip(sums, before, factors, strict=True)):
            code.store(o + v * code.vector_bytes, code.fma(x, factor, total.get()))
    return module.find(name)  # type: ignore[return-value]
