"""Tiles of AMX: registers of 16 rows of 64 bytes, and the one instruction that multiplies them. A product takes bfloat16
numbers in pairs and adds to float32 numbers:

    C "16 16" += A "16 32" · B "32 16", where row k of the tile B holds (B[2k, x], B[2k + 1, x]) for each column x

A kernel configures the tiles of its thread when it begins and gives them up when it ends, since whoever comes next on this
thread has another configuration. Products flush subnormal numbers to 0.

Source: Intel, Architecture Instruction Set Extensions Programming Reference, chapter 3."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from llvmlite import ir

from .micro import Begin
from .vector import ADDRESS, I8, I16, I32, INDEX, Code, Module, Value

SIDE = 16
"""Rows of a tile, and float32 numbers in a row of it."""

DEPTH = 32
"""bfloat16 numbers in a row: terms that one product adds to each number."""

LINE = 64
"""Bytes of a row."""

TILE = SIDE * LINE
"""Bytes of a tile whose rows follow each other."""

COUNT = 8
"""Tile registers."""


class Bfloat(ir.types.Type):
    """LLVM's name for numbers that only instructions of AVX512_BF16 make."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bfloat)

    def __hash__(self) -> int:
        return hash(Bfloat)


BFLOATS, SHORTS, WORDS = ir.VectorType(Bfloat(), DEPTH), ir.VectorType(I16, DEPTH), ir.VectorType(I32, SIDE)
"""What 64 bytes hold."""


def _do(code: Code, name: str, *operands: int | Value) -> None:
    """An instruction of AMX: tile registers by number, then addresses and distances."""
    raw = [ir.Constant(I8, x) if isinstance(x, int) else x.raw for x in operands]
    made = code.module.declare(f"llvm.x86.{name}", ir.FunctionType(ir.VoidType(), [x.type for x in raw]))
    code.builder.call(made, raw)


@contextmanager
def configured(code: Code) -> Iterator[None]:
    """The body with eight tiles of full size, which are given up behind it."""
    palette = [1, *[0] * 15, *(LINE if byte % 2 == 0 and byte < 2 * COUNT else 0 for byte in range(32))]
    palette += [SIDE if row < COUNT else 0 for row in range(16)]
    shape = ir.ArrayType(I8, len(palette))
    constant = ir.GlobalVariable(code.module.raw, shape, "palette")
    constant.initializer = ir.Constant(shape, palette)  # type: ignore[assignment]
    constant.global_constant, constant.linkage = True, "internal"
    _do(code, "ldtilecfg", Value(code, constant))
    yield
    _do(code, "tilerelease")


class Tiles(NamedTuple):
    """A matrix of tiles: tile (r, k) is at address + r·down + k·across, and its rows are `pitch` bytes apart."""

    address: Value
    pitch: Value | int
    down: Value | int
    across: Value | int

    def at(self, row: Value | int, column: Value | int) -> Value:
        """Where a tile begins."""
        return self.address + _times(row, self.down) + _times(column, self.across)

    def part(self, row: Value | int, column: Value | int) -> Tiles:
        """The same matrix from a tile on."""
        return self._replace(address=self.at(row, column))


class Product:
    """C "rows columns", `shape` in tiles, += A·B, in tile registers throughout: `begin`, `add` some terms, `end`. What is done
    in between may take other tiles, those of a product whose `first` is the number of tiles that this one keeps."""

    def __init__(self, code: Code, shape: tuple[int, int], first: int = 0) -> None:
        self.code, self.columns = code, shape[1]
        self.sums = {(r, x): first + r * shape[1] + x for r in range(shape[0]) for x in range(shape[1])}
        last = COUNT - shape[1]
        self.left, self.right = range(first + len(self.sums), last), range(last, COUNT)
        assert self.left

    def begin(self, c: Tiles | None = None) -> None:
        """From what C holds, or from nothing."""
        for at, tile in self.sums.items():
            if c is None:
                _do(self.code, "tilezero", tile)
            else:
                _load(self.code, tile, c, *at)

    def add(self, a: Tiles, b: Tiles, depth: Value | int) -> None:
        """Σ_k A[r, k]·B[k, x] for k from 0 to before `depth`."""
        if isinstance(depth, int):
            for k in range(depth):
                self._step(a, b, k)
        else:
            with self.code.loop(depth) as k:
                self._step(a, b, k)

    def end(self, c: Tiles) -> None:
        """Store C."""
        for (r, x), tile in self.sums.items():
            _do(self.code, "tilestored64", tile, c.at(r, x), _distance(self.code, c.pitch))

    def _step(self, a: Tiles, b: Tiles, k: Value | int) -> None:
        for x, tile in enumerate(self.right):
            _load(self.code, tile, b, k, x)
        for r in range(len(self.sums) // self.columns):
            left = self.left[-1 - r % len(self.left)]
            _load(self.code, left, a, r, k)
            for x, right in enumerate(self.right):
                _do(self.code, "tdpbf16ps", self.sums[r, x], left, right)


def multiply(module: Module, how: Begin) -> ir.Function:
    """C = A·B, or C += A·B, for as many tiles as there are.

    Parameters  a, its pitch, down, across · b, its pitch, down · c, its pitch, down: tiles of B and C lie side by side ·
                rows, columns, depth: so many tiles"""
    name = f"multiply_{how}"
    if (found := module.find(name)) is not None:
        return found
    with module.function(name, (*[ADDRESS, INDEX, INDEX, INDEX], *[ADDRESS, INDEX, INDEX] * 2, *[INDEX] * 3)) as code:
        a, a_pitch, a_down, a_across, b, b_pitch, b_down, c, c_pitch, c_down, rows, columns, depth = code.arguments
        left, right = Tiles(a, a_pitch, a_down, a_across), Tiles(b, b_pitch, b_down, LINE)
        made = Tiles(c, c_pitch, c_down, LINE)

        def block(r: Value, x: Value, shape: tuple[int, int]) -> None:
            product, place = Product(code, shape), made.part(r, x)
            product.begin(None if how == "zero" else place)
            product.add(left.part(r, 0), right.part(0, x), depth)
            product.end(place)

        for width, start, stop in ((2, code.index(0), columns & -2), (1, columns & -2, columns)):
            with code.loop(start, stop, width) as x:
                with code.loop(code.index(0), rows & -2, 2) as r:
                    block(r, x, (2, width))
                with code.when((rows & 1) > 0):
                    block(rows - 1, x, (1, width))
    return module.find(name)  # type: ignore[return-value]


def _load(code: Code, tile: int, matrix: Tiles, row: Value | int, column: Value | int) -> None:
    _do(code, "tileloadd64", tile, matrix.at(row, column), _distance(code, matrix.pitch))


def _times(count: Value | int, distance: Value | int) -> Value | int:
    if isinstance(count, Value):
        return count * distance
    return distance * count if isinstance(distance, Value) else count * distance


def _distance(code: Code, pitch: Value | int) -> Value:
    return code.index(pitch) if isinstance(pitch, int) else pitch


def _rounded(code: Code, first: Value, second: Value, order: Sequence[int]) -> Value:
    """The bfloat16 numbers of two vectors of float32, in this order, two in every 32 bits."""
    kind = ir.FunctionType(BFLOATS, [first.raw.type] * 2)
    made = code.module.declare("llvm.x86.avx512bf16.cvtne2ps2bf16.512", kind)
    raw = code.builder.bitcast(code.builder.call(made, [second.raw, first.raw]), SHORTS)
    picked = code.pick(Value(code, raw), Value(code, raw), order)
    return Value(code, code.builder.bitcast(picked.raw, WORDS))


def pair_up(code: Code, even: Value, odd: Value) -> Value:
    """Two vectors of float32 numbers, rounded to bfloat16, as a row of a tile B: a number of each in every 32 bits."""
    return _rounded(code, even, odd, [SIDE * (x % 2) + x // 2 for x in range(DEPTH)])


def follow(code: Code, first: Value, second: Value) -> Value:
    """Two vectors of float32 numbers, rounded to bfloat16, one behind the other, as a row of a tile A."""
    return _rounded(code, first, second, range(DEPTH))
