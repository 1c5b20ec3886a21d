"""Micro-kernels: the innermost loops, on tiles that fit in registers. Everything above them walks over tiles.

A *panel* is `target.panel` queries, one a lane, or fewer whole vectors of them where a block ends. A matrix in panel form has
the panel's queries side by side in each row: Qᵀ "d panel", Sᵀ and Pᵀ "keys panel", Oᵀ "e panel". So the softmax of a query runs
down its lane, with no sums across lanes, and K and V are read in their natural rows, as numbers that multiply a whole vector of
queries."""

from __future__ import annotations

from typing import Literal

from llvmlite import ir

from .vector import ADDRESS, INDEX, Module, Value

Begin = Literal["zero", "add", "rescale"]
"""What a product is added to: nothing, what its place holds, or that times a vector. It is added when it is done: so each block
of terms is summed by itself, and rounding grows with the length of a block and the number of blocks, not with their product."""

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
        sums = [[code.variable(code.vector(0.0)) for _ in range(vectors)] for _ in range(rows)]

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
        factors = [code.load(alpha + v * code.vector_bytes) for v in range(vectors)] if begin == "rescale" else []
        for r in range(rows):
            for v, (place, total) in enumerate(zip(places[r], sums[r], strict=True)):
                made = total.get()
                if begin == "add":
                    made = code.load(place) + made
                if begin == "rescale":
                    made = code.fma(code.load(place), factors[v], made)
                code.store(place, made)
    return module.find(name)  # type: ignore[return-value]
