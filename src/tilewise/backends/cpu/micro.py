"""Micro-kernels: the innermost loops, on tiles that fit in registers. Everything above them walks over tiles.

A *panel* is `target.panel` queries, one a lane, or fewer whole vectors of them where a block ends. A matrix in panel form has
the panel's queries side by side in each row: Qᵀ "d panel", Sᵀ and Pᵀ "keys panel", Oᵀ "e panel". So the softmax of a query runs
down its lane, with no sums across lanes, and K and V are read in their natural rows, as numbers that multiply a whole vector of
queries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from llvmlite import ir

from .vector import ADDRESS, INDEX, Code, Module, Value

Begin = Literal["zero", "add", "rescale"]
"""What a product starts from: nothing, what its place holds, or that times a vector."""

UNROLL = 4
"""Steps of a product's loop that are written out."""


def product(module: Module, rows: int, vectors: int, begin: Begin, unroll: int = UNROLL) -> ir.Function:
    """C "rows vectors" = begin + Σ_k A[r, k]·B[k], in registers throughout: each number of A multiplies a row of B.

    Parameters  a, a_row, a_step: A[r, k] is at a + r·a_row + k·a_step · b, b_step: B[k] is at b + k·b_step · depth: how many k
                c, c_row · alpha: the address of the vectors that "rescale" multiplies C by, any address otherwise.
                All distances in bytes. `unroll`: steps of the loop that are written out
    """
    name = f"product_{rows}x{vectors}_{begin}_{unroll}"
    if (found := module.find(name)) is not None:
        return found
    takes = (ADDRESS, INDEX, INDEX, ADDRESS, INDEX, INDEX, ADDRESS, INDEX, ADDRESS)
    with module.function(name, takes) as code:
        a, a_row, a_step, b, b_step, depth, c, c_row, alpha = code.arguments
        places = [[c + c_row * r + v * code.vector_bytes for v in range(vectors)] for r in range(rows)]
        factors = [code.load(alpha + v * code.vector_bytes) for v in range(vectors)] if begin == "rescale" else []
        sums = [[code.variable(_start(code, places[r][v], factors[v:])) if begin != "zero" else code.variable(code.vector(0.0))
                 for v in range(vectors)] for r in range(rows)]  # fmt: skip

        def step(k: Value) -> None:
            row = b + b_step * k
            columns = [code.load(row + v * code.vector_bytes) for v in range(vectors)]
            for r in range(rows):
                number = code.broadcast(a + a_row * r + a_step * k)
                for v in range(vectors):
                    sums[r][v].set(code.fma(number, columns[v], sums[r][v].get()))

        whole = depth & -unroll
        with code.loop(code.index(0), whole, unroll) as k:
            for u in range(unroll):
                step(k + u)
        with code.loop(whole, depth) as k:
            step(k)
        for r in range(rows):
            for v in range(vectors):
                code.store(places[r][v], sums[r][v].get())
    return module.find(name)  # type: ignore[return-value]


def _start(code: Code, place: Value, factors: Sequence[Value]) -> Value:
    """What a place holds, times the first factor if there is one."""
    return code.load(place) * factors[0] if factors else code.load(place)
