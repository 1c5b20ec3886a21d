"""PTX that Gluon has no words for, each with the reason why. Numbers of named barriers up to 4 belong to Triton's own
partitions; see `channel`."""

# Kernels are in Gluon's language, not Python's:
# pyright: reportAttributeAccessIssue=false, reportInvalidTypeForm=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _signal(threads):
    return f"bar.arrive $1, {threads}; mov.u32 $0, 0;"


@gluon.constexpr_function
def _meet(threads):
    return f"bar.sync $1, {threads}; mov.u32 $0, 0;"


@gluon.jit
def signal(barrier, THREADS: gl.constexpr):
    """Arrive at a named barrier of THREADS threads and go on. Gluon's own arrival at an mbarrier makes a warpgroup wait for
    itself first; a named barrier takes each thread as it comes."""
    gl.inline_asm_elementwise(_signal(THREADS), "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def meet(barrier, THREADS: gl.constexpr):
    """Arrive at a named barrier of THREADS threads and wait for the others: the other end of `signal`."""
    gl.inline_asm_elementwise(_meet(THREADS), "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1)


# ---- flags: one register of a warp, set by tensors and read by `if`. Gluon makes a number of a tensor only by a reduction over
# all warps, through shared memory; what a warp decides for itself needs a vote and a register that outlives the operation.


@gluon.constexpr_function
def _declare(name):
    return f".reg .b32 flag_{name};\nmov.u32 $0, 0;"


@gluon.constexpr_function
def _lower(name):
    return f"mov.u32 flag_{name}, 0;\nmov.u32 $0, 0;"


@gluon.constexpr_function
def _read(name):
    return f"mov.u32 $0, flag_{name};"


@gluon.constexpr_function
def _above(count, first, exponent, unordered):
    """PTX that sets p where any of `count` operands from `first` on is above 2^exponent; NaN counts if `unordered`."""
    text, compare = f"0f{(127 + exponent) << 23:08X}", "geu" if unordered else "gt"
    lines = [f"setp.{compare}.f32 p, ${first}, {text};"]
    return "\n".join([*lines, *[f"setp.{compare}.or.f32 p, ${first + at}, {text}, p;" for at in range(1, count)]])


@gluon.constexpr_function
def _results(count, name):
    return "\n".join(f"mov.b32 ${at}, flag_{name};" for at in range(count))


@gluon.constexpr_function
def _vote(name, count, exponent):
    vote = f"vote.sync.any.pred q, p, 0xffffffff;\nselp.b32 flag_{name}, 1, 0, q;"
    return f"{{\n.reg .pred p, q;\n{_above(count, count, exponent, False)}\n{vote}\n{_results(count, name)}\n}}"


@gluon.constexpr_function
def _note(name, count, exponent):
    keep = f"@p mov.u32 flag_{name}, 1;"
    return f"{{\n.reg .pred p;\n{_above(count, count, exponent, True)}\n{keep}\n{_results(count, name)}\n}}"


@gluon.constexpr_function
def _agree(name, threads):
    read = f"setp.ne.u32 p, flag_{name}, 0;" if name is not None else "setp.ne.u32 p, 0, 0;"
    return f"{{\n.reg .pred p, q;\n{read}\nbar.red.or.pred q, $1, {threads}, p;\nselp.b32 $0, 1, 0, q;\n}}"


@gluon.constexpr_function
def _operands(count):
    return ",".join(["=r"] * count + ["f"] * count)


@gluon.jit
def declare_flag(NAME: gl.constexpr):
    """A flag of a name that no other partition has. Where a kernel begins, for the assembler reads from top to bottom, and the
    compiler puts partitions in any order."""
    gl.inline_asm_elementwise(_declare(NAME), "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def lower_flag(NAME: gl.constexpr):
    """Put a thread's flag down."""
    gl.inline_asm_elementwise(_lower(NAME), "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def flag(NAME: gl.constexpr):
    """Whether a flag is up: 0 or 1, the same in all lanes of a warp if `vote` has set it."""
    return gl.inline_asm_elementwise(_read(NAME), "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def vote(x, EXPONENT: gl.constexpr, NAME: gl.constexpr, COUNT: gl.constexpr):
    """Put a flag up or down in a warp: whether any number that its lanes hold of `x` is greater than 2^EXPONENT. COUNT divides
    what a thread holds of x; the last COUNT decide, so let it be all."""
    gl.inline_asm_elementwise(_vote(NAME, COUNT, EXPONENT), _operands(COUNT), [x], dtype=gl.int32, is_pure=False, pack=COUNT)


@gluon.jit
def note(x, EXPONENT: gl.constexpr, NAME: gl.constexpr, COUNT: gl.constexpr):
    """Put a thread's flag up, for good, if any number that it holds of `x` is not below 2^EXPONENT. NaN is not."""
    gl.inline_asm_elementwise(_note(NAME, COUNT, EXPONENT), _operands(COUNT), [x], dtype=gl.int32, is_pure=False, pack=COUNT)


@gluon.jit
def agree(NAME: gl.constexpr, barrier, THREADS: gl.constexpr):
    """Whether the flag of any of THREADS threads is up, once all of them have come here; NAME None: of a partition that has
    none. A named barrier carries the answer without shared memory."""
    return gl.inline_asm_elementwise(_agree(NAME, THREADS), "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1)


# ---- counters in memory, by which programs keep an order. Only one warp waits or counts, and Gluon's atomics are for whole
# warpgroups


_AWAIT = gl.constexpr("""{
.reg .pred p;
.reg .u32 v;
AGAIN:
ld.acquire.gpu.global.u32 v, [$1];
setp.lt.u32 p, v, $2;
@p bra AGAIN;
mov.u32 $0, 0;
}""")

_COUNT_UP = gl.constexpr("""{
.reg .pred p;
elect.sync _|p, 0xffffffff;
@p red.release.gpu.global.add.u32 [$1], 1;
mov.u32 $0, 0;
}""")


_SETTLE = gl.constexpr("cp.async.bulk.wait_group 0;\nbar.warp.sync 0xffffffff;\nmov.u32 $0, 0;")


@gluon.jit
def await_count(counter, least):
    """Wait until a counter in memory has come to `least`."""
    gl.inline_asm_elementwise(_AWAIT, "=r,l,r", [counter, least], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def count_up(counter):
    """Count up; whoever awaits that finds what was in memory before."""
    gl.inline_asm_elementwise(_COUNT_UP, "=r,l", [counter], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def settle():
    """Wait until all tiles that this warp has let the copy engine take away are in memory. Gluon's own wait ends when they have
    been read."""
    gl.inline_asm_elementwise(_SETTLE, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def anew():
    """0, which the compiler cannot know: what is made of it is made where it is written, and not kept in registers from before
    a loop on."""
    return gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


_ALIKE = gl.constexpr("shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;")


@gluon.jit
def alike(x):
    """x, which all lanes of a warp agree on. That tells the assembler, too: what is made of it may be kept once a warp."""
    return gl.inline_asm_elementwise(_ALIKE, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def rounded(x, DTYPE: gl.constexpr):
    """x in a half type, two at a time. Gluon's own conversion is free to swap the halves of a register, and between loops has
    them swapped back before every product."""
    if gl.bfloat16 == DTYPE:
        y = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2)
    else:
        y = gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.float16, is_pure=True, pack=2)
    return y
