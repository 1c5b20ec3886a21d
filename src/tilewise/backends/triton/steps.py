"""The pieces that every kernel is made of, under the reference's names. Logits live in base 2 here and nowhere else: a tile x
stands for s = x·unit / C.LOG, where LOG = log₂ e and `unit` saves a plain scaled product its multiplication. (In float64 the
base is e and LOG is 1: there a product with log₂ e would round more than the rest.)

`C` is the `Variant` that a kernel is compiled for. i and j are row and column indices of a tile, shaped to broadcast, so that
one piece serves a tile and its transpose. Columns of a tensor are cut into one or two slabs of a power of two each (0: none):
head sizes between powers of two cost what they are. Tuples gather what belongs together:

    score      (scale, softcap, bias, slope)                   bias = (pointer, row stride, column stride),
                                                               or (descriptor, batch entry, head)
    positions  (of query rows, of key rows, sequence)          pointers, or where LINES the first ones; for slopes, dropout
    drop       (seed, threshold, factor, head)
    mask       (first, past, left, right, table)               table = (pointer, row stride, column stride)
    visits     (lo, full_lo, full_hi, hi, order)               see `tile_of`

All pointers are already at one batch entry and head (`options_at`)."""

# Kernels are in Triton's language, not Python's:
# pyright: reportAttributeAccessIssue=false, reportInvalidTypeForm=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from .walk import hide, interval, lists_at, visits_of_rows

kernel = triton.jit(
    do_not_specialize="threshold bias_b bias_h bias_n bias_s alibi_b i_b j_b row_b left right table_b table_h table_n table_s"
    " list_b list_h width n s h b group padded heads terms share".split(),
    do_not_specialize_on_alignment="bias_ptr alibi_ptr sink_ptr seed_ptr i_ptr j_ptr r_ptr first_ptr past_ptr table_ptr"
    " order_ptr count_ptr lse_ptr dlse_ptr".split(),
)
"""What makes a kernel of a function. No number is specialised on, so that a new length needs no new compilation, nor is the
alignment of arrays that others made."""

LOOK = tl.constexpr(64)
"""Blocks whose notes are looked at together."""


# ---- rows: a tensor "b rows heads columns" is seen as "b heads rows columns" by its descriptors, one a slab


@triton.jit
def load(slabs, b, head, row, ROWS: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr):
    """ROWS rows of one head from `row` on; 0 past the tensor's end."""
    first = slabs[0].load([b, head, row, 0]).reshape(ROWS, C0)
    if C1 > 0:
        second = slabs[1].load([b, head, row, C0]).reshape(ROWS, C1)
    else:
        second = first
    return first, second


@triton.jit
def store(ptr, x, offset, inside, SIZE: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr):
    """Rows of a contiguous tensor with SIZE columns; `offset` is where each row starts."""
    c0 = tl.arange(0, C0)
    tl.store(ptr + offset[:, None] + c0, x[0].to(ptr.dtype.element_ty), mask=inside[:, None] & (c0 < SIZE))
    if C1 > 0:
        c1 = C0 + tl.arange(0, C1)
        tl.store(ptr + offset[:, None] + c1, x[1].to(ptr.dtype.element_ty), mask=inside[:, None] & (c1 < SIZE))


@triton.jit
def zeros(ROWS: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr, ACC: tl.constexpr):
    """A sum of rows that has nothing in it yet."""
    first = tl.zeros([ROWS, C0], ACC)
    if C1 > 0:
        second = tl.zeros([ROWS, C1], ACC)
    else:
        second = tl.zeros([1, 1], ACC)
    return first, second


@triton.jit
def scaled(acc, factor, C1: tl.constexpr):
    """Each row times its own factor."""
    first = acc[0] * factor[:, None]
    if C1 > 0:
        second = acc[1] * factor[:, None]
    else:
        second = acc[1]
    return first, second


@triton.jit
def product(a, b, C1: tl.constexpr, C: tl.constexpr):
    """a·bᵀ: q·kᵀ, do·vᵀ and their transposes."""
    x = tl.dot(operand(a[0], C), operand(b[0], C).T, input_precision=C.PRECISION, out_dtype=C.ACC)
    if C1 > 0:
        x = tl.dot(operand(a[1], C), operand(b[1], C).T, x, input_precision=C.PRECISION, out_dtype=C.ACC)
    return x


@triton.jit
def operand(x, C: tl.constexpr):
    """What a product multiplies: x, but for the interpreter, which cannot multiply bf16."""
    if C.WIDEN:
        x = x.to(tl.float32)
    return x


@triton.jit
def weigh(w, x, acc, seen, C1: tl.constexpr, C: tl.constexpr):
    """acc + w·x over the pairs that are seen."""
    first = _weigh(w, x[0], acc[0], seen, C)
    if C1 > 0:
        second = _weigh(w, x[1], acc[1], seen, C)
    else:
        second = acc[1]
    return first, second


@triton.jit
def _weigh(w, x, acc, seen, C: tl.constexpr):
    """A product multiplies, and 0·NaN is NaN: so a CAREFUL kernel takes what is not finite out of x and finds, by products of
    indicators, to which entries a seen pair brings an infinity or a NaN."""
    if C.CAREFUL:
        y = operand(x, C)
        up, down, nan = y == float("inf"), y == float("-inf"), y != y
        plus = (_meet(seen & (w > 0), up) + _meet(seen & (w < 0), down)) > 0
        minus = (_meet(seen & (w > 0), down) + _meet(seen & (w < 0), up)) > 0
        neither = (_meet(seen, nan) + _meet(seen & ((w == 0) | (w != w)), up | down)) > 0
        extra = tl.where(plus, float("inf"), tl.where(minus, float("-inf"), 0.0))
        extra = tl.where(neither | (plus & minus), float("nan"), extra)
        x = tl.where(up | down | nan, 0.0, x).to(x.dtype)
    acc = tl.dot(operand(w.to(x.dtype), C), operand(x, C), acc, input_precision=C.PRECISION, out_dtype=C.ACC)
    if C.CAREFUL:
        acc += extra.to(acc.dtype)
    return acc


@triton.jit
def _meet(pairs, entries):
    """How many pairs of each row hold an entry."""
    return tl.dot(pairs.to(tl.float16), entries.to(tl.float16))


@triton.jit
def broken(acc, C1: tl.constexpr):
    """Whether a sum holds anything that is not finite."""
    bad = tl.max(((acc[0] - acc[0]) != 0).to(tl.int32))
    if C1 > 0:
        bad = tl.maximum(bad, tl.max(((acc[1] - acc[1]) != 0).to(tl.int32)))
    return bad > 0


@triton.jit
def note(broken_ptr, at, block, length, bad, OWN: tl.constexpr):
    """Mark whether the sums of a block, OWN of `length` rows of head `at`, are broken: a CAREFUL kernel finds it `noted`."""
    tl.store(broken_ptr + at * tl.cdiv(length, OWN) + block, bad)


@triton.jit
def some_noted(broken_ptr, first, notes):
    """Whether any was marked of LOOK blocks, of `notes`, from `first` on; neighbours are other programs'."""
    i = first + tl.arange(0, LOOK) * tl.num_programs(0)
    return tl.max(tl.load(broken_ptr + i, mask=i < notes, other=0).to(tl.int32)) != 0


@triton.jit
def noted(broken_ptr, first, one, notes, length, OWN: tl.constexpr, C: tl.constexpr):
    """(head, block, whether it was marked) of the one-th block of OWN rows in those LOOK of C.NOTED."""
    PARTS: tl.constexpr = C.NOTED // OWN
    place, each = tl.num_programs(0) * (one // PARTS) + first, tl.cdiv(length, C.NOTED)  # the interpreter wants tensors first
    block = place % each * PARTS + one - one // PARTS * PARTS
    mark = tl.load(broken_ptr + place, mask=place < notes, other=0)
    return place // each, block, (mark != 0) & (block * OWN < length)


# ---- the state m, l, acc of a block of rows


@triton.jit
def absorb(m, l, x, unit, C: tl.constexpr):
    """m and l after a tile of logits, the tile's weights p, and what earlier sums shrink by."""
    new = tl.maximum(m, tl.max(x, 1) * unit)
    alpha = power(m - pivot(new), C)
    p = power(x * unit - pivot(new)[:, None], C)
    return new, l * alpha + tl.sum(p, 1), p, alpha


@triton.jit
def absorb_sink(m, l, acc, sink, C: tl.constexpr):
    """The state after one more logit that has no value."""
    new = tl.maximum(m, sink * C.LOG)
    alpha = power(m - pivot(new), C)
    return new, l * alpha + power(sink * C.LOG - pivot(new), C), scaled(acc, alpha, C.E1)


@triton.jit
def finish(m, l, acc, C: tl.constexpr):
    """o = acc / l and lse = m + log l; 0 and -inf where a row saw nothing."""
    nothing = l == 0
    safe = tl.where(nothing, 1.0, l)
    return scaled(acc, 1 / safe, C.E1), tl.where(nothing, float("-inf"), m / C.LOG + tl.log(safe))


@triton.jit
def power(x, C: tl.constexpr):
    """exp of what `unit` has brought to the base: 2^x, or e^x in float64."""
    if tl.float64 == C.ACC:
        y = tl.exp(x)
    else:
        y = tl.exp2(x)
    return y


@triton.jit
def pivot(m):
    """What to subtract before `power`: m, or 0 where the row has seen nothing."""
    return tl.where(m == float("-inf"), 0.0, m)


# ---- logits


@triton.jit
def logits(qk, score, positions, at, i, j, n, s, C: tl.constexpr):
    """x from q·k, of the tile that starts at row and column `at`. PLAIN: nothing is added or capped and the scale is positive,
    so x is q·k itself."""
    scale, softcap, bias, slope = score
    if C.PLAIN:
        x = qk
    else:
        x = qk * scale
        if C.BIAS == "TILES":
            tile = bias[0].load([bias[1], bias[2], at[0], at[1]]).reshape(C.BLOCK_M, C.BLOCK_N)
            if i.shape[0] == 1:  # a tile that lies on its side
                x += tile.T.to(C.ACC)
            else:
                x += tile.to(C.ACC)
        elif C.BIAS == "POINTS":
            x += tl.load(bias[0] + i * bias[1] + j * bias[2], mask=(i < n) & (j < s), other=0.0).to(C.ACC)
        if C.ALIBI:
            x -= slope * distance(positions, i, j, n, s, C).to(C.ACC)
        if C.CAPPED:
            x = softcap * tanh(x / softcap)
        x *= C.LOG
    return x


@triton.jit
def unit_of(score, C: tl.constexpr):
    """What x is multiplied by before `power`."""
    if C.PLAIN:
        unit = score[0] * C.LOG
    else:
        unit = tl.full([], 1.0, C.ACC)
    return unit


@triton.jit
def through_cap(ds, x, score, C: tl.constexpr):
    """ds by the logit before the cap: times 1 − (s / softcap)²."""
    if C.CAPPED:
        t = x / (score[1] * C.LOG)
        ds *= 1 - t * t
    return ds


@triton.jit
def tanh(x):
    """tanh, right to the last bits also near 0, where 1 − 2 / (exp(2x) + 1) cancels. Source: Cephes, tanh."""
    z = x * x
    p = (z * -9.64399179425052238628e-1 - 9.92877231001918586564e1) * z - 1.61468768441708447952e3
    q = ((z + 1.12811678491632931402e2) * z + 2.23548839060100448583e3) * z + 4.84406305325125486048e3
    return tl.where(tl.abs(x) < 0.625, x + x * z * (p / q), 1 - 2 / (tl.exp(x * 2) + 1))


@triton.jit
def distance(positions, i, j, n, s, C: tl.constexpr):
    """|i − j| in positions."""
    row, col = places(positions, i, j, n, s, C)
    return tl.abs(row - col)


@triton.jit
def places(positions, i, j, n, s, C: tl.constexpr):
    """Positions of rows i and columns j."""
    if C.LINES:
        row, col = i + positions[0], j + positions[1]
    else:
        row, col = tl.load(positions[0] + i, mask=i < n, other=0), tl.load(positions[1] + j, mask=j < s, other=0)
    return row, col


@triton.jit
def kept(drop, positions, at, i, j, n, s, C: tl.constexpr):
    """Which pairs of the tile at `at` survive dropout: `dropout.Dropout.keep`. Where LINES one evaluation of Philox serves four
    keys, else one."""
    seed_ptr, threshold, _, head = drop
    seed, head = tl.load(seed_ptr), (head + tl.load(seed_ptr + 1)).to(tl.uint32)
    if C.LINES:
        row = (at[0] + positions[0] + tl.arange(0, C.BLOCK_M))[:, None].to(tl.uint32)
        quad = ((at[1] + positions[1]) // 4 + tl.arange(0, C.BLOCK_N // 4))[None, :].to(tl.uint32)
        w0, w1, w2, w3 = tl.philox(seed, quad, row, head, positions[2].to(tl.uint32))
        first = tl.join((w0 >= threshold).to(tl.int8), (w2 >= threshold).to(tl.int8))
        second = tl.join((w1 >= threshold).to(tl.int8), (w3 >= threshold).to(tl.int8))
        keep = tl.join(first, second).reshape(C.BLOCK_M, C.BLOCK_N) != 0
        if i.shape[0] == 1:  # a tile that lies on its side
            keep = keep.T
    else:
        row, col = places(positions, i, j, n, s, C)
        sequence = tl.load(positions[2] + i, mask=i < n, other=0)
        quad, lane = (col >> 2).to(tl.uint32), col & 3
        w0, w1, w2, w3 = tl.philox(seed, quad, row.to(tl.uint32), head, sequence.to(tl.uint32))
        keep = tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3)) >= threshold
    return keep


# ---- backward


@triton.jit
def recompute(qk, dp, stats, at, i, j, first, past, options, n, s, C: tl.constexpr, FULL: tl.constexpr):
    """Of the tile at `at`: the weights p after dropout, ds by scale·q·k + extra, and which pairs are seen. `stats` = (lse in
    the base, delta − dlse), shaped as i.

    ds = p∘(dp − delta + dlse), where dp = do·vᵀ has passed dropout; then through the cap
    """
    score, positions, drop, mask = options
    x = logits(qk, score, positions, at, i, j, n, s, C)
    if not FULL:
        x = hide(x, mask, first, past, i, j, n, s, C)
    p = power(x * unit_of(score, C) - stats[0], C)
    weights = p
    if C.DROPOUT:
        keep = kept(drop, positions, at, i, j, n, s, C)
        weights, dp = tl.where(keep, p * drop[2], 0.0), tl.where(keep, dp * drop[2], 0.0)
    ds = through_cap(p * (dp - stats[1]), x, score, C)
    seen = x != float("-inf")
    if C.BIAS is not None or not FULL:
        ds = tl.where(seen, ds, 0.0)
    if C.CAREFUL:  # a row whose lse is NaN has weights of NaN everywhere
        weights = tl.where(seen, weights, 0.0)
    return weights, ds, seen


@triton.jit
def load_stats(stats_ptr, at, rows, padded, heads):
    """lse in the base and total = delta − dlse of rows of head `at` of `heads`, as `delta_kernel` has prepared them."""
    line = stats_ptr + at.to(tl.int64) * padded
    return tl.load(line + rows), tl.load(line + heads.to(tl.int64) * padded + rows)


# ---- what a kernel is given, at one batch entry and query head


@triton.jit
def options_at(b, head, given, C: tl.constexpr):
    """(score, positions, drop, mask); 0 stands for what there is not."""
    (
        scale, softcap, bias, bias_b, bias_h, bias_n, bias_s, slope, alibi_b, seed, threshold, factor,
        i_ptr, j_ptr, r_ptr, i_b, j_b, first, past, row_b, left, right, table, table_b, table_h, table_n, table_s,
    ) = given  # fmt: skip
    if C.BIAS == "TILES":
        bias = (bias, (b * bias_b).to(tl.int32), (head * bias_h).to(tl.int32))
    elif C.BIAS == "POINTS":
        bias = (bias + b * bias_b + head * bias_h, bias_n, bias_s)
    else:
        bias = 0
    if C.ALIBI:
        slope = tl.load(slope + b * alibi_b + head).to(C.ACC)
    else:
        slope = 0
    if C.LINES:
        positions = (i_b.to(tl.int32), j_b.to(tl.int32), b)
    elif C.ALIBI or C.DROPOUT:
        positions = (i_ptr + b * i_b, j_ptr + b * j_b, r_ptr + b * i_b)
    else:
        positions = 0
    if not C.DROPOUT:
        seed = 0
    if C.MASK == "NONE" or C.BAND:
        first, past = 0, 0
    else:
        first, past = first + b * row_b, past + b * row_b
    if C.MASK == "TABLE":
        table += b * table_b + head * table_h
    else:
        table = 0
    score = (tl.full([], scale, C.ACC), tl.full([], softcap, C.ACC), bias, slope)
    drop = (seed, threshold, tl.full([], factor, C.ACC), head)
    return score, positions, drop, (first, past, left, right, (table, table_n, table_s))


@triton.jit
def block_of_rows(at, block, given, lists, sizes, C: tl.constexpr):
    """What a program that owns a block of query rows starts from: batch entry and head, options, the rows' indices, (i, first,
    past) shaped as i and where the block starts, and the key tiles to visit."""
    n, s, h, _ = sizes
    b, head = at // h, at % h
    options = options_at(b, head, given, C)
    rows = block * C.BLOCK_M + tl.arange(0, C.BLOCK_M)
    first, past = interval(options[3], rows, n, s, C)
    visits = visits_of_rows(options[3], lists_at(b, head, block, lists, C, True), first, past, rows, n, s, C)
    return b, head, options, rows, (rows[:, None], first[:, None], past[:, None], block * C.BLOCK_M), visits
