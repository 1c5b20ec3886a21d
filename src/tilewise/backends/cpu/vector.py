"""A small language for vector code: machine code written in Python, once for every width. A function is a `Code` that is being
written; in it a `Value` stands for a number, a vector of `lanes` numbers or an address, and Python's operators write
instructions. Loops and branches are `with` blocks, and what changes in them is a `Variable`.

    with module.function("add", (ADDRESS, ADDRESS, INDEX)) as code:      # target[0:count·lanes] += source[0:count·lanes]
        target, source, count = code.arguments
        with code.loop(count) as i:
            at = i * code.vector_bytes
            code.store(target + at, code.load(target + at) + code.load(source + at))

Arithmetic follows IEEE 754, NaN included; integers wrap, and their order is that of signed ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from .target import Target
from .values import ADDRESS as ADDRESS
from .values import BF16 as BF16
from .values import BIT as BIT
from .values import F16 as F16
from .values import F32 as F32
from .values import I8 as I8
from .values import I16 as I16
from .values import I32 as I32
from .values import I64 as I64
from .values import INDEX as INDEX
from .values import ITEMSIZE as ITEMSIZE
from .values import Number, Value, Variable


class Code:
    """A function that is being written."""

    def __init__(self, module: Module, function: ir.Function) -> None:
        self.module, self.function = module, function
        self.builder = ir.IRBuilder(function.append_basic_block("entry"))
        self.arguments = [Value(self, raw) for raw in function.args]
        self.result: Value | None = None
        """What the function returns; nothing if it stays None."""

    @property
    def lanes(self) -> int:
        return self.module.target.lanes

    @property
    def vector_bytes(self) -> int:
        """Bytes of a vector of float32."""
        return 4 * self.lanes

    def shaped(self, kind: ir.Type, count: int) -> ir.Type:
        return ir.VectorType(kind, count) if count else kind

    # ---- numbers

    def constant(self, number: float, kind: ir.Type = F32, count: int = 0) -> Value:
        number = float(number) if kind == F32 else int(number)
        return Value(self, ir.Constant(self.shaped(kind, count), [number] * count if count else number))

    def index(self, number: int) -> Value:
        return self.constant(number, INDEX)

    def vector(self, number: Number, kind: ir.Type = F32) -> Value:
        """A number in every lane."""
        if not isinstance(number, Value):
            return self.constant(number, kind, self.lanes)
        return self.spread(number, self.lanes)

    def spread(self, value: Value, count: int) -> Value:
        shape, first = ir.VectorType(value.kind, count), ir.Constant(ir.VectorType(I32, count), [0] * count)
        one = self.builder.insert_element(ir.Constant(shape, ir.Undefined), value.raw, ir.Constant(I32, 0))
        return Value(self, self.builder.shuffle_vector(one, ir.Constant(shape, ir.Undefined), first))

    def numbered(self, kind: ir.Type = I32) -> Value:
        """0, 1, 2, … in the lanes."""
        return Value(self, ir.Constant(ir.VectorType(kind, self.lanes), list(range(self.lanes))))

    def pair(self, a: Value, b: Number) -> tuple[Value, Value]:
        """Two operands of one shape: Python's numbers take the kind of the other, a single number goes to every lane."""
        if not isinstance(b, Value):
            return a, self.constant(b, a.kind, a.count)
        if a.count and not b.count:
            return a, self.spread(b, a.count)
        return (self.spread(a, b.count), b) if b.count and not a.count else (a, b)

    def fma(self, a: Value, b: Number, c: Number) -> Value:
        """a·b + c, rounded once."""
        a, b = self.pair(a, b)
        a, c = self.pair(a, c)
        return self.intrinsic("llvm.fma", a.raw.type, a, b, c)

    def greater(self, a: Value, b: Number) -> Value:
        """The larger one; b if either is NaN."""
        a, b = self.pair(a, b)
        return self.select(a > b, a, b)

    def lesser(self, a: Value, b: Number) -> Value:
        """The smaller one; b if either is NaN."""
        a, b = self.pair(a, b)
        return self.select(a < b, a, b)

    def select(self, condition: Value, a: Value, b: Number) -> Value:
        """a where the condition holds, else b, lane by lane; what the other holds is not looked at."""
        a, b = self.pair(a, b)
        return Value(self, self.builder.select(condition.raw, a.raw, b.raw))

    def intrinsic(self, name: str, gives: ir.Type, *arguments: Value) -> Value:
        """An instruction by LLVM's name, e.g. "llvm.fma", for the kind of the first argument."""
        kinds = [a.raw.type for a in arguments]
        suffix = f"v{kinds[0].count}{_letter(kinds[0].element)}" if arguments[0].count else _letter(kinds[0])
        made = self.module.declare(f"{name}.{suffix}", ir.FunctionType(gives, kinds))
        return Value(self, self.builder.call(made, [a.raw for a in arguments]))

    def total(self, vector: Value) -> Value:
        """The sum of the lanes, in the order of a tree."""
        parts = vector
        while parts.count > 1:
            half = parts.count // 2
            parts = self.pick(parts, parts, range(half)) + self.pick(parts, parts, range(half, 2 * half))
        return self.lane(parts, 0)

    def least(self, vector: Value) -> Value:
        """The smallest of the lanes' integers."""
        return self.intrinsic("llvm.vector.reduce.smin", vector.kind, vector)

    def most(self, vector: Value) -> Value:
        """The largest of the lanes' integers."""
        return self.intrinsic("llvm.vector.reduce.smax", vector.kind, vector)

    def any(self, condition: Value) -> Value:
        """Whether a condition holds in some lane."""
        return self.intrinsic("llvm.vector.reduce.or", BIT, condition)

    # ---- lanes

    def lane(self, vector: Value, at: int) -> Value:
        return Value(self, self.builder.extract_element(vector.raw, ir.Constant(I32, at)))

    def insert(self, vector: Value, number: Value, at: int) -> Value:
        """The vector with another number in one lane."""
        return Value(self, self.builder.insert_element(vector.raw, number.raw, ir.Constant(I32, at)))

    def pick(self, a: Value, b: Value, lanes: Sequence[int]) -> Value:
        """A vector of some lanes of two: those of `b` are counted on from those of `a`."""
        order = ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))
        return Value(self, self.builder.shuffle_vector(a.raw, b.raw, order))

    def transpose(self, rows: Sequence[Value]) -> list[Value]:
        """As many vectors as there are lanes, rows for columns: of blocks of 2, then of 4, …, halves change places."""
        rows, size = list(rows), 1
        while size < len(rows):
            for r in range(len(rows)):
                if not r & size:
                    a, b = rows[r], rows[r + size]
                    low = [x if not x & size else len(rows) + x - size for x in range(len(rows))]
                    high = [x + size if not x & size else len(rows) + x for x in range(len(rows))]
                    rows[r], rows[r + size] = self.pick(a, b, low), self.pick(a, b, high)
            size *= 2
        return rows

    def totals(self, vectors: Sequence[Value]) -> Value:
        """The sums of as many vectors as there are lanes, one a lane: of two at a time one keeps the lower
        halves of sums, the other the upper ones."""
        vectors, size = list(vectors), self.lanes
        while len(vectors) > 1:
            size, half = size // 2, len(vectors) // 2
            low = [x if not x & size else self.lanes + (x ^ size) for x in range(self.lanes)]
            high = [x | size if not x & size else self.lanes + x for x in range(self.lanes)]
            pairs = zip(vectors[:half], vectors[half:], strict=True)
            vectors = [self.pick(a, b, low) + self.pick(a, b, high) for a, b in pairs]
        return vectors[0]

    def among(self, vector: Value, size: int, meet: Callable[[Value, Value], Value]) -> Value:
        """What all lanes of each run of `size` have in common, say their sum, in every one of them; `size`: a power of 2."""
        step = 1
        while step < size:
            vector = meet(vector, self.pick(vector, vector, [x ^ step for x in range(vector.count)]))
            step *= 2
        return vector

    # ---- memory

    def get(self, address: Value, kind: Any = F32) -> Value:
        """One number, as float32 where it is a floating-point one."""
        raw = self.builder.load(address.raw, typ=I16 if kind == BF16 else kind, align=1 if kind == BF16 else ITEMSIZE[kind])
        return self._as_float32(Value(self, raw), kind)

    def put(self, address: Value, value: Value, kind: Any = None) -> None:
        kind = value.kind if kind is None else kind
        self.builder.store(self._as_stored(value, kind).raw, address.raw, align=ITEMSIZE[kind])

    def broadcast(self, address: Value, kind: Any = F32) -> Value:
        """One number in every lane."""
        return self.vector(self.get(address, kind))

    def load(self, address: Value, kind: Any = F32, count: Value | None = None) -> Value:
        """A vector of neighbours, floating-point ones as float32; with `count`, only the first so many are read and the
        other lanes are 0."""
        stored = I16 if kind == BF16 else kind
        shape, align = ir.VectorType(stored, self.lanes), ITEMSIZE[kind]
        if count is None:
            return self._as_float32(Value(self, self.builder.load(address.raw, typ=shape, align=align)), kind)
        made = self.module.declare(
            f"llvm.masked.load.v{self.lanes}{_letter(stored)}.p0",
            ir.FunctionType(shape, [ADDRESS, I32, ir.VectorType(BIT, self.lanes), shape]),
        )
        zeros = ir.Constant(shape, [0] * self.lanes)
        raw = self.builder.call(made, [address.raw, ir.Constant(I32, align), self.first(count).raw, zeros])
        return self._as_float32(Value(self, raw), kind)

    def store(self, address: Value, vector: Value, kind: Any = None, count: Value | None = None) -> None:
        """Write a vector, rounded to `kind`; with `count`, only its first so many lanes."""
        kind = vector.kind if kind is None else kind
        vector, align = self._as_stored(vector, kind), ITEMSIZE[kind]
        if count is None:
            self.builder.store(vector.raw, address.raw, align=align)
            return
        made = self.module.declare(
            f"llvm.masked.store.v{self.lanes}{_letter(vector.kind)}.p0",
            ir.FunctionType(ir.VoidType(), [vector.raw.type, ADDRESS, I32, ir.VectorType(BIT, self.lanes)]),
        )
        self.builder.call(made, [vector.raw, address.raw, ir.Constant(I32, align), self.first(count).raw])

    def prefetch(self, address: Value, level: int = 1) -> None:
        """Say that a line of memory will be read soon, and into which cache to bring it. The address may be anything."""
        made = self.module.declare("llvm.prefetch.p0", ir.FunctionType(ir.VoidType(), [ADDRESS, I32, I32, I32]))
        self.builder.call(made, [address.raw, *(ir.Constant(I32, x) for x in (0, 4 - level, 1))])  # for reading, near, data

    def first(self, count: Value) -> Value:
        """True in the first `count` lanes."""
        return self.numbered() < self.vector(count.to(I32))

    def fetch_add(self, address: Value, number: int) -> Value:
        """Add to an integer that other threads add to as well; what it was before."""
        raw = self.builder.atomic_rmw("add", address.raw, ir.Constant(INDEX, number), "seq_cst")
        return Value(self, raw)

    def _as_float32(self, value: Value, kind: Any) -> Value:
        if kind == BF16:
            return (value.unsigned(I32) << 16).bits(F32)
        return value.to(F32) if kind == F16 else value

    def _as_stored(self, value: Value, kind: Any) -> Value:
        """Rounded to nearest, ties to even; a NaN stays one."""
        if kind != BF16:
            return value.to(kind)
        bits = value.bits(I32)
        rounded = bits + ((bits >> 16) & 1) + 0x7FFF
        return (self.select(value.differs(value), bits | 0x400000, rounded) >> 16).to(I16)

    # ---- control

    def variable(self, start: Value) -> Variable:
        return Variable(self, start)

    @contextmanager
    def loop(self, start: Value | int, stop: Value | None = None, step: int = 1) -> Iterator[Value]:
        """The body once for each index from `start` to before `stop`; `loop(stop)` begins at 0."""
        if stop is None:
            start, stop = 0, start if isinstance(start, Value) else self.index(start)
        builder, begin = self.builder, start if isinstance(start, Value) else self.index(start)
        before, head, body, after = builder.block, *(builder.append_basic_block(name) for name in ("head", "body", "after"))
        builder.branch(head)
        builder.position_at_end(head)
        at = builder.phi(INDEX)
        at.add_incoming(begin.raw, before)
        builder.cbranch(builder.icmp_signed("<", at, stop.raw), body, after)
        builder.position_at_end(body)
        yield Value(self, at)
        at.add_incoming(builder.add(at, ir.Constant(INDEX, step)), builder.block)
        builder.branch(head)
        builder.position_at_end(after)

    @contextmanager
    def repeat(self) -> Iterator[Callable[[Value], None]]:
        """The body again and again, until the function that it is given has been told so: `leave(condition)`."""
        builder = self.builder
        body, after = builder.append_basic_block("again"), builder.append_basic_block("left")
        builder.branch(body)
        builder.position_at_end(body)

        def leave(condition: Value) -> None:
            stay = builder.append_basic_block("stay")
            builder.cbranch(condition.raw, after, stay)
            builder.position_at_end(stay)

        yield leave
        builder.branch(body)
        builder.position_at_end(after)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """The body only where a condition, one for all lanes, holds."""
        with self.builder.if_then(condition.raw):
            yield

    @contextmanager
    def either(self, condition: Value) -> Iterator[Any]:
        """Two bodies, `with code.either(x) as (yes, no):`, of which one runs: `with yes: …`, `with no: …`."""
        with self.builder.if_else(condition.raw) as branches:
            yield branches

    def call(self, function: ir.Function, *arguments: Number) -> Value:
        """Call another function of the module; Python's numbers become what it takes."""
        raw = [
            a.raw if isinstance(a, Value) else ir.Constant(kind, a)
            for a, kind in zip(arguments, function.function_type.args, strict=True)
        ]
        return Value(self, self.builder.call(function, raw))


class Module:
    """Functions that become one piece of machine code."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.raw = ir.Module("tilewise")
        self.raw.triple = target.triple

    @contextmanager
    def function(
        self, name: str, takes: Sequence[ir.Type], exported: bool = False, gives: ir.Type | None = None
    ) -> Iterator[Code]:
        """Write a function: it returns nothing, or a number of kind `gives`: what `code.result` is at its end. Only an exported
        one can be called from outside."""
        function = ir.Function(self.raw, ir.FunctionType(gives or ir.VoidType(), list(takes)), name)
        function.linkage = "external" if exported else "internal"
        function.attributes.add("nounwind")
        function.attributes.add("noinline")
        code = Code(self, function)
        yield code
        if code.result is None:
            code.builder.ret_void()
        else:
            code.builder.ret(code.result.raw)

    def declare(self, name: str, takes: ir.FunctionType) -> ir.Function:
        """A function that LLVM knows."""
        return self.raw.globals.get(name) or ir.Function(self.raw, takes, name)

    def find(self, name: str) -> ir.Function | None:
        """A function that has been written, by name: pieces that several need are written once."""
        return self.raw.globals.get(name)


def _letter(kind: ir.Type) -> str:
    if isinstance(kind, ir.IntType):
        return f"i{kind.width}"
    return "f16" if kind == F16 else "f32"
