"""The gradients, from (o, lse) alone: s and p are recomputed tile by tile. A program owns a block of dq, or of dk and dv, and
adds up all that belongs to it in one order, so every run gives the same bits."""

# Kernels are in Triton's language, not Python's:
# pyright: reportAttributeAccessIssue=false, reportInvalidTypeForm=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...problem import NAMES, Inputs, Partial, Problem
from ..made import made_of
from ..reads import blocks, readable
from ..tape import Tape, repeat
from .call import Call
from .config import Config
from .dbias import bias_gradient
from .launch import launch, rows
from .sizes import Launch
from .steps import (
    LOOK,
    block_of_rows,
    broken,
    distance,
    kernel,
    load,
    load_stats,
    note,
    noted,
    options_at,
    product,
    recompute,
    scaled,
    some_noted,
    store,
    weigh,
    zeros,
)
from .walk import count_of, interval, lists_at, tile_of, visits_of_cols, widened

ROWS = 128
"""Query rows that the largest block has; blocks of every size divide it."""


def backward(
    problem: Problem, x: Inputs[Tensor], saved: Partial, grads: Partial, config: Config, needs: Sequence[str]
) -> Inputs[Tensor]:
    """Gradients of Σ do∘o + Σ dlse∘lse for the inputs named in `needs`; others are not read.

    dv = pᵀ·do    dp = do·vᵀ    ds = p∘(dp − delta + dlse)    dq = scale·ds·k    dk = scale·dsᵀ·q    delta = rowsum(do∘o)
    """
    p = problem
    if p.b == 0 or p.n == 0 or p.s == 0:
        return nothing(p, x, grads, needs)
    lse, dlse = saved.lse.contiguous(), None if grads.lse is None else grads.lse.contiguous()
    given = dict(zip(NAMES[:5], (x.q, x.k, x.v, x.bias, x.alibi), strict=True))
    given |= {"o": saved.o, "do": grads.o, "lse": lse, "dlse": dlse}
    for_rows, for_keys, slopes = "q" in needs or "alibi" in needs, "k" in needs or "v" in needs, "alibi" in needs

    def record(tape: Tape) -> None:
        call, do = Call.of(p, x, config), readable(grads.o)
        stats = prepare(call, readable(saved.o), do, (lse, dlse), tape)
        if for_rows:
            dq(call, do, stats, slopes, tape)
        if for_keys:
            dk_dv(call, do, stats, tape)

    found = repeat(config.known, ("backward", for_rows, for_keys, slopes), given, record)
    stats, grad = found["stats"], {"q": found.get("dq"), "k": found.get("dk"), "v": found.get("dv")}
    if slopes:
        grad["alibi"] = _reduced(found["dslope"].sum(-1), x.alibi)
    if "bias" in needs:
        grad["bias"] = bias_gradient(Call.of(p, x, config), readable(grads.o), stats)
    if "sink" in needs and x.sink is not None:
        grad["sink"] = sink_gradient(x.sink, lse, stats)
    return Inputs(*[grad[name] if name in needs else getattr(x, name) for name in NAMES])  # type: ignore[arg-type]


def nothing(problem: Problem, x: Inputs[Tensor], grads: Partial, needs: Sequence[str]) -> Inputs[Tensor]:
    """The gradients where there is no pair at all: some axis has no entry."""
    found = {name: _nothing(problem, x, name) for name in needs}
    if "sink" in needs and x.sink is not None and grads.lse is not None:
        total = grads.lse.sum((0, 2)).to(x.sink.dtype)  # lse is the sink itself
        found["sink"] = total.masked_fill(x.sink == -torch.inf, 0)
    return replace(x, **found)


def sink_gradient(sink: Tensor, lse: Tensor, stats: Tensor) -> Tensor:
    """The gradient "h" of sinks: less what their probability takes from each row; `stats` as of `prepare`."""
    parts = torch.exp(sink.to(stats.dtype)[:, None] - lse) * stats[1, ..., : lse.shape[2]]
    return -torch.where(lse == -torch.inf, 0, parts).sum((0, 2)).to(sink.dtype)


def prepare(call: Call, o: Tensor, do: Tensor, lses: tuple[Tensor, Tensor | None], tape: Tape) -> Tensor:
    """(lse in the kernels' base, delta − dlse) "2 b h padded" of each row, padded to whole blocks of any size, from lse and
    dlse."""
    p, sizes, (lse, dlse) = call.problem, call.config.dq, lses
    padded = blocks(p.n, ROWS) * ROWS
    stats = tape.room("stats", (2, p.b, p.h, padded), lse.dtype, o)
    args = (*rows(o, sizes.block_m), *rows(do, sizes.block_m), lse, dlse, stats, p.n, p.h, padded, p.b * p.h)
    grid, kinds = p.b * p.h * padded // sizes.block_m, (o.dtype, dlse is None)
    launch(delta_kernel, grid, args, (call.variant(sizes, call.config.hides),), sizes, kinds, tape)
    return stats


def dq(call: Call, do: Tensor, stats: Tensor, slopes: bool, tape: Tape) -> Tensor:
    """dq "b n h d"; and if `slopes`, "dslope" "b h n" on the tape: each row's part of their gradient."""
    p, x, main, hides = call.problem, call.x, call.config.dq, call.config.hides
    out = tape.room("dq", (p.b, p.n, p.h, p.d), made_of(p, x.q), do)
    dslope = tape.room("dslope", (p.b, p.h, p.n), stats.dtype, do) if slopes else None
    notes = tape.room("rows' notes", (p.b * p.h * blocks(p.n, main.block_m),), torch.int8, do) if hides else None
    for one in call.passes(main, p.b * p.h, p.n, "M", again=hides):
        run_dq(call, one, do, stats, (out, dslope, notes), tape)
    return out


def run_dq(
    call: Call, one: tuple[Launch, int], do: Tensor, stats: Tensor, out: tuple[Tensor, Tensor | None, Tensor | None], tape: Tape
) -> None:  # fmt: skip
    """One launch of dq's kernel, of sizes and grid: dq, each row's part of the slopes' gradient if there is room for it, and
    notes."""
    sizes, grid = one
    slabs, (by_rows, _) = call.slabs(do, sizes), call.lists(sizes)
    tape.hold(*call.kept(by_rows))
    args = (*slabs, stats, stats.shape[3], *out, *call.options(sizes), *call.tail(by_rows), call.problem.b)
    kinds = (*call.kinds, out[1] is not None)
    launch(dq_kernel, grid, args, (call.variant(sizes, call.config.hides),), sizes, kinds, tape)


def dk_dv(call: Call, do: Tensor, stats: Tensor, tape: Tape) -> tuple[Tensor, Tensor]:
    """dk "b s g d" and dv "b s g e". Rows past the last one, which a block may end in, are hidden pairs for every mask."""
    p, x, main = call.problem, call.x, call.config.dk_dv
    dk, dv = (tape.room(name, (p.b, p.s, p.g, size), made_of(p, x.q), do) for name, size in (("dk", p.d), ("dv", p.e)))
    notes = tape.room("keys' notes", (p.b * p.g * blocks(p.s, main.block_n),), torch.int8, do)
    again = call.config.hides or p.n % main.block_m > 0
    for one in call.passes(main, p.b * p.g, p.s, "N", again):
        run_dk_dv(call, one, do, stats, (dk, dv, notes), tape)
    return dk, dv


def run_dk_dv(
    call: Call, one: tuple[Launch, int], do: Tensor, stats: Tensor, out: tuple[Tensor, Tensor, Tensor], tape: Tape
) -> None:  # fmt: skip
    """One launch of the kernel of dk and dv, of sizes and grid: dk, dv and notes."""
    sizes, grid = one
    slabs, (_, by_cols) = call.slabs(do, sizes), call.lists(sizes)
    tape.hold(*call.kept(by_cols))
    args = (*slabs, stats, stats.shape[3], *out, *call.options(sizes), *call.tail(by_cols), call.problem.b)
    launch(dk_dv_kernel, grid, args, (call.variant(sizes, hides=True),), sizes, call.kinds, tape)


def _nothing(problem: Problem, x: Inputs[Tensor], name: str) -> Tensor:
    """The gradient of an input by which nothing changes."""
    given = getattr(x, name)
    dtype = made_of(problem, given) if name in ("q", "k", "v") else given.dtype
    return torch.zeros(given.shape, dtype=dtype, device=given.device)


def _reduced(slopes: Tensor, like: Tensor) -> Tensor:
    """The gradient "b h" of slopes, summed to the shape they were given in."""
    whole = slopes if like.dim() == 2 and like.shape[0] == slopes.shape[0] else slopes.sum(0, keepdim=like.dim() == 2)
    return whole.to(like.dtype)


@kernel
def delta_kernel(
    o0, o1, do0, do1, lse_ptr, dlse_ptr, stats_ptr, n: tl.int32, h: tl.int32, padded: tl.int64, heads: tl.int32, C: tl.constexpr
):  # fmt: skip
    """What ds needs of each row: lse in the kernels' base, and delta − dlse with delta = rowsum(do∘o). A row that saw nothing,
    or lies past the end, gets an lse of +inf: its weights are 0 whatever its logits. Grid: b·h·padded / BLOCK_M."""
    blocks = padded // C.BLOCK_M
    block, at = (tl.program_id(0) % blocks).to(tl.int32), (tl.program_id(0) // blocks).to(tl.int32)
    b, head = at // h, at % h
    o = load((o0, o1), b, head, block * C.BLOCK_M, C.BLOCK_M, C.E0, C.E1)
    do = load((do0, do1), b, head, block * C.BLOCK_M, C.BLOCK_M, C.E0, C.E1)
    total = tl.sum(o[0].to(C.ACC) * do[0].to(C.ACC), 1)
    if C.E1 > 0:
        total += tl.sum(o[1].to(C.ACC) * do[1].to(C.ACC), 1)
    i = block * C.BLOCK_M + tl.arange(0, C.BLOCK_M)
    row = at.to(tl.int64) * n + i
    lse = tl.load(lse_ptr + row, mask=i < n, other=float("-inf"))
    if dlse_ptr is not None:
        total -= tl.load(dlse_ptr + row, mask=i < n, other=0.0)
    at = stats_ptr + at.to(tl.int64) * padded + i
    tl.store(at, tl.where(lse == float("-inf"), float("inf"), lse * C.LOG))
    tl.store(at + heads.to(tl.int64) * padded, total)


# ---- dq: over the keys that a block of query rows sees


@triton.jit
def sweep_keys(sums, own, rows, stats, keys, b, key_head, options, visits, n, s, C: tl.constexpr, FULL: tl.constexpr):
    """dq / scale, and each row's part of the slope's gradient, after all visited key tiles of one kind."""
    dq, dslope = sums
    q, do = own
    i, first, past, row = rows
    for t in tl.range(0, count_of(visits, FULL), num_stages=C.STAGES):
        col = tile_of(t, visits, C, FULL) * C.BLOCK_N
        j = (col + tl.arange(0, C.BLOCK_N))[None, :]
        k = load(keys[0], b, key_head, col, C.BLOCK_N, C.D0, C.D1)
        v = load(keys[1], b, key_head, col, C.BLOCK_N, C.E0, C.E1)
        qk, dp = product(q, k, C.D1, C), product(do, v, C.E1, C)
        _, ds, seen = recompute(qk, dp, stats, (row, col), i, j, first, past, options, n, s, C, FULL)
        dq = weigh(ds, k, dq, seen, C.D1, C)
        if C.ALIBI:
            dslope -= tl.sum(ds * distance(options[1], i, j, n, s, C).to(C.ACC), 1)
    return dq, dslope


@triton.jit
def dq_block(at, block, slabs, stats, out, given, lists, sizes, C: tl.constexpr):
    """dq of one block of query rows of one head."""
    n, s, h, group = sizes
    dq_ptr, dslope_ptr, broken_ptr = out
    b, head, options, i, rows, visits = block_of_rows(at, block, given, lists, sizes, C)
    line = at.to(tl.int64) * n
    lse, total = load_stats(stats[0], at, i, stats[1], stats[2])
    q = load(slabs[0], b, head, block * C.BLOCK_M, C.BLOCK_M, C.D0, C.D1)
    do = load(slabs[3], b, head, block * C.BLOCK_M, C.BLOCK_M, C.E0, C.E1)
    own, stats = (q, do), (lse[:, None], total[:, None])
    keys, key_head = (slabs[1], slabs[2]), head // group
    sums = (zeros(C.BLOCK_M, C.D0, C.D1, C.ACC), tl.zeros([C.BLOCK_M], C.ACC))
    if C.APART:
        sums = sweep_keys(sums, own, rows, stats, keys, b, key_head, options, visits, n, s, C, True)
    else:
        visits = widened(visits)
    dq, dslope = sweep_keys(sums, own, rows, stats, keys, b, key_head, options, visits, n, s, C, False)
    if C.HIDES and not C.CAREFUL:
        note(broken_ptr, at, block, n, broken(dq, C.D1), C.BLOCK_M)
    if dslope_ptr is not None:
        tl.store(dslope_ptr + line + i, dslope, mask=i < n)
    dq = scaled(dq, tl.full([C.BLOCK_M], given[0], C.ACC), C.D1)
    store(dq_ptr, dq, ((b.to(tl.int64) * n + i) * h + head) * C.D, i < n, C.D, C.D0, C.D1)


@kernel
def dq_kernel(
    q0, q1, k0, k1, v0, v1, do0, do1, stats_ptr, padded: tl.int64, dq_ptr, dslope_ptr, broken_ptr,
    scale: tl.float64, softcap: tl.float64, bias_ptr, bias_b: tl.int64, bias_h: tl.int64, bias_n: tl.int64, bias_s: tl.int64,
    alibi_ptr, alibi_b: tl.int64, seed_ptr, threshold: tl.uint32, factor: tl.float64,
    i_ptr, j_ptr, r_ptr, i_b: tl.int64, j_b: tl.int64,
    first_ptr, past_ptr, row_b: tl.int64, left: tl.int32, right: tl.int32,
    table_ptr, table_b: tl.int64, table_h: tl.int64, table_n: tl.int64, table_s: tl.int64,
    order_ptr, count_ptr, list_b: tl.int64, list_h: tl.int64, width: tl.int64,
    n: tl.int32, s: tl.int32, h: tl.int32, group: tl.int32, b: tl.int32, C: tl.constexpr,
):  # fmt: skip
    """dq = scale·ds·k. Grid as in forward: b·h·⌈n / BLOCK_M⌉, the last block of a head first."""
    given = (
        scale, softcap, bias_ptr, bias_b, bias_h, bias_n, bias_s, alibi_ptr, alibi_b, seed_ptr, threshold, factor,
        i_ptr, j_ptr, r_ptr, i_b, j_b, first_ptr, past_ptr, row_b, left, right, table_ptr, table_b, table_h, table_n, table_s,
    )  # fmt: skip
    lists, sizes = (order_ptr, count_ptr, list_b, list_h, width), (n, s, h, group)
    slabs, stats, out = ((q0, q1), (k0, k1), (v0, v1), (do0, do1)), (stats_ptr, padded, b * h), (dq_ptr, dslope_ptr, broken_ptr)
    blocks, pid = tl.cdiv(n, C.BLOCK_M), tl.program_id(0)
    if C.CAREFUL:
        notes = b * h * tl.cdiv(n, C.NOTED)
        for first in range(pid, notes, tl.num_programs(0) * LOOK):
            if some_noted(broken_ptr, first, notes):
                for one in range(LOOK * (C.NOTED // C.BLOCK_M)):
                    at, block, again = noted(broken_ptr, first, one, notes, n, C.BLOCK_M, C)
                    if again:
                        dq_block(at, block, slabs, stats, out, given, lists, sizes, C)
    else:
        dq_block(pid // blocks, blocks - 1 - pid % blocks, slabs, stats, out, given, lists, sizes, C)


# ---- dk, dv: over the query rows that see a block of keys


@triton.jit
def sweep_rows(sums, own, cols, rows, b, head, options, visits, n, s, C: tl.constexpr, FULL: tl.constexpr):
    """dk / scale and dv after all visiting row blocks of one kind, of one query head. Tiles lie on their sides here, "cols
    rows", so that p and ds are already what dv and dk multiply by."""
    dk, dv = sums
    k, v, col = own
    q_desc, do_desc, stats = rows
    for t in tl.range(0, count_of(visits, FULL), num_stages=C.STAGES):
        row = tile_of(t, visits, C, FULL) * C.BLOCK_M
        i = row + tl.arange(0, C.BLOCK_M)
        q = load(q_desc, b, head, row, C.BLOCK_M, C.D0, C.D1)
        lse, total = load_stats(stats[0], stats[3], i, stats[1], stats[2])
        first, past = interval(options[3], i, n, s, C)
        do = load(do_desc, b, head, row, C.BLOCK_M, C.E0, C.E1)
        qk, dp = product(k, q, C.D1, C), product(v, do, C.E1, C)
        p, ds, seen = recompute(
            qk, dp, (lse[None, :], total[None, :]), (row, col), i[None, :], cols[:, None], first[None, :], past[None, :],
            options, n, s, C, FULL,
        )  # fmt: skip
        dv = weigh(p, do, dv, seen, C.E1, C)
        dk = weigh(ds, q, dk, seen, C.D1, C)
    return dk, dv


@triton.jit
def dk_dv_block(at, block, slabs, stats, out, given, lists, sizes, C: tl.constexpr):
    """dk and dv of one block of keys of one key head: a sum over the query heads of its group."""
    n, s, h, group = sizes
    dk_ptr, dv_ptr, broken_ptr = out
    g = h // group
    b, key_head = at // g, at % g
    cols = block * C.BLOCK_N + tl.arange(0, C.BLOCK_N)
    k = load(slabs[1], b, key_head, block * C.BLOCK_N, C.BLOCK_N, C.D0, C.D1)
    v = load(slabs[2], b, key_head, block * C.BLOCK_N, C.BLOCK_N, C.E0, C.E1)
    sums = (zeros(C.BLOCK_N, C.D0, C.D1, C.ACC), zeros(C.BLOCK_N, C.E0, C.E1, C.ACC))
    for head in range(key_head * group, key_head * group + group):
        options = options_at(b, head, given, C)
        visits = visits_of_cols(options[3], lists_at(b, head, block, lists, C, False), block * C.BLOCK_N, n, s, C)
        rows = (slabs[0], slabs[3], (stats[0], stats[1], stats[2], b * h + head))
        if C.APART:
            sums = sweep_rows(sums, (k, v, block * C.BLOCK_N), cols, rows, b, head, options, visits, n, s, C, True)
        else:
            visits = widened(visits)
        sums = sweep_rows(sums, (k, v, block * C.BLOCK_N), cols, rows, b, head, options, visits, n, s, C, False)
    dk, dv = sums
    if C.HIDES and not C.CAREFUL:
        note(broken_ptr, at, block, s, broken(dk, C.D1) | broken(dv, C.E1), C.BLOCK_N)
    offset = (b.to(tl.int64) * s + cols) * g + key_head
    store(dk_ptr, scaled(dk, tl.full([C.BLOCK_N], given[0], C.ACC), C.D1), offset * C.D, cols < s, C.D, C.D0, C.D1)
    store(dv_ptr, dv, offset * C.E, cols < s, C.E, C.E0, C.E1)


@kernel
def dk_dv_kernel(
    q0, q1, k0, k1, v0, v1, do0, do1, stats_ptr, padded: tl.int64, dk_ptr, dv_ptr, broken_ptr,
    scale: tl.float64, softcap: tl.float64, bias_ptr, bias_b: tl.int64, bias_h: tl.int64, bias_n: tl.int64, bias_s: tl.int64,
    alibi_ptr, alibi_b: tl.int64, seed_ptr, threshold: tl.uint32, factor: tl.float64,
    i_ptr, j_ptr, r_ptr, i_b: tl.int64, j_b: tl.int64,
    first_ptr, past_ptr, row_b: tl.int64, left: tl.int32, right: tl.int32,
    table_ptr, table_b: tl.int64, table_h: tl.int64, table_n: tl.int64, table_s: tl.int64,
    order_ptr, count_ptr, list_b: tl.int64, list_h: tl.int64, width: tl.int64,
    n: tl.int32, s: tl.int32, h: tl.int32, group: tl.int32, b: tl.int32, C: tl.constexpr,
):  # fmt: skip
    """dk = scale·dsᵀ·q and dv = pᵀ·do. Grid: b·g·⌈s / BLOCK_N⌉, the first block of a head first: under a causal mask it has
    most to do."""
    given = (
        scale, softcap, bias_ptr, bias_b, bias_h, bias_n, bias_s, alibi_ptr, alibi_b, seed_ptr, threshold, factor,
        i_ptr, j_ptr, r_ptr, i_b, j_b, first_ptr, past_ptr, row_b, left, right, table_ptr, table_b, table_h, table_n, table_s,
    )  # fmt: skip
    lists, sizes = (order_ptr, count_ptr, list_b, list_h, width), (n, s, h, group)
    slabs, stats, out = ((q0, q1), (k0, k1), (v0, v1), (do0, do1)), (stats_ptr, padded, b * h), (dk_ptr, dv_ptr, broken_ptr)
    blocks, pid = tl.cdiv(s, C.BLOCK_N), tl.program_id(0)
    if C.CAREFUL:
        notes = b * (h // group) * tl.cdiv(s, C.NOTED)
        for first in range(pid, notes, tl.num_programs(0) * LOOK):
            if some_noted(broken_ptr, first, notes):
                for one in range(LOOK * (C.NOTED // C.BLOCK_N)):
                    at, block, again = noted(broken_ptr, first, one, notes, s, C.BLOCK_N, C)
                    if again:
                        dk_dv_block(at, block, slabs, stats, out, given, lists, sizes, C)
    else:
        dk_dv_block(pid // blocks, pid % blocks, slabs, stats, out, given, lists, sizes, C)
