"""The pieces of the forward fold, under the reference's names. Logits live in base 2: a tile x stands for s = x·unit·ln 2,
where `unit` saves a plain scaled product its multiplication.

`C` is the `Variant` that a kernel is compiled for. Tuples gather what belongs together:

    score      (scale, softcap, slope, far)                    far: position of the first query less that of the first key
    mask       (first, past, row_b, left, right, visits, visits_b)
    axes       (n, s, h, group, span)
    rows       (i, first, past)                                indices of query rows, and what each sees

The state of a block of rows is (m, l, acc): the reference of its weights in base 2, −inf until a row has seen something; WIDTH
sums of weights a row, each over a thread's own columns; and the sum of weighted values."""

# Kernels are in Gluon's language, not Python's:
# pyright: reportAttributeAccessIssue=false, reportInvalidTypeForm=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .inline import rounded
from .layouts import beside, folded, halves, joined, of_columns, of_operand, of_rows

kernel = gluon.jit(
    do_not_specialize=(
        "left right row_b visits_b scale softcap alibi_b far v_b v_head v_row n s h group span tiles "
        "seen_b seen_row seen_head seen_lse_b seen_lse_head seen_lse_row"
    ).split(),
    do_not_specialize_on_alignment=(
        "lse_ptr seen_lse_ptr v_ptr first_ptr past_ptr visits_ptr alibi_ptr sink_ptr roster_ptr"
    ).split(),
)
"""What makes a kernel of a function. No number is specialised on, so that a new length needs no new compilation, nor is the
alignment of arrays that others made."""

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)

HIGHS = gl.constexpr(8)
"""Maxima a row that are looked at before any is compared with another lane's: two of each of four lanes."""


@gluon.jit
def logits(qk, start, rows, score, COLUMNS: gl.constexpr, C: gl.constexpr):
    """x from q·k of COLUMNS keys from `start` on. PLAIN: nothing is added or capped and the scale is positive, so x is q·k
    itself."""
    scale, softcap, slope, far = score
    if not C.PLAIN:
        x = qk * scale
        if C.ALIBI:
            i, j = beside(rows[0] + far - start, qk), gl.arange(0, COLUMNS, of_columns(COLUMNS))[None, :]
            x -= slope * gl.abs((i - j).to(gl.float32))
        if C.CAPPED:
            x = softcap * tanh(x / softcap)
        qk = x * LOG2_E
    return qk


@gluon.jit
def tanh(x):
    """1 − 2 / (e^2x + 1): off by no more than one rounding of 1, which is what a logit takes after its cap."""
    return 1 - 2 / (gl.exp2(x * (2 * LOG2_E)) + 1)


@gluon.jit
def unit_of(score, C: gl.constexpr):
    """What x is multiplied by before `exp2`."""
    if C.PLAIN:
        unit = score[0] * LOG2_E
    else:
        unit = score[0] * 0 + 1
    return unit


@gluon.jit
def hide(x, start, rows, COLUMNS: gl.constexpr, C: gl.constexpr):
    """−inf where a pair is hidden, of COLUMNS keys from `start` on. Bits 1 and 2 of a column are the lane's, the others are
    known to the compiler: kept apart, they make comparisons with constants."""
    j = gl.arange(0, COLUMNS, of_columns(COLUMNS))[None, :]
    keep = (j & ~6) < beside(rows[2] - start, x) - (j & 6)
    if C.LATE:
        keep &= (j & ~6) >= beside(rows[1] - start, x) - (j & 6)
    return gl.where(keep, x, float("-inf"))


@gluon.jit
def pivot(m):
    """What to subtract before `exp2`: m, or 0 where the row has seen nothing."""
    return gl.where(m == float("-inf"), 0.0, m)


@gluon.jit
def highest(x, C: gl.constexpr):
    """The largest of a thread's own columns, HIGHS a row."""
    return gl.max(folded(x, C.BLOCK_N, HIGHS), 1)


@gluon.jit
def rowmax(highs, C: gl.constexpr):
    """The largest of each row, from `highest`."""
    return gl.convert_layout(gl.max(highs, 1), of_rows(C.BLOCK_N))


@gluon.jit
def sums(p, COLUMNS: gl.constexpr, C: gl.constexpr):
    """Sums over a thread's own columns, WIDTH a row."""
    return gl.sum(folded(p, COLUMNS, C.WIDTH), 1)


@gluon.jit
def weights(x, l, base, unit, COLUMNS: gl.constexpr, DTYPE: gl.constexpr, C: gl.constexpr):
    """The weights of a tile, rounded, and l with them; in chunks of columns, one after the other."""
    if COLUMNS == C.CHUNK:
        p = gl.exp2(x * unit - beside(base, x))
        l += gl.convert_layout(sums(p, COLUMNS, C), l.type.layout, assert_trivial=True)
        p = rounded(p, DTYPE)
    else:
        left, right = halves(x, COLUMNS)
        left, l = weights(left, l, base, unit, COLUMNS // 2, DTYPE, C)
        right, l = weights(right, l, base, unit, COLUMNS // 2, DTYPE, C)
        p = joined(left, right, COLUMNS)
    return p, l


@gluon.jit
def total(l, C: gl.constexpr):
    """The sum of weights of each row."""
    return gl.convert_layout(gl.sum(l, 1), of_rows(C.BLOCK_N))


@gluon.jit
def as_operand(p, C: gl.constexpr):
    """Weights as the left operand of their product with v."""
    return gl.convert_layout(p, of_operand(C.E), assert_trivial=True)


@gluon.jit
def scaled(acc, factor):
    """Each row times its own factor."""
    return acc * beside(factor, acc)


@gluon.jit
def finish(m, l, acc, sink, C: gl.constexpr):
    """o = acc / l and lse = m + log l, with one more logit that has no value where there is a sink; 0 and −inf where a row saw
    nothing."""
    if C.SINK:
        new = gl.maximum(m, sink * LOG2_E)
        alpha = gl.exp2(m - pivot(new))
        l, acc, m = l * alpha + gl.exp2(sink * LOG2_E - pivot(new)), scaled(acc, alpha), new
    safe = gl.where(l == 0, 1.0, l)
    return scaled(acc, 1 / safe), gl.where(l == 0, float("-inf"), (m + gl.log2(safe)) * LN_2)


@gluon.jit
def shares(lse, other):
    """L = log(exp(lse) + exp(other)), and the shares exp(lse − L) and exp(other − L) of two partial results: 0 of what has seen
    nothing."""
    base = pivot(gl.maximum(lse, other))
    mine, theirs = gl.exp2((lse - base) * LOG2_E), gl.exp2((other - base) * LOG2_E)
    both = mine + theirs
    safe = gl.where(both == 0, 1.0, both)
    return gl.where(both == 0, float("-inf"), base + gl.log2(safe) * LN_2), mine / safe, theirs / safe
