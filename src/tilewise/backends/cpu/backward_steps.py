"""Steps of the backward pass on matrices that a thread keeps near: rows of float32, `row` bytes apart. A matrix holds whole
vectors; what its last ones hold past its width is never stored where a caller looks.

A row takes an odd number of vectors, so that a column of a matrix does not fall into few sets of a cache."""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir

from .arithmetic import EXP2, HIDDEN, exp2
from .micro import product
from .target import Target
from .vector import ADDRESS, BIT, F32, I32, INDEX, ITEMSIZE, Code, Module, Value

STRIP = 6
"""Rows of C that a product keeps in registers. A matrix that is multiplied or written has room for a strip more."""

LEAST = -100.0
"""A weight below 2 to this is 0. ds of smaller ones would be subnormal numbers, with which processors multiply a hundred times
slower; and weights of a row sum up to 1."""


class Matrix(NamedTuple):
    """Rows of float32 in a thread's own memory."""

    address: Value
    row: Value

    def at(self, row: Value | int, column: Value | int = 0) -> Value:
        """The address of an element."""
        return self.address + self.row * row + (column * 4)


def panels(target: Target) -> tuple[int, ...]:
    """Widths of the tiles that a product keeps in registers beside `STRIP` rows, in vectors, widest first."""
    return (4, 2, 1) if target.registers >= 32 else (2, 1)


def odd_row(columns: int, lanes: int) -> int:
    """Bytes of a row of so many columns."""
    return 4 * lanes * (-(-columns // lanes) | 1)


def multiply(module: Module, begin: Any) -> ir.Function:
    """C "rows vectors" = begin + A·B, panel by panel of B, which stays in the first-level cache meanwhile. Rows of C are
    written in whole strips.

    Parameters  a, a_row, a_step: A[r, k] is at a + r·a_row + k·a_step · b, b_row · c, c_row · rows, depth, vectors
    """
    name = f"multiply_{begin}"
    if (found := module.find(name)) is not None:
        return found
    tiles = {width: product(module, STRIP, width, begin, unroll=2) for width in panels(module.target)}
    with module.function(name, (ADDRESS, INDEX, INDEX, ADDRESS, INDEX, ADDRESS, INDEX, INDEX, INDEX, INDEX)) as code:
        a, a_row, a_step, b, b_row, c, c_row, rows, depth, vectors = code.arguments
        done = code.index(0)
        for width, tile in tiles.items():
            stop = done + (vectors - done) // width * width
            with code.loop(done, stop, width) as panel:
                at = panel * code.vector_bytes
                with code.loop(code.index(0), rows, STRIP) as r:
                    code.call(tile, a + a_row * r, a_row, a_step, b + at, b_row, depth, c + c_row * r + at, c_row, c)
            done = stop
    return module.find(name)  # type: ignore[return-value]


def multiply_seen(module: Module) -> ir.Function:
    """C += A·B like `multiply`, over numbers of A that are not `HIDDEN` only: what a hidden row of B holds is not read. Slow,
    and only for tiles in which it may be NaN or infinite."""
    name = "multiply_seen"
    if (found := module.find(name)) is not None:
        return found
    with module.function(name, (ADDRESS, INDEX, INDEX, ADDRESS, INDEX, ADDRESS, INDEX, INDEX, INDEX, INDEX)) as code:
        a, a_row, a_step, b, b_row, c, c_row, rows, depth, vectors = code.arguments
        with code.loop(rows) as r, code.loop(vectors) as v:
            at = v * code.vector_bytes
            target, total = c + c_row * r + at, code.variable(code.vector(0.0))
            with code.loop(depth) as k:
                number = code.get(a + a_row * r + a_step * k)
                with code.when(number.bits(I32).differs(HIDDEN)):
                    total.set(code.fma(code.vector(number), code.load(b + b_row * k + at), total.get()))
            code.store(target, code.load(target) + total.get())
    return module.find(name)  # type: ignore[return-value]


def clear(module: Module) -> ir.Function:
    """Zeros. Parameters: c, c_row, rows, columns."""
    if (found := module.find("clear")) is not None:
        return found
    with module.function("clear", (ADDRESS, INDEX, INDEX, INDEX)) as code:
        c, c_row, rows, columns = code.arguments
        with code.loop(rows) as r:
            across(code, columns, lambda at, count: code.store(c + c_row * r + at * 4, code.vector(0.0), F32, count))
    return module.find("clear")  # type: ignore[return-value]


def bring(module: Module, kind: Any) -> ir.Function:
    """Rows of a tensor as a matrix, times a factor, zeros past their width; and whether they hold anything but finite numbers.

    Parameters  c, c_row · source, source_row · rows, columns · factor
    """
    if (found := module.find(name := f"bring_{kind}")) is not None:
        return found
    with module.function(name, (ADDRESS, INDEX, ADDRESS, INDEX, INDEX, INDEX, F32), gives=BIT) as code:
        c, c_row, source, source_row, rows, columns, factor = code.arguments
        nothing = code.variable(code.vector(0.0))  # stays 0 unless a number is not finite

        def one(r: Value, at: Value, count: Value | None) -> None:
            x = code.load(source + source_row * r + at * ITEMSIZE[kind], kind, count)
            nothing.set(code.fma(x, 0.0, nothing.get()))
            code.store(c + c_row * r + at * 4, x * factor)

        with code.loop(rows) as r:
            across(code, columns, lambda at, count: one(r, at, count))
        code.result = code.any(nothing.get().differs(0.0))
    return module.find(name)  # type: ignore[return-value]


def turn(module: Module, kind: Any) -> ir.Function:
    """The transpose of rows of a tensor, "columns rows", times a factor, with zeros past the last row.

    Parameters  c, c_row · source, source_row · rows · filled: columns that are written, whole vectors of them · columns:
                rows that are written, filled up to whole vectors · factor
    """
    if (found := module.find(name := f"turn_{kind}")) is not None:
        return found
    with module.function(name, (ADDRESS, INDEX, ADDRESS, INDEX, INDEX, INDEX, INDEX, F32)) as code:
        c, c_row, source, source_row, rows, filled, columns, factor = code.arguments
        lanes, size = code.lanes, ITEMSIZE[kind]

        def square(first: Value, at: Value, whole: bool) -> None:
            place, width = source + source_row * first + at * size, columns - at
            counts = [None if whole else code.select(first + r < rows, width, 0) for r in range(lanes)]
            loaded = [code.load(place + source_row * r, kind, count) for r, count in enumerate(counts)]
            for r, row in enumerate(code.transpose(loaded)):
                code.store(c + c_row * (at + r) + first * 4, row * factor)

        with (
            code.loop(code.index(0), filled, lanes) as first,
            code.loop(code.index(0), columns, lanes) as at,
            code.either((first + lanes <= rows) & (at + lanes <= columns)) as branches,
        ):
            for branch, whole in zip(branches, (True, False), strict=True):
                with branch:
                    square(first, at, whole)
    return module.find(name)  # type: ignore[return-value]


def put(module: Module, kind: Any) -> ir.Function:
    """Rows of a matrix, times a factor, as rows of a tensor.

    Parameters  target, target_row · a, a_row · rows, columns · factor
    """
    if (found := module.find(name := f"put_{kind}")) is not None:
        return found
    with module.function(name, (ADDRESS, INDEX, ADDRESS, INDEX, INDEX, INDEX, F32)) as code:
        target, target_row, a, a_row, rows, columns, factor = code.arguments

        def one(r: Value, at: Value, count: Value | None) -> None:
            x = code.load(a + a_row * r + at * 4) * factor
            code.store(target + target_row * r + at * ITEMSIZE[kind], x, kind, count)

        with code.loop(rows) as r:
            across(code, columns, lambda at, count: one(r, at, count))
    return module.find(name)  # type: ignore[return-value]


def add(module: Module) -> ir.Function:
    """Add rows of a matrix, times a factor, to rows of a float32 tensor. Parameters: target, target_row · a, a_row · rows,
    columns · factor."""
    if (found := module.find("add")) is not None:
        return found
    with module.function("add", (ADDRESS, INDEX, ADDRESS, INDEX, INDEX, INDEX, F32)) as code:
        target, target_row, a, a_row, rows, columns, factor = code.arguments

        def one(r: Value, at: Value, count: Value | None) -> None:
            place = target + target_row * r + at * 4
            code.store(place, code.fma(code.load(a + a_row * r + at * 4), factor, code.load(place, F32, count)), F32, count)

        with code.loop(rows) as r:
            across(code, columns, lambda at, count: one(r, at, count))
    return module.find("add")  # type: ignore[return-value]


def weight(code: Code, logit: Value, polynomial: tuple[float, ...] = EXP2) -> Value:
    """p = 2 to a logit in base 2 from which lse has been taken."""
    return code.select(logit < LEAST, code.vector(0.0), exp2(code, logit, polynomial))


def weigh(module: Module, masked: bool) -> ir.Function:
    """p = exp2(s − lse) in the place of s, and ds = p·(dp − total) in the place of dp; both `HIDDEN` where masked and outside
    a row's interval.

    Parameters  s, ds: "rows vectors" of keys from number `key` on, row: their rows' distance · rows, vectors ·
                total, lse, rest, first, past: of each row · key
    """
    name = "weigh_masked" if masked else "weigh"
    if (found := module.find(name)) is not None:
        return found
    with module.function(name, (ADDRESS, ADDRESS, INDEX, INDEX, INDEX, *[ADDRESS] * 5, INDEX)) as code:
        s, ds, row, rows, vectors, total, lse, rest, first, past, key = code.arguments
        with code.loop(rows) as r:
            at = r * 4
            less, shift, left = (code.broadcast(pointer + at) for pointer in (total, lse, rest))
            if masked:
                low, high = code.broadcast(first + at, I32), code.broadcast(past + at, I32)
            with code.loop(vectors) as v:
                place = row * r + v * code.vector_bytes
                p = weight(code, code.load(s + place) - shift - left)
                change = p * (code.load(ds + place) - less)
                if masked:
                    j = code.numbered() + (key + v * code.lanes).to(I32)
                    seen = (j >= low) & (j < high)
                    p, change = code.select(seen, p, -0.0), code.select(seen, change + 0.0, -0.0)
                code.store(s + place, p)
                code.store(ds + place, change)
    return module.find(name)  # type: ignore[return-value]


def across(code: Code, columns: Value, step: Any) -> None:
    """`step(at, count)` for each vector of a row: count is None for whole ones, and what is left for the last."""
    whole = columns // code.lanes * code.lanes
    with code.loop(code.index(0), whole, code.lanes) as at:
        step(at, None)
    with code.when(whole < columns):
        step(whole, columns - whole)
