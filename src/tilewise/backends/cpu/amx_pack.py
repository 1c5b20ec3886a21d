"""bfloat16 rows of a tensor as the tiles that AMX multiplies: A is what a product has on its left, B what it has on its right.
A matrix X "count columns" is packed in one of four forms, of which each is a transpose of 32-bit words away from another:

    natural            A of X    a tile holds 16 rows of 32 columns
    turned             B of Xᵀ   row k holds (X[i, 2k], X[i, 2k + 1]) for 16 rows i
    paired             B of X    row k holds (X[2k, x], X[2k + 1, x]) for 16 columns x
    paired and turned  A of Xᵀ   a tile holds 16 columns, 32 rows of each

Rows are filled up to `DEPTH`, and columns to whole tiles, with zeros."""

from __future__ import annotations

from llvmlite import ir

from .amx import DEPTH, SIDE
from .vector import ADDRESS, I16, I32, INDEX, Code, Module, Value

EXPONENTS, LOWEST, CARRIES = 0x7F807F80, 0x00800080, -0x7FFF8000
"""Of two bfloat16 numbers in 32 bits: their exponents, the lowest bits of these, and where adding one carries to if an exponent
has all its bits set, as those of NaN and infinities have."""


def pack(module: Module, paired: bool, turned: bool) -> ir.Function:
    """Rows of a tensor in one of the four forms; returns 1 where some number is not finite, else 0.

    Parameters  source, stride: row r is at source + r·stride · count, columns
                packed, pitch: the first tile, and from one of its rows to the next
                across, down: from a tile to that of the next columns, and to that of the next rows, of the tensor
    """
    name = f"pack{'_paired' if paired else ''}{'_turned' if turned else ''}"
    if (found := module.find(name)) is not None:
        return found
    high, wide = (DEPTH, SIDE) if paired else (SIDE, DEPTH)
    with module.function(name, (ADDRESS, INDEX, INDEX, INDEX, ADDRESS, INDEX, INDEX, INDEX), gives=INDEX) as code:
        source, stride, count, columns, packed, pitch, across, down = code.arguments
        carried = code.variable(code.vector(0, I32))

        def square(r: Value, x: Value, whole: bool) -> None:
            halves = []
            for at in range(high):
                left = None if whole else code.select(r + at < count, columns - x, 0)
                halves.append(_words(code, source + stride * (r + at) + x * 2, wide, left))
            rows = [a | (b << 16) for a, b in zip(halves[::2], halves[1::2], strict=True)] if paired else halves
            for row in rows:
                carried.set(carried.get() | ((row & EXPONENTS) + LOWEST))
            place = packed + down * (r // high) + across * (x // wide)
            for at, row in enumerate(code.transpose(rows) if turned else rows):
                code.store(place + pitch * at, row)

        with (
            code.loop(code.index(0), (count + (DEPTH - 1)) & -DEPTH, high) as r,
            code.loop(code.index(0), columns, wide) as x,
            code.either((r + high <= count) & (x + wide <= columns)) as branches,
        ):
            for branch, whole in zip(branches, (True, False), strict=True):
                with branch:
                    square(r, x, whole)
        code.result = code.any((carried.get() & CARRIES).differs(0)).to(INDEX)
    return module.find(name)  # type: ignore[return-value]


def _words(code: Code, place: Value, wide: int, left: Value | None) -> Value:
    """Sixteen words of 32 bits: of 16 numbers in their lower halves, or of 32; zeros from `left` on."""
    if wide == DEPTH and left is None:
        return code.load(place, I32)
    if wide == SIDE:
        return code.load(place, I16, left).unsigned(I32)
    assert left is not None
    first, second = code.load(place, I16, left), code.load(place + SIDE * 2, I16, left - SIDE)
    return Value(code, code.builder.bitcast(code.pick(first, second, range(DEPTH)).raw, ir.VectorType(I32, SIDE)))
