"""What instructions give: numbers, vectors and addresses, with Python's operators on them. See `vector`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from llvmlite import ir

if TYPE_CHECKING:
    from .vector import Code

F32, I64, I32, I16, I8, BIT, F16 = (
    ir.FloatType(), *(ir.IntType(bits) for bits in (64, 32, 16, 8, 1)), ir.HalfType()
)  # fmt: skip
INDEX, ADDRESS = I64, ir.PointerType()
BF16 = "bfloat16"
"""The upper half of a float32: no kind of number to LLVM's older targets, so only loads and stores know it."""

ITEMSIZE = {F32: 4, I64: 8, I32: 4, I16: 2, I8: 1, F16: 2, BF16: 2}
"""Bytes of one number in memory."""

Number: TypeAlias = "Value | int | float"


class Value:
    """What an instruction gave. `kind`: of one number of it."""

    __slots__ = ("code", "raw")

    def __init__(self, code: Code, raw: Any) -> None:
        self.code, self.raw = code, raw

    @property
    def count(self) -> int:
        """Numbers in a vector; 0 for a single one."""
        return self.raw.type.count if isinstance(self.raw.type, ir.VectorType) else 0

    @property
    def kind(self) -> ir.Type:
        return self.raw.type.element if self.count else self.raw.type

    def __add__(self, other: Number) -> Value:
        if isinstance(self.raw.type, ir.PointerType):  # bytes from an address
            offset = self.code.constant(other, INDEX) if isinstance(other, int) else other
            return Value(self.code, self.code.builder.gep(self.raw, [offset.raw], source_etype=I8))  # type: ignore[union-attr]
        return self._binary(other, "fadd", "add")

    def __sub__(self, other: Number) -> Value:
        return self._binary(other, "fsub", "sub")

    def __mul__(self, other: Number) -> Value:
        return self._binary(other, "fmul", "mul")

    def __truediv__(self, other: Number) -> Value:
        return self._binary(other, "fdiv", "")

    def __floordiv__(self, other: Number) -> Value:
        return self._binary(other, "", "sdiv")

    def __mod__(self, other: Number) -> Value:
        return self._binary(other, "", "srem")

    def __and__(self, other: Number) -> Value:
        return self._binary(other, "", "and_")

    def __or__(self, other: Number) -> Value:
        return self._binary(other, "", "or_")

    def __xor__(self, other: Number) -> Value:
        return self._binary(other, "", "xor")

    def __lshift__(self, other: Number) -> Value:
        return self._binary(other, "", "shl")

    def __rshift__(self, other: Number) -> Value:
        """Zeros come in from the left."""
        return self._binary(other, "", "lshr")

    def __lt__(self, other: Number) -> Value:
        return self._compare("<", other)

    def __le__(self, other: Number) -> Value:
        return self._compare("<=", other)

    def __gt__(self, other: Number) -> Value:
        return self._compare(">", other)

    def __ge__(self, other: Number) -> Value:
        return self._compare(">=", other)

    def equals(self, other: Number) -> Value:
        return self._compare("==", other)

    def differs(self, other: Number) -> Value:
        """Not equal; a NaN differs from everything."""
        a, b = self.code.pair(self, other)
        builder = self.code.builder
        made = builder.fcmp_unordered if a.kind == F32 else builder.icmp_signed
        return Value(self.code, made("!=", a.raw, b.raw))

    def bits(self, kind: ir.Type) -> Value:
        """The same bits, read as numbers of another kind."""
        return Value(self.code, self.code.builder.bitcast(self.raw, self.code.shaped(kind, self.count)))

    def to(self, kind: ir.Type) -> Value:
        """The same number, of another kind. Truth becomes 0 and 1; integers grow by their sign."""
        if self.kind == kind:
            return self
        builder, floats = self.code.builder, (F32, F16)
        wide = self.code.shaped(kind, self.count)
        if self.kind in floats and kind in floats:
            made = builder.fpext if kind == F32 else builder.fptrunc
        elif self.kind in floats or kind in floats:
            made = builder.fptosi if self.kind in floats else builder.sitofp
        elif self.kind.width > kind.width:  # type: ignore[attr-defined]
            made = builder.trunc
        else:
            made = builder.zext if self.kind == BIT else builder.sext
        return Value(self.code, made(self.raw, wide))

    def unsigned(self, kind: ir.Type) -> Value:
        """The same number as a wider integer, if this one has no sign."""
        return Value(self.code, self.code.builder.zext(self.raw, self.code.shaped(kind, self.count)))

    def _binary(self, other: Number, floats: str, integers: str) -> Value:
        a, b = self.code.pair(self, other)
        name = floats if a.kind == F32 else integers
        return Value(self.code, getattr(self.code.builder, name)(a.raw, b.raw))

    def _compare(self, sign: str, other: Number) -> Value:
        a, b = self.code.pair(self, other)
        builder = self.code.builder
        made = builder.fcmp_ordered if a.kind == F32 else builder.icmp_signed
        return Value(self.code, made(sign, a.raw, b.raw))


class Variable:
    """A value that changes: LLVM keeps it in a register."""

    def __init__(self, code: Code, start: Value) -> None:
        self.code = code
        with code.builder.goto_entry_block():
            self.slot = code.builder.alloca(start.raw.type)
        self.set(start)

    def get(self) -> Value:
        return Value(self.code, self.code.builder.load(self.slot, typ=self.slot.allocated_type))

    def set(self, value: Value) -> None:
        self.code.builder.store(value.raw, self.slot)
