"""Tensors of any dtype and stride into the float32 tiles that micro-kernels read, and back. What a tile has beyond the tensor
is 0 where it takes part in a sum."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from .target import Target
from .vector import ADDRESS, F32, INDEX, ITEMSIZE, Code, Module, Value


def key_columns(target: Target, d: int) -> int:
    """Numbers in a packed row of keys, or rows of a panel of queries: d, filled up to what a product takes at once."""
    return -(-d // target.depth) * target.depth


def value_columns(target: Target, e: int) -> int:
    """Numbers in a packed row of values, or rows of a panel of outputs: e, filled up to whole vectors and whole tiles."""
    step = max(target.lanes, target.rows)
    return -(-e // step) * step


def pack_keys(module: Module, kind: Any) -> ir.Function:
    """K, rows as they are: `packed` "count columns" float32, columns as in `key_columns`.

    Parameters  source, stride: row r is at source + r·stride · count · d · packed"""
    name = "pack_keys"
    if (found := module.find(name)) is not None:
        return found
    with module.function(name, (ADDRESS, INDEX, INDEX, INDEX, ADDRESS)) as code:
        source, stride, count, d, packed = code.arguments
        wide = (d + (code.lanes - 1)) & -code.lanes
        whole = d & -code.lanes
        with code.loop(count) as r:
            row, place = source + stride * r, packed + wide * r * 4
            with code.loop(code.index(0), whole, code.lanes) as x:
                code.store(place + x * 4, code.load(row + x * ITEMSIZE[kind], kind))
            with code.when(whole < d):
                code.store(place + whole * 4, code.load(row + whole * ITEMSIZE[kind], kind, d - whole))
    return module.find(name)  # type: ignore[return-value]


def pack_values(module: Module, kind: Any) -> ir.Function:
    """V in tiles of `rows` columns, which follow each other: column x of row r is at (x // rows)·capacity·rows + r·rows +
    x % rows. Returns 1 where some number is not finite, else 0.

    Parameters  source, stride: row r is at source + r·stride · count · e · packed · capacity: rows of a tile"""
    name = "pack_values"
    if (found := module.find(name)) is not None:
        return found
    step = max(module.target.lanes, module.target.rows)
    with module.function(name, (ADDRESS, INDEX, INDEX, INDEX, ADDRESS, INDEX), gives=INDEX) as code:
        source, stride, count, e, packed, capacity = code.arguments
        zero = code.variable(code.vector(0.0))  # NaN as soon as something is not finite
        whole = e & -step
        with code.loop(count) as r:
            row = source + stride * r

            def tile(x: Value, row: Value = row, r: Value = r, left: Value | None = None) -> None:
                for at in range(0, step, code.lanes):
                    rest = None if left is None else left - at
                    vector = code.load(row + (x + at) * ITEMSIZE[kind], kind, rest)
                    zero.set(code.fma(vector, 0.0, zero.get()))
                    _put_tiles(code, vector, (packed, capacity, r), x + at)

            with code.loop(code.index(0), whole, step) as x:
                tile(x)
            with code.when(whole < e):
                tile(whole, left=e - whole)
        code.result = code.any(zero.get().differs(0.0)).to(INDEX)
    return module.find(name)  # type: ignore[return-value]


def _put_tiles(code: Code, vector: Value, where: tuple[Value, Value, Value], x: Value) -> None:
    """Columns x … x + lanes − 1 of one row, into the tiles that they belong to."""
    packed, capacity, r = where
    rows = code.module.target.rows
    size = min(rows, code.lanes)
    for at in range(0, code.lanes, size):
        tile, inside = (x + at) // rows, (x + at) % rows
        place = packed + ((tile * capacity + r) * rows + inside) * 4
        code.store(place, code.pick(vector, vector, range(at, at + size)) if size < code.lanes else vector)


def pack_queries(module: Module, kind: Any) -> ir.Function:
    """Q as one vector of a panel: lane i of row x is scale·Q[i, x]. Lanes from `count` on repeat the last query.

    Parameters  source, stride: query i is at source + i·stride · count: 1 or more · d · panel: where its row 0 and this vector
                meet; rows are filled up to `key_columns` · scale"""
    name = "pack_queries"
    if (found := module.find(name)) is not None:
        return found
    with module.function(name, (ADDRESS, INDEX, INDEX, INDEX, ADDRESS, F32)) as code:
        source, stride, count, d, panel, scale = code.arguments
        last, row_bytes = count - 1, 4 * module.target.panel
        rows = [source + stride * code.lesser(code.index(i), last) for i in range(code.lanes)]
        whole, factor = d & -code.lanes, code.vector(scale)

        def tile(x: Value, left: Value | None = None) -> None:
            loaded = [code.load(row + x * ITEMSIZE[kind], kind, left) for row in rows]
            for at, vector in enumerate(code.transpose(loaded)):
                code.store(panel + (x + at) * row_bytes, vector * factor)

        with code.loop(code.index(0), whole, code.lanes) as x:
            tile(x)
        with code.when(whole < d):
            tile(whole, d - whole)
    return module.find(name)  # type: ignore[return-value]


def unpack_outputs(module: Module, kind: Any) -> ir.Function:
    """One vector of a panel Oᵀ to rows of O: row i, column x is lane i of row x, times that lane of `factor`; where `factor`
    is 0 the result is, whatever the panel holds.

    Parameters  panel: where its row 0 and this vector meet · factor: the address of a vector · e · target, stride: row i of O
                is at target + i·stride · count: rows that are written"""
    name = "unpack_outputs"
    if (found := module.find(name)) is not None:
        return found
    with module.function(name, (ADDRESS, ADDRESS, INDEX, ADDRESS, INDEX, INDEX)) as code:
        panel, factor, e, target, stride, count = code.arguments
        factors, row_bytes, whole = code.load(factor), 4 * module.target.panel, e & -code.lanes
        nothing = factors.equals(0.0)

        def tile(x: Value, left: Value | None = None) -> None:
            rows = [code.load(panel + (x + at) * row_bytes) * factors for at in range(code.lanes)]
            columns = code.transpose([code.select(nothing, code.vector(0.0), row) for row in rows])
            for at, row in enumerate(columns):
                with code.when(count > at):
                    code.store(target + stride * at + x * ITEMSIZE[kind], row, kind, left)

        with code.loop(code.index(0), whole, code.lanes) as x:
            tile(x)
        with code.when(whole < e):
            tile(whole, e - whole)
    return module.find(name)  # type: ignore[return-value]
